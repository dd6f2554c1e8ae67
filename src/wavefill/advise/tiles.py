"""How attention fits the tiles of tensor cores and of schedules: useful rows and columns, waves and how full they are.

Waves come from `schedule.py`, the code that the kernels follow.
"""

from __future__ import annotations

from dataclasses import dataclass

from wavefill import schedule
from wavefill.advise.models import Attention, Latent
from wavefill.hardware import Gpu
from wavefill.spec import Fixed, Schedule, StreamK

#: Most (request, KV head) pairs that tables are made for.
MOST_UNITS = 1 << 17
#: Query rows of a product of prompts (cuda/many.cu); columns of a tensor-core tile (the guide: head sizes are padded to
#: multiples of it, 64 pays for 128).
PROMPT_ROWS, TILE_COLUMNS = 128, 128
#: Tensor memory of Blackwell's SMs: 128 lanes of 512 columns of 32 bits (PTX ISA, tcgen05). Attention of prompts keeps
#: scores of 128 keys and outputs of 128 queries there, for two blocks of queries by turns (FlashAttention-4).
TMEM_COLUMNS, TMEM_BLOCKS, TMEM_KEYS = 512, 2, 128


@dataclass(frozen=True)
class Waves:
    """What one schedule makes of a step.

    items:    pieces of work; waves of them over the workers; last: how full the last wave is.
    makespan: tiles until the last worker is done; fill: share of all workers' time until then that is work.
    """

    schedule: str
    splits: int | None
    items: int
    waves: int
    last: float
    makespan: int
    fill: float


@dataclass(frozen=True)
class Tiles:
    """One kind of attention on one GPU, in a decoding step.

    tokens:      of a tile; tiles of a request and KV head; last: tokens of its last tile that exist.
    rows:        query heads of a KV head, and the rows of the product that takes them.
    prompt_rows: the same for prompts: whole query tokens in a block.
    columns:     head size, and columns of the tiles that hold it.
    tensor_memory: columns that attention of prompts would like, and those that there are; None without tensor memory.
    schedules:   stream_k, and FlashDecoding's rule; empty for more than `MOST_UNITS` pairs.
    """

    kind: str
    tokens: int
    tiles: int
    last: int
    rows: tuple[int, int]
    prompt_rows: tuple[int, int]
    columns: tuple[int, int]
    tensor_memory: tuple[int, int] | None
    workers: int
    schedules: tuple[Waves, ...]


def tiles(mixer: Attention | Latent, batch: int, keys: int, gpu: Gpu, gpus: int = 1) -> Tiles:
    """Of `batch` requests of `keys` tokens; KV heads are dealt out over `gpus`, as far as there are enough."""
    if isinstance(mixer, Latent):
        KH, G, D, DV = 1, mixer.HQ, mixer.columns, mixer.rank
    else:
        KH, G, D, DV = max(1, mixer.KH // gpus), mixer.G, mixer.D, mixer.DV
        keys = min(keys, mixer.window or keys)
    tile = gpu.tile(max(D, DV))
    product = 8 if gpu.capability == (9, 0) else 16  # cuda/decode.cu multiplies K by q^T; others take 16 rows at least
    blackwell = gpu.capability is not None and gpu.capability[0] == 10
    units = batch * KH
    return Tiles(
        mixer.kind, tile, -(-keys // tile), (keys - 1) % tile + 1, (G, _up(G, product)),
        (PROMPT_ROWS // G * G if G <= PROMPT_ROWS else PROMPT_ROWS, PROMPT_ROWS), (D, _up(D, TILE_COLUMNS)),
        (TMEM_BLOCKS * (TMEM_KEYS + DV), TMEM_COLUMNS) if blackwell else None, gpu.workers,
        tuple(_waves(each, batch, keys, KH, gpu.workers, tile) for each in (StreamK(), Fixed(rule="flashdecoding")))
        if units <= MOST_UNITS else (),
    )


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _waves(kind: Schedule, batch: int, keys: int, KH: int, workers: int, tile: int) -> Waves:
    table = schedule.make_table(kind, [0] * batch, [keys] * batch, KH=KH, workers=workers, tile=tile)
    line = schedule.Timeline(table)
    streamed = isinstance(kind, StreamK)
    busy = int((line.busy > 0).sum()) if streamed else (len(table) - 1) % workers + 1
    return Waves("stream_k" if streamed else "flashdecoding", None if streamed else table.plan.param, len(table),
                 line.waves, busy / workers, line.makespan, line.fill)
