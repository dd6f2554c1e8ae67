"""Where the numbers of a report come from: of a formula, a data sheet, a measurement or a publication."""

from __future__ import annotations

from dataclasses import dataclass

from wavefill.advise.components import (
    ATTENTION_FLOPS,
    DECODE_CALL,
    DECODE_READ,
    LATENT_FLOPS,
    LAYER_REST,
    LINEAR_FLOPS,
    LINEAR_READ,
    READ_OF_PEAK,
    SOFTMAX_SHOWN,
    STEP_REST,
    Machine,
)
from wavefill.advise.exchanges import LINK_SHARE
from wavefill.advise.memory import MEMORY_USE


@dataclass(frozen=True)
class Source:
    """kind: "formula", "data sheet", "measured", "published" or "chosen"."""

    what: str
    value: str
    kind: str
    where: str


def sources(machine: Machine) -> tuple[Source, ...]:
    """Of all that a report computes with on this kind of GPU."""
    gpu = machine.gpu
    read = ("measured", "a kernel that only reads") if gpu.measured_read else (
        "chosen", f"{READ_OF_PEAK:.3f} of the data sheet's {gpu.bandwidth / 1e12:.2f} TB/s, as on an H200")
    flops = f"{gpu.bf16_flops / 1e12:,.0f} TFLOP/s" + (f", fp8 {gpu.fp8_flops / 1e12:,.0f}" if gpu.fp8_flops else "")
    return (
        Source("GEMM shapes, FLOPs, bytes", "", "formula", "docs/advise.md, from config.json"),
        Source("tensor cores", flops, "data sheet", gpu.source),
        Source("memory", f"{gpu.memory / 2**30:,.0f} GiB, {MEMORY_USE:.0%} for weights and KV", "data sheet",
               "the share is vLLM's default"),
        Source("read bandwidth", f"{machine.read / machine.gpus / 1e12:.2f} TB/s", *read),
        Source("exponentials", f"{gpu.exps / 1e12:.2f} T/s", "data sheet", "16 a clock and SM; 32 on Blackwell Ultra"),
        Source("decode attention", f"{DECODE_READ} of the read bandwidth, {DECODE_CALL * 1e6:.1f} us a call",
               "measured", "19 rows on an H200, docs/gpu-backend.md"),
        Source("attention of prompts", f"{ATTENTION_FLOPS} of the peak, {SOFTMAX_SHOWN} of exponentials shown",
               "measured", "12 rows on an H200, docs/gpu-backend.md"),
        Source("latents in decoding", f"{LATENT_FLOPS:.2f} of the peak", "published", "FlashMLA's README, H800"),
        Source("linear layers", f"{LINEAR_READ} of the read bandwidth, {LINEAR_FLOPS} of the peak", "measured",
               "an H200, docs/transformers.md and docs/gpu-backend.md"),
        Source("beside products", f"{LAYER_REST * 1e6:.0f} us a layer, {STEP_REST * 1e3:.1f} ms a step",
               "measured", "Llama-3.1-8B on an H200, docs/transformers.md"),
        Source("links", "none" if gpu.link is None else
               f"{gpu.link / 1e9:,.0f} GB/s each way, {LINK_SHARE:.2f} of it reached", "data sheet",
               "the share is DeepEP's README, 726 of 900 GB/s"),
        Source("exchange of few bytes", f"{gpu.link_latency * 1e6:.1f} us", "published", "NCCL, RCCL: tuning.cc"),
    )
