"""What GPUs send each other in a step, and how long that takes on their links.

A group of GPUs within one domain of links (`Gpu.link_gpus`) sends at `Gpu.link`; of a larger one the part that leaves
the domain goes through the network cards. Nothing is overlapped with computation: plans that hide an exchange are
faster. docs/advise.md has the formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from wavefill.hardware import Gpu
from wavefill.spec import invalid

#: Share of a link's bandwidth that exchanges reach: DeepEP's README, dispatch among 8 GPUs of compute capability 10.0
#: at 726 of 900 GB/s.
LINK_SHARE = 726 / 900
#: Seconds of an exchange of a few bytes through the network: NCCL's base for its protocol LL and a hop (tuning.cc:
#: 6.6 and 2.7 us).
NETWORK_LATENCY = 9.3e-6


@dataclass(frozen=True)
class Exchange:
    """One kind of exchange of a step; `layers` have it.

    sent:    bytes that a GPU sends in one layer.
    seconds: of all layers.
    """

    name: str
    layers: int
    gpus: int
    sent: float
    seconds: float


@dataclass(frozen=True)
class Links:
    """How the GPUs of a plan are connected."""

    gpu: Gpu

    def domain(self, gpus: int, stride: int = 1) -> int:
        """How many of a group that has every `stride`-th GPU share links."""
        return min(gpus, max(1, self.gpu.link_gpus // stride))

    def all_reduce(self, name: str, layers: int, gpus: int, nbytes: float, *, apart: bool = False) -> Exchange:
        """Everybody has `nbytes` to be summed, and gets the sum: in one round (everybody sends all to all), or in two
        (reduce-scatter, all-gather), whichever is faster.

        apart: whether it is an all-gather, something computed, and a reduce-scatter: always two rounds.
        """
        inside = self.domain(gpus)
        outside = -(-gpus // inside)
        one, two = (inside - 1) * nbytes, 2 * (inside - 1) / inside * nbytes
        seconds, sent = self._link(two, 2), two
        if not apart:
            seconds, sent = min((seconds, sent), (self._link(one, 1), one))
        if outside > 1:  # every GPU of a domain sums a part of the tensor with those that have its place in the others
            crossed = 2 * (outside - 1) / outside * nbytes / inside
            seconds, sent = self._link(two, 2) + self._network(crossed, 2), two + crossed
        return Exchange(name, layers, gpus, sent, layers * seconds)

    def all_to_all(self, name: str, layers: int, gpus: int, nbytes: float, stride: int = 1) -> Exchange:
        """Everybody has `nbytes`, an even part of them for each GPU."""
        inside = self.domain(gpus, stride)
        near, far = (inside - 1) / gpus * nbytes, (gpus - inside) / gpus * nbytes
        seconds = max(self._link(near, 1), self._network(far, 1) if far else 0.0)
        return Exchange(name, layers, gpus, near + far, layers * seconds)

    def _link(self, nbytes: float, rounds: int) -> float:
        if self.gpu.link is None:
            raise invalid("gpu", "needs link (bytes/s to other GPUs) for more than one GPU", self.gpu.name,
                          "Add it to the file that describes the GPU.")
        return rounds * self.gpu.link_latency + nbytes / (self.gpu.link * LINK_SHARE) if nbytes else 0.0

    def _network(self, nbytes: float, rounds: int) -> float:
        return rounds * NETWORK_LATENCY + nbytes / (self.gpu.network * LINK_SHARE)


def distinct(gpus: int, choices: int) -> float:
    """Different GPUs among `choices` even and independent ones: n (1 - (1 - 1/n)^k)."""
    return gpus * -math.expm1(choices * math.log1p(-1 / gpus)) if gpus > 1 else 1.0
