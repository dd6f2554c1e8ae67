"""Decode with `generate()` in blocks, timing each step.

Two decoders over one model run by turns: a block of tokens with wavefill, a block with stock transformers. A noisy
moment of the machine then meets both. A later block goes on from the cache that the one before it left.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Called with each new token id.
OnToken = Callable[[int], None]


class Clock:
    """A streamer for `generate()` that notes when each token came.

    What the listener does with a token (print it) is not part of any step: a step starts when it returns.
    """

    def __init__(self, on_token: OnToken | None = None) -> None:
        self._on_token = on_token
        self._prompt_seen = False
        self._start = time.perf_counter()
        self.seconds: list[float] = []

    def put(self, value: Tensor) -> None:
        now = time.perf_counter()
        if not self._prompt_seen:  # generate() hands over the prompt first
            self._prompt_seen = True
            return
        self.seconds.append(now - self._start)
        if self._on_token is not None:
            self._on_token(int(value.flatten()[-1]))
        self._start = time.perf_counter()

    def end(self) -> None:
        """Part of the streamer's interface; nothing is held back."""


class StepClock:
    """Notes when the host has each new token of a `generate()`, with no streamer, whose copies users don't all have.

    generate() waits for the device once a step, where it asks whether all rows have ended. What it does next is have
    the model prepare the inputs of the next forward, which all tokens so far are given to: there is where this looks
    at the time, and nothing else. The last token is there when generate() returns. So a step is from wait to wait, and
    the first token is not there before the device has read the prompt.

    on_count: called with the number of new tokens at each of these times; what it does is a part of the next step.
    """

    def __init__(self, on_count: Callable[[int], None] | None = None) -> None:
        self._on_count = on_count
        self._last = time.perf_counter()
        self.seconds: list[float] = []

    @contextmanager
    def watch(self, model: Any, prompt: int) -> Iterator[None]:
        """Inside, one call of the model's `generate` after `prompt` tokens a row is timed, from here to the end."""
        method = "prepare_inputs_for_generation"
        prepare = getattr(model, method)

        @functools.wraps(prepare)  # generate() looks at its parameters
        def noting(input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            if input_ids.shape[1] > prompt:  # not one of the prompt's own forwards
                self._note()
            return prepare(input_ids, *args, **kwargs)

        before = model.__dict__.get(method)
        model.__dict__[method] = noting
        self._last = time.perf_counter()
        try:
            yield
            self._note()
        finally:
            if before is None:
                del model.__dict__[method]
            else:
                model.__dict__[method] = before

    def _note(self) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now
        if self._on_count is not None:
            self._on_count(len(self.seconds))


@dataclass
class Decoder:
    """One way to decode a model, with the tokens, logits and times that it has produced.

    prompt:   token ids.
    attach:   turns the model's attention and linear layers to this way; called before each block.
    tokens:   new ids so far.
    logits:   float32 [vocabulary] of each new token.
    first:    seconds to the first token, prefill included (see `prompt_in_float32`).
    steps:    seconds of each later token, the first of every block left out: it holds generate()'s own start.
    """

    name: str
    model: Any
    prompt: list[int]
    attach: Callable[[Any], Any]
    cache: Any = None
    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    first: float = 0.0
    steps: list[float] = field(default_factory=list)

    def block(self, count: int, on_token: OnToken | None = None, *, stop_at_end: bool = False) -> None:
        """Decode up to `count` more tokens, greedily; `stop_at_end` ends at the model's end-of-text token."""
        import torch

        if self.cache is None and count > 1 and slow_in(self.model.dtype):
            with prompt_in_float32():
                self.block(1, on_token, stop_at_end=stop_at_end)
            if stop_at_end and self.tokens[-1] in ends(self.model):
                return
            count -= 1
        self.attach(self.model)
        ids = torch.tensor([self.prompt + self.tokens])
        clock = Clock(on_token)
        result = greedy(self.model, ids, count, clock, self.cache, stop_at_end=stop_at_end, output_logits=True)
        self.cache = cache_of(result)
        self.tokens += result.sequences[0, ids.shape[1]:].tolist()
        self.logits += [step[0].float() for step in result.logits]
        if not self.first:
            self.first = clock.seconds[0]
        self.steps += clock.seconds[1:]

    def forget(self) -> None:
        """Drop the cache and what was decoded, to start again from the prompt."""
        self.cache, self.first = None, 0.0
        self.tokens.clear()
        self.logits.clear()
        self.steps.clear()


def ends(model: Any) -> set[int]:
    """The tokens that end a text of the model."""
    end = model.generation_config.eos_token_id
    return set() if end is None else set(end) if isinstance(end, list) else {end}


def slow_in(dtype: torch.dtype) -> bool:
    """Whether PyTorch multiplies matrices of a 16-bit dtype on this processor a hundred times slower than float32.

    It does so in bfloat16 where oneDNN finds no instructions for it: a prompt of 7,900 tokens would take an hour.
    """
    import torch

    return dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


@contextmanager
def prompt_in_float32() -> Iterator[None]:
    """Inside, products over many 16-bit rows are computed in float32 and rounded once, as a matrix unit does.

    Linear layers and sdpa alike, for stock transformers and for wavefill; a decoding step's single row is left alone.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    functional = torch.nn.functional

    class Wide(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (functional.linear, functional.scaled_dot_product_attention) and args[0].shape[-2] > 1:
                kind = args[0].dtype
                result = func(*map(_widened, args), **{name: _widened(x) for name, x in (kwargs or {}).items()})
                return result.to(kind)
            return func(*args, **(kwargs or {}))

    with Wide():
        yield


def _widened(value: Any) -> Any:
    import torch

    half = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.float() if half else value


def greedy(model: Any, ids: Tensor, count: int, streamer: Any = None, cache: Any = None, *,
           mask: Tensor | None = None, stop_at_end: bool = False, **settings: Any) -> Any:
    """What `model.generate()` returns for `count` tokens after ids [B, T], each the likeliest.

    The model's own generation settings (its ends of text, penalties, a cache) are left out: generate() would take them
    wherever a call's configuration says nothing.

    cache:       that of an earlier call, to go on from.
    mask:        [B, T], 0 at padding; None without padding.
    stop_at_end: end at the model's end-of-text tokens; otherwise no token ends a text.
    settings:    more fields of the GenerationConfig.
    """
    import torch
    from transformers import GenerationConfig

    own = model.generation_config
    stop = {"eos_token_id": own.eos_token_id, "pad_token_id": own.pad_token_id} if stop_at_end else {}
    config = GenerationConfig(max_new_tokens=count, do_sample=False, return_dict_in_generate=True, **stop, **settings)
    past = {} if cache is None else {cache_argument(model): cache}
    model.generation_config = GenerationConfig()
    try:
        return model.generate(ids, attention_mask=torch.ones_like(ids) if mask is None else mask, streamer=streamer,
                              generation_config=config, **past)
    finally:
        model.generation_config = own


def cache_of(result: Any) -> Any:
    """The cache in what `generate` returned, by either of its names (see `cache_argument`)."""
    return getattr(result, "cache", None) or result.past_key_values


def cache_argument(model: Any) -> str:
    """The name under which this release of transformers takes a cache: renamed in 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no advice from transformers, and no look at the network, inside the block."""
    import os

    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        from transformers.utils import logging

        level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()
    finally:
        if before is None:
            os.environ.pop("HF_HUB_OFFLINE", None)
        else:
            os.environ["HF_HUB_OFFLINE"] = before
