"""Shared by the commands: JSON on stdout, progress on stderr, files of results, and the text of --prompt."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from wavefill.spec import invalid

#: `--threads` of the commands that measure. Past the limit starting them would end the process, not a sentence.
Threads = Annotated[int | None, typer.Option(
    min=1, max=1024, help="Threads for everything; torch's own number if not given.")]
#: Called with a description and the share done, 0 to 1.
Report = Callable[[str, float], None]


def print_json(value: Any) -> None:
    """Write `value` to stdout as JSON, and nothing else."""
    typer.echo(json.dumps(value, indent=2, default=str))


def save_json(path: Path, value: Any) -> None:
    """Write `value` to `path`, that of --output, as JSON, making the folder where it is missing."""
    with written("--output", path):
        path.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")


@contextmanager
def written(option: str, path: Path) -> Iterator[None]:
    """For a block that writes `path`: makes the folder where it is missing; a failure names the option."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise invalid(option, "must be a file that can be written", f"{str(path)!r} ({error.strerror or error})",
                      "Choose another.") from error


def read_prompt(prompt: str | None) -> str | None:
    """The text of --prompt: of a file, or of standard input for "-"; None without it."""
    if prompt is None:
        return None
    try:
        raw = sys.stdin.buffer.read() if prompt == "-" else Path(os.path.expanduser(prompt)).read_bytes()
    except OSError as error:
        raise invalid("--prompt", "must be a text file, or - for standard input",
                      f"{prompt!r} ({error.strerror or error})", "Check the path.") from error
    try:
        return raw.decode("utf-8").removesuffix("\n")  # the end of the last line is no part of a question
    except UnicodeDecodeError as error:
        raise invalid("--prompt", "must be UTF-8 text", f"{prompt} ({error.reason} at byte {error.start})",
                      "Convert the file.") from None


@contextmanager
def progress(quiet: bool) -> Iterator[Report]:
    """A progress bar on stderr, given as a function of description and share done.

    There is none when `quiet` or when stderr is not a terminal. The bar disappears when the block ends.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda description, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"),
               TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)

        def report(description: str, share: float) -> None:
            bar.update(task, description=description, completed=min(max(share, 0.0), 1.0))

        yield report
