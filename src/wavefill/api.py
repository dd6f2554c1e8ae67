"""The public functions: what they take and give, and which options this version lacks.

`wavefill.calls` makes them calls of operators. Dimensions are those of `wavefill.spec`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from wavefill import checks, ops
from wavefill.cache import KVPages
from wavefill.calls import ONLINE, NoBackward, attend, hold_tensor, not_yet, online, wants_grad
from wavefill.scores import OPTIONS
from wavefill.spec import (
    AttentionSpec,
    BackendUnavailable,
    ScheduleArg,
    StreamK,
    complaint,
    invalid,
    invalid_type,
    whole,
)


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
                 `KVPages` of `PagedKVCache.view`, with v_cache None. Or codes (on the CPU): float8_e4m3fn, which may
                 come as uint8, or int8.
    v_cache:     the same with DV; None for a latent cache (MLA), whose V is the first `head_dim_v` columns of K.
    seq_lens:    [B] int32, keys of each request, this step's included; the query sits at position seq_len - 1.
    block_table: [B, max_pages] int32, page ids; entries past a request's last page are never read.
    scale:       of the scores, D ** -0.5 if None; must be given for a latent cache.
    window:      keys that the query sees, its own included: positions seq_len - window and up; None for all.
    softcap:     above 0: scores s, once scaled, become softcap * tanh(s / softcap).
    sinks:       [HQ] fp32, fp16 or bf16: one more logit of each query head, without a value. It is neither scaled nor
                 capped nor biased, counts once whatever the split, and is in the LSE; finite or -inf.
    alibi_slopes: [HQ] fp32, fp16 or bf16: scores, once capped, lose slope * distance in positions.
    k_scale, v_scale: what codes of K and V are multiplied by: a number or [] float32 tensor, [KH] float32, or one a
                 token and head, [pages, page_size, KH] ([B, S, KH] without `block_table`) float32 or float16. None is
                 1, which int8 does not take. A latent cache has k_scale alone.
    head_dim_v:  DV of a latent cache.
    max_seq_len: an upper bound of seq_lens known to the host; may steer choices, never the result's meaning.
    schedule:    "auto", "fixed", "stream_k", "invariant", or `Fixed(...)`, `StreamK(...)`, `Invariant(...)`.
    impl:        "auto", or "cpu" or "cuda", which refuse tensors that live elsewhere.
    return_lse:  also return the natural-log LSE.
    out:         [B, HQ, DV] of q's dtype, written in place; shares no memory with the inputs.
    sm_budget:   the most SMs of a GPU that the call uses, so that neighbours find some free; None for all.

    softmax other than "online" and kv_shard are names of coming versions: giving one raises InvalidArgument.

    On a GPU (compute capability 8.0 or higher; head sizes up to 256, up to 128 query heads a KV head) the call takes at
    most three launches, `attention` four, and no synchronisation: every worker derives its tiles from `seq_lens`, so
    one captured CUDA graph serves any lengths up to the table's width, and any query tokens of each request. Values are
    looked at under WAVEFILL_CHECK=1 alone.

    Returns out [B, HQ, DV] in q's dtype, and with `return_lse` (out, lse [B, HQ] float32). A request without keys
    gives 0 and -inf, or with sinks 0 and the sink. To merge parts of one request's keys give sinks to one of them.

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
    if kv_shard is not None or (softmax is not ONLINE and not online(softmax)):
        raise not_yet(kv_shard=kv_shard, softmax=softmax)
    return attend(q, k_cache, v_cache, seq_lens, block_table, None, scale, True, window, head_dim_v, schedule,
                  max_seq_len, None, sm_budget, impl, return_lse, out, softcap, sinks, alibi_slopes, None, k_scale,
                  v_scale)


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
    max_q_len:    an upper bound of the query tokens of a request known to the host; give it for drafts on a GPU.
    causal:       query i of n sits at position seq_len - n + i and sees no later key (bottom-right); False: it sees
                  every key of its request. `window` keeps to positions up to the query's own in both cases.
    mask:         [T, W] int32 from `pack_mask`: which query tokens of its own request each query token sees (a tree of
                  drafts). It only hides: causal and window hold as well, and keys before the request's query tokens
                  are not touched by it. A row has a bit for each query token of its request; where max_q_len is
                  given, and on a GPU, for as many as max_q_len (on a GPU without it: T).

    With alibi_slopes the distance is that of positions, whichever comes first.

    Returns out [T, HQ, DV], and with `return_lse` (out, lse [T, HQ] float32). Tokens that see no key get 0 and -inf, or
    with sinks 0 and the sink; tokens past cu_seqlens_q[-1] get 0 and -inf in any case.

    >>> q, kv = torch.randn(5, 8, 64), torch.randn(2, 2, 100, 2, 64)
    >>> lengths, starts = torch.tensor([100, 7], dtype=torch.int32), torch.tensor([0, 4, 5], dtype=torch.int32)
    >>> wavefill.attention(q, kv[0], kv[1], lengths, cu_seqlens_q=starts).shape
    torch.Size([5, 8, 64])
    """
    if kv_shard is not None or (softmax is not ONLINE and not online(softmax)):
        raise not_yet(kv_shard=kv_shard, softmax=softmax)
    if type(cu_seqlens_q) is not Tensor:
        hold_tensor("cu_seqlens_q", cu_seqlens_q)
    if type(causal) is not bool:
        raise invalid_type("causal", "must be a bool", repr(causal), "Pass True or False.")
    return attend(q, k_cache, v_cache, seq_lens, block_table, cu_seqlens_q, scale, causal, window, head_dim_v,
                  schedule, max_seq_len, max_q_len, sm_budget, impl, return_lse, out, softcap, sinks, alibi_slopes,
                  mask, k_scale, v_scale)


def pack_mask(masks: Tensor | Sequence[Tensor]) -> Tensor:
    """The masks of a batch of drafts as `attention` takes them: 32 tokens in an int32.

    masks: for each request [n, n] bool on one device: row i says which of the request's n query tokens token i sees; a
           sequence of them, n may differ and be 0, or one tensor [B, n, n].

    Returns [T, W] int32 on that device, T the sum of the n and W the words of the largest, at least 1: bit j % 32 of
    word j // 32 of a row stands for token j.

    Raises InvalidArgument or InvalidType for masks of other shapes or dtypes.

    >>> wavefill.pack_mask([torch.tensor([[True, False], [True, True]]), torch.ones(3, 3, dtype=torch.bool)]).tolist()
    [[1], [3], [7], [7], [7]]
    """
    if isinstance(masks, Tensor) and masks.dim() != 3:
        raise invalid("masks", "as one tensor must be [B, n, n]", list(masks.shape),
                      "Give a list of [n, n] for drafts of different lengths.")
    if not isinstance(masks, (Tensor, Sequence)):
        raise invalid_type("masks", "must be a tensor or a list of tensors", type(masks).__name__,
                           "Pass one bool tensor [n, n] for each request.")
    if isinstance(masks, Tensor):
        checks.plain("masks", masks)
    each = list(masks)
    for i, mask in enumerate(each):
        hold_tensor(f"masks[{i}]", mask, "Pass one bool tensor [n, n] for each request.")
        checks.plain(f"masks[{i}]", mask)
        if mask.dtype != torch.bool:
            raise invalid_type(f"masks[{i}]", "dtype must be bool", mask.dtype, "Compare, for example mask != 0.")
        if mask.dim() != 2 or mask.shape[0] != mask.shape[1]:
            raise invalid(f"masks[{i}]", "must be [n, n]", list(mask.shape),
                          "Rows and columns are the query tokens of one request; keys before them are always seen.")
        if mask.device != each[0].device:
            raise invalid(f"masks[{i}]", f"must be on the device of the first ({each[0].device})", mask.device,
                          "Move them to one device.")
    W = max([1, *(-(-mask.shape[1] // 32) for mask in each)])
    packed = torch.zeros(sum(mask.shape[0] for mask in each), 32 * W, dtype=torch.int32,
                         device=each[0].device if each else None)
    at = 0
    for mask in each:
        n = mask.shape[0]
        packed[at:at + n, :n] = mask
        at += n
    bits = torch.arange(32, dtype=torch.int32, device=packed.device)
    return (packed.view(-1, W, 32) << bits).sum(-1, dtype=torch.int32)


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merges partial results of the same queries over disjoint sets of keys, as if all keys had been in one softmax.

    outs: [N, ..., D] fp32, fp16 or bf16; any N: none gives the empty state.
    lses: [N, ...] float32, natural logarithms. A state with LSE -inf is empty: it adds nothing, whatever its output
          holds. NaN and +inf are no LSE and raise InvalidArgument; on a GPU, unless WAVEFILL_CHECK=1, they make a
          row NaN.

    Returns (out [..., D] in the dtype of outs, lse [...] float32); where every state is empty, 0 and -inf.

    >>> out, lse = wavefill.merge_states(torch.ones(2, 8, 64), torch.zeros(2, 8))
    >>> float(lse[0])  # ln(1 + 1)
    0.6931471824645996
    """
    if type(outs) is not Tensor:
        hold_tensor("outs", outs, "Stack the states with torch.stack.")
    if type(lses) is not Tensor:
        hold_tensor("lses", lses, "Stack the states with torch.stack.")
    if wants_grad(outs, lses):
        return NoBackward.apply("outs", ops.merge_states, outs, lses)  # type: ignore[no-any-return, no-untyped-call]
    return ops.merge_states(outs, lses)  # type: ignore[no-any-return]


def flat_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias for up to 64 rows of x, with every weight read once: the linear layer of a decoding step.

    x:      [..., K], fp32, fp16 or bf16, at most 64 rows in its leading dimensions together.
    weight: [N, K], as torch.nn.Linear keeps it; any strides, read in place when the last one is 1.
    bias:   [N], or None.

    Returns [..., N] in that dtype; sums are in float32. All tensors live on the CPU and have one dtype.
    Raises InvalidArgument or InvalidType for shapes, dtypes and devices that break these rules, and under autograd.
    """
    hold_tensor("x", x)
    hold_tensor("weight", weight)
    if bias is not None:
        hold_tensor("bias", bias, "Pass a torch.Tensor or None.")
    if wants_grad(x, weight, bias):
        return NoBackward.apply("x", ops.flat_linear, x, weight, bias)  # type: ignore[no-any-return,no-untyped-call]
    return ops.flat_linear(x, weight, bias)  # type: ignore[no-any-return]


def warmup(
    specs: Iterable[AttentionSpec],
    *,
    schedules: Sequence[ScheduleArg] = ("auto",),
    options: Sequence[str] = (),
    device: str | torch.device = "cuda",
    jobs: int | None = None,
) -> int:
    """Compiles the GPU kernels of a list of shapes ahead of serving, so that no call of them compiles.

    specs:     the shapes; page_size None stands for a contiguous cache. Caches are taken to have unit last strides and
               rows of whole 16 bytes. q_len 1 stands for `decode_attention`, more for `attention` with up to so many
               query tokens a request; window and causal change no kernel.
    schedules: what the calls will name; "auto" alone by default.
    options:   the names of the optional arguments that each of the calls will have, all of them together: "softcap",
               "sinks", "alibi_slopes" and, with q_len above 1, "mask". Calls with others, or none, want a warmup of
               their own.
    device:    the GPU.
    jobs:      kernels that are compiled at a time, each in a process of its own; None: one a core.

    Returns the number of kernels that the list takes, whether they were compiled now or before. A later call may have
    any lengths, batch, table width and sm_budget.

    Raises InvalidArgument or InvalidType for what is no shape, schedule, option or GPU, and BackendUnavailable where
    the GPU backend cannot serve one.

    >>> wavefill.warmup([wavefill.AttentionSpec(32, 8, 128, 128)])  # Llama-3.1-8B on an H200 # doctest: +SKIP
    3
    """
    if isinstance(specs, AttentionSpec) or not isinstance(specs, Iterable):
        raise invalid_type("specs", "must be a sequence of wavefill.AttentionSpec", type(specs).__name__,
                           "Give for example [wavefill.AttentionSpec(32, 8, 128, 128)].")
    if isinstance(schedules, str):
        raise invalid_type("schedules", "must be a sequence", repr(schedules), f"Give [{schedules!r}].")
    shapes = list(specs)
    for spec in shapes:
        if not isinstance(spec, AttentionSpec):
            raise invalid_type("specs", "must hold wavefill.AttentionSpec", type(spec).__name__,
                               "Give for example [wavefill.AttentionSpec(32, 8, 128, 128)].")
    named = [ops.decode_schedule(ops.encode_schedule(schedule)) for schedule in schedules]
    chosen = [StreamK() if schedule == "auto" else schedule for schedule in named]
    if isinstance(options, (str, bytes)) or not isinstance(options, Iterable):
        raise invalid_type("options", "must be a sequence of names", repr(options), 'Give for example ["sinks"].')
    options = tuple(options)
    for name in options:
        if name not in OPTIONS:
            raise invalid("options", f"must be of {', '.join(map(repr, OPTIONS))}", repr(name),
                          "Other arguments change no kernel: leave them out.")
        if name == "mask" and any(spec.q_len == 1 for spec in shapes):
            raise invalid("options", 'may hold "mask" only where each of specs has a q_len above 1', repr(name),
                          "Compile shapes of one query token in another call.")
    where = torch.device(device)
    if where.type != "cuda":
        raise invalid("device", "must be a GPU", where, "The CPU backend has nothing to compile.")
    if not torch.cuda.is_available():
        raise BackendUnavailable(complaint("device", "must be a GPU that torch can use", where,
                                           "Run wavefill doctor to see what it finds."))
    jobs = None if jobs is None else whole("jobs", jobs)
    from wavefill.backends.gpu.warm import warmup as compile_all

    index = torch.cuda.current_device() if where.index is None else where.index
    return compile_all(shapes, chosen, options, index, jobs)
