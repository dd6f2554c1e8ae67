"""The public functions.

They check what is Python's (types, names, options that this version lacks) and call one operator, which checks the
tensors; see `wavefill.ops`. Dimensions are those of `wavefill.spec`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from wavefill import checks, direct, ops
from wavefill.cache import KVPages
from wavefill.spec import (
    MAX_INT,
    AttentionSpec,
    BackendUnavailable,
    InvalidArgument,
    ScheduleArg,
    StreamK,
    complaint,
    invalid,
    invalid_type,
    number,
    whole,
)

IMPLEMENTATIONS = ("auto", *checks.ATTENTION_DEVICES)
_ONLINE = "online"  # the default's own object, so that a call finds it in no time


class DecodeOptions(TypedDict, total=False):
    """Keyword arguments that `decode_attention` and `attention` share, for type checkers."""

    scale: float | None
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    k_scale: float | Tensor | None
    v_scale: float | Tensor | None
    head_dim_v: int | None
    max_seq_len: int | None
    schedule: ScheduleArg
    softmax: object
    impl: str
    out: Tensor | None
    sm_budget: int | None
    kv_shard: tuple[int, int, int] | None


class AttentionOptions(DecodeOptions, total=False):
    """Keyword arguments of `attention` alone, for type checkers."""

    max_q_len: int | None
    causal: bool
    mask: Tensor | None


@overload
def decode_attention(
    q: Tensor,
    k_cache: Tensor | KVPages,
    v_cache: Tensor | None,
    seq_lens: Tensor,
    block_table: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[DecodeOptions],
) -> Tensor: ...


@overload
def decode_attention(
    q: Tensor,
    k_cache: Tensor | KVPages,
    v_cache: Tensor | None,
    seq_lens: Tensor,
    block_table: Tensor | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[DecodeOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def decode_attention(
    q: Tensor,
    k_cache: Tensor | KVPages,
    v_cache: Tensor | None,
    seq_lens: Tensor,
    block_table: Tensor | None = None,
    *,
    return_lse: bool,
    **options: Unpack[DecodeOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


def decode_attention(
    q: Tensor,
    k_cache: Tensor | KVPages,
    v_cache: Tensor | None,
    seq_lens: Tensor,
    block_table: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    head_dim_v: int | None = None,
    max_seq_len: int | None = None,
    schedule: ScheduleArg = "auto",
    softmax: object = "online",
    impl: str = "auto",
    return_lse: bool = False,
    out: Tensor | None = None,
    sm_budget: int | None = None,
    kv_shard: tuple[int, int, int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of one query token a request over its KV cache.

    q:           [B, HQ, D] fp32, fp16 or bf16; any strides. HQ is a multiple of KH.
    k_cache:     q's dtype and any strides: [pages, page_size, KH, D] with `block_table`, [B, S, KH, D] without; or the
                 `KVPages` of `PagedKVCache.view`, with v_cache None.
    v_cache:     the same with DV; None for a latent cache (MLA), whose V is the first `head_dim_v` columns of K.
    seq_lens:    [B] int32, keys of each request, this step's included; the query sits at position seq_len - 1.
    block_table: [B, max_pages] int32, page ids; entries past a request's last page are never read.
    scale:       of the scores, D ** -0.5 if None; must be given for a latent cache.
    window:      keys that the query sees, its own included: positions seq_len - window and up; None for all.
    head_dim_v:  DV of a latent cache.
    max_seq_len: an upper bound of seq_lens known to the host; may steer choices, never the result's meaning.
    schedule:    "auto", "fixed", "stream_k", "invariant", or `Fixed(...)`, `StreamK(...)`, `Invariant(...)`.
    impl:        "auto", or "cpu" or "cuda", which refuse tensors that live elsewhere.
    return_lse:  also return the natural-log LSE.
    out:         [B, HQ, DV] of q's dtype, written in place; shares no memory with the inputs.
    sm_budget:   the most SMs of a GPU that the call uses, so that neighbours find some free; None for all.

    softcap, sinks, alibi_slopes, k_scale, v_scale, softmax other than "online" and kv_shard are names of coming
    versions: giving one raises InvalidArgument.

    On a GPU (compute capability 8.0 or higher; head sizes up to 256, up to 128 query heads a KV head) the call takes at
    most three launches and no synchronisation: every worker derives its tiles from `seq_lens`, so one captured CUDA
    graph serves any lengths up to the table's width. Values are looked at under WAVEFILL_CHECK=1 alone.

    Returns out [B, HQ, DV] in q's dtype, and with `return_lse` (out, lse [B, HQ] float32). A request without keys
    gives 0 and -inf.

    Inference only: under grad mode the result carries a node that raises once a backward pass reaches it; `out` cannot
    be combined with inputs that require grad, and neither can torch.compile. Tensors with a tangent and those that
    torch.func differentiates by or maps over (grad, jvp, vmap) are refused; detached ones are served there too.

    Raises InvalidArgument (a ValueError) or InvalidType (a TypeError) for bad shapes, dtypes, devices, options, and,
    on the CPU, bad values (negative lengths, lengths past the capacity, page ids out of range in slots that are read);
    BackendUnavailable where no backend can serve the call.

    >>> q, kv = torch.randn(2, 8, 64), torch.randn(2, 2, 100, 2, 64)
    >>> wavefill.decode_attention(q, kv[0], kv[1], torch.tensor([100, 7], dtype=torch.int32)).shape
    torch.Size([2, 8, 64])
    """
    if (softcap is not None or sinks is not None or alibi_slopes is not None or k_scale is not None
            or v_scale is not None or kv_shard is not None
            or (softmax is not _ONLINE and not _online(softmax))):
        raise _not_yet(softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, k_scale=k_scale, v_scale=v_scale,
                       kv_shard=kv_shard, softmax=softmax)
    return _call(q, k_cache, v_cache, seq_lens, block_table, None, scale, True, window, head_dim_v, schedule,
                 max_seq_len, None, sm_budget, impl, return_lse, out)


@overload
def attention(
    q: Tensor,
    k_cache: Tensor | KVPages,
    v_cache: Tensor | None,
    seq_lens: Tensor,
    block_table: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k_cache: Tensor | KVPages,
    v_cache: Tensor | None,
    seq_lens: Tensor,
    block_table: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k_cache: Tensor | KVPages,
    v_cache: Tensor | None,
    seq_lens: Tensor,
    block_table: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor,
    return_lse: bool,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k_cache: Tensor | KVPages,
    v_cache: Tensor | None,
    seq_lens: Tensor,
    block_table: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor,
    max_q_len: int | None = None,
    causal: bool = True,
    mask: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    head_dim_v: int | None = None,
    max_seq_len: int | None = None,
    schedule: ScheduleArg = "auto",
    softmax: object = "online",
    impl: str = "auto",
    return_lse: bool = False,
    out: Tensor | None = None,
    sm_budget: int | None = None,
    kv_shard: tuple[int, int, int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of several query tokens a request: drafts, chunked prefill, mixed batches.

    Arguments that are not named here are those of `decode_attention`.

    q:            [T, HQ, D], the query tokens of all requests, packed.
    cu_seqlens_q: [B + 1] int32, where each request's tokens start in q; starts at 0, never decreases.
    max_q_len:    an upper bound of the query tokens of a request known to the host.
    causal:       query i of n sits at position seq_len - n + i and sees no later key (bottom-right); False: it sees
                  every key of its request. `window` keeps to positions up to the query's own in both cases.
    mask:         a name of coming versions: giving one raises InvalidArgument.

    Returns out [T, HQ, DV], and with `return_lse` (out, lse [T, HQ] float32). Tokens past cu_seqlens_q[-1], and those
    that see no key, get 0 and -inf.

    >>> q, kv = torch.randn(5, 8, 64), torch.randn(2, 2, 100, 2, 64)
    >>> lengths, starts = torch.tensor([100, 7], dtype=torch.int32), torch.tensor([0, 4, 5], dtype=torch.int32)
    >>> wavefill.attention(q, kv[0], kv[1], lengths, cu_seqlens_q=starts).shape
    torch.Size([5, 8, 64])
    """
    if (softcap is not None or sinks is not None or alibi_slopes is not None or k_scale is not None
            or v_scale is not None or kv_shard is not None
            or (softmax is not _ONLINE and not _online(softmax))
            or mask is not None):
        raise _not_yet(softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, k_scale=k_scale, v_scale=v_scale,
                       kv_shard=kv_shard, softmax=softmax, mask=mask)
    if type(cu_seqlens_q) is not Tensor:
        _tensor("cu_seqlens_q", cu_seqlens_q)
    if type(causal) is not bool:
        raise invalid_type("causal", "must be a bool", repr(causal), "Pass True or False.")
    return _call(q, k_cache, v_cache, seq_lens, block_table, cu_seqlens_q, scale, causal, window, head_dim_v,
                 schedule, max_seq_len, max_q_len, sm_budget, impl, return_lse, out)


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merges partial results of the same queries over disjoint sets of keys, as if all keys had been in one softmax.

    outs: [N, ..., D] fp32, fp16 or bf16; any N: none gives the empty state.
    lses: [N, ...] float32, natural logarithms. A state with LSE -inf is empty: it adds nothing, whatever its output
          holds. NaN and +inf are no LSE and raise InvalidArgument.

    Returns (out [..., D] in the dtype of outs, lse [...] float32); where every state is empty, 0 and -inf.

    >>> out, lse = wavefill.merge_states(torch.ones(2, 8, 64), torch.zeros(2, 8))
    >>> float(lse[0])  # ln(1 + 1)
    0.6931471824645996
    """
    if type(outs) is not Tensor:
        _tensor("outs", outs, "Stack the states with torch.stack.")
    if type(lses) is not Tensor:
        _tensor("lses", lses, "Stack the states with torch.stack.")
    if _wants_grad(outs, lses):
        return _NoBackward.apply("outs", ops.merge_states, outs, lses)  # type: ignore[no-any-return, no-untyped-call]
    return ops.merge_states(outs, lses)  # type: ignore[no-any-return]


def flat_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias for up to 64 rows of x, with every weight read once: the linear layer of a decoding step.

    x:      [..., K], fp32, fp16 or bf16, at most 64 rows in its leading dimensions together.
    weight: [N, K], as torch.nn.Linear keeps it; any strides, read in place when the last one is 1.
    bias:   [N], or None.

    Returns [..., N] in that dtype; sums are in float32. All tensors live on the CPU and have one dtype.
    Raises InvalidArgument or InvalidType for shapes, dtypes and devices that break these rules, and under autograd.
    """
    _tensor("x", x)
    _tensor("weight", weight)
    if bias is not None:
        _tensor("bias", bias, "Pass a torch.Tensor or None.")
    if _wants_grad(x, weight, bias):
        return _NoBackward.apply("x", ops.flat_linear, x, weight, bias)  # type: ignore[no-any-return,no-untyped-call]
    return ops.flat_linear(x, weight, bias)  # type: ignore[no-any-return]


def warmup(
    specs: Iterable[AttentionSpec],
    *,
    schedules: Sequence[ScheduleArg] = ("auto",),
    device: str | torch.device = "cuda",
    jobs: int | None = None,
) -> int:
    """Compiles the GPU kernels of a list of shapes ahead of serving, so that no call of them compiles.

    specs:     the shapes; page_size None stands for a contiguous cache. Caches are taken to have unit last strides and
               rows of whole 16 bytes.
    schedules: what the calls will name; "auto" alone by default.
    device:    the GPU.
    jobs:      kernels that are compiled at a time, each in a process of its own; None: one a core.

    Returns the number of kernels that the list takes, whether they were compiled now or before. A later call may have
    any lengths, batch and table width.

    Raises InvalidArgument or InvalidType for what is no shape, schedule or GPU, and BackendUnavailable where the GPU
    backend cannot serve one.

    >>> wavefill.warmup([wavefill.AttentionSpec(32, 8, 128, 128)])  # Llama-3.1-8B, bfloat16 # doctest: +SKIP
    15
    """
    shapes = list(specs)
    for spec in shapes:
        if not isinstance(spec, AttentionSpec):
            raise invalid_type("specs", "must hold wavefill.AttentionSpec", type(spec).__name__,
                               "Give for example [wavefill.AttentionSpec(32, 8, 128, 128)].")
    where = torch.device(device)
    if where.type != "cuda":
        raise invalid("device", "must be a GPU", where, "The CPU backend has nothing to compile.")
    if not torch.cuda.is_available():
        raise BackendUnavailable(complaint("device", "must be a GPU that torch can use", where,
                                           "Run wavefill doctor to see what it finds."))
    jobs = None if jobs is None else whole("jobs", jobs)
    from wavefill.backends.gpu.warm import warmup as compile_all

    named = [ops.decode_schedule(ops.encode_schedule(schedule)) for schedule in schedules]
    chosen = [StreamK() if schedule == "auto" else schedule for schedule in named]
    return compile_all(shapes, chosen, torch.cuda.current_device() if where.index is None else where.index, jobs)


def _call(
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
) -> Tensor | tuple[Tensor, Tensor]:
    """Python's part of the checks, and the one call of an operator."""
    if isinstance(k_cache, KVPages):
        if v_cache is not None:
            raise invalid("v_cache", "must be None when k_cache is a KVPages, which holds both", "a tensor",
                          "Pass None.")
        v_cache = k_cache.v
        k_cache = k_cache.k
    if type(q) is not Tensor:
        _tensor("q", q)
    if type(k_cache) is not Tensor:
        _tensor("k_cache", k_cache, "Pass a tensor, or the KVPages of PagedKVCache.view(layer).")
    if v_cache is not None and type(v_cache) is not Tensor:
        _tensor("v_cache", v_cache)
    if type(seq_lens) is not Tensor:
        _tensor("seq_lens", seq_lens, "Pass torch.tensor(lengths, dtype=torch.int32).")
    if block_table is not None and type(block_table) is not Tensor:
        _tensor("block_table", block_table)
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
    if type(return_lse) is not bool:
        raise invalid_type("return_lse", "must be a bool", repr(return_lse), "Pass True or False.")
    if not isinstance(impl, str) or impl not in IMPLEMENTATIONS:
        raise _no_such_impl(impl)
    if impl != "auto" and q.device.type != impl:
        raise _impl_elsewhere(impl, q.device)
    text = schedule if isinstance(schedule, str) and schedule.isascii() else ops.encode_schedule(schedule)
    arguments = (q, k_cache, v_cache, seq_lens, block_table, cu_seqlens_q, scale, causal, window, head_dim_v, text,
                 max_seq_len, max_q_len, sm_budget)
    if out is not None and type(out) is not Tensor:
        _tensor("out", out)
    if (q.is_cuda and v_cache is not None and cu_seqlens_q is None and head_dim_v is None
            and not torch.compiler.is_compiling()):
        known = direct.attend(q, k_cache, v_cache, seq_lens, block_table, scale, window, text, sm_budget, out,
                              return_lse)
        if known is not None:
            return known if return_lse else known[0]  # type: ignore[return-value]
    if out is not None:
        lse = ops.attention_out(*arguments, out=out)
        return (out, lse) if return_lse else out
    if _wants_grad(q, k_cache, v_cache):
        fresh, lse = _NoBackward.apply("q", ops.attention, *arguments)  # type: ignore[no-untyped-call]
    else:
        fresh, lse = ops.attention(*arguments)
    return (fresh, lse) if return_lse else fresh


def _wants_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd records this call; within torch.compile and torch.func the operators refuse such inputs."""
    if not torch.is_grad_enabled():
        return False
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())
    return False


class _NoBackward(torch.autograd.Function):
    """Runs an operator and leaves a node in the graph, so that a backward pass stops with a reason, not in silence."""

    @staticmethod
    def forward(ctx: Any, name: str, operator: Any, *arguments: Any) -> Any:
        ctx.name = name
        return operator(*arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise checks.no_gradient(ctx.name)


# ---- errors


def _not_yet(**options: object) -> InvalidArgument:
    """The first option that was given and that no backend of this version has."""
    name, value = next((n, v) for n, v in options.items() if (not _online(v) if n == "softmax" else v is not None))
    shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return invalid(name, "is not in this version of wavefill", shown, _INSTEAD[name])


_INSTEAD = {
    "softcap": "Leave it out, or use a model without soft capping; torch's flex_attention has it.",
    "sinks": "Leave them out, or use a model without attention sinks; torch's flex_attention can express them.",
    "alibi_slopes": "Leave them out, or use a model without ALiBi; torch's flex_attention can express it.",
    "k_scale": "It belongs to quantised caches; keep the cache in fp32, fp16 or bf16 and leave it out.",
    "v_scale": "It belongs to quantised caches; keep the cache in fp32, fp16 or bf16 and leave it out.",
    "mask": "Use causal and window, or torch's scaled_dot_product_attention for other masks.",
    "softmax": 'Use softmax="online".',
    "kv_shard": "Attend to each part with its own lengths and merge with wavefill.merge_states.",
}


def _tensor(name: str, value: object, next_step: str = "Pass a torch.Tensor.") -> None:
    """Raises unless value is a tensor; callers ask only for what is not plainly one."""
    if not isinstance(value, Tensor):
        raise invalid_type(name, "must be a torch.Tensor", type(value).__name__, next_step)


def _whole(name: str, value: Any, least: int) -> Any:
    """`value` as an int that an operator can carry; a SymInt of a captured graph is one."""
    return value if isinstance(value, torch.SymInt) else whole(name, value, least, or_none=True)


def _online(softmax: object) -> bool:
    return isinstance(softmax, str) and softmax == _ONLINE


def _impl_elsewhere(impl: str, device: torch.device) -> BackendUnavailable:
    return BackendUnavailable(complaint("impl", f'"{impl}" serves tensors on {impl} alone', f"tensors on {device}",
                                        f'Move them with .to("{impl}"), or use impl="auto".'))


def _no_such_impl(impl: object) -> BackendUnavailable | TypeError:
    if isinstance(impl, str):
        return BackendUnavailable(complaint("impl", f"must be one of {', '.join(map(repr, IMPLEMENTATIONS))} in this "
                                            "version", repr(impl), 'Use impl="auto": it goes by the tensors.'))
    return invalid_type("impl", "must be a name", type(impl).__name__, 'Use impl="auto".')
