"""What wavefill is compared with on a GPU. None of it is required: a peer that is missing has a reason instead.

Paged peers read the same pages through the same table, in the order HND, in which each of them is fastest or as fast.
Peers that know only contiguous KV read a copy of it, and run on rows of equal lengths. What a peer does once for a
batch's lengths (FlashInfer's plan, FlashAttention-3's scheduler metadata) happens before its time is taken, and how
long the host is busy with it is given beside.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from wavefill.bench.gpu_peer_setup import fa3, flashinfer, sglang, sglang_kernels
from wavefill.bench.gpu_timing import Timer
from wavefill.bench.inputs import Inputs
from wavefill.bench.suites import Row

#: Bytes of scratch memory that FlashInfer's and XQA's kernels get, more than any row of the suite takes.
WORKSPACE_BYTES = 512 << 20
SEMAPHORE_BYTES = 8 << 20
#: How often plan() is timed.
PLANS = 5


@dataclass(frozen=True)
class Prepared:
    """A peer made ready for one row.

    call:   runs on a copy, given by its index, and returns [B, HQ, D].
    plan_s: seconds of host time of the peer's step before the kernels, None where it has none.
    """

    call: Callable[[int], Tensor]
    plan_s: float | None = None


@dataclass(frozen=True)
class GpuPeer:
    """One peer.

    paged:   whether it reads paged KV; if not, it needs contiguous copies and equal lengths.
    missing: why it cannot run on this machine, or None.
    prepare: makes it ready for a row's inputs.
    default: whether it runs unless it is named; compiling for each shape takes too long for that.
    """

    name: str
    paged: bool
    missing: Callable[[], str | None]
    prepare: Callable[[Inputs], Prepared]
    default: bool = True

    def gap(self, row: Row) -> str | None:
        """Why it does not run this row, or None."""
        if not self.paged and row.ragged:
            return "takes no ragged batch"
        return self.missing()


# ---- paged peers


def _table(inputs: Inputs) -> Tensor:
    """The block table with page 0 in unused slots: no peer promises to leave them alone."""
    assert inputs.block_table is not None
    return inputs.block_table.clamp(min=0)


def _pages(inputs: Inputs) -> list[tuple[Tensor, Tensor]]:
    """K and V of each copy as [pages, KH, page_size, D], in HND contiguous."""
    return [(copy.k.transpose(1, 2), copy.v.transpose(1, 2)) for copy in inputs.copies]


@dataclass(frozen=True)
class _Csr:
    """A paged batch as FlashInfer takes it; the pointers are on the host, as engines keep them."""

    indptr: Tensor
    indices: Tensor
    last: Tensor
    lens: Tensor

    @classmethod
    def of(cls, inputs: Inputs) -> _Csr:
        assert inputs.block_table is not None
        lens, page = inputs.lens.cpu(), inputs.copies[0].k.shape[1]
        counts = (lens + page - 1) // page
        indptr = torch.zeros(len(counts) + 1, dtype=torch.int32)
        indptr[1:] = counts.cumsum(0)
        indices = inputs.block_table[inputs.block_table >= 0].to(torch.int32)
        return cls(indptr, indices, (lens - (counts - 1) * page).to(torch.int32), lens)


def _planned(plan: Callable[[], object]) -> float:
    """Median seconds of host time of a plan, the first one (which may compile) left out."""
    taken = []
    for i in range(PLANS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        plan()
        if i:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


@cache
def _workspace() -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


@cache
def _semaphores() -> Tensor:
    return torch.zeros(SEMAPHORE_BYTES, dtype=torch.uint8, device="cuda")


def _prepare_fa3(inputs: Inputs) -> Prepared:
    ops: Any = torch.ops._vllm_fa3_C
    row, q, lens, table = inputs.row, inputs.q, inputs.lens, _table(inputs)
    batch, longest, page = len(row.lens), max(row.lens), inputs.copies[0].k.shape[1]
    cu_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    out, scale = torch.empty_like(q), row.D**-0.5
    metadata: list[Tensor] = []

    def plan() -> None:
        metadata[:] = [ops.get_scheduler_metadata(
            batch, 1, longest, row.HQ, row.KH, row.D, row.D, q.dtype, lens, cu_q, None, None, None, None, page, 0,
            True, -1, -1, False, 0, None, 0)]

    def call(copy: int) -> Tensor:
        kv = inputs.copies[copy]
        result: Tensor = ops.fwd(
            q, kv.k, kv.v, None, None, None, out, cu_q, None, None, None, lens, 1, longest, table, None, None, None,
            None, None, None, None, None, scale, True, -1, -1, 0.0, True, metadata[0], 0, None, 0, None, 1, 0, None)[0]
        return result

    return Prepared(call, _planned(plan))


def _prepare_flashinfer(inputs: Inputs) -> Prepared:
    package: Any = importlib.import_module("flashinfer")
    row, q, csr, pages = inputs.row, inputs.q, _Csr.of(inputs), _pages(inputs)
    out = torch.empty_like(q)
    wrapper = package.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(), "HND", use_cuda_graph=True, use_tensor_cores=True,
        paged_kv_indptr_buffer=csr.indptr.to(q.device), paged_kv_indices_buffer=csr.indices.clone(),
        paged_kv_last_page_len_buffer=csr.last.to(q.device))
    plan_s = _planned(lambda: wrapper.plan(
        csr.indptr, csr.indices, csr.last, row.HQ, row.KH, row.D, inputs.copies[0].k.shape[1],
        q_data_type=q.dtype, kv_data_type=q.dtype))
    return Prepared(lambda copy: wrapper.run(q, pages[copy], out=out), plan_s)


@cache
def _batch_attention() -> Any:
    return importlib.import_module("flashinfer").BatchAttention(kv_layout="HND", device="cuda")


def _prepare_batch_attention(inputs: Inputs) -> Prepared:
    wrapper, row, q = _batch_attention(), inputs.row, inputs.q
    csr, pages = _Csr.of(inputs), _pages(inputs)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    q_indptr = torch.arange(len(row.lens) + 1, dtype=torch.int32)
    plan_s = _planned(lambda: wrapper.plan(
        q_indptr, csr.indptr, csr.indices, csr.lens, row.HQ, row.KH, row.D, row.D, inputs.copies[0].k.shape[1],
        causal=False, q_data_type=q.dtype, kv_data_type=q.dtype))

    def call(copy: int) -> Tensor:
        result: Tensor = wrapper.run(q, pages[copy], out=out, lse=lse)[0]
        return result

    return Prepared(call, plan_s)


def _prepare_xqa(inputs: Inputs) -> Prepared:
    xqa: Any = importlib.import_module("flashinfer.xqa").xqa
    row, q, table, pages = inputs.row, inputs.q.unsqueeze(1), _table(inputs), _pages(inputs)
    lens = inputs.lens.view(torch.uint32).unsqueeze(1)
    out, page = torch.empty_like(q), inputs.copies[0].k.shape[1]

    def call(copy: int) -> Tensor:
        k, v = pages[copy]
        xqa(q, k, v, table, lens, out, _workspace(), _semaphores(), row.KH, page, kv_layout="HND")
        return out.squeeze(1)

    return Prepared(call)


# ---- contiguous peers


def _sdpa(backend: str, *, folded: bool) -> Callable[[Inputs], Prepared]:
    """torch's sdpa on one back end; `folded` passes the G query heads of a KV head as query tokens."""

    def prepare(inputs: Inputs) -> Prepared:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        chosen = getattr(SDPBackend, backend)
        attend = torch.nn.functional.scaled_dot_product_attention
        batch, KH = len(inputs.row.lens), inputs.row.KH
        q = inputs.q.view(batch, KH, -1, inputs.row.D) if folded else inputs.q.unsqueeze(2)

        def call(copy: int) -> Tensor:
            (k, v), = inputs.copies[copy].peer
            with sdpa_kernel([chosen]):
                return attend(q, k, v, enable_gqa=not folded).reshape(inputs.q.shape)

        return Prepared(call)

    return prepare


#: Split counts of which SGLang's kernels get the fastest, row by row; its server takes one by a formula.
SGLANG_SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)


def _prepare_sglang(inputs: Inputs) -> Prepared:
    """SGLang's Triton kernels, which read tokens one by one through a list of slots; here the slots are in order."""
    kernels, row, q = sglang_kernels(), inputs.row, inputs.q
    B, HQ, D = q.shape
    S = row.lens[0]
    buffers = [tuple(cache.as_strided(((B * row.KH - row.KH + 1) * S, row.KH, D), (D, S * D, 1)) for cache in pair)
               for copy in inputs.copies for pair in copy.peer]
    request = torch.arange(B, device=q.device)
    slots = (request[:, None] * row.KH * S + torch.arange(S, device=q.device)).flatten()
    indptr = (torch.arange(B + 1, device=q.device) * S).to(torch.int32)
    out = torch.empty_like(q)

    def of(splits: int) -> Callable[[int], Tensor]:
        logits = torch.empty(B, HQ, splits, D, device=q.device)
        lse, counts = torch.empty(B, HQ, splits, device=q.device), torch.full((B,), splits, dtype=torch.int32,
                                                                               device=q.device)

        def call(copy: int) -> Tensor:
            k, v = buffers[copy]
            kernels.decode_attention_fwd(q, k, v, out, indptr, slots, logits, lse, counts, splits, D**-0.5, 1.0, 1.0)
            return out

        return call

    timer = Timer(len(buffers), len(buffers))
    best, _ = timer.best({str(splits): of(splits) for splits in SGLANG_SPLITS})
    timer.close()
    return Prepared(of(int(best)))


def _prepare_flex(inputs: Inputs) -> Prepared:
    attend, q = _flex_attention(), inputs.q.unsqueeze(2)

    def call(copy: int) -> Tensor:
        (k, v), = inputs.copies[copy].peer
        result: Tensor = attend(q, k, v, enable_gqa=True).squeeze(2)
        return result

    return Prepared(call)


@cache
def _flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


PEERS = (
    GpuPeer("fa3", True, fa3, _prepare_fa3),
    GpuPeer("flashinfer", True, flashinfer, _prepare_flashinfer),
    GpuPeer("batch_attention", True, flashinfer, _prepare_batch_attention),
    GpuPeer("xqa", True, flashinfer, _prepare_xqa),
    GpuPeer("cudnn", False, lambda: None, _sdpa("CUDNN_ATTENTION", folded=False)),
    GpuPeer("cudnn_folded", False, lambda: None, _sdpa("CUDNN_ATTENTION", folded=True)),
    GpuPeer("sdpa_flash", False, lambda: None, _sdpa("FLASH_ATTENTION", folded=False)),
    GpuPeer("sglang", False, sglang, _prepare_sglang),
    GpuPeer("flex", False, lambda: None, _prepare_flex, default=False),
)
#: The names of those that read paged KV, which wavefill is held against.
PAGED = tuple(peer.name for peer in PEERS if peer.paged)
