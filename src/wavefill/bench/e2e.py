"""A whole model, decoded through wavefill and through stock transformers in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wavefill.bench.decoding import Decoder, OnToken
from wavefill.bench.divergence import Comparison, compare
from wavefill.bench.shapes import WITHOUT_SDPA
from wavefill.bench.timing import ReadBandwidth

if TYPE_CHECKING:
    from torch import Tensor

#: The context at which the part of a token's time that does not grow is measured.
SHORT_CONTEXT = 64
#: New tokens of a block; wavefill and sdpa decode by turns, a block each.
BLOCK = 16
#: Rounds of blocks at the short context; the first is a warm-up.
SHORT_ROUNDS = 4

Report = Callable[[str, float], None]


@dataclass(frozen=True)
class Timing:
    """Times of one implementation, in seconds.

    first:  to the first token at the full context, prefill included.
    steps:  of each later token at the full context.
    short:  the same at a context of 64; none where the full context is hardly longer.
    """

    first: float
    steps: tuple[float, ...]
    short: tuple[float, ...] = ()

    @property
    def token(self) -> float:
        return statistics.median(self.steps)

    @property
    def short_token(self) -> float:
        return statistics.median(self.short)

    @property
    def growing(self) -> float:
        """The part of a token's time that grows with the context."""
        return self.token - self.short_token

    def to_dict(self, kv_bytes: float | None = None) -> dict[str, Any]:
        """In ms and GB/s; kv_bytes is what a token reads at the full context beyond what it reads at the short one."""
        found: dict[str, Any] = {"first_token_s": self.first}
        if self.steps:
            found |= {"ms_per_token": self.token * 1e3, "tokens_per_s": len(self.steps) / sum(self.steps)}
        if self.steps and self.short:
            found |= {"ms_per_token_at_64": self.short_token * 1e3, "growing_ms": self.growing * 1e3}
            if kv_bytes and self.growing > 0:
                found["kv_gbs"] = kv_bytes / self.growing / 1e9
        return found | {"steps_ms": [s * 1e3 for s in self.steps], "steps_at_64_ms": [s * 1e3 for s in self.short]}


@dataclass(frozen=True)
class Result:
    """Both implementations on one prompt.

    sdpa:           of the model's own attention.
    attention:      what that is: "sdpa", or "eager" where sdpa isn't exact.
    read_bandwidth: bytes per second, the median of passes made between the blocks.
    kv_bytes:       read by one token at the full context beyond those at the short context.
    """

    wavefill: Timing
    sdpa: Timing
    attention: str
    read_bandwidth: float
    kv_bytes: float
    tokens: tuple[int, ...]
    comparison: Comparison

    def to_dict(self) -> dict[str, Any]:
        both = self.wavefill.short and self.sdpa.short
        growing = self.sdpa.growing / self.wavefill.growing if both and self.wavefill.growing > 0 else None
        return {
            "wavefill": self.wavefill.to_dict(self.kv_bytes),
            "sdpa": {"attention": self.attention} | self.sdpa.to_dict(self.kv_bytes),
            "speedup": {"token": self.sdpa.token / self.wavefill.token, "growing": growing,
                        "first_token": self.sdpa.first / self.wavefill.first},
            "read_bandwidth_gbs": self.read_bandwidth / 1e9,
            "kv_bytes_per_token": self.kv_bytes if both else None,
            "tokens": self.comparison.to_dict(),
        }


def load(folder: Path, dtype: str, device: str = "cpu") -> Any:
    """The model of `folder` on `device` in `dtype`, with sdpa as its attention: eager, where sdpa isn't exact."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), local_files_only=True,
        attn_implementation="eager" if config.model_type in WITHOUT_SDPA else "sdpa").to(device).eval()


def decode(
    model: Any, prompt: list[int], new_tokens: int, on_token: OnToken, linear: str = "torch"
) -> tuple[Timing, tuple[int, ...]]:
    """Decode `prompt` through wavefill alone, up to the model's end of text; linear: as `enable` takes it."""
    decoder = _wavefill(model, prompt, linear)
    decoder.block(new_tokens, on_token, stop_at_end=True)
    return Timing(decoder.first, tuple(decoder.steps)), tuple(decoder.tokens)


def run(
    model: Any, prompt: list[int], new_tokens: int, precise: Callable[[list[int]], Tensor], on_token: OnToken,
    report: Report, linear: str = "torch",
) -> Result:
    """Decode `prompt` both ways, `new_tokens` each whether or not the text ends before.

    precise:  gives float64 logits [vocabulary] after some token ids; called only if the two differ.
    on_token: called with each token of wavefill's.
    report:   called with a description and the share done until wavefill's first token is near.
    linear:   "torch" or "flat", as `enable` takes it: wavefill's linear layers. sdpa's are always PyTorch's.
    """
    import torch

    bandwidth = ReadBandwidth()
    ours, theirs = _wavefill(model, prompt, linear), _sdpa(model, prompt)
    short = _short_steps(model, prompt, linear, bandwidth, report)
    for begin in range(0, new_tokens, BLOCK):
        count = min(BLOCK, new_tokens - begin)
        if begin == 0:
            report(f"{theirs.name} reads the prompt", 0.2)
        theirs.block(count)
        bandwidth.measure()
        if begin == 0:
            report("wavefill reads the prompt", 0.6)
        ours.block(count, on_token)
        bandwidth.measure()

    def precise_at(index: int) -> Tensor:
        return precise(prompt + ours.tokens[:index])

    comparison = compare((ours.tokens, theirs.tokens), (ours.logits, theirs.logits), precise_at,
                         float(torch.finfo(model.dtype).eps))
    middle = len(prompt) + new_tokens / 2
    grown = kv_bytes(model, middle) - kv_bytes(model, SHORT_CONTEXT + BLOCK / 2)
    return Result(Timing(ours.first, tuple(ours.steps), short[0]), Timing(theirs.first, tuple(theirs.steps), short[1]),
                  theirs.name, bandwidth.median(), grown, tuple(ours.tokens), comparison)


def _short_steps(
    model: Any, prompt: list[int], linear: str, bandwidth: ReadBandwidth, report: Report
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Steps of wavefill and of sdpa at a short context; one round does when it is only to warm up."""
    steps: tuple[list[float], list[float]] = ([], [])
    short = prompt[:SHORT_CONTEXT]
    decoders = _wavefill(model, short, linear), _sdpa(model, short)
    for turn in range(SHORT_ROUNDS if len(prompt) >= 2 * SHORT_CONTEXT else 1):
        report(f"both at a context of {len(short)}", 0.2 * turn / SHORT_ROUNDS)
        for decoder, into in zip(decoders, steps, strict=True):
            decoder.block(BLOCK)
            if turn > 0:
                into += decoder.steps
            decoder.forget()
        bandwidth.measure()
    return tuple(steps[0]), tuple(steps[1])


def _wavefill(model: Any, prompt: list[int], linear: str) -> Decoder:
    from wavefill.integrations.transformers import enable

    return Decoder("wavefill", model, prompt, partial(enable, linear=linear))


def _sdpa(model: Any, prompt: list[int]) -> Decoder:
    """The model's own attention, named by what it is."""
    from wavefill.integrations.transformers import disable

    return Decoder(disable(model).config._attn_implementation, model, prompt, disable)


def kv_bytes(model: Any, context: float) -> float:
    """Bytes of K and V that one token reads at `context`, over all layers that have them."""
    config = model.config.get_text_config()
    seen = sum(context if window is None else min(context, window) for window in windows(config))
    return float(seen * config.num_key_value_heads * 2 * head_dim(config) * model.dtype.itemsize)


def windows(config: Any) -> tuple[int | None, ...]:
    """The window of each layer with K and V, None for those that see everything."""
    window = config.sliding_window if getattr(config, "use_sliding_window", True) and getattr(
        config, "sliding_window", None) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds
                 if kind in ("full_attention", "sliding_attention"))


def head_dim(config: Any) -> int:
    """D of a decoder's configuration, which may leave it to be derived."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
