"""Runs attention on tensors that touch forbidden memory at their end, then at their start; a stray access is fatal.

Usage: python reads_in_bounds.py            every dtype
       python reads_in_bounds.py overrun    claims one slot too many, and must die
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import helpers
from wavefill import ops

_PAGE = mmap.PAGESIZE
_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Fence:
    """Memory between two pages that may be neither read nor written."""

    def __init__(self, nbytes: int) -> None:
        self.size = -(-max(nbytes, 1) // _PAGE) * _PAGE
        self.memory = mmap.mmap(-1, self.size + 2 * _PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        for at in (start, start + _PAGE + self.size):
            if _mprotect(at, _PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")

    def place(self, tensor: Tensor, at_end: bool) -> Tensor:
        """A copy that ends where the second forbidden page begins, or starts where the first ends."""
        nbytes = tensor.numel() * tensor.element_size()
        offset = _PAGE + (self.size - nbytes if at_end else 0)
        flat = torch.frombuffer(self.memory, dtype=torch.uint8, count=max(nbytes, 1), offset=offset)[:nbytes]
        return flat.view(tensor.dtype).view(tensor.shape).copy_(tensor)


SIZES = [(1, 1), (7, 9), (24, 17), (64, 64), (80, 80), (128, 128), (576, 512)]
LENGTHS = [1, 31, 64, 130]
#: Lengths at which padding to 32 or 256 would reach past the end; one head size is enough for them.
TAILS = [*range(26, 33), 63, 64, 65, 95, 96, 384]


def main(dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    fences = [Fence(1 << 20) for _ in range(6)]
    shapes = [(D, DV, n) for D, DV in SIZES for n in LENGTHS] + [(8, 8, n) for n in TAILS]
    for D, DV, n in shapes:
        for page_size in (None, 16):
            case = helpers.make_case([n], HQ=5, KH=1, D=D, DV=DV, dtype=dtype, page_size=page_size, spare_pages=0)
            if page_size:
                # The request's last page is the cache's last.
                case.block_table[0] = torch.arange(case.block_table.shape[1])
                case.k_cache.nan_to_num_(0.5)
                case.v_cache.nan_to_num_(0.5)
            want, _ = helpers.run(case, schedule="stream_k")
            for at_end in (True, False):
                q, k, v, lens = (f.place(t, at_end) for f, t in zip(fences, case.tensors()[:4], strict=False))
                table = None if page_size is None else fences[4].place(case.block_table, at_end)
                for isa in helpers.cpu_isas():
                    print(dtype, isa, D, DV, n, page_size, "end" if at_end else "start", flush=True)
                    out = fences[5].place(torch.zeros_like(want), at_end)
                    with helpers.using_isa(isa):
                        ops.attention_out(q, k, v, lens, table, schedule="stream_k", out=out)
                    torch.testing.assert_close(out, want, rtol=0.02, atol=0.02)
    for n in TAILS:
        drafts(dtype, fences, n)
    print(f"{len(shapes)} shapes of {dtype} in bounds")


def drafts(dtype: torch.dtype, fences: list[Fence], n: int) -> None:
    """n query tokens of a request: nothing past the mask's last word, the sinks or the slopes is read."""
    case = helpers.make_case([n + 70], q_lens=[n], HQ=5, KH=1, D=8, dtype=dtype, softcap=2.0, sinks=True,
                             alibi_slopes=True, mask=True)
    want, _ = helpers.run(case)
    for at_end in (True, False):
        placed = [f.place(t, at_end) for f, t in zip(fences, (case.sinks, case.alibi_slopes, case.mask), strict=False)]
        fenced = dataclasses.replace(case, sinks=placed[0], alibi_slopes=placed[1], mask=placed[2])
        for isa in helpers.cpu_isas():
            print(dtype, isa, "drafts of", n, "end" if at_end else "start", flush=True)
            with helpers.using_isa(isa):
                torch.testing.assert_close(helpers.run(fenced)[0], want, rtol=0.02, atol=0.02)


def overrun() -> None:
    fence = Fence(64 * 64)
    fence.place(torch.zeros(64, 16), at_end=True)
    start = _PAGE + fence.size - 64 * 64
    k = torch.frombuffer(fence.memory, dtype=torch.float32, count=65 * 16, offset=start).view(1, 65, 1, 16)
    lens = torch.tensor([64], dtype=torch.int32)
    ops.attention(torch.zeros(1, 1, 16), k, torch.zeros(1, 65, 1, 16), lens, schedule="stream_k")
    print("64 slots read", flush=True)
    ops.attention(torch.zeros(1, 1, 16), k, torch.zeros(1, 65, 1, 16), lens + 1, schedule="stream_k")


if __name__ == "__main__":
    if sys.argv[1:] == ["overrun"]:
        overrun()
    else:
        for each in helpers.DTYPES:
            main(each)
