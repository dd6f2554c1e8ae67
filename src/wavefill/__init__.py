"""wavefill: long-context LLM decoding as fast as the memory bus allows.

Importing this module is cheap: torch is loaded at the first use of a function that needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from wavefill.spec import (
    AttentionSpec,
    BackendUnavailable,
    Fixed,
    InvalidArgument,
    InvalidType,
    Invariant,
    OutOfPages,
    StreamK,
    UnsupportedModel,
    WavefillError,
)

if TYPE_CHECKING:
    from wavefill.api import attention, decode_attention, flat_linear, merge_states, pack_mask, warmup
    from wavefill.cache import KVPages, PagedKVCache
    from wavefill.select import Choice, explain

__version__ = "0.1.0"

_LAZY = {
    "attention": "wavefill.api",
    "decode_attention": "wavefill.api",
    "flat_linear": "wavefill.api",
    "merge_states": "wavefill.api",
    "pack_mask": "wavefill.api",
    "warmup": "wavefill.api",
    "KVPages": "wavefill.cache",
    "PagedKVCache": "wavefill.cache",
    "Choice": "wavefill.select",
    "explain": "wavefill.select",
}

__all__ = [
    "AttentionSpec",
    "BackendUnavailable",
    "Choice",
    "Fixed",
    "InvalidArgument",
    "InvalidType",
    "Invariant",
    "KVPages",
    "OutOfPages",
    "PagedKVCache",
    "StreamK",
    "UnsupportedModel",
    "WavefillError",
    "__version__",
    "attention",
    "decode_attention",
    "explain",
    "flat_linear",
    "merge_states",
    "pack_mask",
    "warmup",
]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'wavefill' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
