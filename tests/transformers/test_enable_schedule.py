"""`enable(model, schedule=...)`: what attention runs by, in prompts and steps, and until when."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

pytest.importorskip("transformers.generation")

import torch
from tiny import fresh, one_thread, padded, plain, stock, tokens  # noqa: F401

from wavefill import Fixed, InvalidArgument, Invariant, StreamK
from wavefill.backends import cpu
from wavefill.integrations.transformers import disable, enable

pytestmark = pytest.mark.transformers


@pytest.fixture
def schedules(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those of the attention calls."""
    seen: list[Any] = []
    kept = cpu.attention

    def attention(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["schedule"])
        return kept(*args, **kwargs)

    monkeypatch.setattr(cpu, "attention", attention)
    return seen


@pytest.mark.parametrize("padding", [(0, 0, 0), (5, 0, 1)], ids=["full", "padded"])
@pytest.mark.parametrize(("given", "taken"), [
    ("invariant", Invariant()), (Invariant(chunk=64), Invariant(chunk=64)), ("fixed", Fixed()),
    ("stream_k", StreamK())])
def test_prompts_and_steps_run_by_it(schedules: list[Any], given: Any, taken: Any, padding: tuple[int, ...]) -> None:
    model, batch = enable(fresh("llama"), schedule=given), padded(3, 19, padding)
    assert torch.equal(tokens(model, batch, 12), tokens(stock("llama"), batch, 12))
    assert schedules == [taken] * 12 * model.config.num_hidden_layers


def test_until_enabled_otherwise_or_disabled(schedules: list[Any]) -> None:
    model, batch = enable(fresh("llama"), schedule="invariant"), padded(1, 9, (0,))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        tokens(other, batch, 3)
    assert set(schedules) == {Invariant()}
    schedules.clear()
    tokens(enable(model), batch, 3)
    assert schedules
    assert Invariant() not in schedules
    disable(enable(model, schedule="invariant"))
    schedules.clear()
    tokens(enable(model), batch, 3)
    assert Invariant() not in schedules


def test_what_is_no_schedule_is_refused_before_anything_changes() -> None:
    model = fresh("llama")
    with pytest.raises(InvalidArgument, match="schedule"):
        enable(model, schedule="quickest")
    assert model.config._attn_implementation == "sdpa"


def test_continuous_batching_refuses_it() -> None:
    model = enable(fresh("llama"), schedule="invariant")
    with pytest.raises(InvalidArgument, match="schedule: must be \"auto\" in continuous batching; got Invariant"):
        model.generate_batch([plain(5, 1)[0].tolist()])
