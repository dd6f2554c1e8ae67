"""What attention means, in plain torch: the float64 oracle and the emulator of schedules.

Nothing fast imports this module. The oracle is one softmax over the keys a query sees. The emulator replays a
schedule the way workers run it: tile by tile with an online softmax, a partial state for each segment, one merge.

Dimensions are those of `wavefill.spec`; LSE is the natural logarithm everywhere; where a query sees no key its output
is 0 and its LSE -inf, or the sink.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from wavefill import schedule as schedules
from wavefill.scores import NONE, Options
from wavefill.spec import MAX_LENGTH, ScheduleArg, StreamK, invalid, parse_schedule


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    seq_lens: Tensor,
    block_table: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    head_dim_v: int | None = None,
    options: Options = NONE,
) -> tuple[Tensor, Tensor]:
    """One softmax per query token and head, all in float64.

    q:            [T, HQ, D], any dtype.
    k_cache:      [B, S, KH, D], or [pages, page_size, KH, D] with a block table; any strides.
    v_cache:      the same with DV; None takes the first `head_dim_v` columns of K (a latent cache) and needs `scale`.
    seq_lens:     [B], keys of each request, this step's included.
    block_table:  [B, max_pages] page ids.
    cu_seqlens_q: [B + 1], where each request's query tokens start in q; None is one token a request.
    scale:        of the scores, 1 / sqrt(D) if None.
    causal:       query i of n sits at position seq_len - n + i and sees no later key.
    window:       positions pos - window < j <= pos are seen.
    options:      soft cap, sinks, ALiBi and the mask of drafts; sinks and slopes of any dtype.

    Returns (out [T, HQ, DV], lse [T, HQ]), both float64. Tokens past `cu_seqlens_q[-1]` get 0 and -inf.
    """
    problem = _problem(q, k_cache, v_cache, seq_lens, block_table, cu_seqlens_q, scale, causal, window, head_dim_v,
                       options)
    out, lse = problem.empty_result(torch.float64)
    for row in problem.rows():
        for head in range(problem.KH):
            heads = slice(head * problem.G, (head + 1) * problem.G)
            scores, values = problem.scores(row, head, row.start, row.stop, torch.float64)
            state = _softmax_state(scores, values)
            out[row.tokens, heads], lse[row.tokens, heads] = problem.with_sinks(heads, [state])
    return out, lse


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merges N partial results of the same queries over disjoint keys, in float64.

    outs: [N, ..., D]; lses: [N, ...], natural log. A state with LSE -inf is empty: it adds nothing, whatever its
    output holds. An LSE of NaN or +inf is no state, and raises `InvalidArgument`.

    Returns (out [..., D], lse [...]), both float64.
    """
    if bool((lses.isnan() | (lses == math.inf)).any()):
        raise invalid("lses", "must hold finite values or -inf", "NaN or +inf", "Mark an empty state with -inf.")
    return _merge(outs.double(), lses.double())


def _merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    if not lses.shape[0]:
        return outs.new_zeros(outs.shape[1:]), lses.new_full(lses.shape[1:], -math.inf)
    top = lses.amax(0)
    top = torch.where(top == -math.inf, 0.0, top)
    weights = (lses - top).exp()
    total = weights.sum(0)
    # Selected, not multiplied: an empty state may carry NaN, and 0 * NaN is NaN.
    outs = torch.where((lses == -math.inf).unsqueeze(-1), 0.0, outs)
    out = (weights.unsqueeze(-1) * outs).sum(0) / torch.where(total == 0, 1.0, total).unsqueeze(-1)
    return out, top + total.log()


def _softmax_state(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """scores [n, G, keys] with -inf where masked, values [keys, DV] -> (out [n, G, DV], lse [n, G])."""
    if not scores.shape[-1]:
        return scores.new_zeros(*scores.shape[:-1], values.shape[-1]), scores.new_full(scores.shape[:-1], -math.inf)
    top = scores.amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    return weights @ values / torch.where(total == 0, 1.0, total), (top + total.log()).squeeze(-1)


@dataclass(frozen=True)
class Row:
    """Query tokens of one request, and the range of keys that any of them sees.

    request: index in the batch.
    tokens:  where the queries sit in the packed q.
    first:   position of the first of them; negative where there are more queries than keys.
    start, stop: keys; empty where stop <= start.
    """

    request: int
    tokens: slice
    first: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Problem:
    """One call's tensors, with the gather and the masked scores that oracle and emulator share."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    seq_lens: list[int]
    block_table: Tensor | None
    starts: list[int]
    scale: float
    causal: bool
    window: int | None
    options: Options

    @property
    def KH(self) -> int:  # noqa: N802
        return self.k_cache.shape[2]

    @property
    def G(self) -> int:  # noqa: N802
        return self.q.shape[1] // self.KH

    def empty_result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        T, HQ = self.q.shape[:2]
        on = self.q.device
        return (torch.zeros(T, HQ, self.v_cache.shape[-1], dtype=dtype, device=on),
                torch.full((T, HQ), -math.inf, dtype=dtype, device=on))

    def rows(self) -> Iterator[Row]:
        """Each request with all its query tokens, and the keys that any of them sees."""
        for request, seq_len in enumerate(self.seq_lens):
            begin, end = self.starts[request], self.starts[request + 1]
            first = seq_len - (end - begin)
            start = 0 if self.window is None else max(0, first - self.window + 1)
            if end > begin:
                yield Row(request, slice(begin, end), first, min(start, seq_len), seq_len)

    def blocks(self, q_block: int | None) -> tuple[list[Row], schedules.Rows]:
        """The rows of a schedule: each request's tokens in blocks of at most `q_block` (None: one block)."""
        q_lens = [end - begin for begin, end in pairwise(self.starts)]
        ranges = schedules.row_ranges(
            self.seq_lens, q_lens, causal=self.causal, window=self.window, q_block=q_block or max([1, *q_lens])
        )
        rows = []
        for i, request in enumerate(ranges.request.tolist()):
            begin, end = int(ranges.q_begin[i]), int(ranges.q_end[i])
            tokens = slice(self.starts[request] + begin, self.starts[request] + end)
            first = self.seq_lens[request] - q_lens[request] + begin
            rows.append(Row(request, tokens, first, int(ranges.start[i]), int(ranges.stop[i])))
        return rows, ranges

    def scores(self, row: Row, head: int, begin: int, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Final scores [n, G, keys] of keys begin..end, -inf where not seen, and those keys' values [keys, DV]."""
        heads = slice(head * self.G, (head + 1) * self.G)
        queries = self.q[row.tokens, heads].to(dtype)
        scores = queries @ self._gather(self.k_cache, row.request, head, begin, end).to(dtype).mT * self.scale
        key = torch.arange(begin, end, device=scores.device)
        position = torch.arange(row.first, row.first + queries.shape[0], device=scores.device).unsqueeze(-1)
        if self.options.softcap is not None:
            scores = self.options.softcap * torch.tanh(scores / self.options.softcap)
        if self.options.alibi_slopes is not None:
            slopes = self.options.alibi_slopes[heads].to(dtype).view(1, -1, 1)
            scores = scores - slopes * (position - key).abs().to(dtype).unsqueeze(1)
        seen = torch.ones(position.shape[0], key.shape[0], dtype=torch.bool, device=scores.device)
        if self.causal or self.window is not None:
            seen &= key <= position
        if self.window is not None:
            seen &= key > position - self.window
        if self.options.mask is not None:
            # Which token of the draft a key is; keys before the draft are negative and always seen.
            token = key - self.seq_lens[row.request] + self.starts[row.request + 1] - self.starts[row.request]
            words = self.options.mask[row.tokens].long()[:, token.clamp(min=0) // 32]
            seen &= (token < 0) | ((words >> token.clamp(min=0) % 32) & 1).bool()
        scores = scores.masked_fill(~seen.unsqueeze(1), -math.inf)
        return scores, self._gather(self.v_cache, row.request, head, begin, end).to(dtype)

    def with_sinks(self, heads: slice, states: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """(out [n, G, DV], lse [n, G]) of states over disjoint keys; the sinks are one more, without a value."""
        outs, lses = [out for out, _ in states], [lse for _, lse in states]
        if self.options.sinks is not None:
            sinks = self.options.sinks[heads].to(lses[0].dtype).expand_as(lses[0])
            outs, lses = [*outs, torch.zeros_like(outs[0])], [*lses, sinks]
        return _merge(torch.stack(outs), torch.stack(lses))

    def _gather(self, cache: Tensor, request: int, head: int, begin: int, end: int) -> Tensor:
        one = cache[:, :, head]
        if self.block_table is None:
            return one[request, begin:end]
        page_size = cache.shape[1]
        first_page = begin // page_size
        pages = self.block_table[request, first_page : -(-end // page_size)].long()
        skip = begin - first_page * page_size
        return one[pages].flatten(0, 1)[skip : skip + end - begin]


def _problem(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    seq_lens: Tensor,
    block_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    scale: float | None,
    causal: bool,
    window: int | None,
    head_dim_v: int | None,
    options: Options,
) -> _Problem:
    if v_cache is None:
        if head_dim_v is None or scale is None:
            raise invalid("v_cache", "may be None only with head_dim_v and scale", f"{head_dim_v=}, {scale=}",
                          "Give both for a latent cache, or pass the V cache.")
        v_cache = k_cache[..., :head_dim_v]
    lens = [int(n) for n in seq_lens]
    starts = list(range(len(lens) + 1)) if cu_seqlens_q is None else [int(n) for n in cu_seqlens_q]
    capacity = k_cache.shape[1] if block_table is None else k_cache.shape[1] * block_table.shape[1]
    if lens and not 0 <= min(lens) <= max(lens) <= capacity:
        raise invalid("seq_lens", f"must lie in 0..{capacity}", lens, "The oracle reads no slot that is not there.")
    if len(starts) != len(lens) + 1 or starts[-1] > q.shape[0]:
        raise invalid("cu_seqlens_q", "must have B + 1 entries, the last at most T", starts, "One start a request.")
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    if window is not None:
        window = min(window, MAX_LENGTH)  # a longer one sees no more, and positions minus it must fit into 64 bits
    return _Problem(q, k_cache, v_cache, lens, block_table, starts, scale, causal, window, options)


@dataclass(frozen=True)
class Partial:
    """The state that one worker holds at the end of one segment.

    row, head:  which queries (an index into `Emulation.rows`), which KV head.
    worker:     who computed it.
    begin, end: tiles, absolute in the request.
    keys:       first key and one past the last.
    out, lse:   [n, G, DV] and [n, G] over those keys alone.
    """

    row: int
    head: int
    worker: int
    begin: int
    end: int
    keys: tuple[int, int]
    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Emulation:
    """A replayed schedule: its partial states, their merge, and how far that is from one softmax.

    deviation, lse_deviation: largest absolute differences from the float64 oracle.
    worst: (query token, query head) of the largest output difference, or None where there is no output.
    """

    kind: str
    tile: int
    workers: int
    dtype: torch.dtype
    rows: list[Row]
    partials: list[Partial]
    out: Tensor
    lse: Tensor
    deviation: float
    lse_deviation: float
    worst: tuple[int, int] | None

    @property
    def tiles_per_worker(self) -> list[int]:
        """Tiles that each worker walked."""
        tiles = [0] * self.workers
        for p in self.partials:
            tiles[p.worker] += p.end - p.begin
        return tiles

    @property
    def merged_groups(self) -> int:
        """(row, KV head) pairs whose result came from more than one partial."""
        return sum(n > 1 for n in Counter((p.row, p.head) for p in self.partials).values())

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an LSE of -inf becomes None."""
        return {
            "kind": self.kind,
            "tile": self.tile,
            "workers": self.workers,
            "dtype": str(self.dtype).removeprefix("torch."),
            "rows": len(self.rows),
            "tiles_per_worker": self.tiles_per_worker,
            "merged_groups": self.merged_groups,
            "deviation": self.deviation,
            "lse_deviation": self.lse_deviation,
            "worst": None if self.worst is None else {"token": self.worst[0], "head": self.worst[1]},
            "partials": [
                {
                    "row": p.row,
                    "request": self.rows[p.row].request,
                    "head": p.head,
                    "worker": p.worker,
                    "tiles": [p.begin, p.end],
                    "keys": list(p.keys),
                    "lse": [x if math.isfinite(x) else None for x in p.lse.flatten().tolist()],
                }
                for p in self.partials
            ],
        }

    def summary(self, most: int = 12) -> list[str]:
        """Lines for a terminal: the totals, then at most `most` partial states, then the check."""
        tiles = self.tiles_per_worker
        lines = [
            f"{self.kind}: {sum(tiles)} tiles of {self.tile} tokens on {self.workers} workers "
            f"({min(tiles)} to {max(tiles)} each), {str(self.dtype).removeprefix('torch.')}",
        ]
        for p in self.partials[:most]:
            top = float(p.lse.max()) if p.lse.numel() else -math.inf
            lines.append(
                f"  worker {p.worker:>3}  request {self.rows[p.row].request:>3}  KV head {p.head:>3}  "
                f"keys {p.keys[0]:>7} to {p.keys[1] - 1:>7}  largest LSE {top:.6f}"
            )
        if len(self.partials) > most:
            lines.append(f"  and {len(self.partials) - most} more partial states")
        lines.append(f"merge: {len(self.partials)} partial states, {self.merged_groups} (request, KV head) pairs split")
        where = "" if self.worst is None else f" at query token {self.worst[0]}, head {self.worst[1]}"
        lines.append(f"largest deviation from one softmax: output {self.deviation:.2e}{where}, "
                     f"LSE {self.lse_deviation:.2e}")
        return lines


def emulate(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    seq_lens: Tensor,
    block_table: Tensor | None = None,
    *,
    schedule: ScheduleArg,
    workers: int,
    tile: int,
    cu_seqlens_q: Tensor | None = None,
    q_block: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    head_dim_v: int | None = None,
    options: Options = NONE,
    dtype: torch.dtype = torch.float32,
) -> Emulation:
    """Replays a schedule tile by tile and worker by worker, and holds its merge to one softmax.

    Tensors and options are those of `attention`. Beside them:
    schedule: a name (not "auto") or a `Fixed`, `StreamK` or `Invariant`; a tile size in it wins over `tile`.
    workers:  how many share the tiles.
    tile:     tokens of a tile.
    q_block:  most query tokens of one row; None keeps a request's tokens together.
    dtype:    in which every step is computed, float32 or float64.

    The work is a few tensor operations for each tile, so thousands of tiles a second.
    """
    problem = _problem(q, k_cache, v_cache, seq_lens, block_table, cu_seqlens_q, scale, causal, window, head_dim_v,
                       options)
    chosen = parse_schedule(schedule)
    if chosen == "auto":
        raise invalid("schedule", "must say which schedule to replay", '"auto"', "Name one, for example stream_k.")
    if isinstance(chosen, StreamK) and chosen.tile:
        tile = chosen.tile
    rows, ranges = problem.blocks(q_block)
    table = schedules.make_table(chosen, ranges.start, ranges.stop, KH=problem.KH, workers=workers, tile=tile)
    partials = []
    for worker in range(table.workers):
        for s in (table.worker == worker).nonzero()[0]:
            row, head = int(table.row[s]), int(table.head[s])
            begin, end = int(table.begin[s]), int(table.end[s])
            keys, out, lse = _walk(problem, rows[row], head, begin, end, table.tile, dtype)
            partials.append(Partial(row, head, worker, begin, end, keys, out, lse))
    out, lse = _merge_partials(problem, rows, partials, dtype)
    one_out, one_lse = attention(
        q, k_cache, v_cache, seq_lens, block_table, cu_seqlens_q=cu_seqlens_q, scale=scale, causal=causal,
        window=window, head_dim_v=head_dim_v, options=options,
    )
    error = (out.double() - one_out).abs().amax(-1)
    lse_error = torch.where(one_lse == lse.double(), 0.0, (lse.double() - one_lse).abs())
    worst = divmod(int(error.argmax()), error.shape[1]) if error.numel() else None
    return Emulation(
        kind=table.kind, tile=table.tile, workers=table.workers, dtype=dtype, rows=rows, partials=partials,
        out=out, lse=lse, deviation=float(error.max()) if error.numel() else 0.0,
        lse_deviation=float(lse_error.max()) if error.numel() else 0.0, worst=worst,
    )


def _walk(
    problem: _Problem, row: Row, head: int, begin: int, end: int, tile: int, dtype: torch.dtype
) -> tuple[tuple[int, int], Tensor, Tensor]:
    """One worker on one segment: an online softmax over its tiles. Returns (keys, out, lse)."""
    n, DV = row.tokens.stop - row.tokens.start, problem.v_cache.shape[-1]
    top = torch.full((n, problem.G), -math.inf, dtype=dtype)
    total = torch.zeros(n, problem.G, dtype=dtype)
    acc = torch.zeros(n, problem.G, DV, dtype=dtype)
    for i in range(begin, end):
        first, last = max(i * tile, row.start), min((i + 1) * tile, row.stop)
        scores, values = problem.scores(row, head, first, last, dtype)
        new_top = torch.maximum(top, scores.amax(-1))
        # Until a query has seen a key its maximum is -inf, and -inf less -inf is NaN.
        base = torch.where(new_top == -math.inf, 0.0, new_top)
        keep = (top - base).exp()
        weights = (scores - base.unsqueeze(-1)).exp()
        total = total * keep + weights.sum(-1)
        acc = acc * keep.unsqueeze(-1) + weights @ values
        top = new_top
    out = acc / torch.where(total == 0, 1.0, total).unsqueeze(-1)
    return (max(begin * tile, row.start), min(end * tile, row.stop)), out, top + total.log()


def _merge_partials(
    problem: _Problem, rows: list[Row], partials: list[Partial], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    groups: dict[tuple[int, int], list[Partial]] = {
        (row, head): [] for row in range(len(rows)) for head in range(problem.KH)
    }
    for p in partials:
        groups[p.row, p.head].append(p)
    out, lse = problem.empty_result(dtype)
    for (row, head), parts in groups.items():
        tokens, heads = rows[row].tokens, slice(head * problem.G, (head + 1) * problem.G)
        parts.sort(key=lambda p: p.begin)
        states = [(p.out, p.lse) for p in parts] or [(out[tokens, heads], lse[tokens, heads])]
        out[tokens, heads], lse[tokens, heads] = problem.with_sinks(heads, states)
    return out, lse
