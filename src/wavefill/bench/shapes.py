"""Models of a published shape with random weights, for measuring without weights: data/shapes.json names the shapes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from wavefill.spec import invalid

if TYPE_CHECKING:
    from torch import Tensor

#: Values of the block that the weights repeat: a prime, so that no two rows of a matrix are the same.
_PERIOD = 2**22 - 3
#: Families whose attention sdpa leaves a part of out: a soft cap, sinks. transformers computes them eagerly.
WITHOUT_SDPA = ("gemma2", "gpt_oss")
#: Functions of torch.nn.init and methods of tensors; by name, since transformers puts its own in their places.
_DRAWING = ("normal_", "uniform_", "trunc_normal_", "kaiming_uniform_")


@dataclass(frozen=True)
class Shape:
    """A published shape, or its first layers.

    model:      whose published configuration it is.
    parameters: the published number, of all layers.
    fields:     of the configuration, as published.
    layers:     how many of fields["num_hidden_layers"] are built.
    """

    name: str
    model: str
    parameters: int
    fields: dict[str, Any]
    layers: int

    @property
    def all_layers(self) -> int:
        return int(self.fields["num_hidden_layers"])

    @property
    def attention(self) -> str:
        """transformers' own attention that computes the model exactly."""
        return "eager" if self.fields["model_type"] in WITHOUT_SDPA else "sdpa"

    def __str__(self) -> str:
        cut = "" if self.layers == self.all_layers else f", {self.layers} of {self.all_layers} layers"
        return f"{self.name} with random weights{cut}"

    def config(self, **overrides: Any) -> Any:
        """The transformers configuration, without token ids, so that no token ends a text; overrides replace fields."""
        from transformers import AutoConfig

        fields = self.fields | {"num_hidden_layers": self.layers} | overrides
        return AutoConfig.for_model(**fields, bos_token_id=None, eos_token_id=None, pad_token_id=None)


@cache
def _published() -> dict[str, Any]:
    text = (files("wavefill") / "data" / "shapes.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)["shapes"]
    return found


def names() -> tuple[str, ...]:
    """Names of the shapes that are shipped."""
    return tuple(_published())


def find(name: str, layers: int | None = None) -> Shape:
    """The shape called `name`, cut to its first `layers` if given. Raises InvalidArgument, in the CLI's words."""
    if name not in _published():
        raise invalid("--config", f"must be one of {', '.join(names())}", repr(name), "Use one of these.")
    found = _published()[name]
    there = int(found["config"]["num_hidden_layers"])
    if layers is not None and not 1 <= layers <= there:
        raise invalid("--layers", f"must be 1 to {there}, the layers of {name}", layers, "Leave it out for all.")
    return Shape(name, found["model"], found["parameters"], found["config"], layers or there)


def tokens(vocabulary: int, count: int, seed: int) -> list[int]:
    """`count` random token ids below `vocabulary`, the same for the same seed."""
    import torch

    ids: list[int] = torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def build(shape: Shape, dtype: str, seed: int, device: str = "cpu", **overrides: Any) -> Any:
    """A transformers model of `shape` on `device` in `dtype`, its weights random; overrides as in `Shape.config`.

    What transformers draws at random when it makes a model (all but norms) is uniform here, with the standard deviation
    initializer_range. It fits bfloat16, so that models of one seed have the same weights in every dtype, and repeats a
    block of 4 million values, since drawing billions takes minutes.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = shape.config(**overrides)
    with torch.device(device), _undrawn() as random:
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=shape.attention)
    limit = math.sqrt(3) * getattr(config, "initializer_range", 0.02)  # of a uniform distribution of this deviation
    block = torch.empty(_PERIOD).uniform_(-limit, limit, generator=torch.Generator().manual_seed(seed))
    block = block.to(torch.bfloat16).to(device, model.dtype)
    with torch.no_grad():
        _fill([parameter for parameter in model.parameters() if parameter.data_ptr() in random], block)
    return model.eval()


@contextmanager
def _undrawn() -> Iterator[set[int]]:
    """Inside, drawing a tensor's values at random leaves it as it is, and adds its address to the set."""
    from torch.overrides import TorchFunctionMode

    addresses: set[int] = set()

    class Undrawn(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") not in _DRAWING:
                return func(*args, **(kwargs or {}))
            tensor = args[0] if args else kwargs["tensor"]
            addresses.add(tensor.data_ptr())
            return tensor

    with Undrawn():
        yield addresses


def _fill(parameters: Sequence[Tensor], block: Tensor) -> None:
    """Lay `block` over the parameters, again and again; each goes on where the one before it ended."""
    start = 0
    for parameter in parameters:
        rest = parameter.view(-1)
        while rest.numel():
            part = block[start:start + rest.numel()]
            rest[:part.numel()] = part
            rest, start = rest[part.numel():], (start + part.numel()) % block.numel()

