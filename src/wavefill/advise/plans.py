"""What a decoding step takes under a parallel plan, and which plans are best.

A GPU computes its part of the model (`layouts`) with the components' arithmetic, and exchanges (`exchanges`) come on
top. Everybody waits for the GPU with most to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from wavefill.advise.components import (
    LAYER_REST,
    STEP_REST,
    WEIGHT_BYTES,
    Component,
    Formats,
    Load,
    Machine,
    linears,
    mix,
)
from wavefill.advise.exchanges import Exchange, Links, distinct
from wavefill.advise.layouts import Plan, held, kv_heads, kv_tokens, plans
from wavefill.advise.memory import MEMORY_USE, request_bytes
from wavefill.advise.models import Architecture, Attention, Latent, Mixer, State
from wavefill.hardware import Gpu
from wavefill.spec import invalid

#: Tokens/s of a user that plans are ranked at where the caller gives none.
TARGET = 20.0
#: Requests of a plan at most: past that nothing changes.
MOST_REQUESTS = 1 << 20
#: Bytes of the log-sum-exp of a query head in Helix's exchange: two float32 (TensorRT-LLM, tech blog 22).
LSE_BYTES = 8


@dataclass(frozen=True)
class Step:
    """One decoding step of `batch` requests under a plan.

    components, exchanges: of the busiest GPU.
    weights, kv: bytes that it holds; usable: what they may take.
    copies:  how many GPUs hold the same KV (TP > KH); copied: bytes beyond the first copy, on all GPUs;
             copied_seconds: what reading them takes of the step.
    """

    plan: Plan
    gpus: int
    batch: int
    components: tuple[Component, ...]
    exchanges: tuple[Exchange, ...]
    weights: int
    kv: int
    usable: int
    copies: float
    copied: int
    copied_seconds: float

    @cached_property
    def seconds(self) -> float:
        return sum(each.seconds for each in self.components) + self.exchanging

    @property
    def exchanging(self) -> float:
        """Seconds of all exchanges."""
        return sum(each.seconds for each in self.exchanges)

    @property
    def fits(self) -> bool:
        return self.weights + self.kv <= self.usable

    @property
    def per_user(self) -> float:
        """Tokens/s of one request."""
        return 1 / self.seconds

    @property
    def per_gpu(self) -> float:
        """Tokens/s of all requests, a GPU."""
        return self.batch / self.seconds / self.gpus

    def to_dict(self) -> dict[str, Any]:
        return {
            "plan": asdict(self.plan) | {"name": self.plan.name, "named": self.plan.named}, "batch": self.batch,
            "seconds": self.seconds, "tokens_per_second_user": self.per_user, "tokens_per_second_gpu": self.per_gpu,
            "components": {each.name: each.seconds for each in self.components},
            "exchanges": [asdict(each) for each in self.exchanges], "exchange_seconds": self.exchanging,
            "memory_gpu": {"weights": self.weights, "kv": self.kv, "usable": self.usable, "fits": self.fits},
            "kv_copies": {"copies": self.copies, "bytes": self.copied, "seconds": self.copied_seconds},
        }


class Planner:
    """Steps of one model under one plan, of any batch."""

    def __init__(self, model: Architecture, gpu: Gpu, plan: Plan, formats: Formats, context: int) -> None:
        self.model, self.plan, self.formats, self.context = model, plan, formats, context
        self.machine, self.links = Machine(gpu), Links(gpu)
        self.held = held(model, plan)
        self.weights = math.ceil(self.held.weights(model.tied) * WEIGHT_BYTES[formats.weights])
        self.request = math.ceil(self._request(self.held.mixers))
        attention = [each for each in self.held.whole if isinstance(each, Attention | Latent)]
        self.copies = max([1.0, *(plan.tp / kv_heads(each) for each in attention)])
        self.usable = int(gpu.memory * MEMORY_USE)

    def _request(self, mixers: Iterable[tuple[Mixer, int]]) -> float:
        return request_bytes(mixers, self.formats, self.context, lambda tokens: kv_tokens(tokens, self.plan.kvp))

    @property
    def most(self) -> int:
        """Requests that memory has room for, over all GPUs."""
        room = (self.usable - self.weights) // self.request
        return max(0, room) * self.plan.adp * self.plan.replicas

    def step(self, batch: int) -> Step:
        """Requests are dealt out evenly over instances and groups."""
        plan, machine = self.plan, self.machine
        mine = -(-batch // (plan.replicas * plan.adp))
        tokens = {"group": mine, "all": min(mine * plan.adp, -(-batch // plan.replicas))}
        load = Load(mine, 1, kv_tokens(self.context, plan.kvp))
        parts = [mix(self._local(mixer), layers, load, self.formats, machine) for mixer, layers in self.held.mixers]
        again = 1 - 1 / self.copies
        read = again * sum(each.layers * each.kv for each in parts if each.kind == "attention")
        stored = again * mine * self._request([each for each in self.held.mixers if not isinstance(each[0], State)])
        parts += [linears(part.name, part.linears, part.layers, tokens[part.tokens], self.formats, machine)
                  for part in self.held.parts if part.linears]
        parts += [linears("head", (self.held.head,), 1, tokens["group"], self.formats, machine),
                  Component("beside products", "rest", len(self.model.layers), fixed=LAYER_REST),
                  Component("choosing tokens", "rest", 1, fixed=STEP_REST)]
        gpus = plan.gpus * plan.replicas
        return Step(plan, gpus, batch, tuple(parts), tuple(self._exchanges(tokens)), self.weights,
                    mine * self.request, self.usable, self.copies, round(gpus * stored), read / machine.read)

    def _local(self, mixer: Mixer) -> Mixer:
        """With the part of its window that a KV-parallel GPU holds."""
        if isinstance(mixer, Attention) and mixer.window is not None and self.plan.kvp > 1:
            return replace(mixer, window=kv_tokens(mixer.window, self.plan.kvp))
        return mixer

    def _exchanges(self, tokens: dict[str, int]) -> list[Exchange]:
        plan, links, row = self.plan, self.links, self.model.hidden * self.formats.activations
        made = []
        if plan.group > 1:
            made.append(links.all_reduce("all-reduce after attention", sum(n for _, n in self.held.mixers), plan.group,
                                         tokens["group"] * row))
        for mixer, layers in self.held.mixers:
            if plan.kvp > 1 and isinstance(mixer, Attention | Latent):
                DV = mixer.DV if isinstance(mixer, Attention) else mixer.rank
                state = mixer.HQ * (DV * self.formats.activations + LSE_BYTES)
                made.append(links.all_to_all("all-to-all of outputs and LSE", layers, plan.kvp,
                                             tokens["group"] * state, stride=plan.tp))
        for mlp, layers in self.model.mlps().items():
            spread = mlp.experts > 0 and plan.adp > 1 and plan.ep > 1
            if plan.dense_tp == plan.group:
                if plan.group > 1:
                    made.append(links.all_reduce("all-reduce after MLP", layers, plan.group, tokens["group"] * row))
            else:
                made.append(links.all_reduce("all-gather before, reduce-scatter after MLP", layers, plan.gpus,
                                             tokens["all"] * row, apart=True))
            if spread:
                each = tokens["group"] / plan.group * distinct(plan.gpus, mlp.active) * self.model.hidden
                made.append(links.all_to_all("dispatch to experts", layers, plan.gpus,
                                             each * WEIGHT_BYTES[self.formats.weights]))
                made.append(links.all_to_all("combine of experts", layers, plan.gpus, each * self.formats.activations))
        return made


@dataclass(frozen=True)
class Choice:
    """A plan: `step` of the batch that was asked for, and `best`, of the largest batch that keeps the target, or None
    where memory or time leave no room for one request a group."""

    step: Step
    best: Step | None


@dataclass(frozen=True)
class Comparison:
    """All plans for so many GPUs. target: tokens/s of a user."""

    target: float
    choices: tuple[Choice, ...]
    pareto: tuple[Step, ...]

    def by_throughput(self) -> list[Step]:
        """Steps at the target, most tokens/s a GPU first."""
        return sorted((each.best for each in self.choices if each.best), key=lambda step: (-step.per_gpu, step.plan))

    def by_interactivity(self) -> list[Step]:
        """Steps of the batch that was asked for, where it fits, most tokens/s of a user first."""
        return sorted((each.step for each in self.choices if each.step.fits),
                      key=lambda step: (-step.per_user, step.plan))

    def to_dict(self) -> dict[str, Any]:
        return {"target": self.target,
                "by_throughput": [step.to_dict() for step in self.by_throughput()],
                "by_interactivity": [step.to_dict() for step in self.by_interactivity()],
                "do_not_fit": [each.step.to_dict() for each in self.choices if not each.step.fits],
                "pareto": [step.to_dict() for step in self.pareto]}


def compare(model: Architecture, gpu: Gpu, gpus: int, context: int, batch: int, formats: Formats,
            target: float = TARGET) -> Comparison:
    """Every sensible plan for decoding on `gpus` GPUs; `target` in tokens/s of a user."""
    if not 0 < target < math.inf:
        raise invalid("target", "must be above 0, and finite", target, "Give tokens/s of a user.")
    planners = [Planner(model, gpu, plan, formats, context) for plan in plans(model, gpu, gpus)]
    choices = tuple(Choice(each.step(batch), _best(each, target)) for each in planners)
    return Comparison(target, choices, pareto(step for each in planners for step in _curve(each)))


def _best(planner: Planner, target: float) -> Step | None:
    """The largest batch within memory and target: tokens/s grow with the batch, so it is the best one."""
    unit = planner.plan.adp * planner.plan.replicas
    least, most = 0, min(planner.most, MOST_REQUESTS) // unit  # the first is known to do, as far as it is above 0
    found = None
    while least < most:
        middle = -(-(least + most) // 2)
        step = planner.step(middle * unit)
        if step.per_user >= target:
            least, found = middle, step
        else:
            most = middle - 1
    return found


def _curve(planner: Planner) -> list[Step]:
    """Batches of powers of two requests a group, and the largest that memory holds."""
    unit = planner.plan.adp * planner.plan.replicas
    most = min(planner.most, MOST_REQUESTS) // unit
    sizes = {1 << i for i in range(most.bit_length())} | {most}
    return [planner.step(size * unit) for size in sorted(sizes) if size]


def pareto(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Steps that no other beats in tokens/s of a user and a GPU at once, most interactive first."""
    kept: list[Step] = []
    for step in sorted(steps, key=lambda step: (-step.per_user, -step.per_gpu, step.plan)):
        if not kept or step.per_gpu > kept[-1].per_gpu:
            kept.append(step)
    return tuple(kept)
