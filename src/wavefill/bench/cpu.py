"""The kernel suite on this processor: wavefill, its peers and the read floor, by turns in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from wavefill.bench import verify
from wavefill.bench.inputs import Inputs, build
from wavefill.bench.peers import Peer, flex, folded, sdpa
from wavefill.bench.results import READ, RowResult
from wavefill.bench.suites import Row
from wavefill.bench.timing import interleave

#: Seconds of timing that a row takes, unless MIN_ROUNDS takes longer.
ROW_SECONDS = 8.0
SCHEDULES = ("auto", "stream_k", "fixed", "invariant")

Report = Callable[[str, float], None]


def run(
    rows: Iterable[Row],
    *,
    dtype: str,
    layout: str,
    page_size: int,
    order: str = "HND",
    schedules: Sequence[str] = ("auto",),
    peers: bool = True,
    seconds: float = ROW_SECONDS,
    report: Report = lambda description, share: None,
) -> list[RowResult]:
    """Measure each row. The first of `schedules` is the one called "wavefill"; `peers` False leaves the others out."""
    rows = tuple(rows)
    others = _peers() if peers else {}
    results = []
    for i, row in enumerate(rows):
        report(f"{row.name}: making {dtype} KV", i / len(rows))
        inputs = build(row, dtype, layout, page_size, order=order, peers=peers)
        report(f"{row.name}: checking, then timing", (i + 0.3) / len(rows))
        results.append(_measure(inputs, dtype, schedules, others, seconds))
    return results


def _peers() -> dict[str, Peer | str]:
    return {"sdpa": Peer("sdpa", sdpa), "sdpa G as rows": Peer("sdpa G as rows", folded), "flex": flex()}


def _measure(
    inputs: Inputs, dtype: str, schedules: Sequence[str], others: dict[str, Peer | str], seconds: float
) -> RowResult:
    exact = verify.oracle(inputs)
    errors: dict[str, float] = {}
    absent: dict[str, str] = {}
    variants: dict[str, Callable[[int], object]] = {}
    for name, peer in others.items():
        if isinstance(peer, str):
            absent[name] = peer
            continue
        try:
            errors[name] = verify.error(peer.call(inputs, inputs.copies[0]), exact)
        except Exception as failure:  # a peer that breaks must not take the run with it; its reason is shown
            absent[name] = f"failed: {type(failure).__name__}: {str(failure).strip().splitlines()[0][:200]}"
            continue
        if errors[name] > verify.peer_bound(exact, inputs.q.dtype):
            absent[name] = f"wrong result: error {errors[name]:.2g}"
        else:
            variants[name] = _peer_call(peer, inputs)
    most = verify.bound(exact, inputs.q.dtype, errors.get("sdpa") if "sdpa" in variants else None)
    for i, schedule in enumerate(schedules):
        name = "wavefill" if i == 0 else f"wavefill:{schedule}"
        errors[name] = verify.error(_attend(inputs, 0, schedule), exact)
        if errors[name] > most:
            absent[name] = f"wrong result: error {errors[name]:.2g}, at most {most:.2g} is rounding"
        else:
            variants[name] = _wavefill_call(inputs, schedule)
    if inputs.even is not None and "wavefill" in variants:
        variants["wavefill:even"] = _even_call(inputs, schedules[0])
    variants[READ] = _read_call(inputs)
    times = interleave(variants, len(inputs.copies), seconds)
    return RowResult(inputs.row, dtype, inputs.row.kv_bytes(dtype), times, errors, absent)


def _attend(inputs: Inputs, copy: int, schedule: str) -> Tensor:
    from wavefill import decode_attention

    kv = inputs.copies[copy]
    return decode_attention(inputs.q, kv.k, kv.v, inputs.lens, inputs.block_table, schedule=schedule)


def _wavefill_call(inputs: Inputs, schedule: str) -> Callable[[int], object]:
    return lambda copy: _attend(inputs, copy, schedule)


def _even_call(inputs: Inputs, schedule: str) -> Callable[[int], object]:
    from wavefill import decode_attention

    assert inputs.even is not None
    table, lens = inputs.even
    return lambda copy: decode_attention(inputs.q, inputs.copies[copy].k, inputs.copies[copy].v, lens, table,
                                         schedule=schedule)


def _peer_call(peer: Peer, inputs: Inputs) -> Callable[[int], object]:
    return lambda copy: peer.call(inputs, inputs.copies[copy])


def _read_call(inputs: Inputs) -> Callable[[int], object]:
    from wavefill.backends.cpu import read_bandwidth

    spans = [copy.spans(inputs.lens, inputs.block_table) for copy in inputs.copies]
    return lambda copy: [read_bandwidth(span) for span in spans[copy]]
