"""Which Triton kernels a shape takes, and those that `warm.warmup` compiles for it."""

from __future__ import annotations

from typing import NamedTuple

from wavefill.backends.gpu.configs import MERGE_PROGRAMS, MERGES, Config
from wavefill.backends.gpu.kernels import STREAM_K, Variant, constants

#: Rows that a program of attention or merge scans at once, and that the scan of many does; requests that a program of
#: `rows.expand` looks at, at once, and rows that it fills.
CHUNK, SCAN_CHUNK, EXPAND_CHUNK, EXPAND_SIZE = 128, 1024, 64, 64
#: Queries of a program of `merge.join_pieces`.
PIECES_QUERIES = 16


class Switches(NamedTuple):
    """What changes the code of a kernel besides shape and schedule: several query tokens a request, and options."""

    several: bool = False
    capped: bool = False
    sloped: bool = False
    sinks: bool = False
    masked: bool = False


PLAIN = Switches()


def attention_variant(dtype: str, D: int, DV: int, G: int, config: Config, kind: int, paged: bool, scanned: bool,
                      aligned: bool, pdl: bool, switches: Switches = PLAIN, interpret: bool = False) -> Variant:
    """The portable attention kernel of a shape."""
    # A product takes 16 columns at least. Without vectors every element takes an address, and more warps have room.
    return Variant("portable", dtype, constants({
        "D": D, "DV": DV, "DP": max(_power(D), 16), "DVP": max(_power(DV), 16), "T": config.tile,
        "GP": max(min(_power(config.block * G), config.heads), 16), "CHUNK": CHUNK, "KIND": kind, "SCANNED": scanned,
        "STAGES": config.stages, "PDL": pdl, "PAGED": paged, "UNIT": aligned, "PRECISION": "ieee",
        "WIDEN": interpret and dtype == "bfloat16", "SEVERAL": switches.several, "CAPPED": switches.capped,
        "SLOPED": switches.sloped, "SINKS": switches.sinks, "MASKED": switches.masked,
    }), config.warps if aligned else 8, config.stages,
                   aligned=("s_kp", "s_kt", "s_kh", "s_vp", "s_vt", "s_vh") if aligned else (),
                   unaligned=("Q", "OUT", "TABLE", "SEQ", "LSE", "SINK", "SLOPES", "MASK")
                   + (() if aligned else ("K", "V")))


def merge_variant(dtype: str, DV: int, shape: tuple[int, int, int], tile: int, kind: int, by_worker: bool,
                  scanned: bool, pdl: bool, switches: Switches = PLAIN) -> Variant:
    """The merge kernel of a shape; see `merge_shape`."""
    columns, states, warps = shape
    return Variant("merge", dtype, constants({
        "DV": DV, "COLUMNS": columns, "STATES": states, "T": tile, "CHUNK": CHUNK, "KIND": kind,
        "BY_WORKER": by_worker, "SCANNED": scanned, "PDL": pdl, "SEVERAL": switches.several, "SINKS": switches.sinks,
    }), warps, pdl=pdl, unaligned=("OUT", "SEQ", "LSE", "SINK"))


def pieces_variant(dtype: str, DV: int, tile: int, pdl: bool, switches: Switches) -> Variant:
    """The merge of chunks of prompts."""
    return Variant("pieces", dtype, constants({
        "DV": DV, "QUERIES": PIECES_QUERIES, "T": tile, "CHUNK": CHUNK, "PDL": pdl, "SINKS": switches.sinks,
    }), 4, pdl=pdl, unaligned=("OUT", "SEQ", "LSE", "SINK"))


def prefix_variant(tile: int, kind: int, several: bool = False) -> Variant:
    """The scan of many rows, which sees no elements: one for all dtypes."""
    return Variant("prefix", "float32", constants({"T": tile, "CHUNK": SCAN_CHUNK, "KIND": kind, "SEVERAL": several}),
                   8, unaligned=("SEQ",))


def expand_variant(pdl: bool) -> Variant:
    """The kernel that makes rows of query offsets: one for all."""
    return Variant("expand", "float32", constants({"CHUNK": EXPAND_CHUNK, "SIZE": EXPAND_SIZE, "PDL": pdl}), 4,
                   unaligned=("STARTS", "LENS", "GATE"))


def triton_variants(dtype: str, D: int, DV: int, G: int, config: Config, kind: int, page: int | None, pdl: bool,
                    switches: Switches = PLAIN, *, attention: bool = True, merge: bool = True) -> list[Variant]:
    """Every Triton kernel that calls of a shape and a kind of schedule can take, whatever their lengths and batch.

    attention, merge: whether the portable attention kernel, and a merge, are among them.
    """
    found = [prefix_variant(config.tile, kind, switches.several)]
    if switches.several:
        found.append(expand_variant(pdl))
    for scanned in (False, True):
        if attention:
            found.append(attention_variant(dtype, D, DV, G, config, kind, page is not None, scanned, True, pdl,
                                           switches))
        if merge:
            found += [merge_variant(dtype, DV, shape, config.tile, kind, by_worker, scanned, pdl, switches)
                      for shape in MERGES for by_worker in ((False, True) if kind == STREAM_K else (False,))]
    return found


def merge_shape(rows: int, columns: int, *, alike: bool = False) -> tuple[int, int, int]:
    """Columns, states and warps of a program of the merge, for `rows` queries of `columns` outputs each; alike: the
    same for any number of rows, since sums of other numbers of states have other bits.
    """
    if alike:
        return MERGES[1]
    best = MERGES[0]
    for shape in MERGES[1:]:
        if rows * -(-columns // shape[0]) >= MERGE_PROGRAMS:
            best = shape
    return best


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()
