"""transformers 5.17: the function updates the cache; one flat pool of token slots per layer of a group."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wavefill.cache import KVPages
from wavefill.integrations.transformers.continuous.contract import (
    Batch,
    Contract,
    Decode,
    Shape,
    new_tokens,
    packed,
    written,
)

#: Names of layers without and with a window; the cache marks the first by a window of 1.
_KINDS = "full_attention", "sliding_attention"


class V517(Contract):
    """Layers lie in groups of one attention kind; group g of the cache has its own indices and block table."""

    first = last = (5, 17)
    on_gpu = True
    prefix = "paged|"
    needs = frozenset({"cache", "cu_seq_lens_q", "cu_seq_lens_k", "max_seqlen_q", "max_seqlen_k", "read_index",
                       "write_index", "block_table"})
    refuses = frozenset({"max_length_q", "max_length_k", "k_cache", "v_cache"})

    def matches(self, shape: Shape) -> bool:
        return ({"read_index", "write_index"} <= shape.update and "kwargs" not in shape.update
                and self.needs <= shape.call and not self.refuses & shape.call
                and "get_cache_for_block_table" not in shape.cache
                and "past_key_values" in shape.layer and "cache" not in shape.layer)

    def unpack(self, layer_idx: int, tokens: int, k: Tensor, v: Tensor, kwargs: dict[str, Any]) -> Batch:
        self.check_new(tokens, k)
        cache, kind = kwargs["cache"], _KINDS[kwargs["cache"].sliding_windows[layer_idx] != 1]
        group, pool = cache.layer_index_to_group_indices[layer_idx]
        cu_q, cu_k, most_k = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"], kwargs["max_seqlen_k"]
        if isinstance(cu_k, dict):                                       # only when the model mixes kinds of layers
            cu_k, most_k = cu_k[kind], most_k[kind]
        pages = KVPages(*(x[pool].view(-1, cache.block_size, *x[pool].shape[1:])  # pools are shared by the groups
                          for x in (cache.key_cache, cache.value_cache)))
        if kwargs["block_table"] is not None:
            return Decode(pages.k, pages.v, kwargs["block_table"][group], cu_k, new_tokens(k), new_tokens(v))
        if kind == "sliding_attention":
            # A ring's new tokens overwrite keys that this very call still reads, so only update() may order it.
            k_all, v_all = cache.update(key_states=k, value_states=v, layer_idx=layer_idx,
                                        read_index=kwargs["read_index"], write_index=kwargs["write_index"])
            if most_k >= cache.num_pages:                                # for a graph it is cut to that, maybe too much
                most_k = tokens + cache.sliding_windows[layer_idx] - 1
            return packed(k_all, v_all, cu_q, cu_k, kwargs["max_seqlen_q"], most_k)
        return written(pages, new_tokens(k), new_tokens(v), kwargs["read_index"][group], kwargs["write_index"][group],
                       cu_q, cu_k, kwargs["max_seqlen_q"], most_k)
