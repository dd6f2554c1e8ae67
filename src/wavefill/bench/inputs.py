"""Inputs of a suite's row: random KV in as many copies as keep every cache cold, for wavefill and for its peers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wavefill.bench.suites import Row
from wavefill.bench.timing import copies
from wavefill.spec import invalid

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAYOUTS = ("paged", "contiguous")
ORDERS = ("HND", "NHD")


@dataclass(frozen=True)
class Copy:
    """One copy of a row's KV.

    k, v: [pages, page_size, KH, D] or [B, S, KH, D].
    peer: per request (k, v), each [1, KH, len, D] and contiguous, the layout that PyTorch reads fastest; a batch of
          equal lengths has one entry, [B, KH, len, D].
    """

    k: Tensor
    v: Tensor
    peer: list[tuple[Tensor, Tensor]]

    def spans(self, lens: Tensor, block_table: Tensor | None) -> list[Tensor]:
        """The contiguous memory that holds the row's KV, and nothing else."""
        if block_table is not None:
            return [self.k, self.v]
        requests = [cache[b, :n] for b, n in enumerate(lens.tolist()) for cache in (self.k, self.v)]
        return [part for span in requests for part in ([span] if span.is_contiguous() else span.unbind(1))]


@dataclass(frozen=True)
class Inputs:
    """What the variants of one row are called with.

    q: [B, HQ, D]; lens: [B] int32; block_table: [B, max_pages] int32 or None for contiguous KV.
    even: a block table and lengths of a batch that reads the same pages with equal lengths (to one page, where the
          pages cannot be shared out evenly), for a paged ragged row.
    """

    row: Row
    q: Tensor
    lens: Tensor
    block_table: Tensor | None
    copies: list[Copy]
    even: tuple[Tensor, Tensor] | None


def build(
    row: Row,
    dtype: str,
    layout: str,
    page_size: int,
    *,
    order: str = "HND",
    peers: bool,
    device: str = "cpu",
    count: int | None = None,
    seed: int = 0,
) -> Inputs:
    """Random inputs of `row`: q, K and V from a normal distribution, pages in a random order.

    order: "HND", the tokens of one KV head side by side in each page, as in `PagedKVCache`; or "NHD", the heads of one
           token side by side.
    peers: lay out copies for the peers as well, which takes as much memory again.
    count: copies to make; None makes as many as `timing.copies` asks for on a CPU.
    """
    if layout not in LAYOUTS:
        raise invalid("layout", f"must be one of {', '.join(LAYOUTS)}", repr(layout), "Use one of these.")
    if dtype not in DTYPES:
        raise invalid("dtype", f"must be one of {', '.join(DTYPES)}", repr(dtype), "Use one of these.")
    if order not in ORDERS:
        raise invalid("order", f"must be one of {', '.join(ORDERS)}", repr(order), "Use one of these.")
    if page_size < 1:
        raise invalid("page_size", "must be at least 1", page_size, "Give a whole number from 1.")
    generator = torch.Generator().manual_seed(seed)
    noise = generator if device == "cpu" else torch.Generator(device).manual_seed(seed)
    kind, lens = DTYPES[dtype], torch.tensor(row.lens, dtype=torch.int32, device=device)
    table = _block_table(row.lens, page_size, generator).to(device) if layout == "paged" else None
    shape = ((sum(-(-n // page_size) for n in row.lens), page_size) if layout == "paged"
             else (len(row.lens), max(row.lens)))
    made: list[Copy] = []
    for _ in range(copies(row.kv_bytes(dtype)) if count is None else count):
        # Not zeroed: slots past a request's end in a contiguous cache take no memory as long as nobody reads them.
        k, v = (_storage(shape, row, kind, order, device) for _ in range(2))
        copy = Copy(k, v, [])
        for i, span in enumerate(copy.spans(lens, table)):
            if made:
                span.copy_(made[0].spans(lens, table)[i])
            else:
                span.normal_(generator=noise)
        if peers:
            copy.peer.extend(_peer_layout(row, copy, table) if not made else
                             [(k.clone(), v.clone()) for k, v in made[0].peer])
        made.append(copy)
    q = torch.randn(len(row.lens), row.HQ, row.D, generator=generator).to(device, kind)
    return Inputs(row, q, lens, table, made, _even(row, table, page_size))


def _storage(shape: tuple[int, int], row: Row, dtype: torch.dtype, order: str, device: str) -> Tensor:
    blocks, tokens = shape
    if order == "HND":
        return torch.empty(blocks, row.KH, tokens, row.D, dtype=dtype, device=device).transpose(1, 2)
    return torch.empty(blocks, tokens, row.KH, row.D, dtype=dtype, device=device)


def _block_table(lens: tuple[int, ...], page_size: int, generator: torch.Generator) -> Tensor:
    counts = [-(-n // page_size) for n in lens]
    order = torch.randperm(sum(counts), generator=generator, dtype=torch.int64).to(torch.int32)
    table = torch.full((len(lens), max(counts)), -1, dtype=torch.int32)  # slots past the end are never read
    for b, pages in enumerate(torch.split(order, counts)):
        table[b, :len(pages)] = pages
    return table


def _even(row: Row, table: Tensor | None, page_size: int) -> tuple[Tensor, Tensor] | None:
    if table is None or not row.ragged or any(n % page_size for n in row.lens):
        return None
    pages = table[table >= 0]
    least, rest = divmod(len(pages), len(row.lens))
    counts = [least + (b < rest) for b in range(len(row.lens))]
    even = table.new_full((len(counts), max(counts)), -1)
    for b, part in enumerate(torch.split(pages, counts)):
        even[b, :len(part)] = part
    return even, torch.tensor(counts, dtype=torch.int32, device=table.device) * page_size


def _peer_layout(row: Row, copy: Copy, table: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    def request(cache: Tensor, b: int, n: int) -> Tensor:
        if table is None:
            return cache[b, :n]
        return cache[table[b, :-(-n // cache.shape[1])].long()].flatten(0, 1)[:n]

    pairs = [tuple(request(cache, b, n).transpose(0, 1).unsqueeze(0).contiguous() for cache in (copy.k, copy.v))
             for b, n in enumerate(row.lens)]
    if row.ragged:
        return [(k, v) for k, v in pairs]
    return [(torch.cat([k for k, _ in pairs]), torch.cat([v for _, v in pairs]))]
