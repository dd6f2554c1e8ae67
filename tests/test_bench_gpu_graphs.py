"""Which edges of a captured graph are made full ones, so that no timed call starts before the one before it ends."""

from __future__ import annotations

import ctypes

from wavefill.bench import gpu_graphs
from wavefill.bench.gpu_graphs import Edge

PROGRAMMATIC = {"from_port": 1, "type": 1}


class Graph:
    """A driver whose one graph is a list of edges."""

    def __init__(self, nodes: list[int], edges: list[Edge], *, stubborn: bool = False) -> None:
        self.nodes, self.edges, self.stubborn = nodes, edges, stubborn

    def read(self, graph: int) -> tuple[list[int], list[Edge]]:
        return self.nodes, list(self.edges)

    def replace(self, graph: int, old: list[Edge], new: list[Edge]) -> None:
        if not self.stubborn:
            self.edges = [edge for edge in self.edges if edge not in old] + list(new)


def _chain(kinds: str) -> Graph:
    """A chain whose edges are full (f) or programmatic (p), handed over in no order."""
    handles = [100 - 7 * i for i in range(len(kinds) + 1)]
    edges = [Edge(a, b, **(PROGRAMMATIC if kind == "p" else {}))
             for a, b, kind in zip(handles, handles[1:], kinds, strict=False)]
    return Graph(sorted(handles), edges[::-1])


def test_only_edges_between_calls_are_made_full() -> None:
    graph = _chain("pppppppp")  # three calls of three kernels
    assert gpu_graphs.serialize(1, 3, graph)  # type: ignore[arg-type]
    ordered = gpu_graphs.chain(graph.nodes, graph.edges)
    assert ordered is not None
    assert [edge.full for edge in ordered] == [False, False, True, False, False, True, False, False]


def test_a_graph_of_full_edges_is_left_alone() -> None:
    graph = _chain("pfpfp")
    before = list(graph.edges)
    assert gpu_graphs.serialize(1, 3, graph)  # type: ignore[arg-type]
    assert graph.edges == before


def test_calls_that_cannot_be_told_apart_are_not_called_serial() -> None:
    assert not gpu_graphs.serialize(1, 2, _chain("ff"))  # type: ignore[arg-type]  # three kernels, two calls
    fork = Graph([1, 2, 3], [Edge(1, 2), Edge(1, 3)])
    assert gpu_graphs.chain(fork.nodes, fork.edges) is None
    assert not gpu_graphs.serialize(1, 3, fork)  # type: ignore[arg-type]
    apart = Graph([1, 2, 3], [Edge(1, 2)])
    assert gpu_graphs.chain(apart.nodes, apart.edges) is None
    stubborn = _chain("p")
    stubborn.stubborn = True
    assert not gpu_graphs.serialize(1, 2, stubborn)  # type: ignore[arg-type]


def test_the_edge_data_has_the_drivers_layout() -> None:
    assert ctypes.sizeof(gpu_graphs.EdgeData) == 8
    assert gpu_graphs.EdgeData.type.offset == 2
