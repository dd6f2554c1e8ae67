"""PagedKVCache: the keys and values of many requests, in pages that forks share.

A page holds `page_size` tokens of every layer. Requests that were forked share pages by reference count; who appends
to a shared page that is not full gets a copy of it first. The bookkeeping (`wavefill.pages`) is done once a step and
costs a few microseconds a request; the tokens are written by `wavefill::append`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from wavefill import checks, ops
from wavefill.pages import Pages, Request, Step
from wavefill.spec import DTYPE_BYTES, InvalidArgument, invalid, invalid_type

#: Tokens of a page where the caller gives none: two tiles of the CPU backend, so that in the "HND" layout a tile of one
#: head is one run of memory. One thread on 8K tokens (D 64 and 128, bf16 and fp32) read 8 to 10 GB/s, against 6.8 to
#: 8.3 with pages of 16, and 5.5 to 7.5 in "NHD", where the page size made no difference. A request wastes half a page
#: on average.
PAGE_SIZE = 64
#: Lists of requests whose tensors are kept until lengths or pages change.
_KEPT = 64


@dataclass(frozen=True, eq=False)
class KVPages:
    """The pages of one layer, as the public functions take them for `k_cache`.

    k: [pages, page_size, KH, D]; v: [pages, page_size, KH, DV]. Views of the cache's own memory.
    """

    k: Tensor
    v: Tensor


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
    dtype:       fp32, fp16 or bf16.
    device:      "cpu".
    layout:      order in memory: "HND" puts the tokens of a head side by side, which reads fastest here; "NHD" the
                 heads of a token, as most engines do. Both look like [pages, page_size, KH, D] from outside.

    A request is an int that `add`, `fork` or `reorder` gave out; ids are never used twice, so a stale one is an error
    and not another's data. Wherever requests are taken, one id or a sequence of them will do. No method changes
    anything when it raises. Not safe for use from several threads at once.

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
    ) -> None:
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        _count("num_pages", num_pages, least=0)
        for name, value in (("layers", layers), ("page_size", page_size), ("kv_heads", kv_heads),
                            ("head_dim", head_dim), ("head_dim_v", head_dim_v)):
            _count(name, value)
        if dtype not in checks.DTYPE_NAMES:
            raise invalid_type("dtype", f"must be one of {', '.join(DTYPE_BYTES)}", dtype, "Pass a torch dtype.")
        if layout not in ("NHD", "HND"):
            raise invalid("layout", 'must be "NHD" or "HND"', repr(layout), "Use one of these.")
        if torch.device(device).type not in checks.DEVICES:
            raise checks.unavailable(torch.device(device))
        self.layers, self.page_size, self.dtype, self.layout = layers, page_size, dtype, layout
        self.kv_heads, self.head_dim, self.head_dim_v = kv_heads, head_dim, head_dim_v
        inner = (page_size, kv_heads) if layout == "NHD" else (kv_heads, page_size)
        # Ordinary tensors even when made under inference_mode: those could not be resized outside it. Uninitialised:
        # slots without a token are never read, and memory is only taken up once it is written.
        with torch.inference_mode(False):
            self._k = [torch.empty(num_pages, *inner, head_dim, dtype=dtype) for _ in range(layers)]
            self._v = [torch.empty(num_pages, *inner, head_dim_v, dtype=dtype) for _ in range(layers)]
        self._pages = Pages(num_pages, page_size)
        self._open: _Open | None = None
        self._views = self._make_views()
        self._seq_lens: dict[tuple[int, ...], Tensor] = {}
        self._tables: dict[tuple[int, ...], Tensor] = {}

    # ---- what there is

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return len(self._pages.refs)

    @property
    def free_pages(self) -> int:
        """Pages that hold no request's tokens."""
        return len(self._pages.free)

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
        ids = _ids(requests)
        known = self._seq_lens.get(ids)
        if known is None:
            lengths = np.array([self._pages.get(i).length for i in ids], np.int32)
            if len(self._seq_lens) == _KEPT:
                self._seq_lens.clear()
            known = self._seq_lens[ids] = torch.from_numpy(lengths)
        return known

    def block_table(self, requests: int | Iterable[int]) -> Tensor:
        """[B, max_pages] int32 page ids, -1 past a request's last page: `block_table` of the public functions.

        The same tensor until a page is added or given up, so that all layers of a step share it; don't write to it.
        """
        ids = _ids(requests)
        known = self._tables.get(ids)
        if known is None:
            if len(self._tables) == _KEPT:
                self._tables.clear()
            known = self._tables[ids] = torch.from_numpy(self._pages.table(ids))
        return known

    # ---- requests

    def add(self, n: int = 1) -> list[int]:
        """n new, empty requests. They take no pages until something is appended."""
        _count("n", n, least=0)
        return [self._pages.new() for _ in range(n)]

    def fork(self, request: int, n: int = 1) -> list[int]:
        """n requests that hold the same tokens and share all pages.

        Takes no pages now: whoever first appends to a shared page that is not full gets a copy of it.
        """
        _count("n", n, least=0)
        self._settled(request)
        return [self._pages.fork(request) for _ in range(n)]

    def truncate(self, request: int, length: int) -> None:
        """Drops the tokens of a request past `length`, as after rejected drafts."""
        _count("length", length, least=0)
        held = self._settled(request)
        if length > held.length:
            raise invalid("length", f"must be at most the request's length ({held.length})", length,
                          "Truncating cannot add tokens; append them.")
        self._pages.crop(held, length)
        self._changed(pages=True)

    def free(self, requests: int | Iterable[int]) -> None:
        """Gives up requests; pages that nobody shares become free. Their ids are never valid again."""
        ids = _ids(requests)
        _distinct(ids)
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
        ids = _ids(requests)
        _distinct(ids)
        picks = index.tolist() if isinstance(index, Tensor) else list(index)
        for i in ids:
            self._settled(i)
        for pick in picks:
            if not isinstance(pick, int) or not 0 <= pick < len(ids):
                raise invalid("index", f"must hold numbers from 0 to {len(ids) - 1}", pick,
                              "It picks from requests by position.")
        seen: set[int] = set()
        chosen = []
        for pick in picks:
            chosen.append(self._pages.fork(ids[pick]) if pick in seen else ids[pick])
            seen.add(pick)
        self.free([i for at, i in enumerate(ids) if at not in seen])
        return chosen

    def grow(self, num_pages: int) -> None:
        """Enlarges the cache to `num_pages` pages in all. Page ids, requests and tables stay valid."""
        _count("num_pages", num_pages, least=0)
        before = self.num_pages
        if num_pages < before:
            raise invalid("num_pages", f"must be at least the present number ({before})", num_pages,
                          "A cache cannot shrink; make a new one.")
        with torch.inference_mode(False):
            for pages in (*self._k, *self._v):
                # In place, so that views taken earlier see what is appended later.
                pages.resize_(num_pages, *pages.shape[1:])
        self._pages.grow(num_pages)
        self._views = self._make_views()

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
        ids = _ids(requests)
        every = layer is None and self.layers > 1
        _tensor("k", k)
        _tensor("v", v)
        if k.dim() != 3 + every or (every and (v.dim() != 4 or not k.shape[0] == v.shape[0] == self.layers)):
            rule = f"[{self.layers} layers, tokens, KH, D] without layer=" if every else "[tokens, KH, D]"
            raise invalid("k", f"k and v must be {rule}", f"{list(k.shape)} and {list(v.shape)}",
                          "Pack the tokens of all requests along one dimension.")
        sizes = self._counts(ids, k.shape[every], counts)
        layer = 0 if layer is None else layer
        self._check_layer(layer)
        current = self._open
        if current is None:
            current = self._plan(ids, sizes)
        elif every or layer not in current.missing or (ids, sizes) != (current.step.requests, current.step.counts):
            raise self._unfinished(current)
        writing = set(range(self.layers)) if every else {layer}
        for at in writing:
            pages = self._views[at]
            ops.append(pages.k, pages.v, k[at] if every else k, v[at] if every else v, current.slots)
        # Only now: had the operator refused the tensors, there would be nothing but scratch in free pages.
        if self._open is None:
            self._pages.claim(current.step)
            self._changed(pages=bool(current.step.placed))
        current.missing -= writing
        self._open = current if current.missing else None

    def reserve(self, requests: int | Iterable[int], counts: Iterable[int]) -> Tensor:
        """Claims room for new tokens whose keys and values the caller writes: [tokens] int64 slots of `view(layer)`.

        For a model that writes many layers a step through `torch.ops.wavefill.append`, or a kernel of its own: the
        bookkeeping is done here, once. A slot is page * page_size + offset, in the order of `append`. The lengths
        count the tokens at once; `truncate` takes them back.

        requests: distinct ids.
        counts:   tokens of each request.

        Raises OutOfPages when there are fewer free pages than it takes.
        """
        ids, sizes = _ids(requests), tuple(counts)
        for i in ids:
            self._settled(i)
        _matched(ids, sizes)
        planned = self._plan(ids, sizes)
        self._pages.claim(planned.step)
        self._changed(pages=bool(planned.step.placed))
        return planned.slots

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

    # ---- inside

    def _make_views(self) -> list[KVPages]:
        heads_first = self.layout == "HND"
        with torch.inference_mode(False):
            return [
                KVPages(k.transpose(1, 2) if heads_first else k.view_as(k),
                        v.transpose(1, 2) if heads_first else v.view_as(v))
                for k, v in zip(self._k, self._v, strict=True)
            ]

    def _counts(self, ids: tuple[int, ...], tokens: int, counts: Iterable[int] | None) -> tuple[int, ...]:
        if counts is None:
            if tokens % (len(ids) or 1) or (tokens and not ids):
                raise invalid("k", f"must hold the same number of tokens for each of {len(ids)} requests",
                              f"{tokens} tokens", "Pass counts= for a ragged step.")
            sizes = (tokens // (len(ids) or 1),) * len(ids)
        else:
            sizes = tuple(counts)
            _matched(ids, sizes)
            if sum(sizes) != tokens:
                raise invalid("counts", f"must add up to the {tokens} tokens of k", sizes, "Pack k and v to match.")
        return sizes

    def _plan(self, ids: tuple[int, ...], counts: tuple[int, ...]) -> _Open:
        """Where a step's tokens go. Changes nothing but what is in free pages."""
        _distinct(ids)
        step = self._pages.plan(ids, counts)
        if step.copies:
            shared, copies = (torch.tensor(pages) for pages in zip(*step.copies, strict=True))
            for buffer in (*self._k, *self._v):
                buffer[copies] = buffer[shared]
        slots = torch.from_numpy(np.array(step.slots, np.int64))
        return _Open(step, slots, set(range(self.layers)))

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
        if not isinstance(layer, int) or not 0 <= layer < self.layers:
            raise invalid("layer", f"must be from 0 to {self.layers - 1}", repr(layer), "Count layers from 0.")


def _ids(requests: int | Iterable[int]) -> tuple[int, ...]:
    if isinstance(requests, tuple):
        return requests
    return (requests,) if isinstance(requests, int) else tuple(requests)


def _distinct(ids: tuple[int, ...]) -> None:
    if len(ids) > 1 and len(set(ids)) != len(ids):
        raise invalid("requests", "must be distinct", list(ids), "Name each request once.")


def _matched(ids: tuple[int, ...], counts: tuple[int, ...]) -> None:
    if len(counts) != len(ids) or any(not isinstance(n, int) or n < 0 for n in counts):
        raise invalid("counts", f"must be one number of tokens, 0 or more, for each of {len(ids)} requests", counts,
                      "Give them in the order of requests.")


def _tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise invalid_type(name, "must be a torch.Tensor", type(value).__name__, "Pass [tokens, KH, head size].")


def _count(name: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid_type(name, "must be an int", repr(value), f"Give a whole number from {least}.")
    if value < least:
        raise invalid(name, f"must be at least {least}", value, f"Give a whole number from {least}.")
