"""The command line, `engram-peft`: a thin door to the library.

A command reads its input, calls the library, and prints what came back: as text, or with `--json` as one JSON document, and then
nothing else is on stdout. Exit codes: 0 is success, 1 a failure while working, 2 input that cannot be used. Errors are one line
on stderr; `--debug` shows where they come from. Files and folders get their names when they are complete.

torch and transformers are imported inside the commands, so that this module has nothing to wait for.
"""

from . import unlearning, adapters, statistics, tables  # noqa: F401, I001 (they add their commands, in the order of `--help`)
from .application import app


def main() -> None:
    """Entry point of `engram-peft`."""
    app()
