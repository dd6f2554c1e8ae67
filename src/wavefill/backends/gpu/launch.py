"""From tensors to launches: which kernels one call takes, its buffers, and their arguments.

What depends on shapes, strides and options alone is a `Call`, which the caller keeps; `run` adds addresses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from wavefill.backends.gpu import hopper, kernels, memory
from wavefill.backends.gpu.configs import MERGE_PROGRAMS, MERGES, Config
from wavefill.backends.gpu.kernels import Variant, constants
from wavefill.schedule import FIXED_ITEMS_PER_WORKER, FLASHDECODING_MAX_SPLITS, most_invariant_pieces
from wavefill.spec import MAX_LENGTH, Fixed, Invariant, Schedule, StreamK

#: Requests that every worker scans by itself; with more a kernel of its own scans them once.
SCAN_AT_MOST = 1024
#: Lengths that a program of attention or merge scans at once, and that the scan of many does.
CHUNK, SCAN_CHUNK = 128, 1024
LOG2_E = 1.4426950408889634

STREAM_K, SPLITS, CHUNKS = range(3)
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

    prefix, attention, merge: kernels to launch; the first only where lengths are scanned ahead, the last only where the
                              attention kernel does not merge by itself.
    *_grid, *_args:           grids of Triton kernels, and the arguments after the addresses.
    scratch:                  4-byte words of the buffer; its parts begin at `offsets`: states, maxima, sums, scan, LSE.
    ready:                    the kernels, by device.
    """

    prefix: Variant | None
    attention: Variant | hopper.Launch
    merge: Variant | None
    attention_grid: tuple[int, int, int]
    merge_grid: tuple[int, int, int]
    prefix_args: tuple[Any, ...]
    attention_args: tuple[Any, ...]
    merge_args: tuple[Any, ...]
    scratch: int
    offsets: tuple[int, int, int, int, int]
    ready: dict[int | None, tuple[Any, Any, Any]] = field(default_factory=dict, compare=False)

    @cached_property
    def alone(self) -> bool:
        """Whether it is one launch of the Hopper kernel."""
        return self.prefix is None and self.merge is None and isinstance(self.attention, hopper.Launch)

    def launchers(self, device: int | None) -> tuple[Any, Any, Any]:
        """The three kernels on a device (None: in the interpreter), compiled at the first call."""
        found = self.ready.get(device)
        if found is None:
            def make(kernel: Variant | hopper.Launch | None) -> Any:
                if kernel is None:
                    return None
                if isinstance(kernel, hopper.Launch):
                    assert device is not None
                    return hopper.Kernel(kernel, device)
                return _interpreted(kernel) if device is None else kernels.compiled(kernel, device)

            found = self.ready[device] = (make(self.prefix), make(self.attention), make(self.merge))
        return found


def _plan(dtype: str, q_shape: Shape, q_strides: Shape, k_shape: Shape, k_strides: Shape, v_shape: Shape,
          v_strides: Shape, table: tuple[Shape, Shape] | None, out_strides: Shape, lse_strides: Shape, aligned: bool,
          scale: float, window: int | None, schedule: Schedule, config: Config, workers: int, pdl: bool,
          interpret: bool) -> Call:
    B, HQ, D = q_shape
    page_size, KH, DV = k_shape[1], k_shape[2], v_shape[3]
    G, tile, units = HQ // KH, config.tile, B * KH
    cut = cut_of(schedule, tile)
    if cut.kind == STREAM_K and config.copies and splits_instead(B, KH, workers):
        cut = Cut(SPLITS, workers // KH, GIVEN)
    capacity = page_size * (1 if table is None else table[0][1])
    scanned = B > SCAN_AT_MOST or (bool(config.copies) and -(-capacity // tile) * units >= 1 << 31)
    slots = partial_slots(cut, B, KH, workers, -(-capacity // tile))
    stats = _round(slots * G)
    states = _round(slots * G * DV)
    ends_at = states + 2 * stats + (_round(2 * (2 * B + 3)) if scanned else 0)
    offsets = (0, states, states + stats, states + 2 * stats, ends_at)
    scratch = ends_at + _round(B * HQ)
    seen = 0 if window is None else min(window, MAX_LENGTH)
    limit = min(capacity, MAX_LENGTH)
    cuts = (seen, limit, cut.param, cut.rule)
    ends = (*out_strides[:2], *lse_strides)
    s_table = 0 if table is None else table[1][0]
    blocks = -(-G // config.heads)

    attention: Variant | hopper.Launch
    attention_args: tuple[Any, ...] = ()
    if config.copies:
        cluster = 1
        if cut.kind == STREAM_K and not config.alone:
            cluster = hopper.cluster_of(units, capacity * units * (D + DV) * 2)
        args = hopper.Args(scale=scale * LOG2_E, B=B, KH=KH, G=G, window=seen, limit=limit, param=cut.param,
                           rule=cut.rule, align=1 if cluster == hopper.TEAM else 8, t_b=s_table)
        for names, strides in ((("q_b", "q_h"), q_strides), (("k_p", "k_t", "k_h"), k_strides),
                               (("v_p", "v_t", "v_h"), v_strides), (("o_b", "o_h", "l_b", "l_h"), ends)):
            for name, stride in zip(names, strides, strict=False):
                setattr(args, name, stride)
        build = build_of(dtype, D, DV, config, cut.kind, None if table is None else page_size, scanned)
        attention = hopper.Launch(build, blocks, workers, cluster, args)
    else:
        attention = attention_variant(dtype, D, DV, G, config, cut.kind, table is not None, scanned, aligned, pdl,
                                      interpret)
        attention_args = (scale * LOG2_E, B, KH, G, page_size, *cuts, *q_strides[:2], *k_strides, *v_strides, *ends,
                          s_table, *kernels.values(attention))

    merge = None
    merge_args: tuple[Any, ...] = ()
    by_worker = cut.kind == STREAM_K and units > workers
    merge_rows = workers if by_worker else units
    shape = merge_shape(merge_rows * G, DV)
    if not (config.copies and cut.kind == STREAM_K):
        merge = merge_variant(dtype, DV, shape, tile, cut.kind, by_worker, scanned, pdl)
        merge_args = (B, KH, G, workers, *cuts, *ends, *kernels.values(merge))

    prefix = None
    prefix_args: tuple[Any, ...] = ()
    if scanned:
        prefix = prefix_variant(tile, cut.kind)
        prefix_args = (B, KH, workers, *cuts, *kernels.values(prefix))
    return Call(prefix, attention, merge, (workers, blocks, 1), (merge_rows, G, -(-DV // shape[0])), prefix_args,
                attention_args, merge_args, scratch, offsets)


def build_of(dtype: str, D: int, DV: int, config: Config, kind: int, page: int | None, scanned: bool) -> hopper.Build:
    """The Hopper kernel of a shape; `page` tokens a page, None for a contiguous cache."""
    return hopper.Build(dtype, D, DV, config.heads // 8, page or 0, config.copies == "boxes", kind, scanned,
                        config.tile, config.warps, config.stages)


def attention_variant(dtype: str, D: int, DV: int, G: int, config: Config, kind: int, paged: bool, scanned: bool,
                      aligned: bool, pdl: bool, interpret: bool = False) -> Variant:
    """The portable attention kernel of a shape."""
    # A product takes 16 columns at least. Without vectors every element takes an address, and more warps have room.
    return Variant("portable", dtype, constants({
        "D": D, "DV": DV, "DP": max(_power(D), 16), "DVP": max(_power(DV), 16), "T": config.tile,
        "GP": max(min(_power(G), config.heads), 16), "CHUNK": CHUNK, "KIND": kind, "SCANNED": scanned,
        "STAGES": config.stages, "PDL": pdl, "PAGED": paged, "UNIT": aligned, "PRECISION": "ieee",
        "WIDEN": interpret and dtype == "bfloat16",
    }), config.warps if aligned else 8, config.stages,
                   aligned=("s_kp", "s_kt", "s_kh", "s_vp", "s_vt", "s_vh") if aligned else (),
                   unaligned=("Q", "OUT", "TABLE", "SEQ", "LSE") + (() if aligned else ("K", "V")))


def merge_variant(dtype: str, DV: int, shape: tuple[int, int, int], tile: int, kind: int, by_worker: bool,
                  scanned: bool, pdl: bool) -> Variant:
    """The merge kernel of a shape; see `merge_shape`."""
    columns, states, warps = shape
    return Variant("merge", dtype, constants({
        "DV": DV, "COLUMNS": columns, "STATES": states, "T": tile, "CHUNK": CHUNK, "KIND": kind,
        "BY_WORKER": by_worker, "SCANNED": scanned, "PDL": pdl,
    }), warps, pdl=pdl, unaligned=("OUT", "SEQ", "LSE"))


def prefix_variant(tile: int, kind: int) -> Variant:
    """The scan of many lengths, which sees no elements: one for all dtypes."""
    return Variant("prefix", "float32", constants({"T": tile, "CHUNK": SCAN_CHUNK, "KIND": kind}), 8,
                   unaligned=("SEQ",))


def variants(dtype: str, D: int, DV: int, G: int, config: Config, kind: int, page: int | None,
             pdl: bool) -> list[Variant | hopper.Build]:
    """Every kernel that calls of a shape and a kind of schedule can take, whatever their lengths and batch."""
    found: list[Variant | hopper.Build] = [prefix_variant(config.tile, kind)]
    for scanned in (False, True):
        found.append(build_of(dtype, D, DV, config, kind, page, scanned) if config.copies else
                     attention_variant(dtype, D, DV, G, config, kind, page is not None, scanned, True, pdl))
        if config.copies and kind == STREAM_K:
            continue
        found += [merge_variant(dtype, DV, shape, config.tile, kind, by_worker, scanned, pdl)
                  for shape in MERGES for by_worker in ((False, True) if kind == STREAM_K else (False,))]
    return found


def merge_shape(rows: int, columns: int) -> tuple[int, int, int]:
    """Columns, states and warps of a program of the merge, for `rows` queries of `columns` outputs each."""
    best = MERGES[0]
    for shape in MERGES[1:]:
        if rows * -(-columns // shape[0]) >= MERGE_PROGRAMS:
            best = shape
    return best


def decode(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, table: Tensor | None, out: Tensor, lse: Tensor, *,
           scale: float, window: int | None, schedule: Schedule, config: Config, workers: int,
           interpret: bool = False) -> None:
    """`plan`, then `run`."""
    run(plan(q, k, v, table, out, lse, scale=scale, window=window, schedule=schedule, config=config, workers=workers,
             interpret=interpret), q, k, v, seq_lens, table, out, lse, interpret=interpret)


def plan(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, out: Tensor, lse: Tensor, *, scale: float,
         window: int | None, schedule: Schedule, config: Config, workers: int, interpret: bool = False) -> Call:
    """What calls with tensors of these sizes, strides and alignment have in common.

    q [B, HQ, D] and out with unit last stride; k, v [pages, page_size, KH, D] with a table [B, max_pages] of unit last
    stride, or [B, S, KH, D]. The caller holds what `config.copies` asks for: `copies_of` both caches and 16-byte
    alignment of them, 4-byte alignment of q's rows.
    """
    aligned = bool(config.copies) or (
        vectors_fit(k.stride(), k.element_size()) and vectors_fit(v.stride(), v.element_size())
        and not (k.data_ptr() | v.data_ptr()) % 16)
    return _plan(_DTYPE_NAMES[q.dtype], q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(),
                 None if table is None else (table.shape, table.stride()), out.stride(), lse.stride(), aligned, scale,
                 window, schedule, config, workers, not interpret and dependent_launch(q.device.index), interpret)


def run(call: Call, q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, table: Tensor | None, out: Tensor,
        lse: Tensor | None, *, interpret: bool = False) -> None:
    """Fill `out` [B, HQ, DV] and `lse` [B, HQ] on q's device, in at most three launches and without a synchronisation.

    The tensors are like those that the call was planned for, and seq_lens is contiguous; the device is current. Without
    `lse` (only where that of the plan was contiguous) it is lost.
    """
    if table is None:
        table = seq_lens
    inputs: tuple[Any, ...] = q, k, v
    at: tuple[Any, ...]
    capturing = False
    if interpret:
        device, stream = None, 0
        scratch = torch.empty(call.scratch, dtype=torch.float32, device=q.device)
        parts = [scratch[begin:] for begin in call.offsets]
        at = seq_lens, table, out, lse, *parts[:3], parts[3].view(torch.int64)
    else:
        device = q.get_device()
        stream, capturing = torch._C._cuda_getCurrentRawStream(device), torch.cuda.is_current_stream_capturing()
        base = memory.workspace(device, stream, call.scratch) if call.alone and not capturing else 0
        if not base:
            # torch's allocator knows about streams and graphs, so the buffer is this call's own, also in a graph.
            scratch = torch.empty(call.scratch, dtype=torch.float32, device=q.device)
            base = scratch.data_ptr()
        inputs = q.data_ptr(), k.data_ptr(), v.data_ptr()
        o, m, l, before, ends = call.offsets  # noqa: E741
        at = (seq_lens.data_ptr(), table.data_ptr(), out.data_ptr(),
              base + 4 * ends if lse is None else lse.data_ptr(), base + 4 * o, base + 4 * m, base + 4 * l,
              base + 4 * before)
    seq, table_at, out_at, lse_at, part_o, part_m, part_l, before = at
    prefix, attention, merge = call.launchers(device)
    if prefix is not None:
        prefix((1, 1, 1), stream, seq, before, *call.prefix_args)
    if isinstance(call.attention, hopper.Launch):
        attention(stream, capturing, k, v, (*inputs, table_at, seq, before, out_at, lse_at, part_o, part_m, part_l))
    else:
        attention(call.attention_grid, stream, *inputs, table_at, seq, before, out_at, lse_at, part_o, part_m, part_l,
                  *call.attention_args)
    if merge is not None:
        merge(call.merge_grid, stream, seq, before, out_at, lse_at, part_o, part_m, part_l, *call.merge_args)


_DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def _interpreted(variant: Variant) -> Any:
    """A kernel in Triton's interpreter, called as a `kernels.Compiled`."""
    run = kernels.function(variant.kernel)
    return lambda grid, stream, *args: run[grid](*args)


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _round(words: int) -> int:
    """Up to whole 16 bytes."""
    return -(-words // 4) * 4
