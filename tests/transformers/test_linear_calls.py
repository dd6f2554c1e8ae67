"""A layer of `enable(linear="flat")`: calls of a few rows are the kernel's and right, others have PyTorch's bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

pytest.importorskip("transformers.generation")

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from tiny import one_thread  # noqa: F401
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize, prune
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from wavefill.integrations.transformers import linears
from wavefill.integrations.transformers.linears import MAX_ROWS, FlatLinear

pytestmark = pytest.mark.transformers

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def pair(
    K: int = 37, N: int = 29, *, bias: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[nn.Linear, nn.Linear]:
    """A plain layer and a flat one on copies of the same weights."""
    torch.manual_seed(3)
    theirs = nn.Linear(K, N, bias=bias, dtype=dtype)
    ours = copy.deepcopy(theirs)
    linears.choose(ours, "flat")
    return ours, theirs


# ---- what the kernel takes


SHAPES: dict[str, Callable[[int], Tensor]] = {
    "vector": lambda K: torch.randn(K),
    "1": lambda K: torch.randn(1, 1, K),
    "4-dims": lambda K: torch.randn(2, 1, 3, K),
    "most": lambda K: torch.randn(MAX_ROWS, K),
    "last-of-each": lambda K: torch.randn(5, 9, K)[:, -1:],
    "columns": lambda K: torch.randn(3, K, 4).transpose(1, 2),
    "every-second": lambda K: torch.randn(7, 2 * K)[:, ::2],
    "expanded": lambda K: torch.randn(1, K).expand(6, K),
    "swapped": lambda K: torch.randn(3, 5, K).transpose(0, 1),
    "one-number": lambda K: torch.randn(4, 1).expand(4, K),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_results_are_as_near_float64_as_those_of_pytorch(
    shape: str, bias: bool, dtype: torch.dtype, kernel_rows: list[int]
) -> None:
    for K, N in ((37, 29), (1, 1), (64, 5), (300, 111)):
        ours, theirs = pair(K, N, bias=bias, dtype=dtype)
        x = SHAPES[shape](K).to(dtype)
        got, want = ours(x), theirs(x)
        exact = F.linear(x.double(), *(p.double() for p in theirs.parameters()))
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert got.is_contiguous()
        close = 2 * (want.double() - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
        assert (got.double() - exact).abs().max() <= close
    assert kernel_rows == [x.numel() // K] * 4


@torch.no_grad()
def test_many_weights_on_two_threads(kernel_rows: list[int]) -> None:
    ours, theirs = pair(768, 1111)
    torch.set_num_threads(2)
    try:
        for count in (1, 3, MAX_ROWS):
            x = torch.randn(count, 768)
            torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    finally:
        torch.set_num_threads(1)
    assert kernel_rows == [1, 3, MAX_ROWS]


@torch.no_grad()
def test_weights_and_bias_at_strides(kernel_rows: list[int]) -> None:
    ours, theirs = pair()
    x = torch.randn(3, 37)
    want = theirs(x)
    ours.weight = nn.Parameter(torch.randn(29, 50)[:, 4:41].copy_(theirs.weight))
    ours.bias = nn.Parameter(torch.randn(29, 3)[:, 1].copy_(theirs.bias))
    assert ours.weight.stride() == (50, 1)
    assert ours.bias.stride() == (3,)
    torch.testing.assert_close(ours(x), want)
    assert kernel_rows == [3]


@pytest.mark.parametrize("outside", [False, True])
def test_inference_tensors(outside: bool, kernel_rows: list[int]) -> None:
    ours, theirs = pair()
    with torch.inference_mode():
        x = torch.randn(2, 37)
    with torch.no_grad() if outside else torch.inference_mode():
        got, want = ours(x), theirs(x)
    torch.testing.assert_close(got, want)
    assert got.is_inference() == want.is_inference()
    assert kernel_rows == [2]


def test_frozen_weights_need_no_grad_mode(kernel_rows: list[int]) -> None:
    ours, theirs = pair()
    for layer in (ours, theirs):
        layer.requires_grad_(False)
    x = torch.randn(2, 37)
    torch.testing.assert_close(ours(x), theirs(x))
    assert kernel_rows == [2]
    for name in ("x", "weight", "bias"):
        found = []
        for layer in (ours, theirs):
            leaf = x.clone() if name == "x" else getattr(layer, name)
            leaf.requires_grad_(True)
            layer(leaf if name == "x" else x).sum().backward()
            leaf.requires_grad_(False)
            found.append(leaf.grad)
        assert torch.equal(*found), name
    assert kernel_rows == [2]


@torch.no_grad()
def test_forward_hooks_run_around_it(kernel_rows: list[int]) -> None:
    ours, theirs = pair()
    for one in (ours, theirs):
        one.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        one.register_forward_hook(lambda module, args, out: out * 2)
    x = torch.randn(2, 37)
    torch.testing.assert_close(ours(x), theirs(x))
    assert kernel_rows == [2]


# ---- what stays PyTorch's


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


class Marked(Tensor):
    """A tensor that brings a computation of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return torch.full((3, 29), 7.0)
        return super().__torch_function__(func, types, args, kwargs)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def traced(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.jit.trace(layer, x, check_trace=False)(x + 1)  # type: ignore[no-any-return]


def exported(layer: nn.Module, x: Tensor, strict: bool = False) -> Tensor:
    return torch.export.export(layer, (x,), strict=strict).module()(x + 1)  # type: ignore[no-any-return]


def compiled(layer: nn.Module, x: Tensor) -> Tensor:
    torch._dynamo.reset()
    try:
        return torch.compile(layer, backend="eager", fullgraph=True)(x)  # type: ignore[no-any-return]
    finally:
        torch._dynamo.reset()


def tangent(layer: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    assert found is not None
    return found


def parametrised(layer: nn.Module, x: Tensor) -> Tensor:
    parametrize.register_parametrization(layer, "weight", Doubled())
    return layer(x)  # type: ignore[no-any-return]


def pruned(name: str) -> Callable[[nn.Module, Tensor], Tensor]:
    def run(layer: nn.Module, x: Tensor) -> Tensor:
        prune.l1_unstructured(layer, name, amount=0.5)
        return layer(x)  # type: ignore[no-any-return]

    return run


def with_weight(change: Callable[[Tensor], Any]) -> Callable[[nn.Linear, Tensor], Tensor]:
    def run(layer: nn.Linear, x: Tensor) -> Tensor:
        layer.weight = nn.Parameter(change(layer.weight.detach()), requires_grad=False)
        return layer(x)  # type: ignore[no-any-return]

    return run


def with_bias(layer: nn.Linear, bias: Tensor) -> nn.Linear:
    layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def without_bias(layer: nn.Linear) -> nn.Linear:
    layer.bias = None
    return layer


def within(context: Callable[[], AbstractContextManager[Any]], dtype: torch.dtype = torch.float32) -> Any:
    def run(layer: nn.Linear, x: Tensor) -> Tensor:
        with context():
            found: Tensor = layer(x)
        assert found.dtype == dtype
        return found

    return run


#: Way -> what is run on either layer, with an input [3, 37]; the results must have the same bits.
THEIRS: dict[str, Callable[[Any, Tensor], Any]] = {
    "more rows": lambda layer, x: layer(x.repeat(6, 1)),
    "no rows": lambda layer, x: layer(x[:0]),
    "no rows in two dims": lambda layer, x: layer(x.new_empty(0, 3, 37)),
    "recorded": lambda layer, x: layer(x.requires_grad_()),
    "autocast": within(lambda: torch.autocast("cpu", torch.bfloat16), torch.bfloat16),
    "float64": lambda layer, x: layer.double()(x.double()),
    "meta": lambda layer, x: torch.zeros(layer.to("meta")(x.to("meta")).shape),
    "traced": traced,
    "exported": exported,
    "exported strictly": lambda layer, x: exported(layer, x, strict=True),
    "compiled": compiled,
    "vmap": lambda layer, x: torch.func.vmap(layer)(x),
    "jvp": lambda layer, x: torch.stack(torch.func.jvp(layer, (x,), (x + 1,))),
    "dual": tangent,
    "functional_call": lambda layer, x: torch.func.functional_call(layer, {"weight": torch.ones(29, 37)}, (x,)),
    "fx": lambda layer, x: torch.fx.symbolic_trace(nn.Sequential(layer))(x),
    "flop counter": within(lambda: FlopCounterMode(display=False)),
    "function mode": within(Seen),
    "subclass of the input": lambda layer, x: layer(x.as_subclass(Marked)),
    "subclass of the weight": with_weight(lambda weight: weight.as_subclass(Marked)),
    "columns": with_weight(lambda weight: weight.T.contiguous().T),
    "one dimension": lambda layer, x: with_weight(lambda weight: weight[0])(without_bias(layer), x),
    "bias of one": lambda layer, x: with_bias(layer, torch.ones(1))(x),
    "sparse": with_weight(lambda weight: weight.to_sparse_csr()),
    "parametrised": parametrised,
    "pruned weight": pruned("weight"),
    "pruned bias": pruned("bias"),
    "turned sign": lambda layer, x: layer(torch.complex(x, x).conj().imag),
    "nested": lambda layer, x: layer(torch.nested.nested_tensor([x, x[:1]])).to_padded_tensor(0.0),
}


@pytest.mark.filterwarnings("ignore")  # torch's own, of sparse and nested tensors and of deprecated tracing
@pytest.mark.parametrize("way", THEIRS)
def test_other_calls_have_the_bits_of_pytorch(way: str, kernel_rows: list[int]) -> None:
    layers = pair()
    x = torch.randn(3, 37)
    with nullcontext() if way == "recorded" else torch.no_grad():
        got, want = (THEIRS[way](layer, x.clone()) for layer in layers)
    assert torch.equal(got, want)
    assert got.requires_grad == want.requires_grad
    assert not kernel_rows


@torch.no_grad()
def test_modes_see_the_call() -> None:
    ours, _ = pair()
    x = torch.randn(3, 37)
    with FlopCounterMode(display=False) as counter:
        ours(x)
    assert counter.get_total_flops() == 2 * 3 * 37 * 29
    with Seen() as seen:
        ours(x)
    assert F.linear in seen.calls


@pytest.mark.parametrize("wrong", [torch.randn(2, 36), torch.tensor(1.0), torch.randn(2, 37).half(), "text"],
                         ids=["size", "scalar", "dtype", "type"])
@torch.no_grad()
def test_wrong_inputs_raise_what_pytorch_raises(wrong: Any, kernel_rows: list[int]) -> None:
    messages = []
    for layer in pair():
        with pytest.raises((RuntimeError, TypeError)) as caught:
            layer(wrong)
        messages.append((type(caught.value), str(caught.value)))
    assert messages[0] == messages[1]
    assert not kernel_rows


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize(("K", "N"), [(0, 3), (3, 0), (0, 0)])
@torch.no_grad()
def test_layers_without_features(K: int, N: int) -> None:
    ours, theirs = pair(K, N)
    assert torch.equal(ours(torch.ones(2, K)), theirs(torch.ones(2, K)))


# ---- what else becomes of a module


@torch.no_grad()
def test_a_layer_parametrised_while_flat_can_be_switched_back(kernel_rows: list[int]) -> None:
    ours, theirs = pair()
    x = torch.randn(2, 37)
    for layer in (ours, theirs):
        parametrize.register_parametrization(layer, "weight", Doubled())
    linears.choose(ours, "torch")
    assert not isinstance(ours, FlatLinear)
    assert torch.equal(ours(x), theirs(x))
    for layer in (ours, theirs):
        parametrize.remove_parametrizations(layer, "weight")
    assert type(ours) is nn.Linear
    assert torch.equal(ours(x), theirs(x))
    linears.choose(ours, "flat")
    torch.testing.assert_close(ours(x), theirs(x))
    assert kernel_rows == [2]


@torch.no_grad()
def test_a_method_that_was_kept_is_pytorchs_after_the_switch(kernel_rows: list[int]) -> None:
    """As accelerate keeps `module.forward` when it adds a hook."""
    ours, theirs = pair()
    kept = ours.forward
    linears.choose(ours, "torch")
    x = torch.randn(2, 37)
    assert torch.equal(kept(x), theirs(x))
    assert not kernel_rows
