"""The command line: `wavefill generate | bench | explain | advise | doctor`.

A file a command, each a thin layer over the library. Nothing here loads torch before a command needs it.
"""

from __future__ import annotations

from typing import Annotated

import typer

from wavefill.cli import _errors, advise, bench, doctor, explain, generate

__all__ = ["app", "main"]

app = typer.Typer(cls=_errors.Commands, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False,
                  context_settings={"help_option_names": ["-h", "--help"]})


def _version(wanted: bool) -> None:
    if wanted:
        from wavefill import __version__

        typer.echo(f"wavefill {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True,
                                          help="Print the version and leave.")] = False,
) -> None:
    """Long-context LLM decoding as fast as the memory bus allows."""


app.command()(generate.generate)
app.add_typer(bench.app, name="bench")
app.command()(explain.explain)
app.command()(advise.advise)
app.command()(doctor.doctor)


def main() -> None:
    """Entry point of the `wavefill` program."""
    _errors.run(app)
