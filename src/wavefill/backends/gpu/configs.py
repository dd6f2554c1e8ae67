"""How a shape is cut and run on a GPU: measured choices, and nothing that depends on lengths or batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from wavefill.hardware import gpu_tile


@dataclass(frozen=True)
class Config:
    """How one shape is cut and run.

    tile:      tokens of a tile.
    ctas:      programs an SM.
    stages:    tiles on their way.
    warps:     of a program that compute.
    box:       tokens of a box of the tensor memory accelerator, 0 for the portable kernel.
    registers: of a thread, on average over warps that copy and warps that compute; the Hopper kernel's alone.
    heads:     query heads of a program at most; a larger group is shared by several, which read the same K and V.
    """

    tile: int
    ctas: int
    stages: int
    warps: int
    box: int = 0
    registers: int = 0
    heads: int = 128


#: Registers of a thread that copies.
COPY_REGISTERS = 80
#: Tokens of a box: pages of a multiple of it are read by the tensor memory accelerator.
BOX = 16
#: Columns, states read at once and warps of a program of the merge. Few units with many states need many programs that
#: see all states; many units have few states each.
MERGES = ((8, 512, 8), (32, 64, 4), (128, 16, 4))
#: Programs that keep the machine busy for the microsecond that a merge takes.
MERGE_PROGRAMS = 96


@cache
def hopper(columns: int, group: int, alone: bool) -> Config:
    """For compute capability 9.0: head size and group (rounded up), and whether a program must have its SM alone.

    A tile has 32 KB where it can: the work between two tiles is the same however many bytes they have. Two programs
    an SM overlap the end of one's segments with the other's tiles; registers allow one where rows or groups are large.
    """
    tile = gpu_tile(columns)
    if group > 64:  # Q, a tile's scores and the output of 16 heads a warp fill the registers
        return Config(tile // 2, 1, 12, 8, BOX, 168) if columns <= 192 else portable(columns, group, 2)
    if group > 32:
        return Config(tile, 1, 6, 8, BOX, 168) if columns <= 192 else Config(tile // 2, 1, 12, 8, BOX, 168)
    if group > 16 or columns > 128 or alone:
        return Config(tile, 1, 6, 4, BOX, 168)
    return Config(tile, 2, 3, 4, BOX, 128)


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
