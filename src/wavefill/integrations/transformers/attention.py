"""The attention function and the mask function that transformers calls, and their registration.

With a step (a forward over a wavefill cache) the mask function hands the step itself to the layers in place of a mask.
Without one (training, `use_cache=False`, another model that shares the configuration) both functions are exactly the
ones that the model came with.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from wavefill.cache import KVPages, placed
from wavefill.integrations.transformers import continuous, kernels
from wavefill.integrations.transformers.current import get_step, untraced
from wavefill.integrations.transformers.names import name_over
from wavefill.integrations.transformers.step import Step
from wavefill.integrations.transformers.support import PREVIOUS
from wavefill.scores import NONE, Options
from wavefill.spec import UnsupportedModel, invalid

Result = tuple[Tensor, Tensor | None]

_attentions = AttentionInterface()
_masks = AttentionMaskInterface()


def register() -> None:
    """Register the functions, one name for each implementation a model may come from; again is the same."""
    for previous in PREVIOUS:
        AttentionInterface.register(name_over(previous), partial(attention, previous))
        AttentionMaskInterface.register(name_over(previous), partial(mask, previous))


@untraced
def mask(previous: str, *args: Any, **kwargs: Any) -> Any:
    """The step of the running forward, or the mask of the implementation that the model came with."""
    step = get_step()
    if step is not None and step.config is kwargs.get("config"):
        return step
    return _masks[previous](*args, **kwargs)


@untraced
def attention(
    previous: str,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> Result:
    """One layer's attention.

    query:          [B, HQ, q_len, D].
    key, value:     [B, KH, q_len, D] and [B, KH, q_len, DV], the new tokens alone when there is a step.
    attention_mask: the step, or what the mask function of `previous` made.
    softcap, s_aux: the soft cap on scores and the sinks [HQ] of families that have them.
    Returns [B, q_len, HQ, DV], zero where a query has no real token to attend, and None for the weights. A query that
    is padding attends the real tokens before it, as in sdpa: its own key is no key, but generate may sample from it.
    """
    # Names that a family does not pass are not passed on: its own functions may not know them.
    scores: dict[str, Any] = {name: x for name, x in (("softcap", softcap), ("s_aux", s_aux)) if x is not None}
    if not isinstance(attention_mask, Step):
        if continuous.is_paged_call(kwargs):
            paged: Result = continuous.forward(
                module, query, key, value, attention_mask,
                dropout=dropout, scaling=scaling, sliding_window=sliding_window, **scores, **kwargs,
            )
            return paged
        return _stock(previous, module)(
            module, query, key, value, attention_mask,
            dropout=dropout, scaling=scaling, sliding_window=sliding_window, **scores, **kwargs,
        )
    if dropout:
        raise invalid("attention_dropout", "must be 0 with a wavefill cache", dropout, "Call model.eval() first.")
    if kwargs.get("position_bias") is not None:
        raise UnsupportedModel(
            f"model: {type(module).__name__} passes position_bias=, which wavefill doesn't compute in transformers. "
            "Call wavefill.integrations.transformers.disable(model)."
        )
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise invalid("is_causal", "must be true with a wavefill cache", False,
                      "Pass use_cache=False for attention that is not causal.")
    step = attention_mask
    step.attended += 1
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    if step.has_late_padding or (sliding_window is not None and step.has_hole):
        return _masked(step, module, query, scale, sliding_window, scores), None
    options = _options(softcap, s_aux, query.device)
    if step.is_decode:
        return _decode(step, module, query, scale, sliding_window, options), None
    if step.is_prefill and options is NONE and (sliding_window is None or step.q_len <= sliding_window):
        return _prefill(step, module, query, key, value, scale), None
    return _extend(step, module, query, scale, sliding_window, options), None


def _options(softcap: float | None, sinks: Tensor | None, device: torch.device) -> Options:
    """What the kernels take besides the window; sinks in float32, whatever the model computes in."""
    if softcap is None and sinks is None:
        return NONE
    if sinks is not None:
        sinks = sinks.detach().to(device, torch.float32).contiguous()
    return Options(softcap=softcap, sinks=sinks)


def _stock(previous: str, module: torch.nn.Module) -> Callable[..., Result]:
    """The function of `previous`; "eager" lives beside the module's own class, as transformers itself looks it up."""
    if previous == "eager":
        return cast("Callable[..., Result]", sys.modules[type(module).__module__].eager_attention_forward)
    return cast("Callable[..., Result]", _attentions[previous])


def _decode(
    step: Step, module: Any, query: Tensor, scale: float, window: int | None, options: Options
) -> Tensor:
    """One real query token a row, over its pages."""
    pages = step.rows.view(module.layer_idx)
    out = kernels.attention(
        query[:, :, 0], pages, step.seq_lens, step.block_table, None, scale=scale, window=window, options=options,
        max_q_len=1, schedule=step.schedule,
    )
    return out[:, None]


def _prefill(step: Step, module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """The first tokens of every row: the new K and V are all there is.

    On the CPU, and in float32, torch's causal attention takes them as they are: rows without padding together, as in
    stock transformers and with the same bits; others one by one. On a GPU 16-bit rows go to the fastest kernel for
    prompts that is there, which is often our own, and reads pages as well where there is padding. Under a schedule that
    was asked for all rows go to our own.
    """
    if step.schedule is not None or (query.is_cuda and query.element_size() == 2):
        return _extend(step, module, query, scale, None, NONE, new=None if step.new is not None else (key, value))
    causal = partial(_stock("sdpa", module), module, attention_mask=None, dropout=0.0, scaling=scale, is_causal=True)
    if step.new is None:
        return causal(query=query, key=key, value=value)[0]
    batch, heads, q_len, _ = query.shape
    out = query.new_zeros(batch, q_len, heads, value.shape[-1])
    for row, count in enumerate(step.counts):
        if count:
            q, k, v = (x[row : row + 1, :, q_len - count:] for x in (query, key, value))
            out[row, q_len - count:] = causal(query=q, key=k, value=v)[0][0]
    return out


def _extend(
    step: Step, module: Any, query: Tensor, scale: float, window: int | None, options: Options,
    new: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Several query tokens a row, or some of them padding, over the pages, each row aligned at its end; or over K and V
    `new` [B, KH, q_len, D] where the pages hold nothing else, which are read faster.
    """
    batch, heads, q_len, size = query.shape
    packed = query.transpose(1, 2).reshape(batch * q_len, heads, size)
    if step.index is not None:
        packed = packed[step.index]
    if new is None:
        pages, table = step.rows.view(module.layer_idx), step.block_table
    else:
        pages, table = KVPages(*(x.transpose(1, 2) for x in new)), None
    out = kernels.attention(
        packed, pages, step.seq_lens, table, step.cu_seqlens_q, scale=scale, window=window, options=options,
        max_q_len=q_len, schedule=step.schedule,
    )
    if step.index is not None:
        full = out.new_zeros(batch * q_len, heads, out.shape[-1])
        full[step.index] = out
        out = full
    return out.view(batch, q_len, heads, -1)


def _masked(
    step: Step, module: Any, query: Tensor, scale: float, window: int | None, scores: dict[str, Any]
) -> Tensor:
    """Queries that the kernels have no form for: padding after real tokens, whose last key is not its own, and windows
    over padding between real tokens, which the window counts and the pages don't have. torch's attention with the mask
    that sdpa has, on a copy of the layer with every slot, as slow as stock transformers; with a soft cap or sinks
    (`scores`) the family's own, since sdpa has neither.
    """
    assert step.mask is not None
    slots = step.past + step.q_len
    keys, values = step.rows.dense(module.layer_idx, step)
    positions = torch.arange(slots, device=query.device)
    queries = positions[step.past:, None]
    seen = (positions <= queries) & placed(step.mask, query.device)[:, None, None]
    if window is not None:
        seen &= positions > queries - window
    if not scores:
        return _stock("sdpa", module)(module, query, keys, values, seen, dropout=0.0, scaling=scale)[0]
    hidden = torch.zeros_like(seen, dtype=query.dtype).masked_fill(~seen, torch.finfo(query.dtype).min)
    out = _stock("eager", module)(module, query, keys, values, hidden, dropout=0.0, scaling=scale, **scores)[0]
    # Where nothing is seen, every key is hidden alike, and the family's own would take their mean.
    return out * seen.any(-1)[:, 0, :, None, None]
