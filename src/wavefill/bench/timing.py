"""How times are taken: cold data, variants by turns, medians.

A processor may hold 300 MB in a cache that it shares, so a benchmark that reads the same bytes again measures the
cache. Every call here works on another copy of its input, and the copies hold at least 1 GiB together.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

#: Bytes that are read between two uses of the same copy.
ROTATED_BYTES = 1 << 30
#: Rounds in which every variant is timed once, at least and at most.
MIN_ROUNDS = 5
MAX_ROUNDS = 200


@dataclass(frozen=True)
class Samples:
    """Seconds of each timed call of one variant."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, as a share of the median."""
        if len(self.seconds) < 4:
            return (max(self.seconds) - min(self.seconds)) / 2 / self.median
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median


def copies(nbytes: int, rotated: int | None = None) -> int:
    """How many copies of an input of `nbytes` make up `rotated` bytes, `ROTATED_BYTES` if None."""
    return max(1, -(-(ROTATED_BYTES if rotated is None else rotated) // max(nbytes, 1)))


def interleave(
    variants: Mapping[str, Callable[[int], object]],
    count: int,
    budget: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Samples]:
    """Time each variant on rotating copies, one call of each by turns.

    variants: name -> function of the index of a copy, 0 to count - 1.
    budget:   seconds to spend, within `MIN_ROUNDS` and `MAX_ROUNDS`; a first round is a warm-up and not counted.

    Consecutive calls, of whichever variant, take consecutive copies: between two uses of a copy all others were read.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    turn = 0
    began = clock()
    for done in range(-1, MAX_ROUNDS):
        if done >= MIN_ROUNDS and clock() - began > budget:
            break
        for name, call in variants.items():
            start = clock()
            call(turn % count)
            end = clock()
            turn += 1
            if done >= 0:
                seconds[name].append(end - start)
    return {name: Samples(tuple(values)) for name, values in seconds.items()}


class ReadBandwidth:
    """The machine's read bandwidth, measured again and again between other work."""

    def __init__(self) -> None:
        import torch

        # Written once, so that every page is memory of its own and not the system's one page of zeros.
        self._buffer: Tensor = torch.ones(ROTATED_BYTES, dtype=torch.uint8)
        self._rates: list[float] = []

    def measure(self) -> float:
        """Bytes per second of one pass over the buffer; it counts towards `median`."""
        from wavefill.backends.cpu import read_bandwidth

        self._rates.append(read_bandwidth(self._buffer))
        return self._rates[-1]

    def median(self) -> float:
        return statistics.median(self._rates)
