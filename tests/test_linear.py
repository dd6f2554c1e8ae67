"""`flat_linear` against float64, on every instruction set of this machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import wavefill
from helpers import DTYPES, cpu_isas, name_of, using_isa
from wavefill import InvalidArgument, InvalidType

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)


def guarded(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Random numbers in a wider buffer of NaN: what is read past a row's end shows in the result."""
    buffer = torch.full((rows + 2, columns + 37), torch.nan, dtype=dtype)
    buffer[1:-1, 5 : 5 + columns] = torch.randn(rows, columns)
    return buffer[1:-1, 5 : 5 + columns]


def check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """At most twice PyTorch's error on the row, plus a unit of the output's dtype and of the float32 sums."""
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    theirs = torch.nn.functional.linear(x, weight, bias).double()
    mass = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
    bound = 2 * (theirs - expected).abs().amax(-1, keepdim=True) + torch.finfo(x.dtype).eps * expected.abs()
    bound = bound + 2 * torch.finfo(torch.float32).eps * mass
    for isa in cpu_isas():
        with using_isa(isa):
            out = wavefill.flat_linear(x, weight, bias)
        assert out.dtype == x.dtype
        assert out.shape == (*x.shape[:-1], weight.shape[0])
        worst = (out.double() - expected).abs() - bound
        assert not bool((~(worst <= 0)).any()), f"{isa}: {float(worst.max())} over the bound"


@dtypes
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 63, 64])
def test_any_number_of_rows(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(rows)
    check(guarded(rows, 50, dtype), guarded(21, 50, dtype), torch.randn(21).to(dtype))


@dtypes
def test_every_width_and_every_number_of_outputs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for K in (*range(1, 70), 127, 128, 129):
        check(guarded(1 + K % 5, K, dtype), guarded(1 + K % 13, K, dtype), None)
    for N in range(1, 30):
        check(guarded(1 + N % 4, 33, dtype), guarded(N, 33, dtype), torch.randn(N).to(dtype))


@dtypes
def test_layers_of_a_real_model_over_two_threads(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for N, K in ((576, 576), (192, 576), (576, 1536), (3001, 577)):
        check(torch.randn(1, K).to(dtype), torch.randn(N, K).to(dtype), None)


def test_any_layout() -> None:
    torch.manual_seed(0)
    weight, x, bias = torch.randn(9, 24), torch.randn(2, 3, 24), torch.randn(9)
    expected = torch.nn.functional.linear(x, weight, bias)
    views: dict[str, tuple[Tensor, Tensor, Tensor]] = {
        "weight by columns": (x, weight.T.contiguous().T, bias),
        "x by columns": (x.transpose(0, 2).contiguous().transpose(0, 2), weight, bias),
        "x turned": (x.transpose(0, 1).contiguous().transpose(0, 1), weight, bias),
        "bias with gaps": (x, weight, torch.stack([bias, bias], 1)[:, 0]),
        "one row of weights repeated": (x, weight[:1].expand(9, -1), bias),
        "x repeated": (x[:1, :1].expand(2, 3, -1), weight, bias),
    }
    for name, (a, w, b) in views.items():
        theirs = expected if name[:8] != "one row " and name != "x repeated" else torch.nn.functional.linear(a, w, b)
        torch.testing.assert_close(wavefill.flat_linear(a, w, b), theirs, msg=name)
    torch.testing.assert_close(wavefill.flat_linear(x[0, 0], weight, bias), expected[0, 0])


def test_nothing_in_nothing_out() -> None:
    weight = torch.randn(5, 8)
    assert wavefill.flat_linear(torch.empty(0, 8), weight).shape == (0, 5)
    assert wavefill.flat_linear(torch.empty(2, 0, 8), weight).shape == (2, 0, 5)
    assert wavefill.flat_linear(torch.randn(3, 8), weight[:0]).shape == (3, 0)


def test_infinities_and_nan_stay_in_their_row_and_output() -> None:
    weight, x = torch.ones(3, 20), torch.ones(3, 20)
    weight[1, 19], x[2, 3] = torch.inf, torch.nan
    out = wavefill.flat_linear(x, weight)
    assert out[:2].tolist() == [[20.0, torch.inf, 20.0]] * 2
    assert bool(out[2].isnan().all())


def test_the_operator_passes_torchs_own_checks() -> None:
    operator = torch.ops.wavefill.flat_linear.default
    for bias in (None, torch.randn(5)):
        torch.library.opcheck(operator, (torch.randn(2, 3, 8), torch.randn(5, 8), bias))
    torch.compiler.reset()
    compiled = torch.compile(wavefill.flat_linear, fullgraph=True, backend="aot_eager")
    x, weight = torch.randn(2, 8), torch.randn(5, 8)
    assert torch.equal(compiled(x, weight), wavefill.flat_linear(x, weight))


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda x, w, b: wavefill.flat_linear([1.0], w), InvalidType, "x: must be a torch.Tensor"),
    (lambda x, w, b: wavefill.flat_linear(x, None), InvalidType, "weight: must be a torch.Tensor"),
    (lambda x, w, b: wavefill.flat_linear(x, w, 0.0), InvalidType, "bias: must be a torch.Tensor"),
    (lambda x, w, b: wavefill.flat_linear(x[..., :7], w), InvalidArgument, "x: must be .* weight's K of 8"),
    (lambda x, w, b: wavefill.flat_linear(x[0, 0], w), InvalidArgument, "x: must be"),
    (lambda x, w, b: wavefill.flat_linear(x, w[0]), InvalidArgument, r"weight: must be \[N, K\]"),
    (lambda x, w, b: wavefill.flat_linear(x, w[:, :0]), InvalidArgument, "weight: must be"),
    (lambda x, w, b: wavefill.flat_linear(x, w, b[:4]), InvalidArgument, r"bias: must be \[N\] = \[5\]"),
    (lambda x, w, b: wavefill.flat_linear(x.expand(65, 8), w), InvalidArgument, "x: must have at most 64 rows; got 65"),
    (lambda x, w, b: wavefill.flat_linear(x.double(), w), InvalidType, "x: dtype must be that of weight"),
    (lambda x, w, b: wavefill.flat_linear(x, w, b.half()), InvalidType, "bias: dtype must be that of weight"),
    (lambda x, w, b: wavefill.flat_linear(x.double(), w.double()), InvalidType, "weight: dtype must be one of"),
    (lambda x, w, b: wavefill.flat_linear(x, w.to_sparse()), InvalidArgument, "weight: must be a dense"),
    (lambda x, w, b: wavefill.flat_linear(x.to("meta"), w), InvalidArgument, "x: must be on the device"),
])
def test_bad_input(call: Callable[[Tensor, Tensor, Tensor], Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(torch.randn(1, 8), torch.randn(5, 8), torch.randn(5))


def test_gradients_are_refused_where_they_would_be_lost() -> None:
    weight = torch.randn(5, 8, requires_grad=True)
    with pytest.raises(InvalidArgument, match="x: wavefill is for inference"):
        wavefill.flat_linear(torch.randn(1, 8), weight).sum().backward()
    with pytest.raises(InvalidArgument, match="weight: wavefill is for inference"):
        torch.ops.wavefill.flat_linear(torch.randn(1, 8), weight)
    with torch.no_grad():
        assert wavefill.flat_linear(torch.randn(1, 8), weight).shape == (1, 5)
