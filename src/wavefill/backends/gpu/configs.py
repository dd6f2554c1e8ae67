"""How a shape is cut and run on a GPU: measured choices, and nothing that depends on lengths or batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from wavefill.backends.gpu.hopper import depth, stage_bytes
from wavefill.backends.gpu.many import MOST_QUERIES, THREADS, tile_of
from wavefill.hardware import gpu_tile


@dataclass(frozen=True)
class Config:
    """How one shape is cut and run.

    tile:   tokens of a tile.
    ctas:   programs an SM.
    stages: what is on its way: tiles of a program, or sixteens of tokens of a warp of the Hopper kernel.
    warps:  of a program.
    copies: what the Hopper kernel's copies are, "boxes" or "rows", "many" for that of several query tokens; "" for the
            portable kernel.
    heads:  query heads of a program at most; a larger group is shared by several, which read the same K and V.
    alone:  whether a program must have its SM for itself, and no cluster is asked for.
    block:  query tokens of a request that a row has at most; 1 where requests have one.
    """

    tile: int
    ctas: int
    stages: int
    warps: int
    copies: str = ""
    heads: int = 128
    alone: bool = False
    block: int = 1


#: Columns, states read at once and warps of a program of the merge. Few units with many states need many programs that
#: see all states; many units have few states each.
MERGES = ((8, 512, 8), (32, 64, 4), (128, 16, 4))
#: Programs that keep the machine busy for the microsecond that a merge takes.
MERGE_PROGRAMS = 96


@cache
def hopper(D: int, DV: int, group: int, copies: str) -> Config:
    """For compute capability 9.0: head sizes, group, and what is copied at once.

    A program takes sixteen query heads where registers, and a stage of a ring for their state, have room for them,
    eight else. One program fills an SM.
    """
    room = max(D, DV) <= 192 and stage_bytes(D, DV, copies == "boxes") >= 16 * DV * 4
    groups = 2 if group > 8 and room else 1
    warps, stages = depth(D, DV, groups, copies == "boxes")
    return Config(gpu_tile(max(D, DV)), 1, stages, warps, copies, 8 * groups)


@cache
def many(group: int, most: int | None) -> Config:
    """For compute capability 9.0 and several query tokens a request, at most `most` if that is known.

    Rows fill products of 64 queries (query tokens x heads of the group), which two groups of warps share, or of 128.
    """
    queries = 64 if most is not None and max(most, 1) * group <= 64 else MOST_QUERIES
    return Config(tile_of(queries), 1, 0, THREADS // 32, "many", queries, block=queries // group)


@cache
def portable(columns: int, group: int, element_bytes: int, optional: bool = False) -> Config:
    """For any other GPU, dtype or layout of the cache, with `optional` parts of scores or without.

    Its shared memory fits the 99 KB of the smallest.
    """
    if columns > 128 and group > 32:
        return replace(portable(columns, 32, element_bytes), heads=32)
    if element_bytes == 4 or group > 64:
        return Config(16, 1, 2, 8)
    if group > 32 or (columns > 128 and group > 16):  # registers and shared memory have room for one
        return Config(32, 1, 3, 8)
    if group > 16 and columns <= 64:
        return Config(32, 1 if optional else 2, 3, 8)
    return Config(32, 2, 3 if columns <= 128 else 2, 4)


@cache
def portable_several(columns: int, group: int, element_bytes: int, most: int | None) -> Config:
    """The same for several query tokens a request, `most` if that is known: as many a row as one product takes.

    Positions of queries take registers, so that there is room for 64 queries of narrow heads, half of that up to 128
    columns, else for 16. A larger group is shared by several programs, token by token.
    """
    room = 16 if element_bytes == 4 or columns > 128 else 32 if columns > 64 else 64
    block = 1
    while 2 * block * group <= room and (most is None or block < most):
        block *= 2
    config = portable(columns, min(block * group, room), element_bytes)
    if columns > 192 and element_bytes == 2 and config.ctas == 2:
        config = replace(config, stages=3)  # 587 us where two take 724 (8 requests of 32K, KH 8, D 256)
    if block * group > 16 and room > 16:
        config = replace(config, ctas=1, stages=4, warps=8)
    return replace(config, heads=room, block=block)
