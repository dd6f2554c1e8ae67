"""A model as its costs see it: layers with their kinds and sizes, read from a Hugging Face config.json.

Biases, norms and convolutions are left out: less than 0.1 % of the parameters of every shape here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from wavefill.spec import UnsupportedModel, complaint, invalid, invalid_type, whole


@dataclass(frozen=True)
class Linear:
    """A weight matrix of K inputs and N outputs, or `copies` of one shape, of which a token goes through `used`:
    experts, or a matrix for each head. A GPU's part of the experts is used by a fraction of a token's choices."""

    name: str
    K: int
    N: int
    copies: int = 1
    used: float = 1

    @property
    def weights(self) -> int:
        return self.K * self.N * self.copies


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention (G = HQ / KH); window: keys that a query sees, itself included, or None for all."""

    HQ: int
    KH: int
    D: int
    DV: int
    window: int | None = None

    @property
    def kind(self) -> Literal["full", "window"]:
        return "full" if self.window is None else "window"

    @property
    def G(self) -> int:  # noqa: N802
        return self.HQ // self.KH

    def linears(self, hidden: int, absorbed: bool = False) -> tuple[Linear, ...]:
        return (Linear("q, k, v", hidden, self.HQ * self.D + self.KH * (self.D + self.DV)),
                Linear("o", self.HQ * self.DV, hidden))


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (MLA, arXiv:2405.04434): a token's cache is `rank` + `rope` numbers for all heads.

    rank:   of the latent that K and V are made of (kv_lora_rank).
    q_rank: of the queries' latent, None for plain queries.
    nope, rope: head size of Q and K without and with rotation; DV of V.
    """

    HQ: int
    rank: int
    q_rank: int | None
    nope: int
    rope: int
    DV: int

    @property
    def kind(self) -> Literal["latent"]:
        return "latent"

    @property
    def columns(self) -> int:
        """Numbers that the cache holds of a token."""
        return self.rank + self.rope

    def linears(self, hidden: int, absorbed: bool = False) -> tuple[Linear, ...]:
        """absorbed: for queries that attend to the latent itself, so that W_UK and W_UV act on queries and outputs."""
        heads = self.HQ * (self.nope + self.rope)
        queries = ([Linear("q", hidden, heads)] if self.q_rank is None else
                   [Linear("q down", hidden, self.q_rank), Linear("q up", self.q_rank, heads)])
        latent = ([Linear("W_UK", self.nope, self.rank, self.HQ, self.HQ),
                   Linear("W_UV", self.rank, self.DV, self.HQ, self.HQ)] if absorbed else
                  [Linear("k, v up", self.rank, self.HQ * (self.nope + self.DV))])
        return (*queries, Linear("kv down", hidden, self.columns), *latent, Linear("o", self.HQ * self.DV, hidden))


@dataclass(frozen=True)
class State:
    """A Mamba-2 layer (arXiv:2405.21060): heads x head_dim x state numbers a request, whatever its length."""

    heads: int
    head_dim: int
    state: int
    groups: int
    conv: int

    @property
    def kind(self) -> Literal["state"]:
        return "state"

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    def linears(self, hidden: int, absorbed: bool = False) -> tuple[Linear, ...]:
        return (Linear("in", hidden, 2 * self.inner + 2 * self.groups * self.state + self.heads),
                Linear("out", self.inner, hidden))


@dataclass(frozen=True)
class Mlp:
    """A feed-forward part: dense, or `experts` of `width`, `active` of them a token, beside a shared one.

    matrices: 3 with a gate, 2 without.
    """

    width: int
    matrices: int = 3
    experts: int = 0
    active: int = 0
    shared: int = 0

    def linears(self, hidden: int) -> tuple[Linear, ...]:
        up = "gate, up" if self.matrices == 3 else "up"

        def two(prefix: str, width: int, copies: int = 1, used: int = 1) -> tuple[Linear, ...]:
            return (Linear(prefix + up, hidden, (self.matrices - 1) * width, copies, used),
                    Linear(prefix + "down", width, hidden, copies, used))

        if not self.experts:
            return two("", self.width)
        return (Linear("router", hidden, self.experts), *two("experts ", self.width, self.experts, self.active),
                *(two("shared ", self.shared) if self.shared else ()))


Mixer = Attention | Latent | State


@dataclass(frozen=True)
class Layer:
    """A decoder layer; Nemotron-H's have one part each."""

    mixer: Mixer | None
    mlp: Mlp | None

    def linears(self, hidden: int, absorbed: bool = False) -> tuple[Linear, ...]:
        return ((self.mixer.linears(hidden, absorbed) if self.mixer else ())
                + (self.mlp.linears(hidden) if self.mlp else ()))


@dataclass(frozen=True)
class Architecture:
    """A decoder-only model. tied: whether the head's weights are the embedding's."""

    name: str
    model_type: str
    hidden: int
    vocab: int
    tied: bool
    layers: tuple[Layer, ...]

    @property
    def head(self) -> Linear:
        return Linear("head", self.hidden, self.vocab)

    @property
    def parameters(self) -> int:
        """Of all matrices, embedding and head included."""
        inside = sum(linear.weights for layer in self.layers for linear in layer.linears(self.hidden))
        return inside + self.head.weights * (1 if self.tied else 2)

    @property
    def active(self) -> int:
        """Parameters that a token goes through: those of its experts, and the head, but not the embedding."""
        inside = sum(round(linear.weights * linear.used / linear.copies)
                     for layer in self.layers for linear in layer.linears(self.hidden))
        return inside + self.head.weights

    def mixers(self) -> dict[Mixer, int]:
        """Different mixers, and how many layers have each."""
        return Counter(layer.mixer for layer in self.layers if layer.mixer)

    def mlps(self) -> dict[Mlp, int]:
        return Counter(layer.mlp for layer in self.layers if layer.mlp)


_WHOLE = "Give the model's whole config.json."
#: Most layers that a shape may have.
MAX_LAYERS = 10_000
#: What transformers takes for fields that a published config.json leaves out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 256, "tie_word_embeddings": True},
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
                    "sliding_window": 4096, "sliding_window_pattern": 6, "tie_word_embeddings": True},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"head_dim": 128},
    "gpt_oss": {"head_dim": 64},
}


class _Fields:
    """Fields of a config.json, checked as they are read."""

    def __init__(self, model_type: str, fields: Mapping[str, Any]) -> None:
        self.model_type = model_type
        self.fields = _DEFAULTS.get(model_type, {}) | {k: v for k, v in fields.items() if v is not None}

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)

    def number(self, name: str, default: int | None = None, least: int = 1,
               most: int = 1 << 40) -> int:
        value = self.fields.get(name, default)
        if value is None:
            raise invalid("config", f"needs {name} for a {self.model_type}", "none", _WHOLE)
        return whole(f"config.{name}", value, least, most)

    def numbers(self, *names: str) -> tuple[int, ...]:
        return tuple(self.number(name) for name in names)


def _windowed(f: _Fields, layer: int) -> bool:
    """Whether a layer has a sliding window, as transformers derives it."""
    types = f.get("layer_types")
    if types:
        return bool(types[layer] == "sliding_attention")
    if f.model_type in ("gemma2", "gpt_oss"):
        return layer % 2 == 0
    if f.model_type == "gemma3_text":
        return (layer + 1) % f.number("sliding_window_pattern") != 0
    if f.model_type.startswith("qwen"):
        return bool(f.get("use_sliding_window")) and layer >= f.number("max_window_layers", 0, least=0)
    return True


def _attention(f: _Fields, window: int | None = None) -> Attention:
    HQ = f.number("num_attention_heads")
    KH = f.number("num_key_value_heads", HQ)
    if HQ % KH:
        raise invalid("config.num_attention_heads", f"must be a multiple of num_key_value_heads ({KH})", HQ,
                      "Each KV head serves the same number of query heads.")
    D = f.number("head_dim", f.number("hidden_size") // HQ)
    return Attention(HQ, KH, D, D, window)


def _grouped(f: _Fields) -> list[Layer]:
    """Llama and its like, dense or with experts in some layers."""
    count = f.number("num_hidden_layers", most=MAX_LAYERS)
    if f.get("layer_types") and len(f.get("layer_types")) != count:
        raise invalid("config.layer_types", f"must name {count} layers", len(f.get("layer_types")),
                      _WHOLE)
    window = f.number("sliding_window") if f.get("sliding_window") is not None else None
    whole_context, windowed = _attention(f), _attention(f, window)
    return [Layer(windowed if window and _windowed(f, i) else whole_context, _mlp(f, i)) for i in range(count)]


def _mlp(f: _Fields, layer: int) -> Mlp:
    if f.model_type in ("gpt_oss", "mixtral"):
        return Mlp(f.number("intermediate_size"), 3, f.number("num_local_experts"), f.number("num_experts_per_tok"))
    if f.model_type == "qwen3_moe" and layer not in f.get("mlp_only_layers", ()) and (
            (layer + 1) % f.number("decoder_sparse_step", 1) == 0):
        return Mlp(f.number("moe_intermediate_size"), 3, f.number("num_experts"), f.number("num_experts_per_tok"))
    return Mlp(f.number("intermediate_size"))


def _latent(f: _Fields) -> list[Layer]:
    """DeepSeek-V3 and its like."""
    HQ, rank, nope, rope, DV = f.numbers("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
                                         "v_head_dim")
    q_rank = f.number("q_lora_rank") if f.get("q_lora_rank") is not None else None
    mixer = Latent(HQ, rank, q_rank, nope, rope, DV)
    dense, width = Mlp(f.number("intermediate_size")), f.number("moe_intermediate_size")
    sparse = Mlp(width, 3, f.number("n_routed_experts"), f.number("num_experts_per_tok"),
                 width * f.number("n_shared_experts", 0, least=0))
    layers = f.number("num_hidden_layers", most=MAX_LAYERS)
    first, every = f.number("first_k_dense_replace", 0, least=0), f.number("moe_layer_freq", 1)
    return [Layer(mixer, dense if i < first or i % every else sparse) for i in range(layers)]


_NEMOTRON = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}


def _nemotron(f: _Fields) -> list[Layer]:
    """Nemotron-H: Mamba-2 (M), attention (*), feed-forward (-) or experts (E), one a layer."""
    kinds = f.get("hybrid_override_pattern") or [_NEMOTRON.get(kind, kind) for kind in f.get("layers_block_type", ())]
    if not kinds or not set(kinds) <= set("M*-E"):
        raise invalid("config.hybrid_override_pattern", "must be made of M, *, - and E", repr(kinds),
                      _WHOLE)
    if f.get("moe_latent_size") is not None:
        raise UnsupportedModel(complaint("config", "moe_latent_size is not served", f.get("moe_latent_size"),
                                         "Give a model whose experts take hidden_size."))
    parts = {"M": lambda: Layer(State(*f.numbers("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups",
                                                 "conv_kernel")), None),
             "*": lambda: Layer(_attention(f), None),
             "-": lambda: Layer(None, Mlp(f.number("intermediate_size"), 2)),
             "E": lambda: Layer(None, Mlp(f.number("moe_intermediate_size"), 2,
                                          f.number("n_routed_experts"), f.number("num_experts_per_tok"),
                                          f.number("moe_shared_expert_intermediate_size")))}
    made = {kind: parts[kind]() for kind in set(kinds)}
    return [made[kind] for kind in kinds]


_READERS: dict[str, Callable[[_Fields], list[Layer]]] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma2", "gemma3_text",
                     "gpt_oss"), _grouped),
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), _latent),
    "nemotron_h": _nemotron,
}


@cache
def shipped() -> dict[str, dict[str, Any]]:
    """The shapes of data/architectures.json and data/shapes.json: model, parameters, config and where they are from."""
    data = files("wavefill") / "data"
    return {name: shape for file in ("shapes.json", "architectures.json")
            for name, shape in json.loads((data / file).read_text(encoding="utf-8"))["shapes"].items()}


def load(config: str | Path | Mapping[str, Any]) -> Architecture:
    """The architecture of a config.json (its object, its path, or the folder it is in), or of a shape that is shipped.

    Raises InvalidArgument for what is neither and for fields that are missing, UnsupportedModel for other families.
    """
    if isinstance(config, Mapping):
        return _read(str(config.get("_name_or_path") or config.get("model_type", "a model")), config)
    if not isinstance(config, (str, Path)):
        raise invalid_type("config", "must be a dict, a path or a name", type(config).__name__,
                           f"Names are {', '.join(shipped())}.")
    if str(config) in shipped():
        return _read(str(config), shipped()[str(config)]["config"])
    path = Path(config).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise invalid("config", "must be a config.json, a model's folder or a shipped shape", repr(str(config)),
                      f"Shapes are {', '.join(shipped())}.")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise invalid("config", "must be JSON", f"{path} ({error})", "Give a model's config.json.") from None
    if not isinstance(fields, dict):
        raise invalid("config", "must hold an object", type(fields).__name__, "Give a model's config.json.")
    return _read(path.resolve().parent.name if path.name == "config.json" else path.stem, fields)


def _read(name: str, fields: Mapping[str, Any]) -> Architecture:
    inside = fields.get("text_config")
    fields = inside if isinstance(inside, Mapping) else fields  # models with vision keep the text's shape inside
    model_type = fields.get("model_type")
    reader = _READERS.get(model_type) if isinstance(model_type, str) else None
    if reader is None:
        raise UnsupportedModel(complaint("config", f"model_type must be one of {', '.join(_READERS)}", repr(model_type),
                                         "Give a model of these families."))
    f = _Fields(str(model_type), fields)
    hidden, vocab = f.numbers("hidden_size", "vocab_size")
    return Architecture(name, f.model_type, hidden, vocab, bool(f.get("tie_word_embeddings", False)), tuple(reader(f)))
