"""What a continuous-batching contract of transformers is, and the two shapes that every paged call is brought to.

transformers hands a paged batch to an attention function in ways that changed four times between 5.17 and 5.24, and
code for one gives wrong tokens on the next without an error. Each contract has a file of its own here (`v5_17.py` and
on): it says which releases it is for, what transformers and a call must look like, and turns a call into a `Decode` or
a `Ragged`. Nothing else in wavefill knows the contracts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wavefill.cache import KVPages
from wavefill.integrations.transformers import kernels
from wavefill.spec import InvalidArgument, invalid

PARAM = "transformers continuous batching"


@dataclass(frozen=True)
class Shape:
    """What the installed transformers and one model look like, as far as the contracts differ.

    update: parameters of `PagedAttentionCache.update`.
    call:   keyword arguments that a paged forward pass carries.
    cache:  attributes that the class `PagedAttentionCache` defines.
    layer:  parameters of the forward of every attention layer of the model.
    """

    update: frozenset[str]
    call: frozenset[str]
    cache: frozenset[str]
    layer: frozenset[str]


@dataclass(frozen=True)
class Decode:
    """One query token per request; its key and value are still to be written.

    k_pages, v_pages: [pages, page_size, KH, D] and [.., DV], any strides.
    table:            [B, width] int32, page of each block; -1 where there is none.
    cu_k:             [B + 1] int32, sums of the keys before each request, new ones included; a padded row adds nothing.
    k, v:             [B, KH, D] and [.., DV], the new token of each request.
    """

    k_pages: Tensor
    v_pages: Tensor
    table: Tensor
    cu_k: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Ragged:
    """Any number of query tokens per request; every key is already written.

    k, v:   [pages, page_size, KH, D] and [.., DV], any strides.
    slots:  [N] int64, page * page_size + offset of each key in request order, where each request's first key begins a
            page and every page but its last is full; None when the keys lie packed in that order, in pages of one.
            N may be more than the keys of all requests.
    cu_q:   [B + 1] int32, first query token of each request.
    cu_k:   [B + 1] int32, first key of each request. Keys of a request end at its last query token (bottom-right).
    most_q, most_k: query tokens and keys of a request at most.
    """

    k: Tensor
    v: Tensor
    slots: Tensor | None
    cu_q: Tensor
    cu_k: Tensor
    most_q: int
    most_k: int


Batch = Decode | Ragged


class Contract(ABC):
    """One way in which transformers passes paged batches.

    first, last: the oldest and newest minor release that were tested with it.
    on_gpu:      whether it was tested on a GPU, where batches are padded, captured and prepared ahead.
    prefix:      what `generate_batch` wants before the name of an attention implementation.
    needs:       keyword arguments that an attention call must have.
    refuses:     keyword arguments that it must not have: they are those of a neighbouring contract.
    """

    first: tuple[int, int]
    last: tuple[int, int]
    on_gpu: bool = False
    prefix: str = ""
    needs: frozenset[str]
    refuses: frozenset[str]

    @property
    def name(self) -> str:
        """The releases, for messages."""
        first, last = (".".join(map(str, x)) for x in (self.first, self.last))
        return first if first == last else f"{first} to {last}"

    def covers(self, release: tuple[int, int]) -> bool:
        """Whether the minor release was tested with this contract."""
        return self.first <= release <= self.last

    @abstractmethod
    def matches(self, shape: Shape) -> bool:
        """Whether transformers and the model look as this contract needs."""

    @abstractmethod
    def unpack(self, layer_idx: int, tokens: int, k: Tensor, v: Tensor, kwargs: dict[str, Any]) -> Batch:
        """The batch of one call, after the cache was updated on the index path.

        tokens: T, query tokens of the call. k, v: [1, KH, N, D] as they came. `kwargs` may be edited.
        """

    def check_pass(self, kwargs: Mapping[str, Any]) -> None:
        """Raise unless a forward pass of the whole model carries what this contract says."""
        self._check("a forward pass", kwargs, self.needs | {"cache"}, self.refuses - {"cache"})

    def check_call(self, kwargs: Mapping[str, Any]) -> None:
        """Raise unless an attention call carries what this contract says: another's must never be guessed at."""
        self._check("a call", kwargs, self.needs, self.refuses)

    def _check(self, what: str, kwargs: Mapping[str, Any], needs: frozenset[str], refuses: frozenset[str]) -> None:
        missing, foreign = sorted(needs - kwargs.keys()), sorted(refuses & kwargs.keys())
        if missing or foreign:
            parts = [f"without {', '.join(missing)}"] * bool(missing) + [f"with {', '.join(foreign)}"] * bool(foreign)
            raise self.mismatch(f"{what} {' and '.join(parts)}")

    def check_new(self, tokens: int, k: Tensor) -> None:
        """Raise unless k [1, KH, N, D] holds the new tokens alone: no one has updated the cache yet."""
        if k.shape[2] != tokens:
            raise self.mismatch(f"{k.shape[2]} keys for {tokens} query tokens before the cache's update")

    def mismatch(self, got: str) -> InvalidArgument:
        """The error for a call that is not this contract's."""
        return invalid(PARAM, f"a paged attention call must be as transformers {self.name} makes it", got,
                       "Use a tested transformers release, and report this one.")


def new_tokens(x: Tensor) -> Tensor:
    """[1, KH, T, D] as [T, KH, D], a view."""
    return x[0].transpose(0, 1)


def lengths_of(cu: Tensor) -> Tensor:
    """Lengths of the rows between cumulative starts, int32."""
    return torch.diff(cu).to(torch.int32)


def packed(k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, most_q: int, most_k: int) -> Ragged:
    """The batch of keys and values [N, KH, D] that lie in request order."""
    return Ragged(k.unsqueeze(1), v.unsqueeze(1), None, cu_q, cu_k, most_q, min(most_k, len(k)))


def written(pages: KVPages, k: Tensor, v: Tensor, read: Tensor, write: Tensor, cu_q: Tensor, cu_k: Tensor,
            most_q: int, most_k: int) -> Ragged:
    """The batch of a layer that sees everything, once its new tokens k, v [T, KH, D] are in its pages.

    read:  [N] int64, the slot of each key in request order, or [0] where no request has older keys.
    write: [T] int64, the slot of each new token; those of tokens that pad the batch are never read.
    """
    kernels.append(pages, k, v, write)
    if len(read):
        return Ragged(pages.k, pages.v, read, cu_q, cu_k, most_q, most_k)
    if len(cu_k) == 2:  # one prompt from its beginning: contiguous keys are read faster
        return packed(k, v, cu_q, cu_k, most_q, most_k)
    return Ragged(pages.k, pages.v, write, cu_q, cu_k, most_q, most_k)
