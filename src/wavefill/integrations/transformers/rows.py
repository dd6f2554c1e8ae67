"""The rows of one cache: which slots of each hold real tokens, and the pages they sit in.

transformers counts *slots*: every row of a batch has as many, padding included. Only real tokens are stored: a row's
tokens lie packed in its pages, in order, so its length is its own. What the two views have in common is the mask.

What a cache holds is one object, `Held`, which one assignment replaces, for a forward once it has returned. So one that
fails or is interrupted leaves the cache as it was. Pages are taken before that assignment and given up after it; what
an unfinished change left of them is cleared away before the next one. States of layers without K and V change while a
forward runs; a copy of what they were belongs to the `Held` that they were beside, and is put back when that one stays.

All of this is kept on the host; what a GPU needs of it goes there in copies that nobody waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import sub
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from wavefill.cache import KVPages, PagedKVCache, placed
from wavefill.checks import DTYPE_NAMES
from wavefill.integrations.transformers import kernels
from wavefill.integrations.transformers.ahead import Begun
from wavefill.integrations.transformers.states import Saved, States
from wavefill.integrations.transformers.step import Held, Step
from wavefill.pages import picks_of
from wavefill.spec import InvalidArgument, OutOfPages, invalid, invalid_type

#: A pool that is full grows to this many times what is needed, so that the copies add up to a constant a token.
GROWTH = 1.5
#: Pages a row that a GPU's first pool has at least, if they fit: short conversations then move none, which would cost
#: the captured graphs of their steps.
ROOM = 16
#: Kinds of devices that a model, and a mask, may be on.
DEVICES = ("cpu", "cuda")


class Rows:
    """Rows of a cache.

    numbers: of the layers with K and V, as the model counts its layers.
    states:  of the other layers.
    """

    def __init__(self, numbers: Iterable[int], states: States | None = None) -> None:
        #: Number of a layer in the model -> its place in the pages, which have no room for layers without K and V.
        self.places = {number: place for place, number in enumerate(numbers)}
        self.layers = len(self.places)
        self.states = States() if states is None else states
        #: What the states were beside which `Held`, while a change is under way.
        self._before: tuple[Held, list[Saved]] | None = None
        self.held = Held()
        self._pages: PagedKVCache | None = None
        #: Whether the pages may have more than `held` says: while something changes, and after it was interrupted.
        self._changing = False
        #: A step under way that no forward has asked for yet, or that one has taken.
        self._begun: Begun | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_begun": None, "_changing": self._changing or self._begun is not None}

    @property
    def slots(self) -> int:
        """Slots of every row, those of a forward that has not returned excluded."""
        return self.held.slots

    @property
    def batch(self) -> int:
        """Rows, or 0 when the cache is empty."""
        return len(self.held.ids)

    @property
    def pages(self) -> PagedKVCache:
        """The paged storage; there is one from the first step on."""
        assert self._pages is not None
        return self._pages

    def view(self, layer: int) -> KVPages:
        """The pages of a layer, by its number in the model."""
        return self.pages.view(self.places[layer])

    # -- the steps ----------------------------------------------------------------------------------------------

    def begin(
        self, batch: int, q_len: int, attention_mask: Tensor | None, config: Any, *, defer: bool = False
    ) -> Step:
        """The step that adds `q_len` slots to each of `batch` rows; until `end`, the cache holds what it did.

        attention_mask: [batch, slots so far + q_len], nonzero for real tokens, or None when all are. Cached tokens
                        that it no longer has are dropped.
        defer: don't wait for the mask's device where a cache goes on: take it for the one that generate makes, the
               cache's own with real tokens after. `confirms` or `begin_anew` ends the doubt; `write` sees to it.
        Raises `InvalidArgument` for a batch or a mask that doesn't continue what the cache holds.
        """
        self._settle(but_begun=True)
        held = self.held
        if held.slots and batch != self.batch:
            raise invalid("input_ids", f"must have the {self.batch} rows of the cache", batch,
                          "Start a new cache, or call its batch_repeat_interleave or batch_select_indices.")
        total = held.slots + q_len
        self._check_mask(batch, total, attention_mask)
        seen = None if attention_mask is None else attention_mask[:, :total]
        # States change with the mask, and before K and V are written.
        doubt = seen if defer and held.slots and not self.states.layers else None
        if seen is None or doubt is not None:
            mask, given, same = self._own_mask(q_len), None, True
        else:
            mask, given, same = self._continued(seen, q_len)
        ids, lengths = (held.ids, held.lengths) if held.slots else ((), (0,) * batch)
        if mask is not None and held.slots and not same:
            ids, lengths = self._without(mask[:, :held.slots])
        self._save()
        return Step(self, config, batch, q_len, held.slots, mask, lengths, ids, given, doubt=doubt)

    def confirms(self, step: Step) -> bool:
        """Whether a step's mask is what it was taken for; if so, there is no doubt any more."""
        if step.doubt is None:
            return True
        same, step.given = self._is_own(step.doubt, step.q_len)
        if same:
            step.doubt = None
        return same

    def begin_anew(self, step: Step) -> None:
        """Begin a step in doubt once more, as the same object, by what its mask says. Raises as `begin` does."""
        anew = self.begin(step.batch, step.q_len, step.doubt, step.config)
        anew.storage, anew.schedule = step.storage, step.schedule
        vars(step).clear()
        vars(step).update(vars(anew))

    def _check_mask(self, batch: int, total: int, attention_mask: Tensor | None) -> None:
        """Raise `InvalidArgument` unless there is a mask where one is needed, over all slots, that can be read."""
        held = self.held
        if attention_mask is None:
            if held.mask is not None:
                raise invalid("attention_mask", "must be given, since rows of the cache have padding", None,
                              "Pass [batch, all tokens so far], 0 for padding.")
            return
        shape = tuple(attention_mask.shape)
        if len(shape) != 2 or shape[0] != batch or shape[1] < total:
            raise invalid("attention_mask", f"must be [{batch}, {total}], the cached tokens included", list(shape),
                          "Extend it by ones for the new tokens, or leave it out when there is no padding.")
        if attention_mask.device.type not in DEVICES:
            raise invalid("attention_mask", "must be on the CPU or a GPU", attention_mask.device,
                          "Make it where the model is.")

    def _own_mask(self, q_len: int) -> Tensor | None:
        """The cache's mask with `q_len` real tokens after, on the host."""
        return None if self.held.mask is None else pad(self.held.mask, (0, q_len), value=1.0)

    def _is_own(self, seen: Tensor, q_len: int) -> tuple[bool, Tensor | None]:
        """Whether a mask over all slots with the new ones is the cache's own with real tokens after; and where the
        cache has padding, a bool copy of it. generate gives such a mask in every step of decoding.

        On a GPU it is compared there, with one synchronisation of the current stream.
        """
        held = self.held
        if held.mask is None:
            return bool(seen.all()), None
        given, before = seen.to(torch.bool, copy=True), held.given
        if before is None or before.device != given.device:
            before = placed(held.mask, given.device)
        return torch.equal(given, pad(before, (0, q_len), value=1.0)), given

    def _continued(self, seen: Tensor, q_len: int) -> tuple[Tensor | None, Tensor | None, bool]:
        """A mask over all slots with the new ones, checked against the padding that the cache was filled with: on the
        host and where it was given, None when all are real, and whether it is the cache's own with real tokens after.
        """
        held = self.held
        same, given = self._is_own(seen, q_len)
        if same:
            return given if given is None or given.is_cpu else self._own_mask(q_len), given, True
        given = seen.to(torch.bool, copy=True) if given is None else given
        mask = given.cpu()
        if held.mask is not None and bool((mask[:, :held.slots] & ~held.mask).any()):
            raise invalid("attention_mask", "must be 0 where the cache was filled with padding",
                          "1 for some of it", "Start a new cache for another mask.")
        return mask, given, False

    def write(self, step: Step, layer: int, key: Tensor, value: Tensor) -> None:
        """Write a layer's new K [batch, KH, q_len, D] and V [batch, KH, q_len, DV]; each layer once, in order."""
        if not self.places.get(layer) == step.written == step.attended:
            # Among others by a model that isn't enabled, which found the step that Ctrl-C had left.
            raise invalid("past_key_values", "must be written by an enabled model, each layer once and in order",
                          f"layer {layer} after {step.written} of them",
                          "Call wavefill.integrations.transformers.enable(model) first, and pass this cache to it.")
        if step.doubt is not None and not self.confirms(step):
            self.begin_anew(step)
        if step.claimed is None:
            self._reserve(step, key, value)
        if not step.written:
            self.join()
        kernels.append(self.view(layer), _packed(step, key), _packed(step, value), step.slots, step.put)
        step.put = None
        step.written += 1

    def end(self, step: Step, *, returned: bool) -> None:
        """The forward is over: when it has returned and all layers have written, the cache holds the new tokens."""
        before = self.held
        if returned and step.written == self.layers:
            self.held = Held(step.ids, step.past + step.q_len, step.mask, step.lengths, step.given)
            self._changing = before.ids != step.ids
        self._settle()

    def _save(self) -> None:
        """Before the states change: they go back to what they are now unless `held` is replaced."""
        if self.states.layers:
            self._before = (self.held, self.states.save())

    def _settle(self, *, but_begun: bool = False) -> None:
        """Give up the pages of what the cache does not hold: of a forward that did not return, or was replaced, and of
        a step that was begun in vain; but_begun: not of one that may still be asked for.
        """
        begun = self._begun
        if begun is not None and not (
            but_begun and begun.is_under_way and not begun.is_taken and not self._changing
        ):
            self._changing |= not begun.is_taken
            begun.join()
            self._begun = None
        if self._before is not None:
            held, saved = self._before
            if held is self.held:
                self.states.restore(saved)
            self._before = None
        if self._changing and self._pages is not None:
            self._pages.restore(dict(zip(self.held.ids, self.held.lengths, strict=True)))
        self._changing = False

    def _reserve(self, step: Step, key: Tensor, value: Tensor) -> None:
        """Pages for the step's real tokens, at the first layer, when sizes, dtype and device are known."""
        if key.device.type not in DEVICES:
            raise invalid("model", "must be on the CPU or a GPU", key.device, "Call model.to('cpu').")
        if key.dtype not in DTYPE_NAMES:
            raise invalid_type("model", f"must compute in {', '.join(DTYPE_NAMES.values())}", key.dtype,
                               "Call model.to(torch.float32).")
        self._changing = True
        if self._pages is None or (not self.slots and not self._takes(key, value)):
            self._pages = step.new_pages(
                layers=self.layers, kv_heads=key.shape[1], head_dim=key.shape[3], head_dim_v=value.shape[3],
                dtype=key.dtype, device=key.device,
            )
        self.claim(step)

    def claim(self, step: Step) -> None:
        """Pages for a step's real tokens where the rows have pages already; until `end` they are the step's alone.

        They may be those of a step begun before: `join`, or see that it is this one.
        """
        begun = self._begun
        if begun is not None and step.ids == begun.held.ids and step.held == begun.held.lengths and step.is_decode:
            self._changing = begun.is_taken = True
            step.claimed = begun.claimed
            return
        if begun is not None:
            self._settle()
        self._changing = True
        if not step.ids:
            step.ids = tuple(self.pages.add(step.batch))
        try:
            step.claimed = self.pages.claim(step.ids, step.counts)
        except OutOfPages:
            self._make_room(step.held, step.counts)
            step.claimed = self.pages.claim(step.ids, step.counts)

    def begin_next(self, stream: torch.cuda.Stream | None) -> Begun | None:
        """Slots for one more real token of each row, for a step to be begun between two forwards; None where that
        takes other pages. stream: that of the forwards, on a GPU.
        """
        held = self.held
        if self._changing or self._begun is not None or not held.slots or self.states.layers:
            return None
        self._changing = True
        try:
            self._begun = Begun(held, self.pages.claim(held.ids, (1,) * len(held.ids)), stream)
        except OutOfPages:
            return None
        self._changing = False
        return self._begun

    def join(self) -> None:
        """What is asked of the GPU from now on comes after a step that was begun before its forward."""
        if self._begun is not None:
            self._begun.join()

    def _takes(self, key: Tensor, value: Tensor) -> bool:
        """Whether the pages of an empty cache, which another model may have used, are made for such K and V."""
        pages = self.pages
        return (pages.kv_heads, pages.head_dim, pages.head_dim_v, pages.dtype, pages.device) == (
            key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device
        )

    def _make_room(self, held: Sequence[int], counts: Sequence[int]) -> None:
        """Free pages for `counts` more tokens in rows that hold `held`."""
        # A row takes a page more when its part-filled last page is shared and has to be copied.
        size = self.pages.page_size
        need = sum(-(-(n + count) // size) - n // size for n, count in zip(held, counts, strict=True))
        if need <= self.pages.free_pages:
            return
        needed = self.pages.num_pages - self.pages.free_pages + need
        wanted = int(needed * GROWTH) + 1
        if self.pages.device.type == "cpu":
            self.pages.grow(wanted)
            return
        try:
            self.pages.grow(wanted if self.pages.num_pages else max(wanted, ROOM * len(held)))
        except InvalidArgument:
            self.pages.grow(needed)

    def _without(self, past: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Requests and lengths of the rows without the tokens that a new mask over the cached slots no longer has:
        what is left of such a row is packed anew, in pages of its own.
        """
        if self._begun is not None:
            self._settle()
        held = self.held
        before = torch.ones_like(past) if held.mask is None else held.mask
        ids, lengths = list(held.ids), list(held.lengths)
        for row in (past != before).any(1).nonzero().flatten().tolist():
            self._changing = True
            kept = past[row][before[row]].nonzero().squeeze(1)
            page, offset = self._places(ids[row], kept)
            (ids[row],), lengths[row] = self.pages.add(), len(kept)
            self._make_room([0], [len(kept)])
            slots = self.pages.reserve(ids[row], [len(kept)])
            for layer in range(self.layers):
                pages = self.pages.view(layer)
                kernels.append(pages, pages.k[page, offset], pages.v[page, offset], slots)
        return tuple(ids), tuple(lengths)

    # -- what generate does to a batch --------------------------------------------------------------------------

    def crop(self, count: int) -> None:
        """Drop the last `count` slots of every row (all of them when there are fewer)."""
        self._settle()
        held = self.held
        kept = held.slots - count
        if kept <= 0:
            self.reset()
            return
        self._save()
        self.states.crop(count, kept)
        if count:
            lost = [count] * self.batch if held.mask is None else held.mask[:, kept:].sum(1).tolist()
            lengths = tuple(map(sub, held.lengths, lost))
            mask = None if held.mask is None else _padding(held.mask[:, :kept])
            self._changing = True
            self.held = Held(held.ids, kept, mask, lengths)
            for row, length in zip(held.ids, lengths, strict=True):
                self.pages.truncate(row, length)
        self._before, self._changing = None, False

    def gather(self, index: Iterable[int], name: str = "index") -> None:
        """Make row i a copy of what row index[i] was, for every i: pages are shared, not copied. name: for errors."""
        self._settle()
        held = self.held
        if not held.slots:
            return
        picks = picks_of(name, index, self.batch)
        self._save()
        self.states.pick(picks)
        seen: set[int] = set()
        ids: list[int] = []
        self._changing = True
        for pick in picks:
            ids += self.pages.fork(held.ids[pick]) if pick in seen else [held.ids[pick]]
            seen.add(pick)
        self.held = replace(
            held, ids=tuple(ids), lengths=tuple(held.lengths[pick] for pick in picks),
            mask=None if held.mask is None else _padding(held.mask[list(picks)]), given=None,
        )
        self.pages.free([row for row in held.ids if row not in set(ids)])
        self._before, self._changing = None, False

    def reset(self) -> None:
        """Forget every row; the pages stay allocated for the next ones."""
        self._settle()
        self._save()
        self.states.forget()
        self._changing = True
        self.held = Held()
        self._settle()

    def dense(self, layer: int, step: Step | None = None) -> tuple[Tensor, Tensor]:
        """Copies of a layer's K [batch, KH, slots, D] and V [batch, KH, slots, DV], zero at padding.

        layer: its number in the model.
        step: the one in progress, whose tokens are among them; None: as the last forward that returned left them.
        """
        held = self.held if step is None else Held(step.ids, step.past + step.q_len, step.mask, step.lengths)
        tokens = torch.arange(max(held.lengths, default=0), device="cpu")
        places = [self._places(row, tokens[:n]) for row, n in zip(held.ids, held.lengths, strict=True)]
        pages = self.view(layer)
        slots = [slice(None)] * len(held.ids) if held.mask is None else [
            placed(real.nonzero().squeeze(1), pages.k.device) for real in held.mask]
        out: list[Tensor] = []
        for cache in (pages.k, pages.v):
            full = cache.new_zeros(len(held.ids), held.slots, *cache.shape[2:])
            for row, (page, offset) in enumerate(places):
                full[row, slots[row]] = cache[page, offset]
            out.append(full.transpose(1, 2))
        return out[0], out[1]

    def _places(self, request: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """int64, the pages of a request's tokens, given by their positions, and where in the pages they are."""
        size, tokens = self.pages.page_size, placed(tokens, self.pages.device)
        return self.pages.block_table(request)[0, tokens // size].long(), tokens % size


def _padding(mask: Tensor) -> Tensor | None:
    """The mask, or None when all tokens are real: rows without padding need none from the caller either."""
    return None if bool(mask.all()) else mask


def _packed(step: Step, x: Tensor) -> Tensor:
    """[batch, KH, q_len, D] as [real new tokens, KH, D], in row order; a view where nothing is padding."""
    if step.q_len == 1 and step.index is None:
        return x[:, :, 0]
    flat = x.transpose(1, 2).flatten(0, 1)
    return flat if step.index is None else flat[step.index]
