"""Calls on a GPU like one that passed before, and the memory that the library keeps for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_inputs import Problem, hold, problem

import wavefill
from wavefill.backends import gpu
from wavefill.backends.gpu import memory


@pytest.mark.parametrize("shape", [
    {"lens": [700], "HQ": 32, "KH": 8, "D": 128}, {"lens": [900], "HQ": 8, "KH": 1, "D": 128},
    {"lens": [130, 1, 0, 333] * 9, "HQ": 8, "KH": 2, "D": 64},
], ids=str)
@pytest.mark.parametrize("schedule", ["auto", "invariant"])
def test_calls_like_one_that_passed(shape: dict[str, Any], schedule: str) -> None:
    """They go past the dispatcher: other lengths, other memory, no LSE, no output of the caller's."""
    p = problem(**shape)
    first = p.run(schedule=schedule)
    for _ in range(3):
        again = wavefill.decode_attention(p.q, p.k, p.v, p.lens, p.table, schedule=schedule)
        assert torch.equal(again, first[0])
        assert all(torch.equal(a, b) for a, b in zip(p.run(schedule=schedule), first, strict=True))
    q, lens = torch.randn_like(p.q), (p.lens // 2).contiguous()
    other = Problem(q, p.k, p.v, lens, p.table)
    hold(other, other.run(schedule=schedule))


def test_streams_have_workspaces_of_their_own() -> None:
    p = problem([5000, 3, 700], 32, 8, 128)
    first = p.run()
    streams = [torch.cuda.Stream() for _ in range(4)]
    found: list[Any] = []
    torch.cuda.synchronize()
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(wavefill.decode_attention(p.q, p.k, p.v, p.lens, p.table, return_lse=True))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for result in found for a, b in zip(result, first, strict=True))
    raw = [stream.cuda_stream for stream in streams]
    if gpu.is_hopper(0):
        assert len({memory.workspace(0, stream, 1) for stream in raw}) == 4
        assert memory.workspace(0, raw[0], memory.LEAST_WORKSPACE + 1) != memory.workspace(0, raw[1], 1)
        assert memory.workspace(0, raw[0], memory.LARGEST_WORKSPACE + 1) == 0
