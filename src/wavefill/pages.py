"""Who holds which page: requests, reference counts, and the plan of a step. Plain bookkeeping, no tensors.

A request of n tokens holds ceil(n / page_size) pages. Forks share pages; a page counts its holders and is free when
none is left. A step is planned first and claimed after its tokens were written, so a refused step changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wavefill.spec import OutOfPages, complaint, invalid

Ints = np.ndarray[Any, np.dtype[np.int32]]


class Request:
    """Pages of one request: the first `used` of `pages` hold its `length` tokens."""

    __slots__ = ("length", "pages", "used")

    def __init__(self, pages: Ints, used: int, length: int) -> None:
        self.pages, self.used, self.length = pages, used, length

    def place(self, index: int, page: int) -> None:
        """Makes `page` the index-th page; index is at most `used`."""
        if index >= len(self.pages):
            wider = np.empty(max(8, 2 * index), np.int32)
            wider[: self.used] = self.pages[: self.used]
            self.pages = wider
        self.pages[index] = page
        self.used = max(self.used, index + 1)


@dataclass
class Step:
    """New tokens of several requests.

    placed: (request, index, page) of every page that the step adds or replaces, in the order they are taken.
    copies: (shared page, its copy) of every page that must be copied before it is written.
    slots:  page * page_size + offset of each token.
    """

    requests: tuple[int, ...]
    counts: tuple[int, ...]
    placed: list[tuple[Request, int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)


class Pages:
    """Reference-counted pages and the requests that hold them."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.refs = np.zeros(num_pages, np.int32)
        self.free = list(range(num_pages - 1, -1, -1))
        self.requests: dict[int, Request] = {}
        self._next_id = 0

    def get(self, request: int) -> Request:
        held = self.requests.get(request)
        if held is None:
            raise invalid("request", "must be an id that add, fork or reorder gave out and that is not freed",
                          repr(request), f"{len(self.requests)} requests are held; see .requests.")
        return held

    def new(self) -> int:
        """The id of a new request without tokens. Ids are never used twice."""
        return self._enter(Request(np.empty(0, np.int32), 0, 0))

    def fork(self, request: int) -> int:
        """The id of a new request that shares all pages of `request`."""
        parent = self.get(request)
        pages = parent.pages[: parent.used].copy()
        self.refs[pages] += 1
        return self._enter(Request(pages, parent.used, parent.length))

    def crop(self, held: Request, length: int) -> None:
        """Drops the tokens past `length`, and the pages that held none but them."""
        keep = -(-length // self.page_size)
        pages = held.pages[keep : held.used]
        self.refs[pages] -= 1
        # The last page first, so that whoever takes them next gets them in the order they had.
        self.free.extend(pages[self.refs[pages] == 0][::-1].tolist())
        held.used, held.length = keep, length

    def remove(self, request: int) -> None:
        self.crop(self.requests.pop(request), 0)

    def grow(self, num_pages: int) -> None:
        """Adds free pages behind those there are, to be taken last."""
        before = len(self.refs)
        self.refs = np.concatenate([self.refs, np.zeros(num_pages - before, np.int32)])
        self.free[:0] = range(num_pages - 1, before - 1, -1)

    def table(self, requests: Iterable[int]) -> Ints:
        """[B, most pages] page ids, -1 past a request's last page; at least one column."""
        rows = [self.get(i) for i in requests]
        table = np.full((len(rows), max((r.used for r in rows), default=0) or 1), -1, np.int32)
        for row, held in zip(table, rows, strict=True):
            row[: held.used] = held.pages[: held.used]
        return table

    def plan(self, requests: tuple[int, ...], counts: tuple[int, ...]) -> Step:
        """Pages and slots for counts[i] more tokens of requests[i]; changes nothing.

        A page that is not full and has other holders is replaced by a copy, unless all the others are replaced in
        this step too. Raises OutOfPages.
        """
        step = Step(requests, counts)
        P, free = self.page_size, self.free
        available, taken = len(free), 0
        replaced: dict[int, int] = {}
        for i, count in zip(requests, counts, strict=True):
            held = self.get(i)
            if not count:
                continue
            first, offset = divmod(held.length, P)
            pages = []
            if offset:
                page = int(held.pages[first])
                others = int(self.refs[page]) - 1 - replaced.get(page, 0)
                if others:
                    replaced[page] = replaced.get(page, 0) + 1
                    taken += 1
                    copy = free[-taken] if taken <= available else -1
                    step.copies.append((page, copy))
                    step.placed.append((held, first, copy))
                    page = copy
                pages.append(page)
            for index in range(first + len(pages), (held.length + count - 1) // P + 1):
                taken += 1
                page = free[-taken] if taken <= available else -1
                step.placed.append((held, index, page))
                pages.append(page)
            if count == 1:
                step.slots.append(pages[0] * P + offset)
            else:
                slots = np.add.outer(np.array(pages, np.int64) * P, np.arange(P)).ravel()
                step.slots.extend(slots[offset : offset + count].tolist())
        if taken > available:
            raise OutOfPages(complaint(
                "requests", f"this append needs {taken} free pages of {P} tokens",
                f"{available} free of {len(self.refs)}",
                f"Free or truncate requests, or call grow({len(self.refs) + taken - available}). Nothing was changed.",
            ))
        return step

    def claim(self, step: Step) -> None:
        """Makes the step that was planned last real."""
        if step.placed:
            del self.free[len(self.free) - len(step.placed) :]
            self.refs[[page for _, _, page in step.placed]] = 1
            for shared, _ in step.copies:
                self.refs[shared] -= 1
            for held, index, page in step.placed:
                held.place(index, page)
        for i, count in zip(step.requests, step.counts, strict=True):
            self.requests[i].length += count

    def _enter(self, held: Request) -> int:
        i = self._next_id
        self._next_id += 1
        self.requests[i] = held
        return i
