"""Which schedule a call takes, and why: `choose` for `schedule="auto"`, `explain` for people.

The model is that of the timelines: every tile takes one unit of time, and partial states cost their bytes. Nothing
here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wavefill import cost, hardware, prefill
from wavefill.schedule import (
    FIXED_CHUNK,
    FIXED_SPLITS,
    INVARIANT,
    MAX_WORKERS,
    Plan,
    Rows,
    Table,
    Timeline,
    make_table,
    row_ranges,
)
from wavefill.spec import (
    DTYPE_BYTES,
    MAX_TILE,
    AttentionSpec,
    BackendUnavailable,
    Fixed,
    Invariant,
    Schedule,
    ScheduleArg,
    StreamK,
    complaint,
    invalid,
    number,
    parse_schedule,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from wavefill.schedule import Ints

#: Query tokens of one request share a row, and so one read of their keys, as long as they times the heads of their
#: group stay within this; kernels use the same number.
QUERY_ROWS = 64
#: What a merge kernel adds on a GPU, launched as a dependent of the attention kernel. An estimate for choosing only;
#: on a CPU the thread that finishes last merges at once.
MERGE_LAUNCH_US = 2.0

#: What `auto` considers. The first is what a CPU takes.
_CANDIDATES: tuple[Schedule, ...] = (StreamK(), Fixed(rule="flashdecoding"), Fixed())


class Decision(NamedTuple):
    """What `auto` stands for in one call, and one sentence that says why."""

    schedule: Schedule
    reason: str


def choose(spec: AttentionSpec, starts: Sequence[int] | Ints, stops: Sequence[int] | Ints, workers: int, tile: int, *,
           device: hardware.Device | None = None) -> Decision:
    """The schedule of one call; never `invariant`, which is for those who ask for its guarantee.

    spec, starts, stops: the call, and the key range of each row.
    workers, tile:       who shares the tiles, and the tokens of a tile.
    device:              None or a CPU decides in a microsecond or two; a GPU compares the schedules' timelines.

    On a CPU it is always stream_k: no schedule ends before the one that gives every thread the same number of tiles,
    each thread streams through memory in order, and at most two partial states a thread are merged without a launch.
    """
    if device is None or isinstance(device, hardware.Cpu):
        return Decision(StreamK(), f"equal runs of tiles for {workers} threads, merged by the last to finish")
    options = _options(spec, _decode_rows(starts, stops), workers, tile, device)
    best = _best(options, device)
    return Decision(best.schedule, _reason(best, _runner_up(best, options), workers))


@dataclass(frozen=True)
class Option:
    """One schedule of a call, as its timeline has it.

    plan:        the schedule with every choice made.
    makespan:    tiles until the last worker is done.
    merge_tiles: what its partial states cost, in tiles of one worker's time.
    """

    schedule: Schedule
    timeline: Timeline = field(repr=False, compare=False)
    merge_tiles: float

    @property
    def table(self) -> Table:
        return self.timeline.table

    @property
    def plan(self) -> Plan:
        return self.table.plan

    @property
    def kind(self) -> str:
        return self.plan.name

    @property
    def label(self) -> str:
        """The schedule with its numbers, in words."""
        return describe(self.schedule, self.plan, self.table.tile)

    @cached_property
    def partials(self) -> int:
        return int(self.table.partial.sum())

    def to_dict(self) -> dict[str, Any]:
        line = self.timeline
        return {
            "schedule": schedule_dict(self.schedule), "kind": self.kind, "label": self.label,
            "segments": len(self.table), "waves": line.waves, "makespan": line.makespan, "fill": line.fill,
            "partials": self.partials, "merge_tiles": self.merge_tiles,
        }


@dataclass(frozen=True)
class Choice:
    """What a call does and why.

    schedule, kind: the schedule, and its name.
    device:         name of the GPU, or "cpu".
    kernel:         what computes the call there, by name: a library that is installed here, or one of ours.
    tile:           tokens of a tile.
    tiles:          tiles of the batch.
    segments:       runs of tiles that one worker reads into one softmax state.
    partials:       segments whose states must be merged.
    workers:        CTAs or threads.
    waves:          rounds of work items.
    makespan:       tiles until the last worker is done.
    fill:           share of workers x makespan that is work.
    bytes:          bytes moved, partial states included.
    flops:          multiplications and additions.
    floor_us:       the KV of each request, queries and outputs over the read bandwidth, or on a GPU in 16 bits the
                    FLOPs over the peak where that takes longer (prompts); None where the bandwidth is unknown.
    floor_note:     which of them that is, or why there is none.
    reason:         one sentence.
    runner_up:      the best of the other schedules that `auto` considers; the choice itself where all of them come
                    to the same table.
    """

    schedule: Schedule
    kind: str
    device: str
    kernel: str
    tile: int
    tiles: int
    segments: int
    partials: int
    workers: int
    waves: int
    makespan: int
    fill: float
    bytes: int
    flops: int
    floor_us: float | None
    floor_note: str
    reason: str
    runner_up: Option
    spec: AttentionSpec
    rows: Rows = field(repr=False, compare=False)
    option: Option = field(repr=False, compare=False)
    considered: tuple[Option, ...] = field(repr=False, compare=False)

    @property
    def label(self) -> str:
        return self.option.label

    @cached_property
    def traffic(self) -> cost.Traffic:
        return cost.traffic(self.spec, self.rows, self.option.table)

    def timelines(self) -> dict[str, Timeline]:
        """The timeline of the choice, then of the other schedules, by their labels."""
        return {o.label: o.timeline for o in (self.option, *self.considered)}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        spec, moved = self.spec, self.traffic
        return {
            "schedule": schedule_dict(self.schedule), "kind": self.kind, "label": self.label, "device": self.device,
            "kernel": self.kernel, "tile": self.tile, "tiles": self.tiles, "segments": self.segments,
            "partials": self.partials, "workers": self.workers, "waves": self.waves, "makespan": self.makespan,
            "fill": self.fill,
            "bytes": {"total": moved.total, "kv": moved.kv, "query": moved.query, "output": moved.output,
                      "partials": moved.partials},
            "flops": self.flops, "floor_us": self.floor_us, "floor_note": self.floor_note, "reason": self.reason,
            "runner_up": self.runner_up.to_dict(),
            "considered": [o.to_dict() for o in (self.option, *self.considered)],
            "shape": {"HQ": spec.HQ, "KH": spec.KH, "D": spec.D, "DV": spec.DV, "dtype": spec.dtype,
                      "page_size": spec.page_size, "window": spec.window, "latent": spec.latent, "rows": len(self.rows),
                      "keys": int((self.rows.stop - self.rows.start).sum())},
        }


def explain(seq_lens: ArrayLike, *, HQ: int, KH: int, D: int, DV: int | None = None, dtype: str = "bfloat16",
            page_size: int | None = 16, q_lens: ArrayLike | None = None, window: int | None = None,
            latent: bool = False, schedule: ScheduleArg = "auto", device: str = "cpu", workers: int | None = None,
            tile: int | None = None, read_bandwidth: float | None = None) -> Choice:
    """The schedule of a decode-attention call, with its tiles, waves, bytes, floor time and reason.

    seq_lens:       [B] keys of each request, this step's included.
    HQ, KH, D, DV:  head counts and head sizes; DV is D if None.
    dtype:          of the KV cache.
    page_size:      tokens of a page, None for a contiguous cache (with room for the longest request); it decides about
                    the kernel, and no schedule depends on it.
    q_lens:         [B] query tokens of each request, 1 each if None; causal.
    window:         keys a query sees, itself included; None is all.
    latent:         V is the first DV columns of K (MLA), and is not read a second time.
    schedule:       "auto", or one that is to be described beside what auto considers.
    device:         "cpu" for the processor here, or a GPU of `wavefill.hardware.GPUS`.
    workers, tile:  the device's own if None: the cores of this process and 32 tokens, or a CTA an SM and 64 tokens
                    (128 up to a head size of 64, 32 past 128).
    read_bandwidth: bytes/s for the floor time, for example what `wavefill bench` measured; the table's if None.

    Raises InvalidArgument or InvalidType for a value that no call could have, and BackendUnavailable for a shape that
    the CPU backend has no kernel for where `device` is "cpu".
    """
    target = hardware.lookup(device)
    spec = AttentionSpec(HQ, KH, D, D if DV is None else DV, dtype, page_size, window, latent=latent)
    if isinstance(target, hardware.Cpu) and (gap := hardware.cpu_gap(spec)):
        raise BackendUnavailable(complaint("device", "the CPU backend cannot serve this call", gap,
                                           "Name a GPU to see which schedule it would take."))
    rows = row_ranges(seq_lens, q_lens, window=window, q_block=max(QUERY_ROWS // spec.G, 1))
    lengths = np.asarray(seq_lens)
    if len(rows):
        spec = replace(spec, q_len=int(rows.q_end.max()))
    asked = parse_schedule(schedule)
    tile = _tile(asked, tile, target, spec)
    workers = target.workers if workers is None else whole("workers", workers, most=MAX_WORKERS)

    options = _options(spec, rows, workers, tile, target)
    chosen = _best(options, target) if asked == "auto" else _option(asked, spec, rows, workers, tile, target)
    runner_up = _runner_up(chosen, options)
    considered = _distinct([*options, _option(Invariant(), spec, rows, workers, tile, target)], chosen)

    moved = cost.traffic(spec, rows, chosen.table)
    bandwidth, note = _bandwidth(target, read_bandwidth)
    floor = None if bandwidth is None else cost.floor_us(cost.least_bytes(spec, rows), bandwidth)
    if floor is not None and isinstance(target, hardware.Gpu) and DTYPE_BYTES[dtype] == 2:
        computing = cost.flops(spec, rows) / target.bf16_flops * 1e6
        if computing > floor:
            floor, note = computing, f"at {target.name}'s {target.bf16_flops / 1e12:,.0f} TFLOP/s; reading takes less"
    line = chosen.timeline
    return Choice(
        schedule=chosen.schedule, kind=chosen.kind, device=target.name,
        kernel=prefill.kernel(target, spec, asked, tokens=int((rows.q_end - rows.q_begin).sum()),
                              requests=lengths.size, longest=int(lengths.max(initial=0))),
        tile=tile, tiles=chosen.table.tiles, segments=len(chosen.table), partials=chosen.partials, workers=workers,
        waves=line.waves, makespan=line.makespan, fill=line.fill, bytes=moved.total, flops=cost.flops(spec, rows),
        floor_us=floor, floor_note=note,
        reason=_reason(chosen, runner_up, workers, asked=asked != "auto"), runner_up=runner_up, spec=spec, rows=rows,
        option=chosen, considered=considered,
    )


def describe(schedule: Schedule, plan: Plan, tile: int) -> str:
    """A schedule with the numbers of its plan, for titles and tables."""
    if plan.kind == FIXED_SPLITS:
        rule = "FlashDecoding's rule, " if isinstance(schedule, Fixed) and schedule.rule else ""
        return f"fixed ({rule}{plan.param} split{'s' if plan.param > 1 else ''})"
    if plan.kind == INVARIANT and not plan.param:
        return "invariant (chunks that grow with the request)"
    if plan.kind in (FIXED_CHUNK, INVARIANT):
        return f"{plan.name} (chunks of {plan.param * tile:,} tokens)"
    return plan.name


def schedule_dict(schedule: Schedule) -> dict[str, Any]:
    """A schedule as plain values: its name and the fields that are set."""
    name = {StreamK: "stream_k", Fixed: "fixed", Invariant: "invariant"}[type(schedule)]
    return {"name": name} | {k: v for k, v in vars(schedule).items() if v is not None}


def _options(spec: AttentionSpec, rows: Rows, workers: int, tile: int, device: hardware.Device) -> list[Option]:
    return [_option(schedule, spec, rows, workers, tile, device) for schedule in _CANDIDATES]


def _best(options: list[Option], device: hardware.Device) -> Option:
    return options[0] if isinstance(device, hardware.Cpu) else min(options, key=_modelled_tiles)


def _runner_up(chosen: Option, options: list[Option]) -> Option:
    others = [option for option in options if option.plan != chosen.plan]
    return min(others, key=_modelled_tiles) if others else chosen


def _option(schedule: Schedule, spec: AttentionSpec, rows: Rows, workers: int, tile: int,
            device: hardware.Device) -> Option:
    table = make_table(schedule, rows.start, rows.stop, KH=spec.KH, workers=workers, tile=tile,
                       grown=isinstance(device, hardware.Gpu))
    one_tile = cost.tile_bytes(spec, tile)
    states = cost.partial_bytes(spec, rows, table)
    merge = 2 * states / one_tile / workers
    if states and isinstance(device, hardware.Gpu):
        merge += MERGE_LAUNCH_US * 1e-6 * device.read_bandwidth / one_tile / workers
    return Option(schedule, Timeline(table), merge)


def _modelled_tiles(option: Option) -> float:
    return option.timeline.makespan + option.merge_tiles


def _distinct(options: list[Option], chosen: Option) -> tuple[Option, ...]:
    """Options with a plan of their own; two rules may come to the same split count."""
    seen, kept = {chosen.plan}, []
    for option in options:
        if option.plan not in seen:
            seen.add(option.plan)
            kept.append(option)
    return tuple(kept)


def _reason(chosen: Option, other: Option, workers: int, *, asked: bool = False) -> str:
    line, against = chosen.timeline, other.timeline
    if not line.makespan:
        return "There are no keys to read, so no worker has anything to do."
    why = "as asked: " if asked else ""
    text = (f"{why}{chosen.label} ends after {_tiles(line.makespan)} with {workers:,} workers {line.fill:.0%} filled "
            f"and {chosen.partials:,} partial states to merge")
    if other is chosen:
        return f"{text}; the other schedules come to the same table."
    return (f"{text}; {other.label} would end after {_tiles(against.makespan)}, {against.fill:.0%} filled, "
            f"with {other.partials:,} partial states.")


def _tiles(n: int) -> str:
    return f"{n:,} tile{'s' if n != 1 else ''}"


def _tile(asked: Schedule | str, tile: int | None, device: hardware.Device, spec: AttentionSpec) -> int:
    own = asked.tile if isinstance(asked, StreamK) else None
    if tile is not None:
        tile = whole("tile", tile, most=MAX_TILE)
    if own is not None and tile is not None and own != tile:
        raise invalid("tile", f"must equal the schedule's own ({own}) where both are given", tile, "Give one of them.")
    return tile if tile is not None else own or device.tile(max(spec.D, spec.DV))


def _bandwidth(device: hardware.Device, given: float | None) -> tuple[float | None, str]:
    if given is not None:
        given = number("read_bandwidth", given)
        return given, f"at {given / 1e9:,.1f} GB/s, as given"
    if isinstance(device, hardware.Cpu):
        return None, "the read bandwidth of this processor is not known here; `wavefill bench` measures it"
    return device.read_bandwidth, (f"at {device.name}'s {device.read_bandwidth / 1e12:.3g} TB/s "
                                   f"({device.read_bandwidth_source})")


def _decode_rows(starts: Sequence[int] | Ints, stops: Sequence[int] | Ints) -> Rows:
    """Rows of one query token each with the given key ranges."""
    start, stop = np.asarray(starts, dtype=np.int64), np.asarray(stops, dtype=np.int64)
    first = np.zeros_like(start)
    return Rows(np.arange(start.size, dtype=np.int64), first, first + 1, start, np.maximum(stop, start))
