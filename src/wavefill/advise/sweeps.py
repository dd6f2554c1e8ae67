"""One thing varied, all else as it is: group size, head size, length, KV format."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from wavefill.advise.components import KV_FORMATS
from wavefill.advise.models import Attention, Mixer
from wavefill.advise.setups import Setup, seconds
from wavefill.spec import invalid

SWEEPS = ("g", "hsz", "length", "kv")
HEAD_SIZES = (64, 80, 96, 128, 192, 256)
LENGTHS = tuple(1 << i for i in range(10, 21))


@dataclass(frozen=True)
class Point:
    """What a value of the swept thing costs. `here`: whether it is the model's own.

    step, prompts: seconds of a decoding step, and of reading all prompts; step_attention, prompt_attention: attention's
    part of them; intensity: FLOPs a byte of all attention in a step; request: bytes of KV of a request.
    """

    value: str
    here: bool
    step: float
    step_attention: float
    prompts: float
    prompt_attention: float
    intensity: float
    request: int


def sweep(setup: Setup, over: str) -> tuple[Point, ...]:
    """over: one of `SWEEPS`. Query heads stay as many; a group size gives each KV head so many of them, a head size
    changes Q, K and V alike. Only grouped-query attention has these two: without any there are no points."""
    if over not in SWEEPS:
        raise invalid("sweep", f"must be one of {', '.join(SWEEPS)}", repr(over), "Use one of these.")
    grouped = [each for each in setup.model.mixers() if isinstance(each, Attention)]
    if over == "length":
        lengths = sorted({*LENGTHS, setup.context})
        return tuple(_point(setup.changed(context=n), f"{n:,}", n == setup.context) for n in lengths)
    if over == "kv":
        return tuple(_point(setup.changed(formats=replace(setup.formats, kv=kv)), kv, kv == setup.formats.kv)
                     for kv in KV_FORMATS)
    if not grouped:
        return ()
    own = grouped[0]
    values: Iterable[int] = (G for G in range(1, own.HQ + 1) if own.HQ % G == 0 and (G & (G - 1) == 0 or G == own.G)
                             ) if over == "g" else sorted({*HEAD_SIZES, own.D})

    def changed(value: int) -> Setup:
        def mixer(each: Mixer, _: int) -> Mixer:
            if not isinstance(each, Attention):
                return each
            if over == "hsz":
                return replace(each, D=value, DV=value)
            return replace(each, KH=each.HQ // value) if each.HQ % value == 0 else each

        return setup.remade(mixer)

    return tuple(_point(changed(value), f"{value}", value == (own.G if over == "g" else own.D)) for value in values)


def _point(setup: Setup, value: str, here: bool) -> Point:
    decode, prefill = setup.decode(), setup.prefill()
    attention = [each for each in decode if each.kind == "attention"]
    moved = sum(each.layers * each.bytes for each in attention)
    return Point(value, here, seconds(decode), seconds(decode, "attention"), seconds(prefill),
                 seconds(prefill, "attention"),
                 sum(each.layers * each.flops for each in attention) / moved if moved else 0.0, setup.memory.request)
