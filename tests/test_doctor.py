"""`wavefill doctor` tells what is there, gives reasons for what is not, and never fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from wavefill import cli
from wavefill.cli import doctor

runner = CliRunner()
SECTIONS = ["wavefill", "versions", "machine", "CPU backend", "GPUs", "transformers integration",
            "smollm2 (for wavefill generate)", "cache", "environment variables"]


def report(*arguments: str) -> dict[str, dict[str, object]]:
    result = runner.invoke(cli.app, ["doctor", "--json", *arguments])
    assert result.exit_code == 0
    found: dict[str, dict[str, object]] = json.loads(result.output)
    return found


def test_json_has_every_section() -> None:
    found = report()
    assert list(found) == SECTIONS
    assert found["CPU backend"]["usable"] == "yes"
    assert found["CPU backend"]["kernel chosen"] in found["CPU backend"]["kernels usable here"]  # type: ignore[operator]
    assert found["versions"]["python"]
    if not torch.cuda.is_available():
        assert found["GPUs"] == {"devices": "none that torch can use"}


def test_text_has_every_section_and_variable() -> None:
    result = runner.invoke(cli.app, ["doctor"])
    assert result.exit_code == 0
    for words in (*SECTIONS, "WAVEFILL_CACHE_DIR"):
        assert words in result.output


@pytest.mark.parametrize("title", SECTIONS)
def test_a_probe_that_breaks_is_a_value(monkeypatch: pytest.MonkeyPatch, title: str) -> None:
    def broken() -> dict[str, object]:
        raise OSError("the disk is on fire")

    monkeypatch.setitem(doctor.PROBES, title, broken)
    found = report()
    assert list(found) == SECTIONS
    assert found[title] == {"failed": "OSError: the disk is on fire"}


def test_measure_adds_the_read_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wavefill.bench.timing.ROTATED_BYTES", 1 << 20)
    assert "GB/s" in str(report("--measure")["measured"]["read bandwidth"])


def test_bad_and_misspelt_variables_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WAVEFILL_DEBUG", "maybe")
    monkeypatch.setenv("WAVEFILL_CACHE_DIRECTORY", str(tmp_path))
    found = report()["environment variables"]
    assert "must be 0 or 1" in str(found["WAVEFILL_DEBUG"])
    assert "misspelt" in str(found["WAVEFILL_CACHE_DIRECTORY"])


def test_converted_models_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WAVEFILL_CACHE_DIR", str(tmp_path))
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "model.safetensors").write_bytes(bytes(3 << 20))
    (tmp_path / "models" / ".unfinished-x").mkdir()
    found = report()["cache"]
    assert found == {"folder": str(tmp_path), "exists": True, "models/tiny": "3 MiB"}


def test_it_runs_on_the_core_install() -> None:
    """With torch and its company missing, each section still says what it can and what to install."""
    missing = ("torch", "transformers", "gguf", "safetensors", "tokenizers")
    code = (f"import sys; sys.modules.update(dict.fromkeys({missing})); "
            "sys.argv[0] = 'wavefill'; from wavefill.cli import main; main()")
    for form in ([], ["--json"]):
        done = subprocess.run([sys.executable, "-c", code, "doctor", *form], capture_output=True, text=True,
                              timeout=300, check=False, env={**os.environ})
        assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found) == SECTIONS
    assert "pip install 'wavefill[torch]'" in found["CPU backend"]["usable"]
    assert found["CPU backend"]["kernel chosen"]
    assert "pip install 'wavefill[transformers]'" in found["transformers integration"]["usable"]
    assert not any("failed" in facts for facts in found.values())
