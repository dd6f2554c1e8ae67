"""What a call asks for: shapes, schedules and the errors that name what was wrong.

Nothing here needs torch, so `explain` and the command line run on the core install.

Dimensions, here and everywhere else:

====  ==========================================================
B     requests in the batch
T     query tokens in the batch, packed
HQ    query heads
KH    KV heads
G     query heads per KV head, HQ / KH
D     head size of q and K; DV of V and the output
====  ==========================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Bytes of one element of each KV dtype that kernels read.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

#: Most tokens of a tile: a worker sizes its scratch memory by it.
MAX_TILE = 1 << 16


class WavefillError(Exception):
    """Base of every error that wavefill raises on its own account."""


class InvalidArgument(WavefillError, ValueError):
    """A parameter has a value that the call does not take."""


class InvalidType(WavefillError, TypeError):
    """A parameter has a type or dtype that the call does not take."""


class OutOfPages(WavefillError, RuntimeError):
    """A cache has too few free pages; nothing was changed."""


class BackendUnavailable(WavefillError, RuntimeError):
    """The backend that was named cannot run this call on this machine."""


class UnsupportedModel(WavefillError, ValueError):
    """A model that an integration cannot serve exactly."""


def complaint(param: str, rule: str, got: object, next_step: str) -> str:
    """The one form of an error message: parameter, rule, value, next step."""
    return f"{param}: {rule}; got {got}. {next_step}"


def invalid(param: str, rule: str, got: object, next_step: str) -> InvalidArgument:
    """An `InvalidArgument` (a ValueError) in the standard form."""
    return InvalidArgument(complaint(param, rule, got, next_step))


def invalid_type(param: str, rule: str, got: object, next_step: str) -> InvalidType:
    """An `InvalidType` (a TypeError) in the standard form."""
    return InvalidType(complaint(param, rule, got, next_step))


@dataclass(frozen=True)
class Fixed:
    """Equal splits per request (FlashDecoding).

    Exactly one of the fields may be set; with none, the split count is chosen so that
    work items (requests x KV heads x splits) are 4 to 8 times the workers where the context allows.

    splits: splits of every request, at least 1.
    chunk:  tokens of a split, rounded up to whole tiles.
    rule:   "flashdecoding", the split heuristic that FlashDecoding itself uses.
    """

    splits: int | None = None
    chunk: int | None = None
    rule: Literal["flashdecoding"] | None = None

    def __post_init__(self) -> None:
        if sum(x is not None for x in (self.splits, self.chunk, self.rule)) > 1:
            raise invalid("Fixed", "takes one of splits, chunk and rule", self, "Set one of them.")
        _at_least_one("Fixed.splits", self.splits)
        _at_least_one("Fixed.chunk", self.chunk)
        if self.rule not in (None, "flashdecoding"):
            raise invalid("Fixed.rule", 'must be "flashdecoding" or None', repr(self.rule), "Use one of these.")


@dataclass(frozen=True)
class StreamK:
    """Equal tiles per worker across the whole batch (LeanAttention).

    tile: tokens of a tile; None takes the backend's own.
    """

    tile: int | None = None

    def __post_init__(self) -> None:
        _at_least_one("StreamK.tile", self.tile)
        if self.tile is not None and self.tile > MAX_TILE:
            raise invalid("StreamK.tile", f"must be at most {MAX_TILE}", self.tile,
                          "Leave it out for the backend's own tile, or give a smaller one.")


@dataclass(frozen=True)
class Invariant:
    """Split points that depend on the request alone, so that its bits never depend on its batch mates.

    chunk: tokens of a split, rounded up to whole tiles; None takes the backend's own. Either grows for a long
    request, so that splits x KH stays at most 1,024 and the workspace bounded.
    """

    chunk: int | None = None

    def __post_init__(self) -> None:
        _at_least_one("Invariant.chunk", self.chunk)


Schedule = Fixed | StreamK | Invariant
ScheduleArg = Schedule | str


def _at_least_one(param: str, value: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid_type(param, "must be an int or None", repr(value), "Give a whole number from 1.")
    if value < 1:
        raise invalid(param, "must be at least 1", value, "Give a whole number from 1.")


_DEFAULTS: dict[str, Schedule] = {"fixed": Fixed(), "stream_k": StreamK(), "invariant": Invariant()}
SCHEDULES = ("auto", *_DEFAULTS)


def parse_schedule(schedule: object) -> Schedule | Literal["auto"]:
    """`schedule=` of the public functions as a `Schedule`, or "auto" left for the selector."""
    if isinstance(schedule, (Fixed, StreamK, Invariant)):
        return schedule
    if isinstance(schedule, str):
        if schedule == "auto":
            return "auto"
        if schedule in _DEFAULTS:
            return _DEFAULTS[schedule]
        raise invalid("schedule", f"must be one of {', '.join(map(repr, SCHEDULES))}", repr(schedule),
                      "Use one of these, or Fixed(...), StreamK(...), Invariant(...).")
    raise invalid_type("schedule", "must be a name or a Fixed, StreamK or Invariant", type(schedule).__name__,
                       'Pass for example schedule="stream_k".')


@dataclass(frozen=True)
class AttentionSpec:
    """The static part of an attention call: everything that is known without reading a tensor's values.

    HQ, KH, D, DV: head counts and head sizes (see the module's table).
    dtype:     of the KV cache, one of `DTYPE_BYTES`.
    page_size: tokens of a page, or None for a contiguous cache.
    window:    keys a query sees, itself included, or None for all.
    q_len:     most query tokens of one request.
    causal:    whether query i of n sees only keys up to position seq_len - n + i.
    """

    HQ: int
    KH: int
    D: int
    DV: int
    dtype: str = "bfloat16"
    page_size: int | None = None
    window: int | None = None
    q_len: int = 1
    causal: bool = True

    def __post_init__(self) -> None:
        for name in ("HQ", "KH", "D", "DV", "q_len"):
            _at_least_one(name, getattr(self, name))
        for name in ("page_size", "window"):
            _at_least_one(name, getattr(self, name))
        if self.HQ % self.KH:
            raise invalid("HQ", f"must be a multiple of KH ({self.KH})", self.HQ,
                          "Each KV head serves the same number of query heads.")
        if self.dtype not in DTYPE_BYTES:
            raise invalid("dtype", f"must be one of {', '.join(DTYPE_BYTES)}", repr(self.dtype), "Use one of these.")

    @property
    def G(self) -> int:  # noqa: N802
        """Query heads per KV head."""
        return self.HQ // self.KH

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return self.KH * (self.D + self.DV) * DTYPE_BYTES[self.dtype]
