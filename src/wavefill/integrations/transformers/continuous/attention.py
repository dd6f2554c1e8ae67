"""Attention over a paged batch through the public functions: pages as they lie, or token slots as pages of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wavefill import api
from wavefill.integrations.transformers.continuous.contract import Batch, Decode, Ragged

#: Table entries per key that one call may spend. A table is a rectangle, so one long request beside many short ones
#: would cost requests x its length; past this, requests of like length go into calls of their own.
MAX_TABLE_WASTE = 4


@dataclass(frozen=True)
class Group:
    """Requests of a ragged batch that go into one call.

    rows:          [t] query tokens of the group, or None for the whole batch in order.
    table:         [b, width] int32 slots, or None for one request whose keys are contiguous.
    lengths, cu_q: [b] and [b + 1] int32, as the public functions take them.
    """

    rows: Tensor | None
    table: Tensor | None
    lengths: Tensor
    cu_q: Tensor
    max_q_len: int


@dataclass
class Plans:
    """What one forward pass has worked out already: its layers of one kind share lengths and slots.

    Each entry holds the tensors it was made from, so that an identity in a key stays theirs.
    """

    made: dict[tuple[int, int], tuple[Ragged, list[Group]]] = field(default_factory=dict)

    def groups(self, batch: Ragged) -> list[Group]:
        """The calls for a ragged batch."""
        key = (id(batch.cu_k), id(batch.slots))
        if key not in self.made:
            self.made[key] = (batch, _groups(batch))
        return self.made[key][1]


def run(batch: Batch, q: Tensor, plans: Plans, **options: Any) -> Tensor:
    """Attention of one layer over a paged batch, [1, T, HQ, DV].

    q: [1, HQ, T, D]. options: scale, window, softcap, sinks.
    """
    queries = q[0].transpose(0, 1)
    if isinstance(batch, Decode):
        return _decode(batch, queries, options).unsqueeze(0)
    return _ragged(batch, queries, plans.groups(batch), options).unsqueeze(0)


def _decode(batch: Decode, q: Tensor, options: dict[str, Any]) -> Tensor:
    # A row that pads the batch has a length of 0 or less, or no first page.
    lengths = batch.lengths.clamp(min=0) * (batch.table[:, 0] >= 0)
    rows = torch.nonzero(lengths).flatten()
    last = lengths[rows].long() - 1
    page_size = batch.k_pages.shape[1]
    pages, offsets = batch.table[rows, last // page_size].long(), last % page_size
    batch.k_pages[pages, offsets] = batch.k[rows]
    batch.v_pages[pages, offsets] = batch.v[rows]
    out: Tensor = api.decode_attention(q, batch.k_pages, batch.v_pages, lengths, batch.table, **options)
    return out


def _ragged(batch: Ragged, q: Tensor, groups: list[Group], options: dict[str, Any]) -> Tensor:
    out = q.new_zeros(*q.shape[:2], batch.v.shape[-1])
    for group in groups:
        # Slots are pages of one token: [slots, 1, KH, D]. Contiguous keys of one request: [1, N, KH, D].
        k, v = (x[None] if group.table is None else x.unsqueeze(1) for x in (batch.k, batch.v))
        part = q if group.rows is None else q[group.rows]
        result: Tensor = api.attention(part, k, v, group.lengths, group.table, cu_seqlens_q=group.cu_q,
                               max_q_len=group.max_q_len, **options)
        if group.rows is None:
            return result
        out[group.rows] = result
    return out


def _groups(batch: Ragged) -> list[Group]:
    starts_q, starts_k = batch.cu_q.long(), batch.cu_k.long()
    lengths_q, lengths_k = torch.diff(starts_q), torch.diff(starts_k)
    everyone = torch.arange(len(lengths_k), device=lengths_k.device)
    width, total = int(lengths_k.max()), int(lengths_k.sum())
    if len(lengths_k) == 1 and batch.slots is None:
        return [Group(None, None, lengths_k.int(), starts_q.int(), int(lengths_q[0]))]
    if len(lengths_k) * width <= MAX_TABLE_WASTE * total:
        classes = [everyone]
    else:
        # Lengths of one class differ by less than a factor of two, so its table is less than half empty.
        exponents = torch.log2(lengths_k.clamp(min=1).double()).long()
        classes = [everyone[(exponents == e) & (lengths_q > 0)] for e in sorted(set(exponents.tolist()))]
    return [_group(batch, members, starts_q, starts_k, whole=members is everyone)
            for members in classes if len(members)]


def _group(batch: Ragged, members: Tensor, starts_q: Tensor, starts_k: Tensor, *, whole: bool) -> Group:
    lengths_q, lengths_k = torch.diff(starts_q)[members], torch.diff(starts_k)[members]
    cu_q = torch.cat([lengths_q.new_zeros(1), lengths_q.cumsum(0)])
    keys = starts_k[members, None] + torch.arange(int(lengths_k.max()), device=starts_k.device)
    keys = keys.clamp(max=max(int(starts_k[-1]) - 1, 0))  # entries past a request's end are not read, but must exist
    table = keys if batch.slots is None else batch.slots[keys]
    rows = None
    if not whole:
        owner = torch.repeat_interleave(torch.arange(len(members), device=starts_q.device), lengths_q)
        rows = starts_q[members][owner] + torch.arange(len(owner), device=starts_q.device) - cu_q[owner]
    return Group(rows, table.int(), lengths_k.int(), cu_q.int(), int(lengths_q.max()))
