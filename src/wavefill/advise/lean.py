"""LeanAttention's claim by simulation: stream-K against FlashDecoding's split rule, by the tables of `schedule.py`.

    python -m wavefill.advise.lean [--json]

Both cut the same LeanTiles (256 tokens for head size 64, 128 for 128) for two thread blocks a multiprocessor, as ONNX
Runtime's kernels of both do (lean_attention/lean_api.cc; FlashAttention's num_splits_heuristic gets twice the SMs).
What is not simulated: launches, merges, the reading of queries.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from wavefill import schedule
from wavefill.hardware import GPUS, Gpu
from wavefill.spec import Fixed, StreamK

CONTEXTS = tuple(1 << i for i in range(12, 20))
BATCHES = (1, 2, 4, 8, 16)
HEADS = (8, 16, 24, 32, 40, 48, 56, 64)
#: Tokens of a LeanTile by head size (lean_fwd_launch_template.h).
TILES = {64: 256, 128: 128}
BLOCKS_PER_SM = 2
#: How much faster a worker runs when others are idle: 1 where each has its own share of the bandwidth, as counting
#: waves supposes; 2 where one takes twice its share.
HEADROOM = (1.0, 2.0)
#: The paper's mean, and its largest at 256K (LeanAttention, MLSys 2025, abstract).
PAPER_MEAN, PAPER_256K = 1.73, 2.18


def seconds(table: schedule.Table, headroom: float) -> float:
    """How long a table takes, in tiles of a worker while all are busy.

    While a of W workers are busy each runs at min(headroom, W / a). All run alike, so who claims which piece is as in
    the table, and only time stretches.
    """
    line = schedule.Timeline(table)
    edges = np.concatenate((line.t0, line.t1))
    change = np.concatenate((np.ones_like(line.t0), -np.ones_like(line.t1)))
    order = np.argsort(edges, kind="stable")
    active = np.cumsum(change[order])[:-1]
    return float((np.diff(edges[order]) * np.maximum(1 / headroom, active / table.workers))[active > 0].sum())


def lengths(context: int, batch: int, ragged: bool) -> list[int]:
    """Of a batch: all of the context, or the first of it and the others even between a sixteenth of it and all."""
    if not ragged:
        return [context] * batch
    drawn = np.random.default_rng([context, batch]).integers(context // 16, context, batch - 1, endpoint=True)
    return [context, *drawn.tolist()]


@dataclass(frozen=True)
class Case:
    """speedups: of stream-K over the rule, for each of `HEADROOM`."""

    gpu: str
    D: int
    context: int
    batch: int
    heads: int
    ragged: bool
    splits: int
    speedups: tuple[float, ...]


def study(gpu: Gpu) -> list[Case]:
    """All contexts, batches, head counts and head sizes; ragged batches where there are several requests."""
    found = []
    for D, tile in TILES.items():
        for context in CONTEXTS:
            for batch in BATCHES:
                for ragged in (False, True)[: 1 + (batch > 1)]:
                    stops = lengths(context, batch, ragged)
                    found += [_case(gpu, D, tile, stops, heads, ragged) for heads in HEADS]
    return found


def _case(gpu: Gpu, D: int, tile: int, stops: list[int], heads: int, ragged: bool) -> Case:
    tables = [schedule.make_table(kind, [0] * len(stops), stops, KH=heads, workers=BLOCKS_PER_SM * gpu.sms, tile=tile)
              for kind in (Fixed(rule="flashdecoding"), StreamK())]
    split, stream = tables
    return Case(gpu.name, D, max(stops), len(stops), heads, ragged, split.plan.param,
                tuple(seconds(split, headroom) / seconds(stream, headroom) for headroom in HEADROOM))


@dataclass(frozen=True)
class Summary:
    """Of some cases' speed-ups: how many, quantiles, mean and largest."""

    cases: int
    tenth: float
    median: float
    mean: float
    ninetieth: float
    largest: float


def summary(speedups: Sequence[float]) -> Summary:
    tenth, median, ninetieth = np.quantile(speedups, (0.1, 0.5, 0.9)).tolist()
    return Summary(len(speedups), tenth, median, float(np.mean(speedups)), ninetieth, max(speedups))


def summaries(cases: Sequence[Case]) -> dict[str, Summary]:
    """Uniform and ragged, for each headroom, over all contexts and at 256K."""
    made = {}
    for i, headroom in enumerate(HEADROOM):
        for ragged in (False, True):
            some = [each for each in cases if each.ragged == ragged]
            name = f"{'ragged' if ragged else 'uniform'}, headroom {headroom:g}"
            made[name] = summary([each.speedups[i] for each in some])
            made[f"{name}, 256K"] = summary([each.speedups[i] for each in some if each.context == 1 << 18])
    return made


def main(arguments: Sequence[str]) -> None:
    gpus = [each for each in GPUS if each.name in ("A100", "MI250X")]
    found = {f"{gpu.name} ({gpu.sms})": study(gpu) for gpu in gpus}
    if "--json" in arguments:
        print(json.dumps({name: {
            "summaries": {key: asdict(each) for key, each in summaries(cases).items()},
            "cases": [asdict(each) for each in cases],
        } for name, cases in found.items()}, indent=1))
        return
    print(f"{'':44} cases   10 %  median   mean   90 %  largest")
    for name, cases in found.items():
        for key, each in summaries(cases).items():
            print(f"{f'{name}, {key}':44} {each.cases:5} {each.tenth:6.2f} {each.median:7.2f} {each.mean:6.2f} "
                  f"{each.ninetieth:6.2f} {each.largest:8.2f}")
    print(f"the paper: mean {PAPER_MEAN}, largest at 256K {PAPER_256K}")


if __name__ == "__main__":
    main(sys.argv[1:])
