"""The program: its name, its version, and how it fails: one line on stderr and an exit code."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup


class BadInput(ValueError):
    """What was given cannot be used; the message says what to do."""


class OneLineErrors(TyperGroup):
    """Commands whose usage errors are one line on stderr, where typer would draw a box."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except typer.Abort:
            code = 130
        except Exception as error:
            # typer's and click's usage errors, which have no common base class that every version exports
            if not hasattr(error, "format_message"):
                raise
            context = getattr(error, "ctx", None)
            hint = "" if context is None else f" See `{context.command_path} --help`."
            typer.echo(f"Error: {_sentence(error.format_message())}{hint}", err=True)
            code = getattr(error, "exit_code", 2)
        sys.exit(code if isinstance(code, int) else 0)


def examples(*commands: str) -> str:
    return "\n\n".join(["Examples:", *(f"  engram-peft {command}" for command in commands)])


TYPER_OPTIONS: dict[str, Any] = {"rich_markup_mode": "rich", "pretty_exceptions_enable": False}
app = typer.Typer(
    name="engram-peft",
    cls=OneLineErrors,
    help="Make language models forget, in closed form, and carry what was taken out as a PEFT adapter.",
    epilog=examples(
        "unlearn --model NAME --forget forget.jsonl --retain retain.jsonl --output adapter", "inspect adapter"
    ),
    **TYPER_OPTIONS,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(f"engram-peft {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    help_if_alone(context)


def help_if_alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@contextmanager
def working(as_json: bool, quiet: bool, debug: bool) -> Iterator[None]:
    """Progress bars as wanted, stdout kept for the JSON document, and a failure as one line and an exit code."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    if as_json or quiet:
        logging.disable_progress_bar()
    try:
        with contextlib.ExitStack() as stack:
            if as_json:
                stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            if not debug:
                stack.enter_context(warnings.catch_warnings())
                # what other libraries will change is no business of who runs a command
                warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft|torch)\b")
            yield
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if debug:
            raise
        typer.echo(f"Error: {_message(error)}", err=True)
        raise typer.Exit(2 if _is_refusal(error) else 1) from None
    finally:
        if bars:
            logging.enable_progress_bar()


def _is_refusal(error: Exception) -> bool:
    """Whether what was given was refused: by a `raise` of the errors that are for that, and not by an operation gone wrong."""
    line = traceback.extract_tb(error.__traceback__)[-1].line or "raise"
    return isinstance(error, ValueError | TypeError) and line.startswith("raise")


def _message(error: Exception) -> str:
    """What went wrong, in one line and in the words of the command line."""
    text = _sentence(str(error))
    if not _is_refusal(error):
        text = f"{type(error).__name__}: {text} "
        text += "Lower --batch-size or --max-length." if "out of memory" in text else "--debug shows where."
    return re.sub(r"`(\w+)(?:=(\w+))?`", _as_option, text)


def _as_option(match: re.Match[str]) -> str:
    """A parameter of the library as the option that sets it."""
    name, value = match.groups()
    option = {"layers_to_transform": "layers"}.get(name, name)
    if option not in _OPTION_NAMES:
        return match.group()
    return "--" + option.replace("_", "-") + ("" if value in (None, "True") else f" {value}")


_OPTION_NAMES = {
    "alpha", "batch_size", "data", "forget", "forget_probability", "generate", "head_sizes", "layers", "max_length", "placement",
    "replacement", "retain", "retain_weight", "samples", "scales", "suite", "target_modules", "tensor", "token_position", "untie",
}  # fmt: skip


def _sentence(text: str) -> str:
    """A text on one line, with a full stop."""
    return " ".join(text.split()).rstrip(".") + "."
