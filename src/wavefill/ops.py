"""The operators, registered with torch.library: their schemas, what runs on each device, and what fake tensors get.

The public functions, a captured graph and a direct call of `torch.ops.wavefill` all come through here, so the rules
for tensors are checked here, once a call. Operators are declared with `Library.define` and `impl`: a call costs a
third of one made with `torch.library.custom_op`.

wavefill::attention(q, k_cache, v_cache, seq_lens, ...) -> (out, lse)
wavefill::attention_out(..., out) -> lse          writes out
wavefill::append(k_cache, v_cache, k, v, slots, k_scale, v_scale)   writes the caches, and scales of tokens
wavefill::merge_states(outs, lses) -> (out, lse)
wavefill::flat_linear(x, weight, bias) -> out
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from wavefill import checks, direct, select
from wavefill.backends import cpu, gpu
from wavefill.backends.gpu import operators as gpu_operators
from wavefill.hardware import CPU_TILE
from wavefill.overlaps import no_overlap
from wavefill.scores import NONE, Options
from wavefill.spec import (
    AttentionSpec,
    BackendUnavailable,
    Fixed,
    Invariant,
    Schedule,
    StreamK,
    complaint,
    invalid,
    parse_schedule,
)

_lib: Any = torch.library.Library("wavefill", "DEF")  # type: ignore[no-untyped-call]

_CALL = (
    "Tensor q, Tensor k_cache, Tensor? v_cache, Tensor seq_lens, Tensor? block_table=None, Tensor? cu_seqlens_q=None, "
    "float? scale=None, bool causal=True, SymInt? window=None, SymInt? head_dim_v=None, str schedule='auto', "
    "SymInt? max_seq_len=None, SymInt? max_q_len=None, SymInt? sm_budget=None, float? softcap=None, "
    "Tensor? sinks=None, Tensor? alibi_slopes=None, Tensor? mask=None, Tensor? k_scale=None, Tensor? v_scale=None"
)


# ---- schedules as text: what an operator can carry


def encode_schedule(schedule: object) -> str:
    """A schedule as an operator takes it: "stream_k", "fixed:splits=4". Names pass; `decode_schedule` checks them."""
    if isinstance(schedule, str) and schedule.isascii():  # an operator does not take every other character
        return schedule
    parsed = parse_schedule(schedule)
    if isinstance(parsed, StreamK):
        return "stream_k" if parsed.tile is None else f"stream_k:tile={parsed.tile}"
    if isinstance(parsed, Invariant):
        return "invariant" if parsed.chunk is None else f"invariant:chunk={parsed.chunk}"
    if isinstance(parsed, Fixed):
        if parsed.splits is not None:
            return f"fixed:splits={parsed.splits}"
        if parsed.chunk is not None:
            return f"fixed:chunk={parsed.chunk}"
        return "fixed" if parsed.rule is None else f"fixed:rule={parsed.rule}"
    return parsed


@lru_cache(maxsize=256)
def decode_schedule(text: str) -> Schedule | Literal["auto"]:
    """The schedule that `encode_schedule` wrote; raises `InvalidArgument` for any other text."""
    name, colon, option = text.partition(":")
    if not colon:
        return parse_schedule(name)
    option, _, value = option.partition("=")
    number = int(value) if value.isdecimal() and len(value) < 20 else None  # 64 bits are 19 digits
    match name, option:
        case "stream_k", "tile" if number is not None:
            return StreamK(tile=number)
        case "invariant", "chunk" if number is not None:
            return Invariant(chunk=number)
        case "fixed", "splits" if number is not None:
            return Fixed(splits=number)
        case "fixed", "chunk" if number is not None:
            return Fixed(chunk=number)
        case "fixed", "rule" if value == "flashdecoding":
            return Fixed(rule="flashdecoding")
    raise invalid("schedule", 'as text must be a name, or a name with one option such as "fixed:splits=4"', repr(text),
                  "wavefill.ops.encode_schedule(Fixed(splits=4)) writes it.")


# ---- attention


def _attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    seq_lens: Tensor,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    head_dim_v: int | None = None,
    schedule: str = "auto",
    max_seq_len: int | None = None,
    max_q_len: int | None = None,
    sm_budget: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    DV = checks.attention(q, k_cache, v_cache, seq_lens, block_table, cu_seqlens_q, scale, window, head_dim_v,
                          max_seq_len, max_q_len)
    if k_scale is not None or v_scale is not None or k_cache.dtype != q.dtype:
        checks.scales(k_cache, v_cache, k_scale, v_scale)
    if softcap is not None or sinks is not None or alibi_slopes is not None or mask is not None:
        checks.options(q, cu_seqlens_q, max_q_len, softcap, sinks, alibi_slopes, mask)
    T, HQ, _ = q.shape
    out, lse = q.new_empty((T, HQ, DV)), q.new_empty((T, HQ), dtype=torch.float32)
    call = _launch(q, k_cache, v_cache, seq_lens, block_table, cu_seqlens_q, out, lse, scale, causal, window, DV,
                   schedule, max_seq_len, max_q_len, sm_budget, _options(softcap, sinks, alibi_slopes, mask), k_scale,
                   v_scale)
    if call is not None and v_cache is not None:
        direct.remember(q, k_cache, v_cache, seq_lens, block_table, scale, window, schedule, sm_budget, None, call)
    return out, lse


def _attention_out(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    seq_lens: Tensor,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    head_dim_v: int | None = None,
    schedule: str = "auto",
    max_seq_len: int | None = None,
    max_q_len: int | None = None,
    sm_budget: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    out: Tensor,
) -> Tensor:
    DV = checks.attention(q, k_cache, v_cache, seq_lens, block_table, cu_seqlens_q, scale, window, head_dim_v,
                          max_seq_len, max_q_len)
    if k_scale is not None or v_scale is not None or k_cache.dtype != q.dtype:
        checks.scales(k_cache, v_cache, k_scale, v_scale)
    if softcap is not None or sinks is not None or alibi_slopes is not None or mask is not None:
        checks.options(q, cu_seqlens_q, max_q_len, softcap, sinks, alibi_slopes, mask)
    checks.result(out, q, DV)
    no_overlap((("out", out),), (
        ("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("seq_lens", seq_lens), ("block_table", block_table),
        ("cu_seqlens_q", cu_seqlens_q), ("sinks", sinks), ("alibi_slopes", alibi_slopes), ("mask", mask),
        ("k_scale", k_scale), ("v_scale", v_scale),
    ))
    T, HQ, _ = q.shape
    lse = q.new_empty((T, HQ), dtype=torch.float32)
    # Kernels write rows of unit stride, those of a GPU whole 16 bytes; a result laid out otherwise takes a detour.
    straight = out.stride(2) == 1 and not (out.is_cuda and _unaligned(out))
    rows = out if straight else torch.empty_like(out, memory_format=torch.contiguous_format)
    call = _launch(q, k_cache, v_cache, seq_lens, block_table, cu_seqlens_q, rows, lse, scale, causal, window, DV,
                   schedule, max_seq_len, max_q_len, sm_budget, _options(softcap, sinks, alibi_slopes, mask), k_scale,
                   v_scale)
    if rows is not out:
        out.copy_(rows)
        return lse
    direct.written(out)
    if call is not None and v_cache is not None:
        direct.remember(q, k_cache, v_cache, seq_lens, block_table, scale, window, schedule, sm_budget, out, call)
    return lse


def _launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    seq_lens: Tensor,
    block_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float | None,
    causal: bool,
    window: int | None,
    DV: int,
    schedule: str,
    max_seq_len: int | None,
    max_q_len: int | None,
    sm_budget: int | None,
    options: Options,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> gpu.Call | None:
    """Fills `out` and `lse`. Tensors have passed `checks.attention` and, where K and V are codes, `checks.scales`.

    Returns what `gpu.run` takes for another call like this one: of one query token a request, without options, on a GPU
    and without a copy of a tensor. None for any other.
    """
    D = q.shape[2]
    given = q, seq_lens, block_table
    on_gpu = q.is_cuda
    if on_gpu and k_cache.dtype != q.dtype:
        raise _not_on_gpu(k_cache.dtype)
    auto = (gpu_schedule if on_gpu else cpu_schedule)(q.shape[1], k_cache.shape[2], D, DV, checks.DTYPE_NAMES[q.dtype])
    chosen = decode_schedule(schedule)
    if chosen == "auto":
        chosen = auto
    if v_cache is None:
        v_cache, v_scale = k_cache.narrow(3, 0, DV), k_scale
    if q.stride(2) != 1 or (on_gpu and _unaligned(q)):
        q = q.contiguous()
    if not seq_lens.is_contiguous():
        seq_lens = seq_lens.contiguous()
    if block_table is not None and block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    if cu_seqlens_q is not None and not cu_seqlens_q.is_contiguous():
        cu_seqlens_q = cu_seqlens_q.contiguous()
    scale = D**-0.5 if scale is None else scale
    if on_gpu:
        call = gpu.attention(
            q, k_cache, v_cache, seq_lens, block_table, cu_seqlens_q, out, lse, scale=scale, causal=causal,
            window=window, schedule=chosen, sm_budget=sm_budget, max_seq_len=max_seq_len, max_q_len=max_q_len,
            options=options, auto=schedule == "auto",
        )
        return call if all(a is b for a, b in zip(given, (q, seq_lens, block_table), strict=True)) else None
    if sm_budget is not None:
        raise invalid("sm_budget", "limits the SMs of a GPU, and these tensors live on the CPU", sm_budget,
                      "Use torch.set_num_threads there.")
    if max_seq_len is not None or max_q_len is not None:
        _hold_hints(seq_lens, cu_seqlens_q, max_seq_len, max_q_len)
    cpu.attention(
        q, k_cache, v_cache, seq_lens, block_table, cu_seqlens_q, out, lse, scale=scale, causal=causal, window=window,
        schedule=chosen, options=options, k_scale=k_scale, v_scale=v_scale,
    )
    return None


def _not_on_gpu(dtype: torch.dtype) -> BackendUnavailable:
    return BackendUnavailable(complaint(
        "k_cache", "the GPU backend of this version has no kernel for quantised caches", dtype,
        "Keep the cache in fp32, fp16 or bf16 there, or move the tensors to the CPU."))


def _options(
    softcap: float | None, sinks: Tensor | None, alibi_slopes: Tensor | None, mask: Tensor | None
) -> Options:
    """The options as backends take them, `NONE` itself where there is none. They have passed `checks.options`."""
    if softcap is None and sinks is None and alibi_slopes is None and mask is None:
        return NONE
    sinks, alibi_slopes = (None if x is None else x.float().contiguous() for x in (sinks, alibi_slopes))
    return Options(softcap, sinks, alibi_slopes, None if mask is None else mask.contiguous())


def _unaligned(x: Tensor) -> bool:
    """Whether some row of q or an output does not lie as the GPU's kernels want it."""
    return bool(x.data_ptr() % 16 or x.stride(0) % 16 or x.stride(1) % 16)


@lru_cache(maxsize=256)
def gpu_schedule(HQ: int, KH: int, D: int, DV: int, dtype: str) -> Schedule:
    """What "auto" means on a GPU, where lengths are not known to the host; raises for a shape without a kernel.

    stream_k: no schedule ends before the one that gives every worker the same number of tiles, and it leaves at most
    two partial states a worker, however the lengths are spread.
    """
    reason = gpu.capability(AttentionSpec(HQ, KH, D, DV, dtype))
    if reason is not None:
        raise BackendUnavailable(complaint("impl", "the GPU backend cannot serve this call", reason,
                                           'Move the tensors to the CPU and use impl="cpu".'))
    return StreamK()


@lru_cache(maxsize=256)
def cpu_schedule(HQ: int, KH: int, D: int, DV: int, dtype: str) -> Schedule:
    """What "auto" means on the CPU, where no schedule depends on lengths; raises for a shape without a kernel."""
    spec = AttentionSpec(HQ, KH, D, DV, dtype)
    reason = cpu.capability(spec)
    if reason is not None:
        raise BackendUnavailable(complaint("impl", "the CPU backend cannot serve this call", reason,
                                           "Use torch's scaled_dot_product_attention for it."))
    return select.choose(spec, (), (), torch.get_num_threads(), CPU_TILE).schedule


def _hold_hints(
    seq_lens: Tensor, cu_seqlens_q: Tensor | None, max_seq_len: int | None, max_q_len: int | None
) -> None:
    """Where lengths can be read, an upper bound that is none is a mistake of the caller."""
    if max_seq_len is not None and seq_lens.numel() and (longest := int(seq_lens.max())) > max_seq_len:
        raise invalid("max_seq_len", f"must be an upper bound of seq_lens (up to {longest})", max_seq_len,
                      "Raise it, or leave it out.")
    if max_q_len is not None and cu_seqlens_q is not None and cu_seqlens_q.numel() > 1:
        longest = int(cu_seqlens_q.diff().max())
        if longest > max_q_len:
            raise invalid("max_q_len", f"must be an upper bound of the query lengths (up to {longest})", max_q_len,
                          "Raise it, or leave it out.")


def _attention_fake(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    seq_lens: Tensor,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    head_dim_v: int | None = None,
    schedule: str = "auto",
    max_seq_len: int | None = None,
    max_q_len: int | None = None,
    sm_budget: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    DV = checks.attention(q, k_cache, v_cache, seq_lens, block_table, cu_seqlens_q, scale, window, head_dim_v,
                          max_seq_len, max_q_len)
    if k_scale is not None or v_scale is not None or k_cache.dtype != q.dtype:
        checks.scales(k_cache, v_cache, k_scale, v_scale)
    if softcap is not None or sinks is not None or alibi_slopes is not None or mask is not None:
        checks.options(q, cu_seqlens_q, max_q_len, softcap, sinks, alibi_slopes, mask)
    decode_schedule(schedule)
    T, HQ, _ = q.shape
    return q.new_empty((T, HQ, DV)), q.new_empty((T, HQ), dtype=torch.float32)


def _attention_out_fake(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
    fresh, lse = _attention_fake(*args, **kwargs)
    checks.result(out, args[0] if args else kwargs["q"], fresh.shape[2])
    return lse


# ---- append and merge


def _append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    checks.append(k_cache, v_cache, k, v, slots, k_scale, v_scale)
    # Scales of tokens are written with their codes, others are read.
    made = [(name, x) for name, x in (("k_scale", k_scale), ("v_scale", v_scale)) if x is not None and x.dim() == 3]
    written = (("k_cache", k_cache), ("v_cache", v_cache), *made)
    no_overlap(written, (("k", k), ("v", v), ("slots", slots)))
    if not slots.is_contiguous():
        slots = slots.contiguous()
    if k_cache.is_cuda:
        if k_cache.dtype != k.dtype:
            raise _not_on_gpu(k_cache.dtype)
        gpu_operators.append(k_cache, v_cache, k, v, slots)
    else:
        cpu.append(k_cache, v_cache, k, v, slots, k_scale, v_scale)
    for _, x in written:
        direct.written(x)


def _append_fake(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    checks.append(k_cache, v_cache, k, v, slots, k_scale, v_scale)


def _merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    checks.merge_states(outs, lses)
    on_gpu = outs.is_cuda
    looked_at = not on_gpu or gpu_operators.looks(outs.get_device())
    if looked_at and bool(((lses != lses) | (lses == torch.inf)).any()):
        raise invalid("lses", "must hold finite values or -inf", "NaN or +inf", "Mark an empty state with -inf.")
    out, lse = outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])
    (gpu_operators if on_gpu else cpu).merge(outs.contiguous(), lses.contiguous(), out, lse)
    return out, lse


def _merge_states_fake(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    checks.merge_states(outs, lses)
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


# ---- linear layers of a few rows


def _flat_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    checks.flat_linear(x, weight, bias)
    return cpu.linear(x, weight, bias)


def _flat_linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    checks.flat_linear(x, weight, bias)
    return x.new_empty(*x.shape[:-1], weight.shape[0])


# ---- registration

#: Where the dispatcher goes with tensors that no kernel takes: other devices and layouts, and nested tensors.
_REFUSED = ("CompositeExplicitAutograd", "AutogradNestedTensor")


def _elsewhere(operator: Any, devices: Sequence[str]) -> Callable[..., Any]:
    """What runs where no kernel does: it says so, in place of the dispatcher's list of keys or torch's own failure."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        tensors = _named_tensors(operator, args, kwargs)
        for tensor in tensors.values():
            if tensor.device.type not in devices:
                raise checks.unavailable(tensor.device, devices)
        for name, tensor in tensors.items():
            checks.plain(name, tensor)
        raise invalid("torch.ops.wavefill", "has no kernel for these tensors",
                      ", ".join(type(tensor).__name__ for tensor in tensors.values()), "Pass plain torch.Tensors.")

    return refuse


def _transformed(operator: Any) -> Callable[..., Any]:
    """What runs inside of torch.func's transforms: refuses what would be lost in them, and passes what is constant."""

    def run(*args: Any, **kwargs: Any) -> Any:
        from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

        transform = retrieve_current_functorch_interpreter()
        constant = {name: _constant(name, tensor, transform.level())
                    for name, tensor in _named_tensors(operator, args, kwargs).items()}
        names = [argument.name for argument in operator._schema.arguments]
        positional = [constant.get(name, value) for name, value in zip(names, args, strict=False)]
        with transform.lower():  # to the transform around this one, or out of all
            return operator(*positional, **{name: constant.get(name, value) for name, value in kwargs.items()})

    return run


def _constant(name: str, tensor: Tensor, level: int) -> Tensor:
    """The tensor without the wrapper of a transform that it does not depend on; raises where it does."""
    functorch = torch._C._functorch
    if not functorch.is_functorch_wrapped_tensor(tensor) or functorch.maybe_get_level(tensor) != level:
        return tensor
    if functorch.is_batchedtensor(tensor):
        raise checks.transformed(name, "torch.vmap",
                                 "Call it once for each value." if name in ("sinks", "alibi_slopes", "out") else
                                 "Make the mapped dimension part of the batch: more requests in one call.")
    if not functorch.is_gradtrackingtensor(tensor):
        raise checks.transformed(name, "torch.func.functionalize", "torch.compile and torch.export need it not.")
    if (tensor.requires_grad and torch.is_grad_enabled()) or checks.has_tangent(tensor):
        raise checks.no_derivative(name, "a tensor that torch.func differentiates by")
    return functorch.get_unwrapped(tensor)


def _named_tensors(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return {name: value for name, value in given.items() if isinstance(value, Tensor)}


def _register(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], devices: Sequence[str] = checks.DEVICES
) -> Any:
    name = schema.partition("(")[0]
    _lib.define(schema)
    operator = getattr(torch.ops.wavefill, name).default
    for device in devices:
        _lib.impl(name, run, device.upper())
    for key in _REFUSED:
        _lib.impl(name, _elsewhere(operator, devices), key)
    if operator._schema.is_mutable:  # torch's own way with a turned sign fails on an operator that writes
        _lib.impl(name, _elsewhere(operator, devices), "Negative")
    _lib.impl(name, _transformed(operator), "FuncTorchDynamicLayerFrontMode")
    torch.library.register_fake(f"wavefill::{name}", fake, lib=_lib)
    return operator


attention = _register(f"attention({_CALL}) -> (Tensor out, Tensor lse)", _attention, _attention_fake)
attention_out = _register(f"attention_out({_CALL}, *, Tensor(a!) out) -> Tensor lse", _attention_out,
                          _attention_out_fake)
append = _register(
    "append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor slots, Tensor(c!)? k_scale=None, "
    "Tensor(d!)? v_scale=None) -> ()", _append, _append_fake,
)
merge_states = _register("merge_states(Tensor outs, Tensor lses) -> (Tensor out, Tensor lse)",
                         _merge_states, _merge_states_fake)
flat_linear = _register("flat_linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
                        _flat_linear, _flat_linear_fake, checks.LINEAR_DEVICES)
