"""Every cell of the matrix of options on a GPU: eager, under torch.compile and in a captured graph.

A test is what one set of kernels serves. 16-bit caches have head size 64, which on compute capability 9.0 takes its own
kernels; float32, and 16-bit ones of head sizes 24 and 16, take the portable one.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import pytest
import torch
from test_several_gpu import on_gpu, run
from torch import Tensor

import wavefill
from helpers import Case, make_case
from wavefill import scores
from wavefill.scores import AXES, Cell

#: Keys and query tokens of each request, by the words of the axis. Chunks are enough for `stream_k` to deal out whole
#: units or equal pieces.
BATCHES: dict[str, tuple[list[int], list[int] | None]] = {
    "1": ([300, 0, 700, 65], None),
    "draft": ([300, 5, 700, 65, 3], [4, 2, 0, 16, 3]),
    "chunk": ([700, 33], [260, 1]),
}
#: What the kernels of a test have in common, and what changes none of them.
KERNELS = ("dtype", "sinks", "softcap", "alibi_slopes", "mask", "schedule")
WITHIN = ("window", "q_len")
GROUPS = [dict(zip(KERNELS, values, strict=True)) for values in itertools.product(*(AXES[name] for name in KERNELS))]


@dataclass
class Placed:
    """A case, its tensors on the GPU, and how it is called."""

    here: Case
    schedule: str
    most: int | None

    @cached_property
    def there(self) -> Case:
        return on_gpu(self.here)

    @cached_property
    def out(self) -> Tensor:
        return torch.empty(self.here.out_shape, dtype=self.here.q.dtype, device=self.there.q.device)

    def __call__(self, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        bound = {} if self.most is None else {"max_q_len": self.most}
        return run(self.there, out, schedule=self.schedule, **bound)

    def check(self, out: Tensor, lse: Tensor) -> None:
        self.here.expected.check(out.cpu(), lse.cpu())


def placed(cell: Cell, **sizes: int) -> Placed:
    lens, q_lens = BATCHES[cell.q_len]
    case = make_case(lens, q_lens=q_lens, HQ=6, KH=2, dtype=getattr(torch, cell.dtype), page_size=16, sinks=cell.sinks,
                     alibi_slopes=cell.alibi_slopes, mask=cell.mask and q_lens is not None,
                     softcap=1.5 if cell.softcap else None, window=100 if cell.window else None, **sizes)
    return Placed(case, cell.schedule, None if q_lens is None else max(q_lens))


def eager(calls: list[Placed]) -> None:
    for call in calls:
        call.check(*call(call.out.fill_(math.nan)))


def compiled(calls: list[Placed]) -> None:
    for call in calls:
        call.there  # noqa: B018 - made before it is traced
    torch.compiler.reset()
    together = torch.compile(lambda: [call() for call in calls], fullgraph=True, backend="aot_eager", dynamic=False)
    for call, result in zip(calls, together(), strict=True):
        call.check(*result)


def graph(calls: list[Placed]) -> None:
    """One graph of all, captured with no keys and no query tokens, and replayed with them."""
    lengths = [tensor for call in calls for tensor in (call.there.seq_lens, call.there.cu_seqlens_q)
               if tensor is not None]
    now = [tensor.clone() for tensor in lengths]
    for tensor in lengths:
        tensor.zero_()
    for call in calls:
        call(call.out)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = [call(call.out) for call in calls]
    for tensor, values in zip(lengths, now, strict=True):
        tensor.copy_(values)
    for call in calls:
        call.out.fill_(math.nan)
    captured.replay()
    for call, result in zip(calls, results, strict=True):
        call.check(*result)


RUNS = {"eager": eager, "compiled": compiled, "graph": graph}


def hold(cells: list[Cell], **sizes: int) -> None:
    """Holds each cell to its answer, or to its refusal."""
    calls: dict[str, list[Placed]] = {name: [] for name in RUNS}
    cases: dict[Any, Placed] = {}
    for cell in cells:
        words, key = scores.refusal(cell, "cuda"), replace(cell, run="")
        call = cases[key] = cases.get(key) or placed(cell, **sizes)
        if words is None:
            calls[cell.run].append(call)
        else:
            with pytest.raises(TypeError, match=words):
                wavefill.decode_attention(*call.there.tensors(), mask=torch.ones(4, 1).int())  # type: ignore[call-overload]
    for name, served in calls.items():
        RUNS[name](served)


def name_of(group: dict[str, Any]) -> str:
    return "-".join([group["dtype"], group["schedule"], *(name for name, on in group.items() if on is True)])


def cells_of(group: dict[str, Any]) -> list[Cell]:
    return [cell for cell in scores.cells("cuda") if group.items() <= asdict(cell).items()]


@pytest.mark.parametrize("group", GROUPS, ids=name_of)
def test_every_cell_is_right_or_refused_by_name(group: dict[str, Any]) -> None:
    cells = cells_of(group)
    assert len(cells) == math.prod(len(AXES[name]) for name in WITHIN) * len(RUNS)
    hold(cells, **({"D": 24, "DV": 16} if group["dtype"] == "float32" else {"D": 64}))


@pytest.mark.parametrize("group", [
    group for group in GROUPS if group["dtype"] != "float32" and len({group[name] for name in KERNELS[1:5]}) == 1
], ids=name_of)
def test_the_portable_kernel_with_no_option_and_with_all(group: dict[str, Any]) -> None:
    hold(cells_of(group), D=24, DV=16)
