"""Edges of a captured CUDA graph: which of them let the next timed call start before the one before it is done.

A kernel launched with programmatic dependent launch may start while the kernel before it still runs. Inside a call
that is the call's own gain. Between two timed calls it would hide a part of each, so `serialize` makes those edges
full ones. Torch has no functions for edges; the driver's are called through ctypes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class EdgeData(ctypes.Structure):
    """CUgraphEdgeData of the driver; type 0 is a full edge, 1 a programmatic one."""

    _fields_ = (("from_port", ctypes.c_ubyte), ("to_port", ctypes.c_ubyte), ("type", ctypes.c_ubyte),
                ("reserved", ctypes.c_ubyte * 5))


@dataclass(frozen=True)
class Edge:
    """An edge between two nodes, given by their handles."""

    start: int
    end: int
    from_port: int = 0
    type: int = 0

    @property
    def full(self) -> bool:
        return self.from_port == 0 and self.type == 0


def chain(nodes: Iterable[int], edges: Sequence[Edge]) -> list[Edge] | None:
    """The edges in the order of the chain that they make, None where the graph is no single chain of its nodes."""
    after = {edge.start: edge for edge in edges}
    heads = set(nodes) - {edge.end for edge in edges}
    if len(after) != len(edges) or len(heads) != 1:
        return None
    ordered: list[Edge] = []
    node = heads.pop()
    while node in after and len(ordered) <= len(edges):
        ordered.append(after[node])
        node = after[node].end
    return ordered if len(ordered) == len(edges) == len(set(nodes)) - 1 else None


def crossing(ordered: Sequence[Edge], calls: int) -> list[Edge] | None:
    """The edges of a chain that lead from one of `calls` equal calls to the next; None where calls are not equal."""
    each, rest = divmod(len(ordered) + 1, calls)
    return None if rest else [ordered[i * each - 1] for i in range(1, calls)]


def serialize(graph: int, calls: int, driver: Driver | None = None) -> bool:
    """Make every edge between two of the graph's equal calls a full one; False where that cannot be made sure.

    graph: handle of a CUgraph that was captured from one stream and is not instantiated yet.
    """
    driver = driver or Driver()
    for last in (False, True):
        ordered = chain(*driver.read(graph))
        between = None if ordered is None else crossing(ordered, calls)
        if between is None:
            return False
        early = [edge for edge in between if not edge.full]
        if not early:
            return True
        if not last:
            driver.replace(graph, early, [Edge(edge.start, edge.end) for edge in early])
    return False


class Driver:
    """The driver's functions on edges (CUDA 12.3 and newer). Raises OSError or AttributeError where they are missing,
    RuntimeError where one fails."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        cuda = ctypes.CDLL(library)
        self._nodes, self._edges = cuda.cuGraphGetNodes, cuda.cuGraphGetEdges_v2
        self._add, self._remove = cuda.cuGraphAddDependencies_v2, cuda.cuGraphRemoveDependencies_v2

    def read(self, graph: int) -> tuple[list[int], list[Edge]]:
        """Handles of the nodes, and the edges."""
        handle, count = ctypes.c_void_p(graph), ctypes.c_size_t(0)
        _done(self._nodes(handle, None, ctypes.byref(count)))
        nodes = (ctypes.c_void_p * count.value)()
        _done(self._nodes(handle, nodes, ctypes.byref(count)))
        _done(self._edges(handle, None, None, None, ctypes.byref(count)))
        start, end = (ctypes.c_void_p * count.value)(), (ctypes.c_void_p * count.value)()
        data = (EdgeData * count.value)()
        if count.value:
            _done(self._edges(handle, start, end, data, ctypes.byref(count)))
        return ([node or 0 for node in nodes],
                [Edge(a or 0, b or 0, d.from_port, d.type) for a, b, d in zip(start, end, data, strict=True)])

    def replace(self, graph: int, old: Sequence[Edge], new: Sequence[Edge]) -> None:
        """Remove the edges `old` and add the edges `new`."""
        for call, edges in ((self._remove, old), (self._add, new)):
            array = ctypes.c_void_p * len(edges)
            data = (EdgeData * len(edges))(*(EdgeData(from_port=edge.from_port, type=edge.type) for edge in edges))
            _done(call(ctypes.c_void_p(graph), array(*(edge.start for edge in edges)),
                       array(*(edge.end for edge in edges)), data, ctypes.c_size_t(len(edges))))


def _done(status: int) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver returned error {status}")
