"""What wavefill is compared with on a CPU: PyTorch's own attention, called the way that is best for it.

Both read K and V of [B, KH, S, D] without repeating the KV heads. Neither takes a ragged batch in one call: they run
once per request there.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wavefill.bench.inputs import Copy, Inputs

#: Names of the peers, in the order of a table.
PEERS = ("sdpa", "sdpa G as rows", "flex")

RAGGED_NOTE = "one call a request"


@dataclass(frozen=True)
class Peer:
    """A way to compute a row's attention.

    call: function of inputs and a copy that returns [B, HQ, D].
    note: how a ragged row is run.
    """

    name: str
    call: Callable[[Inputs, Copy], Tensor]
    note: str = RAGGED_NOTE


def sdpa(inputs: Inputs, copy: Copy) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention with enable_gqa; [B, HQ, D]."""
    attend = torch.nn.functional.scaled_dot_product_attention
    return _by_request(inputs, copy, lambda q, k, v: attend(q, k, v, enable_gqa=True))


def folded(inputs: Inputs, copy: Copy) -> Tensor:
    """The same function with the G query heads of a KV head passed as query tokens.

    Without a mask the result is the same, and PyTorch 2.13 reads K and V once a group instead of once a head, several
    times faster; a model's attention does not call it so.
    """
    attend = torch.nn.functional.scaled_dot_product_attention

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, HQ, _, D = q.shape
        return attend(q.view(B, k.shape[1], -1, D), k, v).view(B, HQ, 1, D)

    return _by_request(inputs, copy, call)


def _by_request(inputs: Inputs, copy: Copy, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    q = inputs.q.unsqueeze(2)
    parts = torch.split(q, 1) if inputs.row.ragged else (q,)
    return torch.cat([attend(part, k, v) for part, (k, v) in zip(parts, copy.peer, strict=True)]).squeeze(2)


def flex() -> Peer | str:
    """Compiled flex_attention, or why it cannot run here. Compiling happens at its first call."""
    if sys.platform != "linux":
        return f"flex_attention is not run on {sys.platform}"
    if not any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++")):
        return "torch.compile needs a C++ compiler (g++ or clang++), and none is installed"
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=True)

    def call(inputs: Inputs, copy: Copy) -> Tensor:
        return _by_request(inputs, copy, lambda q, k, v: compiled(q, k, v, enable_gqa=True))

    return Peer("flex", call)
