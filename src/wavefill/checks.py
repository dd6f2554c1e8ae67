"""The rules for tensors, held where every call passes: in the operators, real and fake alike.

Each function raises on the first rule that is broken. They cost a few microseconds and look at shapes, dtypes and
devices alone, so they also run on fake tensors while torch.compile traces. Values (lengths, page ids) are checked by
the backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from wavefill.spec import (
    DTYPE_BYTES,
    MIN_FLOAT32,
    BackendUnavailable,
    InvalidArgument,
    complaint,
    invalid,
    invalid_type,
    number,
)

#: torch's dtypes under the names of `spec.DTYPE_BYTES`.
DTYPE_NAMES = {getattr(torch, name): name for name in DTYPE_BYTES}
#: Codes in which a cache may hold K and V, by dtype; other engines hand e4m3 as uint8.
CODES = {torch.float8_e4m3fn: "e4m3", torch.uint8: "e4m3", torch.int8: "int8"}
#: Devices with a backend, and those with one for linear layers.
DEVICES = ("cpu", "cuda")
LINEAR_DEVICES = ("cpu",)

#: Rows that a flat linear layer takes.
MAX_ROWS = 64

_INT32 = torch.int32
_INT64 = torch.int64
_FLOAT32 = torch.float32
_CPU = torch.device("cpu")
#: Devices on which an operator runs; "meta" computes shapes alone.
_RUNS_ON = (*DEVICES, "meta")


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    seq_lens: Tensor,
    block_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    scale: float | None,
    window: int | None,
    head_dim_v: int | None,
    max_seq_len: int | None,
    max_q_len: int | None,
) -> int:
    """Checks one attention call and returns DV. Arguments are those of the operator."""
    q_shape, k_shape = q.shape, k_cache.shape
    if len(q_shape) != 3:
        raise _shape("q", "[tokens, HQ, D]", q_shape, "A batch of one token a request is q.view(B, HQ, D).")
    if len(k_shape) != 4:
        raise _shape("k_cache", "[pages, page_size, KH, D], or [B, S, KH, D] without block_table", k_shape,
                     "Permute or view it; any strides are read as they are.")
    T, HQ, D = q_shape
    pages, _, KH, k_dim = k_shape
    if D < 1 or HQ < 1:
        raise _shape("q", "[tokens, HQ, D] with at least one head and one column", q_shape, "Check its last sizes.")
    if k_dim != D:
        raise invalid("k_cache", f"must have the head size of q ({D})", _size(k_shape),
                      "Give both one head size in their last dimension; v_cache may have its own.")
    if KH < 1 or HQ % KH:
        raise invalid("k_cache", f"KH must divide the query heads ({HQ})", f"KH {KH} in {_size(k_shape)}",
                      "The layout is [.., tokens, KH, D]: permute an HND cache with .transpose(1, 2).")
    DV = _value_dim(k_shape, v_cache, scale, head_dim_v)

    dtype = q.dtype
    if dtype not in DTYPE_NAMES:
        raise invalid_type("q", f"dtype must be one of {', '.join(DTYPE_BYTES)}", dtype, "Convert with .to(dtype).")
    k_dtype = k_cache.dtype
    if k_dtype != dtype and k_dtype not in CODES:
        raise _dtype("k_cache", f"that of q ({dtype}), or float8_e4m3fn, uint8 (e4m3) or int8", k_cache,
                     "Convert q to the cache's dtype.")
    if v_cache is not None and v_cache.dtype != k_dtype:
        whose = "q" if k_dtype == dtype else "k_cache"
        raise _dtype("v_cache", f"that of {whose} ({k_dtype})", v_cache, "Keep K and V in one dtype.")

    device = q.device
    if device != _CPU and device.type not in _RUNS_ON:
        raise unavailable(device)
    if k_cache.device != device:
        raise _device("k_cache", k_cache, device)
    if v_cache is not None and v_cache.device != device:
        raise _device("v_cache", v_cache, device)

    B = _lengths(seq_lens, device)
    if cu_seqlens_q is None:
        if T != B:
            raise invalid("seq_lens", f"must have one entry for each of q's {T} tokens", _size(seq_lens.shape),
                          "For several query tokens a request use wavefill.attention with cu_seqlens_q.")
    else:
        _index("cu_seqlens_q", cu_seqlens_q, 1, device)
        if cu_seqlens_q.shape[0] != B + 1:
            raise _shape("cu_seqlens_q", f"[B + 1] = [{B + 1}]", cu_seqlens_q.shape,
                         "It starts with 0 and ends with the number of query tokens.")
    if block_table is None:
        if pages != B:
            raise invalid("k_cache", f"without block_table must be [B, S, KH, D] with B = {B}", _size(k_shape),
                          "Slice the batch, or pass block_table for a paged cache.")
    else:
        _index("block_table", block_table, 2, device)
        if block_table.shape[0] != B:
            raise invalid("block_table", f"must have one row for each of the {B} requests", _size(block_table.shape),
                          "Give [B, max_pages]; all query tokens of a request share its row.")
    if scale is not None:
        number("scale", scale)
    if window is not None and window < 1:
        raise invalid("window", "must be at least 1, or None for every key", window,
                      "A window counts the keys that a query sees, its own included.")
    if max_seq_len is not None and max_seq_len < 0:
        raise invalid("max_seq_len", "must be 0 or more", max_seq_len, _HINT)
    if max_q_len is not None and max_q_len < 0:
        raise invalid("max_q_len", "must be 0 or more", max_q_len, _HINT)
    if torch.is_grad_enabled() and (
        q.requires_grad or k_cache.requires_grad or (v_cache is not None and v_cache.requires_grad)
    ):
        raise no_gradient()
    if forward_ad._current_level >= 0:
        _no_tangents(q=q, k_cache=k_cache, v_cache=v_cache)
    return DV


def _value_dim(k_shape: Sequence[int], v_cache: Tensor | None, scale: float | None, head_dim_v: int | None) -> int:
    """DV, from V's last size, or from `head_dim_v` where V is the first columns of K."""
    if v_cache is not None:
        v_shape = v_cache.shape
        if len(v_shape) != 4 or v_shape[:3] != k_shape[:3] or v_shape[3] < 1:
            raise invalid("v_cache", f"must match k_cache {_size(k_shape)} in all but the head size", _size(v_shape),
                          "Give K and V the same pages, tokens and heads.")
        if head_dim_v is not None and head_dim_v != v_shape[3]:
            raise invalid("head_dim_v", f"must be v_cache's head size ({v_shape[3]})", head_dim_v,
                          "Leave it out; it is for latent caches, whose V is part of K.")
        return v_shape[3]
    if head_dim_v is None or scale is None:
        missing = "head_dim_v" if head_dim_v is None else "scale"
        raise invalid(missing, "must be given when v_cache is None (a latent cache)", None,
                      "Pass v_cache, or head_dim_v and scale as for MLA: the latent's width says nothing about them.")
    if not 1 <= head_dim_v <= k_shape[3]:
        raise invalid("head_dim_v", f"must be from 1 to k_cache's head size ({k_shape[3]})", head_dim_v,
                      "V is the first head_dim_v columns of K.")
    return head_dim_v


def scales(k_cache: Tensor, v_cache: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Checks the scales of caches that have passed `attention` or `append`."""
    codes = CODES.get(k_cache.dtype)
    for name, scale, cache in (("k_scale", k_scale, k_cache), ("v_scale", v_scale, v_cache)):
        if scale is None:
            if codes == "int8" and cache is not None:
                raise invalid(name, "must be given for a cache of int8, whose values are code x scale", None,
                              "Give the scales that the cache was written with.")
            continue
        if codes is None:
            raise invalid(name, "belongs to quantised caches (float8_e4m3fn, uint8 or int8)",
                          f"a cache of {k_cache.dtype}", "Leave it out.")
        if cache is None:
            raise invalid(name, "must be None where v_cache is (a latent cache), whose V is part of K", "a tensor",
                          "Give k_scale alone.")
        each = cache.shape[:3]
        if scale.shape not in ((), (each[2],), each):
            raise _shape(name, f"[], [KH] = [{each[2]}], or one a token and head, {_size(each)}", scale.shape,
                         "Give one for all, one a KV head, or the cache's shape without the head size.")
        if scale.dtype != _FLOAT32 and (scale.dtype != torch.float16 or scale.dim() < 3):
            raise _dtype(name, "float32, or float16 for scales of tokens", scale, "Convert it with .float().")
        if scale.device != cache.device and (scale.dim() or scale.device != _CPU):
            raise _device(name, scale, cache.device)
        if scale.requires_grad and torch.is_grad_enabled():
            raise no_gradient(name)
    if forward_ad._current_level >= 0:
        _no_tangents(k_scale=k_scale, v_scale=v_scale)


def options(
    q: Tensor,
    cu_seqlens_q: Tensor | None,
    max_q_len: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    mask: Tensor | None,
) -> None:
    """Checks the options of an attention call that has passed `attention`."""
    T, HQ, _ = q.shape
    if softcap is not None and number("softcap", softcap) < MIN_FLOAT32:
        raise invalid("softcap", "must be above 0, and large enough for float32 (1.2e-38)", softcap,
                      "Leave it out for scores without a cap.")
    for name, heads in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if heads is None:
            continue
        if heads.shape != (HQ,):
            raise _shape(name, f"[HQ] = [{HQ}]", heads.shape, "Give one number for each query head of q.")
        if heads.dtype not in DTYPE_NAMES:
            raise _dtype(name, f"one of {', '.join(DTYPE_BYTES)}", heads, "Convert with .float().")
        if heads.device != q.device:
            raise _device(name, heads, q.device)
        if heads.requires_grad and torch.is_grad_enabled():
            raise no_gradient(name)
    if forward_ad._current_level >= 0:
        _no_tangents(sinks=sinks, alibi_slopes=alibi_slopes)
    if mask is None:
        return
    if cu_seqlens_q is None:
        raise invalid("mask", "needs cu_seqlens_q, since it is about several query tokens of a request", "no offsets",
                      "Leave it out: a single query token sees itself.")
    if mask.dtype != _INT32:
        raise _dtype("mask", "int32, packed bits", mask, "Make it with wavefill.pack_mask(masks).")
    if mask.dim() != 2 or mask.shape[0] != T or mask.shape[1] < 1:
        raise _shape("mask", f"[T, W] = [{T}, W], with W at least 1", mask.shape,
                     "Make it with wavefill.pack_mask(masks): a row for each query token.")
    if mask.device != q.device:
        raise _device("mask", mask, q.device)
    # Where the query tokens of a request cannot be read without waiting for a GPU, their bound is what counts.
    most = T if max_q_len is None and q.device.type != "cpu" else max_q_len
    if most is not None and 32 * mask.shape[1] < most:
        raise invalid("mask", f"must have a bit for each of up to {most} query tokens of a request",
                      f"{32 * mask.shape[1]} bits a row",
                      "Pass the most query tokens of a request as max_q_len, or a mask with more words a row.")


def result(out: Tensor, q: Tensor, DV: int) -> None:
    """Checks the shape, dtype and device of `out=` of an attention call."""
    T, HQ, _ = q.shape
    if out.shape != (T, HQ, DV):
        raise _shape("out", f"{_size((T, HQ, DV))}", out.shape, "Make it with q.new_empty(...).")
    if out.dtype != q.dtype:
        raise _dtype("out", f"that of q ({q.dtype})", out, "Make it with q.new_empty(...).")
    if out.device != q.device:
        raise _device("out", out, q.device)
    if out.requires_grad and torch.is_grad_enabled():
        raise no_gradient("out")
    if forward_ad._current_level >= 0:
        _no_tangents(out=out)


def append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Checks one append. Arguments are those of the operator."""
    k_shape, v_shape = k_cache.shape, v_cache.shape
    if len(k_shape) != 4:
        raise _shape("k_cache", "[pages, page_size, KH, D]", k_shape, "Permute or view it.")
    if len(v_shape) != 4 or v_shape[:3] != k_shape[:3]:
        raise invalid("v_cache", f"must match k_cache {_size(k_shape)} in all but the head size", _size(v_shape),
                      "Give K and V the same pages, tokens and heads.")
    device, dtype = k_cache.device, k_cache.dtype
    if device != _CPU and device.type not in _RUNS_ON:
        raise unavailable(device)
    if slots.dtype != _INT64 or slots.dim() != 1:
        raise invalid_type("slots", "must be int64 [tokens]", f"{slots.dtype} {_size(slots.shape)}",
                           "A slot is page * page_size + offset.")
    N = slots.shape[0]
    if k.shape != (N, *k_shape[2:]):
        raise _shape("k", f"[tokens, KH, D] = {_size((N, *k_shape[2:]))}", k.shape, "Pack the new tokens of a step.")
    if v.shape != (N, *v_shape[2:]):
        raise _shape("v", f"[tokens, KH, DV] = {_size((N, *v_shape[2:]))}", v.shape, "Pack the new tokens of a step.")
    if dtype not in DTYPE_NAMES:
        if dtype not in CODES:
            raise _dtype("k_cache", f"one of {', '.join(DTYPE_BYTES)}, or float8_e4m3fn, uint8 (e4m3) or int8", k_cache,
                         "Convert the cache.")
        given = k.dtype
        if given not in DTYPE_NAMES:
            raise _dtype("k", f"one of {', '.join(DTYPE_BYTES)}", k, "Codes are made from values here.")
    else:
        given = dtype
    if v_cache.dtype != dtype:
        raise _dtype("v_cache", f"that of k_cache ({dtype})", v_cache, f"Convert it with .to({dtype}).")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != given:
            whose = "k_cache" if given == dtype else "k"
            raise _dtype(name, f"that of {whose} ({given})", tensor, f"Convert it with .to({given}).")
    for name, tensor in (("v_cache", v_cache), ("k", k), ("v", v)):
        if tensor.device != device:
            raise _device(name, tensor, device)
    if k_scale is not None or v_scale is not None or given != dtype:
        scales(k_cache, v_cache, k_scale, v_scale)
    if slots.device != device:
        raise _device("slots", slots, device)
    if torch.is_grad_enabled() and (k_cache.requires_grad or v_cache.requires_grad):
        raise no_gradient("k_cache")
    if forward_ad._current_level >= 0:
        _no_tangents(k_cache=k_cache, v_cache=v_cache, k=k, v=v)


def merge_states(outs: Tensor, lses: Tensor) -> None:
    """Checks one merge. Arguments are those of the operator."""
    if outs.dim() < 2 or lses.dim() != outs.dim() - 1 or outs.shape[:-1] != lses.shape:
        raise invalid("lses", "must have the shape of outs [N, ..., D] without its last size",
                      f"outs {_size(outs.shape)}, lses {_size(lses.shape)}", "Stack N states along a first dimension.")
    if outs.dtype not in DTYPE_NAMES:
        raise invalid_type("outs", f"dtype must be one of {', '.join(DTYPE_BYTES)}", outs.dtype,
                           "Convert with .to(dtype).")
    if lses.dtype != _FLOAT32:
        raise _dtype("lses", "float32, natural logarithms", lses, "Convert with .to(torch.float32).")
    device = outs.device
    if device != _CPU and device.type not in _RUNS_ON:
        raise unavailable(device)
    if lses.device != device:
        raise _device("lses", lses, device)
    if torch.is_grad_enabled() and (outs.requires_grad or lses.requires_grad):
        raise no_gradient("outs")
    if forward_ad._current_level >= 0:
        _no_tangents(outs=outs, lses=lses)


def flat_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Checks one linear layer of a few rows. Arguments are those of the operator."""
    if weight.dim() != 2 or not weight.shape[1]:
        raise _shape("weight", "[N, K] with K at least 1", weight.shape, "It is laid out as in torch.nn.Linear.")
    N, K = weight.shape
    if x.dim() < 1 or x.shape[-1] != K:
        raise _shape("x", f"[..., K] with weight's K of {K}", x.shape, "Its last dimension is the one that is summed.")
    rows = x.shape[:-1].numel()
    if rows > MAX_ROWS:
        raise invalid("x", f"must have at most {MAX_ROWS} rows", f"{rows} in {_size(x.shape)}",
                      "Use torch.nn.functional.linear for larger batches.")
    if bias is not None and bias.shape != (N,):
        raise _shape("bias", f"[N] = [{N}]", bias.shape, "Leave it out if the layer has none.")
    dtype, device = weight.dtype, weight.device
    if dtype not in DTYPE_NAMES:
        raise invalid_type("weight", f"dtype must be one of {', '.join(DTYPE_BYTES)}", dtype,
                           "Convert with .to(dtype).")
    if device.type not in (*LINEAR_DEVICES, "meta"):
        raise unavailable(device, LINEAR_DEVICES)
    for name, tensor in (("x", x), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            raise _dtype(name, f"that of weight ({dtype})", tensor, f"Convert it with .to({dtype}).")
        if tensor.device != device:
            raise _device(name, tensor, device)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        raise no_gradient("weight" if weight.requires_grad else "x" if x.requires_grad else "bias")
    if forward_ad._current_level >= 0:
        _no_tangents(x=x, weight=weight, bias=bias)


def known_device(device: object) -> torch.device:
    """The device, a GPU with its number; raises for one that torch doesn't know or have, or that no backend runs on."""
    try:
        known = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError, ValueError):
        raise invalid("device", 'must be "cpu", or a GPU such as "cuda"', repr(device),
                      "Leave it out, or give a device of torch.") from None
    if known.type not in DEVICES:
        raise unavailable(known)
    if known.type == "cpu":
        return _CPU
    if not torch.cuda.is_available():
        raise BackendUnavailable(complaint("device", "must be a GPU that torch can use", known,
                                           "Run wavefill doctor to see what it finds."))
    index, count = torch.cuda.current_device() if known.index is None else known.index, torch.cuda.device_count()
    if index >= count:
        raise invalid("device", f"must be one of the {count} GPUs that torch finds", known, "They count from 0.")
    return torch.device("cuda", index)


def _lengths(seq_lens: Tensor, device: torch.device) -> int:
    _index("seq_lens", seq_lens, 1, device)
    return seq_lens.shape[0]


def _index(name: str, tensor: Tensor, dims: int, device: torch.device) -> None:
    if tensor.dtype != _INT32:
        raise _dtype(name, "int32", tensor, "Convert with .to(torch.int32).")
    if tensor.dim() != dims:
        raise _shape(name, "[B, max_pages]" if dims == 2 else "one-dimensional", tensor.shape, "Reshape it.")
    if tensor.device != device:
        raise _device(name, tensor, device)


def _no_tangents(**tensors: Tensor | None) -> None:
    """Raises where a tensor carries a tangent of forward-mode differentiation, which the result would lose."""
    for name, tensor in tensors.items():
        if tensor is not None and has_tangent(tensor):
            raise no_derivative(name, "a tensor with a tangent")


def has_tangent(tensor: Tensor) -> bool:
    """Whether forward-mode differentiation follows the tensor."""
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def plain(name: str, tensor: Tensor) -> None:
    """Raises unless a tensor is what kernels read, numbers at regular strides; dispatch finds out most that are not."""
    if tensor.is_nested:
        raise _not_plain(name, "a nested tensor", "Pack its tokens in a row and give their lengths.")
    if tensor.is_quantized:
        raise _not_plain(name, f"a quantized tensor ({tensor.dtype})", "Convert it with .dequantize().")
    if tensor.layout != torch.strided:
        raise _not_plain(name, f"layout {str(tensor.layout).removeprefix('torch.')}", "Convert it with .to_dense().")
    if tensor.is_neg():
        raise _not_plain(name, "a view with the sign turned", "Convert it with .resolve_neg().")


# ---- errors

_HINT = "It is an upper bound known to the host; leave it out if there is none."


def unavailable(device: torch.device, devices: Sequence[str] = DEVICES) -> BackendUnavailable:
    """No backend of this version runs the operator on the device."""
    return BackendUnavailable(complaint(
        "device", f"this version of wavefill has a backend for {' and '.join(devices)} alone", device,
        'Move the tensors with .to("cpu"), or use torch\'s scaled_dot_product_attention there.',
    ))


def no_gradient(name: str = "q") -> InvalidArgument:
    """The call is part of a computation that asks for gradients."""
    return invalid(name, "wavefill is for inference and has no backward pass", "a tensor that requires grad",
                   "Run under torch.no_grad() or torch.inference_mode(), or train with torch's own attention.")


def no_derivative(name: str, got: str) -> InvalidArgument:
    """The call is part of a forward-mode derivative, or of one that torch.func takes."""
    return invalid(name, "wavefill is for inference and has no derivatives", got,
                   "Give it detached, x.detach(), or differentiate torch's own attention.")


def transformed(name: str, transform: str, next_step: str) -> InvalidArgument:
    """The call is part of a transform of torch.func that it has no rule for."""
    return invalid(name, f"takes no part in {transform}", "a tensor that it has wrapped", next_step)


def _not_plain(name: str, got: str, next_step: str) -> InvalidArgument:
    return invalid(name, "must be a dense, strided tensor", got, next_step)


def _size(shape: Sequence[int]) -> str:
    return str(list(shape))


def _shape(name: str, rule: str, shape: Sequence[int], next_step: str) -> InvalidArgument:
    return invalid(name, f"must be {rule}", _size(shape), next_step)


def _dtype(name: str, rule: str, tensor: Tensor, next_step: str) -> TypeError:
    return invalid_type(name, f"dtype must be {rule}", tensor.dtype, next_step)


def _device(name: str, tensor: Tensor, device: torch.device) -> InvalidArgument:
    return invalid(name, f"must be on the device of the other tensors ({device})", tensor.device,
                   f'Move it with .to("{device}").')
