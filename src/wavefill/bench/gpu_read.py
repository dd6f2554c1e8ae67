"""The read floor on a GPU: the least time to read a row's KV once, through its block table, and do nothing with it.

It is the yardstick of every other time, so the fastest of several kernels is taken, row by row, and each must have
read every byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wavefill.bench.inputs import Inputs

WORD = 4
#: Words of the smallest and largest piece that one program reads in a step.
LEAST_UNIT, LARGEST_UNIT = 64, 2048
#: Shared memory of an SM that pipelines may fill.
SHARED_BYTES = 200 * 1024


@dataclass(frozen=True)
class Config:
    """How the kernel reads.

    units:  of K and of V each in a step; stages: 1 for registers, more for asynchronous copies; warps of a program.
    per_sm: programs on an SM, which run through their share; None for a program a step.
    """

    units: int
    stages: int
    warps: int
    per_sm: int | None

    @property
    def name(self) -> str:
        return f"{self.units}x{self.stages}x{self.warps}x{self.per_sm or 'all'}"

    def programs(self, steps: int, unit: int, sms: int) -> int:
        """Programs of a launch, as many as fit the shared memory; `unit` in words."""
        if self.per_sm is None:
            return max(steps, 1)
        per_sm = self.per_sm
        if self.stages > 1:
            per_sm = max(1, min(per_sm, SHARED_BYTES // (self.units * self.stages * 2 * unit * WORD)))
        return max(1, min(steps, per_sm * sms))


CONFIGS = (
    Config(1, 1, 4, 8), Config(2, 1, 4, 4), Config(2, 1, 4, 8), Config(4, 1, 4, 4), Config(4, 1, 8, 3),
    Config(1, 1, 4, None), Config(2, 1, 4, None), Config(2, 4, 4, 4), Config(1, 6, 2, 5), Config(4, 3, 4, 3),
)


def unit_words(unit_bytes: int) -> int:
    """Words of the pieces in which a page of a head is read: a power of two that divides it, 0 if that is too small."""
    words = unit_bytes // WORD if unit_bytes % WORD == 0 else 0
    unit = min(words & -words, LARGEST_UNIT)
    return unit if unit >= LEAST_UNIT else 0


def units(table: Tensor, KH: int, parts: int) -> Tensor:
    """Pieces in the order of reading, int32: head after head, each head's pages as the table has them.

    A page holds KH x parts pieces one after the other in memory, whichever of HND and NHD it is.
    """
    pages = table[table >= 0].to(torch.int32)
    heads = torch.arange(KH, dtype=torch.int32, device=table.device)
    piece = torch.arange(parts, dtype=torch.int32, device=table.device)
    return ((pages[None, :, None] * KH + heads[:, None, None]) * parts + piece).flatten()


class Reader:
    """The read of one row's copies; `variants` has a call for each configuration, and `check` says what is wrong."""

    def __init__(self, inputs: Inputs) -> None:
        from wavefill.bench.gpu_read_kernel import read_units

        if inputs.block_table is None:
            raise ValueError("the read floor is that of paged KV")
        first = inputs.copies[0].k
        page_bytes = first.shape[1] * first.shape[3] * first.itemsize
        self._unit = unit_words(page_bytes)
        if not self._unit:
            raise ValueError(f"a page of {page_bytes} bytes is not made of pieces of {LEAST_UNIT * WORD} bytes or more")
        self._kernel: Any = read_units
        self._units = units(inputs.block_table, inputs.row.KH, page_bytes // (self._unit * WORD))
        self._copies = [(_words(copy.k), _words(copy.v)) for copy in inputs.copies]
        self._sum = torch.zeros(LARGEST_UNIT, dtype=torch.int32, device=first.device)
        self._sms = torch.cuda.get_device_properties(first.device).multi_processor_count

    def variants(self) -> dict[str, Callable[[int], object]]:
        return {config.name: self._call(config) for config in CONFIGS}

    def _call(self, config: Config) -> Callable[[int], object]:
        return lambda copy: self._launch(config, copy, check=False)

    def _launch(self, config: Config, copy: int, *, check: bool) -> None:
        k, v = self._copies[copy]
        count = self._units.numel()
        grid = config.programs(-(-count // config.units), self._unit, self._sms)
        self._kernel[(grid,)](k, v, self._units, self._sum, count, UNIT=self._unit, N=config.units,
                              STAGES=config.stages, CHECK=check, num_warps=config.warps)

    def check(self, name: str) -> str | None:
        """None if the configuration reads every word once, or what is wrong."""
        config = next(config for config in CONFIGS if config.name == name)
        k, v = (side.view(-1, self._unit) for side in self._copies[0])
        expected = 0
        for part in torch.split(self._units.long(), 1 << 16):
            expected += int((k[part] ^ (v[part] << 1)).sum(dtype=torch.int64))
        self._sum.zero_()
        self._launch(config, 0, check=True)
        found = int(self._sum[0])
        self._sum.zero_()
        return None if (found - expected) % (1 << 32) == 0 else "wrong result: not every byte was read once"


def _words(cache: Tensor) -> Tensor:
    """The memory of a dense cache as int32 words, in the order in which it lies."""
    dense = cache if cache.is_contiguous() else cache.transpose(1, 2)
    return dense.view(-1).view(torch.int32)
