"""PagedKVCache: the keys and values of many requests, in pages that forks share.

A page holds `page_size` tokens of every layer. Requests that were forked share pages by reference count; who appends
to a shared page that is not full gets a copy of it first. The bookkeeping (`wavefill.pages`) is done once a step and
costs a few microseconds a request; the tokens are written by `wavefill::append`. It is kept on the host also where the
pages are a GPU's: what it hands out goes there in copies that nobody waits for.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor

from wavefill import checks, ops
from wavefill.backends.cpu import MAX_HEAD_DIM
from wavefill.pages import Pages, Request, Step, distinct, ids_of, picks_of, sizes_of
from wavefill.spec import DTYPE_BYTES, MAX_LENGTH, InvalidArgument, invalid, invalid_type, whole
from wavefill.store import Buffers, Store, format_of, given_scales
from wavefill.store import KVPages as KVPages

#: Tokens of a page where the caller gives none: two tiles of the CPU backend, so that in the "HND" layout a tile of one
#: head is one run of memory. One thread on 8K tokens (D 64 and 128, bf16 and fp32) read 8 to 10 GB/s, against 6.8 to
#: 8.3 with pages of 16, and 5.5 to 7.5 in "NHD", where the page size made no difference. A request wastes half a page
#: on average.
PAGE_SIZE = 64
#: Layers of a cache: more than any model has, and few enough that even an empty one takes no time to make.
_MOST_LAYERS = 1 << 16
#: Lists of requests whose tensors are kept until lengths or pages change.
_KEPT = 64


def placed(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, in a copy that nobody waits for, from pinned memory, which torch keeps."""
    if device.type == "cpu":
        return x
    with torch.cuda.device(device):
        return x.pin_memory().to(device, non_blocking=True)


@dataclass
class _Open:
    """A step that some layers have written and others, `missing`, have not. slots: [tokens] int64."""

    step: Step
    slots: Tensor
    missing: set[int]


class PagedKVCache:
    """Keys and values of many requests in pages shared by reference count.

    num_pages:   pages, each of `page_size` tokens of every layer.
    layers:      layers of the model.
    kv_heads, head_dim, head_dim_v: KH, D and DV (D if None).
    dtype:       fp32, fp16 or bf16: of K and V as they are appended, and of q.
    kv_format:   how K and V are stored: "auto" in `dtype`, unchanged; or, on the CPU, "int8", "fp8-token-head" ("fp8"
                 for short), "fp8-head" or "fp8-tensor" (docs/kv-formats.md). `append` makes the codes.
    k_scale, v_scale: of "fp8-tensor", a number or a tensor [layers], and of "fp8-head", [KH] or [layers, KH], float32
                 and above 0; None is 1. Other formats make their own.
    device:      "cpu", or a GPU: "cuda" (the current one), "cuda:1". All tensors that are given out live there.
    layout:      order in memory: "HND" puts the tokens of a head side by side, which reads fastest here; "NHD" the
                 heads of a token, as most engines do. Both look like [pages, page_size, KH, D] from outside.

    A request is an int that `add`, `fork` or `reorder` gave out; ids are never used twice, so a stale one is an error
    and not another's data. Wherever requests are taken, one id or a sequence of them will do. No method changes
    anything when it raises; what Ctrl-C leaves of one, `restore` undoes. Not safe for use from several threads at once.
    Pickled, saved or deep-copied, a cache becomes another with the same requests and pages of its own.

    On a GPU nothing waits for the device, and work is queued on the current stream. A captured CUDA graph would repeat
    the slots, lengths and tables of one step, so none are made in a capture: `reserve` ahead of it, have the graph call
    `torch.ops.wavefill.append` and attention on tensors of its own, and copy those of each step into them.

    >>> cache = PagedKVCache(64, layers=2, kv_heads=2, head_dim=64, dtype=torch.float32)
    >>> requests = cache.add(2)
    >>> for layer in range(2):
    ...     cache.append(requests, torch.randn(2, 2, 64), torch.randn(2, 2, 64), layer=layer)
    >>> q, pages = torch.randn(2, 8, 64), cache.view(0)
    >>> wavefill.decode_attention(q, pages, None, cache.seq_lens(requests), cache.block_table(requests)).shape
    torch.Size([2, 8, 64])
    """

    def __init__(
        self,
        num_pages: int,
        *,
        layers: int = 1,
        page_size: int = PAGE_SIZE,
        kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        layout: Literal["NHD", "HND"] = "HND",
        kv_format: str = "auto",
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
    ) -> None:
        num_pages = whole("num_pages", num_pages, 0, MAX_LENGTH)
        self.layers = whole("layers", layers, 1, _MOST_LAYERS)
        self.page_size = whole("page_size", page_size, 1, MAX_LENGTH)
        self.kv_heads = whole("kv_heads", kv_heads, 1, MAX_LENGTH)
        self.head_dim = whole("head_dim", head_dim, 1, MAX_HEAD_DIM)
        self.head_dim_v = self.head_dim if head_dim_v is None else whole("head_dim_v", head_dim_v, 1, MAX_HEAD_DIM)
        if not isinstance(dtype, torch.dtype) or dtype not in checks.DTYPE_NAMES:
            raise invalid_type("dtype", f"must be one of {', '.join(DTYPE_BYTES)}", dtype, "Pass a torch dtype.")
        if not isinstance(layout, str) or layout not in ("NHD", "HND"):
            raise invalid("layout", 'must be "NHD" or "HND"', repr(layout), "Use one of these.")
        self.device = checks.known_device(device)
        self.dtype, self.layout = dtype, layout
        self._format = format_of(kv_format, self.device)
        self._scales = tuple(
            given_scales(name, scale, self._format, self.layers, self.kv_heads, self.device)
            for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)))
        self._store = self._make_store(num_pages)
        self._pages = Pages(num_pages, self.page_size)
        self._open: _Open | None = None
        self._views = self._store.views(self._store.buffers)
        self._seq_lens: dict[tuple[int, ...], Tensor] = {}
        self._tables: dict[tuple[int, ...], Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """All but what is made anew; of K and V a copy of the pages that were ever taken, as others hold nothing."""
        taken = self._store.first(self._pages.fresh)
        return {**self._state(), "taken": {name: [x.clone() for x in buffers] for name, buffers in taken.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Into memory of its own: tensors that another process sent are shared with it.
        taken: Buffers = state["taken"]
        self.__dict__.update({name: value for name, value in state.items() if name != "taken"})
        self.device = taken["k"][0].device  # torch.load may have put them elsewhere
        self._store = self._make_store(self.num_pages)
        self._store.fill(taken)
        self._views = self._store.views(self._store.buffers)
        self._changed(pages=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedKVCache:
        """As through a pickle, but K and V are copied once."""
        other: PagedKVCache = type(self).__new__(type(self))
        memo[id(self)] = other
        state = copy.deepcopy(self._state(), memo)
        other.__setstate__({**state, "taken": self._store.first(self._pages.fresh)})
        return other

    def __copy__(self) -> NoReturn:
        raise invalid("cache", "can't be copied shallowly: two caches would give away the same pages", "copy.copy",
                      "Use copy.deepcopy(cache), or fork requests, which share pages.")

    # ---- what there is

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return len(self._pages.refs)

    @property
    def kv_format(self) -> str:
        """The name of the format that K and V are stored in; "auto" where they are stored as they come."""
        return "auto" if self._format is None else self._format.name

    @property
    def free_pages(self) -> int:
        """Pages that hold no request's tokens."""
        return self._pages.free

    @property
    def requests(self) -> list[int]:
        """Ids of all requests, oldest first."""
        return list(self._pages.requests)

    def length(self, request: int) -> int:
        """Tokens of a request, those of an unfinished step included."""
        return self._pages.get(request).length

    def view(self, layer: int = 0) -> KVPages:
        """The pages of a layer; pass it as `k_cache`, with v_cache None.

        Stays valid for the pages there were when it was taken; take a new one after `grow`.
        """
        self._check_layer(layer)
        return self._views[layer]

    def seq_lens(self, requests: int | Iterable[int]) -> Tensor:
        """[B] int32 lengths, an unfinished step's tokens included: `seq_lens` of the public functions.

        The same tensor until a length changes, so that all layers of a step share it; don't write to it.
        """
        ids = ids_of(requests)
        known = self._seq_lens.get(ids)
        if known is None:
            lengths = np.array([self._pages.get(i).length for i in ids], np.int32)
            if len(self._seq_lens) == _KEPT:
                self._seq_lens.clear()
            known = self._seq_lens[ids] = self._placed(lengths)
        return known

    def block_table(self, requests: int | Iterable[int]) -> Tensor:
        """[B, max_pages] int32 page ids, -1 past a request's last page: `block_table` of the public functions.

        The same tensor until a page is added or given up, so that all layers of a step share it; don't write to it.
        """
        ids = ids_of(requests)
        known = self._tables.get(ids)
        if known is None:
            if len(self._tables) == _KEPT:
                self._tables.clear()
            known = self._tables[ids] = self._placed(self._pages.table(ids))
        return known

    # ---- requests

    def add(self, n: int = 1) -> list[int]:
        """n new, empty requests. They take no pages until something is appended."""
        n = whole("n", n, 0, MAX_LENGTH)
        return [self._pages.new() for _ in range(n)]

    def fork(self, request: int, n: int = 1) -> list[int]:
        """n requests that hold the same tokens and share all pages.

        Takes no pages now: whoever first appends to a shared page that is not full gets a copy of it.
        """
        n = whole("n", n, 0, MAX_LENGTH)
        self._settled(request)
        return [self._pages.fork(request) for _ in range(n)]

    def truncate(self, request: int, length: int) -> None:
        """Drops the tokens of a request past `length`, as after rejected drafts."""
        length = whole("length", length, 0, MAX_LENGTH)
        held = self._settled(request)
        if length > held.length:
            raise invalid("length", f"must be at most the request's length ({held.length})", length,
                          "Truncating cannot add tokens; append them.")
        self._pages.crop(held, length)
        self._changed(pages=True)

    def free(self, requests: int | Iterable[int]) -> None:
        """Gives up requests; pages that nobody shares become free. Their ids are never valid again."""
        ids = ids_of(requests)
        distinct(ids)
        for i in ids:
            self._settled(i)
        for i in ids:
            self._pages.remove(i)
        self._changed(pages=True)

    def reorder(self, requests: Sequence[int], index: Sequence[int] | Tensor) -> list[int]:
        """Requests for the next step of a beam search: the i-th holds the tokens of requests[index[i]].

        Replaces `requests`: who is picked once keeps its id, who is picked more often is forked, who is not picked is
        freed. No page is copied and none is taken. Returns len(index) ids.
        """
        ids = ids_of(requests)
        distinct(ids)
        for i in ids:
            self._settled(i)
        picks = picks_of("index", index, len(ids))
        seen: set[int] = set()
        chosen = []
        for pick in picks:
            chosen.append(self._pages.fork(ids[pick]) if pick in seen else ids[pick])
            seen.add(pick)
        self.free([i for at, i in enumerate(ids) if at not in seen])
        return chosen

    def grow(self, num_pages: int) -> None:
        """Enlarges the cache to `num_pages` pages in all. Page ids, requests and tables stay valid.

        On a GPU the pages move, K or V of one layer at a time: a captured graph that used them must be captured anew.
        """
        num_pages = whole("num_pages", num_pages, 0, MAX_LENGTH)
        before = self.num_pages
        if num_pages < before:
            raise invalid("num_pages", f"must be at least the present number ({before})", num_pages,
                          "A cache cannot shrink; make a new one.")
        buffers = self._store.enlarged(num_pages)
        self._views = self._store.views(buffers)
        self._store.buffers = buffers
        self._pages.grow(num_pages)

    # ---- tokens

    def append(
        self,
        requests: int | Iterable[int],
        k: Tensor,
        v: Tensor,
        *,
        counts: Iterable[int] | None = None,
        layer: int | None = None,
    ) -> None:
        """Writes the new tokens of requests behind those they have.

        requests: distinct ids.
        k, v:     [tokens, KH, D] and [tokens, KH, DV] of the cache's dtype, any strides: the tokens of the first
                  request, then those of the second, and so on. Without `layer`, in a cache of several layers,
                  [layers, tokens, KH, D]: all layers at once. Values are stored, not their gradient history.
        counts:   tokens of each request; the same number each if None.
        layer:    the layer that writes. The first to write opens a step: it claims the pages and the lengths grow.
                  The others must follow with the same requests and counts, each once; then the step is finished.

        Raises OutOfPages when the step needs more pages than are free.
        """
        ids = ids_of(requests)
        every = layer is None and self.layers > 1
        _tensor("k", k)
        _tensor("v", v)
        if k.dim() != 3 + every or (every and (v.dim() != 4 or not k.shape[0] == v.shape[0] == self.layers)):
            rule = f"[{self.layers} layers, tokens, KH, D] without layer=" if every else "[tokens, KH, D]"
            raise invalid("k", f"k and v must be {rule}", f"{list(k.shape)} and {list(v.shape)}",
                          "Pack the tokens of all requests along one dimension.")
        if self._format is not None and k.dtype != self.dtype:
            raise invalid_type("k", f"dtype must be that of the cache ({self.dtype})", k.dtype,
                               f"Convert it with .to({self.dtype}).")
        sizes = self._counts(ids, k.shape[every], counts)
        layer = 0 if layer is None else layer
        self._check_layer(layer)
        current = self._open
        if current is None:
            step = self._plan(ids, sizes)
            current = _Open(step, self._placed(np.array(step.slots, np.int64)), set(range(self.layers)))
        elif every or layer not in current.missing or (ids, sizes) != (current.step.requests, current.step.counts):
            raise self._unfinished(current)
        writing = set(range(self.layers)) if every else {layer}
        for at in writing:
            pages = self._views[at]
            scales = () if self._format is None else (pages.k_scale, pages.v_scale)
            ops.append(pages.k, pages.v, k[at] if every else k, v[at] if every else v, current.slots, *scales)
        # Only now: had the operator refused the tensors, there would be nothing but scratch in free pages.
        if self._open is None:
            self._take(current.step)
        current.missing -= writing
        self._open = current if current.missing else None

    def reserve(self, requests: int | Iterable[int], counts: Iterable[int]) -> Tensor:
        """Claims room for new tokens whose keys and values the caller writes: [tokens] int64 slots of `view(layer)`.

        For a model that writes many layers a step through `torch.ops.wavefill.append` (k, v, k_scale and v_scale of the
        view), or a kernel of its own: the bookkeeping is done here, once. A slot is page * page_size + offset, in the
        order of `append`. The lengths count the tokens at once; `truncate` takes them back.

        requests: distinct ids.
        counts:   tokens of each request.

        Raises OutOfPages when there are fewer free pages than it takes.
        """
        step = self._plan_alone(requests, counts)
        slots = self._placed(np.array(step.slots, np.int64))
        self._take(step)
        return slots

    def claim(self, requests: int | Iterable[int], counts: Iterable[int]) -> list[int]:
        """As `reserve`, with the slots on the host: for who brings several numbers of a step to the device at once."""
        step = self._plan_alone(requests, counts)
        self._take(step)
        return step.slots

    def cancel_step(self) -> None:
        """Takes back the step that some layers have written and others have not, if there is one.

        For recovery when a model fails between layers; lengths are as before the step.
        """
        current, self._open = self._open, None
        if current is None:
            return
        for i, count in zip(current.step.requests, current.step.counts, strict=True):
            held = self._pages.get(i)
            self._pages.crop(held, held.length - count)
        self._changed(pages=True)

    def restore(self, lengths: Mapping[int, int]) -> None:
        """Back to the requests of `lengths`, each with its first lengths[request] tokens; all others are freed.

        For recovery after a call that did not end, by Ctrl-C above all: take `{i: cache.length(i) for i in
        cache.requests}` before it, and pass that here. What was truncated or freed meanwhile can't be had back.
        """
        if not isinstance(lengths, Mapping):
            raise invalid_type("lengths", "must be a dict of requests and lengths", repr(lengths),
                               "Take {i: cache.length(i) for i in cache.requests} beforehand.")
        wanted = {i: whole("lengths", length, 0, MAX_LENGTH) for i, length in lengths.items()}
        for i, length in wanted.items():
            held = self._pages.get(i)
            if length > held.length:
                raise invalid("lengths", f"must be at most the request's length ({held.length})",
                              f"{length} for request {i}", "Restoring cannot add tokens; append them.")
        self._open = None
        self._pages.restore(wanted)
        self._changed(pages=True)

    # ---- inside

    def _state(self) -> dict[str, Any]:
        """The attributes of a copy, but those that it makes anew."""
        anew = ("_store", "_views", "_seq_lens", "_tables")
        return {name: value for name, value in self.__dict__.items() if name not in anew}

    def _make_store(self, num_pages: int) -> Store:
        return Store(num_pages, self.layers, self.page_size, self.kv_heads, (self.head_dim, self.head_dim_v),
                     self.dtype, self.layout, self._format, self._scales, self.device)

    def _counts(self, ids: tuple[int, ...], tokens: int, counts: Iterable[int] | None) -> tuple[int, ...]:
        if counts is None:
            if tokens % (len(ids) or 1) or (tokens and not ids):
                raise invalid("k", f"must hold the same number of tokens for each of {len(ids)} requests",
                              f"{tokens} tokens", "Pass counts= for a ragged step.")
            sizes = (tokens // (len(ids) or 1),) * len(ids)
        else:
            sizes = sizes_of(counts, ids)
            if sum(sizes) != tokens:
                raise invalid("counts", f"must add up to the {tokens} tokens of k", sizes, "Pack k and v to match.")
        return sizes

    def _plan_alone(self, requests: int | Iterable[int], counts: Iterable[int]) -> Step:
        """`_plan` of requests that no unfinished step is about to write."""
        ids = ids_of(requests)
        for i in ids:
            self._settled(i)
        return self._plan(ids, sizes_of(counts, ids))

    def _plan(self, ids: tuple[int, ...], counts: tuple[int, ...]) -> Step:
        """Where a step's tokens go. Changes nothing but what is in free pages."""
        distinct(ids)
        step = self._pages.plan(ids, counts)
        if step.copies:
            self._store.copy_pages(self._placed(np.array(step.copies)))
        return step

    def _take(self, step: Step) -> None:
        """Makes the step that was planned last real."""
        self._pages.claim(step)
        self._changed(pages=bool(step.placed))

    def _placed(self, values: np.ndarray[Any, Any]) -> Tensor:
        """The numbers on the cache's device."""
        found = torch.from_numpy(values)
        if self.device.type == "cpu":
            return found
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise invalid("cache", "can't make a step's tensors while a CUDA graph is captured, which would repeat "
                              "that step", "a capture", "Make them ahead, and copy each step's into the graph's own.")
        return placed(found, self.device)

    def _changed(self, *, pages: bool) -> None:
        """Forgets the tensors that lengths, and pages too, went into. New ones are made, so old ones stay as given."""
        self._seq_lens = {}
        if pages:
            self._tables = {}

    def _settled(self, request: int) -> Request:
        """A request that no unfinished step is about to write."""
        held = self._pages.get(request)
        if self._open is not None and request in self._open.step.requests:
            raise self._unfinished(self._open)
        return held

    def _unfinished(self, current: _Open) -> InvalidArgument:
        done, step = sorted(set(range(self.layers)) - current.missing), current.step
        return invalid(
            "layer", f"layers {done} have written a step of {sum(step.counts)} tokens to requests "
            f"{list(step.requests)}, which must finish first", f"layers {sorted(current.missing)} missing",
            "Append the same requests and counts to the missing layers, or call cancel_step().",
        )

    def _check_layer(self, layer: int) -> None:
        if type(layer) is not int:
            raise invalid_type("layer", "must be an int", repr(layer), "Count layers from 0.")
        if not 0 <= layer < self.layers:
            raise invalid("layer", f"must be from 0 to {self.layers - 1}", layer, "Count layers from 0.")


def _tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise invalid_type(name, "must be a torch.Tensor", type(value).__name__, "Pass [tokens, KH, head size].")
