"""Stream-K against FlashDecoding's rule in the simulation of docs/advise.md."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from wavefill import hardware, schedule
from wavefill.advise import lean
from wavefill.spec import Fixed, StreamK


def table(kind, stops, KH=1, workers=4, tile=16):
    return schedule.make_table(kind, [0] * len(stops), stops, KH=KH, workers=workers, tile=tile)


def test_workers_with_shares_of_their_own_take_the_makespan():
    for kind in (Fixed(splits=3), StreamK(), Fixed(rule="flashdecoding")):
        found = table(kind, [700, 90, 16, 333], KH=3)
        assert lean.seconds(found, 1.0) == schedule.Timeline(found).makespan


def test_idle_workers_leave_their_share_to_others():
    """Five pieces of four tiles on four workers: four tiles together, then one piece alone at twice the speed."""
    found = table(Fixed(splits=1), [64] * 5)
    assert lean.seconds(found, 2.0) == 4 + 4 / 2
    assert lean.seconds(found, 1e9) == pytest.approx(found.tiles / 4)  # as if all bandwidth went to whoever is busy


def test_ragged_lengths_are_drawn_once():
    assert lean.lengths(4096, 3, False) == [4096] * 3
    first = lean.lengths(4096, 16, True)
    assert first == lean.lengths(4096, 16, True)
    assert first[0] == 4096
    assert all(256 <= each <= 4096 for each in first)


@pytest.fixture(scope="module")
def cases():
    return {name: lean.study(hardware.lookup(name)) for name in ("A100", "MI250X")}


@pytest.mark.parametrize(("name", "uniform", "ragged"), [
    ("A100", (1.20, 1.93), (1.45, 2.86)), ("MI250X", (1.22, 1.96), (1.47, 2.91))])
def test_figures_of_the_page(cases, name, uniform, ragged):
    """Mean, and largest at 256K: docs/advise.md has them beside the paper's."""
    found = lean.summaries(cases[name])
    for words, (mean, largest) in (("uniform", uniform), ("ragged", ragged)):
        assert found[f"{words}, headroom 1"].mean == pytest.approx(mean, abs=0.006)
        assert found[f"{words}, headroom 1, 256K"].largest == pytest.approx(largest, abs=0.006)
        assert found[f"{words}, headroom 2"].mean < found[f"{words}, headroom 1"].mean


def test_stream_k_is_never_longer_where_workers_have_their_own_share(cases):
    """Equal lengths gain at most two, when one piece is left for a second wave; ragged ones more."""
    for found in cases.values():
        assert len(found) == 1152
        assert all(each.speedups[0] >= 1 for each in found)
        assert max(each.speedups[0] for each in found if not each.ragged) <= 2


def test_the_command_prints_json():
    done = subprocess.run([sys.executable, "-m", "wavefill.advise.lean", "--json"], capture_output=True, text=True,
                          check=True)
    found = json.loads(done.stdout)
    assert list(found) == ["A100 (108)", "MI250X (110)"]
    assert len(found["A100 (108)"]["cases"]) == 1152
