"""The attention call of a paged forward pass: known for what it is, checked against the contract, and computed."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from wavefill.integrations.transformers.continuous import attention
from wavefill.integrations.transformers.continuous.contract import PARAM, Contract
from wavefill.integrations.transformers.current import untraced
from wavefill.ops import _options
from wavefill.spec import invalid

#: Keyword arguments that only a paged forward pass carries, in every release so far.
MARKS = frozenset({"read_index", "write_index", "block_table", "logits_indices", "logits_processor_args"})


@dataclass
class Pass:
    """A paged forward pass in progress on this thread."""

    contract: Contract
    plans: attention.Plans = field(default_factory=attention.Plans)


class _Local(threading.local):
    running: Pass | None = None


_local = _Local()


def current() -> Pass | None:
    """The paged forward pass that this thread is in."""
    return _local.running


def set_current(running: Pass | None) -> None:
    """Begin a paged forward pass on this thread; None ends it."""
    _local.running = running


def is_paged_call(kwargs: Mapping[str, Any]) -> bool:
    """Whether an attention call is one of a paged batch: by the forward pass it belongs to, or by its own arguments.

    Either is enough, so that a call which only one of them knows reaches `forward`, and is refused there.
    """
    return current() is not None or not MARKS.isdisjoint(kwargs)


@untraced
def forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer over a paged batch, ([1, T, HQ, DV], None) as transformers wants it.

    module: the layer's attention. query: [1, HQ, T, D], all requests' tokens packed.
    key, value: [1, KH, N, D]. kwargs: of the contract.
    Raises `InvalidArgument` for a call that isn't as the detected contract says, or for attention that isn't causal.
    """
    running = current()
    if running is None:
        raise invalid(PARAM, "a paged call must belong to a forward pass of a model that wavefill was enabled on",
                      "one outside of it", "Call wavefill.integrations.transformers.enable(model).")
    contract = running.contract
    contract.check_call(kwargs)
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise invalid("is_causal", "must be true in continuous batching", False, "Use the model's own attention.")
    if dropout:
        raise invalid("dropout", "must be 0 in continuous batching", dropout, "Call model.eval().")
    batch = contract.unpack(int(module.layer_idx), query.shape[2], key, value, kwargs)
    return attention.run(batch, query, running.plans, scale=float(module.scaling if scaling is None else scaling),
                         window=sliding_window, options=_options(softcap, s_aux, None, None)), None
