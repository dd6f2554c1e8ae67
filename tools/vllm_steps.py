"""Milliseconds of a decoding step in vLLM, for a published shape with random weights: beside `wavefill bench e2e`.

    PYTHONPATH=src:VLLM python tools/vllm_steps.py [--config llama-3.1-8b] [--contexts 4k,16k,64k,128k]
        [--batches 1,8,32] [--new-tokens 64] [--repeats 3] [--backend FLASH_ATTN] [--output FILE]

Needs an environment with vLLM (written for 0.26) and a GPU; takes nothing but the table of shapes from the checkout.
A step is (time of N + n tokens - time of N tokens) / n for N = 8 and n = --new-tokens, the median of --repeats. The
context is that of the last token. Each row has a random prompt of its own, which a first call reads into the prefix
cache, so that the timed calls hardly read it again; what they read is the same in both times. A case whose rows don't
fit into vLLM's cache is skipped, since vLLM would then decode them one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

#: Tokens of the shorter of the two calls.
FEW = 8
SHAPES = Path(__file__).resolve().parents[1] / "src" / "wavefill" / "data" / "shapes.json"


def write_config(name: str, folder: str) -> dict[str, Any]:
    """A folder with the shape's config.json; returns its fields."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    fields: dict[str, Any] = json.loads(SHAPES.read_text(encoding="utf-8"))["shapes"][name]["config"]
    config = AutoConfig.for_model(**fields)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[fields["model_type"]]]
    config.save_pretrained(folder)
    return fields


def numbers(text: str) -> list[int]:
    return [int(part[:-1]) * 1024 if part.endswith("k") else int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama-3.1-8b")
    parser.add_argument("--contexts", type=numbers, default="4k,16k,64k,128k")
    parser.add_argument("--batches", type=numbers, default="1,8,32")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", type=float, default=0.92, help="share of the GPU's memory that vLLM takes")
    parser.add_argument("--backend", help="vLLM's attention backend, by its name there; its own choice if not given")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    # The engine in this process, so that nothing but its steps is timed; no look at the network.
    for name, value in (("VLLM_ENABLE_V1_MULTIPROCESSING", "0"), ("HF_HUB_OFFLINE", "1"), ("VLLM_NO_USAGE_STATS", "1"),
                        ("VLLM_USE_FLASHINFER_SAMPLER", "0")):
        os.environ.setdefault(name, value)

    import torch
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        fields = write_config(options.config, folder)
        chosen = {"attention_config": {"backend": options.backend}} if options.backend else {}
        llm = LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
                  max_model_len=max(options.contexts), max_num_seqs=max(options.batches),
                  gpu_memory_utilization=options.memory, enable_prefix_caching=True, **chosen)
    print(f"vLLM {vllm.__version__} started, {time.perf_counter() - began:.0f} s", flush=True)
    cache = llm.llm_engine.vllm_config.cache_config
    room = cache.kv_cache_size_tokens or 0

    def seconds(prompts: list[Any], count: int) -> float:
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        results = llm.generate(prompts, sampling, use_tqdm=False)
        taken = time.perf_counter() - start
        assert all(len(result.outputs[0].token_ids) == count for result in results)
        return taken

    generator = torch.Generator().manual_seed(0)
    found: dict[str, Any] = {"command": " ".join(sys.argv), "gpu": torch.cuda.get_device_name(),
                             "config": options.config, "cache_tokens": room, "new_tokens": options.new_tokens,
                             "versions": {"vllm": vllm.__version__, "torch": torch.__version__}, "results": []}
    for context in options.contexts:
        for batch in options.batches:
            result: dict[str, Any] = {"context": context, "batch": batch}
            found["results"].append(result)
            if room and batch * context > room:
                result["absent"] = f"{batch * context:,} tokens, and the cache has room for {room:,}"
            else:
                ids = torch.randint(fields["vocab_size"], (batch, context - FEW - options.new_tokens),
                                    generator=generator).tolist()
                prompts = [TokensPrompt(prompt_token_ids=row) for row in ids]
                result["first_call_s"] = seconds(prompts, 1)
                steps = [(seconds(prompts, FEW + options.new_tokens) - seconds(prompts, FEW)) / options.new_tokens
                         for _ in range(options.repeats)]
                result |= {"ms_per_step": statistics.median(steps) * 1e3, "samples_ms": [s * 1e3 for s in steps],
                           "tokens_per_s": batch / statistics.median(steps)}
            print(result, f"{time.perf_counter() - began:.0f} s", flush=True)
            if options.output:
                options.output.parent.mkdir(parents=True, exist_ok=True)
                options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
