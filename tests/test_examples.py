"""Every script of examples/ runs and keeps its own promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_example(script: Path, tmp_path: Path) -> None:
    if "transformers" in script.stem:
        pytest.importorskip("transformers")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, text=True, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.strip(), "an example shows something"


def test_there_are_examples() -> None:
    assert {path.stem for path in EXAMPLES} >= {"decode_paged", "merge_shared_prefix", "explain_wave",
                                               "transformers_generate"}
