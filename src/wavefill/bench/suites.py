"""The suite of decode-attention shapes that is shipped with the package, data/suite.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from wavefill.spec import DTYPE_BYTES, AttentionSpec, invalid


@dataclass(frozen=True)
class Row:
    """One shape.

    size: class of the row: S, M or L by its KV bytes, R for ragged lengths.
    lens: tokens of KV of each request.
    cpu:  whether a machine of two cores gets through it.
    """

    name: str
    size: str
    HQ: int
    KH: int
    D: int
    lens: tuple[int, ...]
    cpu: bool

    @property
    def tokens(self) -> int:
        return sum(self.lens)

    @property
    def ragged(self) -> bool:
        return len(set(self.lens)) > 1

    def spec(self, dtype: str, page_size: int | None) -> AttentionSpec:
        return AttentionSpec(self.HQ, self.KH, self.D, self.D, dtype, page_size)

    def kv_bytes(self, dtype: str) -> int:
        """Bytes of K and V that one call must read."""
        return self.tokens * self.KH * 2 * self.D * DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class Suite:
    """All rows, and the page size that tables of paged KV use."""

    page_size: int
    rows: tuple[Row, ...]

    def select(self, names: Sequence[str] | None = None) -> tuple[Row, ...]:
        """The rows for a CPU, or those named (a name may be the beginning of several). Raises InvalidArgument."""
        if not names:
            return tuple(row for row in self.rows if row.cpu)
        chosen: dict[str, Row] = {}
        for name in names:
            if not name:
                raise invalid("rows", "must be names with commas between", "an empty name",
                              "Leave the option out for the rows of a CPU.")
            exact = [row for row in self.rows if row.name == name]
            found = exact or [row for row in self.rows if row.name.startswith(name)]
            if not found:
                raise invalid("rows", f"must be among {', '.join(row.name for row in self.rows)}", repr(name),
                              "Give a name of this list, or the beginning of one.")
            chosen |= {row.name: row for row in found}
        return tuple(chosen.values())


@cache
def load() -> Suite:
    """The shipped suite."""
    data = json.loads((files("wavefill") / "data" / "suite.json").read_text(encoding="utf-8"))
    return Suite(data["page_size"], tuple(
        Row(row["name"], row["class"], row["HQ"], row["KH"], row["D"],
            tuple(length for count, length in row["lens"] for _ in range(count)), row.get("cpu", False))
        for row in data["rows"]))
