"""How a public function becomes a call of an operator: what is Python's is checked here, then the one call is made.

The rules for tensors are the operator's; see `wavefill.ops`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wavefill import checks, direct, ops
from wavefill.cache import KVPages
from wavefill.spec import (
    MAX_INT,
    BackendUnavailable,
    InvalidArgument,
    ScheduleArg,
    complaint,
    invalid,
    invalid_type,
    number,
    whole,
)

IMPLEMENTATIONS = ("auto", *checks.DEVICES)
ONLINE = "online"  # the default's own object, so that a call finds it in no time


def attend(
    q: Tensor,
    k_cache: Tensor | KVPages,
    v_cache: Tensor | None,
    seq_lens: Tensor,
    block_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    scale: float | None,
    causal: bool,
    window: int | None,
    head_dim_v: int | None,
    schedule: ScheduleArg,
    max_seq_len: int | None,
    max_q_len: int | None,
    sm_budget: int | None,
    impl: str,
    return_lse: bool,
    out: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    mask: Tensor | None,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention as one call of an operator; arguments are those of `attention`. cu_seqlens_q None: one token each."""
    if isinstance(k_cache, KVPages):
        if v_cache is not None:
            raise invalid("v_cache", "must be None when k_cache is a KVPages, which holds both", "a tensor",
                          "Pass None.")
        if k_scale is not None or v_scale is not None:
            raise invalid("v_scale" if k_scale is None else "k_scale",
                          "must be None when k_cache is a KVPages, which holds its scales", "a scale", "Leave it out.")
        k_scale, v_scale = k_cache.k_scale, k_cache.v_scale
        v_cache = k_cache.v
        k_cache = k_cache.k
    if type(q) is not Tensor:
        hold_tensor("q", q)
    if type(k_cache) is not Tensor:
        hold_tensor("k_cache", k_cache, "Pass a tensor, or the KVPages of PagedKVCache.view(layer).")
    if v_cache is not None and type(v_cache) is not Tensor:
        hold_tensor("v_cache", v_cache)
    if type(seq_lens) is not Tensor:
        hold_tensor("seq_lens", seq_lens, "Pass torch.tensor(lengths, dtype=torch.int32).")
    if block_table is not None and type(block_table) is not Tensor:
        hold_tensor("block_table", block_table)
    if scale is not None and type(scale) is not float:
        scale = number("scale", scale)
    if window is not None and (type(window) is not int or abs(window) > MAX_INT):
        window = _whole("window", window, 1)
    if head_dim_v is not None and (type(head_dim_v) is not int or abs(head_dim_v) > MAX_INT):
        head_dim_v = _whole("head_dim_v", head_dim_v, 1)
    if max_seq_len is not None and (type(max_seq_len) is not int or abs(max_seq_len) > MAX_INT):
        max_seq_len = _whole("max_seq_len", max_seq_len, 0)
    if max_q_len is not None and (type(max_q_len) is not int or abs(max_q_len) > MAX_INT):
        max_q_len = _whole("max_q_len", max_q_len, 0)
    if sm_budget is not None and (type(sm_budget) is not int or not 0 < sm_budget <= MAX_INT):
        sm_budget = _whole("sm_budget", sm_budget, 1)
    if softcap is not None and type(softcap) is not float:
        softcap = number("softcap", softcap)
    if sinks is not None and type(sinks) is not Tensor:
        hold_tensor("sinks", sinks)
    if alibi_slopes is not None and type(alibi_slopes) is not Tensor:
        hold_tensor("alibi_slopes", alibi_slopes)
    if mask is not None and type(mask) is not Tensor:
        hold_tensor("mask", mask, "Make it with wavefill.pack_mask(masks).")
    if type(return_lse) is not bool:
        raise invalid_type("return_lse", "must be a bool", repr(return_lse), "Pass True or False.")
    if not isinstance(impl, str) or impl not in IMPLEMENTATIONS:
        raise _no_such_impl(impl)
    if impl != "auto" and q.device.type != impl:
        raise _impl_elsewhere(impl, q.device)
    text = schedule if isinstance(schedule, str) and schedule.isascii() else ops.encode_schedule(schedule)
    arguments: tuple[Any, ...] = (q, k_cache, v_cache, seq_lens, block_table, cu_seqlens_q, scale, causal, window,
                                  head_dim_v, text, max_seq_len, max_q_len, sm_budget)
    bare = softcap is None and sinks is None and alibi_slopes is None and mask is None
    scaled = k_scale is not None or v_scale is not None
    if scaled or not bare:  # what is left out costs nothing on its way through the dispatcher
        arguments += (softcap, sinks, alibi_slopes, mask)
    if scaled:
        k_scale, v_scale = _scale("k_scale", k_scale), _scale("v_scale", v_scale)
        arguments += (k_scale, v_scale)
    if out is not None and type(out) is not Tensor:
        hold_tensor("out", out)
    if (bare and not scaled and q.is_cuda and v_cache is not None and cu_seqlens_q is None and head_dim_v is None
            and not torch.compiler.is_compiling()):
        known = direct.attend(q, k_cache, v_cache, seq_lens, block_table, scale, window, text, sm_budget, out,
                              return_lse)
        if known is not None:
            return known if return_lse else known[0]  # type: ignore[return-value]
    if out is not None:
        lse = ops.attention_out(*arguments, out=out)
        return (out, lse) if return_lse else out
    if wants_grad(q, k_cache, v_cache, sinks, alibi_slopes, k_scale, v_scale):  # type: ignore[arg-type]
        named = (("sinks", sinks), ("alibi_slopes", alibi_slopes), ("k_scale", k_scale), ("v_scale", v_scale))
        whose = next((name for name, x in named if isinstance(x, Tensor) and x.requires_grad), "q")
        fresh, lse = NoBackward.apply(whose, ops.attention, *arguments)  # type: ignore[no-untyped-call]
    else:
        fresh, lse = ops.attention(*arguments)
    return (fresh, lse) if return_lse else fresh


def wants_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd records this call; within torch.compile and torch.func the operators refuse such inputs."""
    if not torch.is_grad_enabled():
        return False
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())
    return False


class NoBackward(torch.autograd.Function):
    """Runs an operator and leaves a node in the graph, so that a backward pass stops with a reason, not in silence."""

    @staticmethod
    def forward(ctx: Any, name: str, operator: Any, *arguments: Any) -> Any:
        ctx.name = name
        return operator(*arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise checks.no_gradient(ctx.name)


# ---- errors


def not_yet(**options: object) -> InvalidArgument:
    """The first option that was given and that no backend of this version has."""
    name, value = next((n, v) for n, v in options.items() if (not online(v) if n == "softmax" else v is not None))
    shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return invalid(name, "is not in this version of wavefill", shown, _INSTEAD[name])


_INSTEAD = {
    "softmax": 'Use softmax="online".',
    "kv_shard": "Attend to each part with its own lengths and merge with wavefill.merge_states.",
}


def hold_tensor(name: str, value: object, next_step: str = "Pass a torch.Tensor.") -> None:
    """Raises unless value is a tensor; callers ask only for what is not plainly one."""
    if not isinstance(value, Tensor):
        raise invalid_type(name, "must be a torch.Tensor", type(value).__name__, next_step)


def _scale(name: str, value: float | Tensor | None) -> Tensor | None:
    """A scale as an operator takes it: a number becomes a tensor of the host, which goes with those of any device."""
    if value is None or isinstance(value, Tensor):
        return value
    return torch.tensor(number(name, value), dtype=torch.float32)


def _whole(name: str, value: Any, least: int) -> Any:
    """`value` as an int that an operator can carry; a SymInt of a captured graph is one."""
    return value if isinstance(value, torch.SymInt) else whole(name, value, least, or_none=True)


def online(softmax: object) -> bool:
    return isinstance(softmax, str) and softmax == ONLINE


def _impl_elsewhere(impl: str, device: torch.device) -> BackendUnavailable:
    return BackendUnavailable(complaint("impl", f'"{impl}" serves tensors on {impl} alone', f"tensors on {device}",
                                        f'Move them with .to("{impl}"), or use impl="auto".'))


def _no_such_impl(impl: object) -> BackendUnavailable | TypeError:
    if isinstance(impl, str):
        return BackendUnavailable(complaint("impl", f"must be one of {', '.join(map(repr, IMPLEMENTATIONS))} in this "
                                            "version", repr(impl), 'Use impl="auto": it goes by the tensors.'))
    return invalid_type("impl", "must be a name", type(impl).__name__, 'Use impl="auto".')
