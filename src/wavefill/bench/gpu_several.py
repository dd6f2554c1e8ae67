"""Several query tokens on a GPU: wavefill, other libraries and the read floor, by turns in one run.

Times are taken as `gpu_timing` takes them. Before that each result is held against the float64 oracle at the first,
middle and last query tokens, with the tolerance that the kernel suite grants a peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from wavefill import reference
from wavefill.bench import gpu, verify
from wavefill.bench.gpu_several_cases import DTYPE, Plan, flops, read_row, sections
from wavefill.bench.gpu_several_peers import WAVEFILL, Call, Case, Library, packed
from wavefill.bench.gpu_timing import Timer, reason
from wavefill.bench.inputs import Inputs
from wavefill.bench.results import READ, is_peer
from wavefill.bench.suites import Row
from wavefill.bench.timing import Samples

#: Seconds of timing of a group; requests whose results are checked, and tokens at each of three places.
SECONDS, CHECKED_REQUESTS, CHECKED_TOKENS = 0.3, 4, 8


@dataclass(frozen=True)
class Outcome:
    """What one case gave.

    kv_bytes:  K and V of the keys that it sees, read once; flops: see `flops`.
    floor:     seconds to read as many bytes through a block table, None where that was not measured.
    times:     variant -> samples; errors: variant -> largest error of the tokens that were checked.
    absent:    variant -> why it has no time.
    """

    section: str
    group: str
    case: str
    row: Row
    layout: str
    q_len: int
    window: int | None
    copies: int
    calls: int
    floor: float | None
    times: dict[str, Samples] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def kv_bytes(self) -> int:
        return read_row(self.row, self.q_len, self.window).kv_bytes(DTYPE)

    @property
    def flops(self) -> int:
        return flops(self.row, self.q_len, self.window)

    def seconds(self, name: str) -> float | None:
        return self.times[name].median if name in self.times else None

    def rate(self, name: str, unit: str) -> float | None:
        """GB/s of the KV that is read once, or TFLOP/s."""
        taken = self.seconds(name)
        return None if taken is None else (self.kv_bytes / 1e9 if unit == "GB/s" else self.flops / 1e12) / taken

    def best_ratio(self) -> float | None:
        """The fastest library's time over wavefill's."""
        ours = self.seconds("wavefill")
        theirs = [samples.median for name, samples in self.times.items() if is_peer(name)]
        return min(theirs) / ours if ours and theirs else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "section": self.section, "group": self.group, "case": self.case, "HQ": self.row.HQ, "KH": self.row.KH,
            "D": self.row.D, "lens": list(self.row.lens), "layout": self.layout, "q_len": self.q_len,
            "window": self.window, "kv_bytes": self.kv_bytes, "flops": self.flops, "copies": self.copies,
            "calls_of_a_graph": self.calls, "read_us": None if self.floor is None else self.floor * 1e6,
            "times_us": {name: {"median": s.median * 1e6, "spread": s.spread} for name, s in self.times.items()},
            "gbs": {name: self.rate(name, "GB/s") for name in self.times},
            "tflops": {name: self.rate(name, "TFLOP/s") for name in self.times},
            "best_peer_ratio": self.best_ratio(), "max_error": self.errors, "absent": self.absent,
        }


def checked(case: Case) -> tuple[Tensor, Tensor]:
    """Indices of query tokens to check [N], and the oracle's results [N, HQ, D] on the first copy."""
    made, q_len = case.inputs, case.q_len
    most = min(CHECKED_TOKENS, q_len)
    starts = sorted({0, (q_len - most) // 2, q_len - most})
    requests = verify.sample(made.row.lens, CHECKED_REQUESTS)
    picked = torch.tensor([b * q_len + s + i for b in requests for s in starts for i in range(most)])
    cu = torch.tensor(list(accumulate([most] * (len(requests) * len(starts)), initial=0)))
    of, ends_at = (torch.tensor(part) for part in zip(*(
        (b, made.row.lens[b] - q_len + s + most) for b in requests for s in starts), strict=True))
    of, picked = of.to(made.q.device), picked.to(made.q.device)
    k, v, table = made.copies[0].k, made.copies[0].v, made.block_table
    if table is None:
        k, v = k[of], v[of]
    else:
        table = table[of]
    return picked, reference.attention(made.q[picked], k, v, ends_at, table, cu_seqlens_q=cu, window=case.window)[0]


@dataclass
class _Checked:
    """The calls of a case that gave the right result, errors, and why the others have no call."""

    calls: dict[str, Call] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


def _check(case: Case, libraries: Sequence[Library]) -> _Checked:
    found = _Checked()
    where, exact = checked(case)
    most = verify.peer_bound(exact, case.inputs.q.dtype)
    for library in libraries:
        if (why := library.gap(case)) is not None:
            found.absent[library.name] = why
            continue
        try:
            call = library.prepare(case)
            error = found.errors[library.name] = verify.error(packed(call(0))[where], exact)
        except Exception as failure:  # a library that breaks must not take the run with it; its reason is shown
            found.absent[library.name] = reason(failure)
            continue
        if error <= most:
            found.calls[library.name] = call
        else:
            found.absent[library.name] = f"wrong result: error {error:.2g}, at most {most:.2g} is rounding"
    return found


def measure(section: str, plan: Plan, libraries: Sequence[Library], seconds: float) -> list[Outcome]:
    """Check and time wavefill and the libraries on a group's cases."""
    group = plan.make()
    timer = Timer(group.count, group.calls)
    checks = [_check(case, (WAVEFILL, *libraries)) for case in group.cases]
    variants: dict[str, Callable[[int], object]] = {
        f"{i} {name}": call for i, check in enumerate(checks) for name, call in check.calls.items()}
    try:
        no_floor: dict[str, str] = {}
        if group.floor is not None:
            gpu._read(group.floor, timer, variants, no_floor)
        timer.add(variants)
        measured = timer.measure(seconds)
    finally:
        timer.close()
    outcomes = []
    for i, (case, check) in enumerate(zip(group.cases, checks, strict=True)):
        keys = {name: f"{i} {name}" for name in check.calls}
        outcomes.append(Outcome(
            section, plan.name, case.name, case.inputs.row, _layout(case.inputs), case.q_len, case.window, group.count,
            group.calls, measured.times[READ].median if READ in measured.times else None,
            {name: measured.times[key] for name, key in keys.items() if key in measured.times}, check.errors,
            {**check.absent, **no_floor, **{name: measured.failed[key] for name, key in keys.items()
                                            if key in measured.failed}}))
    return outcomes


def _layout(made: Inputs) -> str:
    return "contiguous" if made.block_table is None else f"page {made.copies[0].k.shape[1]}"


def run(name: str, libraries: Sequence[Library], *, seconds: float = SECONDS,
        done: Callable[[Outcome], None] = lambda outcome: None) -> tuple[list[Outcome], list[str]]:
    """Measure a section by its name; `done` is called with each outcome as it comes.

    Returns the outcomes, and notes on groups that failed as a whole.
    """
    section = sections()[name]
    chosen = [library for library in libraries if library.name in section.libraries]
    outcomes: list[Outcome] = []
    notes: list[str] = []
    for plan in section.plans:
        try:
            found = measure(name, plan, chosen, seconds)
        except Exception as error:  # the groups before it are worth their time all the same
            notes.append(f"{name}, {plan.name}: {reason(error)}")
            found = []
        for outcome in found:
            done(outcome)
        outcomes += found
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception as error:  # nothing runs on the GPU any more in this process
            return outcomes, [*notes, f"the section ended after {plan.name}: {reason(error)}"]
    return outcomes, notes
