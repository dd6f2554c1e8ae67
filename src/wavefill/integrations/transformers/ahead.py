"""Decoding steps that begin before `generate` asks for them.

A step's token is known to the GPU half a millisecond before the host has read it, decided that generation goes on, and
come to the next forward; meanwhile the GPU has nothing to do. So a stopping criterion of ours, the last one, which sees
the new tokens as a tensor, has the graph of the next step replayed on a stream of its own. The forward that then comes
finds it under way, and looks whether tokens, positions and mask are what it was begun with; if not, it runs as without.

What was begun writes K and V to slots that the cache does not hold yet. When generation ends at an end token, one step
has run for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from wavefill.integrations.transformers.current import untraced

if TYPE_CHECKING:
    from wavefill.integrations.transformers.step import Held

_METHOD = "_get_stopping_criteria"


class Begun:
    """A step under way on a stream of its own.

    held:    what the cache held when it began, the step excluded.
    claimed: its slots, as `PagedKVCache.claim` has them.
    stream:  of everything else, on a GPU; `join` has it wait.
    """

    def __init__(self, held: Held, claimed: list[int], stream: torch.cuda.Stream | None) -> None:
        self.held, self.claimed, self.stream = held, claimed, stream
        #: Whether all of it has been asked of the GPU, and whether a forward came for it.
        self.is_under_way = self.is_taken = False
        self._done: torch.cuda.Event | None = None

    def record(self, stream: torch.cuda.Stream) -> None:
        """The last of it has been asked of `stream`."""
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record(stream)

    def join(self) -> None:
        """What is asked of `stream`, and of the current stream, from now on comes after it."""
        done, self._done = self._done, None
        if done is not None and self.stream is not None:
            with suppress(RuntimeError):  # at the end of the process, or after a failure that everything else meets too
                self.stream.wait_event(done)
                torch.cuda.current_stream(self.stream.device).wait_event(done)


class _Next(StoppingCriteria):  # type: ignore[misc]
    """Never stops; begins the next step. One for each call of `generate`.

    begin: begins a step with tokens [batch, 1], if it can.
    limit: tokens of a row at which generation ends, or None.
    """

    def __init__(self, begin: Callable[[Tensor], Begun | None], limit: int | None) -> None:
        self._begin, self._limit = begin, limit
        self._never: Tensor | None = None
        self._begun: Begun | None = None

    @untraced
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """False for every row of input_ids [batch, tokens]."""
        if self._never is None or self._never.shape[0] != len(input_ids):
            self._never = input_ids.new_zeros(len(input_ids), dtype=torch.bool)
        # Where one was begun in vain, this isn't generate's own loop.
        in_vain = self._begun is not None and not self._begun.is_taken
        if not in_vain and (self._limit is None or input_ids.shape[1] < self._limit):
            self._begun = self._begin(input_ids[:, -1:])
        return self._never

    def __del__(self) -> None:
        if self._begun is not None:
            self._begun.join()


class StoppingCriteriaWithNext:
    """An enabled model's `_get_stopping_criteria`, in its `__dict__` in place of the class's."""

    def __init__(self, model: PreTrainedModel, begin: Callable[[PreTrainedModel, Tensor], Begun | None]) -> None:
        self._model, self._begin = ref(model), begin

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self._model(), "begin": self._begin}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._model, self._begin = ref(state["model"]), state["begin"]

    def __call__(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        """The class's criteria, and for one token a row and step ours."""
        model: Any = self._model()
        criteria = getattr(type(model), _METHOD)(model, generation_config, *args, **kwargs)
        if (generation_config.num_beams or 1) > 1 or getattr(generation_config, "is_assistant", False):
            return criteria
        begin, of = self._begin, self._model

        def begin_next(tokens: Tensor) -> Begun | None:
            found = of()
            return None if found is None else begin(found, tokens)

        return StoppingCriteriaList([*criteria, _Next(begin_next, generation_config.max_length)])


def attach(model: PreTrainedModel, begin: Callable[[PreTrainedModel, Tensor], Begun | None]) -> None:
    """Have `generate` of a model call `begin` with each step's new tokens [batch, 1]. begin: a function of a module."""
    if hasattr(type(model), _METHOD) and _METHOD not in model.__dict__:
        model.__dict__[_METHOD] = StoppingCriteriaWithNext(model, begin)


def detach(model: PreTrainedModel) -> None:
    """Undo `attach`."""
    if isinstance(model.__dict__.get(_METHOD), StoppingCriteriaWithNext):
        del model.__dict__[_METHOD]
