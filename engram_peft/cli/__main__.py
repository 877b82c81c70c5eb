"""`python -m engram_peft.cli` is `engram-peft`."""

from . import main


main()
