"""The decoding step of an enabled model on a GPU, captured as a CUDA graph and replayed for every token after that.

A step of one token a row is hundreds of small launches, which the host takes longer to ask for than the GPU to run.
The first such step over a cache runs as it is, but on buffers that stay; the second is captured from it; from then on a
step copies its token, position, lengths and slots into the buffers and replays. Lengths live on the device, so one
graph serves them all. What a graph can't hold runs as without one, and a debug message of the logger "wavefill" says
why, once: a step with several tokens a row, hooks within the decoder, states of layers without K and V, code that waits
for the device.

A graph knows addresses only. It keeps the tensors that it was captured with, and while the GPU replays, the host looks
whether they are still the decoder's, with the same classes and without hooks: if not, what was replayed is forgotten
and the step runs anew. Pages that moved are noticed before.

Pages of a cache that is no more serve the decoder's next cache, so that a graph outlives a call of `generate`.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from transformers import PreTrainedModel

from wavefill.cache import PagedKVCache
from wavefill.integrations.transformers.current import get_step, set_step, untraced
from wavefill.integrations.transformers.fused import hooked
from wavefill.integrations.transformers.rows import Step
from wavefill.integrations.transformers.storage import Storage

_log = logging.getLogger("wavefill")

#: Arguments of a decoder's forward that a graph knows what to do with; any other must be None or False.
_INPUTS, _CACHES = ("input_ids", "inputs_embeds"), ("past_key_values", "cache")
_KNOWN = frozenset((*_INPUTS, *_CACHES, "attention_mask", "position_ids", "use_cache", "return_dict"))


class GraphedForward:
    """The forward of an enabled decoder, in its `__dict__` in place of the class's: replays where it can.

    It holds the decoder and nothing else that would have to be copied, so copies and pickles of the decoder take it
    along and begin without graphs.
    """

    def __init__(self, decoder: PreTrainedModel) -> None:
        self.decoder = decoder
        self._begin()

    def _begin(self) -> None:
        self.storage = Storage()
        #: By pages, then by batch: graphs of a cache go when its pages do.
        self._graphs: WeakKeyDictionary[PagedKVCache, dict[tuple[Any, ...], Graph]] = WeakKeyDictionary()
        #: Why nothing is captured any more.
        self._reason: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"decoder": self.decoder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.decoder = state["decoder"]
        self._begin()

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the class's forward, which transformers reads."""
        signature = inspect.signature(type(self.decoder).forward)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The class's own forward."""
        return type(self.decoder).forward(self.decoder, *args, **kwargs)

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One forward of the decoder, within its hooks."""
        step = get_step()
        if args or step is None or not self._is_for_a_graph(step, kwargs):
            return self.plain(*args, **kwargs)
        # Room first: pages that move do it now, and not under a graph.
        step.slots = step.rows.claim(step)
        graph = self._graph(step, kwargs)
        try:
            result = graph.run(step, kwargs)
            if not graph.is_of(self.decoder):
                self._graphs.clear()
                if (seen := _hooks(self.decoder)) is not None:
                    self._stop(f"{seen} has hooks")
                result = None
        except _CannotCapture as failure:
            self._stop(f"its decoding step can't be captured: {failure}")
            result = None
        finally:
            set_step(step)
        if result is None:
            return self.plain(**kwargs)
        step.written = step.attended = step.rows.layers
        return result

    def _is_for_a_graph(self, step: Step, kwargs: dict[str, Any]) -> bool:
        """Whether this forward is a decoding step that a graph would repeat exactly."""
        decoder = self.decoder
        if self._reason is not None or step.config is not decoder.config or step.q_len != 1 or step.is_prefill:
            return False
        given = kwargs.get("input_ids")
        given = kwargs.get("inputs_embeds") if given is None else given
        if given is None or given.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return False
        if any(value is not None and value is not False for name, value in kwargs.items() if name not in _KNOWN):
            return False
        if getattr(decoder.config, "output_hidden_states", False):
            return False
        if kwargs.get("return_dict") is False or decoder.training or torch.is_autocast_enabled("cuda"):
            return False
        if not step.is_decode or (getattr(decoder.config, "sliding_window", None) and step.has_hole):
            return False
        if step.rows.states.layers:
            return self._stop("it has layers with states in place of K and V")
        return True

    def _stop(self, reason: str) -> bool:
        if self._reason is None:
            self._reason = reason
            _log.debug("%s decodes without a CUDA graph: %s.", type(self.decoder).__name__, reason)
        self._graphs.clear()
        return False

    def _graph(self, step: Step, kwargs: dict[str, Any]) -> Graph:
        """The graph of such a step over these pages; a new one where there is none, or the pages have moved."""
        pages = step.rows.pages
        graphs = self._graphs.setdefault(pages, {})
        key = tuple((name, tuple(x.shape), x.dtype) for name in (*_INPUTS, "position_ids")
                    if (x := kwargs.get(name)) is not None)
        graph = graphs.get(key)
        if graph is None or graph.places != _places(pages):
            graph = graphs[key] = Graph(self.decoder, step, kwargs)
        return graph


def attach(decoder: PreTrainedModel) -> None:
    """Have a decoder on a GPU replay its decoding steps, from graphs yet to be captured."""
    held = decoder.__dict__.get("forward")
    if isinstance(held, GraphedForward):
        held._begin()
    elif held is not None:
        _log.debug("%s decodes without a CUDA graph: something else has set its forward.", type(decoder).__name__)
    elif decoder.device.type == "cuda":
        decoder.__dict__["forward"] = GraphedForward(decoder)


def detach(decoder: PreTrainedModel) -> None:
    """Undo `attach`, and give up graphs and pages."""
    if isinstance(decoder.__dict__.get("forward"), GraphedForward):
        del decoder.__dict__["forward"]


def storage_of(decoder: PreTrainedModel) -> Storage | None:
    """Where a decoder's caches take pages from, if it replays."""
    held = decoder.__dict__.get("forward")
    return held.storage if isinstance(held, GraphedForward) else None


class _CannotCapture(Exception):
    """Code that a graph can't hold."""


class Graph:
    """A decoding step of a decoder over a cache's pages, for one batch: its buffers, and the graph once there is one.

    places: of the pages, as `_places` has them.
    """

    def __init__(self, decoder: PreTrainedModel, step: Step, kwargs: dict[str, Any]) -> None:
        pages, device = step.rows.pages, step.rows.pages.device
        self.places = _places(pages)
        self._forward = type(decoder).forward
        self._identity = _identity(decoder)
        # Held, so that no other tensors can come to lie at their addresses.
        self._tensors = [x.data for x in (*decoder.parameters(), *decoder.buffers())]
        self._name = next(name for name in _INPUTS if kwargs.get(name) is not None)
        positions = kwargs.get("position_ids")
        with torch.inference_mode(False):  # later steps may be outside of it
            self._inputs = torch.empty_like(kwargs[self._name], memory_format=torch.contiguous_format)
            self._positions = torch.zeros(1, 1, dtype=torch.int64, device=device) if positions is None else (
                torch.empty_like(positions, memory_format=torch.contiguous_format))
            self._seq_lens = torch.zeros(step.batch, dtype=torch.int32, device=device)
            self._slots = torch.zeros(step.batch, dtype=torch.int64, device=device)
            self._table = torch.full((step.batch, pages.num_pages), -1, dtype=torch.int32, device=device)
        self._table_from: Tensor | None = None
        self._decoder = ref(decoder)
        self._graph: torch.cuda.CUDAGraph | None = None
        #: What the decoder's forward gave when it ran last, on the buffers, without the cache, and the cache's name.
        self._output: Any = None
        self._cache = ""

    def is_of(self, decoder: PreTrainedModel) -> bool:
        """Whether the decoder is what it was, and nobody looks into its forward."""
        return _hooks(decoder) is None and self._identity == _identity(decoder)

    def run(self, step: Step, kwargs: dict[str, Any]) -> Any:
        """What the decoder's forward returns for this step, which has its slots."""
        self._load(step, kwargs)
        if self._output is None:
            self._on_buffers(step, kwargs)
        elif self._graph is None:
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self._on_buffers(step, kwargs)
            except Exception as error:
                raise _CannotCapture(str(error).partition("\n")[0]) from error
            self._graph = graph
        if self._graph is not None:
            self._graph.replay()
        # In memory of its own: the next step overwrites this one's.
        cache = next(kwargs[name] for name in _CACHES if kwargs.get(name) is not None)
        hidden = self._output.last_hidden_state.clone()
        return type(self._output)(**{**self._output, "last_hidden_state": hidden, self._cache: cache})

    def _load(self, step: Step, kwargs: dict[str, Any]) -> None:
        """This step's token, position, lengths and slots into the buffers; its pages where they are others."""
        assert step.slots is not None
        self._inputs.copy_(kwargs[self._name])
        positions = kwargs.get("position_ids")
        if positions is None:
            self._positions.fill_(step.past)
        else:
            self._positions.copy_(positions)
        self._seq_lens.copy_(step.seq_lens)
        self._slots.copy_(step.slots)
        table = step.block_table
        if table is not self._table_from:
            self._table[:, : table.shape[1]].copy_(table)
            self._table_from = table

    def _on_buffers(self, step: Step, kwargs: dict[str, Any]) -> None:
        """The decoder's forward, with the buffers in place of this step's tensors."""
        fixed = Step(step.rows, step.config, step.batch, 1, step.past, None, step.held, step.ids)
        fixed.slots, fixed.seq_lens, fixed.block_table = self._slots, self._seq_lens, self._table
        set_step(fixed)
        buffers = {self._name: self._inputs, "position_ids": self._positions, "attention_mask": None}
        output = self._forward(self._decoder(), **{**kwargs, **buffers})
        self._cache = next(name for name in _CACHES if name in output)
        self._output = type(output)(**{name: value for name, value in output.items() if name != self._cache})


def _identity(decoder: PreTrainedModel) -> list[Any]:
    """What a graph of the decoder would not notice a change of: classes, forwards set on modules, addresses."""
    found: list[Any] = [decoder.config.num_hidden_layers]
    for module in decoder.modules():
        have = module.__dict__
        found += (type(module), have.get("forward"))
        for tensors in (have["_parameters"], have["_buffers"]):
            found += [None if x is None else x.data_ptr() for x in tensors.values()]
    return found


def _hooks(decoder: PreTrainedModel) -> str | None:
    """The class of a module within the decoder that has hooks on its forward, if one has."""
    if _has_any_global_hook():  # type: ignore[no-untyped-call]
        return "every module"
    within = (module for module in decoder.modules() if module is not decoder)
    return next((type(module).__name__ for module in within if hooked(module)), None)


def _places(pages: PagedKVCache) -> tuple[int, ...]:
    """Where pages lie, and how many there are."""
    first, last = pages.view(0), pages.view(pages.layers - 1)
    return pages.num_pages, first.k.data_ptr(), first.v.data_ptr(), last.k.data_ptr(), last.v.data_ptr()
