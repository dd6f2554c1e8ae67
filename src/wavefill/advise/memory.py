"""What GPUs hold: weights, and KV and states of requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from wavefill.advise.components import STATE_BYTES, WEIGHT_BYTES, Formats, Machine
from wavefill.advise.models import Architecture, Mixer, State

#: Share of a GPU's memory that weights and KV may take: vLLM's default for gpu_memory_utilization.
MEMORY_USE = 0.9


@dataclass(frozen=True)
class Memory:
    """Bytes, of all GPUs together.

    usable:  `MEMORY_USE` of their memory.
    request: KV and states of one request of the context; token: KV of one more token, past every window.
    """

    usable: int
    weights: int
    request: int
    token: float

    @property
    def requests(self) -> int:
        """How many requests it holds beside the weights; 0 where those leave no room."""
        return max(0, (self.usable - self.weights) // self.request)

    def holds(self, batch: int) -> bool:
        return self.weights + batch * self.request <= self.usable


def memory(model: Architecture, machine: Machine, formats: Formats, context: int) -> Memory:
    """What the GPUs hold. Activations, graphs and the allocator's waste are to fit in what `MEMORY_USE` leaves."""
    return Memory(
        usable=int(machine.gpus * machine.gpu.memory * MEMORY_USE),
        weights=model.parameters * WEIGHT_BYTES[formats.weights],
        request=math.ceil(request_bytes(model.mixers().items(), formats, context)),
        token=sum(layers * formats.kv_bytes(mixer, 1 << 20) / (1 << 20) for mixer, layers in model.mixers().items()
                  if not isinstance(mixer, State) and mixer.kind != "window"),
    )


def request_bytes(mixers: Iterable[tuple[Mixer, int]], formats: Formats, context: int,
                  part: Callable[[int], int] = lambda tokens: tokens) -> float:
    """KV and states of one request in mixers of so many layers. Layers with a window keep as many tokens as it has.

    part: how many of so many tokens are held.
    """
    total = 0.0
    for mixer, layers in mixers:
        if isinstance(mixer, State):
            total += layers * mixer.inner * mixer.state * STATE_BYTES
        else:
            window = getattr(mixer, "window", None)
            total += layers * formats.kv_bytes(mixer, part(context if window is None else min(context, window)))
    return total
