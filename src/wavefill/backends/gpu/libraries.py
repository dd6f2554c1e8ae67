"""Prompts of dense 16-bit caches go to the fastest attention kernel that is present, a library's or our own.

`wavefill.prefill` has the rules and names. What a library computes is the same function: lengths stay on the device,
and `around` sees to rows without keys, rows of no request and, where a library multiplies values past a request's end
with weights of zero, to values there that are no numbers: our own kernels, launched behind a gate, then do it again.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from wavefill import prefill
from wavefill.backends.gpu import kernels, launch, many
from wavefill.backends.gpu.kernels import Variant, constants
from wavefill.backends.gpu.launch import Call
from wavefill.scores import NONE, Options
from wavefill.spec import BackendUnavailable, complaint

#: Tokens after a request's last that a library may read: less than a tile of FlashAttention-3, which has 192 at most.
#: And those that a program looks at.
LOOK, AT_ONCE = 256, 64
#: Requests or flags that a program of `around` looks at, at once; query tokens and heads that it puts right.
CHUNK, TOKENS, HEADS = 128, 64, 32


@dataclass(frozen=True)
class Given:
    """What a library is given beside q, k, v and out: offsets [B + 1], lengths [B] and first keys [B + 1], int32."""

    starts: Tensor
    lens: Tensor
    keys: Tensor
    scale: float
    causal: bool


@dataclass(frozen=True)
class Library:
    """An attention library.

    attend: (q [T, HQ, D], k, v [B, S, KH, D], out, given) -> the LSE [HQ, T] of the output, which is written.
    apart:  keys from request to request, where it takes all requests' keys in one row; else 0.
    past:   whether values past a request's end can reach its output.
    """

    name: str
    attend: Callable[[Tensor, Tensor, Tensor, Tensor, Given], Tensor]
    apart: int = 0
    past: bool = False


def choose(own: Call, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, hopper: bool
           ) -> Callable[..., None] | None:
    """What runs a call in place of `launch.run`, with its arguments, or None where our own kernels do.

    own:    the call as our own kernels would run it. One that makes no rows (drafts) knows no gate, and stays.
    q:      [T, HQ, D] of 16-bit elements, in rows of whole 16 bytes; k, v: [B, S, KH, D] and the same with DV. Keys are
            hidden by lengths and the causal edge alone.
    hopper: whether the device has compute capability 9.0.

    Raises BackendUnavailable where WAVEFILL_PREFILL names a library that is not there.
    """
    wanted, (T, HQ, D), (B, S) = prefill.asked(), q.shape, k.shape[:2]
    _hold(wanted, hopper)
    if (wanted == "own" or own.expand is None or torch.version.hip is not None or v.shape[3] != D
            or (k.data_ptr() | v.data_ptr()) % 16
            or (wanted == "auto" and not prefill.is_prompt(T, B, S, HQ, D))
            or any(launch.copies_of(x.shape, x.stride(), False) != "boxes" for x in (k, v))):
        return None
    library = None
    operator = fa3_operator() if hopper and wanted != "flash" else None
    if operator is not None:
        library = Library(prefill.FA3, partial(_fa3, operator), past=True)
    elif wanted == "flash" or not isinstance(own.attention, many.Launch):
        apart = keys_apart(k, v)
        if apart is not None and flash_is_torchs():
            library = Library(prefill.FLASH, _flash, apart)
    if library is None or (wanted == "auto" and (library.name, D, q.dtype) in _failed):
        return None
    return partial(attend, library, scale, causal, wanted != "auto")


def _hold(wanted: str, hopper: bool) -> None:
    """Raise BackendUnavailable where a library is wanted that is not there."""
    gap = None
    if wanted in ("fa3", "flash") and torch.version.hip is not None:
        gap = "the GPU is none of NVIDIA's"
    elif wanted == "fa3" and not hopper:
        gap = "the GPU is not of compute capability 9.0"
    elif wanted == "fa3" and fa3_operator() is None:
        gap = "its operator cannot be found"
    elif wanted == "flash" and not flash_is_torchs():
        gap = "PyTorch has not its own"
    if gap is not None:
        raise BackendUnavailable(complaint(
            "WAVEFILL_PREFILL", "names a library that must be there", f"{wanted!r}, and {gap}",
            ("Install flash_attn_interface, load vLLM's build first, or unset it." if wanted == "fa3" else
             "Unset it.")))


def attend(library: Library, scale: float, causal: bool, named: bool, own: Call, q: Tensor, k: Tensor, v: Tensor,
           seq_lens: Tensor, table: Tensor | None, out: Tensor, lse: Tensor, *, starts: Tensor,
           options: Options = NONE, interpret: bool = False) -> None:
    """`launch.run` by a library, in two launches more than it takes, and our own gated ones where it reads past ends.

    named: whether the user named the library: its refusal is then an error. Else our own kernels serve, now and later.
    """
    (T, HQ, D), (B, S, KH, _) = q.shape, k.shape
    dtype = launch._DTYPE_NAMES[q.dtype]
    grid = (B, KH, LOOK // AT_ONCE) if library.past else (1, 1, 1)
    flags = B * KH * (LOOK // AT_ONCE) if library.past else 0
    buffer = torch.empty(3 * B + 2 + flags + 1, dtype=torch.int32, device=q.device)
    begins, lens, keys, seen, gate = torch.split(buffer, [B + 1, B, B + 1, flags, 1])
    enter, leave = variants(dtype, D, library.past)
    _launch(enter, grid, interpret, starts, seq_lens, v, buffer, seen, B, T, S, library.apart, *v.stride()[:3])
    try:
        with torch.no_grad():
            found = library.attend(q, k, v, out, Given(begins, lens, keys, scale, causal))
    except RuntimeError as error:
        if isinstance(error, (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))):
            raise
        said = (str(error).splitlines() or [type(error).__name__])[0][:200]
        if named:
            raise BackendUnavailable(complaint(
                "WAVEFILL_PREFILL", f"names a library that must take head size {D} of {dtype}",
                f"{library.name}, which says: {said}", "Unset it, or set it to own.")) from error
        _failed.add((library.name, D, q.dtype))
        warnings.warn(f"{library.name} does not take prompts of head size {D} here, and wavefill's own kernels do: "
                      f"{said}", RuntimeWarning, stacklevel=2)
        launch.run(own, q, k, v, seq_lens, table, out, lse, starts=starts, options=options, interpret=interpret)
        return
    _launch(leave, (-(-T // TOKENS), 1, 1), interpret, buffer, seen, gate, found, out, lse, B, T, HQ, flags,
            int(causal), *out.stride()[:2], *lse.stride())
    if library.past:
        launch.run(own, q, k, v, seq_lens, table, out, lse, starts=starts, options=options, interpret=interpret,
                   gate=gate)


#: Libraries, head sizes and dtypes that were refused in this process.
_failed: set[tuple[str, int, torch.dtype]] = set()


def variants(dtype: str, D: int, past: bool) -> tuple[Variant, Variant]:
    """The kernels before and after a library's."""
    sizes = {"D": D, "DP": 1 << (D - 1).bit_length(), "CHUNK": CHUNK}
    return (Variant("enter", dtype, constants({**sizes, "LOOK": LOOK if past else 0, "AT_ONCE": AT_ONCE}), 4,
                    unaligned=("STARTS", "LENS", "GIVEN", "FLAGS")),
            Variant("leave", dtype, constants({**sizes, "TOKENS": TOKENS, "HEADS": HEADS}), 4,
                    unaligned=("GIVEN", "FLAGS", "GATE", "FOUND", "OUT", "LSE")))


def _launch(variant: Variant, grid: tuple[int, int, int], interpret: bool, *args: Any) -> None:
    args = *args, *kernels.values(variant)
    if interpret:
        kernels.function(variant.kernel)[grid](*args)
        return
    device = torch.cuda.current_device()
    addresses = (x.data_ptr() if isinstance(x, Tensor) else x for x in args)
    kernels.compiled(variant, device)(grid, torch._C._cuda_getCurrentRawStream(device), *addresses)


# ---- FlashAttention-3

#: Operators of FlashAttention-3 (its own package, vLLM's build) have these arguments of a call, beside others.
_CALL = frozenset(("q", "k", "v", "out", "cu_seqlens_q", "seqused_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale",
                   "is_causal"))
#: What the others are that have no default of their own and are not optional.
_PLAIN = {"window_size_left": -1, "window_size_right": -1, "attention_chunk": 0, "softcap": 0.0,
          "is_rotary_interleaved": True, "num_splits": 1, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0}


def fa3_operator() -> Any | None:
    """FlashAttention-3's forward operator: of its own package, or of vLLM's build where this process has loaded it."""
    for space in ("flash_attn_3", "_vllm_fa3_C") if _package_loads() else ("_vllm_fa3_C",):
        operators = getattr(torch.ops, space)
        if hasattr(operators, "fwd") and _arguments(operators.fwd.default) is not None:
            return operators.fwd.default
    return None


@cache
def _package_loads() -> bool:
    if find_spec("flash_attn_interface") is None:
        return False
    try:
        importlib.import_module("flash_attn_interface")
    except Exception as error:  # of another release of torch, or without its compiled half
        warnings.warn(f"flash_attn_interface is installed and does not load: {error}", RuntimeWarning, stacklevel=2)
        return False
    return True


@cache
def _arguments(operator: Any) -> tuple[tuple[str, Any], ...] | None:
    """The operator's arguments in order, each with what it is unless a call says so; None if it is another operator."""
    found: dict[str, Any] = {}
    for argument in operator._schema.arguments:
        if argument.name in _PLAIN:
            found[argument.name] = _PLAIN[argument.name]
        elif argument.has_default_value():
            found[argument.name] = argument.default_value
        elif argument.name in _CALL or isinstance(argument.type, torch.OptionalType):
            found[argument.name] = None
        else:
            return None
    return tuple(found.items()) if found.keys() >= _CALL else None


def _fa3(operator: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, given: Given) -> Tensor:
    """No request has more query tokens than there are, nor more keys than its part of the cache."""
    call = {"q": q, "k": k, "v": v, "out": out, "cu_seqlens_q": given.starts, "seqused_k": given.lens,
            "max_seqlen_q": q.shape[0], "max_seqlen_k": k.shape[1], "softmax_scale": given.scale,
            "is_causal": given.causal}
    found: Tensor = operator(*(call.get(name, plain) for name, plain in _arguments(operator) or ()))[1]
    return found


# ---- FlashAttention-2 in PyTorch


def flash_is_torchs() -> bool:
    """Whether PyTorch has its kernels and nobody has put others in their place."""
    import torch.nn.attention as attention

    other: Callable[[], str | None] = getattr(attention, "current_flash_attention_impl", lambda: None)
    return torch.backends.cuda.is_flash_attention_available() and other() is None


def keys_apart(k: Tensor, v: Tensor) -> int | None:
    """Keys from request to request where k and v [B, S, KH, D] are seen as one row of keys, None where they cannot be.

    A cache with heads before tokens has the keys of KH - 1 other heads in between, which no request reads.
    """
    B, S = k.shape[:2]
    if B == 1:
        return S
    steps = {divmod(x.stride(0), x.stride(1)) if x.stride(1) > 0 else (0, 1) for x in (k, v)}
    apart, left = steps.pop()
    return None if steps or left or B * apart >= 1 << 31 else apart


def _flash(q: Tensor, k: Tensor, v: Tensor, out: Tensor, given: Given) -> Tensor:
    (B, S, KH, D), apart = k.shape, keys_apart(k, v)
    assert apart is not None
    k, v = (x.as_strided(((B - 1) * apart + S, KH, D), x.stride()[1:]) for x in (k, v))
    result, found = torch.ops.aten._flash_attention_forward(
        q, k, v, given.starts, given.keys, q.shape[0], S, 0.0, given.causal, False, scale=given.scale,
        seqused_k=given.lens)[:2]
    out.copy_(result)
    lse: Tensor = found
    return lse
