"""Whether tensors of a call share memory, where one of them is written."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from wavefill.spec import invalid

#: Address, sizes, strides (in elements) and element size: all that decides whether two tensors share memory.
_Geometry = tuple[int, Sequence[int], Sequence[int], int]


def no_overlap(written: Sequence[tuple[str, Tensor]], read: Sequence[tuple[str, Tensor | None]]) -> None:
    """Raises where a written tensor shares memory with itself or another. Needs real memory, not fakes."""
    tensors = (*written, *read)
    for at, (name, tensor) in enumerate(written, 1):
        shape, strides = tensor.shape, tensor.stride()
        if _overlaps_itself(shape, strides):
            raise invalid(name, "is written and must not overlap itself", f"strides {list(strides)}",
                          "Pass a tensor with memory of its own, not an expanded one.")
        begin = tensor.data_ptr()
        end = begin + _reach(shape, strides) * tensor.element_size()
        for other_name, other in tensors[at:]:
            if other is None or (other_begin := other.data_ptr()) >= end:
                continue
            storage = other.untyped_storage()  # quicker to look at than the tensor's own extent, and never smaller
            if (storage.data_ptr() + storage.nbytes() > begin
                    and other_begin + _reach(other.shape, other.stride()) * other.element_size() > begin
                    and _share(_geometry(tensor), _geometry(other))):
                raise invalid(name, f"is written and must share no memory with {other_name}", "overlapping memory",
                              "Pass a tensor of its own, for example a clone.")


@lru_cache(maxsize=256)
def _overlaps_itself(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may share memory: true for expanded tensors, and for strides too irregular to tell."""
    reach = 0
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


@lru_cache(maxsize=1024)
def _reach(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last in memory."""
    return 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) if 0 not in sizes else 0


def _geometry(tensor: Tensor) -> _Geometry:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.element_size()


@lru_cache(maxsize=256)
def _share(a: _Geometry, b: _Geometry) -> bool:
    """Whether two strided tensors whose ranges meet have an element in common (interleaved views do not)."""
    try:
        return bool(np.shares_memory(_as_bytes(a), _as_bytes(b), max_work=100_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _as_bytes(geometry: _Geometry) -> np.ndarray[Any, Any]:
    """A NumPy view of the same addresses, never read; NumPy has no bfloat16, so elements are plain bytes."""
    pointer, sizes, strides, item = geometry

    class _View:
        __array_interface__ = {  # noqa: RUF012
            "version": 3, "typestr": f"|V{item}", "data": (pointer, False),
            "shape": tuple(sizes), "strides": tuple(s * item for s in strides),
        }

    return np.asarray(_View())
