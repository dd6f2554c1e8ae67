"""The report of one model on one kind of GPU: what each component takes, what memory holds, and what to change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wavefill.advise import models
from wavefill.advise.components import Component, Formats, Load, Machine, components, share
from wavefill.advise.memory import Memory
from wavefill.advise.models import Architecture, State
from wavefill.advise.plans import TARGET, Comparison, compare
from wavefill.advise.rules import PAGE, Finding, find
from wavefill.advise.setups import Setup
from wavefill.advise.sources import sources
from wavefill.advise.sweeps import SWEEPS, sweep
from wavefill.advise.tiles import Tiles, tiles
from wavefill.hardware import Gpu
from wavefill.spec import invalid, whole

PHASES = ("decode", "prefill")


@dataclass(frozen=True)
class Report:
    """What `advise` found.

    phases:   "decode" and "prefill", as asked, with their components.
    tiles:    of each kind of attention, in decoding.
    findings: what to change, on these phases.
    plans:    parallel plans, where they were asked for.
    """

    setup: Setup
    phases: Mapping[str, tuple[Component, ...]]
    tiles: tuple[Tiles, ...]
    findings: tuple[Finding, ...]
    plans: Comparison | None = None

    @property
    def model(self) -> Architecture:
        return self.setup.model

    @property
    def machine(self) -> Machine:
        return self.setup.machine

    @property
    def batch(self) -> int:
        return self.setup.batch

    @property
    def context(self) -> int:
        return self.setup.context

    @property
    def formats(self) -> Formats:
        return self.setup.formats

    @property
    def memory(self) -> Memory:
        return self.setup.memory

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
            "tiles": [asdict(each) for each in self.tiles],
            "findings": [each.to_dict() for each in self.findings],
            "sweeps": {name: [asdict(point) for point in sweep(self.setup, name)] for name in SWEEPS},
            "plans": self.plans.to_dict() if self.plans else None,
            "sources": [asdict(each) for each in sources(self.machine)],
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
    page: int = PAGE,
    plans: bool = False,
    target: float = TARGET,
) -> Report:
    """What a model costs: a decoding step of `batch` requests of `context` tokens, and reading their prompts.

    config:  a config.json (its object, its path, its folder) or the name of a shipped shape.
    gpu:     a name of hardware.py's, or a `Gpu`; `gpus` of them share everything evenly and without communication, but
             in plans.
    kv:      "bf16", "fp8", "int8" or "int4"; weights "bf16" or "fp8". fp8 products where the GPU has them.
    phase:   "decode", "prefill" or "both".
    page:    tokens of a page of the KV cache.
    plans:   whether parallel plans for decoding are compared, at `target` tokens/s of a user.

    Raises InvalidArgument, and UnsupportedModel for a family that is not known.
    """
    if phase not in (*PHASES, "both"):
        raise invalid("phase", f"must be one of {', '.join(PHASES)}, both", repr(phase), "Use one of these.")
    setup = Setup(models.load(config), Machine.named(gpu, gpus), Formats(kv, weights), batch, context)
    asked = tuple(name for name in PHASES if phase in (name, "both"))
    device = setup.machine.gpu
    return Report(
        setup, {name: setup.phase(name) for name in asked},
        tuple(tiles(mixer, batch, context, device, gpus) for mixer in setup.model.mixers()
              if not isinstance(mixer, State)),
        find(setup, asked, whole("page", page)),
        compare(setup.model, device, gpus, context, batch, setup.formats, target) if plans else None)


def least_gpus(model: Architecture, gpu: Gpu, seconds: float, load: Load, formats: Formats) -> int:
    """The fewest GPUs on which a decoding step can take as little as `seconds`: weights and KV are each read once at
    the data sheet's bandwidth, split evenly, at no cost of communication. A floor: no real step is as fast."""
    if not 0 < seconds < math.inf:
        raise invalid("seconds", "must be above 0, and finite", seconds, "Give the time of a step.")
    parts = components(model, load, formats, Machine(gpu))
    moved = sum(each.layers * (each.weights + each.kv) for each in parts)
    return math.ceil(moved / (gpu.bandwidth * seconds))
