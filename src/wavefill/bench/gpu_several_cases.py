"""What the benchmark of several query tokens runs: drafts, prompts, chunks of prompts, windows, other libraries.

A group holds the cases that are timed by turns, and a row for the read floor of the keys that they see. Every case is
causal and in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from wavefill.bench import gpu, gpu_timing, suites
from wavefill.bench.gpu_several_peers import Case
from wavefill.bench.inputs import DTYPES, Copy, Inputs, build
from wavefill.bench.suites import Row
from wavefill.spec import AttentionSpec, invalid

DTYPE, PAGE = "bfloat16", 16
#: Query tokens of a draft, and the most G * q_len of those that are timed.
DRAFTS, MOST_ROWS = (4, 8), 64
#: Bytes/s and operations/s that no call exceeds by much: they set how many calls a graph holds.
BANDWIDTH, OPERATIONS = 4.5e12, 7e14
#: Tokens of the prompts and of the chunk, the chunk's keys, and the windows that each is run with.
PROMPTS, CHUNK, CHUNK_WINDOWS = (8192, 32768), (256, 65536), (None, 4096)
#: Windows of one query token, and the keys of its request.
WINDOWS, WINDOW_KEYS = (1024, 128), 131072
#: Head sizes for the libraries, and batches and tokens of their prompts.
SIZES, LIBRARY_PROMPTS = (64, 96, 128, 256), ((1, 8192), (1, 32768), (8, 4096))


def keys_read(n: int, q_len: int, window: int | None) -> int:
    """Keys of a request of n that any of its last q_len tokens sees."""
    return n if window is None else min(n, window + q_len - 1)


def pairs(n: int, q_len: int, window: int | None) -> int:
    """Pairs of a query token and a key that it sees, in a causal request of n keys."""
    most = n if window is None else window
    full = max(0, min(q_len, n - most + 1))  # tokens, from the last, that see as many keys as the window has
    rest = q_len - full
    first = n - q_len + 1  # keys that the first token sees
    return full * most + rest * first + rest * (rest - 1) // 2


def flops(row: Row, q_len: int, window: int | None) -> int:
    """Operations of both products over what each query token sees, a multiplication and an addition apart."""
    return 4 * row.HQ * row.D * sum(pairs(n, q_len, window) for n in row.lens)


def read_row(row: Row, q_len: int, window: int | None) -> Row:
    """A row of as many keys as the call reads."""
    return replace(row, lens=tuple(keys_read(n, q_len, window) for n in row.lens))


@dataclass(frozen=True)
class Group:
    """Cases that are timed by turns. Their inputs and those of the floor, if any, have as many copies."""

    cases: tuple[Case, ...]
    floor: Inputs | None
    calls: int

    @classmethod
    def of(cls, cases: Sequence[Case], floor: Inputs | None) -> Group:
        work = max(max(read_row(case.inputs.row, case.q_len, case.window).kv_bytes(DTYPE) / BANDWIDTH,
                       flops(case.inputs.row, case.q_len, case.window) / OPERATIONS) for case in cases)
        count = len(cases[0].inputs.copies)
        return cls(tuple(cases), floor, gpu_timing.calls_of(int(work * BANDWIDTH), count, BANDWIDTH))

    @property
    def count(self) -> int:
        """Copies of the KV."""
        return len(self.cases[0].inputs.copies)


@dataclass(frozen=True)
class Plan:
    """A group before its inputs are made. specs: what wavefill compiles for it."""

    name: str
    specs: tuple[AttentionSpec, ...]
    make: Callable[[], Group]


@dataclass(frozen=True)
class Section:
    """Groups of one kind. rate: the unit beside the times; libraries: the names of those that run."""

    plans: tuple[Plan, ...]
    rate: str
    libraries: tuple[str, ...]


# ---- the sections


def _count(row: Row, copies: int = 1) -> int:
    """Copies of the KV of `row`, where `copies` of it are made for each."""
    kv_bytes = row.kv_bytes(DTYPE)
    return gpu_timing.rotation(kv_bytes, torch.cuda.mem_get_info()[0], kv_bytes * copies)


def _inputs(row: Row, page: int | None, count: int) -> Inputs:
    return build(row, DTYPE, "contiguous" if page is None else "paged", page or PAGE,
                 order="NHD" if page is None else "HND", peers=False, device=gpu.DEVICE, count=count)


def _tokens(made: Inputs, q_len: int) -> Inputs:
    """The same KV under q_len query tokens of each request."""
    row, generator = made.row, torch.Generator(gpu.DEVICE).manual_seed(q_len)
    q = torch.empty(len(row.lens) * q_len, row.HQ, row.D, dtype=DTYPES[DTYPE], device=gpu.DEVICE)
    return replace(made, q=q.normal_(generator=generator))


def ends(row: Row, keys: int, count: int, q_len: int) -> Inputs:
    """Inputs of q_len query tokens whose copies share all pages but those of the last `keys` keys of each request.

    It is for windows: copies of a long context in full would take all memory, and only its end is read.
    """
    (n,), last = set(row.lens), -(-keys // PAGE)
    each, batch = n // PAGE, len(row.lens)
    if n % PAGE or last > each:
        raise invalid("keys", f"must be at most the row's, in pages of {PAGE}", f"{keys} of {n}", "Take fewer.")
    total, own = each * batch, last * batch
    generator = torch.Generator().manual_seed(0)
    noise = torch.Generator(gpu.DEVICE).manual_seed(0)
    shape = (total + own * (count - 1), row.KH, PAGE, row.D)
    pools = [torch.empty(shape, dtype=DTYPES[DTYPE], device=gpu.DEVICE).normal_(generator=noise).transpose(1, 2)
             for _ in range(2)]
    table = torch.cat([
        torch.randperm(total - own, generator=generator).view(batch, -1),
        (torch.randperm(own, generator=generator) + total - own).view(batch, -1)], 1).to(gpu.DEVICE, torch.int32)
    k, v = pools
    copies = [Copy(k[i * own:i * own + total], v[i * own:i * own + total], []) for i in range(count)]
    lens = torch.tensor(row.lens, dtype=torch.int32, device=gpu.DEVICE)
    return _tokens(Inputs(row, torch.empty(0), lens, table, copies, None), q_len)


def _spec(row: Row, page: int | None, q_len: int) -> AttentionSpec:
    return replace(row.spec(DTYPE, page), q_len=q_len)


def _drafts(row: Row) -> Group:
    made = _inputs(row, PAGE, _count(row))
    return Group.of([Case(row.name, _tokens(made, n), n) for n in draft_lens(row)], made)


def draft_lens(row: Row) -> tuple[int, ...]:
    """Query tokens that a row is timed with; one alone where the least draft is too large for it."""
    return (1, *(n for n in DRAFTS if row.HQ // row.KH * n <= MOST_ROWS))


def draft_rows() -> list[Row]:
    return [row for row in suites.load().rows if row.size in ("M", "L") and len(draft_lens(row)) > 1]


def _prompt(n: int) -> Group:
    row = Row(f"prompt {n:,}", "L", 32, 8, 128, (n,), cpu=False)
    count = _count(row, 3)
    contiguous, small, large = (_tokens(_inputs(row, page, count), n) for page in (None, PAGE, 64))
    return Group.of([Case(row.name, made, n) for made in (contiguous, small, large)], small)


def _chunk(window: int | None) -> Group:
    tokens, n = CHUNK
    row = Row(f"{tokens} at the end of {n:,}", "L", 32, 8, 128, (n,), cpu=False)
    seen = read_row(row, tokens, window)
    count = _count(seen, 2)
    floor = _inputs(seen, PAGE, count)
    made = _tokens(floor, tokens) if window is None else ends(row, seen.lens[0], count, tokens)
    return Group.of([Case(row.name, made, tokens, window)], floor)


def _window(batch: int, window: int) -> Group:
    row = Row(f"b{batch}, {WINDOW_KEYS:,} keys", "L", 32, 8, 128, (WINDOW_KEYS,) * batch, cpu=False)
    seen = replace(read_row(row, 1, window), name=f"b{batch}, {window:,} keys")
    count = _count(seen, 2)
    few = _inputs(seen, PAGE, count)
    return Group.of([Case(seen.name, _tokens(few, 1), 1), Case(row.name, ends(row, window, count, 1), 1, window)], few)


def _dense(D: int, batch: int, n: int) -> Group:
    row = Row(f"D {D}, {batch} x {n:,}", "L", 32, 8, D, (n,) * batch, cpu=False)
    return Group.of([Case(row.name, _tokens(_inputs(row, None, _count(row)), n), n)], None)


def sections() -> dict[str, Section]:
    """Every section by its name, in the order in which they run."""
    def plain(D: int, page: int | None, q_len: int) -> AttentionSpec:
        return AttentionSpec(32, 8, D, D, DTYPE, page, q_len=q_len)

    return {
        "drafts": Section(tuple(
            Plan(row.name, tuple(_spec(row, PAGE, n) for n in draft_lens(row)), partial(_drafts, row))
            for row in draft_rows()), "GB/s", ("fa3", "flashinfer", "flashinfer_fa3")),
        "prompts": Section(tuple(
            Plan(f"prompt {n:,}", tuple(plain(128, page, n) for page in (None, PAGE, 64)), partial(_prompt, n))
            for n in PROMPTS), "TFLOP/s", ("wavefill:own", "fa3")),
        "chunks": Section(tuple(
            Plan(f"chunk, window {window}", (plain(128, PAGE, CHUNK[0]),), partial(_chunk, window))
            for window in CHUNK_WINDOWS), "TFLOP/s", ("fa3",)),
        "windows": Section(tuple(
            Plan(f"b{batch}, window {window}", (plain(128, PAGE, 1),), partial(_window, batch, window))
            for window in WINDOWS for batch in (1, 8)), "GB/s", ("fa3",)),
        "libraries": Section(tuple(
            Plan(f"D {D}, {batch} x {n:,}", (plain(D, None, n),), partial(_dense, D, batch, n))
            for D in SIZES for batch, n in LIBRARY_PROMPTS), "TFLOP/s",
                ("wavefill:own", "fa3", "torch_flash", "cudnn", "sdpa_flash")),
    }


def choose(text: str | None) -> tuple[str, ...]:
    """Names of sections from names with commas between, all of them for None. Raises InvalidArgument."""
    every = tuple(sections())
    names = every if text is None else tuple(text.split(","))
    for name in names:
        if name not in every:
            raise invalid("--sections", f"takes some of {', '.join(every)}", repr(name), "Use these names.")
    return tuple(dict.fromkeys(names))
