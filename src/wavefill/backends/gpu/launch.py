"""From tensors to launches: which kernels one call takes, its buffers, and their arguments.

What depends on shapes, strides and options alone is a `Call`, which the caller keeps; `run` adds addresses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from wavefill.backends.gpu import hopper, kernels, many, memory, nvrtc
from wavefill.backends.gpu.configs import Config
from wavefill.backends.gpu.kernels import CHUNKS, ROUNDS, SPLITS, STREAM_K, Variant
from wavefill.backends.gpu.variants import (
    EXPAND_SIZE,
    PIECES_QUERIES,
    PLAIN,
    Switches,
    attention_variant,
    expand_variant,
    merge_shape,
    merge_variant,
    pieces_variant,
    prefix_variant,
    triton_variants,
)
from wavefill.schedule import FIXED_ITEMS_PER_WORKER, FLASHDECODING_MAX_SPLITS, most_invariant_pieces
from wavefill.scores import NONE, Options
from wavefill.spec import MAX_FLOAT32, MAX_LENGTH, Fixed, Invariant, Schedule, StreamK

#: Rows that every worker scans by itself; with more a kernel of its own scans them once.
SCAN_AT_MOST = many.MOST_ROWS
LOG2_E = 1.4426950408889634
#: Whole units for each program from which the kernel of several query tokens does not cut them.
ROUNDS_UNITS = 4
#: Programs of the kernel that joins parts of drafts, at most: what fits on a GPU at a time.
JOIN_PROGRAMS = 264

GIVEN, ITEMS, FLASHDECODING, BOUNDED = range(4)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """A schedule as the kernels take it: how rows are cut, the parameter, and what it means (see `cursor`)."""

    kind: int
    param: int
    rule: int


def cut_of(schedule: Schedule, tile: int) -> Cut:
    """The schedule's kind, parameter (in tiles) and rule."""
    if isinstance(schedule, StreamK):
        return Cut(STREAM_K, 0, GIVEN)
    if isinstance(schedule, Invariant):
        return Cut(CHUNKS, -(-min(schedule.chunk or 0, MAX_LENGTH) // tile), BOUNDED)
    assert isinstance(schedule, Fixed)
    if schedule.splits is not None:
        return Cut(SPLITS, min(schedule.splits, MAX_LENGTH), GIVEN)
    if schedule.chunk is not None:
        return Cut(CHUNKS, -(-min(schedule.chunk, MAX_LENGTH) // tile), GIVEN)
    return Cut(SPLITS, 1, FLASHDECODING if schedule.rule else ITEMS)


def splits_instead(B: int, KH: int, workers: int) -> bool:
    """Whether the Hopper kernel cuts as `stream_k` by splits of one request, which come to the same runs.

    Parts of few units are many, and the merge kernel's many programs read them sooner than the last worker to arrive.
    """
    return B == 1 and KH <= hopper.LEAST_UNITS and workers % KH == 0


def partial_slots(cut: Cut, B: int, KH: int, workers: int, tiles: int) -> int:
    """The most partial states that a batch can leave, whatever its lengths; `tiles` a row at most."""
    if cut.kind == STREAM_K:
        return 2 * workers
    units = B * KH
    if cut.kind == CHUNKS:
        bounded = cut.rule == BOUNDED
        pieces = most_invariant_pieces(tiles, KH, cut.param) if bounded else -(-tiles // cut.param)
    elif cut.rule == ITEMS:
        return min(FIXED_ITEMS_PER_WORKER * workers + units, units * max(tiles, 1))
    elif cut.rule == FLASHDECODING:
        return min(FLASHDECODING_MAX_SPLITS, workers) * min(units, workers) + units
    else:
        pieces = min(cut.param, tiles)
    return units * max(pieces, 1)


@cache
def sm_count(device: int) -> int:
    """Streaming multiprocessors of a device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def dependent_launch(device: int) -> bool:
    """Whether a device can begin a kernel while the one before it ends, which kernels ask for by `PDL`."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def copies_of(shape: Shape, strides: Shape, paged: bool) -> str:
    """How the Hopper kernel reads a cache of 16-bit elements: "boxes", "rows", or "" where it cannot.

    It wants rows of whole 32 bytes at multiples of 16 bytes. Boxes of 16 tokens want pages of a multiple of 16 tokens,
    and strides above 0 and below 2**40 bytes; the copy engine counts sizes in 32 bits, and from 1.
    """
    if strides[3] != 1 or shape[3] % 16 or any(s % 8 for s, n in zip(strides[:3], shape[:3], strict=True) if n > 1):
        return ""
    boxes = (not (paged and shape[1] % hopper.SIXTEEN) and min(shape) > 0 and max(shape) < 1 << 31
             and all(0 < s < 1 << 39 for s, n in zip(strides[:3], shape[:3], strict=True) if n > 1))
    return "boxes" if boxes else "rows"


def vectors_fit(strides: Shape, element_bytes: int) -> bool:
    """Whether every row of a tensor starts at a multiple of 16 bytes from its first and is of unit stride."""
    return strides[-1] == 1 and all(s * element_bytes % 16 == 0 for s in strides[:-1])


@dataclass(frozen=True)
class Call:
    """All that calls of one geometry have in common.

    expand, prefix, attention, merge: kernels to launch; the first only for several query tokens a request, the second
                              only where rows are scanned ahead, the last only where the attention kernel does not merge
                              by itself.
    *_grid, *_args:           grids of Triton kernels, and the arguments after the addresses.
    scratch:                  4-byte words of the buffer; its parts begin at `offsets`: states, maxima, sums, scan, LSE,
                              rows.
    ready:                    the kernels, by device.
    """

    expand: Variant | None
    prefix: Variant | None
    attention: Variant | hopper.Launch | many.Launch
    merge: Variant | None
    expand_grid: tuple[int, int, int]
    attention_grid: tuple[int, int, int]
    merge_grid: tuple[int, int, int]
    expand_args: tuple[Any, ...]
    prefix_args: tuple[Any, ...]
    attention_args: tuple[Any, ...]
    merge_args: tuple[Any, ...]
    scratch: int
    offsets: tuple[int, int, int, int, int, int]
    ready: dict[int | None, tuple[Any, Any, Any, Any]] = field(default_factory=dict, compare=False)

    @cached_property
    def alone(self) -> bool:
        """Whether it is one launch of the Hopper kernel."""
        return self.prefix is None and self.merge is None and isinstance(self.attention, hopper.Launch)

    def launchers(self, device: int | None) -> tuple[Any, Any, Any, Any]:
        """The four kernels on a device (None: in the interpreter), compiled at the first call."""
        found = self.ready.get(device)
        if found is None:
            def make(kernel: Variant | hopper.Launch | many.Launch | None) -> Any:
                if kernel is None:
                    return None
                if isinstance(kernel, hopper.Launch):
                    assert device is not None
                    return hopper.Kernel(kernel, device)
                if isinstance(kernel, many.Launch):
                    assert device is not None
                    return many.Kernel(kernel, device)
                return _interpreted(kernel) if device is None else kernels.compiled(kernel, device)

            found = self.ready[device] = (make(self.expand), make(self.prefix), make(self.attention), make(self.merge))
        return found


@dataclass(frozen=True)
class Geometry:
    """Sizes and strides of a call's tensors, and the options that are no tensors.

    q, k, v:  shape and strides, as is `table` where there is one.
    requests: how many there are where they have several query tokens, None for one each.
    aligned:  whether K and V can be read in vectors of 16 bytes.
    sinks, sloped: whether there are sinks, ALiBi slopes.
    mask:     words of a row of the draft mask and from row to row, (0, 0) without one.
    """

    dtype: str
    q: tuple[Shape, Shape]
    k: tuple[Shape, Shape]
    v: tuple[Shape, Shape]
    table: tuple[Shape, Shape] | None
    out_strides: Shape
    lse_strides: Shape
    aligned: bool
    scale: float
    window: int | None = None
    requests: int | None = None
    causal: bool = True
    softcap: float | None = None
    sinks: bool = False
    sloped: bool = False
    mask: tuple[int, int] = (0, 0)

    @property
    def switches(self) -> Switches:
        return Switches(self.requests is not None, self.softcap is not None, self.sloped, self.sinks, self.mask[0] > 0)

    @property
    def capacity(self) -> int:
        """Keys that a request can have."""
        return self.k[0][1] * (1 if self.table is None else self.table[0][1])


def most_rows(tokens: int, requests: int, block: int) -> int:
    """Rows of at most `block` query tokens that so many requests can have together, and at least 1."""
    return max(tokens // block + min(requests, tokens), 1)


def make(g: Geometry, schedule: Schedule, config: Config, workers: int, pdl: bool, interpret: bool = False) -> Call:
    """The call of a geometry: which kernels, with which grids and arguments, and the buffer that they need."""
    T, HQ, D = g.q[0]
    KH, DV = g.k[0][2], g.v[0][3]
    rows = T if g.requests is None else most_rows(T, g.requests, config.block)
    G, tile, units, capacity = HQ // KH, config.tile, rows * KH, g.capacity
    queries = config.block * G
    cut = cut_of(schedule, tile)
    if cut.kind == STREAM_K and config.copies == "many":
        cut, workers = cut_many(g, config, workers)
    elif cut.kind == STREAM_K and config.copies and splits_instead(rows, KH, workers):
        cut = Cut(SPLITS, workers // KH, GIVEN)
    whole = cut.kind == ROUNDS and cut.param == 1
    scanned = cut.kind != ROUNDS and (rows > SCAN_AT_MOST or (
        bool(config.copies) and (-(-capacity // tile) + hopper.MOST_OPENING) * units >= 1 << 31))
    slots = 0 if whole else partial_slots(cut, rows, KH, workers, -(-capacity // tile))
    seen = 0 if g.window is None else min(g.window, MAX_LENGTH)
    cuts = (seen, min(capacity, MAX_LENGTH), cut.param, cut.rule)
    strides = (*g.out_strides[:2], *g.lse_strides)
    blocks = -(-queries // config.heads)

    attention: Variant | hopper.Launch | many.Launch
    attention_args: tuple[Any, ...] = ()
    if config.copies == "many":
        attention = _many_launch(g, config, cut, cuts, rows, scanned, workers)
    elif config.copies:
        attention = _hopper_launch(g, config, cut, cuts, scanned, blocks, workers)
    else:
        attention = attention_variant(g.dtype, D, DV, G, config, cut.kind, g.table is not None, scanned, g.aligned, pdl,
                                      g.switches, interpret)
        attention_args = (*_scales(g.scale, g.softcap), rows, KH, G, queries, g.k[0][1], int(g.causal), *cuts,
                          g.mask[0], *g.q[1][:2], *g.k[1], *g.v[1], *strides,
                          0 if g.table is None else g.table[1][0], g.mask[1], *kernels.values(attention))

    # A kernel that makes rows and joins parts by itself, and one that does the latter.
    joined = isinstance(attention, many.Launch) and attention.build.joined
    merges = joined or (config.copies in ("boxes", "rows") and cut.kind == STREAM_K)
    sizes = (slots * queries * DV, slots * queries, slots * queries, 2 * (2 * rows + 3) if scanned else 0, T * HQ,
             0 if g.requests is None else 7 * rows + 3)
    if joined:
        sizes = slots * many.state_words(DV), 0, 0, 0, T * HQ, 0
    ends = tuple(accumulate(map(_round, sizes), initial=0))

    merge = None
    merge_args: tuple[Any, ...] = ()
    merge_grid = (units, -(-queries // PIECES_QUERIES), 1)
    if cut.kind == ROUNDS and not whole:
        merge = pieces_variant(g.dtype, DV, tile, pdl, g.switches)
        merge_args = (rows, KH, G, queries, T, *cuts[:3], *strides, *kernels.values(merge))
    elif not whole and not merges:
        by_worker = cut.kind == STREAM_K and units > workers
        merge_rows = workers if by_worker else units
        shape = merge_shape(merge_rows * queries, DV, alike=cut.rule == BOUNDED)
        merge_grid = merge_rows, queries, -(-DV // shape[0])
        merge = merge_variant(g.dtype, DV, shape, tile, cut.kind, by_worker, scanned, pdl, g.switches)
        merge_args = (rows, KH, G, queries, T, workers, *cuts, *strides, *kernels.values(merge))

    prefix = expand = None
    prefix_args: tuple[Any, ...] = ()
    expand_args: tuple[Any, ...] = ()
    if scanned:
        prefix = prefix_variant(tile, cut.kind, g.switches.several)
        prefix_args = (rows, KH, workers, *cuts, *kernels.values(prefix))
    if g.requests is not None and not joined:
        expand = expand_variant(pdl)
        expand_args = (g.requests, rows, T, config.block, int(g.causal), *cuts[:2], *kernels.values(expand))
    return Call(expand, prefix, attention, merge, (-(-rows // EXPAND_SIZE), 1, 1), (workers, blocks, 1),
                merge_grid, expand_args, prefix_args, attention_args, merge_args,
                ends[-1], ends[:-1])  # type: ignore[arg-type]


def cut_many(g: Geometry, config: Config, workers: int) -> tuple[Cut, int]:
    """How the Hopper kernel of several query tokens shares out what `stream_k` asks for, and its programs.

    Prompts have rows enough to keep programs busy with whole units. A few rows of long requests are cut alike, so that
    programs read the same K and V together. Drafts, of one row a request, are cut as in decode.
    """
    T, KH, requests = g.q[0][0], g.k[0][2], min(g.requests or 0, g.q[0][0])
    if 2 * config.block * requests <= T:
        units = -(-T // config.block) * KH
        return Cut(ROUNDS, 1 if units >= ROUNDS_UNITS * workers else even_pieces(units, workers), GIVEN), workers
    return Cut(STREAM_K, 0, GIVEN), workers


def even_pieces(units: int, workers: int) -> int:
    """Pieces of so many units that fill the last round of the workers to nine tenths of what up to 32 reach."""
    def fill(pieces: int) -> float:
        rounds = -(-units * pieces // workers)
        return units * pieces / (rounds * workers)

    best = max(map(fill, range(1, 33)))
    return next(pieces for pieces in range(1, 33) if fill(pieces) >= 0.9 * best)


def _many_launch(g: Geometry, config: Config, cut: Cut, cuts: tuple[int, ...], rows: int, scanned: bool,
                 workers: int) -> many.Launch:
    """The Hopper kernel of several query tokens a request."""
    (T, HQ, D), KH, requests = g.q[0], g.k[0][2], g.requests or 0
    scale, cap = _scales(g.scale, g.softcap)
    seen, limit, param, rule = cuts
    build = many_build(g.dtype, D, config, cut.kind, 0 if g.table is None else g.k[0][1], scanned, g.switches)
    join, units = None, min(requests, T) * KH
    if build.joined and (lanes := many.join_lanes(units, workers)):
        kernel = many.Join(g.dtype, D, g.sinks, lanes)
        join = kernel, min(units * kernel.slices, workers if config.alone else JOIN_PROGRAMS)
    # With a budget the kernel that comes after would sit on the other SMs meanwhile.
    follows = join is not None if build.joined else not (cut.kind == ROUNDS and cut.param == 1)
    args = many.Args(
        scale=scale, cap=cap, B=rows, KH=KH, G=HQ // KH, block=config.block, tokens=T,
        causal=int(g.causal or g.window is not None), window=seen, param=param, rule=rule, requests=requests,
        limit=limit, programs=workers, apart=int(join is not None),
        early=int(follows and not config.alone), words=g.mask[0], mask_row=g.mask[1],
        t_b=0 if g.table is None else g.table[1][0], q_b=g.q[1][0], q_h=g.q[1][1], o_b=g.out_strides[0],
        o_h=g.out_strides[1], l_b=g.lse_strides[0], l_h=g.lse_strides[1])
    return many.Launch(build, workers, join, args)


def many_build(dtype: str, D: int, config: Config, kind: int, page: int, scanned: bool,
               switches: Switches) -> many.Build:
    """The Hopper kernel of several query tokens of a shape; `page` tokens a page, 0 for a contiguous cache."""
    return many.Build(dtype, D, config.heads, page, kind, scanned, switches.capped, switches.sloped, switches.sinks,
                      switches.masked)


def _hopper_launch(g: Geometry, config: Config, cut: Cut, cuts: tuple[int, ...], scanned: bool, blocks: int,
                   workers: int) -> hopper.Launch:
    """The Hopper kernel of one query token a request."""
    B, KH, capacity = g.q[0][0], g.k[0][2], g.capacity
    G, D, DV, units = g.q[0][1] // KH, g.q[0][2], g.v[0][3], B * KH
    cluster = 1
    if cut.kind == STREAM_K and not config.alone:
        keys = capacity if g.window is None else min(capacity, g.window)
        cluster = hopper.cluster_of(units, keys * units * (D + DV) * 2)
    seen, limit, param, rule = cuts
    scale, cap = _scales(g.scale, g.softcap)
    args = hopper.Args(scale=scale, cap=cap, B=B, KH=KH, G=G, window=seen, limit=limit, param=param, rule=rule,
                       align=1 if cluster == hopper.TEAM else 8, t_b=0 if g.table is None else g.table[1][0])
    for names, strides in ((("q_b", "q_h"), g.q[1]), (("k_p", "k_t", "k_h"), g.k[1]), (("v_p", "v_t", "v_h"), g.v[1]),
                           (("o_b", "o_h"), g.out_strides), (("l_b", "l_h"), g.lse_strides)):
        for name, stride in zip(names, strides, strict=False):
            setattr(args, name, stride)
    build = build_of(g.dtype, D, DV, config, cut.kind, None if g.table is None else g.k[0][1], scanned, g.switches)
    return hopper.Launch(build, blocks, workers, cluster, args)


def _scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """What products take, and what the tanh of a capped score takes; both so that scores come out in base 2.

    A cap past every score is as good as any larger one, and both stay within float32.
    """
    if softcap is None:
        return max(min(scale * LOG2_E, MAX_FLOAT32), -MAX_FLOAT32), 0.0
    cap = min(softcap, 2.0**100)
    return max(min(scale / cap, MAX_FLOAT32), -MAX_FLOAT32), cap * LOG2_E


def build_of(dtype: str, D: int, DV: int, config: Config, kind: int, page: int | None, scanned: bool,
             switches: Switches = PLAIN) -> hopper.Build:
    """The Hopper kernel of a shape; `page` tokens a page, None for a contiguous cache."""
    return hopper.Build(dtype, D, DV, config.heads // 8, page or 0, config.copies == "boxes", kind, scanned,
                        config.tile, config.warps, config.stages, switches.capped, switches.sloped, switches.sinks)


def variants(dtype: str, D: int, DV: int, G: int, config: Config, kind: int, page: int | None, pdl: bool,
             switches: Switches = PLAIN) -> list[Variant | nvrtc.Build]:
    """Every kernel that calls of a shape and a kind of schedule can take, whatever their lengths and batch."""
    merges = not (config.copies in ("boxes", "rows") and kind == STREAM_K)
    found: list[Variant | nvrtc.Build] = [*triton_variants(dtype, D, DV, G, config, kind, page, pdl, switches,
                                                           attention=not config.copies, merge=merges)]
    if config.copies == "many":
        builds = [many_build(dtype, D, config, kind, page or 0, scanned, switches) for scanned in (False, True)]
        found += builds
        if builds[0].joined:
            found += [many.Join(dtype, D, switches.sinks, lanes) for lanes in many.JOIN_LANES]
        if kind == STREAM_K:  # see `cut_many`
            found.append(many_build(dtype, D, config, ROUNDS, page or 0, False, switches))
            found.append(pieces_variant(dtype, DV, config.tile, pdl, switches))
    elif config.copies:
        found += [build_of(dtype, D, DV, config, kind, page, scanned, switches) for scanned in (False, True)]
    return found


def attend(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, table: Tensor | None, out: Tensor, lse: Tensor, *,
           starts: Tensor | None = None, options: Options = NONE, interpret: bool = False, **how: Any) -> None:
    """`plan`, which takes `how`, then `run`."""
    requests = None if starts is None else seq_lens.shape[0]
    call = plan(q, k, v, table, out, lse, requests=requests, options=options, interpret=interpret, **how)
    run(call, q, k, v, seq_lens, table, out, lse, starts=starts, options=options, interpret=interpret)


def plan(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, out: Tensor, lse: Tensor, *, scale: float,
         window: int | None, schedule: Schedule, config: Config, workers: int, requests: int | None = None,
         causal: bool = True, options: Options = NONE, interpret: bool = False) -> Call:
    """What calls with tensors of these sizes, strides and alignment, and with such options, have in common.

    q [T, HQ, D] and out with unit last stride; k, v [pages, page_size, KH, D] with a table [B, max_pages] of unit last
    stride, or [B, S, KH, D]. `requests` is B where they have several query tokens, None where T is. The caller holds
    what `config.copies` asks for: `copies_of` both caches and 16-byte alignment of them, 4-byte alignment of q's rows,
    16-byte for "many".
    """
    aligned = bool(config.copies) or (
        vectors_fit(k.stride(), k.element_size()) and vectors_fit(v.stride(), v.element_size())
        and not (k.data_ptr() | v.data_ptr()) % 16)
    mask = options.mask
    geometry = Geometry(
        _DTYPE_NAMES[q.dtype], (q.shape, q.stride()), (k.shape, k.stride()), (v.shape, v.stride()),
        None if table is None else (table.shape, table.stride()), out.stride(), lse.stride(), aligned, scale, window,
        requests, causal, options.softcap, options.sinks is not None, options.alibi_slopes is not None,
        (0, 0) if mask is None else (mask.shape[1], mask.stride(0)))
    return make(geometry, schedule, config, workers, not interpret and dependent_launch(q.device.index), interpret)


def run(call: Call, q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, table: Tensor | None, out: Tensor,
        lse: Tensor | None, *, starts: Tensor | None = None, options: Options = NONE, gate: Tensor | None = None,
        interpret: bool = False) -> None:
    """Fill `out` [T, HQ, DV] and `lse` [T, HQ] on q's device, in at most four launches and without a synchronisation.

    The tensors are like those that the call was planned for, and seq_lens and `starts`, cu_seqlens_q, are contiguous;
    the device is current. Without `lse` (only where that of the plan was contiguous) it is lost. With `gate` [1] int32,
    which wants a call that makes rows, nothing is written where it holds 0 on the device.
    """
    if table is None:
        table = seq_lens
    given = seq_lens, table, starts, options.sinks, options.alibi_slopes, options.mask, gate
    inputs: tuple[Any, ...] = q, k, v
    at: tuple[Any, ...]
    parts: tuple[Any, ...]
    capturing = False
    if interpret:
        device, stream = None, 0
        scratch = torch.empty(call.scratch, dtype=torch.float32, device=q.device)
        o, m, l, before, _, rows = (scratch[begin:] for begin in call.offsets)  # noqa: E741
        at = tuple(seq_lens if x is None else x for x in given)
        parts = out, lse, o, m, l, before.view(torch.int64), rows.view(torch.int32)
    else:
        device = q.get_device()
        stream, capturing = torch._C._cuda_getCurrentRawStream(device), torch.cuda.is_current_stream_capturing()
        base = memory.workspace(device, stream, call.scratch) if call.alone and not capturing else 0
        if not base:
            # torch's allocator knows about streams and graphs, so the buffer is this call's own, also in a graph.
            scratch = torch.empty(call.scratch, dtype=torch.float32, device=q.device)
            base = scratch.data_ptr()
        inputs = q.data_ptr(), k.data_ptr(), v.data_ptr()
        at = tuple(0 if x is None else x.data_ptr() for x in given)
        parts = tuple(base + 4 * begin for begin in call.offsets)
        parts = (out.data_ptr(), parts[4] if lse is None else lse.data_ptr(), *parts[:4], parts[5])
    seq, table_at, starts_at, sinks, slopes, mask, gate_at = at
    out_at, lse_at, part_o, part_m, part_l, before_at, rows_at = parts
    expand, prefix, attention, merge = call.launchers(device)
    if expand is not None:
        expand(call.expand_grid, stream, starts_at, seq, rows_at, gate_at, int(gate is not None), *call.expand_args)
        seq = rows_at
    if prefix is not None:
        prefix((1, 1, 1), stream, seq, before_at, *call.prefix_args)
    results = before_at, out_at, lse_at, part_o, part_m, part_l
    if isinstance(call.attention, Variant):
        attention(call.attention_grid, stream, *inputs, table_at, seq, *results, sinks, slopes, mask,
                  *call.attention_args)
    elif isinstance(call.attention, many.Launch):
        attention(stream, capturing, k, v, (*inputs, table_at, seq, starts_at, at[0], *results, sinks, slopes, mask))
    else:
        attention(stream, capturing, k, v, (*inputs, table_at, seq, *results, sinks, slopes))
    if call.merge is not None:
        scan = () if call.merge.kernel == "pieces" else (before_at,)
        merge(call.merge_grid, stream, seq, *scan, out_at, lse_at, part_o, part_m, part_l, sinks, *call.merge_args)


_DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def _interpreted(variant: Variant) -> Any:
    """A kernel in Triton's interpreter, called as a `kernels.Compiled`."""
    run = kernels.function(variant.kernel)
    return lambda grid, stream, *args: run[grid](*args)


def _round(words: int) -> int:
    """Up to whole 16 bytes."""
    return -(-words // 4) * 4
