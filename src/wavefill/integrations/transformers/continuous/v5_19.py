"""transformers 5.19 to 5.23: the function calls `cache.update`, which edits the keyword arguments for this layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wavefill.integrations.transformers.continuous.contract import (
    Batch,
    Contract,
    Decode,
    Shape,
    new_tokens,
    packed,
)


class V519(Contract):
    """`max_seqlen_*` became `max_length_*`; update gives K and V gathered, or the pages in the arguments."""

    first, last = (5, 19), (5, 23)
    needs = frozenset({"cache", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "read_index",
                       "write_index", "block_table"})
    refuses = frozenset({"max_seqlen_q", "max_seqlen_k", "k_cache", "v_cache"})

    def matches(self, shape: Shape) -> bool:
        return ("kwargs" in shape.update and "read_index" not in shape.update
                and self.needs <= shape.call and not self.refuses & shape.call
                and "past_key_values" in shape.layer and "cache" not in shape.layer)

    def unpack(self, layer_idx: int, tokens: int, k: Tensor, v: Tensor, kwargs: dict[str, Any]) -> Batch:
        self.check_new(tokens, k)
        if not isinstance(kwargs["cu_seq_lens_k"], dict):
            raise self.mismatch("cu_seq_lens_k that is one layer's already")
        k, v = kwargs["cache"].update(key_states=k, value_states=v, layer_idx=layer_idx, kwargs=kwargs)
        return updated(self, tokens, k, v, kwargs)


def updated(contract: Contract, tokens: int, k: Tensor, v: Tensor, kwargs: dict[str, Any]) -> Batch:
    """The batch once `update` has run and edited kwargs. k, v: [1, KH, N, D], the new tokens alone in a decode."""
    cu_q, cu_k = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
    if not isinstance(cu_k, Tensor):
        raise contract.mismatch("cu_seq_lens_k that no update has chosen for this layer")
    if kwargs["block_table"] is not None:
        contract.check_new(tokens, k)
        if "k_cache" not in kwargs or "v_cache" not in kwargs:
            raise contract.mismatch("a block table without the pages it points into")
        return Decode(kwargs["k_cache"], kwargs["v_cache"], kwargs["block_table"], cu_k, new_tokens(k), new_tokens(v))
    if cu_k.device.type == "cpu" and k.shape[2] < int(cu_k[-1]):
        raise contract.mismatch(f"{k.shape[2]} keys where the lengths add up to {int(cu_k[-1])}")
    most_k = kwargs["max_length_k"]
    if isinstance(most_k, dict):
        most_k = max(most_k.values())
    return packed(new_tokens(k), new_tokens(v), cu_q, cu_k, kwargs["max_length_q"], most_k)
