"""Time of one decoding step of SmolLM2 at a context, wavefill and stock transformers by turns.

    python tools/decode_step.py --dtype bfloat16 [--context 7900] [--linear flat] [--output FILE]

The same figures as `wavefill generate --compare sdpa`, without reading a prompt: the caches are filled with random K
and V, so the text means nothing and its tokens are not compared. For dtypes in which PyTorch needs an hour for the
prompt (bfloat16 on a CPU without AVX-512 BF16).
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from wavefill.bench import e2e, models, probing
from wavefill.bench.decoding import cache_argument, quiet_transformers
from wavefill.bench.timing import ReadBandwidth
from wavefill.cli._output import save_json
from wavefill.integrations.transformers import WavefillCache, disable, enable

STEPS = 6  # of a block; the first is not counted


def kv(model: Any, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [1, KH, context, D] of one layer."""
    config = model.config
    k, v = torch.randn(2, 1, config.num_key_value_heads, context, e2e.head_dim(config)).to(model.dtype)
    return k, v


def wavefill_cache(model: Any, k: torch.Tensor, v: torch.Tensor) -> Any:
    cache = WavefillCache(model)
    rows = cache.layers[0].rows
    step = rows.begin(1, k.shape[2], None, model.config)
    for layer in range(rows.layers):
        rows.write(step, layer, k, v)
        step.attended += 1
    rows.end(step, returned=True)
    return cache


def stock_cache(model: Any, k: torch.Tensor, v: torch.Tensor) -> Any:
    cache = DynamicCache(config=model.config)
    for layer in range(model.config.num_hidden_layers):
        cache.update(k, v, layer)
    return cache


def block(model: Any, cache: Any) -> list[float]:
    token, name, seconds = torch.tensor([[5]]), cache_argument(model), []
    with torch.inference_mode():
        for _ in range(STEPS):
            start = time.perf_counter()
            logits = model(token, use_cache=True, **{name: cache}).logits
            int(logits[0, -1].argmax())
            seconds.append(time.perf_counter() - start)
    cache.crop(-STEPS)
    return seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=7900)
    parser.add_argument("--linear", default="torch", choices=("torch", "flat"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with quiet_transformers():
        model = e2e.load(models.resolve("smollm2", lambda text, share: None), options.dtype)
        sides = {"wavefill": (partial(enable, linear=options.linear), wavefill_cache), "sdpa": (disable, stock_cache)}
        caches: dict[tuple[str, int], Any] = {}
        for name, (attach, make) in sides.items():
            attach(model)
            for context in (options.context, e2e.SHORT_CONTEXT):
                caches[name, context] = make(model, *kv(model, context))
        times: dict[tuple[str, int], list[float]] = {key: [] for key in caches}
        bandwidth = ReadBandwidth()
        for turn in range(options.rounds + 1):
            for (name, context), cache in caches.items():
                sides[name][0](model)
                seconds = block(model, cache)
                times[name, context] += seconds if turn else []
            bandwidth.measure()
    report: dict[str, Any] = {**probing.provenance(torch.get_num_threads()), "dtype": options.dtype,
                              "context": options.context, "linear": options.linear,
                              "read_bandwidth_gbs": bandwidth.median() / 1e9}
    ours, theirs = (e2e.Timing(0.0, tuple(times[name, options.context]), tuple(times[name, e2e.SHORT_CONTEXT]))
                    for name in sides)
    for name, timing in zip(sides, (ours, theirs), strict=True):
        report[name] = {what: value for what, value in timing.to_dict().items() if what != "first_token_s"}
    report["speedup"] = {"token": theirs.token / ours.token, "growing": theirs.growing / ours.growing}
    for name in (*sides, "speedup"):
        print(name, {what: round(value, 2) for what, value in report[name].items() if not isinstance(value, list)})
    print("read bandwidth", round(report["read_bandwidth_gbs"], 1), "GB/s")
    if options.output:
        save_json(options.output, report)


if __name__ == "__main__":
    main()
