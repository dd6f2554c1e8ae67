"""Who holds which page: requests, reference counts, and the plan of a step. Plain bookkeeping, no tensors.

A request of n tokens holds ceil(n / page_size) pages. Forks share pages; a page counts its holders and is free when
none is left. A step is planned first and claimed after its tokens were written, so a refused step changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from numbers import Integral
from typing import Any

import numpy as np

from wavefill.spec import MAX_LENGTH, OutOfPages, complaint, invalid, invalid_type

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
        # Pages given back, taken again from the end; behind them come those never taken, from `fresh` up.
        self.returned: list[int] = []
        self.fresh = 0
        self.requests: dict[int, Request] = {}
        self._next_id = 0

    @property
    def free(self) -> int:
        """Pages that no request holds."""
        return len(self.returned) + len(self.refs) - self.fresh

    def get(self, request: int) -> Request:
        if type(request) is not int:
            (request,) = _numbers("request", (request,), "Pass an id that add, fork or reorder gave out.")
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
        self.returned.extend(pages[self.refs[pages] == 0][::-1].tolist())
        held.used, held.length = keep, length

    def remove(self, request: int) -> None:
        self.crop(self.requests.pop(request), 0)

    def grow(self, num_pages: int) -> None:
        """Adds free pages behind those there are, to be taken last."""
        self.refs = np.concatenate([self.refs, np.zeros(num_pages - len(self.refs), np.int32)])

    def restore(self, lengths: Mapping[int, int]) -> None:
        """Back to the requests of `lengths`, each cut to its length; all others are removed.

        Holders are counted anew, so it doesn't matter how far an interrupted call had come: at every point of `claim`
        and `crop` a request's own pages hold the tokens that it keeps.
        """
        requests = {i: held for i, held in self.requests.items() if i in lengths}
        refs = np.zeros_like(self.refs)
        for i, held in requests.items():
            held.used, held.length = -(-lengths[i] // self.page_size), lengths[i]
            refs[held.pages[: held.used]] += 1
        self.requests, self.refs = requests, refs
        self.returned = np.flatnonzero(refs[: self.fresh] == 0)[::-1].tolist()

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
        this step too. Raises OutOfPages, after a look at each request and none at its tokens.
        """
        P, needed = self.page_size, 0
        step = Step(requests, counts)
        replaced: dict[int, int] = {}
        # (request, tokens, its last page unless it is full, whether that one is copied, pages to take)
        spans: list[tuple[Request, int, int, bool, int]] = []
        for i, count in zip(requests, counts, strict=True):
            held = self.get(i)
            if not count:
                continue
            before, length = held.length, held.length + count
            if length > MAX_LENGTH:
                raise invalid("counts", f"must leave a request with at most {MAX_LENGTH} tokens", f"{length} for {i}",
                              "Lengths are int32; split the request.")
            page, copy, take = -1, False, -(-length // P) - -(-before // P)
            if before % P:
                page = int(held.pages[before // P])
                if self.refs[page] - replaced.get(page, 0) > 1:
                    replaced[page] = replaced.get(page, 0) + 1
                    copy = True
                    take += 1
            needed += take
            spans.append((held, count, page, copy, take))
        if needed > self.free:
            raise OutOfPages(complaint(
                "requests", f"this append needs {needed} free pages of {P} tokens",
                f"{self.free} free of {len(self.refs)}",
                f"Free or truncate requests, or call grow({len(self.refs) + needed - self.free}). Nothing was changed.",
            ))
        upcoming = iter(self._upcoming(needed))
        for held, count, page, copy, take in spans:
            first, offset = divmod(held.length, P)
            pages = [page] if offset else []
            if take:
                taken = list(islice(upcoming, take))
                if copy:
                    step.copies.append((page, taken[0]))
                    pages = []
                step.placed += [(held, index, new) for index, new in enumerate(taken, first + len(pages))]
                pages += taken
            if count == 1:
                step.slots.append(pages[0] * P + offset)
            else:
                at, inside = np.divmod(np.arange(offset, offset + count), P)
                step.slots.extend((np.array(pages, np.int64)[at] * P + inside).tolist())
        return step

    def _upcoming(self, number: int) -> list[int]:
        """The free pages that are taken next, in order."""
        pages = self.returned[: -number - 1 : -1]
        pages += range(self.fresh, self.fresh + number - len(pages))
        return pages

    def claim(self, step: Step) -> None:
        """Makes the step that was planned last real."""
        if step.placed:
            again = min(len(step.placed), len(self.returned))
            self.fresh += len(step.placed) - again
            del self.returned[len(self.returned) - again :]
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


# ---- what callers pass

def ids_of(requests: int | Iterable[int]) -> tuple[int, ...]:
    """One id or a sequence of them."""
    if type(requests) is int:
        return (requests,)
    return _numbers("requests", requests, "Pass an id that add, fork or reorder gave out, or a sequence of ids.")


def distinct(ids: tuple[int, ...]) -> None:
    """Raises where a request is named twice."""
    if len(ids) > 1 and len(set(ids)) != len(ids):
        raise invalid("requests", "must be distinct", list(ids), "Name each request once.")


def sizes_of(counts: Iterable[int], ids: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers of tokens, one for each of `ids`."""
    sizes = _numbers("counts", counts, "Give a number of tokens for each request.")
    if len(sizes) != len(ids) or (sizes and min(sizes) < 0):
        raise invalid("counts", f"must be one number of tokens, 0 or more, for each of {len(ids)} requests", sizes,
                      "Give them in the order of requests.")
    return sizes


def picks_of(name: str, index: Iterable[int], number: int) -> tuple[int, ...]:
    """Positions, each from 0 to number - 1."""
    picks = _numbers(name, index, "It picks by position.")
    for pick in picks:
        if not 0 <= pick < number:
            rule = f"must hold numbers from 0 to {number - 1}" if number else "must be empty, as there are none to pick"
            raise invalid(name, rule, pick, "It picks by position.")
    return picks


def _numbers(name: str, values: Any, next_step: str) -> tuple[int, ...]:
    """A sequence of whole numbers, of arrays and tensors too, as plain ints. Bools are none: they would be a mask."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, Iterable):
        raise invalid_type(name, "must be a sequence of whole numbers", repr(values), next_step)
    found = tuple(values)
    if set(map(type, found)) <= {int}:
        return found
    for value in found:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise invalid_type(name, "must hold whole numbers", repr(value), next_step)
    return tuple(map(int, found))
