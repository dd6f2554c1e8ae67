"""Linear layers that read their weights once for a few rows, which is all that a decoding step gives them.

A module is switched by its class and nothing else: parameters, hooks, ties, names in a state dict, copies and pickles
stay what they are. Whether the kernel takes a call is decided at the call, so whatever becomes of a module later
(another dtype, a parametrisation, an adapter around it) computes as it would have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils.parametrize import is_parametrized

from wavefill.backends import cpu

#: What `enable(linear=...)` takes: PyTorch's own layers, or those of this file.
LINEARS = ("torch", "flat")
#: Rows of a call, all leading dimensions together, up to which the kernel does it; more are PyTorch's.
MAX_ROWS = 16


def choose(model: nn.Module, linear: str) -> None:
    """Make the plain linear layers of `model` "flat", or make the flat ones plain again ("torch").

    Subclasses of `torch.nn.Linear` (quantised layers, adapters) are left alone.
    """
    old, new = (nn.Linear, FlatLinear) if linear == "flat" else (FlatLinear, nn.Linear)
    for module in model.modules():
        kind = type(module)
        if kind is old:
            module.__class__ = new
        elif old is FlatLinear and kind.__bases__ == (FlatLinear,) and is_parametrized(module):
            # A class that parametrize made for this one module, and under which it would find ours again.
            kind.__bases__ = (nn.Linear,)


class FlatLinear(nn.Linear):
    """`torch.nn.Linear`, through wavefill's kernel where that gives the same: up to `MAX_ROWS` rows at inference."""

    def forward(self, input: Tensor) -> Tensor:
        """input @ weight.T + bias: [..., K] to [..., N]."""
        if not torch.compiler.is_compiling() and type(self) is FlatLinear:
            weight: Any = self._parameters.get("weight")
            # Absent is not None: a pruned or parametrised bias is no parameter, and is added all the same.
            bias: Any = self._parameters.get("bias", NotImplemented)
            if _kernel_takes(input, weight, bias):
                return cpu.linear(input, weight, bias)
        # Not super(): a caller may hold this method of a module whose class has been switched back.
        return nn.Linear.forward(self, input)


def _kernel_takes(x: Any, weight: Any, bias: Any) -> bool:
    """Whether the kernel computes this call as PyTorch does, and nothing of PyTorch's would have to see it."""
    # Types, not instances: subclasses of tensors (quantised, distributed, fake) bring computations of their own.
    if type(x) is not Tensor or type(weight) is not nn.Parameter:
        return False
    dtype = weight.dtype
    if dtype not in cpu.DTYPE_CODES or not _plain(x, dtype) or not _plain(weight, dtype):
        return False
    if weight.dim() != 2 or weight.stride(1) != 1 or not x.dim() or x.shape[-1] != weight.shape[1]:
        return False
    if not 0 < x.numel() <= MAX_ROWS * weight.shape[1]:
        return False
    if bias is not None and not (
        type(bias) is nn.Parameter and _plain(bias, dtype) and bias.shape == weight.shape[:1]
    ):
        return False
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return False
    return not (torch.is_autocast_enabled("cpu") or _watched())


def _plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether there are numbers of `dtype` in this process's memory, at strides."""
    return (tensor.dtype is dtype and tensor.is_cpu and tensor.layout is torch.strided
            and not tensor.is_nested and not tensor.is_neg())


def _watched() -> bool:
    """Whether someone follows each operator: a trace, vmap and jvp, a level of dual numbers, a mode (FLOP counters)."""
    return bool(
        torch._C._is_tracing()  # what torch.jit.is_tracing() asks, in a fifth of its time
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
    )
