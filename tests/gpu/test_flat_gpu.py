"""Products of a few rows (flat.py) on compute capability 9.0: against float64, in graphs, one after another."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from layer_reference import hold, product
from wavefill.backends.gpu import flat

#: Weights [N, K] in tiles of 16 rows and steps of 64 columns: odd numbers of both, more tiles than programs of a device
#: (their last round not a whole one), few programs with long rows, and those of a model.
SHAPES = ((16, 64), (48, 192), (272, 64 * 17), (16 * 265, 64 * 3), (48, 14336), (28672, 4096))
DTYPES = (torch.bfloat16, torch.float16)
OPTIONS = [dict(zip(("norm", "bias", "last"), some, strict=True))
           for some in itertools.product((False, True), (False, True), ("", "residual", "gated"))]
EPS = 1e-5


@pytest.fixture(autouse=True)
def _only_where_it_works() -> None:
    if not flat.takes(1, 16, 64, torch.bfloat16, torch.device("cuda", 0)):
        pytest.skip("products of a few rows are for compute capability 9.0, with cuda-bindings")


def poisoned(rows: int, columns: int, width: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    """Normal numbers [rows, columns] in the middle of a tensor, `width` from row to row, that is NaN elsewhere."""
    room = torch.full((rows + 2, width), torch.nan, dtype=dtype, device="cuda")
    room[1:-1, :columns] = torch.randn(rows, columns, generator=torch.Generator("cuda").manual_seed(seed),
                                       device="cuda") * scale
    return room[1:-1, :columns]


def case(rows: int, N: int, K: int, dtype: torch.dtype,
         options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `flat.linear`, with NaN around all of them."""
    weight = poisoned(N, K, K, dtype, 1, K**-0.5)
    bias = poisoned(1, N, N, dtype, 2)[0] if options["bias"] else None
    more: dict[str, Any] = {"gated": options["last"] == "gated"}
    if options["norm"]:
        more["norm"] = poisoned(1, K, K, dtype, 3)[0], EPS
    if options["last"] == "residual":
        more["residual"] = poisoned(rows, N, N + 5, dtype, 4)
    return (poisoned(rows, K, K + 8, dtype, 5), weight, bias), more


def wide(value: Any) -> Any:
    """Tensors, also within a tuple, as float64."""
    if isinstance(value, tuple):
        return tuple(map(wide, value))
    return value.double() if isinstance(value, Tensor) else value


def guarded(call: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """What `call` returns, of which each new tensor lies between rows of NaN that nothing writes."""
    rooms: list[Tensor] = []
    real = torch.empty

    def empty(rows: int, columns: int, **more: Any) -> Tensor:
        room = real(rows + 2, columns, **more).fill_(torch.nan)
        rooms.append(room)
        return room[1:-1]

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        out = call()
    assert len(rooms) == 1
    assert bool(rooms[0][[0, -1]].isnan().all())
    return out


def rows_of(N: int, K: int, dtype: torch.dtype, normed: bool) -> list[int]:
    """All numbers of rows that `flat` takes; normalised, the last ones of long rows have no room in shared memory."""
    found = [rows for rows in range(1, flat.MOST_ROWS + 1)
             if flat.takes(rows, N, K, dtype, torch.device("cuda", 0), normed=normed)]
    assert found == list(range(1, len(found) + 1))
    assert len(found) == flat.MOST_ROWS or (normed and K > 13000)
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=lambda some: " ".join(
    [*(name for name in ("norm", "bias") if some[name]), some["last"]]) or "plain")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_it_is_as_near_float64_as_pytorch(N: int, K: int, dtype: torch.dtype, options: dict[str, Any],
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """With any number of rows; and captured, the same bits."""
    for rows in rows_of(N, K, dtype, options["norm"]):
        args, more = case(rows, N, K, dtype, options)
        got = guarded(lambda args=args, more=more: flat.linear(*args, **more), monkeypatch)  # type: ignore[misc]
        assert got.dtype is dtype
        exact = wide(args), {name: wide(value) for name, value in more.items()}
        hold(got, lambda wide, args=args, more=more, exact=exact: (  # type: ignore[misc]
            product(*exact[0], **exact[1]) if wide else product(*args, **more)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = flat.linear(*args, **more)
        again.fill_(torch.nan)
        graph.replay()
        assert torch.equal(again, got)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_see_each_other(dtype: torch.dtype) -> None:
    """A row has the same bits alone as among others."""
    (x, weight, bias), more = case(flat.MOST_ROWS, 48, 64 * 17, dtype, {"norm": True, "bias": True, "last": "gated"})
    together = flat.linear(x, weight, bias, **more)
    for row in range(flat.MOST_ROWS):
        assert torch.equal(flat.linear(x[row : row + 1], weight, bias, **more)[0], together[row]), row


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize(("hidden", "inner"), [(64, 192), (4096, 14336 // 2)])
def test_each_call_waits_for_the_one_before(hidden: int, inner: int, rows: int) -> None:
    """100 pairs, each of the result of the last and of memory that calls before had: in a graph and on a stream the
    bits that calls have which are waited for one by one."""
    dtype = torch.bfloat16
    (x, up, _), more = case(rows, 2 * inner, hidden, dtype, {"norm": True, "bias": False, "last": "gated"})
    down, start = poisoned(hidden, inner, inner, dtype, 9, inner**-0.5), x.contiguous()

    def chain(x: Tensor, after: Callable[[], None] = lambda: None) -> Tensor:
        for _ in range(100):
            within = flat.linear(x, up, **more)
            after()
            x = flat.linear(within, down, residual=x)
            after()
        return x

    chain(start)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(start)
    for seed in range(3):
        start.copy_(poisoned(rows, hidden, hidden, dtype, seed))
        expected = chain(start, torch.cuda.synchronize)
        assert bool(expected.isfinite().all())
        assert torch.equal(chain(start), expected)
        graph.replay()
        assert torch.equal(out, expected)


def test_what_it_does_not_take() -> None:
    device = torch.device("cuda", 0)
    assert flat.takes(8, 16, 64, torch.float16, device)
    for rows, N, K, dtype, where in [
        (0, 16, 64, torch.float16, device), (9, 16, 64, torch.float16, device), (1, 24, 64, torch.float16, device),
        (1, 16, 96, torch.float16, device), (1, 16, 64, torch.float32, device),
        (1, 16, 64, torch.float16, torch.device("cpu")),
    ]:
        assert not flat.takes(rows, N, K, dtype, where)
