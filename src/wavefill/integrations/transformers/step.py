"""What the rows of a cache go through: `Step`, a forward in progress, between two of what they hold, `Held`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from wavefill.cache import PagedKVCache, placed
from wavefill.integrations.transformers.storage import Storage
from wavefill.spec import Schedule

if TYPE_CHECKING:
    from wavefill.integrations.transformers.kernels import Put
    from wavefill.integrations.transformers.rows import Rows


@dataclass(eq=False)
class Step:
    """One forward of one decoder over one cache: made once, read by every layer.

    rows:   the cache's rows.
    config: the decoder's configuration, by which the mask function knows the step to be its own.
    batch, q_len: the shape of the new tokens.
    past:   slots before this step.
    mask:   bool [batch, past + q_len] on the host, true for real tokens, or None when all are.
    held:   real tokens of each row before this step.
    ids:    the requests of the rows; those of rows without a past are there once a layer has written.
    given:  the mask on the device that the caller gave it on, or None when all are real.
    storage: pages that the cache may have when it has none yet.
    doubt:  the mask [batch, past + q_len] that was given, while nobody has looked whether it is what `mask` says.
    """

    rows: Rows
    config: Any
    batch: int
    q_len: int
    past: int
    mask: Tensor | None
    held: tuple[int, ...]
    ids: tuple[int, ...]
    given: Tensor | None = None
    storage: Storage | None = None
    doubt: Tensor | None = None

    def __post_init__(self) -> None:
        #: Layers that have written their K and V, and those whose attention has been computed.
        self.written = self.attended = 0
        #: Where the real new tokens go, once pages are claimed for them: `PagedKVCache.claim`.
        self.claimed: list[int] | None = None
        #: How the next layer's K and V come to the pages, if not as they are given.
        self.put: Put | None = None
        #: What attention runs by; None for what "auto" stands for.
        self.schedule: Schedule | None = None

    def new_pages(self, **sizes: Any) -> PagedKVCache:
        """Pages for the rows, which have none; `sizes` as `PagedKVCache` takes them, but their number."""
        storage = self.storage if sizes["device"].type == "cuda" else None
        return PagedKVCache(0, **sizes) if storage is None else storage.pages_for(self.rows, **sizes)

    @cached_property
    def slots(self) -> Tensor:
        """int64 [real new tokens], where they go, on the pages' device; there once pages are claimed."""
        assert self.claimed is not None
        return placed(torch.from_numpy(np.array(self.claimed, np.int64)), self.rows.pages.device)

    @cached_property
    def seq_lens(self) -> Tensor:
        """int32 [batch], tokens of each row with the new ones; there once a layer has written."""
        return self.rows.pages.seq_lens(self.ids)

    @cached_property
    def block_table(self) -> Tensor:
        """int32 [batch, pages], the pages of each row; there once a layer has written."""
        return self.rows.pages.block_table(self.ids)

    @cached_property
    def new(self) -> Tensor | None:
        """bool [batch, q_len], true for the real ones of the new tokens, or None when all are."""
        if self.mask is None:
            return None
        new = self.mask[:, self.past:]
        return None if bool(new.all()) else new

    @cached_property
    def index(self) -> Tensor | None:
        """int64 [real new tokens], their positions in the flattened [batch * q_len], or None when all are real; with
        the pages, so there once a layer has written.
        """
        return None if self.new is None else placed(self.new.flatten().nonzero().squeeze(1), self.rows.pages.device)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Real new tokens of each row."""
        return (self.q_len,) * self.batch if self.new is None else tuple(self.new.sum(1).tolist())

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Real tokens of each row with the new ones."""
        return tuple(map(add, self.held, self.counts))

    @cached_property
    def cu_seqlens_q(self) -> Tensor:
        """int32 [batch + 1], where each row's real new tokens start; there once a layer has written."""
        bounds = torch.tensor([0, *accumulate(self.counts)], dtype=torch.int32, device="cpu")
        return placed(bounds, self.rows.pages.device)

    @cached_property
    def has_hole(self) -> bool:
        """Whether a row has padding between real tokens, so that slots and packed tokens are differently far apart."""
        if self.mask is None:
            return False
        begins = self.mask[:, 1:] > self.mask[:, :-1]  # real after padding
        return bool((begins.sum(1) + self.mask[:, 0] > 1).any())

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


@dataclass(frozen=True, eq=False)
class Held:
    """What a cache holds between two forwards.

    ids:     the request of each row.
    slots:   of every row, padding included.
    mask:    bool [batch, slots] on the host, true for real tokens, or None when all are.
    lengths: real tokens of each row.
    given:   the mask on the device that it was last given on; None when all are real, or it must be copied anew.
    """

    ids: tuple[int, ...] = ()
    slots: int = 0
    mask: Tensor | None = None
    lengths: tuple[int, ...] = ()
    given: Tensor | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """torch.load may have put the mask elsewhere."""
        mask = state["mask"]
        self.__dict__.update(state, mask=None if mask is None else mask.cpu(), given=None)
