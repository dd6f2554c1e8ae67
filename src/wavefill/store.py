"""The memory of a paged cache, in its format: of every layer K, V and, where each token has one, their scales.

Buffers are uninitialised: slots without a token are never read, and a CPU's memory is only taken up once it is written.
They are ordinary tensors even when made under inference_mode, which a cache may outlive.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from wavefill import formats
from wavefill.formats import Format
from wavefill.spec import BackendUnavailable, complaint, invalid, number

#: dtypes of codes.
_CODES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}

#: The buffers of every layer, by what they hold: "k", "v", "k_scale", "v_scale".
Buffers = dict[str, list[Tensor]]


@dataclass(frozen=True, eq=False)
class KVPages:
    """The pages of one layer, as the public functions take them for `k_cache`.

    k: [pages, page_size, KH, D]; v: [pages, page_size, KH, DV]. Views of the cache's own memory.
    k_scale, v_scale: scales of a quantised cache, in the shapes that `decode_attention` takes.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class Store:
    """`buffers[name][layer]`: [pages, KH, page_size, head size] in the layout "HND", "NHD" has heads and tokens the
    other way round; scales have no last dimension.

    form:   None where K and V are stored as they come, in `dtype`.
    scales: of K and V for every layer, where they are given (`given_scales`).
    """

    def __init__(self, num_pages: int, layers: int, page_size: int, kv_heads: int, head_dims: tuple[int, int],
                 dtype: torch.dtype, layout: str, form: Format | None, scales: tuple[Tensor | None, ...],
                 device: torch.device) -> None:
        self._layers, self._scales, self._heads_first = layers, scales, layout == "HND"
        outer = (kv_heads, page_size) if self._heads_first else (page_size, kv_heads)
        self._page: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, size in zip(("k", "v"), head_dims, strict=True):
            part = None if form is None else form.k if name == "k" else form.v
            self._page[name] = ((*outer, size), dtype if part is None else _CODES[part.codes])
            if part is not None and part.span == "token":
                self._page[f"{name}_scale"] = (outer, getattr(torch, part.scale))
        with torch.inference_mode(False), self._memory_for(num_pages):
            self.buffers: Buffers = {
                name: [torch.empty((num_pages, *sizes), dtype=each, device=device) for _ in range(layers)]
                for name, (sizes, each) in self._page.items()
            }

    def each(self) -> Iterator[Tensor]:
        """All buffers of all layers."""
        for buffers in self.buffers.values():
            yield from buffers

    def views(self, buffers: Buffers) -> list[KVPages]:
        """The pages of each layer, tokens before heads."""
        with torch.inference_mode(False):
            views = {name: [x.transpose(1, 2) if self._heads_first else x.view_as(x) for x in each]
                     for name, each in buffers.items()}
        every: list[dict[str, Tensor]] = [{name: each[i] for name, each in views.items()} for i in range(self._layers)]
        for name, given in zip(("k_scale", "v_scale"), self._scales, strict=True):
            if given is not None:
                for layer, scale in zip(every, given, strict=True):
                    layer[name] = scale
        return [KVPages(**layer) for layer in every]

    def first(self, pages: int) -> Buffers:
        """The first pages of each buffer, as bytes: torch.load does not know every dtype."""
        return {name: [x[:pages].view(torch.uint8) for x in buffers] for name, buffers in self.buffers.items()}

    def fill(self, taken: Buffers) -> None:
        """Copies what `first` gave, of another store, into the first pages of this one."""
        for name, buffers in taken.items():
            for buffer, pages in zip(self.buffers[name], buffers, strict=True):
                buffer.view(torch.uint8)[: len(pages)] = pages

    def copy_pages(self, copies: Tensor) -> None:
        """copies: [n, 2] page ids; what the first of each holds goes to the second."""
        shared, fresh = copies.T
        for buffer in self.each():
            raw = buffer.view(torch.uint8)  # every dtype can be indexed as bytes
            raw[fresh] = raw[shared]

    def enlarged(self, num_pages: int) -> Buffers:
        """The buffers with more pages. Their memory grows in place, so that views taken earlier see what is appended
        later; where it fails, nothing has changed but where some of them lie.
        """
        with torch.inference_mode(False), self._memory_for(num_pages):
            try:
                return {name: [x.detach().resize_((num_pages, *self._page[name][0])) for x in buffers]
                        for name, buffers in self.buffers.items()}
            except (RuntimeError, MemoryError):
                for x in self.each():  # what some have got is room for a smaller number in all
                    if x.untyped_storage().nbytes() > x.nbytes:
                        x.untyped_storage().resize_(x.nbytes)
                raise

    @contextmanager
    def _memory_for(self, num_pages: int) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            page = sum(prod(sizes) * dtype.itemsize for sizes, dtype in self._page.values()) * self._layers
            raise invalid("num_pages", "must be pages that there is memory for", f"{num_pages} of {page} bytes",
                          "Give fewer pages, or smaller ones.") from error


def format_of(name: str, device: torch.device) -> Format | None:
    """The format of that name, None for "auto". Raises InvalidArgument, BackendUnavailable where a GPU has none."""
    if isinstance(name, str) and name == "auto":
        return None
    found = formats.find(name)
    if found.tail:
        raise invalid("kv_format", "is defined and measured, and no cache of this version stores it", repr(name),
                      'Use "int8".')
    if device.type != "cpu":
        raise BackendUnavailable(complaint("kv_format", 'must be "auto" on a GPU in this version', repr(name),
                                           "Leave it out, or keep the cache on the CPU."))
    return found


def given_scales(name: str, scale: float | Tensor | None, form: Format | None, layers: int, kv_heads: int,
                 device: torch.device) -> Tensor | None:
    """Scales of K or V that a format is given, [layers] or [layers, KH] float32; None where it makes its own.

    Raises InvalidArgument for shapes and values that are no scales of the format.
    """
    span = None if form is None else form.k.span
    if span not in ("tensor", "head"):
        if scale is not None:
            raise invalid(name, "belongs to fp8-tensor and fp8-head", f"kv_format {form.name if form else 'auto'!r}",
                          "Leave it out: other formats have no scales or make their own.")
        return None
    each = () if span == "tensor" else (kv_heads,)
    if not isinstance(scale, Tensor):
        scale = torch.full(each, 1.0 if scale is None else number(name, scale))
    if scale.shape not in (each, (layers, *each)):
        raise invalid(name, f"must be {list(each)} or {[layers, *each]}", list(scale.shape),
                      "Give scales that all layers share, or some for each.")
    scale = scale.detach().to(device, torch.float32).expand(layers, *each).clone()
    if not bool(((scale > 0) & (scale < torch.inf)).all()):
        raise invalid(name, "must be finite and above 0", scale.tolist(), "Take the largest magnitude over 448.")
    return scale
