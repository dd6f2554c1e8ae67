"""What `wavefill bench e2e` measures: cases and their ways, what a step must read, what fits and how long it may take.

Everything here is arithmetic on a model's configuration and the shapes of its weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from wavefill.bench.e2e import head_dim, kv_bytes, windows
from wavefill.spec import invalid

#: Ways to decode; "sdpa" is the model's own attention with its own cache, "static" the same with a static cache.
WAYS = ("wavefill", "wavefill-fused", "sdpa", "static", "flash")
#: Those that keep one K and V in place, and those that run unless others are named.
IN_PLACE, DEFAULT_WAYS = ("wavefill", "wavefill-fused"), ("wavefill", "wavefill-fused", "sdpa")
#: Steps after the first token that are not counted: kernels and graphs are made in them.
DISCARDED = 8
#: Guesses that decide only what is skipped: operations a second of a prompt, by device; seconds of host work a step;
#: how many times a way reads the cache in a step (sdpa copies it and repeats KV heads, 105 ms at 64K on an H200; static
#: repeats them in a slow kernel, 754 ms).
PROMPT_RATE = {"cuda": 400e12, "cpu": 0.2e12}
HOST_SECONDS = 0.02
CACHE_READS = {"wavefill": 1.2, "wavefill-fused": 1.2, "sdpa": 36.0, "static": 380.0, "flash": 4.0}
#: The share of the memory that a case may be expected to fill, and the least tokens of a row that a prompt is read in.
MEMORY_SHARE, LEAST_CHUNK = 0.93, 256


@dataclass(frozen=True)
class Case:
    """`batch` prompts of `prompt` tokens, `new` tokens decoded for each.

    request: for --ratios, (prompt, output) of the request whose beginning this is, (all tokens, 0) for the end of all.
    """

    prompt: int
    new: int
    batch: int
    request: tuple[int, int] | None = None

    @property
    def context(self) -> int:
        """Tokens of each row when its last one is decoded."""
        return self.prompt + self.new

    def __str__(self) -> str:
        if self.request and not self.request[1]:
            return f"end of a request of {self.request[0]:,}, batch {self.batch}"
        if self.request:
            return f"request {self.request[0]:,}+{self.request[1]:,}, prompt {self.prompt:,}, batch {self.batch}"
        return f"context {self.context:,}, batch {self.batch}"


@dataclass(frozen=True)
class Size:
    """What a model makes a step read and a prompt compute.

    weights: bytes of all weights; always: those that every step reads (no rows of an embedding table);
    experts: bytes of experts that tokens are shared out to, of which each token takes `taken` of `there`.
    kv_token: bytes of K and V of a token, over all layers. row: bytes that computing a prompt takes a token.
    """

    weights: int
    always: int
    experts: int
    taken: int
    there: int
    kv_token: int
    row: int
    model: Any

    def read_by_step(self, context: float, batch: int) -> float:
        """Bytes that one step of `batch` rows at `context` must read: weights and KV."""
        share = 1 - (1 - self.taken / self.there) ** batch if self.there else 0.0
        return self.always + share * self.experts + batch * kv_bytes(self.model, context)

    def prompt_flops(self, case: Case) -> float:
        """Operations of reading the case's prompts."""
        config, tokens = self.model.config.get_text_config(), case.prompt * case.batch
        taken = self.always + (self.experts * self.taken / self.there if self.there else 0)
        keys = sum(case.prompt / 2 if window is None else min(case.prompt / 2, window) for window in windows(config))
        attention = 4 * config.num_attention_heads * head_dim(config) * keys
        return float(tokens * (2 * taken / self.model.dtype.itemsize + attention))

    def cache_bytes(self, case: Case) -> int:
        return self.kv_token * case.context * case.batch

    def chunk(self, case: Case, memory: int) -> int | None:
        """Tokens of a row that are read at once so that the case fits into `memory` bytes: all of the prompt, or the
        largest multiple of `LEAST_CHUNK`; None if it doesn't fit."""
        room = memory * MEMORY_SHARE - self.weights - self.cache_bytes(case) * 1.05
        most = max(int(room // (self.row * case.batch)), 0)
        return case.prompt if most >= case.prompt else most // LEAST_CHUNK * LEAST_CHUNK or None

    def seconds(self, case: Case, way: str, device: str, bandwidth: float) -> float:
        """A guess at the time of a case."""
        kv = case.batch * kv_bytes(self.model, case.context)
        step = (self.read_by_step(case.context, case.batch) + kv * (CACHE_READS[way] - 1)) / bandwidth + HOST_SECONDS
        return self.prompt_flops(case) / PROMPT_RATE[device] + (case.new + DISCARDED) * step


def size_of(model: Any) -> Size:
    """The sizes of a transformers model, from its weights and its configuration."""
    config = model.config.get_text_config()
    nbytes = {name: p.numel() * p.itemsize for name, p in model.named_parameters()}
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is table.weight
    rows = 0 if tied else table.weight.numel() * table.weight.itemsize
    there = int(getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0)
    taken = int(getattr(config, "num_experts_per_tok", None) or 0) if there else 0
    experts = sum(n for name, n in nbytes.items() if re.search(r"\.experts\.", name)) if there else 0
    whole = sum(nbytes.values())
    item = model.dtype.itemsize
    kv_token = len(windows(config)) * config.num_key_value_heads * 2 * head_dim(config) * item
    wide = int(config.intermediate_size) * max(taken, 1)
    return Size(whole, whole - rows - experts, experts, taken, there, kv_token,
                (8 * config.hidden_size + 3 * wide) * item, model)


def skipped(size: Size, case: Case, way: str, device: str, *, memory: int | None, bandwidth: float,
            limit: float) -> str | None:
    """Why a case isn't run, or None. memory: bytes that the device has, None for no limit; limit: seconds a case."""
    if case.prompt < 1:
        return f"no room for a prompt beside {case.new} new tokens"
    positions = int(size.model.config.get_text_config().max_position_embeddings)
    if case.context > positions:
        return f"the model has {positions:,} positions"
    if memory is not None and size.chunk(case, memory) is None:
        need = size.weights + size.cache_bytes(case) * 1.05 + size.row * case.batch * LEAST_CHUNK
        return f"does not fit: about {need / 1e9:.0f} GB of {memory / 1e9:.0f}"
    guess = size.seconds(case, way, device, bandwidth)
    return f"about {guess:.0f} s, over --limit-s {limit:g}" if guess > limit else None


def grid(contexts: Sequence[int], batches: Sequence[int], new: int) -> list[Case]:
    """A case for each context and batch, `new` tokens of the context decoded."""
    return [Case(context - new, new, batch) for context in contexts for batch in batches]


def requests(ratios: Sequence[tuple[int, int]], total: int, new: int, batch: int, *, whole: bool) -> Iterator[Case]:
    """What has to be measured to time requests of `total` tokens: each one's beginning, and one end for all.

    A request whose output is not longer than `new` is decoded whole, and so are all with `whole`.
    """
    ends = False
    for prompt_part, output_part in ratios:
        prompt = min(max(round(total * prompt_part / (prompt_part + output_part)), 1), total - 1)
        output = total - prompt
        steps = output if whole else min(output, new)
        ends = ends or steps < output
        yield Case(prompt, steps, batch, (prompt, output))
    if ends:
        yield Case(total - new, new, batch, (total, 0))


def tokens(text: str, option: str) -> list[int]:
    """Numbers of tokens with commas between; k stands for 1024."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(k?)", part.strip().lower())
        if not match or int(match[1]) < 1:
            raise invalid(option, "must be numbers from 1 with commas between, k for 1024", repr(text),
                          "Give for example 4k,16k.")
        found.append(int(match[1]) * (1024 if match[2] else 1))
    return list(dict.fromkeys(found))


def ratio_list(text: str) -> list[tuple[int, int]]:
    """Ratios of prompt to output, such as 32:1, with commas between."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+):(\d+)", part.strip())
        if not match or not int(match[1]) or not int(match[2]):
            raise invalid("--ratios", "must be prompt:output with commas between, numbers from 1", repr(text),
                          "Give for example 32:1,8:1,1:1,1:4.")
        found.append((int(match[1]), int(match[2])))
    return list(dict.fromkeys(found))


def ways(text: str | None, device: str) -> list[str]:
    """Ways by names with commas between; None for those that run by default."""
    if text is None:
        return list(DEFAULT_WAYS) if device == "cuda" else ["wavefill", "sdpa"]
    names = list(WAYS) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in WAYS:
            raise invalid("--ways", f"takes all, or some of {', '.join(WAYS)}", repr(name), "Use these names.")
    return list(dict.fromkeys(names))
