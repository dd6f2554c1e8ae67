"""The rows of one cache: which slots of each hold real tokens, the pages they sit in, and the step in progress.

transformers counts *slots*: every row of a batch has as many, padding included. Only real tokens are stored: a row's
tokens lie packed in its pages, in order, so its length is its own. What the two views have in common is the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from wavefill.cache import PagedKVCache
from wavefill.integrations.transformers import kernels
from wavefill.spec import invalid

#: A pool that is full grows to this many times what is needed, so that the copies add up to a constant a token.
GROWTH = 1.5


@dataclass(eq=False)
class Step:
    """One forward of one decoder over one cache: made once, read by every layer.

    rows:   the cache's rows.
    config: the decoder's configuration, by which the mask function knows the step to be its own.
    batch, q_len: the shape of the new tokens.
    past:   slots before this step.
    mask:   bool [batch, past + q_len], true for real tokens, or None when all are.
    held:   real tokens of each row before this step.
    """

    rows: Rows
    config: Any
    batch: int
    q_len: int
    past: int
    mask: Tensor | None
    held: list[int]

    def __post_init__(self) -> None:
        self.written = 0
        self.slots: Tensor | None = None

    @cached_property
    def seq_lens(self) -> Tensor:
        """int32 [batch], tokens of each row with the new ones; there once a layer has written."""
        return self.rows.pages.seq_lens(self.rows.ids)

    @cached_property
    def block_table(self) -> Tensor:
        """int32 [batch, pages], the pages of each row; there once a layer has written."""
        return self.rows.pages.block_table(self.rows.ids)

    @cached_property
    def new(self) -> Tensor | None:
        """bool [batch, q_len], true for the real ones of the new tokens, or None when all are."""
        if self.mask is None:
            return None
        new = self.mask[:, self.past:]
        return None if bool(new.all()) else new

    @cached_property
    def index(self) -> Tensor | None:
        """int64 [real new tokens], their positions in the flattened [batch * q_len], or None when all are real."""
        return None if self.new is None else self.new.flatten().nonzero().squeeze(1)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Real new tokens of each row."""
        return (self.q_len,) * self.batch if self.new is None else tuple(self.new.sum(1).tolist())

    @cached_property
    def cu_seqlens_q(self) -> Tensor:
        """int32 [batch + 1], where each row's real new tokens start."""
        bounds = torch.zeros(self.batch + 1, dtype=torch.int32)
        torch.cumsum(torch.tensor(self.counts, dtype=torch.int32), 0, out=bounds[1:])
        return bounds

    @cached_property
    def has_hole(self) -> bool:
        """Whether a row has padding between real tokens, so that slots and packed tokens are differently far apart."""
        if self.mask is None:
            return False
        order = torch.arange(1, self.mask.shape[1] + 1) * self.mask
        last = order.amax(1)
        first = torch.where(self.mask, order, self.mask.shape[1] + 1).amin(1)
        real = self.mask.sum(1)
        return bool(((real > 0) & (last - first + 1 != real)).any())

    @cached_property
    def has_late_padding(self) -> bool:
        """Whether a new token that is padding has real ones before it in its row, which its query attends."""
        if self.mask is None or self.new is None:
            return False
        return bool((self.mask.cumsum(1)[:, self.past:] * ~self.new).any())

    @cached_property
    def is_prefill(self) -> bool:
        """Whether no row held a token before this step, so that the new K and V are all there is."""
        return not any(self.held)

    @cached_property
    def is_decode(self) -> bool:
        """Whether every row has exactly one new token, a real one."""
        return self.q_len == 1 and self.new is None


class Rows:
    """Rows of a cache of `layers` layers."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.slots = 0
        self._mask: Tensor | None = None
        self.ids: tuple[int, ...] = ()
        self._pages: PagedKVCache | None = None

    @property
    def batch(self) -> int:
        """Rows, or 0 before the first step."""
        return len(self.ids)

    @property
    def pages(self) -> PagedKVCache:
        """The paged storage; there is one from the first step on."""
        assert self._pages is not None
        return self._pages

    # -- the steps ----------------------------------------------------------------------------------------------

    def begin(self, batch: int, q_len: int, attention_mask: Tensor | None, config: Any) -> Step:
        """The step that adds `q_len` slots to each of `batch` rows; nothing is changed before the first layer writes.

        attention_mask: [batch, slots so far + q_len], nonzero for real tokens, or None when all are. Cached tokens
                        that it no longer has are dropped.
        Raises `InvalidArgument` for a batch or a mask that doesn't continue what the cache holds.
        """
        if self.ids and batch != self.batch:
            if self.slots:
                raise invalid("input_ids", f"must have the {self.batch} rows of the cache", batch,
                              "Start a new cache, or call its batch_repeat_interleave or batch_select_indices.")
            self.reset()
        mask = self._continued(batch, q_len, attention_mask)
        return Step(self, config, batch, q_len, self.slots, mask, self._held(batch))

    def _held(self, batch: int) -> list[int]:
        if not self.slots:
            return [0] * batch
        return [self.pages.length(row) for row in self.ids]

    def _continued(self, batch: int, q_len: int, attention_mask: Tensor | None) -> Tensor | None:
        """The mask over all slots with the new ones, checked against the padding that the cache was filled with."""
        if attention_mask is None:
            if self._mask is not None:
                raise invalid("attention_mask", "must be given, since rows of the cache have padding", None,
                              "Pass [batch, all tokens so far], 0 for padding.")
            return None
        total = self.slots + q_len
        shape = tuple(attention_mask.shape)
        if len(shape) != 2 or shape[0] != batch or shape[1] < total:
            raise invalid("attention_mask", f"must be [{batch}, {total}], the cached tokens included", list(shape),
                          "Extend it by ones for the new tokens, or leave it out when there is no padding.")
        mask = attention_mask[:, :total].to(torch.bool)
        if self._mask is None and bool(mask.all()):
            return None
        past = mask[:, :self.slots]
        if self._mask is not None and bool((past & ~self._mask).any()):
            raise invalid("attention_mask", "must be 0 where the cache was filled with padding",
                          "1 for some of it", "Start a new cache for another mask.")
        if not (bool(past.all()) if self._mask is None else torch.equal(past, self._mask)):
            self._forget(past)
        return mask

    def write(self, step: Step, layer: int, key: Tensor, value: Tensor) -> None:
        """Write a layer's new K [batch, KH, q_len, D] and V [batch, KH, q_len, DV]; the last layer ends the step."""
        if step.slots is None:
            step.slots = self._reserve(step, key, value)
        kernels.append(self.pages.view(layer), _packed(step, key), _packed(step, value), step.slots)
        step.written += 1
        if step.written == self.layers:
            self.slots += step.q_len
            self._mask = step.mask

    def _reserve(self, step: Step, key: Tensor, value: Tensor) -> Tensor:
        """Slots for the step's real tokens, at the first layer, when sizes and dtype are known."""
        if key.device.type != "cpu":
            raise invalid("model", "must be on the CPU in this version", key.device, "Call model.to('cpu').")
        if self._pages is None:
            self._pages = PagedKVCache(
                0, layers=self.layers, kv_heads=key.shape[1], head_dim=key.shape[3], head_dim_v=value.shape[3],
                dtype=key.dtype,
            )
        if not self.ids:
            self.ids = tuple(self._pages.add(step.batch))
        self._make_room(step.held, step.counts)
        return self._pages.reserve(self.ids, step.counts)

    def _make_room(self, held: Sequence[int], counts: Sequence[int]) -> None:
        """Free pages for `counts` more tokens in rows that hold `held`."""
        # A row takes a page more when its part-filled last page is shared and has to be copied.
        size = self.pages.page_size
        need = sum(-(-(n + count) // size) - n // size for n, count in zip(held, counts, strict=True))
        if need > self.pages.free_pages:
            used = self.pages.num_pages - self.pages.free_pages
            self.pages.grow(int((used + need) * GROWTH) + 1)

    def rollback(self, step: Step) -> None:
        """Undo a step whose forward failed on the way, so that the cache is as before it."""
        if step.slots is not None and step.written < self.layers:
            for row, held in zip(self.ids, step.held, strict=True):
                self.pages.truncate(row, held)

    # -- what generate does to a batch --------------------------------------------------------------------------

    def crop(self, count: int) -> None:
        """Drop the last `count` slots of every row (all of them when there are fewer)."""
        count = min(count, self.slots)
        if count == 0:
            return
        kept = self.slots - count
        lost = [count] * self.batch if self._mask is None else self._mask[:, kept:].sum(1).tolist()
        for row, held, drop in zip(self.ids, self._held(self.batch), lost, strict=True):
            self.pages.truncate(row, held - drop)
        self.slots = kept
        if self._mask is not None:
            mask = self._mask[:, :kept]
            self._mask = None if bool(mask.all()) else mask

    def gather(self, index: list[int]) -> None:
        """Make row i a copy of what row index[i] was, for every i: pages are shared, not copied."""
        if not self.slots:
            return
        self.ids = tuple(self.pages.reorder(self.ids, index))
        if self._mask is not None:
            self._mask = self._mask[torch.tensor(index)]

    def reset(self) -> None:
        """Forget every row; the pages stay allocated for the next ones."""
        if self.ids:
            self.pages.free(self.ids)
        self.ids = ()
        self.slots = 0
        self._mask = None

    def dense(self, layer: int, slots: int | None = None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Copies of a layer's K [batch, KH, slots, D] and V [batch, KH, slots, DV], zero at padding.

        slots, mask: what the rows look like with a step in progress; None: as they were after the last one.
        """
        if slots is None:
            slots, mask = self.slots, self._mask
        pages = self.pages.view(layer)
        out: list[Tensor] = []
        for cache in (pages.k, pages.v):
            full = cache.new_zeros(self.batch, slots, *cache.shape[2:])
            for row in range(self.batch):
                full[row, slice(None) if mask is None else mask[row]] = cache.flatten(0, 1)[self._stored(row)]
            out.append(full.transpose(1, 2))
        return out[0], out[1]

    def _stored(self, row: int) -> Tensor:
        """int64 [tokens], where in the pages, taken as one run, the tokens of a row lie."""
        size, table = self.pages.page_size, self.pages.block_table(self.ids[row])[0]
        at = torch.arange(self.pages.length(self.ids[row]))
        return table[at // size].long() * size + at % size

    def _forget(self, past: Tensor) -> None:
        """Drop the tokens that a new mask over the cached slots no longer has; what is left is packed anew."""
        held = torch.ones_like(past) if self._mask is None else self._mask
        ids = list(self.ids)
        for row in (past != held).any(1).nonzero().flatten().tolist():
            kept = self._stored(row)[past[row][held[row]]]
            (new,) = self.pages.add()
            self._make_room([0], [len(kept)])
            slots = self.pages.reserve(new, [len(kept)])
            for layer in range(self.layers):
                pages = self.pages.view(layer)
                kernels.append(pages, pages.k.flatten(0, 1)[kept], pages.v.flatten(0, 1)[kept], slots)
            self.pages.free(ids[row])
            ids[row] = new
            self.ids = tuple(ids)
        self._mask = past


def _packed(step: Step, x: Tensor) -> Tensor:
    """[batch, KH, q_len, D] as [real new tokens, KH, D], in row order; a view where nothing is padding."""
    if step.q_len == 1 and step.index is None:
        return x[:, :, 0]
    flat = x.transpose(1, 2).flatten(0, 1)
    return flat if step.index is None else flat[step.index]
