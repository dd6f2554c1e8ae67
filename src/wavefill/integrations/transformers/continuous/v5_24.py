"""transformers 5.24: the model's own layer has updated the cache; the function gets no cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wavefill.integrations.transformers.continuous.contract import Batch, Contract, Shape
from wavefill.integrations.transformers.continuous.v5_19 import updated


class V524(Contract):
    """`cache` became the model's argument for every kind of cache, and is gone from the function's."""

    first = last = (5, 24)
    needs = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "read_index", "write_index",
                       "block_table"})
    refuses = frozenset({"cache", "max_seqlen_q", "max_seqlen_k"})

    def matches(self, shape: Shape) -> bool:
        return ("kwargs" in shape.update and "read_index" not in shape.update
                and self.needs | {"cache"} <= shape.call and not {"max_seqlen_q", "max_seqlen_k"} & shape.call
                and "cache" in shape.layer and "past_key_values" not in shape.layer)

    def unpack(self, layer_idx: int, tokens: int, k: Tensor, v: Tensor, kwargs: dict[str, Any]) -> Batch:
        return updated(self, tokens, k, v, kwargs)
