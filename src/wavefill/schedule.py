"""Tiles and schedules: which worker reads which part of the KV cache, and in which order.

This is the only definition. The kernels repeat its arithmetic and a test holds them to it; the selector, the cost
model, the emulator and the pictures read the tables made here. Pure Python and NumPy.

Terms
-----
row       one unit of queries that shares a key range: a request in decode, a block of a request's query tokens else
tile      `tile` tokens of one KV head of one row, at whole multiples of `tile` in absolute positions; the first and
          the last tile of a row may be partly outside its range [start, stop)
order     row -> KV head -> context; every table lists its segments in this order
segment   a run of tiles of one (row, head) that one worker reads into one softmax state
worker    a CTA on a GPU, a thread on a CPU

Schedules
---------
stream_k   worker w of W owns the linear tiles [w*N//W, (w+1)*N//W) of all N: any two differ by at most one tile
fixed      every row has the same split count S (or the same chunk of tokens); pieces are claimed in order by
           whichever worker is free
invariant  pieces of a chunk of tokens counted from the row's own first tile, so that they depend on the row alone;
           claimed like those of `fixed`

A CPU's threads claim pieces (`Table.worker`). On a GPU they are owned instead (`Table.owner`): worker w has the pieces
that begin within the tiles that stream_k would give it, so no worker waits for a counter and none has to be reset.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from heapq import heapreplace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wavefill.spec import MAX_LENGTH, MAX_TILE, Fixed, Invariant, Schedule, StreamK, invalid, invalid_type, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

#: Codes of `Plan.kind`; the compiled core uses the same ones.
STREAM_K, FIXED_SPLITS, FIXED_CHUNK, INVARIANT = range(4)
KIND_NAMES = ("stream_k", "fixed", "fixed", "invariant")

#: Tokens of a piece of `Invariant()`. Long enough that a piece's partial state (one output row a query head) is a few
#: hundredths of the KV it stands for, short enough that a few requests fill a machine.
INVARIANT_CHUNK = 2048
#: Most pieces x KV heads that `invariant` makes of one row, so that the workspace of its partials is bounded.
INVARIANT_MAX_PIECES = 1024
#: Pieces of `Invariant()` on a GPU, in tiles: a quarter of a short row, so that one request is read by many SMs, from
#: the first to the second figure; of a longer row what leaves so many pieces x KV heads, up to the last figure. Longer
#: pieces cost a large batch less, shorter ones a small batch.
GROWN_LEAST, GROWN_QUARTER, GROWN_PIECES, GROWN_MOST = 4, 16, 64, 64
#: `Fixed()` aims at this many work items a worker: dynamic claiming then evens out what is left.
FIXED_ITEMS_PER_WORKER = 4
#: The largest split count that FlashDecoding's rule considers.
FLASHDECODING_MAX_SPLITS = 128

#: What a table may have at most, so that its arrays fit into memory and its times into 64 bits. They bound what can be
#: described; a kernel's call is bounded by the KV cache that exists.
MAX_SEGMENTS, MAX_TILES, MAX_WORKERS, MAX_POSITION = 1 << 24, 1 << 42, 1 << 20, 1 << 36

_FEW_ROWS = 64  # below this a Python loop is faster than NumPy's call overhead


class Plan(NamedTuple):
    """A schedule with every choice made: what the table builder here and in the compiled core start from.

    kind:  STREAM_K, FIXED_SPLITS, FIXED_CHUNK or INVARIANT.
    param: unused (0), splits of every row, tiles of a piece, or tiles of a piece before the bound of
           `INVARIANT_MAX_PIECES` is applied row by row (0: pieces that grow with the row, as on a GPU).
    """

    kind: int
    param: int

    @property
    def name(self) -> str:
        return KIND_NAMES[self.kind]


_PLAN_STREAM_K = Plan(STREAM_K, 0)


# --------------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Rows:
    """Rows of a batch and the keys that each reads, all int64 [rows], ordered by request, then by query.

    request:          the request of a row.
    q_begin, q_end:   its query tokens, counted within the request.
    start, stop:      the union of its queries' key ranges; empty where stop <= start.
    """

    request: Ints
    q_begin: Ints
    q_end: Ints
    start: Ints
    stop: Ints

    def __len__(self) -> int:
        return int(self.request.size)


def row_ranges(seq_lens: ArrayLike, q_lens: ArrayLike | None = None, *, causal: bool = True,
               window: int | None = None, q_block: int = 1) -> Rows:
    """Cut each request's queries into blocks of `q_block` tokens and give each block its key range.

    seq_lens: [B] keys already appended, this step's included.
    q_lens:   [B] query tokens of each request (default 1 each); 0 gives a request no row.
    causal:   query i of n sits at position seq_len - n + i and sees keys up to it; otherwise all keys.
    window:   a query at position pos sees only pos - window < j <= pos, causal or not.
    Raises InvalidArgument or InvalidType for lengths that are negative or no integers, and for q_block or window < 1.
    """
    length = _lengths("seq_lens", seq_lens)
    if q_lens is None:
        queries = np.ones_like(length)
    else:
        queries = _lengths("q_lens", q_lens)
        if queries.shape != length.shape:
            raise invalid("q_lens", f"must have one entry a request ({length.size})", queries.size,
                          "Give the query tokens of every request.")
    q_block = whole("q_block", q_block)
    if window is not None:
        window = min(whole("window", window), MAX_LENGTH)  # a longer one sees no more
    blocks = -(-queries // q_block)
    _at_most("rows", int(blocks.sum()), MAX_SEGMENTS)
    request = np.repeat(np.arange(length.size, dtype=np.int64), blocks)
    q_begin = _index_in_group(blocks) * q_block
    q_end = np.minimum(q_begin + q_block, queries[request])
    stop = length[request]
    shift = stop - queries[request]  # position of a request's query 0; negative when it has more queries than keys
    start = np.zeros_like(stop)
    if window is not None:
        start = np.maximum(shift + q_begin - window + 1, 0)
    if causal or window is not None:
        stop = np.clip(shift + q_end, 0, stop)
    return Rows(request, q_begin, q_end, np.minimum(start, stop), stop)


# ------------------------------------------------------------------------------------------------------ resolve


def resolve(schedule: Schedule, starts: Sequence[int] | Ints, stops: Sequence[int] | Ints, KH: int, workers: int,
            tile: int, *, grown: bool = False) -> Plan:
    """Make every choice that a schedule leaves open, from the rows' key ranges; a few microseconds for a few rows.

    grown: whether the pieces of `Invariant()` grow with the row, as on a GPU, or have `INVARIANT_CHUNK` tokens.
    """
    if isinstance(schedule, StreamK):
        return _PLAN_STREAM_K
    if isinstance(schedule, Invariant):
        chunk = schedule.chunk or (0 if grown else INVARIANT_CHUNK)
        return Plan(INVARIANT, -(-chunk // tile))
    if not isinstance(schedule, Fixed):
        raise invalid_type("schedule", "must be a Fixed, StreamK or Invariant", type(schedule).__name__,
                           "Names are turned into one of these by wavefill.spec.parse_schedule.")
    if schedule.splits is not None:
        return Plan(FIXED_SPLITS, schedule.splits)
    if schedule.chunk is not None:
        return Plan(FIXED_CHUNK, -(-schedule.chunk // tile))
    rows, longest = _count_and_longest(starts, stops, tile)
    if schedule.rule == "flashdecoding":
        return Plan(FIXED_SPLITS, flashdecoding_splits(rows * KH, longest, workers))
    if rows == 0:
        return Plan(FIXED_SPLITS, 1)
    wanted = -(-FIXED_ITEMS_PER_WORKER * workers // (rows * KH))
    return Plan(FIXED_SPLITS, min(wanted, longest))


def flashdecoding_splits(units: int, blocks: int, workers: int) -> int:
    """FlashDecoding's own split count.

    units:   (row, KV head) pairs with work; blocks: tiles of the longest row; workers: places for CTAs on the GPU.
    One split where the units alone fill 80 % of the workers or there are at most four blocks. Else the efficiency of
    a count is its waves over those waves rounded up, and the smallest count within 85 % of the best one is taken.
    """
    if blocks <= 4 or 5 * units >= 4 * workers:
        return 1
    splits = np.arange(1, min(FLASHDECODING_MAX_SPLITS, workers, blocks) + 1, dtype=np.int64)
    items = units * splits
    places = -(-items // workers) * workers
    best = np.argmax(items / places)
    return int(splits[np.argmax(100 * items * places[best] >= 85 * items[best] * places)])


def _count_and_longest(starts: Sequence[int] | Ints, stops: Sequence[int] | Ints, tile: int) -> tuple[int, int]:
    """Rows that have work, and the tiles of the longest."""
    if len(starts) <= _FEW_ROWS:
        count = longest = 0
        for start, stop in zip(_as_list(starts), _as_list(stops), strict=True):
            if stop > start:
                count += 1
                longest = max(longest, -(-stop // tile) - start // tile)
        return count, longest
    _, tiles = _row_tiles(starts, stops, tile)
    return int(np.count_nonzero(tiles)), int(tiles.max())


def _as_list(values: Sequence[int] | Ints) -> Sequence[int]:
    return values.tolist() if isinstance(values, np.ndarray) else values


# -------------------------------------------------------------------------------------------------------- table


@dataclass(frozen=True, eq=False)
class Table:
    """The segments of a schedule in linear order.

    tile:       tokens of a tile.
    num_rows:   rows of the batch, those without work included.
    KH:         KV heads.
    workers:    workers that share the work, those without any included.
    plan:       what was built.
    row, head:  int64 [segments], what a segment belongs to.
    begin, end: int64 [segments], its tiles [begin, end), counted from absolute position 0.
    """

    tile: int
    num_rows: int
    KH: int
    workers: int
    plan: Plan
    row: Ints
    head: Ints
    begin: Ints
    end: Ints

    def __len__(self) -> int:
        return int(self.row.size)

    @property
    def kind(self) -> str:
        return self.plan.name

    @cached_property
    def cost(self) -> Ints:
        """[segments] tiles of each segment."""
        return self.end - self.begin

    @cached_property
    def tiles(self) -> int:
        """Tiles of all segments."""
        return int(self.cost.sum())

    @property
    def worker(self) -> Ints:
        """[segments] worker of each segment: owned for stream_k; else as claimed when a tile takes one unit of time
        everywhere (the earliest free worker takes the next segment, ties go to the lowest number)."""
        return self._places[0]

    @cached_property
    def owner(self) -> Ints:
        """[segments] worker of each segment on a GPU: the one in whose linear tiles [w*N//W, (w+1)*N//W) the segment
        begins, whatever the schedule; for stream_k the same as `worker`."""
        before = np.cumsum(self.cost) - self.cost
        return ((before + 1) * self.workers - 1) // max(self.tiles, 1)

    @property
    def t0(self) -> Ints:
        """[segments] when its worker starts each segment, in tiles."""
        return self._places[1]

    @cached_property
    def partial(self) -> Bools:
        """[segments] whether a segment is one of several of its (row, head), so that its state must be merged."""
        same = (self.row[1:] == self.row[:-1]) & (self.head[1:] == self.head[:-1])
        mask = np.zeros(len(self), dtype=np.bool_)
        mask[1:] |= same
        mask[:-1] |= same
        return mask

    @cached_property
    def _places(self) -> tuple[Ints, Ints]:
        if self.plan.kind != STREAM_K:
            return _claim(self.cost, self.workers)
        before = np.cumsum(self.cost) - self.cost
        return self.owner, before - self.owner * self.tiles // self.workers


def build(plan: Plan, starts: ArrayLike, stops: ArrayLike, KH: int, workers: int, tile: int) -> Table:
    """The table of a plan over rows with key ranges [start, stop), int [rows] each; stop <= start is an empty row.

    Raises InvalidArgument or InvalidType for ranges that differ in length, are negative or no integers, for KH,
    workers or tile below 1, and for tables of more than `MAX_SEGMENTS`, `MAX_TILES` or `MAX_WORKERS`.
    """
    KH, workers, tile = _sizes(KH, workers, tile)
    start, stop = _lengths("starts", starts, MAX_POSITION), _lengths("stops", stops, MAX_POSITION)
    if start.shape != stop.shape:
        raise invalid("stops", f"must have one entry a row ({start.size})", stop.size, "Give every row a range.")
    first, tiles = _row_tiles(start, stop, tile)
    rows = np.flatnonzero(tiles)
    first, tiles = first[rows], tiles[rows]
    _at_most("tiles", int(tiles.sum()) * KH, MAX_TILES)
    cut = _cut_by_worker if plan.kind == STREAM_K else _cut_by_row
    unit, begin, end = cut(plan, tiles, KH, workers)
    local = unit // KH
    offset = first[local]
    return Table(tile, start.size, KH, workers, plan, rows[local], unit % KH, begin + offset, end + offset)


def make_table(schedule: Schedule, starts: Sequence[int] | Ints, stops: Sequence[int] | Ints, *, KH: int,
               workers: int, tile: int, grown: bool = False) -> Table:
    """`resolve`, then `build`."""
    KH, workers, tile = _sizes(KH, workers, tile)
    start, stop = _lengths("starts", starts, MAX_POSITION), _lengths("stops", stops, MAX_POSITION)
    return build(resolve(schedule, start, stop, KH, workers, tile, grown=grown), start, stop, KH, workers, tile)


def invariant_chunk_tiles(tiles: Ints, KH: int, chunk_tiles: int) -> Ints:
    """Tiles of a piece for rows of `tiles` tiles each: `chunk_tiles`, or more where pieces x KH would pass 1,024.

    A chunk of 0 grows with the row.
    """
    chunk: Ints | int = chunk_tiles
    if chunk_tiles == 0:
        quarter = np.clip(-(-tiles // 4), GROWN_LEAST, GROWN_QUARTER)
        chunk = np.maximum(quarter, np.minimum(-(-tiles * KH // GROWN_PIECES), GROWN_MOST))
    most = max(INVARIANT_MAX_PIECES // KH, 1)
    return np.maximum(chunk, -(-tiles // most))


def most_invariant_pieces(tiles: int, KH: int, chunk_tiles: int) -> int:
    """The most pieces that `invariant_chunk_tiles` leaves a row of up to `tiles` tiles, at least 1.

    Pieces that grow do so in steps, so a shorter row may have more of them: four while it is short, then ever more.
    """
    if chunk_tiles:
        pieces = -(-tiles // chunk_tiles)
    else:
        spread = max(-(-GROWN_PIECES // KH), -(-tiles // GROWN_MOST))
        pieces = max(4, min(-(-tiles // GROWN_QUARTER), spread))
    return max(min(pieces, INVARIANT_MAX_PIECES // KH), 1)


def _row_tiles(starts: ArrayLike, stops: ArrayLike, tile: int) -> tuple[Ints, Ints]:
    """First tile and number of tiles of each row."""
    start, stop = np.asarray(starts, dtype=np.int64), np.asarray(stops, dtype=np.int64)
    first = start // tile
    return first, np.where(stop > start, -(-stop // tile) - first, 0)


def _cut_by_worker(plan: Plan, tiles: Ints, KH: int, workers: int) -> tuple[Ints, Ints, Ints]:
    """Unit (row x KH + head) and tiles, counted from the row's first, of each segment of stream_k."""
    _at_most("segments", tiles.size * KH + workers, MAX_SEGMENTS)
    unit_tiles = np.repeat(tiles, KH)
    unit_end = np.cumsum(unit_tiles)
    total = int(unit_end[-1]) if unit_end.size else 0
    cuts = np.arange(workers, dtype=np.int64) * total // workers
    edges = np.concatenate((unit_end, cuts))
    edges.sort(kind="stable")
    edges = edges[np.concatenate((np.ones(1, np.bool_), edges[1:] != edges[:-1]))]
    begin, end = edges[:-1], edges[1:]
    unit = np.searchsorted(unit_end, begin, side="right")
    base = (unit_end - unit_tiles)[unit]
    return unit, begin - base, end - base


def _cut_by_row(plan: Plan, tiles: Ints, KH: int, workers: int) -> tuple[Ints, Ints, Ints]:
    """The same for pieces that depend on the row's tiles only."""
    if plan.kind == FIXED_SPLITS:
        chunk = None
        pieces = np.minimum(tiles, plan.param)  # splits beyond the tiles are empty and dropped
    else:
        chunk = np.full_like(tiles, plan.param)
        if plan.kind == INVARIANT:
            chunk = invariant_chunk_tiles(tiles, KH, plan.param)
        pieces = -(-tiles // chunk)
    _at_most("segments", int(pieces.sum()) * KH, MAX_SEGMENTS)
    unit_pieces = np.repeat(pieces, KH)
    unit = np.repeat(np.arange(unit_pieces.size, dtype=np.int64), unit_pieces)
    piece = _index_in_group(unit_pieces)
    row = unit // KH
    n = tiles[row]
    if chunk is None:
        of = pieces[row]
        return unit, piece * n // of, (piece + 1) * n // of
    size = chunk[row]
    return unit, piece * size, np.minimum((piece + 1) * size, n)


def _index_in_group(counts: Ints) -> Ints:
    """0, 1, ..., counts[0]-1, 0, 1, ..., counts[1]-1, ..."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if ends.size else 0
    return np.arange(total, dtype=np.int64) - np.repeat(ends - counts, counts)


def _claim(cost: Ints, workers: int) -> tuple[Ints, Ints]:
    """Greedy list scheduling: the worker and the start time of each item."""
    index = np.arange(cost.size, dtype=np.int64)
    if cost.size == 0 or (cost == cost[0]).all():
        turn = index // workers
        return index - turn * workers, turn * (cost[0] if cost.size else 0)
    # A heap of time x workers + worker orders by time, then by worker. Each step pops the earliest free worker and
    # pushes it back with its new time, which is the popped key plus cost x workers.
    heap = list(range(workers))
    popped = np.array([heapreplace(heap, heap[0] + step) for step in (cost * workers).tolist()], dtype=np.int64)
    return popped % workers, popped // workers


# ----------------------------------------------------------------------------------------------------- timeline


@dataclass(frozen=True, eq=False)
class Timeline:
    """What a schedule implies when every tile takes one unit of time; segments are those of `table`, in its order."""

    table: Table

    @property
    def worker(self) -> Ints:
        return self.table.worker

    @property
    def t0(self) -> Ints:
        return self.table.t0

    @cached_property
    def t1(self) -> Ints:
        return self.table.t0 + self.table.cost

    @cached_property
    def makespan(self) -> int:
        """Tiles until the last worker is done."""
        return int(self.t1.max()) if len(self.table) else 0

    @cached_property
    def busy(self) -> Ints:
        """[workers] tiles of each worker."""
        load = np.bincount(self.worker, weights=self.table.cost, minlength=self.table.workers)
        return load.astype(np.int64)

    @property
    def waves(self) -> int:
        """Rounds of work items: one for stream_k, whose workers each walk one run of tiles."""
        if self.table.plan.kind == STREAM_K:
            return int(self.table.tiles > 0)
        return -(-len(self.table) // self.table.workers)

    @property
    def fill(self) -> float:
        """Share of workers x makespan that is work; 0 when there is none."""
        return self.table.tiles / (self.table.workers * self.makespan) if self.makespan else 0.0

    def of_worker(self, worker: int) -> Iterator[tuple[int, int, int]]:
        """(segment, t0, t1) of one worker, in the order in which it works."""
        for segment in np.flatnonzero(self.worker == worker).tolist():
            yield segment, int(self.t0[segment]), int(self.t1[segment])


# ----------------------------------------------------------------------------------------------------- checking


def _at_most(what: str, count: int, most: int) -> None:
    """Raises where a table of that many rows, tiles or segments could not be held."""
    if count > most:
        raise invalid("schedule", f"can be described with at most {most:,} {what}", f"{count:,}",
                      "Give fewer or shorter requests, fewer KV heads, or longer tiles and chunks.")


def _sizes(KH: int, workers: int, tile: int) -> tuple[int, int, int]:
    return whole("KH", KH), whole("workers", workers, most=MAX_WORKERS), whole("tile", tile, most=MAX_TILE)


def _lengths(param: str, values: ArrayLike, most: int = MAX_LENGTH) -> Ints:
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:  # ragged lists, objects that are no arrays
        raise invalid_type(param, "must be a list of whole numbers", f"what NumPy refuses ({error})",
                           "Give a list of token counts.") from None
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1:
        raise invalid(param, "must have one dimension", f"{array.ndim}", "Give a list of token counts.")
    if array.dtype.kind == "O" and all(type(value) is int for value in array.tolist()):  # some are past 64 bits
        for value in array.tolist():
            whole(param, value, 0, most)
    if array.dtype.kind not in "iu":
        raise invalid_type(param, "must hold integers", str(array.dtype), "Give token counts as whole numbers.")
    if array.size and array.min() < 0:
        raise invalid(param, "must not be negative", int(array.min()), "Give token counts from 0.")
    if array.size and array.max() > most:
        raise invalid(param, f"must be at most {most}", int(array.max()), "Give token counts that a cache can have.")
    return array.astype(np.int64, copy=False)
