"""The script that does everything on a GPU machine: what it unpacks, and what it hands on."""

from __future__ import annotations

import argparse
import importlib.util
import lzma
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def session() -> Any:
    found = importlib.util.spec_from_file_location("gpu_session", Path(__file__).parents[1] / "tools/gpu_session.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_peers_are_unpacked_once(session: Any, tmp_path: Path) -> None:
    source, target = tmp_path / "from", tmp_path / "to"
    source.mkdir()
    (source / "fa3.so.xz").write_bytes(lzma.compress(b"a library"))
    (source / "other.so").write_bytes(b"as it is")
    assert session.unpack(source, target) == []
    assert (target / "fa3.so").read_bytes() == b"a library"
    assert (target / "other.so").read_bytes() == b"as it is"
    (target / "fa3.so").write_bytes(b"kept")
    session.unpack(source, target)
    assert (target / "fa3.so").read_bytes() == b"kept"
    assert sorted(path.name for path in target.iterdir()) == ["fa3.so", "other.so"]


def test_the_session_passes_on_what_children_need(session: Any, tmp_path: Path) -> None:
    variables = session.environment(tmp_path, (9, 0), 16)
    assert variables["FLASHINFER_CUDA_ARCH_LIST"] == "9.0a"
    assert session.environment(tmp_path, (8, 9), 16)["FLASHINFER_CUDA_ARCH_LIST"] == "8.9"
    assert variables["WAVEFILL_PEERS"] == str(tmp_path)
    assert variables["PYTHONPATH"].startswith(str(session.ROOT / "src"))
    assert "WAVEFILL_PEERS" not in session.environment(None, None, 1) or "WAVEFILL_PEERS" in session.os.environ
    options = argparse.Namespace(no_peers=False, peers="xqa", quick=True, bench=["--rows", "llama8b"])
    command = session.bench_command(options, tmp_path)
    assert command[1:7] == ["-m", "wavefill", "bench", "kernels", "--device", "cuda"]
    assert command[-5:] == ["--peers", "xqa", "--quick", "--rows", "llama8b"]
