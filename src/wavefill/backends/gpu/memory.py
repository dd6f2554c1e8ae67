"""Device memory that the library keeps: zeros that the Hopper kernel counts in, and room for partial states.

It is the driver's, not torch's: torch may be filling a pool of a graph's with all that is allocated, and takes back
what it finds there. Calls of a stream run one after the other and share theirs.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

#: Words of a block of zeros that calls take their counters from, a few thousand captured calls; never given back, for a
#: graph may be replayed at any time.
BLOCK_WORDS = 1 << 20
#: Words of the least and the largest workspace of a stream. A stream that needs more gets one of twice the size, and
#: the old one stays, for kernels may be using it; a call that needs more than the largest has memory of its own.
LEAST_WORKSPACE, LARGEST_WORKSPACE = 1 << 18, 1 << 23

_lock = threading.Lock()
_counters: dict[tuple[int, int], tuple[int, int]] = {}
_blocks: dict[int, tuple[int, int]] = {}
_workspaces: dict[tuple[int, int], tuple[int, int]] = {}
_kept: list[Tensor] = []


def done(result: Any) -> Any:
    """What a call of cuda.bindings returned after its status; RuntimeError where that is no success."""
    status, *rest = result
    if int(status):
        raise RuntimeError(f"CUDA: {status!r}")
    return rest[0] if len(rest) == 1 else tuple(rest)


def counters(device: int, stream: int, words: int, capturing: bool) -> int:
    """The address of `words` zeros that no other call uses at the same time; a kernel leaves zeros behind.

    A captured call has its own, since graphs may be replayed side by side. The device is current.
    """
    if capturing:
        with _lock:
            address, used = _blocks.get(device, (0, BLOCK_WORDS))
            if used + words <= BLOCK_WORDS:
                _blocks[device] = address, used + words
                return address + 4 * used
            # None was made before, or all are taken: memory of the graph's, which every replay sets to zero.
            own = torch.zeros(words, dtype=torch.int32, device=device)
            _kept.append(own)
            return own.data_ptr()
    found = _counters.get((device, stream))
    if found is None or found[1] < words:
        with _lock:
            found = _counters.get((device, stream))
            if found is None or found[1] < words:
                address, used = _blocks.get(device, (0, BLOCK_WORDS))
                if used + words > BLOCK_WORDS:
                    address, used = _zeros(max(words, BLOCK_WORDS), stream), 0
                _blocks[device] = address, used + words
                found = _counters[device, stream] = address + 4 * used, words
    return found[0]


def workspace(device: int, stream: int, words: int) -> int:
    """The address of `words` of any value for a call of one launch that is not captured; 0 where that is too many.

    The next call of the stream has the same. A call of several launches cannot use it: another thread's might come
    between them. The device is current.
    """
    found = _workspaces.get((device, stream))
    if found is None or found[1] < words:
        if words > LARGEST_WORKSPACE:
            return 0
        with _lock:
            found = _workspaces.get((device, stream))
            if found is None or found[1] < words:
                size = max(LEAST_WORKSPACE, 1 << (words - 1).bit_length())
                found = _workspaces[device, stream] = _allocate(size), size
    return found[0]


def _allocate(words: int) -> int:
    """The address of new memory on the current device; another stream's capture goes on undisturbed."""
    from cuda.bindings import driver

    mode = done(driver.cuThreadExchangeStreamCaptureMode(
        driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    try:
        return int(done(driver.cuMemAlloc(4 * words)))
    finally:
        done(driver.cuThreadExchangeStreamCaptureMode(mode))


def _zeros(words: int, stream: int) -> int:
    """The address of so many new zeros on the current device, there by the time of the return."""
    from cuda.bindings import driver

    address = _allocate(words)
    done(driver.cuMemsetD32Async(address, 0, words, driver.CUstream(stream)))
    done(driver.cuStreamSynchronize(driver.CUstream(stream)))
    return address
