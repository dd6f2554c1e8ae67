"""Looking at the values of a call's tensors, which waits for the device; WAVEFILL_CHECK=1 asks for it."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import Tensor

from wavefill.backends.values import value_error
from wavefill.scores import NONE, Options
from wavefill.spec import InvalidArgument


def check(seq_lens: Tensor, block_table: Tensor | None, cu_seqlens_q: Tensor | None, k_cache: Tensor,
          window: int | None, tokens: int, options: Options = NONE) -> None:
    """Raises InvalidArgument for values that a call must not hold, as the CPU backend does and in its order.

    That is: negative lengths and lengths past the capacity; offsets that do not start at 0, decrease, or end past the
    query tokens; masks with fewer bits than a request has query tokens; sinks and slopes that are no numbers; page ids
    out of range in slots that are read.
    Tensors are those of `gpu.attention`, on any device.
    """
    pages, page_size = k_cache.shape[:2]
    capacity = page_size * (1 if block_table is None else block_table.shape[1])

    def error(fault: int, request: int, value: int, slot: int = 0) -> InvalidArgument:
        return value_error(fault, request, value, slot, capacity=capacity, pages=pages, tokens=tokens)

    lengths = seq_lens.tolist()
    for request, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            raise error(1 if length < 0 else 2, request, length)
    for fault, values in ((8, options.sinks), (9, options.alibi_slopes)):
        for head, value in enumerate([] if values is None else values.tolist()):
            if not math.isfinite(value) and (fault == 9 or value != -math.inf):
                raise error(fault, head, int(value > 0) - int(value < 0))
    q_lens = [1] * len(lengths)
    if cu_seqlens_q is not None:
        starts = cu_seqlens_q.tolist()
        if starts[0]:
            raise error(4, 0, starts[0])
        q_lens = [end - begin for begin, end in pairwise(starts)]
        for request, n in enumerate(q_lens):
            if n < 0:
                raise error(5, request, starts[request + 1])
        if starts[-1] > tokens:
            raise error(6, 0, starts[-1])
    if options.mask is not None:
        for request, n in enumerate(q_lens):
            if n > 32 * options.mask.shape[1]:
                raise error(7, request, n, options.mask.shape[1])
    if block_table is None:
        return
    table = block_table.cpu()
    for request, (length, n) in enumerate(zip(lengths, q_lens, strict=True)):
        if not n or not length:
            continue
        first = 0 if window is None else max(length - n - window + 1, 0) // page_size
        read = table[request, first : -(-length // page_size)]
        wrong = ((read < 0) | (read >= pages)).nonzero()
        if len(wrong):
            slot = first + int(wrong[0])
            raise error(3, request, int(table[request, slot]), slot)
