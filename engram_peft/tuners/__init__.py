"""The PEFT side: one folder a method, each in PEFT's own shape."""
