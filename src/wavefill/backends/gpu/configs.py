"""How a shape is cut and run on a GPU: measured choices, and nothing that depends on lengths or batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from wavefill.backends.gpu.hopper import depth, stage_bytes
from wavefill.hardware import gpu_tile


@dataclass(frozen=True)
class Config:
    """How one shape is cut and run.

    tile:   tokens of a tile.
    ctas:   programs an SM.
    stages: what is on its way: tiles of a program, or sixteens of tokens of a warp of the Hopper kernel.
    warps:  of a program.
    copies: what the Hopper kernel's copies are, "boxes" or "rows"; "" for the portable kernel.
    heads:  query heads of a program at most; a larger group is shared by several, which read the same K and V.
    alone:  whether a program must have its SM for itself, and no cluster is asked for.
    """

    tile: int
    ctas: int
    stages: int
    warps: int
    copies: str = ""
    heads: int = 128
    alone: bool = False


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
def portable(columns: int, group: int, element_bytes: int) -> Config:
    """For any other GPU, dtype or layout of the cache; its shared memory fits the 99 KB of the smallest."""
    if columns > 128 and group > 32:
        return replace(portable(columns, 32, element_bytes), heads=32)
    if element_bytes == 4 or group > 64:
        return Config(16, 1, 2, 8)
    if group > 32 or (columns > 128 and group > 16):  # registers and shared memory have room for one
        return Config(32, 1, 3, 8)
    return Config(32, 2, 3 if columns <= 128 else 2, 8 if group > 16 and columns <= 64 else 4)
