"""The two hooks on the decoder: before its forward a step is begun on the cache, after it the step is over.

Hooks on the stack of layers (`LlamaModel` within `LlamaForCausalLM`) see every way in: `generate`, `model(...)`, heads
other than the language model's, and a call of the stack itself. They are module-level functions that keep nothing, so
an enabled model can be deep-copied and pickled: the process that loads it imports them, and with them the package,
which registers the attention.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from wavefill.integrations.transformers import continuous
from wavefill.integrations.transformers.cache import CACHE_NAMES, WavefillCache, adopt, rows_of
from wavefill.integrations.transformers.current import get_step, set_step, untraced
from wavefill.integrations.transformers.graphs import graphed
from wavefill.integrations.transformers.names import SCHEDULE, previous_of
from wavefill.spec import UnsupportedModel, invalid


@cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


@untraced
def before(decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Begin a step when this forward runs over a wavefill cache; give it one when it would make its own.

    Raises before anything is computed when the cache or the mask is one that wavefill would not serve exactly.
    """
    set_step(None)
    config = decoder.config
    if previous_of(config._attn_implementation) is None or continuous.is_paged_call(kwargs):
        return None
    if args:
        kwargs = {**dict(zip(_parameters(type(decoder).forward), args, strict=False)), **kwargs}
    held = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
    if held is None:
        use_cache = kwargs.get("use_cache")
        if not (config.use_cache if use_cache is None else use_cache):
            return None
    if _steps_aside(decoder, kwargs, held):
        return None
    name = "input_ids" if kwargs.get("input_ids") is not None else "inputs_embeds"
    inputs = kwargs.get(name)
    if inputs is None:
        return None  # The forward itself says what is missing.
    if not isinstance(inputs, torch.Tensor) or inputs.dim() < 2:
        got = list(inputs.shape) if isinstance(inputs, torch.Tensor) else type(inputs).__name__
        raise invalid(name, "must be a tensor [batch, tokens, ...]", got, "Give one prompt as [1, tokens].")
    # As transformers decides it: the argument when there is one, whatever it is, else the configuration.
    asked = "output_attentions" if "output_attentions" in kwargs else "config.output_attentions"
    if kwargs.get("output_attentions", getattr(config, "output_attentions", False)):
        raise invalid(asked, "must be false, since the weights are never formed", True,
                      'To see them, call disable(model) and model.set_attn_implementation("eager").')
    attention_mask = kwargs.get("attention_mask")
    if attention_mask is not None and not (isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2):
        got = list(attention_mask.shape) if hasattr(attention_mask, "shape") else type(attention_mask).__name__
        raise invalid("attention_mask", "must be [batch, tokens] with a wavefill cache", got,
                      "Pass use_cache=False for a mask of your own, or call disable(model).")
    # Only now, so that a new DynamicCache is left as it is by a call that is refused.
    made = WavefillCache(decoder) if held is None else None
    rows = adopt(held if made is None else made, config)
    batch, q_len, replays = inputs.shape[0], inputs.shape[1], graphed(decoder)
    defer = replays is not None and replays.may_replay(rows, q_len)
    step = rows.begin(batch, q_len, attention_mask, config, defer=defer)
    step.storage = None if replays is None else replays.storage
    step.schedule = decoder.__dict__.get(SCHEDULE)
    set_step(step)
    if made is None:
        return None
    name = next(name for name in CACHE_NAMES if name in _parameters(type(decoder).forward))
    return (), {**{k: v for k, v in kwargs.items() if k not in CACHE_NAMES}, name: made}


@untraced
def after(decoder: PreTrainedModel, args: Any, kwargs: Any, output: Any) -> None:
    """End the step; one of a forward that failed is undone. torch calls no hook after Ctrl-C: the next step does it."""
    step = get_step()
    if step is not None and step.config is decoder.config:
        set_step(None)
        layers, returned = step.rows.layers, output is not None
        whole = step.written == step.attended == layers
        step.rows.end(step, returned=returned and whole)
        if returned and not whole:
            raise UnsupportedModel(
                f"model: all its {layers} layers with attention must attend through wavefill; got {step.attended} in "
                "this forward. Undo what was changed since enable(model) (layers dropped, an attention patched), or "
                "call disable(model)."
            )


def _steps_aside(decoder: PreTrainedModel, kwargs: dict[str, Any], held: object) -> bool:
    """Whether this forward runs as if the model were not enabled: wavefill has no backward, and is no part of a graph.

    Raises `InvalidArgument` when such a forward comes with a wavefill cache.
    """
    gradients = _records_gradients(decoder, kwargs)
    if gradients:
        when, then = "while gradients are recorded", "Wrap the call in torch.no_grad() or torch.inference_mode()."
    elif decoder.training and getattr(decoder, "gradient_checkpointing", False):
        # Up to 5.23 the layers are kept from the cache then, whether gradients are recorded or not.
        when, then = "in training with gradient checkpointing", "Call model.eval() first."
    elif torch.jit.is_tracing() or torch.compiler.is_exporting():  # type: ignore[attr-defined,no-untyped-call]
        when, then = "while the model is traced or exported", "Trace it without a cache, or with a DynamicCache."
    else:
        return False
    if rows_of(held) is not None:
        raise invalid("past_key_values", f"can't be a wavefill cache {when}", "one", then)
    if gradients and not decoder.training:
        warnings.warn(
            "This forward records gradients, so it runs with PyTorch's attention and its cache is not wavefill's. "
            "Wrap it in torch.no_grad() to decode through wavefill.",
            stacklevel=2,
        )
    return True


def _records_gradients(decoder: PreTrainedModel, kwargs: dict[str, Any]) -> bool:
    if not torch.is_grad_enabled():
        return False
    embeds = kwargs.get("inputs_embeds")
    return (embeds is not None and embeds.requires_grad) or any(p.requires_grad for p in decoder.parameters())
