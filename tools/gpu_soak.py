"""Many calls of generate() on one model: whether memory stays what it is, and outputs what they are one at a time.

    python tools/gpu_soak.py [--config llama-3.1-8b] [--layers N] [--steps 1000] [--fuse] [--longest 20000]
                             [--most-new 200] [--exact 6] [--device cuda] [--seed 0] [--output FILE]

Calls have 1 to 4 prompts of 10 to --longest tokens and decode 5 to --most-new tokens; some go on with a second turn on
the same cache, some cut the cache first. Two parts, over one list of calls:

memory    calls until --steps decoding steps are done, after one call of each batch with the longest prompts there are.
          Memory is read after each call, its cache given back. Flat: at the end as many bytes are allocated as after
          the first calls, to --slack-mb, and as many reserved.
outputs   the first --exact calls of several rows again under the schedule `invariant`, then each row alone, padded as
          it was (a prompt without padding goes to another kernel). Linear layers and norms take a row at a time, since
          PyTorch's own sums round otherwise in larger batches: what is left is attention. All tokens must be equal.

The weights are random. Exits with 1 where memory grew or tokens differ. The JSON goes to --output, else to
gpu-soak.json in $OUT or in build/gpu-session.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gpu_session

SHORTEST, LEAST_NEW, BATCHES, MOST_MORE = 10, 5, 4, 500
#: The kinds of calls, and how often they come; "cropped" is a second turn on a cache that was cut.
KINDS = {"plain": 4, "second turn": 2, "cropped": 2}
#: Shape for trying the tool without a GPU.
TINY: dict[str, Any] = {"vocab_size": 311, "hidden_size": 96, "intermediate_size": 80, "num_attention_heads": 6,
                        "num_key_value_heads": 2}


@dataclass(frozen=True)
class Call:
    """One use of a cache.

    prompts: tokens of each row. new: tokens to decode, in each turn. more: tokens of each row's second turn, or 0.
    cut:     tokens that are dropped before it. seed: of the token ids.
    """

    kind: str
    prompts: tuple[int, ...]
    new: int
    more: int
    cut: int
    seed: int

    @property
    def steps(self) -> int:
        return self.new * (2 if self.more else 1)


def calls(longest: int, most_new: int, seed: int) -> Iterator[Call]:
    """Calls without end, the same for the same seed; lengths spread evenly over their logarithm.

    longest: tokens of a prompt. most_new: tokens to decode in a turn.
    """
    draw = random.Random(seed)

    def length(least: int, most: int) -> int:
        return round(math.exp(draw.uniform(math.log(least), math.log(most))))

    while True:
        (kind,) = draw.choices(list(KINDS), list(KINDS.values()))
        prompts = tuple(length(SHORTEST, longest) for _ in range(draw.randint(1, BATCHES)))
        new, more = length(LEAST_NEW, most_new), 0 if kind == "plain" else length(1, MOST_MORE)
        cut = draw.randint(1, new) if kind == "cropped" else 0
        yield Call(kind, prompts, new, more, cut, draw.randrange(1 << 30))


class Soak:
    """A model and its calls."""

    def __init__(self, model: Any) -> None:
        self.model, self.device = model, model.device
        self.on_gpu = model.device.type == "cuda"

    def run(self, call: Call, only: int | None = None, *, margin: int = 0) -> list[list[int]]:
        """New tokens of each row, or of the row `only`, which then runs alone with the padding that it has among all.

        margin: padding of the longest row.
        """
        import torch

        from wavefill.bench.decoding import cache_of, greedy

        generator = torch.Generator().manual_seed(call.seed)
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        drawn = [torch.randint(1, vocabulary, (count + call.more,), generator=generator) for count in call.prompts]
        rows = drawn if only is None else [drawn[only]]
        longest = max(call.prompts) + margin
        first = [row[:len(row) - call.more] for row in rows]
        ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in first]).to(self.device)
        mask = torch.stack([torch.nn.functional.pad(torch.ones_like(row), (longest - len(row), 0)) for row in first])
        mask = mask.to(self.device)
        result = greedy(self.model, ids, call.new, mask=mask)
        tokens = result.sequences[:, longest:]
        if call.more:
            cache = cache_of(result)
            kept = result.sequences[:, :result.sequences.shape[1] - call.cut]
            if call.cut > 1:  # the last token was never in the cache
                cache.crop(1 - call.cut)
            more = torch.stack([row[len(row) - call.more:] for row in rows]).to(self.device)
            ids = torch.cat([kept, more], 1)
            mask = torch.cat([mask, mask.new_ones(len(rows), ids.shape[1] - longest)], 1)
            again = greedy(self.model, ids, call.new, cache=cache, mask=mask)
            tokens = torch.cat([tokens, again.sequences[:, ids.shape[1]:]], 1)
        found: list[list[int]] = tokens.tolist()
        return found

    def memory(self) -> tuple[int, int]:
        """Bytes allocated and reserved on the GPU; on a CPU those of the process, twice."""
        import torch

        gc.collect()
        if not self.on_gpu:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            return (pages * os.sysconf("SC_PAGE_SIZE"),) * 2
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def memory(soak: Soak, options: argparse.Namespace, stop: float) -> dict[str, Any]:
    """The part about memory; stop: when it ends at the latest."""
    began = time.perf_counter()
    # A second turn of the longest kind on the longest prompts: nothing that comes needs larger tensors.
    for batch in range(1, BATCHES + 1):
        soak.run(Call("second turn", (options.longest,) * batch, 8, MOST_MORE + 2 * options.most_new, 0, batch))
    print(f"warm after {time.perf_counter() - began:.0f} s, {soak.memory()[0]:,} bytes", flush=True)
    done = 0
    records: list[dict[str, Any]] = []
    for call in calls(options.longest, options.most_new, options.seed):
        if len(records) > 1 and (done >= options.steps or time.perf_counter() > stop):
            break
        start = time.perf_counter()
        soak.run(call)
        done += call.steps
        allocated, reserved = soak.memory()
        records.append({**asdict(call), "seconds": time.perf_counter() - start, "allocated": allocated,
                        "reserved": reserved})
    figures = {name: {"first": values[0], "last": values[-1], "max": max(values), "min": min(values)}
               for name in ("allocated", "reserved") for values in ([record[name] for record in records],)}
    half = len(records) // 2
    grown = {name: max(record[name] for record in records[half:]) - max(record[name] for record in records[:half])
             for name in figures}
    slack = options.slack_mb * 1e6
    grew = [figures["allocated"]["last"] - figures["allocated"]["first"], *grown.values()]
    return {"steps": done, "enough": done >= options.steps, "calls": len(records), **figures,
            "grown_in_second_half": grown, "flat": max(grew) <= slack, "seconds": time.perf_counter() - began,
            "records": records}


@contextmanager
def invariant(model: Any) -> Iterator[None]:
    """Inside, attention runs by the schedule `invariant`, and linear layers and norms a row of the batch at a time."""
    import torch

    from wavefill.integrations.transformers import disable, enable

    kinds = {type(module) for module in model.modules()
             if isinstance(module, torch.nn.Linear) or type(module).__name__.endswith("RMSNorm")}
    own = {kind: kind.forward for kind in kinds}

    def apart(forward: Any) -> Any:
        def each(module: Any, x: Any) -> Any:
            if x.ndim < 3 or x.shape[0] == 1:
                return forward(module, x)
            return torch.cat([forward(module, row) for row in x.split(1)])

        return each

    for kind in kinds:
        kind.forward = apart(own[kind])
    try:
        enable(model, schedule="invariant")
        yield
    finally:
        disable(model)
        for kind in kinds:
            kind.forward = own[kind]


def outputs(soak: Soak, options: argparse.Namespace, stop: float) -> dict[str, Any]:
    """The part about outputs: batches of several rows, then each row alone; stop: when it ends at the latest."""
    began = time.perf_counter()
    records: list[dict[str, Any]] = []
    for call in calls(options.longest, options.most_new, options.seed):
        if len(records) >= options.exact or time.perf_counter() > stop:
            break
        if len(call.prompts) == 1:
            continue
        together = soak.run(call, margin=1)
        alone = [soak.run(call, row, margin=1)[0] for row in range(len(call.prompts))]
        equal = [sum(1 for _ in _common(a, b)) for a, b in zip(together, alone, strict=True)]
        records.append({**asdict(call), "tokens": len(together[0]), "equal_tokens": equal,
                        "rows_differ": len({tuple(row) for row in together}) == len(together)})
    wrong = [record for record in records if min(record["equal_tokens"]) < record["tokens"]]
    return {"calls": len(records), "enough": len(records) >= options.exact,
            "rows": sum(len(r["prompts"]) for r in records),
            "tokens": sum(r["tokens"] * len(r["prompts"]) for r in records), "calls_that_differ": len(wrong),
            "equal": not wrong, "seconds": time.perf_counter() - began, "records": records}


def _common(a: list[int], b: list[int]) -> Iterator[int]:
    """The tokens up to the first that differs."""
    for x, y in zip(a, b, strict=True):
        if x != y:
            return
        yield x


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tiny", action="store_true", help="a small shape in place of --config's sizes")
    parser.add_argument("--dtype", help="bfloat16 if not given, float32 on a CPU")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--fuse", action="store_true", help="enable(model, fuse=True) for the part about memory")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--longest", type=int, default=20_000)
    parser.add_argument("--most-new", type=int, default=200, help="tokens that a turn decodes at most")
    parser.add_argument("--exact", type=int, default=6, help="calls of the part about outputs")
    parser.add_argument("--slack-mb", type=float, default=32.0)
    parser.add_argument("--stop-after", type=float, default=90.0, help="seconds, half of them for each part")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    gpu_session.take_core()
    os.environ.update(gpu_session.environment(None, None, os.cpu_count() or 1))
    sys.path.insert(0, str(gpu_session.ROOT / "src"))

    import torch

    from wavefill.bench import gpu, probing, shapes
    from wavefill.bench.decoding import quiet_transformers
    from wavefill.cli._output import save_json
    from wavefill.integrations.transformers import disable, enable

    output = options.output or Path(os.environ.get("OUT") or gpu_session.ROOT / "build/gpu-session") / "gpu-soak.json"
    on_gpu, began = options.device == "cuda", time.perf_counter()
    with quiet_transformers():
        shape = shapes.find(options.config, options.layers)
        model = shapes.build(shape, options.dtype or ("bfloat16" if on_gpu else "float32"), options.seed,
                             options.device, **(TINY if options.tiny else {}))
        said = {**probing.provenance(torch.get_num_threads()), **(gpu.facts() if on_gpu else {}), "model": str(shape),
                "tiny": options.tiny, "dtype": str(model.dtype).removeprefix("torch."), "fuse": options.fuse,
                "longest": options.longest, "seed": options.seed}
        start, soak = time.perf_counter(), Soak(model)
        print(f"{shape} built in {start - began:.0f} s", flush=True)
        enable(model, fuse=options.fuse)
        said["memory"] = flat = memory(soak, options, start + options.stop_after / 2)
        print(*(f"{name}: {value}" for name, value in flat.items() if name != "records"), sep="\n", flush=True)
        save_json(output, said)
        disable(model)  # with its graphs, which hold the schedule
        with invariant(model):
            said["outputs"] = same = outputs(soak, options, start + options.stop_after)
        print(*(f"{name}: {value}" for name, value in same.items() if name != "records"), sep="\n", flush=True)
        save_json(output, said)
    failed = not (flat["enough"] and same["enough"] and same["equal"] and (flat["flat"] or not on_gpu))
    print(f"{'FAILED' if failed else 'ok'}, {time.perf_counter() - began:.0f} s; wrote {output}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
