"""What is advised on: a model, GPUs, formats and requests, and what each costs; changes are made with `changed`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from wavefill.advise.components import Component, Formats, Load, Machine, components
from wavefill.advise.memory import Memory, memory
from wavefill.advise.models import Architecture, Mixer


def seconds(parts: tuple[Component, ...], kind: str | None = None) -> float:
    """Of all components, or of those of a kind."""
    return sum(each.seconds for each in parts if kind in (None, each.kind))


@dataclass(frozen=True)
class Setup:
    """`batch` requests of `context` tokens on GPUs that share everything evenly."""

    model: Architecture
    machine: Machine
    formats: Formats
    batch: int
    context: int

    def __post_init__(self) -> None:
        Load(self.batch, 1, self.context)  # says what is wrong with these two

    def changed(self, **fields: Any) -> Setup:
        return replace(self, **fields)

    def remade(self, mixer: Callable[[Mixer, int], Mixer]) -> Setup:
        """With other mixers: of the one that a layer has, and how many layers before it had one."""
        layers, count = [], 0
        for layer in self.model.layers:
            if layer.mixer is None:
                layers.append(layer)
                continue
            layers.append(replace(layer, mixer=mixer(layer.mixer, count)))
            count += 1
        return self.changed(model=replace(self.model, layers=tuple(layers)))

    def decode(self, queries: int = 1) -> tuple[Component, ...]:
        """A step of `queries` tokens a request, the last of its context."""
        return components(self.model, Load(self.batch, queries, max(self.context, queries)), self.formats, self.machine)

    def prefill(self) -> tuple[Component, ...]:
        """Reading all prompts."""
        return components(self.model, Load(self.batch, self.context, self.context), self.formats, self.machine)

    def phase(self, name: str) -> tuple[Component, ...]:
        return self.decode() if name == "decode" else self.prefill()

    @cached_property
    def step(self) -> float:
        """Seconds of a decoding step."""
        return seconds(self.decode())

    @cached_property
    def prompts(self) -> float:
        """Seconds of reading all prompts."""
        return seconds(self.prefill())

    @cached_property
    def memory(self) -> Memory:
        return memory(self.model, self.machine, self.formats, self.context)
