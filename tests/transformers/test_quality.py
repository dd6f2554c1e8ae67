"""`wavefill bench quality`: that a model's queries see what a cache of the format holds for them, and the figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_generate_cli import folder
from tiny import VOCABULARY, build, fresh, one_thread, plain
from torch.nn import functional
from transformers import PreTrainedModel
from typer.testing import CliRunner

from wavefill import cli, quantise
from wavefill.bench import quality
from wavefill.formats import FORMATS, PAGE
from wavefill.spec import InvalidArgument, UnsupportedModel

__all__ = ["folder", "one_thread"]
pytestmark = pytest.mark.transformers
runner = CliRunner()
names = pytest.mark.parametrize("name", FORMATS)


def silent(description: str, share: float) -> None:
    pass


def text(tokens: int) -> list[int]:
    return [int(token) for token in plain(tokens)[0]]


@names
@pytest.mark.parametrize("tokens", [1, 63, 127, 128, 200])
def test_each_query_sees_what_a_cache_would_hold_for_it(name: str, tokens: int) -> None:
    """Against a cache built for each position alone: pages that are old enough, quantised once, and the tail."""
    form = FORMATS[name]
    q, k, v = torch.randn(1, 6, tokens, 24), torch.randn(1, 2, tokens, 24), torch.randn(1, 2, tokens, 40)
    out = quality.attend(form, q, k, v, 0.3)
    if form.tail:
        k, v = k.bfloat16().float(), v.bfloat16().float()
    for i in range(tokens):
        held = form.quantised(i + 1)
        sides = []
        for x, part in ((k, form.k), (v, form.v)):
            # Scales of a head are of the whole text; others are of tokens that are there.
            there = x if part.span in ("tensor", "head") else x[:, :, :held]
            packed = quantise.simulate(there.transpose(1, 2), part).transpose(1, 2)[:, :, :held]
            sides.append(torch.cat((packed, x[:, :, held:i + 1]), 2).repeat_interleave(3, 1))
        weights = (0.3 * q[:, :, i:i + 1].double() @ sides[0].double().mT).softmax(-1)
        assert torch.allclose((weights @ sides[1].double()).float(), out[:, :, i:i + 1], atol=2e-6)
    assert not form.tail or form.quantised(tokens) % PAGE == 0


def model() -> PreTrainedModel:
    """With positions for some pages of 64 tokens."""
    return build("llama", max_position_embeddings=512)


def test_float32_is_the_model_as_it_is() -> None:
    ids = text(150)
    tiny = model()
    found = quality.run(tiny, ids, [150, 40], [], silent)
    with torch.inference_mode():
        logits = tiny(torch.tensor([ids])).logits[0].double()
    assert [(one.context, one.format) for one in found] == [(40, "float32"), (150, "float32")]
    for one in found:
        loss = functional.cross_entropy(logits[:one.context - 1], torch.tensor(ids[1:one.context]))
        assert one.perplexity == pytest.approx(math.exp(float(loss)), rel=1e-4)
        assert (one.change, one.error, one.divergence, one.agreement, one.bits) == (0.0, 0.0, 0.0, 1.0, 32.0)


def test_what_formats_do_to_a_model() -> None:
    """Each differs from float32 and from the others, int8 by less than the formats of fewer bits of precision."""
    found = {one.format: one for one in quality.run(model(), text(300), [300], quality.NAMES, silent)}
    assert list(found) == list(quality.NAMES)
    assert len({one.perplexity for one in found.values()}) == len(found)
    assert all(one.agreement > 1 / VOCABULARY and one.error > 0 for name, one in found.items() if name != "float32")
    order = ("float32", "float16", "bfloat16", "int8", "fp8-token-head")
    divergences = [found[name].divergence for name in order]
    assert divergences == sorted(divergences)
    assert found["int8"].divergence < found["int4"].divergence
    assert found["bfloat16"].bits == 16
    assert 4 < found["int4"].bits < 7


def test_the_model_is_left_as_it_was_and_may_be_measured_again() -> None:
    tiny = model()
    first = quality.run(tiny, text(140), [140], ["int4"], silent)
    assert tiny.config._attn_implementation == "sdpa"
    assert quality.run(tiny, text(140), [140], ["int4"], silent) == first


@pytest.mark.parametrize(("family", "what"), [("mistral-window", "sliding_window"), ("gpt-oss", "s_aux"),
                                              ("gemma2-uncapped", "sliding_window")])
def test_attention_that_is_more_than_causal_is_refused(family: str, what: str) -> None:
    with pytest.raises(UnsupportedModel, match=what):
        quality.run(fresh(family), text(20), [20], ["int8"], silent)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="kv_format: must be one of"):
        quality.run(model(), text(20), [20], ["int2"], silent)


class TestCommand:
    def run(self, *arguments: str) -> Any:
        return runner.invoke(cli.app, ["bench", "quality", *arguments])

    def test_help(self) -> None:
        assert "--contexts" in self.run("--help").output

    def test_json(self, folder: Path) -> None:
        result = self.run("--model", str(folder), "--contexts", "200,130", "--formats", "int8,int4", "--json")
        assert result.exit_code == 0, result.output
        whole = json.loads(result.stdout)
        assert [(row["context"], row["format"]) for row in whole["results"]] == [
            (context, name) for context in (130, 200) for name in ("float32", "int8", "int4")]
        assert whole["prompt"] == "wavefill/data/alice.txt"
        assert whole["model"]["source"] == folder.name

    def test_table_of_another_text(self, folder: Path, tmp_path: Path) -> None:
        file, report = tmp_path / "text.txt", tmp_path / "report.md"
        file.write_text("One two three. " * 40, encoding="utf-8")
        result = self.run("--model", str(folder), "--prompt", str(file), "--contexts", "70", "--formats", "int8",
                          "--output", str(report))
        assert result.exit_code == 0, result.output
        assert "same greedy token" in result.stdout
        assert "| int8 |" in report.read_text(encoding="utf-8")

    @pytest.mark.parametrize(("arguments", "words"), [
        (("--contexts", "1"), ["--contexts", "from 2"]),
        (("--contexts", "4k"), ["--contexts", "'4k'"]),
        (("--contexts", "600"), ["at most 512"]),
        (("--formats", "int8,q4"), ["--formats", "fp8-token-head", "'q4'"]),
        (("--prompt", "no-such-file.txt"), ["no-such-file.txt"]),
    ], ids=lambda value: "_".join(value).replace("--", "") if isinstance(value, tuple) else "")
    def test_mistakes(self, folder: Path, arguments: tuple[str, ...], words: list[str]) -> None:
        result = self.run("--model", str(folder), *arguments)
        assert result.exit_code == 2
        for word in words:
            assert word in result.stderr
