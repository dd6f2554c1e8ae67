"""Pages that one cache of a decoder leaves to the next: graphs of its decoding steps hold their addresses."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch

from wavefill.cache import PagedKVCache
from wavefill.integrations.transformers.ahead import Begun


class Storage:
    """Pages that a decoder's next cache may have: those of the last of its caches that is no more."""

    def __init__(self) -> None:
        self._free: PagedKVCache | None = None
        self._stream: torch.cuda.Stream | None = None
        #: The last step begun ahead on each.
        self.begun: WeakKeyDictionary[PagedKVCache, Begun] = WeakKeyDictionary()

    def pages_for(self, rows: object, **sizes: Any) -> PagedKVCache:
        """Pages for `rows`, with no request in them; `sizes` as `PagedKVCache` takes them, but their number."""
        pages, self._free = self._free, None
        if pages is None or any(getattr(pages, name) != value for name, value in sizes.items()):
            pages = PagedKVCache(0, **sizes)
        finalize(rows, self._take_back, pages).atexit = False
        stream = torch.cuda.current_stream(pages.device)
        if self._stream not in (None, stream):
            stream.wait_stream(self._stream)  # on which the last cache may still be read
        self._stream = stream
        return pages

    def _take_back(self, pages: PagedKVCache) -> None:
        if (begun := self.begun.pop(pages, None)) is not None:
            begun.join()
        pages.restore({})
        if self._free is None or self._free.num_pages <= pages.num_pages:
            self._free = pages
