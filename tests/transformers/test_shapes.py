"""Models of a published shape with random weights: the shapes, the weights, and `wavefill generate --config`."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from wavefill import cli
from wavefill.bench import shapes
from wavefill.integrations.transformers import disable, enable

pytestmark = pytest.mark.transformers

#: What makes a cut model small enough for a test; large weights, so that what attention computes decides the tokens.
TINY: dict[str, Any] = {"vocab_size": 311, "hidden_size": 96, "intermediate_size": 80, "num_attention_heads": 6,
                        "num_key_value_heads": 2, "initializer_range": 0.3}
runner = CliRunner()


def overrides(shape: shapes.Shape) -> dict[str, Any]:
    """TINY, with the fields that the shape's configuration has of its own cut down as well."""
    small = {"head_dim": 16, "sliding_window": 9, "num_local_experts": 4}
    # Gemma-2 scales its embeddings up: with those as its head a random model repeats the last token for ever.
    untied = {"tie_word_embeddings": False} if shape.fields["model_type"] == "gemma2" else {}
    return TINY | untied | {name: value for name, value in small.items() if shape.fields.get(name)}


def build(name: str, dtype: str = "float32", seed: int = 0) -> Any:
    shape = shapes.find(name, layers=2)
    return shapes.build(shape, dtype, seed, **overrides(shape))


@pytest.mark.parametrize("name", shapes.names())
def test_a_shape_has_the_published_number_of_parameters(name: str) -> None:
    shape = shapes.find(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config(), attn_implementation=shape.attention)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters


def test_what_makes_positions_and_windows_is_as_published() -> None:
    """transformers renames some fields as it reads them, and derives others."""
    scaled = shapes.find("llama-3.1-8b").config().rope_parameters
    assert (scaled["rope_type"], scaled["factor"], scaled["rope_theta"]) == ("llama3", 8.0, 500000.0)
    assert shapes.find("smollm2-135m").config().rope_parameters["rope_theta"] == 100000
    assert shapes.find("gpt-oss-20b").config().rope_parameters["rope_type"] == "yarn"
    for name, count in (("gemma-2-9b", 42), ("gpt-oss-20b", 24)):
        assert shapes.find(name).config().layer_types == ["sliding_attention", "full_attention"] * (count // 2)
    assert shapes.find("gpt-oss-20b", layers=3).config().layer_types == [
        "sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize("name", shapes.names())
def test_weights_are_drawn_once_for_a_seed_and_fit_every_dtype(name: str) -> None:
    first, half, other = build(name), build(name, "bfloat16"), build(name, seed=1)
    for (key, weight), same, another in zip(first.state_dict().items(), half.state_dict().values(),
                                            other.state_dict().values(), strict=True):
        assert weight.isfinite().all(), key
        assert same.dtype == torch.bfloat16
        assert torch.equal(weight, same.float()), key
        if "norm" in key:
            assert len(weight.unique()) == 1, key
        elif weight.dim() > 1 and weight.count_nonzero():  # some biases have two dimensions and are 0
            assert 0.28 < weight.std() < 0.32, key
            assert not torch.equal(weight, another), key
    rows = first.get_input_embeddings().weight
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)


@pytest.mark.parametrize("name", shapes.names())
def test_tokens_are_those_of_transformers(name: str) -> None:
    model = build(name)
    ids = torch.tensor([shapes.tokens(TINY["vocab_size"], 23, seed=0)])
    decode = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    ours = enable(model).generate(ids, **decode)
    theirs = disable(model).generate(ids, **decode)
    assert ours.shape == (1, 35)
    assert torch.equal(ours, theirs)
    assert len(set(ours[0, 23:].tolist())) > 2


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command builds small models: one of a shape's own size takes too long for a test."""
    whole = shapes.build

    def small(shape: shapes.Shape, dtype: str, seed: int) -> Any:
        return whole(shape, dtype, seed, **overrides(shape) | {"vocab_size": shape.fields["vocab_size"]})

    monkeypatch.setattr(shapes, "build", small)
    monkeypatch.setattr("wavefill.bench.timing.ROTATED_BYTES", 1 << 20)
    monkeypatch.setattr("wavefill.bench.e2e.SHORT_ROUNDS", 1)


def generate(*arguments: str) -> Result:
    result = runner.invoke(cli.app, ["generate", *arguments])
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.usefixtures("_small")
def test_the_command_says_that_the_weights_are_random_and_the_model_is_cut() -> None:
    result = generate("--config", "phi-3-mini", "--layers", "1", "--prompt-tokens", "20", "--max-new-tokens", "3")
    assert "phi-3-mini with random weights, 1 of 32 layers: the tokens mean nothing" in result.stdout
    assert "a prompt of 20 tokens" in result.stdout


@pytest.mark.usefixtures("_small")
def test_the_command_compares_and_repeats_itself() -> None:
    arguments = ("--config", "mistral-7b", "--layers", "1", "--context", "40", "--max-new-tokens", "4", "--seed", "3",
                 "--json")
    compared = json.loads(generate(*arguments, "--compare", "sdpa").stdout)
    alone = json.loads(generate(*arguments).stdout)
    assert compared["model"] == {"name": "mistral-7b with random weights, 1 of 32 layers",
                                 "source": "random, seed 3, shape of mistralai/Mistral-7B-Instruct-v0.2"}
    assert compared["prompt"] == {"source": "random, seed 3", "tokens": 40}
    assert compared["runs"][0]["tokens"]["acceptable"]
    assert compared["runs"][0]["text"] == alone["runs"][0]["text"]
    assert len(alone["runs"][0]["text"].split()) == 4


@pytest.mark.parametrize(("arguments", "words"), [
    (("--config", "llama-9"), ["--config", "llama-3.1-8b", "smollm2-135m", "'llama-9'"]),
    (("--config", "qwen3-8b", "--layers", "37"), ["--layers", "1 to 36", "got 37"]),
    (("--config", "qwen3-8b", "--layers", "0"), ["--layers", "got 0"]),
    (("--config", "qwen3-8b", "--model", "smollm2"), ["--model", "--config", "'smollm2'"]),
    (("--config", "qwen3-8b", "--prompt", "-"), ["--prompt", "--config", "'-'"]),
    (("--config", "gemma-2-9b", "--compare", "sdpa"), ["--compare", "soft cap"]),
    (("--config", "phi-3-mini", "--context", "4033"), ["--context", "1 to 4032", "got 4033"]),
    (("--config", "phi-3-mini", "--context", "0"), ["--context", "got 0"]),
    (("--config", "phi-3-mini", "--max-new-tokens", "4096"), ["--max-new-tokens", "4,096"]),
    (("--layers", "2"), ["--layers", "--config"]),
    (("--seed", "2"), ["--seed", "--config"]),
], ids=lambda value: "_".join(value).replace("--", "") if isinstance(value, tuple) else "")
def test_mistakes_get_a_message(arguments: tuple[str, ...], words: list[str]) -> None:
    result = runner.invoke(cli.app, ["generate", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    for word in words:
        assert word in result.stderr
