"""The compiled core, built from csrc/. Pointers are addresses, strides count elements; see backends/cpu/__init__.py."""

def attention(*arguments: float | tuple[int, ...]) -> tuple[int, int, int, int] | None:
    """None, or (fault, request, value, slot). The arguments are those of `attention` in csrc/module.cpp."""

def schedule(
    starts: list[int], stops: list[int], kv_heads: int, tile: int, kind: int, param: int, workers: int
) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """Row, head, first tile, last tile (exclusive) and worker of each segment, in linear order."""

def rows(
    seq_lens: list[int], cu_q: list[int], group: int, causal: bool, window: int
) -> list[tuple[int, int, int, int, int]]:
    """(request, first query, last query (exclusive), first key, last key (exclusive)) of each row."""

def append(
    k: tuple[int, ...], v: tuple[int, ...], k_page: int, v_page: int, slots: int, n: int, element: int, page_size: int,
    pages: int, dtype: int, codes: int, k_scales: tuple[int, ...], v_scales: tuple[int, ...], threads: int, /,
) -> int:
    """-1, or the index of a slot past the cache; nothing is written then. k, v and scales: see csrc/module.cpp."""

def merge(
    outs: int, lses: int, out: int, lse: int, n: int, rows: int, d: int, dtype: int, threads: int, /
) -> None: ...
def linear(
    x: int, weight: int, bias: int, out: int, rows: int, inputs: int, outputs: int, x_row: int, weight_row: int,
    out_row: int, dtype: int, threads: int, /,
) -> None: ...
def read_bandwidth(data: int, nbytes: int, threads: int, /) -> float:
    """Bytes per second of one pass."""

def isa() -> str:
    """The kernel in use."""

def isas() -> list[str]:
    """The kernels that this CPU runs, the best first."""

def set_isa(name: str) -> None: ...
def pool() -> str:
    """What runs the threads."""

def compiler() -> str: ...
