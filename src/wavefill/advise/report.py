"""The report of one model on one kind of GPU: what each component takes, attention's share, and what memory holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wavefill.advise import models
from wavefill.advise.components import (
    STATE_BYTES,
    WEIGHT_BYTES,
    Component,
    Formats,
    Load,
    Machine,
    components,
    share,
)
from wavefill.advise.models import Architecture, State
from wavefill.hardware import Gpu
from wavefill.spec import invalid

#: Share of a GPU's memory that weights and KV may take: vLLM's default for gpu_memory_utilization.
MEMORY_USE = 0.9
PHASES = ("decode", "prefill")


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


@dataclass(frozen=True)
class Report:
    """What `advise` found. phases: "decode" and "prefill", as asked, with their components."""

    model: Architecture
    machine: Machine
    batch: int
    context: int
    formats: Formats
    memory: Memory
    phases: Mapping[str, tuple[Component, ...]]

    def seconds(self, phase: str) -> float:
        return sum(each.seconds for each in self.phases[phase])

    def share(self, phase: str) -> float:
        """Attention's part of a phase's time."""
        return share(self.phases[phase])

    def to_dict(self) -> dict[str, Any]:
        """For JSON: seconds and bytes; components per layer, and seconds of all layers."""
        gpu = self.machine.gpu
        return {
            "model": {"name": self.model.name, "model_type": self.model.model_type, "layers": len(self.model.layers),
                      "parameters": self.model.parameters, "active_parameters": self.model.active},
            "gpu": {"name": gpu.name, "count": self.machine.gpus, "source": gpu.source,
                    "read_bandwidth": self.machine.read / self.machine.gpus,
                    "read_bandwidth_source": "measured" if gpu.measured_read else "data sheet, times that of the H200"},
            "batch": self.batch, "context": self.context, "formats": asdict(self.formats),
            "memory": asdict(self.memory) | {"requests": self.memory.requests, "holds": self.memory.holds(self.batch)},
            "phases": {phase: {
                "seconds": self.seconds(phase), "attention_share": self.share(phase),
                "components": [_plain(each) | {"ridge": self.machine.ridge(each.fp8)} for each in parts],
            } for phase, parts in self.phases.items()},
        }


def _plain(part: Component) -> dict[str, Any]:
    return asdict(part) | {"limits": dict(part.limits), "bytes": part.bytes, "intensity": part.intensity,
                           "limit": part.limit, "seconds": part.seconds}


def advise(
    config: str | Path | Mapping[str, Any],
    gpu: str | Gpu,
    *,
    gpus: int = 1,
    context: int = 131072,
    batch: int = 1,
    kv: str = "bf16",
    weights: str = "bf16",
    phase: str = "both",
) -> Report:
    """What a model costs: a decoding step of `batch` requests of `context` tokens, and reading their prompts.

    config:  a config.json (its object, its path, its folder) or the name of a shipped shape.
    gpu:     a name of hardware.py's, or a `Gpu`; `gpus` of them share everything evenly and without communication.
    kv:      "bf16", "fp8", "int8" or "int4"; weights "bf16" or "fp8". fp8 products where the GPU has them.
    phase:   "decode", "prefill" or "both".

    Raises InvalidArgument, and UnsupportedModel for a family that is not known.
    """
    if phase not in (*PHASES, "both"):
        raise invalid("phase", f"must be one of {', '.join(PHASES)}, both", repr(phase), "Use one of these.")
    model, machine, formats = models.load(config), Machine.named(gpu, gpus), Formats(kv, weights)
    loads = {"decode": Load(batch, 1, context), "prefill": Load(batch, context, context)}
    return Report(model, machine, batch, context, formats, memory(model, machine, formats, context), {
        name: components(model, load, formats, machine) for name, load in loads.items() if phase in (name, "both")})


def memory(model: Architecture, machine: Machine, formats: Formats, context: int) -> Memory:
    """What the GPUs hold. Activations, graphs and the allocator's waste are to fit in what `MEMORY_USE` leaves."""
    return Memory(
        usable=int(machine.gpus * machine.gpu.memory * MEMORY_USE),
        weights=model.parameters * WEIGHT_BYTES[formats.weights],
        request=request_bytes(model, formats, context),
        token=sum(layers * formats.kv_bytes(mixer, 1 << 20) / (1 << 20) for mixer, layers in model.mixers().items()
                  if not isinstance(mixer, State) and mixer.kind != "window"),
    )


def request_bytes(model: Architecture, formats: Formats, context: int) -> int:
    """KV and states of one request, to a whole byte. Layers with a window keep as many tokens as it has."""
    total = 0.0
    for mixer, layers in model.mixers().items():
        if isinstance(mixer, State):
            total += layers * mixer.inner * mixer.state * STATE_BYTES
        else:
            window = getattr(mixer, "window", None)
            total += layers * formats.kv_bytes(mixer, context if window is None else min(context, window))
    return math.ceil(total)


def least_gpus(model: Architecture, gpu: Gpu, seconds: float, load: Load, formats: Formats) -> int:
    """The fewest GPUs on which a decoding step can take as little as `seconds`: weights and KV are each read once at
    the data sheet's bandwidth, split evenly, at no cost of communication. A floor: no real step is as fast."""
    if not 0 < seconds < math.inf:
        raise invalid("seconds", "must be above 0, and finite", seconds, "Give the time of a step.")
    parts = components(model, load, formats, Machine(gpu))
    moved = sum(each.layers * (each.weights + each.kv) for each in parts)
    return math.ceil(moved / (gpu.bandwidth * seconds))
