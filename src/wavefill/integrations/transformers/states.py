"""What the layers without K and V keep in a cache (linear attention, short convolutions), under the rows' control.

The layers are transformers' own and so is all that they compute. Their states change with every forward, whole and in
part in place, so the rows take a copy before anything changes and put it back when that was not finished; and a state
has no tokens that could be taken off again, so what cannot be undone is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wavefill.spec import invalid

#: What one layer held: its attributes by name, but for `record_past`, which is asked for at any time.
Saved = dict[str, Any]


def copies(states: dict[int, Tensor | None]) -> dict[int, Tensor | None]:
    """The same states, to which nothing is written that is written to these."""
    return {at: x if x is None else x.clone() for at, x in states.items()}


class States:
    """The states of one cache.

    layers: `StateLayer`s, whose `convolutions` and `recurrent` states forwards replace or write in place.
    """

    def __init__(self, layers: Sequence[Any] = ()) -> None:
        self.layers = tuple(layers)

    def save(self) -> list[Saved]:
        """All that the layers hold, for `restore`; they go on with copies of it, which models may write into."""
        saved = [{name: dict(value) if isinstance(value, dict) else value for name, value in vars(layer).items()
                  if name != "record_past"} for layer in self.layers]
        for layer in self.layers:
            # Made here and now, so that a cache that was filled in inference mode goes on outside of it.
            layer.convolutions, layer.recurrent = copies(layer.convolutions), copies(layer.recurrent)
        return saved

    def restore(self, saved: list[Saved]) -> None:
        """Make the layers hold what they did; `saved` may not be used again."""
        for layer, held in zip(self.layers, saved, strict=True):
            vars(layer).update(held)

    def forget(self) -> None:
        """Make the layers as new, so that they take any number of rows."""
        for layer in self.layers:
            vars(layer).update(vars(layer.anew()))

    def pick(self, picks: Sequence[int]) -> None:
        """Make row i a copy of what row picks[i] was."""
        index = torch.tensor(picks, dtype=torch.int64, device="cpu")
        for layer in self.layers:
            for states in (layer.convolutions, layer.recurrent):
                states.update({at: x if x is None else x[index.to(x.device)] for at, x in states.items()})

    def crop(self, count: int, left: int) -> None:
        """Take the last `count` slots off, of which `left` stay. Raises `InvalidArgument` before anything is changed.

        A recurrent state can't go back at all. A convolution's can where transformers was told to record the past
        (`Cache.activate_past_recording`, as it does in assisted decoding), as far as it is recorded; what is recorded
        before that is given up.
        """
        for layer in self.layers:
            for at, state in layer.convolutions.items():
                if count and layer.has_previous_state[at]:
                    _check_crop(layer, at, state, count, left)
        for layer in self.layers:
            if layer.record_past:
                for at, state in layer.convolutions.items():
                    if state is not None:
                        stop = state.shape[-1] - count
                        layer.convolutions[at] = state[..., max(stop - layer.conv_kernel_size[at], 0):stop]


def _check_crop(layer: Any, at: int, state: Any, count: int, left: int) -> None:
    """Raise `InvalidArgument` unless state `at` of a layer can go back by `count` slots to `left`."""
    keep = "Keep copy.deepcopy(cache) of the place to return to."
    if layer.recurrent[at] is not None:
        raise invalid("tokens_to_remove", "must be 0 or all tokens where a model has recurrent states", -count,
                      f"Such a state can't go back. {keep}")
    if not layer.record_past:
        raise invalid("tokens_to_remove", "must be 0 or all tokens where the states before are not recorded", -count,
                      f"Call cache.activate_past_recording() before the forward that may be undone. {keep}")
    size = layer.conv_kernel_size[at]
    if state.shape[-1] - count < min(size, left):
        raise invalid("tokens_to_remove", f"must take off no more than the {max(state.shape[-1] - size, 0)} tokens "
                      "that states were recorded for", -count, keep)
