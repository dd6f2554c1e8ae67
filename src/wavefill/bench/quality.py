"""What a KV format does to a model's text: perplexity, divergence and greedy choices, beside float32.

The text is read in one forward in which every query sees K and V (after RoPE) as a cache of the format would give them
back to it, had the text come token by token: dequantised, its own token's as well, and with a tail the newest tokens in
bfloat16. The arithmetic is float32 throughout, so that nothing but the format differs. Position i depends on the tokens
up to i alone, so one forward over the longest context holds the shorter ones. Scales of the whole tensor and of heads
are those of the whole text, as a calibration on it would give them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from wavefill import quantise
from wavefill.formats import FORMATS, Format, find
from wavefill.spec import DTYPE_BYTES, UnsupportedModel

#: Formats besides the quantised ones: K and V rounded to a dtype.
PLAIN = tuple(DTYPE_BYTES)
#: All that can be measured, and the one that the others are compared with.
NAMES = (*PLAIN, *FORMATS)
BASE = PLAIN[0]
#: Positions whose probabilities are compared at once.
_SLICE = 256

Report = Callable[[str, float], None]


@dataclass(frozen=True)
class Quality:
    """One format at one context.

    bits:       of memory that an element of K and V takes, scales included and the tail left out.
    perplexity: over the predictions of tokens 1 to context - 1.
    change:     perplexity over float32's, less 1.
    error:      standard error of `change`, from the differences at each position.
    divergence: mean Kullback-Leibler divergence of the next token's probabilities from float32's, in nats. It tells
                formats apart that `error` does not.
    agreement:  share of the positions at which the likeliest next token is float32's.
    """

    context: int
    format: str
    bits: float
    perplexity: float
    change: float
    error: float
    divergence: float
    agreement: float

    def to_dict(self) -> dict[str, Any]:
        return {"context": self.context, "format": self.format, "bits_per_element": self.bits,
                "perplexity": self.perplexity, "perplexity_change": self.change, "standard_error": self.error,
                "divergence_nats": self.divergence, "greedy_agreement": self.agreement}


@dataclass(frozen=True)
class _Reading:
    """What a model made of a text of n tokens.

    losses:      [n - 1] float64, minus log of the probability of each next token.
    divergences: [n - 1] float64, see `Quality`.
    same:        [n - 1] float64, 1 where the likeliest next token is float32's.
    """

    losses: Tensor
    divergences: Tensor
    same: Tensor


def run(model: Any, ids: Sequence[int], contexts: Sequence[int], names: Sequence[str], report: Report) -> list[Quality]:
    """Each of the formats `names` (of `NAMES`) at each of `contexts`, float32 first.

    model:    of transformers, float32, causal. Its attention implementation is as before afterwards.
    ids:      the text, at least max(contexts) tokens; every context is at least 2.
    report:   called with a description and the share done.

    Raises InvalidArgument for an unknown format, UnsupportedModel for attention that is not plain causal softmax.
    """
    text = torch.tensor([ids[:max(contexts)]])
    order = list(dict.fromkeys((BASE, *names)))
    forms = {name: None if name in PLAIN else find(name) for name in order}
    found: list[Quality] = []
    readings: dict[str, _Reading] = {}
    base: Tensor | None = None
    for done, (name, form) in enumerate(forms.items()):
        report(f"reading {text.shape[1]:,} tokens with KV in {name}", done / len(forms))
        logits = _logits(model, text, name, form)
        base = logits if base is None else base
        readings[name] = _reading(logits, base, text[0, 1:])
    for context in sorted(set(contexts)):
        found += [_quality(context, name, _bits(name, form, model.config), readings) for name, form in forms.items()]
    return found


def table(results: Sequence[Quality]) -> tuple[list[str], list[list[str]]]:
    """Header and rows."""
    header = ["context", "KV format", "bits", "perplexity", "change", "+-", "divergence", "same greedy token"]
    return header, [[f"{r.context:,}", r.format, f"{r.bits:.2f}", f"{r.perplexity:.4f}", f"{r.change:+.2%}",
                     f"{r.error:.2%}", f"{r.divergence:.6f}", f"{r.agreement:.2%}"] for r in results]


def attend(form: Format | str, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Causal attention over a text whose K and V are in a format: [1, HQ, T, DV], float32.

    form:       a format, or the name of a dtype.
    query:      [1, HQ, T, D]; key, value: [1, KH, T, D] and [1, KH, T, DV]; float32.
    scale:      of the scores; D ** -0.5 if None.
    """
    dtype = getattr(torch, form if isinstance(form, str) else "bfloat16" if form.tail else "float32")
    k, v = (x.to(dtype).float() for x in (key, value))
    sdpa = partial(functional.scaled_dot_product_attention, scale=scale, enable_gqa=True)
    if isinstance(form, str):
        return sdpa(query, k, v, is_causal=True)
    tokens = query.shape[2]
    whole = form.quantised(tokens)
    packed_k, packed_v = (quantise.simulate(x[:, :, :whole].transpose(1, 2), part).transpose(1, 2)
                          for x, part in ((k, form.k), (v, form.v)))
    if not form.tail:
        return sdpa(query, packed_k, packed_v, is_causal=True)
    parts: list[Tensor] = []
    before = 0
    for done, group in groupby(range(tokens), key=lambda i: form.quantised(i + 1)):
        queries = list(group)
        first, stop = queries[0], queries[-1] + 1
        k[:, :, before:done], v[:, :, before:done] = packed_k[:, :, before:done], packed_v[:, :, before:done]
        seen = torch.ones(stop - first, stop, dtype=torch.bool).tril(first)
        parts.append(sdpa(query[:, :, first:stop], k[:, :, :stop], v[:, :, :stop], attn_mask=seen))
        before = done
    return torch.cat(parts, 2)


def _logits(model: Any, text: Tensor, name: str, form: Format | None) -> Tensor:
    """[n - 1, vocabulary] float32, of the tokens after the first."""
    from transformers import AttentionInterface, AttentionMaskInterface

    registered = f"wavefill_quality_{name}"
    AttentionInterface.register(registered, partial(_attention, form or name))
    AttentionMaskInterface.register(registered, lambda *args, **kwargs: None)
    before = model.config._attn_implementation
    model.set_attn_implementation(registered)
    try:
        with torch.inference_mode():
            logits: Tensor = model(text, use_cache=False).logits[0, :-1]
            return logits
    finally:
        model.set_attn_implementation(before)


def _reading(logits: Tensor, base: Tensor, following: Tensor) -> _Reading:
    """From logits, those of float32 (both [n - 1, vocabulary]) and the tokens that followed [n - 1]."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for mine, exact, tokens in zip(*(torch.split(x, _SLICE) for x in (logits, base, following)), strict=True):
        logs, exact_logs = mine.log_softmax(-1), exact.log_softmax(-1)
        found.append((-logs.gather(1, tokens[:, None])[:, 0], (exact_logs.exp() * (exact_logs - logs)).sum(-1),
                      mine.argmax(-1) == exact.argmax(-1)))
    return _Reading(*(torch.cat(parts).double() for parts in zip(*found, strict=True)))


def _attention(
    form: Format | str, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None,
    scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: [1, T, HQ, DV], and no weights."""
    for name in ("s_aux", "softcap", "sliding_window"):
        if kwargs.get(name) is not None:
            raise UnsupportedModel(f"model: {type(module).__name__} has {name}, which bench quality doesn't compute. "
                                   "Choose a model with plain causal attention.")
    return attend(form, query, key, value, scaling).transpose(1, 2).contiguous(), None


def _quality(context: int, name: str, bits: float, readings: dict[str, _Reading]) -> Quality:
    count = context - 1
    reading = readings[name]
    losses = reading.losses[:count]
    difference = losses - readings[BASE].losses[:count]
    change = math.expm1(float(difference.mean()))
    spread = float(difference.std(correction=0)) / math.sqrt(count)
    return Quality(context, name, bits, math.exp(float(losses.mean())), change, (1 + change) * spread,
                   float(reading.divergences[:count].mean()), float(reading.same[:count].mean()))


def _bits(name: str, form: Format | None, config: Any) -> float:
    from wavefill.bench.e2e import head_dim

    if form is None:
        return 8.0 * DTYPE_BYTES[name]
    config = config.get_text_config()
    return form.bits(int(config.num_key_value_heads), head_dim(config))
