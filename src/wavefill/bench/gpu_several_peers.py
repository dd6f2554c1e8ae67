"""Calls of several query tokens on a GPU: wavefill's through its public functions, and those of other libraries.

Every library reads the same KV. Those that read pages get them in the order HND, contiguous caches are
[B, S, KH, D] in memory, so that each of them reads one as it lies. What a library does once for a batch's lengths
(FlashInfer's plan, FlashAttention-3's scheduler metadata) happens before its time is taken.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wavefill import attention, decode_attention
from wavefill.bench import gpu_peer_setup, gpu_peers
from wavefill.bench.gpu_timing import reason
from wavefill.bench.inputs import Copy, Inputs
from wavefill.bench.suites import Row
from wavefill.spec import invalid

Call = Callable[[int], Tensor]


@dataclass(frozen=True)
class Case:
    """One call to be timed: as many causal query tokens in each request, at the ends of their keys.

    inputs: the KV, and q [B * q_len, HQ, D] packed.
    window: keys that a token sees, its own included; None for all.
    """

    name: str
    inputs: Inputs
    q_len: int
    window: int | None = None

    @property
    def cu_seqlens_q(self) -> Tensor:
        """[B + 1] int32, where each request's tokens start in q."""
        starts = torch.arange(len(self.inputs.row.lens) + 1, dtype=torch.int32, device=self.inputs.q.device)
        return starts * self.q_len

    @property
    def whole(self) -> bool:
        """Whether every token of a contiguous cache is a query token too: a prompt without anything before it."""
        row = self.inputs.row
        return (self.inputs.block_table is None and self.window is None
                and set(row.lens) == {self.q_len} == {self.inputs.copies[0].k.shape[1]})


@dataclass(frozen=True)
class Library:
    """One library.

    gap:     why it does not take a case on this machine, or None.
    prepare: makes it ready; the call runs on a copy, given by its index, and returns [T, HQ, D] or [B, HQ, S, D].
    """

    name: str
    gap: Callable[[Case], str | None]
    prepare: Callable[[Case], Call]


def packed(result: Tensor) -> Tensor:
    """A library's result as [T, HQ, D]."""
    return result.transpose(1, 2).flatten(0, 1) if result.dim() == 4 else result


# ---- wavefill


def wavefill(case: Case) -> Call:
    """`decode_attention` for one query token a request, `attention` for more; its output is NaN before the first."""
    made, longest, cu = case.inputs, max(case.inputs.row.lens), case.cu_seqlens_q
    out = torch.full_like(made.q, float("nan"))

    def decode(copy: int) -> Tensor:
        kv = made.copies[copy]
        return decode_attention(made.q, kv.k, kv.v, made.lens, made.block_table, window=case.window,
                                max_seq_len=longest, out=out)

    def several(copy: int) -> Tensor:
        kv = made.copies[copy]
        return attention(made.q, kv.k, kv.v, made.lens, made.block_table, cu_seqlens_q=cu, max_q_len=case.q_len,
                         window=case.window, max_seq_len=longest, out=out)

    return decode if case.q_len == 1 else several


def _own(case: Case) -> Call:
    """The same by wavefill's own kernel where prompts go to a library."""
    call = wavefill(case)

    def own(copy: int) -> Tensor:
        before = os.environ.get("WAVEFILL_PREFILL")
        os.environ["WAVEFILL_PREFILL"] = "own"
        try:
            return call(copy)
        finally:
            os.environ.pop("WAVEFILL_PREFILL")
            if before is not None:
                os.environ["WAVEFILL_PREFILL"] = before

    return own


# ---- FlashAttention-3


def _fa3(case: Case) -> Call:
    ops: Any = torch.ops._vllm_fa3_C
    made, row, cu = case.inputs, case.inputs.row, case.cu_seqlens_q
    q, lens, tokens = made.q, made.lens, case.q_len
    longest = made.copies[0].k.shape[1] if made.block_table is None else max(row.lens)
    table = None if made.block_table is None else made.block_table.clamp(min=0)
    page = None if table is None else made.copies[0].k.shape[1]
    left, right = (-1, -1) if case.window is None else (case.window - 1, 0)
    out = torch.full_like(q, float("nan"))
    metadata = ops.get_scheduler_metadata(
        len(row.lens), tokens, longest, row.HQ, row.KH, row.D, row.D, q.dtype, lens, cu, None, None, None, None, page,
        0, True, left, right, False, 0, None, 0)

    def call(copy: int) -> Tensor:
        kv = made.copies[copy]
        result: Tensor = ops.fwd(
            q, kv.k, kv.v, None, None, None, out, cu, None, None, None, lens, tokens, longest, table, None, None, None,
            None, None, None, None, None, row.D**-0.5, True, left, right, 0.0, True, metadata, 0, None, 0, None, 1, 0,
            None)[0]
        return result

    return call


# ---- FlashInfer


def _no_flashinfer(case: Case) -> str | None:
    if case.inputs.block_table is None or case.window is not None:
        return "is run on pages without a window"
    return gpu_peer_setup.flashinfer()


def _flashinfer(backend: str) -> Callable[[Case], Call]:
    """FlashInfer's kernels for paged prefill, planned as for a CUDA graph."""

    def prepare(case: Case) -> Call:
        package: Any = importlib.import_module("flashinfer")
        made, row, cu = case.inputs, case.inputs.row, case.cu_seqlens_q
        csr, pages = gpu_peers._Csr.of(made), gpu_peers._pages(made)
        out = torch.full_like(made.q, float("nan"))
        wrapper = package.BatchPrefillWithPagedKVCacheWrapper(
            gpu_peers._workspace(), "HND", use_cuda_graph=True, qo_indptr_buf=cu.clone(),
            paged_kv_indptr_buf=csr.indptr.to(made.q.device), paged_kv_indices_buf=csr.indices.clone(),
            paged_kv_last_page_len_buf=csr.last.to(made.q.device), backend=backend)
        wrapper.plan(cu.cpu(), csr.indptr, csr.indices, csr.last, row.HQ, row.KH, row.D, made.copies[0].k.shape[1],
                     causal=True, q_data_type=made.q.dtype, kv_data_type=made.q.dtype)

        def call(copy: int) -> Tensor:
            result: Tensor = wrapper.run(made.q, pages[copy], out=out)
            return result

        return call

    return prepare


def precompile(names: Iterable[str], sizes: Iterable[int]) -> list[str]:
    """Compile FlashInfer's kernels for head sizes, in parallel; returns what failed, and why."""
    backends = [name for name in ("fa2", "fa3") if _FLASHINFER[name] in set(names)]
    if not backends or gpu_peer_setup.flashinfer() is not None:
        return []
    try:
        jit: Any = importlib.import_module("flashinfer.jit")
        build: Any = importlib.import_module("flashinfer.jit.core").build_jit_specs
        build([jit.gen_batch_prefill_module(backend, *[torch.bfloat16] * 3, torch.int32, D, D, 0, False, False, False)
               for backend in backends for D in sorted(set(sizes))], verbose=False)
    except Exception as error:
        return [f"FlashInfer cannot compile ahead: {reason(error)}"]
    return []


# ---- PyTorch


def _torch_flash(case: Case) -> Call:
    """PyTorch's FlashAttention-2: a contiguous cache as packed keys, and how many of each request's are used."""
    made, row, cu = case.inputs, case.inputs.row, case.cu_seqlens_q
    S = made.copies[0].k.shape[1]
    cu_k = torch.arange(len(row.lens) + 1, dtype=torch.int32, device=made.q.device) * S
    window = {} if case.window is None else {"window_size_left": case.window - 1, "window_size_right": 0}
    pairs = [(copy.k.flatten(0, 1), copy.v.flatten(0, 1)) for copy in made.copies]

    def call(copy: int) -> Tensor:
        k, v = pairs[copy]
        result: Tensor = torch.ops.aten._flash_attention_forward(
            made.q, k, v, cu, cu_k, case.q_len, S, 0.0, True, False, scale=row.D**-0.5, seqused_k=made.lens,
            **window)[0]
        return result

    return call


def _sdpa(backend: str) -> Callable[[Case], Call]:
    def prepare(case: Case) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        chosen, made = getattr(SDPBackend, backend), case.inputs
        q = made.q.view(len(made.row.lens), case.q_len, *made.q.shape[1:]).transpose(1, 2)
        pairs = [(copy.k.transpose(1, 2), copy.v.transpose(1, 2)) for copy in made.copies]

        def call(copy: int) -> Tensor:
            k, v = pairs[copy]
            with sdpa_kernel([chosen]):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return call

    return prepare


def _not_contiguous(case: Case) -> str | None:
    return None if case.inputs.block_table is None else "takes no such pages"


def _not_whole(case: Case) -> str | None:
    return None if case.whole else "takes no lengths"


WAVEFILL = Library("wavefill", lambda case: None, wavefill)
_FLASHINFER = {"fa2": "flashinfer", "fa3": "flashinfer_fa3"}
LIBRARIES = (
    Library("wavefill:own", _not_contiguous, _own),
    Library("fa3", lambda case: gpu_peer_setup.fa3(), _fa3),
    *(Library(name, _no_flashinfer, _flashinfer(backend)) for backend, name in _FLASHINFER.items()),
    Library("torch_flash", _not_contiguous, _torch_flash),
    Library("cudnn", _not_whole, _sdpa("CUDNN_ATTENTION")),
    Library("sdpa_flash", _not_whole, _sdpa("FLASH_ATTENTION")),
)
#: Those that run unless others are named: FlashInfer's kernels for Hopper take minutes to compile.
DEFAULT = tuple(library.name for library in LIBRARIES if library.name != "flashinfer_fa3")


def choose(text: str | None) -> tuple[Library, ...]:
    """Libraries by names with commas between; None for those that run by default, "none" for none."""
    by_name = {library.name: library for library in LIBRARIES}
    names = DEFAULT if text is None else () if text == "none" else tuple(by_name) if text == "all" else text.split(",")
    for name in names:
        if name not in by_name:
            raise invalid("--peers", f"takes all, none, or some of {', '.join(by_name)}", repr(name),
                          "Use these names.")
    return tuple(by_name[name] for name in dict.fromkeys(names))


# ---- what lies past the end


@dataclass(frozen=True)
class Probe:
    """Whether a library's result turns NaN when `holds` past the end of a contiguous cache do.

    holds: "V", or "K and V"; found: "clean", "NaN", or why there is no result.
    """

    library: str
    D: int
    holds: str
    found: str

    def to_dict(self) -> dict[str, Any]:
        return {"library": self.library, "D": self.D, "nan_in": self.holds, "found": self.found}


def probe(libraries: Iterable[Library], D: int, device: str, *, S: int = 1024, unused: int = 100,
          tokens: int = 256) -> list[Probe]:
    """Run wavefill and each library on two requests of S - unused keys, with NaN in the other slots.

    S:      slots of a request in the contiguous cache.
    tokens: query tokens of a request.
    """
    row = Row("probe", "S", 32, 8, D, (S - unused,) * 2, cpu=False)
    found: list[Probe] = []
    generator = torch.Generator(device).manual_seed(0)
    k, v = (torch.empty(2, S, 8, D, dtype=torch.bfloat16, device=device).normal_(generator=generator)
            for _ in range(2))
    q = torch.empty(2 * tokens, 32, D, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    lens = torch.tensor(row.lens, dtype=torch.int32, device=device)
    for cache, holds in ((v, "V"), (k, "K and V")):
        cache[:, S - unused:] = float("nan")
        case = Case("probe", Inputs(row, q, lens, None, [Copy(k, v, [])], None), tokens)
        found += [Probe(library.name, D, holds, library.gap(case) or _ends_in(library, case))
                  for library in (WAVEFILL, *libraries)]
    return found


def _ends_in(library: Library, case: Case) -> str:
    try:
        result = library.prepare(case)(0)
        return "clean" if bool(torch.isfinite(result).all()) else "NaN"
    except Exception as error:  # a library that breaks must not take the run with it; its reason is shown
        return reason(error)
