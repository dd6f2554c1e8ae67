"""Parallel plans: how the GPUs of an instance share a model, and the part of it that one GPU has.

TP      tensor parallel: query and KV heads are dealt out; past KH GPUs several hold the same KV heads
ADP     request-parallel attention: groups of GPUs serve requests of their own
KVP     KV-parallel attention (Helix, arXiv:2507.07120): GPUs hold parts of every request's KV, and an all-to-all of
        outputs and log-sum-exps makes the same GPUs tensor-parallel for what follows
EP      expert parallel: experts are dealt out; inside an expert there may be TP once more
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from wavefill.advise.models import Architecture, Attention, Latent, Linear, Mixer, State
from wavefill.hardware import Gpu

#: Tokens of a block of KV that Helix deals out in turn: TensorRT-LLM's example (tech blog 22).
HELIX_BLOCK = 32
#: Linear layers of a mixer that come after the outputs of KV-parallel GPUs were exchanged.
_AFTER_ATTENTION = ("o", "W_UV")


@dataclass(frozen=True, order=True)
class Plan:
    """`replicas` instances of tp x adp x kvp GPUs in attention and ffn_tp x ep in feed-forward parts."""

    replicas: int = 1
    adp: int = 1
    kvp: int = 1
    tp: int = 1
    ffn_tp: int = 1
    ep: int = 1

    @property
    def gpus(self) -> int:
        """Of one instance."""
        return self.tp * self.adp * self.kvp

    @property
    def group(self) -> int:
        """GPUs that share the same requests."""
        return self.tp * self.kvp

    @property
    def dense_tp(self) -> int:
        """GPUs that share a dense part: all, except where experts alone are spread over groups with their own requests,
        each of which then holds the dense parts."""
        return self.group if self.adp > 1 and self.ep > 1 else self.gpus

    @property
    def named(self) -> str | None:
        """"Helix" for KV-parallel attention whose GPUs all serve the same requests, "Wide EP" for request-parallel
        attention with experts over all GPUs."""
        if self.kvp > 1 and self.adp == 1:
            return "Helix"
        return "Wide EP" if self.adp == self.ep == self.gpus > 1 else None

    @property
    def name(self) -> str:
        """For example "Helix: KVP4 TP2 | EP8" or "2 x (TP4 | TP4)": attention, then feed-forward parts."""
        def words(**sizes: int) -> str:
            return " ".join(f"{name.upper()}{size}" for name, size in sizes.items() if size > 1)

        attention, ffn = words(adp=self.adp, kvp=self.kvp, tp=self.tp), words(tp=self.ffn_tp, ep=self.ep)
        inside = (f"{self.named}: " if self.named else "") + (f"{attention} | {ffn}" if attention else "1 GPU")
        return f"{self.replicas} x ({inside})" if self.replicas > 1 else inside


def plans(model: Architecture, gpu: Gpu, gpus: int) -> Iterator[Plan]:
    """All sensible plans for so many GPUs.

    Instances fill a domain of links, a part of it or several. Query heads are dealt out evenly, and KV heads too, or
    several GPUs hold the same one. KV-parallel GPUs share heads only as far as there are KV heads (Helix: TP <= KH).
    Experts are tensor-parallel, spread, or both; spread over all GPUs where groups have requests of their own.
    """
    mixers, experts = model.mixers(), max((mlp.experts for mlp in model.mlps()), default=0)
    for replicas in _divisors(gpus):
        size = gpus // replicas
        if size > gpu.link_gpus and size % gpu.link_gpus:
            continue
        for tp in _divisors(size):
            for kvp in _divisors(size // tp):
                if not all(_shares(mixer, tp, kvp) for mixer in mixers):
                    continue
                adp = size // tp // kvp
                for ep in _divisors(size):
                    if ep == 1 or (ep <= experts and (adp == 1 or ep == size)):
                        yield Plan(replicas, adp, kvp, tp, size // ep, ep)


def kv_heads(mixer: Attention | Latent) -> int:
    """KV heads that can be dealt out: of latents one."""
    return mixer.KH if isinstance(mixer, Attention) else 1


def _shares(mixer: Mixer, tp: int, kvp: int) -> bool:
    if isinstance(mixer, State):
        return mixer.heads % (tp * kvp) == 0
    KH = kv_heads(mixer)
    return mixer.HQ % (tp * kvp) == 0 and (KH % tp == 0 or (tp % KH == 0 and kvp == 1))


def _divisors(n: int) -> list[int]:
    small = [i for i in range(1, int(n**0.5) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})


@dataclass(frozen=True)
class Part:
    """Linear layers of one GPU in `layers` layers.

    tokens: whose rows go through them: those of the "group"'s requests, or of "all" requests of the instance.
    """

    name: str
    layers: int
    linears: tuple[Linear, ...]
    tokens: str = "group"


@dataclass(frozen=True)
class Held:
    """What one GPU has of a model. mixers: its part of each, and the layers; whole: these mixers as the model has
    them."""

    mixers: tuple[tuple[Mixer, int], ...]
    whole: tuple[Mixer, ...]
    parts: tuple[Part, ...]
    head: Linear

    def weights(self, tied: bool) -> float:
        """Elements, with the embedding."""
        inside = sum(part.layers * linear.weights for part in self.parts for linear in part.linears)
        return inside + self.head.weights * (1 if tied else 2)


def held(model: Architecture, plan: Plan) -> Held:
    """The part of the busiest GPU: what does not divide evenly is rounded up."""
    mixers, parts = [], []
    for mixer, layers in model.mixers().items():
        mixers.append((_mixer(mixer, plan.group if isinstance(mixer, State) else plan.tp), layers))
        before, after = (_mixer(mixer, n).linears(model.hidden, absorbed=True) for n in (plan.tp, plan.group))
        every = isinstance(mixer, State)  # states are dealt out by heads over the whole group
        parts.append(Part(f"projections, {mixer.kind}", layers, tuple(
            late if every or late.name in _AFTER_ATTENTION else early
            for early, late in zip(before, after, strict=True))))
    for mlp, layers in model.mlps().items():
        dense = replace(mlp, width=-(-mlp.width // plan.dense_tp), shared=-(-mlp.shared // plan.dense_tp))
        tokens = "group" if plan.dense_tp == plan.group else "all"
        if mlp.experts:
            spread = replace(mlp, width=-(-mlp.width // plan.ffn_tp), experts=-(-mlp.experts // plan.ep))
            parts.append(Part("experts", layers, tuple(
                replace(each, used=mlp.active * each.copies / mlp.experts)  # its even part of a token's choices
                for each in spread.linears(model.hidden) if _routed(each)), "all"))
            parts.append(Part("router, shared experts", layers, tuple(
                each for each in dense.linears(model.hidden) if not _routed(each)), tokens))
        else:
            parts.append(Part("MLP", layers, dense.linears(model.hidden), tokens))
    head = replace(model.head, N=-(-model.vocab // plan.group))
    return Held(tuple(mixers), tuple(model.mixers()), tuple(parts), head)


def _mixer(mixer: Mixer, tp: int) -> Mixer:
    if isinstance(mixer, State):
        return replace(mixer, heads=mixer.heads // tp, groups=max(1, mixer.groups // tp))
    if isinstance(mixer, Latent):
        return replace(mixer, HQ=mixer.HQ // tp)
    return replace(mixer, HQ=mixer.HQ // tp, KH=max(1, mixer.KH // tp))


def _routed(linear: Linear) -> bool:
    return linear.name.startswith("experts")


def kv_tokens(tokens: int, kvp: int) -> int:
    """Tokens of a request's KV that the busiest of `kvp` GPUs holds: blocks of `HELIX_BLOCK` are dealt out in turn."""
    return min(tokens, -(-tokens // (HELIX_BLOCK * kvp)) * HELIX_BLOCK) if kvp > 1 else tokens
