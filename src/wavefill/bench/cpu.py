"""The kernel suite on this processor: wavefill, its peers and the read floor, by turns in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from wavefill.bench import verify
from wavefill.bench.inputs import Inputs, build
from wavefill.bench.peers import PEERS, Peer, flex, folded, sdpa
from wavefill.bench.suites import Row
from wavefill.bench.timing import Samples, interleave

#: Seconds of timing that a row takes, unless MIN_ROUNDS takes longer.
ROW_SECONDS = 8.0
SCHEDULES = ("auto", "stream_k", "fixed", "invariant")

Report = Callable[[str, float], None]


@dataclass(frozen=True)
class RowResult:
    """One row's outcome.

    times:  variant -> samples: "wavefill", "read", the peers, "wavefill:NAME" for further schedules, and
            "wavefill:even" for a uniform batch of the same total length.
    errors: variant -> largest error against the float64 oracle.
    absent: variant -> why it has no time (not available, failed, wrong result).
    """

    row: Row
    dtype: str
    kv_bytes: int
    times: dict[str, Samples]
    errors: dict[str, float]
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def correct(self) -> bool:
        """Whether every wavefill variant gave the right result."""
        return not any(name.startswith("wavefill") for name in self.absent)

    def speedup(self, peer: str) -> float | None:
        """Time of `peer` over wavefill's, None unless both ran and were right."""
        if "wavefill" not in self.times or peer not in self.times:
            return None
        return self.times[peer].median / self.times["wavefill"].median

    def read_share(self) -> float | None:
        """The read floor over wavefill's time: the share of the read bandwidth that the kernel reaches."""
        return self.speedup("read")

    def to_dict(self) -> dict[str, Any]:
        return {
            "row": self.row.name, "class": self.row.size, "dtype": self.dtype, "kv_bytes": self.kv_bytes,
            "HQ": self.row.HQ, "KH": self.row.KH, "D": self.row.D, "lens": list(self.row.lens),
            "times_us": {name: {"median": s.median * 1e6, "spread": s.spread, "calls": len(s.seconds)}
                         for name, s in self.times.items()},
            "gbs": {name: self.kv_bytes / s.median / 1e9 for name, s in self.times.items()},
            "read_share": self.read_share(),
            "speedup": {name: self.speedup(name) for name in PEERS if name in self.times},
            "max_error": self.errors, "absent": self.absent,
        }


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
    variants["read"] = _read_call(inputs)
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
