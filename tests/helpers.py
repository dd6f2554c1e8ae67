"""Inputs that show faults, and the tolerance that they are judged by.

Slots, pages and outputs that a call has no business with hold NaN, so that reading or leaving one shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import wavefill
from wavefill import reference
from wavefill.backends.cpu import _core
from wavefill.scores import Options

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SCHEDULES = ("fixed", "stream_k", "invariant")
#: nhd and hnd are two buffers; kv_blocks holds a K block and a V block in turn; kv_tokens K and V of a token side by
#: side; layers is one layer of a buffer of several; v_hnd has only V transposed.
LAYOUTS = ("nhd", "hnd", "kv_blocks", "kv_tokens", "layers", "v_hnd")


def cpu_isas() -> list[str]:
    """Instruction sets that the compiled core can use on this machine, the best first."""
    return list(_core.isas())


@contextmanager
def using_isa(name: str) -> Iterator[None]:
    """Runs the kernels of one instruction set."""
    before = _core.isa()
    _core.set_isa(name)
    try:
        yield
    finally:
        _core.set_isa(before)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bytes, so that -0.0 and 0.0 differ and NaN equals itself."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def name_of(value: object) -> str:
    """A short test id: "bfloat16" for a dtype, "D192_DV128" for a dict, str() of the rest."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, dict):
        return "_".join(f"{k}{v}" for k, v in value.items())
    if isinstance(value, (tuple, list)):
        return "x".join(name_of(v) for v in value)
    return str(value)


@dataclass(frozen=True)
class Case:
    """One call's tensors and options, as the public functions take them.

    cu_seqlens_q is None for one query token a request (`decode_attention`).
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor | None
    seq_lens: Tensor
    block_table: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    scale: float | None = None
    causal: bool = True
    window: int | None = None
    head_dim_v: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    mask: Tensor | None = None

    @property
    def out_shape(self) -> tuple[int, int, int]:
        """[T, HQ, DV]"""
        DV = self.head_dim_v if self.v_cache is None else self.v_cache.shape[-1]
        assert DV is not None
        return (self.q.shape[0], self.q.shape[1], DV)

    @cached_property
    def expected(self) -> Expected:
        """What the call must give, and how near; computed once."""
        return expect(self)

    def options(self) -> dict[str, Any]:
        """The keyword arguments that `reference.attention` takes."""
        return {
            "cu_seqlens_q": self.cu_seqlens_q, "scale": self.scale, "causal": self.causal,
            "window": self.window, "head_dim_v": self.head_dim_v,
            "options": Options(self.softcap, self.sinks, self.alibi_slopes, self.mask),
        }

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
        """The positional arguments of every function."""
        return self.q, self.k_cache, self.v_cache, self.seq_lens, self.block_table

    def request(self, b: int) -> Case:
        """The b-th request as a batch of its own, over the same storage."""
        q = self.q[b : b + 1]
        starts = None
        if self.cu_seqlens_q is not None:
            first, last = int(self.cu_seqlens_q[b]), int(self.cu_seqlens_q[b + 1])
            q, starts = self.q[first:last], torch.tensor([0, last - first], dtype=torch.int32)
        one = {"q": q, "seq_lens": self.seq_lens[b : b + 1], "cu_seqlens_q": starts}
        if self.mask is not None:
            one["mask"] = self.mask[first:last]
        if self.block_table is not None:
            return replace(self, **one, block_table=self.block_table[b : b + 1])
        v_cache = None if self.v_cache is None else self.v_cache[b : b + 1]
        return replace(self, **one, k_cache=self.k_cache[b : b + 1], v_cache=v_cache)


def make_case(
    seq_lens: Sequence[int],
    *,
    HQ: int = 4,
    KH: int = 2,
    D: int = 32,
    DV: int | None = None,
    dtype: torch.dtype = torch.float32,
    page_size: int | None = None,
    layout: str = "nhd",
    q_lens: Sequence[int] | None = None,
    capacity: int | None = None,
    spare_pages: int = 3,
    table_pad: int = -1,
    latent: bool = False,
    poison: float = math.nan,
    seed: int = 0,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool | float | Tensor = False,
    alibi_slopes: bool | float | Tensor = False,
    mask: bool | Sequence[Tensor] = False,
) -> Case:
    """Random inputs; the same seed gives the same numbers in every layout, page size and capacity.

    capacity: slots of a request (contiguous) or of a row of the block table (paged); the longest request if None.
    spare_pages: pages of no request, shuffled among the others.
    table_pad: what the unused entries of the block table hold.
    latent:    V is the first DV columns of K (v_cache None); `scale` defaults to 1 / sqrt(D).
    poison:    what every slot without a token holds.
    sinks, alibi_slopes: True for random ones, a number for all heads the same; slopes of either sign.
    mask:      True for random ones that hide two in five of the tokens of each draft, or the masks for `pack_mask`.
    """
    DV = D if DV is None else DV
    B, longest = len(seq_lens), max(seq_lens, default=0)
    capacity = max(1, longest if capacity is None else capacity)
    rng = torch.Generator().manual_seed(seed)
    T = B if q_lens is None else sum(q_lens)
    q = torch.randn(T, HQ, D, generator=rng).to(dtype)
    k, v = torch.randn(sum(seq_lens), KH, D, generator=rng), torch.randn(sum(seq_lens), KH, DV, generator=rng)

    request = torch.repeat_interleave(torch.arange(B), torch.tensor(seq_lens, dtype=torch.long))
    position = torch.cat([torch.arange(n) for n in seq_lens]) if B else torch.empty(0, dtype=torch.long)
    block_table = None
    if page_size is None:
        k_cache, v_cache = _storage(layout, B, capacity, KH, D, DV, dtype, poison)
        slots = (request, position)
    else:
        used = [-(-n // page_size) for n in seq_lens]
        pages = torch.randperm(sum(used) + spare_pages, generator=rng)
        block_table = torch.full((B, -(-capacity // page_size)), table_pad, dtype=torch.int32)
        for b, some in enumerate(pages[: sum(used)].split(used) if B else ()):
            block_table[b, : len(some)] = some
        k_cache, v_cache = _storage(layout, max(1, len(pages)), page_size, KH, D, DV, dtype, poison)
        slots = (block_table[request, position // page_size].long(), position % page_size)
    k_cache[slots] = k.to(dtype)
    v_cache[slots] = v.to(dtype)

    starts = None
    if q_lens is not None:
        starts = torch.tensor([0, *torch.tensor(q_lens, dtype=torch.int32).cumsum(0).tolist()], dtype=torch.int32)
    rng = torch.Generator().manual_seed(seed + 1)  # of their own, so that q, K and V stay the same without them
    heads = _per_head(sinks, 1.5 * torch.randn(HQ, generator=rng))
    slopes = _per_head(alibi_slopes, 0.5 * torch.rand(HQ, generator=rng) - 0.1)
    if mask is True:
        mask = [torch.rand(n, n, generator=rng) < 0.6 for n in q_lens or ()]
    case = Case(q, k_cache, v_cache, torch.tensor(seq_lens, dtype=torch.int32), block_table, starts,
                scale=scale, causal=causal, window=window, softcap=softcap, sinks=heads, alibi_slopes=slopes,
                mask=None if mask is False else wavefill.pack_mask(mask))
    if latent:
        return replace(case, v_cache=None, head_dim_v=DV, scale=D**-0.5 if scale is None else scale)
    return case


def _per_head(given: bool | float | Tensor, some: Tensor) -> Tensor | None:
    if isinstance(given, Tensor):
        return given
    if isinstance(given, bool):
        return some if given else None
    return torch.full_like(some, given)


def _storage(
    layout: str, N: int, P: int, KH: int, D: int, DV: int, dtype: torch.dtype, poison: float
) -> tuple[Tensor, Tensor]:
    """K [N, P, KH, D] and V [N, P, KH, DV] as views of poisoned buffers."""

    def buffer(*shape: int) -> Tensor:
        return torch.full(shape, poison, dtype=dtype)

    wide = max(D, DV)
    if layout == "nhd":
        return buffer(N, P, KH, D), buffer(N, P, KH, DV)
    if layout == "hnd":
        return buffer(N, KH, P, D).transpose(1, 2), buffer(N, KH, P, DV).transpose(1, 2)
    if layout == "v_hnd":
        return buffer(N, P, KH, D), buffer(N, KH, P, DV).transpose(1, 2)
    if layout == "kv_blocks":
        both = buffer(N, 2, P, KH, wide)
        return both[:, 0, ..., :D], both[:, 1, ..., :DV]
    if layout == "kv_tokens":
        both = buffer(N, P, KH, D + DV)
        return both[..., :D], both[..., D:]
    if layout == "layers":
        both = buffer(N, P, 3, 2, KH, wide)
        return both[:, :, 1, 0, :, :D], both[:, :, 1, 1, :, :DV]
    raise ValueError(layout)


def guarded(shape: Sequence[int], dtype: torch.dtype, guard: int = 128) -> tuple[Tensor, Callable[[], None]]:
    """A NaN-filled contiguous tensor inside a larger buffer, and a check that the bands round it are untouched."""
    size = math.prod(shape)
    buffer = torch.full((size + 2 * guard,), 77.0, dtype=dtype)
    middle = buffer[guard : guard + size].fill_(math.nan).view(*shape)

    def untouched() -> None:
        assert (buffer[:guard] == 77).all(), "wrote before the output"
        assert (buffer[guard + size :] == 77).all(), "wrote past the output"

    return middle, untouched


def run(case: Case, *, out: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of the public function that fits the case."""
    common = {"scale": case.scale, "window": case.window, "head_dim_v": case.head_dim_v, "softcap": case.softcap,
              "sinks": case.sinks, "alibi_slopes": case.alibi_slopes, "out": out, **kwargs}
    if case.cu_seqlens_q is None and case.causal:
        return wavefill.decode_attention(*case.tensors(), return_lse=True, **common)
    starts = case.cu_seqlens_q
    if starts is None:
        starts = torch.arange(len(case.seq_lens) + 1, dtype=torch.int32)
    return wavefill.attention(*case.tensors(), cu_seqlens_q=starts, causal=case.causal, mask=case.mask, return_lse=True,
                              **common)


def check(case: Case, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Runs the case into a NaN-filled output between guard bands and holds it to the reference."""
    out, untouched = guarded(case.out_shape, case.q.dtype)
    result, lse = run(case, out=out, **kwargs)
    untouched()
    assert result.data_ptr() == out.data_ptr() or not out.numel(), "out= was not written in place"
    assert_close_to_reference(result, lse, case)
    return result, lse


def check_each_isa(case: Case, **kwargs: Any) -> None:
    """`check` with the kernels of every instruction set of this machine."""
    for isa in cpu_isas():
        with using_isa(isa):
            try:
                check(case, **kwargs)
            except AssertionError as error:
                raise AssertionError(f"{isa}: {error}") from error


@dataclass(frozen=True)
class Expected:
    """float64 results and the largest error allowed for each (query token, head).

    out, out_bound: [T, HQ, DV] and [T, HQ]; lse, lse_bound: [T, HQ].
    """

    out: Tensor
    out_bound: Tensor
    lse: Tensor
    lse_bound: Tensor

    def check(self, out: Tensor, lse: Tensor) -> None:
        """Asserts that both are near enough, and names the worst (token, head) if not."""
        T, HQ, DV = self.out.shape
        assert tuple(out.shape) == (T, HQ, DV), f"out has shape {tuple(out.shape)}, not {(T, HQ, DV)}"
        assert tuple(lse.shape) == (T, HQ), f"lse has shape {tuple(lse.shape)}, not {(T, HQ)}"
        assert lse.dtype == torch.float32, f"lse is {lse.dtype}"
        empty = self.lse == -math.inf
        astray = (lse == -math.inf) ^ empty
        assert not astray.any(), _where("lse is -inf where it should not be, or not where it should", astray)
        wrong = empty & (out != 0).any(-1)
        assert not wrong.any(), _where("a row without keys has an output that is not 0", wrong)
        error = (out.double() - self.out).abs().amax(-1) if DV else torch.zeros_like(self.lse)
        lse_error = torch.where(empty, 0.0, (lse.double() - self.lse).abs())
        _within("output", error, self.out_bound)
        _within("lse", lse_error, self.lse_bound)


def _within(what: str, error: Tensor, bound: Tensor) -> None:
    # Not `error > bound`: NaN must fail.
    bad = ~(error <= bound)
    if bad.any():
        ratio = torch.where(bad, (error / bound).nan_to_num(math.inf), -1.0)
        token, head = divmod(int(ratio.argmax()), ratio.shape[1])
        raise AssertionError(
            f"{what}: {int(bad.sum())} of {bad.numel()} (token, head) too far from the reference; worst is token "
            f"{token}, head {head}: error {float(error[token, head]):.3e}, allowed {float(bound[token, head]):.3e}"
        )


def _where(what: str, wrong: Tensor) -> str:
    return f"{what}: (token, head) {wrong.nonzero()[:5].tolist()}"


def assert_close_to_reference(out: Tensor, lse: Tensor, case: Case) -> None:
    """Every (query token, head) within twice PyTorch's own error in the same dtype, plus rounding."""
    case.expected.check(out, lse)


@contextmanager
def torch_threads(n: int) -> Iterator[None]:
    """Sets PyTorch's threads, which are also wavefill's workers. Many tiny operations run best on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch_threads(1)
def expect(case: Case) -> Expected:
    """The float64 reference, and bounds from what PyTorch loses in the case's dtype on the same data.

    The bound of a (token, head) is twice PyTorch's largest error over the heads of that token, plus one unit in the
    last place of the output's dtype at the row's largest value, plus two units of the float32 sums and one of the
    float32 scores (PyTorch may happen to be exact on a few numbers); likewise for the LSE, with one unit of the dot
    products behind it. Each token has its own: an output over 1,000 keys is small, and a bound from a row with one key
    would hide a lost key there.

    A soft cap does not stretch the error of a score (its slope is at most 1) and adds that of its own arithmetic:
    quotient, tanh and product, three units of the capped score. ALiBi adds one unit of the bias. Both count as parts of
    the finished score. A sink is exact in float32 and adds no error but that of its own weight, which is one of the
    sum. A unit is never below the smallest number that the dtype has.
    """
    out, lse = reference.attention(*case.tensors(), **case.options())
    base_out, base_lse, mass, score_mass, dot_mass, part_mass = torch_attention(case)
    unit, unit32 = torch.finfo(case.q.dtype).eps, torch.finfo(torch.float32).eps
    seen = lse > -math.inf
    error = (base_out.double() - out).abs().amax(-1) if out.shape[-1] else torch.zeros_like(lse)
    lse_error = torch.where(seen, (base_lse.double() - lse).abs(), 0.0)
    if not lse.numel():
        return Expected(out, error, lse, lse_error)
    last_place = (unit * out.abs().amax(-1)).clamp(min=unit * torch.finfo(case.q.dtype).smallest_normal)
    out_bound = 2 * error.amax(1, keepdim=True) + unit32 * (2 * mass + score_mass)
    out_bound += torch.where(mass > 0, last_place, 0.0)
    lse_bound = 2 * lse_error.amax(1, keepdim=True)
    lse_bound = lse_bound + unit32 * (torch.where(seen, lse.abs(), 0.0).clamp(min=1.0) + dot_mass + part_mass)
    return Expected(out, out_bound, lse, lse_bound)


def torch_attention(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Attention as PyTorch computes it in the case's dtype: float32 scores and sums, probabilities in the dtype.

    Returns (out [T, HQ, DV] in the dtype, lse [T, HQ] float32, mass, score_mass, dot_mass and part_mass [T, HQ]).
    Rounding is proportional to the last four: that of P.V to the largest sum of p |v| of a row, that of a finished
    score to the largest sum of p size |v|, where the size is |score|, three times |capped score| and |bias| together;
    that of a dot product to a bound of scale |q|.|k| over the row's keys, and that of what soft cap and ALiBi add to a
    score to the sum of p times its size.
    """
    dtype = case.q.dtype
    starts = range(len(case.seq_lens) + 1) if case.cu_seqlens_q is None else case.cu_seqlens_q.tolist()
    scale = case.q.shape[-1] ** -0.5 if case.scale is None else case.scale
    out = torch.zeros(case.out_shape, dtype=dtype)
    lse = torch.full(case.out_shape[:2], -math.inf)
    if case.sinks is not None:
        lse[starts[0] : starts[-1]] = case.sinks.float()
    mass, score_mass, dot_mass, part_mass = (torch.zeros(case.out_shape[:2]) for _ in range(4))
    for b, length in enumerate(case.seq_lens.tolist()):
        tokens = slice(starts[b], starts[b + 1])
        queries = case.q[tokens]
        n = queries.shape[0]
        if not n or not length:
            continue
        k, v = dense(case, b)
        KH = k.shape[1]
        scores = queries.view(n, KH, -1, queries.shape[-1]).float().transpose(0, 1).flatten(1, 2)
        scores = (scores @ k.float().permute(1, 2, 0) * scale).view(KH, n, -1, length)
        at, key = torch.arange(length - n, length).unsqueeze(-1), torch.arange(length)
        parts = torch.zeros(())
        if case.softcap is not None:
            scores = torch.tanh(scores / case.softcap) * case.softcap
            parts = parts + 3 * scores.abs()
        if case.alibi_slopes is not None:
            bias = case.alibi_slopes.float().view(KH, 1, -1, 1) * (at - key).abs().float().view(1, n, 1, length)
            scores = scores - bias
            parts = parts + bias.abs()
        hidden = torch.zeros(n, length, dtype=torch.bool)
        if case.causal or case.window is not None:
            hidden |= key > at
        if case.window is not None:
            hidden |= key <= at - case.window
        if case.mask is not None:
            words = case.mask[tokens].view(torch.uint8).view(n, -1)  # little end first, as the bits are
            bits = (words.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)[:, :n] == 0
            hidden[:, max(0, length - n) :] |= bits[:, max(0, n - length) :]
        scores = scores.masked_fill(hidden.view(1, n, 1, length), -math.inf)
        top = scores.amax(-1, keepdim=True)
        if case.sinks is not None:
            logits = case.sinks.float().view(KH, 1, -1, 1)
            top = top.maximum(logits)
        weights = torch.where(top == -math.inf, 0.0, (scores - top).exp())
        total = weights.sum(-1, keepdim=True)
        if case.sinks is not None:
            total = total + torch.where(top == -math.inf, 0.0, (logits - top).exp())
        p = weights.to(dtype).float().flatten(1, 2)

        def packed(x: Tensor, KH: int = KH, n: int = n) -> Tensor:
            return x.reshape(KH, n, -1, x.shape[-1]).transpose(0, 1).flatten(1, 2)

        total = total.clamp(min=1e-30)
        values = v.float().transpose(0, 1)
        out[tokens] = (packed(p @ values) / packed(total)).to(dtype)
        mass[tokens] = (packed(p @ values.abs()) / packed(total)).amax(-1)
        parts = torch.where(scores == -math.inf, 0.0, parts).flatten(1, 2)
        sizes = torch.where(scores == -math.inf, 0.0, scores.abs()).flatten(1, 2) + parts
        score_mass[tokens] = (packed((p * sizes) @ values.abs()) / packed(total)).amax(-1)
        part_mass[tokens] = packed((p * parts).sum(-1, keepdim=True) / total.flatten(1, 2)).squeeze(-1)
        longest = k.float().norm(dim=-1).amax(0).repeat_interleave(queries.shape[1] // KH)
        dot_mass[tokens] = abs(scale) * queries.float().norm(dim=-1) * longest
        lse[tokens] = packed(torch.where(top == -math.inf, top, top + total.log())).squeeze(-1)
    return out, lse, mass, score_mass, dot_mass, part_mass


def dense(case: Case, b: int) -> tuple[Tensor, Tensor]:
    """K [n, KH, D] and V [n, KH, DV] of request b, gathered slot by slot; keys before every window are 0, not read."""
    length, first = int(case.seq_lens[b]), 0
    if case.window is not None:
        n = 1 if case.cu_seqlens_q is None else int(case.cu_seqlens_q[b + 1] - case.cu_seqlens_q[b])
        first = min(length, max(0, length - n - case.window + 1))
    position = torch.arange(first, length)
    if case.block_table is None:
        slots = (torch.full_like(position, b), position)
    else:
        page_size = case.k_cache.shape[1]
        slots = (case.block_table[b, position // page_size].long(), position % page_size)
    k = case.k_cache[slots]
    v = k[..., : case.head_dim_v] if case.v_cache is None else case.v_cache[slots]
    return tuple(torch.cat([x.new_zeros(first, *x.shape[1:]), x]) for x in (k, v))  # type: ignore[return-value]
