"""What a decode-attention call moves and computes, and the least time that takes.

Bytes are time: decode reads each key and value once and does little with it, so the floor of a call is its bytes over
the read bandwidth. Pure arithmetic; a schedule adds only the partial states that it makes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wavefill.spec import DTYPE_BYTES, AttentionSpec, invalid

if TYPE_CHECKING:
    from wavefill.schedule import Rows, Table

#: Partial states (output and log-sum-exp) are float32.
STATE_BYTES = 4


@dataclass(frozen=True)
class Traffic:
    """Bytes that one call moves. Page tables and lengths are left out: 4 bytes a page.

    kv:            keys and values in the rows' ranges, each row's read once.
    query, output: of all query tokens.
    partials:      partial states, which are written once and read once by the merge.
    """

    kv: int
    query: int
    output: int
    partials: int

    @property
    def read(self) -> int:
        return self.kv + self.query + self.partials

    @property
    def written(self) -> int:
        return self.output + self.partials

    @property
    def total(self) -> int:
        return self.read + self.written

    @property
    def least(self) -> int:
        """What any schedule of these rows moves: all but the partial states."""
        return self.kv + self.query + self.output


def traffic(spec: AttentionSpec, rows: Rows, table: Table) -> Traffic:
    """Bytes of a call whose rows are scheduled by `table`."""
    element = DTYPE_BYTES[spec.dtype]
    queries = int((rows.q_end - rows.q_begin).sum())
    keys = int((rows.stop - rows.start).sum())
    return Traffic(
        kv=keys * spec.KH * spec.kv_head_bytes,
        query=queries * spec.HQ * spec.D * element,
        output=queries * spec.HQ * spec.DV * element,
        partials=partial_bytes(spec, rows, table),
    )


def least_bytes(spec: AttentionSpec, rows: Rows) -> int:
    """Bytes that any kernel moves: the keys and values of each request once, queries and outputs."""
    import numpy as np  # not with the command line

    some = rows.stop > rows.start
    request, start, stop = rows.request[some], rows.start[some], rows.stop[some]
    first = np.flatnonzero(np.diff(request, prepend=-1))  # rows are ordered by request
    keys = int((np.maximum.reduceat(stop, first) - np.minimum.reduceat(start, first)).sum()) if first.size else 0
    queries = int((rows.q_end - rows.q_begin).sum())
    ends = queries * spec.HQ * (spec.D + spec.DV) * DTYPE_BYTES[spec.dtype]
    return keys * spec.KH * spec.kv_head_bytes + ends


def partial_bytes(spec: AttentionSpec, rows: Rows, table: Table) -> int:
    """Bytes of the partial states that must be merged: an output row and a log-sum-exp for each query and head."""
    row = table.row[table.partial]
    states = int((rows.q_end - rows.q_begin)[row].sum()) * spec.G
    return states * (spec.DV + 1) * STATE_BYTES


def tile_bytes(spec: AttentionSpec, tile: int) -> int:
    """Bytes of the K and V of one tile: `tile` tokens of one KV head."""
    return tile * spec.kv_head_bytes


def flops(spec: AttentionSpec, rows: Rows) -> int:
    """Multiplications and additions of QK and PV. Keys of a row that some of its queries do not see are counted for
    all of them, since kernels compute and mask them."""
    pairs = int(((rows.q_end - rows.q_begin) * (rows.stop - rows.start)).sum())
    return 2 * pairs * spec.HQ * (spec.D + spec.DV)


def floor_us(nbytes: int, read_bandwidth: float) -> float:
    """Microseconds to move `nbytes` at `read_bandwidth` bytes/s. A launch adds a few on a GPU."""
    if not 1 <= read_bandwidth < math.inf:
        raise invalid("read_bandwidth", "must be at least 1, and finite", read_bandwidth, "Give bytes per second.")
    return nbytes / read_bandwidth * 1e6
