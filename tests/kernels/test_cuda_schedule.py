"""The schedules of the Hopper kernel are those of `wavefill.schedule`: its own sources, on a warp of the host."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tables import LIMIT, SCHEDULES, lengths, table_of, windows

from wavefill import schedule as sch
from wavefill.backends.gpu import hopper, launch, nvrtc
from wavefill.spec import Fixed, Invariant, Schedule, StreamK

TILES = (16, 64)
HERE = Path(__file__).parent


@cache
def library(kind: int, scanned: bool, tile: int) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler, "a C++ compiler is needed, as for the package itself"
    folder = library.folder / f"{kind}-{scanned}-{tile}"  # type: ignore[attr-defined]
    folder.mkdir()
    build = hopper.Build("bfloat16", 128, 128, 1, 16, True, kind, scanned, tile, 8, 3)
    for name, text in {**nvrtc.sources(build), "variant.cuh": build.header}.items():
        (folder / name).write_text(text)
    made = folder / "list_segments.so"
    subprocess.run([compiler, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", "-fno-gnu-unique",
                    f"-I{folder}", f"-I{HERE}", str(HERE / "list_segments.cpp"), "-o", str(made)], check=True)
    return ctypes.CDLL(str(made))


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    library.folder = tmp_path_factory.mktemp("cursor")  # type: ignore[attr-defined]
    library.cache_clear()


def scan(table: sch.Table, lens: list[int], KH: int, param: int) -> np.ndarray:
    """What `merge.prefix` leaves: tiles and pieces of all heads before each row, and the parameter."""
    B = len(lens)
    tiles, pieces = np.zeros(B + 1, np.int64), np.zeros(B + 1, np.int64)
    np.add.at(tiles[1:], table.row, table.cost)
    np.add.at(pieces[1:], table.row, 1)
    return np.concatenate((tiles.cumsum(), pieces.cumsum(), [param]))


def agree(schedule: Schedule, lens: list[int], window: int | None, KH: int, workers: int, tile: int,
          scanned: bool, opening: int = 0) -> None:
    cut = launch.cut_of(schedule, tile)
    table = table_of(schedule, lens, window, KH, workers, tile, opening)
    most = max(np.bincount(table.owner, minlength=1).max(), 1) + 4 if len(table) else 1
    param = table.plan.param if cut.kind == launch.SPLITS else cut.param
    before = scan(table, lens, KH, param)
    seq = np.array(lens, np.int32)
    segments, counts = np.full((workers, most, 5), -7, np.int64), np.zeros(workers, np.int32)
    library(cut.kind, scanned, tile).list_segments(
        seq.ctypes, before.ctypes, len(lens), KH, window or 0, LIMIT, cut.param, cut.rule, workers, opening, int(most),
        segments.ctypes, counts.ctypes)
    runs = max(min(table.tiles, workers), 1)  # with fewer tiles than workers the kernel leaves some out
    owner = dataclasses.replace(table, workers=runs).owner
    expected = list(zip(*(column.tolist() for column in (owner, table.row, table.head, table.begin, table.end)),
                        strict=True))
    found = [(w, *segment) for w, n in enumerate(counts.tolist()) for segment in segments[w, :n].tolist()]
    assert [segment[:5] for segment in found] == expected
    places = owner.tolist() if cut.kind == launch.STREAM_K else list(range(len(expected)))
    assert [segment[5] for segment in found] == places


@pytest.mark.parametrize("scanned", [False, True], ids=["own scan", "scanned before"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_programs_find_the_segments_of_the_table(schedule: Schedule, scanned: bool) -> None:
    @settings(max_examples=30, deadline=None)
    @given(lengths(70), windows, st.sampled_from([1, 2, 3, 8]), st.integers(1, 9), st.sampled_from(TILES))
    @example([0, 0, 5], None, 1, 3, 16)
    @example([0], 3, 2, 2, 16)
    @example([500, 0, 0, 0, 0, 0, 17, 0, 0, 900] + [0] * 30 + [40], 100, 2, 7, 16)
    @example([1], None, 2, 40, 64)
    @example([4_000_000, 1, 3_999_999], None, 8, 5, 64)
    def any_batch(lens: list[int], window: int | None, KH: int, workers: int, tile: int) -> None:
        if max(lens) > 10_000 and schedule not in (StreamK(), Fixed(splits=7)):
            return  # as many segments as tiles
        agree(schedule, lens, window, KH, workers, tile, scanned)

    any_batch()


@settings(max_examples=60, deadline=None)
@given(lengths(70), windows, st.sampled_from([1, 2, 3, 8]), st.integers(1, 9), st.sampled_from(TILES),
       st.integers(1, 70))
@example([1, 900, 0, 3], None, 1, 9, 64, 64)
def test_openings_are_counted_as_tiles(lens: list[int], window: int | None, KH: int, workers: int, tile: int,
                                       opening: int) -> None:
    """Uneven batches on a GPU: each unit is cut as if its request were so many tiles longer."""
    if len(lens) > 1:  # a request alone has no others to even out with
        agree(StreamK(), lens, window, KH, workers, tile, False, opening)


@pytest.mark.parametrize("B", [31, 32, 33, 64, 65, 1000, 1024])
def test_lanes_share_many_requests(B: int) -> None:
    lens = [i * 37 % 200 * (i % 5 > 0) for i in range(B)]
    for schedule in (StreamK(), Fixed(splits=3), Invariant(chunk=64)):
        agree(schedule, lens, None, 2, 4, 16, False)
