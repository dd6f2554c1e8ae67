"""Attention over a paged batch: pages as they lie, by tables that are made on the device once for each forward pass.

Nothing here reads a value of a tensor on a GPU: what is launched depends on sizes and on the bounds that transformers
has on the host, so a forward pass can be captured in a CUDA graph, and lengths are those of the replay.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wavefill.cache import KVPages
from wavefill.integrations.transformers import kernels
from wavefill.integrations.transformers.continuous.contract import Batch, Decode, Ragged, lengths_of
from wavefill.scores import Options

#: On the CPU, table entries per page of keys that one call may spend. A table is a rectangle, so one long request
#: beside many short ones would cost requests x its length; past this, requests of like length go into calls of their
#: own.
MAX_TABLE_WASTE = 4


@dataclass(frozen=True)
class Group:
    """Requests of a ragged batch that go into one call.

    rows:          [t] query tokens of the group, or None for the whole batch in order.
    table:         [b, width] int32 pages, or None for one request whose keys are contiguous.
    lengths, cu_q: [b] and [b + 1] int32, as the kernels take them.
    max_q_len:     most query tokens of a request, or an upper bound of it.
    """

    rows: Tensor | None
    table: Tensor | None
    lengths: Tensor
    cu_q: Tensor
    max_q_len: int


@dataclass
class Plans:
    """What one forward pass has worked out already: its layers of one kind share lengths, slots and tables.

    Each entry holds the batch that it was made from, so that the addresses in its key stay those of its tensors.
    """

    groups_made: dict[tuple[int, int], tuple[Ragged, list[Group]]] = field(default_factory=dict)
    slots_made: dict[tuple[int, int], tuple[Decode, Tensor, Tensor]] = field(default_factory=dict)

    def groups(self, batch: Ragged) -> list[Group]:
        """The calls for a ragged batch."""
        key = batch.cu_k.data_ptr(), 0 if batch.slots is None else batch.slots.data_ptr()
        if key not in self.groups_made:
            self.groups_made[key] = (batch, _groups(batch))
        return self.groups_made[key][1]

    def slots(self, batch: Decode) -> tuple[Tensor, Tensor]:
        """Keys [B] int32 of each request, 0 in a padded row, and the slot [B] int64 of the new one, there -1."""
        key = batch.cu_k.data_ptr(), batch.table.data_ptr()
        if key not in self.slots_made:
            lengths = lengths_of(batch.cu_k)
            self.slots_made[key] = (batch, *new_slots(lengths, batch.table, batch.k_pages.shape[1]))
        return self.slots_made[key][1:]


def run(batch: Batch, q: Tensor, plans: Plans, *, scale: float, window: int | None, options: Options) -> Tensor:
    """Attention of one layer over a paged batch, [1, T, HQ, DV]; query tokens of no request get 0.

    q: [1, HQ, T, D]. options: soft cap and sinks.
    """
    queries, scores = q[0].transpose(0, 1), {"scale": scale, "window": window, "options": options}
    if isinstance(batch, Decode):
        return _decode(batch, queries, plans, scores).unsqueeze(0)
    return _ragged(batch, queries, plans.groups(batch), scores).unsqueeze(0)


def _decode(batch: Decode, q: Tensor, plans: Plans, scores: dict[str, Any]) -> Tensor:
    pages, (lengths, slots) = KVPages(batch.k_pages, batch.v_pages), plans.slots(batch)
    kernels.append(pages, batch.k, batch.v, slots)
    return kernels.attention(q, pages, lengths, batch.table, None, max_q_len=1, **scores)


def new_slots(lengths: Tensor, table: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """What `Plans.slots` gives, from keys [B] int32 that count the new one and pages [B, width] int32 of each request.
    """
    # A row that pads the batch has a length of 0 or less, or no first page.
    lengths = lengths.clamp(min=0) * (table[:, 0] >= 0)
    last = (lengths - 1).clamp_(min=0).long()
    pages = table.gather(1, (last // page_size)[:, None])[:, 0].long()
    return lengths, torch.where(lengths > 0, pages * page_size + last % page_size, -1)


def _ragged(batch: Ragged, q: Tensor, groups: list[Group], scores: dict[str, Any]) -> Tensor:
    paged = KVPages(batch.k, batch.v)

    def compute(group: Group, part: Tensor) -> Tensor:
        # Contiguous keys of one request: [1, N, KH, D].
        pages = KVPages(*(x.transpose(0, 1) for x in (batch.k, batch.v))) if group.table is None else paged
        return kernels.attention(part, pages, group.lengths, group.table, group.cu_q, max_q_len=group.max_q_len,
                                 **scores)

    if len(groups) == 1 and groups[0].rows is None:
        return compute(groups[0], q)
    out = q.new_zeros(*q.shape[:2], batch.v.shape[-1])
    for group in groups:
        out[group.rows] = compute(group, q[group.rows])
    return out


def _groups(batch: Ragged) -> list[Group]:
    lengths, cu_q, page_size = lengths_of(batch.cu_k), batch.cu_q.int(), batch.k.shape[1]
    if len(lengths) == 1 and batch.slots is None:
        return [Group(None, None, lengths, cu_q, batch.most_q)]
    columns = max(-(-batch.most_k // page_size), 1)
    if _wastes(lengths, columns, page_size):
        return _classes(batch, lengths)
    return [Group(None, _table(batch, batch.cu_k[:-1], columns), lengths, cu_q, batch.most_q)]


def _wastes(lengths: Tensor, columns: int, page_size: int) -> bool:
    """Whether one table is too sparse. On a GPU, where asking would wait, it is not: pages there are large."""
    return lengths.device.type == "cpu" and (
        len(lengths) * columns > MAX_TABLE_WASTE * int((-(lengths // -page_size)).sum()))


def _classes(batch: Ragged, lengths: Tensor) -> list[Group]:
    # Lengths of one class differ by less than a factor of two, so its table is less than half empty.
    starts_q, page_size = batch.cu_q.long(), batch.k.shape[1]
    lengths_q, exponents = torch.diff(starts_q), torch.log2(lengths.clamp(min=1).double()).long()
    groups = []
    for exponent in sorted(set(exponents.tolist())):
        members = torch.nonzero((exponents == exponent) & (lengths_q > 0)).flatten()
        if not len(members):
            continue
        mine, queries = lengths[members], lengths_q[members]
        cu_q = torch.cat([queries.new_zeros(1), queries.cumsum(0)])
        owner = torch.repeat_interleave(torch.arange(len(members)), queries)
        rows = starts_q[members][owner] + torch.arange(len(owner)) - cu_q[owner]
        table = _table(batch, batch.cu_k[members], max(-(-int(mine.max()) // page_size), 1))
        groups.append(Group(rows, table, mine, cu_q.int(), int(queries.max())))
    return groups


def _table(batch: Ragged, starts: Tensor, columns: int) -> Tensor:
    """Pages [b, columns] int32 of the requests whose keys begin at `starts` [b]: each begins with a whole page."""
    page_size, keys = batch.k.shape[1], batch.k.shape[0] if batch.slots is None else len(batch.slots)
    first = starts[:, None].int() + torch.arange(0, columns * page_size, page_size, dtype=torch.int32,
                                                 device=starts.device)
    first.clamp_(max=keys - 1)  # entries past a request's end are not read, but must exist
    return first if batch.slots is None else (batch.slots[first.long()] // page_size).int()
