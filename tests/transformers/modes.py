"""The ways of generating that transformers has, for the tests beside; each gives tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from tiny import CACHE, build, padded, plain, tokens
from torch import Tensor
from transformers import PreTrainedModel


def sampled(model: PreTrainedModel, **options: Any) -> Tensor:
    torch.manual_seed(11)
    return tokens(model, padded(), do_sample=True, temperature=1.7, **options)


def from_embeddings(model: PreTrainedModel) -> Tensor:
    batch = padded()
    embeddings = model.get_input_embeddings()(batch["input_ids"]).detach()
    return tokens(model, {"inputs_embeds": embeddings, "attention_mask": batch["attention_mask"]})


def second_turn(model: PreTrainedModel) -> Tensor:
    batch = padded()
    first = model.generate(**batch, max_new_tokens=9, do_sample=False, return_dict_in_generate=True)
    more = torch.cat([first.sequences, plain(7, 3)], 1)
    mask = torch.cat([batch["attention_mask"], torch.ones(3, more.shape[1] - 19, dtype=torch.long)], 1)
    return tokens(model, {"input_ids": more, "attention_mask": mask}, 9, **{CACHE: first[CACHE]})


MODES: dict[str, Callable[[PreTrainedModel], Tensor]] = {
    "greedy": lambda model: tokens(model, plain(), 30),
    "one-token-prompt": lambda model: tokens(model, plain(1), 30),
    "padded": lambda model: tokens(model, padded(), 50),
    "sampling": sampled,
    "return-sequences": lambda model: sampled(model, num_return_sequences=3),
    "beams": lambda model: tokens(model, padded(), num_beams=4, num_return_sequences=2),
    "sampled-beams": lambda model: sampled(model, num_beams=3),
    "prompt-lookup": lambda model: tokens(model, plain(), prompt_lookup_num_tokens=3),
    "assistant": lambda model: tokens(model, plain(), assistant_model=build("llama", seed=9)),
    "same-assistant": lambda model: tokens(model, plain(), assistant_model=copy.deepcopy(model)),
    "early-exit": lambda model: tokens(model, plain(), assistant_early_exit=2),
    "chunked-prefill": lambda model: tokens(model, padded(), prefill_chunk_size=4),
    "embeddings": from_embeddings,
    "second-turn": second_turn,
    "without-cache": lambda model: tokens(model, padded(), 6, use_cache=False),
    "dynamic": lambda model: tokens(model, plain(), cache_implementation="dynamic"),
    "penalty": lambda model: tokens(model, padded(), repetition_penalty=1.3, no_repeat_ngram_size=3),
}
#: What every family runs; the rest doesn't depend on the layers and runs on a few.
EVERYWHERE = ("greedy", "padded", "beams", "prompt-lookup", "same-assistant", "chunked-prefill", "second-turn")
ASSISTED = ("prompt-lookup", "same-assistant")
