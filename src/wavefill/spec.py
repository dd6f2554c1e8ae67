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

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

#: Bytes of one element of each KV dtype that kernels read.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

#: Most tokens of a tile: a worker sizes its scratch memory by it.
MAX_TILE = 1 << 16
#: Most keys or query tokens of a request: lengths are int32. A window of as many is as good as any longer one.
MAX_LENGTH = (1 << 31) - 1
#: The largest whole number that an operator and the compiled core can carry; the largest float32, and the smallest
#: above 0 that has all of its digits.
MAX_INT = (1 << 63) - 1
MAX_FLOAT32 = 2.0**128 - 2.0**104
MIN_FLOAT32 = 2.0**-126


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


def whole(param: str, value: object, least: int = 1, most: int = MAX_INT, *, or_none: bool = False) -> int:
    """`value` as an int, where it is one of Python's or NumPy's whole numbers within the limits; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise invalid_type(param, "must be an int or None" if or_none else "must be an int", repr(value),
                           f"Give a whole number from {least}.")
    number = int(value)
    if number < least:
        raise invalid(param, f"must be at least {least}", _shown(number), f"Give a whole number from {least}.")
    if number > most:
        raise invalid(param, f"must be at most {most}", _shown(number), "Give a smaller one.")
    return number


def number(param: str, value: object) -> float:
    """`value` as a float, where it is a real number that float32 can hold, as kernels do; a bool is none."""
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        raise invalid_type(param, "must be a float or None", type(value).__name__, "Pass a number, float(x).")
    try:
        result = float(value)
    except OverflowError:  # an int or a fraction past every float
        result = math.inf
    if not abs(result) <= MAX_FLOAT32:
        raise invalid(param, "must be finite in float32", result,
                      "Give a number between -3.4e38 and 3.4e38.")
    return result


def _hold_whole(owner: object, prefix: str, *names: str, most: int = MAX_INT) -> None:
    """Make each of a frozen dataclass's fields that is set an int of Python's, or say what it is not."""
    for name in names:
        value = getattr(owner, name)
        if value is not None:
            object.__setattr__(owner, name, whole(f"{prefix}{name}", value, most=most, or_none=True))


def _shown(number: int) -> str:
    """The digits of a number, or their count where there are too many to read (and, past 4,300, to print)."""
    bits = number.bit_length()
    return str(number) if bits <= 128 else f"a {'negative ' if number < 0 else ''}number of {bits:,} bits"


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
        _hold_whole(self, "Fixed.", "splits", "chunk")
        if self.rule is not None and not (isinstance(self.rule, str) and self.rule == "flashdecoding"):
            raise invalid("Fixed.rule", 'must be "flashdecoding" or None', repr(self.rule), "Use one of these.")
        if sum(x is not None for x in (self.splits, self.chunk, self.rule)) > 1:
            raise invalid("Fixed", "takes one of splits, chunk and rule", self, "Set one of them.")


@dataclass(frozen=True)
class StreamK:
    """Equal tiles per worker across the whole batch (LeanAttention).

    tile: tokens of a tile; None takes the backend's own.
    """

    tile: int | None = None

    def __post_init__(self) -> None:
        _hold_whole(self, "StreamK.", "tile", most=MAX_TILE)


@dataclass(frozen=True)
class Invariant:
    """Split points that depend on the request alone, so that its bits never depend on its batch mates.

    chunk: tokens of a split, rounded up to whole tiles; None takes the backend's own. Either grows for a long
    request, so that splits x KH stays at most 1,024 and the workspace bounded.
    """

    chunk: int | None = None

    def __post_init__(self) -> None:
        _hold_whole(self, "Invariant.", "chunk")


Schedule = Fixed | StreamK | Invariant
ScheduleArg = Schedule | str


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
    latent:    whether V is the first DV columns of K (MLA), and so is not stored or read a second time.
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
    latent: bool = False

    def __post_init__(self) -> None:
        for name in ("HQ", "KH", "D", "DV", "q_len"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        _hold_whole(self, "", "page_size", "window")
        for name in ("causal", "latent"):
            if type(getattr(self, name)) is not bool:
                raise invalid_type(name, "must be a bool", repr(getattr(self, name)), "Give True or False.")
        if self.HQ % self.KH:
            raise invalid("HQ", f"must be a multiple of KH ({self.KH})", self.HQ,
                          "Each KV head serves the same number of query heads.")
        if self.latent and self.DV > self.D:
            raise invalid("DV", f"must be at most D ({self.D}) in a latent cache, whose V is part of K", self.DV,
                          "For DeepSeek's MLA it is 512 of 576.")
        if not isinstance(self.dtype, str) or self.dtype not in DTYPE_BYTES:
            raise invalid("dtype", f"must be one of {', '.join(DTYPE_BYTES)}", repr(self.dtype), "Use one of these.")

    @property
    def G(self) -> int:  # noqa: N802
        """Query heads per KV head."""
        return self.HQ // self.KH

    @property
    def kv_head_bytes(self) -> int:
        """Bytes of K and V of one token of one KV head in one layer."""
        return (self.D if self.latent else self.D + self.DV) * DTYPE_BYTES[self.dtype]
