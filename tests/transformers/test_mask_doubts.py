"""Decoding steps whose mask is looked at late: a wrong guess of the mask never shows in a result.

Without a GPU a graph's replay is its decoder's forward run once more on the graph's buffers.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers.generation")

import torch
from tiny import (
    CACHE,
    fresh,
    one_thread,  # noqa: F401
    padded,
    plain,
    stock,
    tokens,
)
from torch import Tensor

from wavefill import InvalidArgument
from wavefill.integrations.transformers import ahead, enable, graphs, hooks, storage
from wavefill.integrations.transformers.graphs import Graph, GraphedForward
from wavefill.integrations.transformers.rows import Rows
from wavefill.integrations.transformers.step import Step

pytestmark = pytest.mark.transformers


class _Event:
    def record(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...


class _Replayed:
    """Stands in for a CUDA graph: `captured` is the call that it repeats."""

    captured: Any = None
    replays = 0

    def replay(self) -> None:
        _Replayed.replays += 1
        self.captured()


class _NoGPU:
    """torch, with what `graphs` takes of CUDA stood in for."""

    cuda = SimpleNamespace(
        CUDAGraph=_Replayed, graph=lambda graph, **how: nullcontext(), Event=_Event, set_stream=lambda stream: None,
        Stream=lambda device, priority=0: SimpleNamespace(
            wait_event=lambda event: None, wait_stream=lambda other: None),
        stream=lambda stream: nullcontext(), current_stream=lambda device=None: None, device=lambda d: nullcontext(),
        is_current_stream_capturing=lambda: False,
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, pin_memory: bool = False, **how: Any) -> Tensor:
        return torch.zeros(*size, **how)


class _Graphed(GraphedForward):
    def _is_for_a_graph(self, step: Step, kwargs: dict[str, Any]) -> bool:
        return self._reason is None and not step.is_prefill and step.is_decode


@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny Llama whose decoding steps replay."""
    on_buffers = Graph._on_buffers

    def recorded(self: Graph, step: Step, kwargs: dict[str, Any]) -> None:
        on_buffers(self, step, kwargs)
        _Replayed.captured = lambda _: on_buffers(self, step, kwargs)

    for module in (ahead, graphs, storage):
        monkeypatch.setattr(module, "torch", _NoGPU())
    monkeypatch.setattr(Graph, "_on_buffers", recorded)
    monkeypatch.setattr(_Replayed, "replays", 0)
    model = enable(fresh("llama"))
    model.model.__dict__["forward"] = _Graphed(model.model)
    ahead.attach(model, graphs.begin_next)
    return model


@pytest.fixture
def confirmed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What came of each doubt."""
    seen: list[bool] = []
    kept = Rows.confirms

    def noted(self: Rows, step: Step) -> bool:
        doubted, result = step.doubt is not None, kept(self, step)
        if doubted:
            seen.append(result)
        return result

    monkeypatch.setattr(Rows, "confirms", noted)
    return seen


@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("padding", [(0, 0, 0), (5, 0, 1)], ids=["full", "padded"])
def test_masks_of_generate_are_guessed(
    replaying: Any, confirmed: list[bool], padding: tuple[int, ...], mode: dict[str, Any]
) -> None:
    batch = padded(3, 19, padding)
    assert torch.equal(tokens(replaying, batch, 60, **mode), tokens(stock("llama"), batch, 60, **mode))
    # From 5.24 on generate passes no mask where all tokens are real.
    assert confirmed in ([True] * 59, [] if not any(padding) else None)
    # The first step over pages, which may move once, runs as it is.
    assert _Replayed.replays in (57, 58)


def steps(model: Any, ids: Tensor, masks: list[Tensor | None]) -> Tensor:
    """Logits of the prompt's last position and of one token after another, each with its mask."""
    cache, logits, start = None, [], 0
    with torch.inference_mode():
        for i, mask in enumerate(masks):
            stop = ids.shape[1] - len(masks) + 1 + i
            positions = torch.arange(start, stop)[None].expand(len(ids), -1)
            out = model(ids[:, start:stop], attention_mask=mask, position_ids=positions, use_cache=True,
                        **{CACHE: cache})
            cache, start = out[CACHE], stop
            logits.append(out.logits[:, -1])
    return torch.stack(logits)


@pytest.mark.parametrize("first", [None, (5, 0, 1)], ids=["full", "padded"])
@pytest.mark.parametrize("change", ["forgotten", "new token is padding", "both"])
def test_a_wrong_guess_is_forgotten(
    replaying: Any, confirmed: list[bool], change: str, first: tuple[int, ...] | None
) -> None:
    ids, whole = plain(27, 3), torch.ones(3, 27, dtype=torch.long)
    if first is not None:
        whole[:, :19] = padded(3, 19, first)["attention_mask"]
    masks: list[Tensor | None] = []
    for stop in range(19, 28):
        mask = whole[:, :stop].clone()
        if stop >= 23 and change != "new token is padding":
            mask[0, 6:9] = mask[2, 21] = 0
        if stop >= 24 and change != "forgotten":
            mask[1, 23] = 0
        masks.append(mask)
    torch.testing.assert_close(steps(replaying, ids, masks), steps(stock("llama"), ids, masks), rtol=3e-5, atol=3e-5)
    assert confirmed.count(False) >= 1
    assert confirmed[:2] == [True, True]
    assert _Replayed.replays >= 3


def test_what_a_late_look_refuses_leaves_the_cache_as_it_was(replaying: Any) -> None:
    batch = padded(3, 19, (5, 0, 1))
    ids, mask = plain(22, 3), torch.cat([batch["attention_mask"], torch.ones(3, 3, dtype=torch.long)], 1)
    with torch.inference_mode():
        cache = replaying(ids[:, :19], attention_mask=mask[:, :19], use_cache=True)[CACHE]
        rows = cache.layers[0].rows
        for stop in (20, 21):
            replaying(ids[:, stop - 1 : stop], attention_mask=mask[:, :stop], use_cache=True, **{CACHE: cache})
        held, free = rows.held, rows.pages.free_pages
        for wrong in (torch.ones(3, 22), torch.ones(3, 21), None):
            with pytest.raises(InvalidArgument, match="attention_mask: must be"):
                replaying(ids[:, 21:], attention_mask=wrong, use_cache=True, **{CACHE: cache})
            assert rows.held is held
            assert rows.pages.free_pages == free
        got = replaying(ids[:, 21:], attention_mask=mask, use_cache=True, **{CACHE: cache}).logits
        other = enable(fresh("llama"))
        kept = other(ids[:, :21], attention_mask=mask[:, :21], use_cache=True)[CACHE]
        want = other(ids[:, 21:], attention_mask=mask, use_cache=True, **{CACHE: kept}).logits
    torch.testing.assert_close(got, want, rtol=3e-5, atol=3e-5)


def test_layers_that_run_as_they_are_look_first(monkeypatch: pytest.MonkeyPatch, confirmed: list[bool]) -> None:
    """Where a step in doubt comes to be written by the layers themselves."""
    deferring = SimpleNamespace(may_replay=lambda rows, q_len: True, storage=None)
    monkeypatch.setattr(hooks, "graphed", lambda decoder: deferring)
    ids, whole = plain(27, 3), torch.ones(3, 27, dtype=torch.long)
    masks: list[Tensor | None] = [whole[:, :stop].clone() for stop in range(19, 28)]
    for mask in masks[4:]:
        assert mask is not None
        mask[0, :7] = 0
    model = enable(fresh("llama"))
    torch.testing.assert_close(steps(model, ids, masks), steps(stock("llama"), ids, masks), rtol=3e-5, atol=3e-5)
    assert confirmed == [True] * 3 + [False] + [True] * 4


@pytest.mark.parametrize("mode", [{}, {"do_sample": True}], ids=["greedy", "sampling"])
def test_generate_takes_the_steps_that_began_ahead(
    replaying: Any, monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any]
) -> None:
    begun, kept = [], Graph.begin

    def noted(self: Graph, rows: Rows, tokens: Tensor) -> Any:
        begun.append(kept(self, rows, tokens))
        return begun[-1]

    monkeypatch.setattr(Graph, "begin", noted)
    batch, found = padded(3, 19, (5, 0, 1)), []
    for model in (replaying, stock("llama")):
        torch.manual_seed(3)
        found.append(tokens(model, batch, 60, **mode))
    assert torch.equal(*found)
    assert all(one.is_taken for one in begun if one is not None)
    assert sum(one is not None for one in begun) in (55, 56, 57)


@pytest.mark.parametrize("wrong", ["nothing", "token", "position", "mask"])
def test_a_step_that_began_with_something_else_runs_anew(replaying: Any, wrong: str) -> None:
    ids, want = plain(29, 2), []
    for model in (replaying, stock("llama")):
        cache, logits = None, []
        with torch.inference_mode():
            for i in range(20, 29):
                start, position = (0, 0) if cache is None else (i - 1, i - 1 + 7 * (wrong == "position" and i == 26))
                positions = torch.arange(position, position + i - start)[None].expand(2, -1)
                mask = torch.ones(2, i, dtype=torch.long)
                mask[0, :4] = int(wrong != "mask" or i < 26)
                out = model(ids[:, start:i], position_ids=positions, attention_mask=mask, use_cache=True,
                            **{CACHE: cache})
                cache = out[CACHE]
                logits.append(out.logits[:, -1])
                if model is replaying and i < 28:
                    graphs.begin_next(model, ids[:, i : i + 1] + (wrong == "token"))
        want.append(torch.stack(logits))
    torch.testing.assert_close(*want, rtol=3e-5, atol=3e-5)
