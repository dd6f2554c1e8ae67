"""The outcome of one row of the suite, on whatever device it ran."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from wavefill.bench.suites import Row
from wavefill.bench.timing import Samples

#: The name of the variant that only reads the row's KV.
READ = "read"


def is_peer(name: str) -> bool:
    """Whether a variant's name is a peer's: neither wavefill in some form nor the read floor."""
    return name != READ and name.partition(":")[0] != "wavefill"


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
        return self.speedup(READ)

    def to_dict(self) -> dict[str, Any]:
        return {
            "row": self.row.name, "class": self.row.size, "dtype": self.dtype, "kv_bytes": self.kv_bytes,
            "HQ": self.row.HQ, "KH": self.row.KH, "D": self.row.D, "lens": list(self.row.lens),
            "times_us": {name: {"median": s.median * 1e6, "spread": s.spread, "calls": len(s.seconds)}
                         for name, s in self.times.items()},
            "gbs": {name: self.kv_bytes / s.median / 1e9 for name, s in self.times.items()},
            "read_share": self.read_share(),
            "speedup": {name: self.speedup(name) for name in self.times if is_peer(name)},
            "max_error": self.errors, "absent": self.absent,
        }
