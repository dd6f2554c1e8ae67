"""What a user sees when something goes wrong: one message and an exit code, never a traceback.

Exit codes: 2 for a mistake in the request or something missing on the machine, 130 for Ctrl-C, 1 for a fault of
wavefill itself (WAVEFILL_DEBUG=1 then shows the traceback).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any

import typer
from typer.core import TyperGroup

from wavefill import env
from wavefill.spec import WavefillError

#: The extra that brings a module which the core install leaves out.
_EXTRAS = {"torch": "torch", "transformers": "transformers", "gguf": "transformers", "safetensors": "transformers",
           "tokenizers": "transformers", "accelerate": "transformers", "matplotlib": "bench"}
#: Where the context of a command keeps its options by parameter.
_OPTIONS = "wavefill.options"


@contextmanager
def plain_errors(options: Mapping[str, str]) -> Iterator[None]:
    """Turn errors of the block into a message on stderr and `typer.Exit`.

    options: of the command by parameter, such as {"page_size": "--page-size"}; filled while the block runs.
    """
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from None
    except (typer.Abort, BrokenPipeError):  # a reader that has seen enough, as in `| head`, is no error to report
        raise
    except Exception as error:
        if hasattr(error, "exit_code"):  # the command line library's own: usage errors and Exit
            raise
        message = user_message(error, options)
        if message is not None:
            typer.echo(f"error: {message}", err=True)
            raise typer.Exit(2) from None
        if env.flag("WAVEFILL_DEBUG"):
            raise
        typer.echo(f"error: unexpected {type(error).__name__}: {error}\n"
                   "This is a fault of wavefill. WAVEFILL_DEBUG=1 shows where it happened.", err=True)
        raise typer.Exit(1) from None


def user_message(error: Exception, options: Mapping[str, str]) -> str | None:
    """The message for an error that a user can do something about, or None for any other.

    One about a parameter of the library, such as HQ, names the option that it came by.
    """
    if isinstance(error, WavefillError):
        parameter, colon, rest = str(error).partition(": ")
        return options.get(parameter.lower(), parameter) + colon + rest
    if isinstance(error, ModuleNotFoundError):
        module = (error.name or "").partition(".")[0]
        if module not in _EXTRAS:
            return None
        return f"this command needs {module}, which is not installed. Run: pip install 'wavefill[{_EXTRAS[module]}]'"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # torch's is a RuntimeError
        return "not enough memory for this request. Try a shorter context or a smaller row."
    return None


class Commands(TyperGroup):
    """The group of all commands, with `plain_errors` around each, whose messages name options as they are typed."""

    def invoke(self, ctx: Any) -> Any:
        with plain_errors(ctx.meta.setdefault(_OPTIONS, {})):
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        found = super().resolve_command(ctx, args)
        command: Any
        _, command, rest = found
        while rest and rest[0] in getattr(command, "commands", ()):
            command, rest = command.commands[rest[0]], rest[1:]
        if command is not None:
            ctx.meta.setdefault(_OPTIONS, {}).update({option.name: option.opts[0] for option in command.params})
        return found


def run(app: typer.Typer) -> None:
    """Run the command line; Ctrl-C while modules are still loading counts as well."""
    _expect_little_of_the_terminal()
    try:
        app()
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)


def _expect_little_of_the_terminal() -> None:
    """A character that the output's encoding lacks must not stop a command, nor a width of 0, which means unknown."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    for name in ("COLUMNS", "LINES"):
        if os.environ.get(name, "").strip("0 ") == "":
            os.environ.pop(name, None)
