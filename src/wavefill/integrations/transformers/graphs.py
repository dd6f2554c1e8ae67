"""The decoding step of an enabled model on a GPU, captured as a CUDA graph and replayed for every token after that.

A step of one token a row is hundreds of small launches, which the host takes longer to ask for than the GPU to run.
The first such step over a cache runs as it is, but on buffers that stay; the second is captured from it; from then on a
step copies its token, position, lengths and slots into the buffers and replays. Lengths live on the device, so one
graph serves them all. What a graph can't hold runs as without one, and a debug message of the logger "wavefill" says
why, once: a step with several tokens a row, hooks within the decoder, states of layers without K and V, code that waits
for the device.

A graph knows addresses only. It keeps the tensors that it was captured with, and while the GPU replays, the host looks
whether they are still the decoder's, with the same classes and without hooks, and whether the mask is what the step was
begun with: if not, what was replayed is forgotten and the step runs anew. Pages that moved are noticed before.

Pages of a cache that is no more serve the decoder's next cache, so that a graph outlives a call of `generate`. Within
one, the next step is replayed before its forward comes (`ahead.py`).
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from transformers import PreTrainedModel

from wavefill.cache import PagedKVCache
from wavefill.integrations.transformers.ahead import Begun
from wavefill.integrations.transformers.cache import CACHE_NAMES
from wavefill.integrations.transformers.current import get_step, set_step, untraced
from wavefill.integrations.transformers.fused import hooked
from wavefill.integrations.transformers.rows import Rows
from wavefill.integrations.transformers.step import Step
from wavefill.integrations.transformers.storage import Storage
from wavefill.integrations.transformers.support import decoder_of

_log = logging.getLogger("wavefill")

#: One capture at a time: allocations of another thread must not come to lie in its graph.
_capturing = threading.Lock()
#: Arguments of a decoder's forward that a graph knows what to do with; any other must be None or False.
_INPUTS = ("input_ids", "inputs_embeds")
#: Types of values that a module's computation may depend on, and private ones of adapters that do.
_PLAIN, _SWITCHES = (bool, int, float, str, tuple, list, dict), ("_disable_adapters", "_active_adapter")
_KNOWN = frozenset((*_INPUTS, *CACHE_NAMES, "attention_mask", "position_ids", "use_cache", "return_dict"))
#: Kinds of rotary embedding that look at positions on the host.
_WAITING = ("dynamic", "longrope")


class GraphedForward:
    """The forward of an enabled decoder, in its `__dict__` in place of the class's: replays where it can.

    Copies and pickles of the decoder take it along and begin without graphs.
    """

    def __init__(self, decoder: PreTrainedModel) -> None:
        self._decoder = ref(decoder)  # which has this, and should be gone when nobody else holds it
        self._begin()

    def _begin(self) -> None:
        self.storage = Storage()
        #: By pages, then by batch: graphs of a cache go when its pages do.
        self._graphs: WeakKeyDictionary[PagedKVCache, dict[tuple[Any, ...], Graph]] = WeakKeyDictionary()
        #: Why nothing is captured any more.
        self._reason: str | None = None
        #: Whether a forward ran without a graph since the last step that replayed: another prompt.
        self._between = False
        self._last = _Last()

    def __getstate__(self) -> dict[str, Any]:
        return {"decoder": self._decoder()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._decoder = ref(state["decoder"])
        self._begin()

    @property
    def decoder(self) -> Any:
        """The decoder whose forward it is."""
        return self._decoder()

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the class's forward, which transformers reads."""
        signature = inspect.signature(type(self.decoder).forward)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One forward of the decoder, within its hooks."""
        result = self._replayed(args, kwargs)
        return type(self.decoder).forward(self.decoder, *args, **kwargs) if result is None else result

    @untraced
    def _replayed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the forward returns, from a graph; None where it has to run."""
        step, self._last.step = get_step(), None
        if args or step is None or not self._is_for_a_graph(step, kwargs):
            self._between = True
            return None
        # Room first: pages that move do it now, and not under a graph.
        step.rows.claim(step)
        with torch.cuda.device(step.rows.pages.device):
            graph = self._graph(step, kwargs)
            try:
                # Hooks are to run once, and before anything of the decoder has.
                if not graph.is_captured and (hooked_class := _look(self.decoder)[0]) is not None:
                    return self._stop(f"{hooked_class} has hooks")
                result = graph.run(step, kwargs)
                if not graph.confirms(step, kwargs):
                    step.rows.begin_anew(step)
                    return None
                if not graph.is_of(self.decoder):
                    self._graphs.clear()
                    return None
            except _CannotCapture as failure:
                return self._stop(f"its decoding step can't be captured: {failure}")
            finally:
                set_step(step)
        step.written = step.attended = step.rows.layers
        self._last.graph, self._last.step = graph, step
        return result

    def begin_next(self, tokens: Tensor) -> Begun | None:
        """Begin the step after the one that this thread's last forward replayed, with tokens [batch, 1] on the GPU;
        None where it had better wait for its forward.
        """
        graph, step = self._last.graph, self._last.step
        if graph is None or step is None or get_step() is not None or self._reason is not None:
            return None
        rows, held = step.rows, step.rows.held
        if held.ids != step.ids or held.slots != step.past + 1 or graph.places != _places(rows.pages):
            return None
        if not graph.takes(tokens) or torch.cuda.is_current_stream_capturing():
            return None
        with torch.cuda.device(tokens.device):
            begun = graph.begin(rows, tokens)
        if begun is not None:
            self.storage.begun[rows.pages] = begun
        return begun

    def may_replay(self, rows: Rows, q_len: int) -> bool:
        """Whether a forward over these rows is likely one to replay, so that its mask had better not be waited for."""
        return q_len == 1 and self._reason is None and rows.slots > 0

    def _is_for_a_graph(self, step: Step, kwargs: dict[str, Any]) -> bool:
        """Whether this forward is a decoding step that a graph would repeat exactly."""
        decoder = self.decoder
        given = kwargs.get("input_ids")
        given = kwargs.get("inputs_embeds") if given is None else given
        if given is None or given.device.type != "cuda":
            if given is not None and self._graphs:  # the model has moved away
                self._begin()
            return False
        if self._reason is not None or step.config is not decoder.config or step.q_len != 1 or step.is_prefill:
            return False
        if torch.cuda.is_current_stream_capturing() or torch.is_autocast_enabled("cuda") or decoder.training:
            return False
        if any(value is not None and value is not False for name, value in kwargs.items() if name not in _KNOWN):
            return False
        use_cache = kwargs.get("use_cache")
        if kwargs.get("return_dict") is False or not (decoder.config.use_cache if use_cache is None else use_cache):
            return False
        config = vars(decoder.config)
        if any(value and name.startswith("output_") for name, value in config.items()):
            return False
        if not step.is_decode or (config.get("sliding_window") and step.has_hole):
            return False
        if step.rows.states.layers:
            self._stop("it has layers with states in place of K and V")
        elif (kind := (config.get("rope_parameters") or {}).get("rope_type")) in _WAITING:
            self._stop(f"its rotary embedding ({kind}) waits for positions")
        return self._reason is None

    def _stop(self, reason: str) -> None:
        if self._reason is None:
            self._reason = reason
            _log.debug("%s decodes without a CUDA graph: %s.", type(self.decoder).__name__, reason)
        self._graphs.clear()

    def _graph(self, step: Step, kwargs: dict[str, Any]) -> Graph:
        """The graph of such a step over these pages; a new one where there is none, or the pages have moved."""
        pages = step.rows.pages
        graphs = self._graphs.setdefault(pages, {})
        key = tuple((name, tuple(x.shape), x.dtype) for name in (*_INPUTS, "position_ids")
                    if (x := kwargs.get(name)) is not None)
        graph = graphs.get(key)
        # Plain values of modules (a scale, an adapter's switch): nobody changes them within a call of `generate`.
        changed = graph is not None and self._between and graph.values != values_of(self.decoder)
        self._between = False
        if graph is not None and graph.places != _places(pages):
            graphs.clear()
            graph = None
        if graph is None or changed:
            graph = graphs[key] = Graph(self.decoder, step, kwargs)
        return graph


def attach(decoder: PreTrainedModel) -> None:
    """Have a decoder on a GPU replay its decoding steps, from graphs yet to be captured."""
    if (held := graphed(decoder)) is not None:
        held._begin()
    elif "forward" in decoder.__dict__:
        _log.debug("%s decodes without a CUDA graph: something else has set its forward.", type(decoder).__name__)
    elif decoder.device.type == "cuda":
        decoder.__dict__["forward"] = GraphedForward(decoder)


def detach(decoder: PreTrainedModel) -> None:
    """Undo `attach`, and give up graphs and pages."""
    if graphed(decoder) is not None:
        del decoder.__dict__["forward"]


def graphed(decoder: PreTrainedModel) -> GraphedForward | None:
    """The forward of a decoder that replays."""
    held = decoder.__dict__.get("forward")
    return held if isinstance(held, GraphedForward) else None


def begin_next(model: PreTrainedModel, tokens: Tensor) -> Begun | None:
    """`GraphedForward.begin_next` of an enabled model's decoder."""
    held = graphed(decoder_of(model))
    return None if held is None else held.begin_next(tokens)


class _Last(threading.local):
    """The step that a thread's last forward replayed, and its graph."""

    graph: Graph | None = None
    step: Step | None = None


class _CannotCapture(Exception):
    """Code that a graph can't hold."""


class Graph:
    """A decoding step of a decoder over a cache's pages, for one batch: its buffers, and the graph once there is one.

    places: of the pages, as `_places` has them. values: those of the decoder's modules, as `values_of` has them.
    """

    def __init__(self, decoder: PreTrainedModel, step: Step, kwargs: dict[str, Any]) -> None:
        pages, device = step.rows.pages, step.rows.pages.device
        self.places = _places(pages)
        self._forward = type(decoder).forward
        self._identity, self.values = _look(decoder)[1], values_of(decoder)
        # Held, so that no other tensors can come to lie at their addresses.
        self._tensors = [x.data for x in (*decoder.parameters(), *decoder.buffers())]
        self._name = next(name for name in _INPUTS if kwargs.get(name) is not None)
        positions = kwargs.get("position_ids")
        with torch.inference_mode(False):  # later steps may be outside of it
            self._inputs = torch.empty_like(kwargs[self._name], memory_format=torch.contiguous_format)
            self._positions = torch.zeros(1, 1, dtype=torch.int64, device=device) if positions is None else (
                torch.empty_like(positions, memory_format=torch.contiguous_format))
            self._numbers = _Numbers(step.batch, device)
            self._table = torch.full((step.batch, pages.num_pages), -1, dtype=torch.int32, device=device)
        self._table_from: Tensor | None = None
        #: The last step that was begun before its forward, and the stream of such steps.
        self._begun: Begun | None = None
        self._ahead = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        #: Where masks are read while the graph replays, and the point of the decoder's stream from which they can be.
        self._beside = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._given = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._decoder = ref(decoder)
        self._graph: torch.cuda.CUDAGraph | None = None
        #: What the decoder's forward gave when it ran last, on the buffers, without the cache, and the cache's name.
        self._output: Any = None
        self._cache = ""

    @property
    def is_captured(self) -> bool:
        """Whether its steps replay."""
        return self._graph is not None

    def is_of(self, decoder: PreTrainedModel) -> bool:
        """Whether the decoder is what it was, and nobody looks into its forward."""
        hooked_class, identity = _look(decoder)
        return hooked_class is None and identity == self._identity

    def confirms(self, step: Step, kwargs: dict[str, Any]) -> bool:
        """Whether the step that runs, which is not waited for, has the mask that it was taken to have, and where it was
        begun before its forward, the tokens and positions.
        """
        begun = self._has_begun(step)
        if step.doubt is None and not begun:
            return True
        self._beside.wait_event(self._given)
        with torch.cuda.stream(self._beside):
            if begun:
                same = (kwargs[self._name] == self._inputs).all()
                if (positions := kwargs.get("position_ids")) is not None:
                    same &= (positions == self._positions).all()
                if not bool(same):
                    return False
            return step.rows.confirms(step)

    def takes(self, tokens: Tensor) -> bool:
        """Whether its next step can begin with such tokens."""
        return self._graph is not None and self._name == "input_ids" and (
            (tokens.shape, tokens.dtype, tokens.device) == (
                self._inputs.shape, self._inputs.dtype, self._inputs.device))

    def begin(self, rows: Rows, tokens: Tensor) -> Begun | None:
        """Replay the step after the last one, with tokens as `takes` has them, beside what the current stream does;
        None where it takes other pages.
        """
        stream = torch.cuda.current_stream()
        begun = self._begun = rows.begin_next(stream)
        if begun is None:
            return None
        assert self._graph is not None
        self._numbers.load(begun.claimed, [length + 1 for length in begun.held.lengths])
        self._inputs.copy_(tokens)
        self._positions.add_(1)
        self._set_table(rows.pages.block_table(begun.held.ids))
        self._ahead.wait_stream(stream)
        try:
            with torch.cuda.stream(self._ahead):
                self._graph.replay()
        finally:
            begun.record(self._ahead)
        begun.is_under_way = True
        return begun

    def _has_begun(self, step: Step) -> bool:
        """Whether a step is the one begun last."""
        return self._begun is not None and step.claimed is self._begun.claimed

    def __del__(self) -> None:
        if (begun := self.__dict__.get("_begun")) is not None:
            begun.join()

    def run(self, step: Step, kwargs: dict[str, Any]) -> Any:
        """What the decoder's forward returns for this step, which has its pages."""
        if step.doubt is not None or self._has_begun(step):
            self._given.record(torch.cuda.current_stream())
        step.rows.join()
        if not self._has_begun(step):
            self._load(step, kwargs)
        if self._output is None:
            self._on_buffers(step, kwargs)
        elif self._graph is None:
            self._capture(step, kwargs)
        if self._graph is not None and not self._has_begun(step):
            self._graph.replay()
        # In memory of its own: the next step overwrites this one's.
        cache = next(kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None)
        hidden = self._output.last_hidden_state.clone()
        return type(self._output)(**{**self._output, "last_hidden_state": hidden, self._cache: cache})

    def _capture(self, step: Step, kwargs: dict[str, Any]) -> None:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        stream = _stream_for_captures(step.rows.pages.device)
        try:
            with _capturing, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._on_buffers(step, kwargs)
        except Exception as error:
            _clear_up(graph, current.device_index)
            raise _CannotCapture(str(error).partition("\n")[0]) from error
        finally:
            torch.cuda.set_stream(current)  # where torch leaves the other one after a failure
        self._graph = graph

    def _load(self, step: Step, kwargs: dict[str, Any]) -> None:
        """This step's token, position, lengths and slots into the buffers; its pages where they are others."""
        assert step.claimed is not None
        self._numbers.load(step.claimed, step.lengths)
        self._inputs.copy_(kwargs[self._name])
        positions = kwargs.get("position_ids")
        if positions is None:
            self._positions.fill_(step.past)
        else:
            self._positions.copy_(positions)
        self._set_table(step.block_table)

    def _set_table(self, table: Tensor) -> None:
        if table is not self._table_from:
            self._table[:, : table.shape[1]].copy_(table)
            self._table_from = table

    def _on_buffers(self, step: Step, kwargs: dict[str, Any]) -> None:
        """The decoder's forward, with the buffers in place of this step's tensors."""
        fixed = Step(step.rows, step.config, step.batch, 1, step.past, None, step.held, step.ids)
        fixed.claimed, fixed.block_table, fixed.schedule = step.claimed, self._table, step.schedule
        fixed.slots, fixed.seq_lens = self._numbers.slots, self._numbers.seq_lens
        set_step(fixed)
        buffers = {self._name: self._inputs, "position_ids": self._positions, "attention_mask": None}
        output = self._forward(self._decoder(), **{**kwargs, **buffers})
        # By its key: from 5.24 on an output says that it has either name.
        self._cache = next(name for name in output.keys() if name in CACHE_NAMES)  # noqa: SIM118
        self._output = type(output)(**{name: value for name, value in output.items() if name != self._cache})


@cache
def _stream_for_captures(device: torch.device) -> torch.cuda.Stream:
    """One for each device, where torch has one for all, on the first device that had a capture; and one for all graphs
    of a device, since cuBLAS keeps 32 MiB for each stream that it was captured on.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


#: Graphs whose capture failed: the allocator may go on asking one whether it is capturing.
_failed: list[torch.cuda.CUDAGraph] = []


def _clear_up(graph: torch.cuda.CUDAGraph, index: int) -> None:
    """What torch leaves undone when the end of a capture fails: its pool takes no more, and random numbers go on."""
    _failed.append(graph)
    with suppress(RuntimeError):  # it had come so far
        torch._C._cuda_endAllocateToPool(index, graph.pool())
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state().graphsafe_get_state())


class _Numbers:
    """What the host tells a graph in every step, brought to the device in one copy: slots and lengths.

    slots: int64 [batch]; seq_lens: int32 [batch]; both on the device, at addresses that stay.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        first = -(-batch // 16) * 16  # lengths begin at a multiple of 128 bytes, as kernels know of whole tensors
        size = first + -(-batch // 2)
        self._here = torch.zeros(size, dtype=torch.int64, device="cpu", pin_memory=True)
        self._there = torch.zeros(size, dtype=torch.int64, device=device)
        self.slots, self.seq_lens = self._there[:batch], self._there[first:].view(torch.int32)[:batch]
        numbers = self._here.numpy()
        self._slots, self._lengths = numbers[:batch], numbers[first:].view(np.int32)[:batch]
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def load(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Bring a step's numbers to the device, once the copy of those before is done."""
        self._copied.synchronize()
        self._slots[:] = slots
        self._lengths[:] = lengths
        self._there.copy_(self._here, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(self._there.device))


def _look(decoder: PreTrainedModel) -> tuple[str | None, list[Any]]:
    """The class of a module within the decoder that has hooks on its forward, if one has, and all else that a graph of
    the decoder would not notice a change of: classes, forwards set on modules, addresses.
    """
    hooked_class = "every module" if _has_any_global_hook() else None  # type: ignore[no-untyped-call]
    found: list[Any] = [decoder.config.num_hidden_layers]
    modules: list[Any] = [decoder]
    known: set[Any] = {decoder}
    for module in modules:  # which grows
        have = module.__dict__
        found += (type(module), have.get("forward"))
        for tensors in (have["_parameters"], have["_buffers"]):
            if tensors:
                found += [None if x is None else x.data_ptr() for x in tensors.values()]
        for child in have["_modules"].values():
            if child is not None and child not in known:
                known.add(child)
                modules.append(child)
        # Most have none of either kind.
        if (have["_forward_pre_hooks"] or have["_forward_hooks"]) and module is not decoder and hooked(module):
            hooked_class = hooked_class or type(module).__name__
    return hooked_class, found


def values_of(decoder: PreTrainedModel) -> list[Any]:
    """Plain values that modules hold besides: numbers, words, and tuples, lists and dicts of them."""
    return [(name, repr(value)) for module in decoder.modules() for name, value in vars(module).items()
            if (type(value) in _PLAIN and not name.startswith("_")) or name in _SWITCHES]


def _places(pages: PagedKVCache) -> list[int]:
    """Where pages lie, and how many there are."""
    views = map(pages.view, range(pages.layers))
    return [pages.num_pages, *(x.data_ptr() for view in views for x in (view.k, view.v))]
