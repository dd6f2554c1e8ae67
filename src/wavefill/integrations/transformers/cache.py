"""The cache that an enabled model writes in place: layers for transformers' `Cache`, over one set of paged rows.

All layers share one block table, so what generate does to a cache as a whole (reorder for beams, crop after a rejected
draft) is done once: `Cache` calls every layer in turn, and layer 0 acts for all. Layers of a model that have no K and V
keep transformers' own states, and go along.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from wavefill.integrations.transformers.current import get_step, untraced
from wavefill.integrations.transformers.rows import Rows
from wavefill.integrations.transformers.states import States, copies
from wavefill.integrations.transformers.step import Step
from wavefill.integrations.transformers.support import decoder_of, layers_with_keys
from wavefill.spec import WavefillError, invalid, invalid_type

#: A cache's argument, and its name in an output: up to 5.23, and from 5.24 on (where the old one stays valid).
CACHE_NAMES = ("past_key_values", "cache")


class _Whole:
    """What generate does to a whole cache, which calls all its layers for it: the first one acts."""

    rows: Rows
    index: int

    def offload(self) -> None:
        """Nothing to do: all of it stays where the model is."""

    def prefetch(self) -> None:
        """Nothing to do: all of it stays where the model is."""

    def reset(self) -> None:
        """Forget all tokens."""
        if self.index == 0:
            self.rows.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove slots of every row; 0 changes nothing."""
        next_step = "Give minus the number of tokens to drop."
        change = _number("tokens_to_remove", tokens_to_remove, next_step)
        if change > 0:
            raise invalid("tokens_to_remove", "must be 0 or negative", change, next_step)
        if self.index == 0:
            self.rows.crop(-change)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was; pages are shared."""
        if self.index == 0:
            self.rows.gather(beam_idx, "beam_idx")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times in place; pages are shared."""
        next_step = "Give how many rows each one becomes."
        times = _number("repeats", repeats, next_step)
        if times < 0:
            raise invalid("repeats", "must be 0 or more", times, next_step)
        if self.index == 0:
            self.rows.gather([row for row in range(self.rows.batch) for _ in range(times)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows that `indices` names (numbers, from the end where negative, or a bool mask)."""
        if self.index == 0 and self.rows.slots:
            try:
                rows = torch.arange(self.rows.batch, device="cpu")[
                    indices.cpu() if isinstance(indices, Tensor) else indices]
            except (IndexError, TypeError, RuntimeError):
                raise invalid("indices", f"must name some of the cache's {self.rows.batch} rows", indices,
                              "Give their numbers, or a bool for each row.") from None
            self.rows.gather(rows, "indices")


class PagedLayer(_Whole, CacheLayerMixin):  # type: ignore[misc]
    """Layer `index` of a cache; its K and V lie in pages, real tokens only.

    A layer with a sliding window keeps the tokens before the window too. Decoding reads only the window; the memory is
    the price of rows that can be cropped, forked and continued at any point.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    #: Sizes are known when the first K and V arrive.
    supports_early_init = False

    def __init__(self, rows: Rows, index: int) -> None:
        # CacheLayerMixin.__init__ sets `keys` and `values`, which are computed on demand here.
        self.rows = rows
        self.index = index

    @property
    def is_initialized(self) -> bool:
        """Whether the layer holds tokens."""
        return self.rows.slots > 0

    @property
    def keys(self) -> Tensor | None:
        """A copy of K, [batch, KH, slots, D], zero at padding; for inspection, since it reads the whole layer."""
        return self.rows.dense(self.index)[0] if self.rows.slots else None

    @property
    def values(self) -> Tensor | None:
        """A copy of V, [batch, KH, slots, DV], zero at padding; for inspection, since it reads the whole layer."""
        return self.rows.dense(self.index)[1] if self.rows.slots else None

    @property
    def batch_size(self) -> int:
        """Rows of the batch. Raises AttributeError before the first token, as layers of transformers do."""
        if not self.rows.slots:
            raise AttributeError("batch_size")
        return self.rows.batch

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: room is found when a forward writes its first layer."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the kernels take addresses, which can't be traced
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new K and V [batch, KH, tokens, D] and return them; the attention reads the rest from the pages."""
        self.rows.write(_own_step(self.rows), self.index, key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots that a mask for `query_length` new tokens covers, and the first of them."""
        return self.rows.slots + query_length, 0

    def get_seq_length(self) -> int:
        """Slots of every row, padding included."""
        return self.rows.slots

    def get_max_length(self) -> int:
        """-1: there is no maximum."""
        return -1


class StateLayer(_Whole, LinearAttentionLayer):  # type: ignore[misc]
    """Layer `index` of a cache, of a layer with states in place of K and V: transformers' own, but for the changes of
    the whole cache, and a recurrent state that is replaced where transformers copies the new one over the old.

    Outside of a forward its states are copies, since models write into what they find.
    """

    def __init__(self, rows: Rows, index: int, number_of_states: int, record_past: bool) -> None:
        self.rows = rows
        self.index = index
        super().__init__(number_of_states=number_of_states)
        self.record_past = record_past

    @property
    def conv_states(self) -> dict[int, Tensor | None]:
        """The last inputs of each convolution, [batch, channels, tokens], by its number."""
        return self.convolutions if self._is_running() else copies(self.convolutions)

    @conv_states.setter
    def conv_states(self, states: dict[int, Tensor | None]) -> None:
        self.convolutions = states

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:
        """The recurrent states, [batch, ...], by number."""
        return self.recurrent if self._is_running() else copies(self.recurrent)

    @recurrent_states.setter
    def recurrent_states(self, states: dict[int, Tensor | None]) -> None:
        self.recurrent = states

    def update_conv_state(self, conv_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Add the new columns [batch, channels, tokens], and return them behind those that were there."""
        _own_step(self.rows)
        states: Tensor = super().update_conv_state(conv_states, *args, **kwargs)
        return states

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Keep the new state and return it."""
        _own_step(self.rows)
        self.is_recurrent_states_initialized[state_idx] = True
        self.recurrent[state_idx] = recurrent_states
        return recurrent_states

    def anew(self) -> StateLayer:
        """A layer like this one, without a state."""
        return StateLayer(self.rows, self.index, self.number_of_states, self.record_past)

    @untraced
    def _is_running(self) -> bool:
        step = get_step()
        return step is not None and step.rows is self.rows


@untraced
def _own_step(rows: Rows) -> Step:
    """The step of the running forward. Raises `WavefillError` when it is none over these rows."""
    step = get_step()
    if step is None or step.rows is not rows:
        raise WavefillError(
            "cache: a wavefill cache takes tokens from a forward of an enabled model only; got a call without one. "
            "Call wavefill.integrations.transformers.enable(model) first, and pass this cache to that model."
        )
    return step


def _number(name: str, value: object, next_step: str) -> int:
    """A whole number, which 5.17 passes as a tensor."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise invalid_type(name, "must be an int", repr(value), next_step)
    return int(value)


def _is_hybrid(config: Any) -> bool:
    return len(layers_with_keys(config)) < int(config.num_hidden_layers)


def layers_for(config: Any, *, record_past: bool = False) -> list[PagedLayer | StateLayer]:
    """Fresh layers of one cache for a decoder of this configuration.

    record_past: whether states keep what a crop would have to go back to.
    """
    rows = Rows(layers_with_keys(config))
    # How many states a layer has, transformers knows.
    stock = DynamicCache(config=config).layers if _is_hybrid(config) else ()
    layers = [PagedLayer(rows, index) if index in rows.places
              else StateLayer(rows, index, stock[index].number_of_states, record_past)
              for index in range(config.num_hidden_layers)]
    rows.states = States([layer for layer in layers if isinstance(layer, StateLayer)])
    return layers


class WavefillCache(Cache):  # type: ignore[misc]
    """A cache for an enabled model, to keep between calls of `generate` or `model(...)`.

    model: the enabled model (the number and the kinds of its layers are taken).

    `generate` makes one by itself; make one to continue a conversation without computing its past again:
    `cache = WavefillCache(model)`, then pass `past_key_values=cache` to every turn.
    """

    def __init__(self, model: object) -> None:
        super().__init__(layers=layers_for(decoder_of(model).config))

    def __iter__(self) -> Any:
        """Layer by layer (K, V, None), as a `DynamicCache` gives; copies. Layers without K and V are left out."""
        for layer in self.layers:
            if isinstance(layer, PagedLayer):
                yield layer.keys, layer.values, None


def rows_of(cache: object) -> Rows | None:
    """The rows of a cache of ours, or None for any other."""
    layers: Sequence[Any] = getattr(cache, "layers", ())
    return layers[0].rows if layers and isinstance(layers[0], _Whole) else None


def adopt(cache: object, config: Any) -> Rows:
    """The rows of `cache`, whose layers are replaced by ours when it is a `DynamicCache` that is still empty.

    `generate` makes such a cache for every call and hands it back to itself step after step, so it is this object, and
    not another one in its place, that has to write in place. `Cache.layers` is a public list of layer objects, made to
    be filled by the caller.

    config: of the running decoder.
    Raises `InvalidArgument` or `InvalidType` for every other cache, by its name.
    """
    rows = rows_of(cache)
    if rows is None:
        if not isinstance(cache, Cache):
            raise invalid_type("past_key_values", "must be a transformers Cache", type(cache).__name__, _NEXT)
        if type(cache) is not DynamicCache or cache.offloading:
            kind = "an offloaded cache" if getattr(cache, "offloading", False) else type(cache).__name__
            raise invalid("past_key_values", "must be a WavefillCache or a new DynamicCache", kind, _NEXT)
        plain = (DynamicLayer, DynamicSlidingWindowLayer, *([LinearAttentionLayer] if _is_hybrid(config) else []))
        if any(type(layer) not in plain for layer in cache.layers):
            kinds = ", ".join(sorted({type(layer).__name__ for layer in cache.layers}))
            raise invalid("past_key_values", "must have plain dynamic layers", kinds, _NEXT)
        states = [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]
        tokens = max((layer.get_seq_length() for layer in cache.layers if layer not in states), default=0)
        if tokens or any(any(layer.has_previous_state.values()) for layer in states):
            raise invalid("past_key_values", "must be empty, or have been filled by this enabled model",
                          f"a DynamicCache with {tokens} tokens", _NEXT)
        ours = layers_for(config, record_past=any(layer.record_past for layer in states))
        cache.layers = ours
        cache.layer_class_to_replicate = None
        rows = ours[0].rows
    numbers = layers_with_keys(config)
    if tuple(rows.places) != numbers:
        raise invalid("past_key_values", f"must have the model's {len(numbers)} layers with keys, {list(numbers)}",
                      list(rows.places), "Make one with WavefillCache(model) of this model.")
    return rows


_NEXT = ("Leave it (and cache_implementation) out, pass WavefillCache(model), or call "
         "wavefill.integrations.transformers.disable(model) to run with this cache.")
