"""What one step of a model does, component by component: GEMM shapes, FLOPs, bytes, and the least time of each.

A component takes as long as the slowest of its limits: memory, tensor cores, exponentials. How far kernels reach each
limit is a constant below, with where it is from. All were measured on an H200 unless they say otherwise, and are taken
for other GPUs as they are. docs/advise.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from wavefill import formats as kv_formats
from wavefill.advise.models import Architecture, Attention, Latent, Linear, Mixer, State
from wavefill.hardware import GPUS, Device, Gpu, lookup
from wavefill.spec import MAX_LENGTH, WavefillError, invalid, whole

#: Read bandwidth over the data sheet's, where it was not measured: that of the H200 (4.575 of 4.8 TB/s).
READ_OF_PEAK = 4.575 / 4.8
#: Decode attention: share of the read bandwidth, and seconds a call: the least squares of the logarithms of the 19 even
#: rows of benchmarks/results/gpu-kernels.json, of which 18 are within 12 % and all within 14 %.
DECODE_READ, DECODE_CALL = 0.95, 6.1e-6
#: Attention of prompts: share of the tensor cores' peak, and of the time of exponentials that products don't hide. Near
#: the 12 rows of docs/gpu-backend.md, "Prompts as libraries run them" (bfloat16, D 64 to 256): within 10 % for one
#: prompt, 9 to 19 % fast for eight short ones. In fp8 it gives 1.05 and 1.33 PFLOP/s for D 128 and 256, where
#: FlashAttention-3 (arXiv:2407.08608) reports close to 1.2.
ATTENTION_FLOPS, SOFTMAX_SHOWN = 0.91, 0.78
#: Head sizes that kernels for prompts are compiled for (FlashAttention-3, round_up_headdim); others cost as the next.
HEAD_SIZES = (64, 96, 128, 192, 256)
#: Decoding over a latent cache: share of the tensor cores' peak. FlashMLA's README: 660 TFLOP/s on an H800.
LATENT_FLOPS = 660 / 989.5
#: Linear layers: share of the read bandwidth of weights (docs/gpu-backend.md: Llama-3.1-8B's at 4.15 of 4.58 TB/s), and
#: of the tensor cores' peak (docs/gpu-backend.md: a product of 8,192 in 1.49 ms, bfloat16). In fp8 DeepGEMM's README
#: has up to 1,550 TFLOP/s on an H800, 0.78 of the peak.
LINEAR_READ, LINEAR_FLOPS = 0.91, 0.746
#: Decoding: what lies between products and attention, seconds a layer; and seconds a step of choosing a token
#: (docs/transformers.md, Llama-3.1-8B with fuse=True: 4.36 ms at 4K, where products and attention make 3.93).
LAYER_REST, STEP_REST = 10e-6, 0.1e-3
#: Query tokens a request up to which a call is a decoding step (several: drafts), and attends to latents as they are.
MOST_DRAFTS = 16

WEIGHT_BYTES = {"bf16": 2, "fp8": 1}
#: KV formats by their names here; None is plain 16 bits.
KV_FORMATS = {"bf16": None, "fp8": "fp8-head", "int8": "int8", "int4": "int4"}
#: Bytes of an element of a Mamba-2 state (transformers' mamba_ssm_cache_dtype is float32).
STATE_BYTES = 4


@dataclass(frozen=True)
class Load:
    """`batch` requests of `queries` new tokens each, over `keys` in all, the new ones included.

    causal: whether a new token sees only those up to itself; False counts the whole rectangle, as the guide does.
    """

    batch: int
    queries: int
    keys: int
    causal: bool = True

    def __post_init__(self) -> None:
        whole("batch", self.batch, 1, 1 << 24)
        whole("context", self.keys, 1, MAX_LENGTH)
        if whole("queries", self.queries) > self.keys:
            raise invalid("queries", f"must be at most keys ({self.keys})", self.queries, "Count them in keys too.")

    @property
    def tokens(self) -> int:
        return self.batch * self.queries

    @property
    def decoding(self) -> bool:
        return self.queries == 1 or (self.queries <= MOST_DRAFTS and self.queries < self.keys)

    def seen(self, window: int | None) -> int:
        """Keys of a request that its new tokens see between them."""
        return self.keys if window is None else min(self.keys, window + self.queries - 1)

    def pairs(self, window: int | None) -> int:
        """(query, key) pairs of a request that attention computes."""
        most = self.keys if window is None else min(self.keys, window)
        if not self.causal:
            return self.queries * most
        first = self.keys - self.queries + 1  # keys that the first new token sees
        growing = max(0, min(self.keys, most) - first + 1)
        return growing * first + growing * (growing - 1) // 2 + (self.queries - growing) * most


@dataclass(frozen=True)
class Formats:
    """kv: of the cache, one of `KV_FORMATS`; weights: "bf16" or "fp8"; activations: bytes of an element."""

    kv: str = "bf16"
    weights: str = "bf16"
    activations: int = 2

    def __post_init__(self) -> None:
        for name, value, known in (("kv", self.kv, KV_FORMATS), ("weights", self.weights, WEIGHT_BYTES)):
            if value not in known:
                raise invalid(name, f"must be one of {', '.join(known)}", repr(value), "Use one of these.")

    def kv_bytes(self, mixer: Attention | Latent, tokens: int) -> float:
        """Of `tokens` of one request in one layer."""
        name = KV_FORMATS[self.kv]
        if isinstance(mixer, Latent):
            plain, stored = mixer.columns, (1, mixer.columns, 0)
        else:
            plain, stored = mixer.KH * (mixer.D + mixer.DV), (mixer.KH, mixer.D, mixer.DV)
        if name is None:
            return 2 * plain * tokens
        found = kv_formats.find(name)
        each = found.token_bytes(*stored) if stored[2] else found.k.page_bytes(*stored[:2]) / kv_formats.PAGE
        quantised = found.quantised(tokens)
        return each * quantised + 2 * plain * (tokens - quantised)


@dataclass(frozen=True)
class Machine:
    """`gpus` GPUs that share all bytes and FLOPs evenly, at no cost of communication: what no plan can beat."""

    gpu: Gpu
    gpus: int = 1

    def __post_init__(self) -> None:
        whole("gpus", self.gpus, 1, 1 << 16)

    @classmethod
    def named(cls, gpu: str | Gpu, gpus: int = 1) -> Machine:
        """By a name of hardware.py's."""
        if isinstance(gpu, Gpu):
            return cls(gpu, gpus)
        found: Device | None
        try:
            found = lookup(gpu)
        except WavefillError:
            found = None
        if not isinstance(found, Gpu):
            raise invalid("gpu", f"must be one of {', '.join(each.name for each in GPUS)}", repr(gpu),
                          "Use one of these, or describe another (docs/advise.md).")
        return cls(found, gpus)

    @property
    def read(self) -> float:
        """bytes/s that reading kernels reach on all of them."""
        return self.gpus * (self.gpu.measured_read or self.gpu.bandwidth * READ_OF_PEAK)

    def peak(self, fp8: bool) -> float:
        """FLOP/s of the tensor cores, by the data sheet; those of bf16 where there is no fp8."""
        return self.gpus * ((self.gpu.fp8_flops if fp8 else None) or self.gpu.bf16_flops)

    def ridge(self, fp8: bool) -> float:
        """FLOPs a byte at which the tensor cores take as long as memory, by the data sheet."""
        return self.peak(fp8) / (self.gpus * self.gpu.bandwidth)


@dataclass(frozen=True)
class Gemm:
    """`batch` products of (M, K) by (K, N); for experts M is their mean."""

    name: str
    batch: float
    M: float
    N: int
    K: int

    @property
    def flops(self) -> float:
        return 2 * self.batch * self.M * self.N * self.K


Limit = Literal["memory", "tensor cores", "exponentials"]


@dataclass(frozen=True)
class Component:
    """One part of a step, of one layer; `layers` have it.

    kind:    "attention" (BMM1, softmax and BMM2), "linear", "state" or "rest".
    flops, exponentials: that are computed: less than the GEMMs' under a causal mask.
    weights, kv, activations: bytes that are read or written.
    limits:  seconds that each limit alone would take.
    fixed:   seconds besides.
    fp8:     whether products are computed in fp8.
    """

    name: str
    kind: Literal["attention", "linear", "state", "rest"]
    layers: int
    gemms: tuple[Gemm, ...] = ()
    flops: float = 0
    exponentials: float = 0
    weights: float = 0
    kv: float = 0
    activations: float = 0
    limits: tuple[tuple[Limit, float], ...] = ()
    fixed: float = 0
    fp8: bool = False

    @property
    def bytes(self) -> float:
        return self.weights + self.kv + self.activations

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def limit(self) -> str:
        """What binds; "fixed" where that takes longer."""
        name, most = max(self.limits, key=lambda each: each[1], default=("fixed", 0.0))
        return name if most >= self.fixed else "fixed"

    @property
    def seconds(self) -> float:
        """Of all its layers."""
        return self.layers * (max((each for _, each in self.limits), default=0.0) + self.fixed)


def attention(mixer: Attention | Latent, layers: int, load: Load, formats: Formats, machine: Machine) -> Component:
    """BMM1, softmax and BMM2. Latents are attended to as they are in decoding, and made K and V of in prompts."""
    window = mixer.window if isinstance(mixer, Attention) else None
    seen, pairs = load.seen(window), load.pairs(window)
    latent = isinstance(mixer, Latent)
    KH, D, DV = ((1, mixer.columns, mixer.rank) if load.decoding else (mixer.HQ, mixer.nope + mixer.rope, mixer.DV)
                 ) if isinstance(mixer, Latent) else (mixer.KH, mixer.D, mixer.DV)
    M = load.queries * mixer.HQ // KH
    fp8 = formats.kv == "fp8" and machine.gpu.fp8_flops is not None
    flops = 2.0 * load.batch * pairs * mixer.HQ * (D + DV)
    exponentials = float(load.batch * pairs * mixer.HQ)
    cache = formats.kv_bytes(mixer, seen) if load.decoding or not latent else seen * KH * (D + DV) * formats.activations
    kv = load.batch * cache
    activations = float(load.tokens * mixer.HQ * (D + DV) * formats.activations)
    read = machine.read * (DECODE_READ if load.decoding else 1.0)
    softmax = exponentials / (machine.gpus * machine.gpu.exps)
    padded = 1.0 if load.decoding else (padded_head(D) + padded_head(DV)) / (D + DV)
    products = (flops / (machine.peak(fp8) * LATENT_FLOPS) if latent and load.decoding else
                padded * flops / (machine.peak(fp8) * ATTENTION_FLOPS) + SOFTMAX_SHOWN * softmax)
    return Component(
        f"attention, {mixer.kind}", "attention", layers,
        (Gemm("BMM1", load.batch * KH, M, seen, D), Gemm("BMM2", load.batch * KH, M, DV, seen)),
        flops, exponentials, 0, kv, activations,
        (("memory", (kv + activations) / read), ("tensor cores", products), ("exponentials", softmax)),
        DECODE_CALL if load.decoding else 0.0, fp8,
    )


def padded_head(D: int) -> int:
    """Columns that a kernel for prompts computes for a head size."""
    return next((size for size in HEAD_SIZES if size >= D), -(-D // 64) * 64)


def touched(linear: Linear, tokens: int) -> float:
    """Matrices of a layer's that any of `tokens` goes through: E (1 - (1 - k/E)^T) of E, where each token picks k of
    them evenly and on its own."""
    return linear.copies * (1 - (1 - linear.used / linear.copies) ** tokens)


def linears(name: str, found: Iterable[Linear], layers: int, tokens: int, formats: Formats, machine: Machine,
            ) -> Component:
    """Linear layers of `tokens` rows."""
    fp8 = formats.weights == "fp8" and machine.gpu.fp8_flops is not None
    gemms, weights, activations = [], 0.0, 0.0
    for linear in found:
        used = touched(linear, tokens)
        gemms.append(Gemm(linear.name, used, tokens * linear.used / used, linear.N, linear.K))
        weights += used * linear.K * linear.N * WEIGHT_BYTES[formats.weights]
        activations += tokens * linear.used * (linear.K + linear.N) * formats.activations
    flops = sum(gemm.flops for gemm in gemms)
    return Component(name, "linear", layers, tuple(gemms), flops, 0, weights, 0, activations,
                     (("memory", (weights + activations) / (machine.read * LINEAR_READ)),
                      ("tensor cores", flops / (machine.peak(fp8) * LINEAR_FLOPS))), 0, fp8)


def state(mixer: State, layers: int, load: Load, formats: Formats, machine: Machine) -> Component:
    """The recurrence of Mamba-2: h = a h + (dt x) B, y = C h, 5 FLOPs an element of the state and token; the state is
    read and written once."""
    size = mixer.inner * mixer.state
    flops = 5.0 * load.tokens * size
    kv = 2.0 * load.batch * size * STATE_BYTES
    width = 3 * mixer.inner + 2 * mixer.groups * mixer.state + mixer.heads  # in: z, x, B, C, dt; out: y
    activations = float(load.tokens * width * formats.activations)
    return Component("state (Mamba-2)", "state", layers, (), flops, 0, 0, kv, activations,
                     (("memory", (kv + activations) / (machine.read * LINEAR_READ)),
                      ("tensor cores", flops / (machine.peak(False) * LINEAR_FLOPS))))


def mix(mixer: Mixer, layers: int, load: Load, formats: Formats, machine: Machine) -> Component:
    """What a layer does between its linear layers."""
    if isinstance(mixer, State):
        return state(mixer, layers, load, formats, machine)
    return attention(mixer, layers, load, formats, machine)


def components(model: Architecture, load: Load, formats: Formats, machine: Machine) -> tuple[Component, ...]:
    """All that a step does, in the order of a layer: attention, its projections, feed-forward parts, head, the rest.

    The head is computed for the last token of a request in prompts, and for all in decoding.
    """
    absorbed, mixers = load.decoding, model.mixers()
    made = [mix(mixer, layers, load, formats, machine) for mixer, layers in mixers.items()]
    made += [linears(f"projections, {mixer.kind}", mixer.linears(model.hidden, absorbed), layers, load.tokens, formats,
                     machine) for mixer, layers in mixers.items()]
    made += [linears("experts" if mlp.experts else "MLP", mlp.linears(model.hidden), layers, load.tokens, formats,
                     machine) for mlp, layers in model.mlps().items()]
    rows = load.tokens if load.decoding else load.batch
    made.append(linears("head", (model.head,), 1, rows, formats, machine))
    if load.decoding:
        made.append(Component("beside products", "rest", len(model.layers), fixed=LAYER_REST))
        made.append(Component("choosing tokens", "rest", 1, fixed=STEP_REST))
    return tuple(made)


def share(parts: Iterable[Component]) -> float:
    """Attention's part of the time."""
    parts = tuple(parts)
    return sum(each.seconds for each in parts if each.kind == "attention") / sum(each.seconds for each in parts)
