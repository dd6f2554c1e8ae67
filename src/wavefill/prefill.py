"""Which kernel computes a call, by name, and which prompts go to a library of attention kernels. Needs no torch.

`backends.gpu.libraries` calls the libraries by these rules, and `select.explain` tells what they come to.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

from wavefill import env
from wavefill.hardware import Cpu, Device
from wavefill.spec import DTYPE_BYTES, AttentionSpec, Schedule, StreamK

FA3, FLASH = "FlashAttention-3", "PyTorch's FlashAttention-2"
CPP, DECODE, MANY, PORTABLE = "wavefill C++", *(
    f"wavefill, {kind}" for kind in (
        "kernel of compute capability 9.0 for one query token",
        "tensor-core kernel of compute capability 9.0",
        "portable Triton kernel",
    ))

#: Places of the cache for each query token, at most, where a call is taken for prompts, not for chunks over prefixes.
PLACES_PER_TOKEN = 4
#: Query tokens x places of a request x query heads x head size from which a prompt goes to a library, some 0.1 ms of
#: work: what it gains should then be more than the kernels around it take (30 us on a prompt of 8K, head size 128).
LEAST_PRODUCTS = 1 << 35
#: Head sizes and groups that the GPU backend takes, and head sizes of its tensor-core kernel of compute capability 9.0.
MAX_HEAD_DIM, MAX_GROUP, MANY_HEAD_SIZES = 256, 128, (64, 128)
#: Tokens of a page that the kernels of compute capability 9.0 copy at once; tokens of a tile of the one for prompts.
BOX, MANY_TILE = 16, 128


def asked() -> str:
    """What WAVEFILL_PREFILL says: "auto", "own", "fa3" or "flash"."""
    return str(env.get("WAVEFILL_PREFILL") or "auto")


def is_prompt(T: int, B: int, S: int, HQ: int, D: int) -> bool:
    """Whether T query tokens of B requests with room for S keys each are prompts that are worth a library's call."""
    return PLACES_PER_TOKEN * T >= B * S and T * S * HQ * D >= LEAST_PRODUCTS


def fa3_installed() -> str | None:
    """Where FlashAttention-3 comes from: its own package, vLLM's build where this process has loaded it, or nowhere."""
    if find_spec("flash_attn_interface") is not None:
        return "flash_attn_interface"
    torch: Any = sys.modules.get("torch")
    return None if torch is None or not hasattr(torch.ops._vllm_fa3_C, "fwd") else "vLLM's build"


def kernel(device: Device, spec: AttentionSpec, schedule: Schedule | str, *, tokens: int, requests: int,
           longest: int) -> str:
    """What computes a call of such sizes on a device, by name; "none: ..." where nothing does.

    spec:             the shape; its q_len is that of the request with the most query tokens.
    schedule:         as asked for, "auto" or a schedule.
    tokens, requests: of the call. longest: keys of the longest request, which is the room of a contiguous cache.

    Libraries are those that are installed here.
    """
    if isinstance(device, Cpu):
        return CPP
    for name, value, most in (("D", spec.D, MAX_HEAD_DIM), ("DV", spec.DV, MAX_HEAD_DIM), ("G", spec.G, MAX_GROUP)):
        if value > most:
            return f"none: {name} is {value}, and the GPU backend takes up to {most}"
    several = spec.q_len > 1
    own = PORTABLE
    if device.capability == (9, 0) and DTYPE_BYTES[spec.dtype] == 2:
        boxes = not (spec.page_size or 0) % BOX and not spec.D % 16 and not spec.DV % 16
        tile = schedule.tile if isinstance(schedule, StreamK) else None
        if not several and not spec.D % 16 and not spec.DV % 16:
            own = DECODE
        elif several and boxes and spec.D == spec.DV and spec.D in MANY_HEAD_SIZES and tile in (None, MANY_TILE):
            own = MANY
    if device.capability is None or not several or schedule != "auto" or not takes(spec):
        return own
    wanted = asked()
    if wanted == "own" or not (wanted != "auto" or is_prompt(tokens, requests, longest, spec.HQ, spec.D)):
        return own
    return _library(device.capability, own, wanted)


def takes(spec: AttentionSpec) -> bool:
    """Whether libraries are asked for a shape: dense 16-bit heads of one size, and nothing that hides keys beside the
    causal edge."""
    return (spec.page_size is None and DTYPE_BYTES[spec.dtype] == 2 and spec.D == spec.DV and not spec.D % 16
            and spec.window is None and not spec.latent)


def _library(capability: tuple[int, int], own: str, wanted: str) -> str:
    """The best of the libraries that are installed here and the own kernel, or the one that is wanted."""
    where = fa3_installed() if capability == (9, 0) and wanted != "flash" else None
    if where is not None:
        return f"{FA3} ({where})"
    if wanted == "fa3":
        return f"none: WAVEFILL_PREFILL is fa3, and {FA3} is not installed or not for this GPU"
    if own == MANY and wanted == "auto":
        return own
    return FLASH if find_spec("torch") is not None else own
