"""Other formats, one module each."""
