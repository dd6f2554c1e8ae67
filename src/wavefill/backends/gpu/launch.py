"""From tensors to launches: which kernels one call takes, its buffers, and their arguments.

What depends on shapes, strides and options alone is worked out once and kept (`_plan`); a call adds addresses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from wavefill.backends.gpu import kernels
from wavefill.backends.gpu.configs import COPY_REGISTERS, MERGE_PROGRAMS, MERGES, Config
from wavefill.backends.gpu.kernels import Variant, constants
from wavefill.hardware import GPU_INVARIANT_CHUNK
from wavefill.schedule import FIXED_ITEMS_PER_WORKER, FLASHDECODING_MAX_SPLITS, INVARIANT_MAX_PIECES
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
        return Cut(CHUNKS, -(-min(schedule.chunk or GPU_INVARIANT_CHUNK, MAX_LENGTH) // tile), BOUNDED)
    assert isinstance(schedule, Fixed)
    if schedule.splits is not None:
        return Cut(SPLITS, min(schedule.splits, MAX_LENGTH), GIVEN)
    if schedule.chunk is not None:
        return Cut(CHUNKS, -(-min(schedule.chunk, MAX_LENGTH) // tile), GIVEN)
    return Cut(SPLITS, 1, FLASHDECODING if schedule.rule else ITEMS)


def partial_slots(cut: Cut, B: int, KH: int, workers: int, tiles: int) -> int:
    """The most partial states that a batch can leave, whatever its lengths; `tiles` a row at most."""
    if cut.kind == STREAM_K:
        return 2 * workers
    units = B * KH
    if cut.kind == CHUNKS:
        pieces = -(-tiles // cut.param)
        if cut.rule == BOUNDED:
            pieces = min(pieces, max(INVARIANT_MAX_PIECES // KH, 1))
    elif cut.rule == ITEMS:
        return min(FIXED_ITEMS_PER_WORKER * workers + units, units * max(tiles, 1))
    elif cut.rule == FLASHDECODING:
        return min(FLASHDECODING_MAX_SPLITS, workers) * min(units, workers) + units
    else:
        pieces = min(cut.param, tiles)
    return units * max(pieces, 1)


class Box:
    """K or V as Triton's launcher takes a tensor descriptor, without its checks."""

    __slots__ = ("base", "padding", "shape", "strides")

    def __init__(self, base: Tensor, shape: Shape, strides: Shape) -> None:
        self.base, self.padding = base, "zero"
        pages, tokens, heads, columns = shape
        page, token, head = (s if n > 1 else 64 for s, n in zip(strides[:3], shape[:3], strict=True))
        piece = kernels.piece_of(columns)
        self.shape = (pages, heads, columns // piece, tokens, piece)
        self.strides = (page, head, piece, token, 1)


@cache
def sm_count(device: int) -> int:
    """Streaming multiprocessors of a device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def dependent_launch(device: int) -> bool:
    """Whether a device can begin a kernel while the one before it ends, which kernels ask for by `PDL`."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache(maxsize=4096)
def boxes_fit(shape: Shape, strides: Shape, paged: bool, box: int) -> bool:
    """Whether the tensor memory accelerator can read a cache of 16-bit elements in boxes of `box` tokens.

    It wants strides of whole 16 bytes below 2**40 and sizes below 2**32; the kernel wants rows of whole 32 bytes.
    """
    return (strides[3] == 1 and shape[3] % 16 == 0 and not (paged and shape[1] % box) and max(shape) < 1 << 31
            and all(s % 8 == 0 and 0 < s < 1 << 39 for s, n in zip(strides[:3], shape[:3], strict=True) if n > 1))


@lru_cache(maxsize=4096)
def vectors_fit(strides: Shape, element_bytes: int) -> bool:
    """Whether every row of a tensor starts at a multiple of 16 bytes from its first and is of unit stride."""
    return strides[-1] == 1 and all(s * element_bytes % 16 == 0 for s in strides[:-1])


@dataclass(frozen=True)
class Call:
    """All that calls of one geometry have in common.

    prefix, attention, merge: kernels to launch, the first only for more than `SCAN_AT_MOST` requests.
    *_grid, *_args:           their grids, and the arguments after the addresses.
    boxes:                    K and V as descriptors, None where they go by address.
    scratch:                  4-byte words of the buffer; its parts begin at `offsets` (states, maxima, sums, scan).
    ready:                    the kernels, by device.
    """

    prefix: Variant | None
    attention: Variant
    merge: Variant
    attention_grid: tuple[int, int, int]
    merge_grid: tuple[int, int, int]
    prefix_args: tuple[Any, ...]
    attention_args: tuple[Any, ...]
    merge_args: tuple[Any, ...]
    boxes: tuple[tuple[Shape, Shape], tuple[Shape, Shape]] | None
    scratch: int
    offsets: tuple[int, int, int, int]
    ready: dict[int | None, tuple[Any, Any, Any]] = field(default_factory=dict, compare=False)

    def launchers(self, device: int | None) -> tuple[Any, Any, Any]:
        """The three kernels on a device (None: in the interpreter), compiled at the first call."""
        found = self.ready.get(device)
        if found is None:
            make: Any = _interpreted if device is None else lambda variant: kernels.compiled(variant, device)
            prefix = None if self.prefix is None else make(self.prefix)
            found = self.ready[device] = (prefix, make(self.attention), make(self.merge))
        return found


@lru_cache(maxsize=4096)
def _plan(dtype: str, q_shape: Shape, q_strides: Shape, k_shape: Shape, k_strides: Shape, v_shape: Shape,
          v_strides: Shape, table: tuple[Shape, Shape] | None, out_strides: Shape, lse_strides: Shape, aligned: bool,
          scale: float, window: int | None, schedule: Schedule, config: Config, workers: int, pdl: bool,
          interpret: bool) -> Call:
    B, HQ, D = q_shape
    page_size, KH, DV = k_shape[1], k_shape[2], v_shape[3]
    G, tile, units = HQ // KH, config.tile, B * KH
    cut = cut_of(schedule, tile)
    scanned = B > SCAN_AT_MOST
    capacity = page_size * (1 if table is None else table[0][1])
    slots = partial_slots(cut, B, KH, workers, -(-capacity // tile))
    stats = _round(slots * G)
    offsets = (0, _round(slots * G * DV), _round(slots * G * DV) + stats, _round(slots * G * DV) + 2 * stats)
    scratch = offsets[3] + (2 * (2 * B + 3) if scanned else 0)
    cuts = (0 if window is None else min(window, MAX_LENGTH), min(capacity, MAX_LENGTH), cut.param, cut.rule)
    ends = (*out_strides[:2], *lse_strides)
    s_table = 0 if table is None else table[1][0]

    attention = attention_variant(dtype, D, DV, G, config, cut.kind, None if table is None else page_size, scanned,
                                  aligned, pdl, interpret)
    strides = () if config.box else (*k_strides, *v_strides)
    attention_args = (scale * LOG2_E, B, KH, G, *(() if config.box else (page_size,)), *cuts, *q_strides[:2], *strides,
                      *ends, s_table, *kernels.values(attention))

    by_worker = cut.kind == STREAM_K and units > workers
    merge_rows = workers if by_worker else units
    shape = merge_shape(merge_rows * G, DV)
    merge = merge_variant(dtype, DV, shape, tile, cut.kind, by_worker, scanned, pdl)
    merge_args = (B, KH, G, workers, *cuts, *ends, *kernels.values(merge))

    prefix = None
    prefix_args: tuple[Any, ...] = ()
    if scanned:
        prefix = prefix_variant(dtype, tile, cut.kind)
        prefix_args = (B, KH, workers, *cuts, *kernels.values(prefix))
    boxes = ((k_shape, k_strides), (v_shape, v_strides)) if config.box else None
    return Call(prefix, attention, merge, (workers, -(-G // config.heads), 1), (merge_rows, G, -(-DV // shape[0])),
                prefix_args, attention_args, merge_args, boxes, scratch, offsets)


def attention_variant(dtype: str, D: int, DV: int, G: int, config: Config, kind: int, page: int | None, scanned: bool,
                      aligned: bool, pdl: bool, interpret: bool = False) -> Variant:
    """The attention kernel of a shape; `page` tokens a page, None for a contiguous cache."""
    common: dict[str, Any] = {
        "D": D, "DV": DV, "DP": _power(D), "DVP": _power(DV), "T": config.tile,
        "GP": max(min(_power(G), config.heads), 16), "CHUNK": CHUNK, "KIND": kind, "SCANNED": scanned,
        "STAGES": config.stages, "PDL": pdl,
    }
    if config.box:
        common |= {"BOX": config.box, "PAGE": page or 0, "COPY_REGISTERS": COPY_REGISTERS}
        return Variant("hopper", dtype, constants(common), config.warps, box=config.box, registers=config.registers,
                       aligned=("s_qb", "s_qh", "s_ob", "s_oh"), unaligned=("TABLE", "SEQ", "LSE"))
    common |= {"PAGED": page is not None, "UNIT": aligned, "PRECISION": "ieee",
               "WIDEN": interpret and dtype == "bfloat16"}
    # Without vectors every element takes an address, for which more warps have room.
    return Variant("portable", dtype, constants(common), config.warps if aligned else 8, config.stages,
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


def prefix_variant(dtype: str, tile: int, kind: int) -> Variant:
    """The scan of many lengths."""
    return Variant("prefix", dtype, constants({"T": tile, "CHUNK": SCAN_CHUNK, "KIND": kind}), 8, unaligned=("SEQ",))


def variants(dtype: str, D: int, DV: int, G: int, config: Config, kind: int, page: int | None,
             pdl: bool) -> list[Variant]:
    """Every kernel that calls of a shape and a kind of schedule can take, whatever their lengths and batch."""
    found = [prefix_variant(dtype, config.tile, kind)]
    for scanned in (False, True):
        found.append(attention_variant(dtype, D, DV, G, config, kind, page, scanned, True, pdl))
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
    """Fill `out` [B, HQ, DV] and `lse` [B, HQ] on q's device, in at most three launches and without a synchronisation.

    q [B, HQ, D] and out with unit last stride; k, v [pages, page_size, KH, D] with a table [B, max_pages] of unit last
    stride, or [B, S, KH, D]; seq_lens contiguous. The caller has checked them, made the device current, and holds
    what `config.box` asks for: `boxes_fit` of both caches, and 16-byte alignment of q, out and the caches.
    """
    aligned = bool(config.box) or (
        vectors_fit(k.stride(), k.element_size()) and vectors_fit(v.stride(), v.element_size())
        and not (k.data_ptr() | v.data_ptr()) % 16)
    call = _plan(_DTYPE_NAMES[q.dtype], q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(),
                 None if table is None else (table.shape, table.stride()), out.stride(), lse.stride(), aligned, scale,
                 window, schedule, config, workers, not interpret and dependent_launch(q.device.index), interpret)
    # torch's allocator knows about streams and graphs, so the buffer is this call's own, also in a captured graph.
    scratch = torch.empty(call.scratch, dtype=torch.float32, device=q.device)
    if table is None:
        table = seq_lens
    addresses: tuple[Any, ...]
    caches: tuple[Any, Any] = k, v
    if interpret:
        device, stream = None, 0
        parts = [scratch[at:] for at in call.offsets]
        parts[3] = parts[3].view(torch.int64)
        q_at: Any = q
        addresses = (seq_lens, table, out, lse, *parts)
    else:
        device, stream = q.device.index, torch._C._cuda_getCurrentRawStream(q.device.index)
        base = scratch.data_ptr()
        q_at = q.data_ptr()
        addresses = (seq_lens.data_ptr(), table.data_ptr(), out.data_ptr(), lse.data_ptr(),
                     *(base + 4 * at for at in call.offsets))
        caches = ((k.data_ptr(), v.data_ptr()) if call.boxes is None else
                  (Box(k, *call.boxes[0]), Box(v, *call.boxes[1])))
    seq, table_at, out_at, lse_at, part_o, part_m, part_l, before = addresses
    prefix, attention, merge = call.launchers(device)
    if prefix is not None:
        prefix((1, 1, 1), stream, seq, before, *call.prefix_args)
    attention(call.attention_grid, stream, q_at, *caches, table_at, seq, before, out_at, lse_at, part_o, part_m, part_l,
              *call.attention_args)
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
