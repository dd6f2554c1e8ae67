"""The README keeps its promises: its code runs, and the Korean one has the same commands and figures."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
ENGLISH, KOREAN = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.ko.md"))


def blocks(text: str) -> list[tuple[str, list[str]]]:
    """(language, lines without comments and empty lines) of each fenced block."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(language, [line for line in (re.sub(r"\s+# .*", "", line) for line in body.splitlines()) if line])
            for language, body in found]


def test_two_commands_set_everything_up() -> None:
    assert blocks(ENGLISH)[0][1] == ["make demo", "make test"]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"demo", "test"} <= set(targets)
    assert re.search(r"^step make test$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)


def test_both_readmes_have_the_same_commands_and_figures() -> None:
    assert blocks(ENGLISH) == blocks(KOREAN)
    number = re.compile(r"\d[\d,.]*\d|\d")
    assert Counter(number.findall(ENGLISH)) == Counter(number.findall(KOREAN))
    for pattern in (r"^\| llama.*$", r"!\[[^]]*\](\(.*?\))", r"`[^`\n]+`"):
        assert Counter(re.findall(pattern, ENGLISH, re.MULTILINE)) == Counter(re.findall(pattern, KOREAN, re.MULTILINE))


def test_the_code_block_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    (language, lines), = [block for block in blocks(ENGLISH) if block[0]]
    assert language == "python"
    assert lines[0] == "pip install 'wavefill[transformers]'"
    assert len(lines) == 8

    class Tokenizer:
        """Letters for tokens; the call and the decoding are those of a real one."""

        def __call__(self, text: str, return_tensors: str) -> Any:
            ids = torch.tensor([[3 + ord(letter) % 60 for letter in text]])
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

        def decode(self, ids: torch.Tensor) -> str:
            return f"{len(ids)} tokens"

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=None, pad_token_id=0)).eval()
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: Tokenizer())
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name, dtype: model)
    exec(compile("\n".join(lines[1:]), "README.md", "exec"), {})
    assert capsys.readouterr().out.strip() == f"{len('Call me Ishmael.') + 40} tokens"
    assert model.config._attn_implementation == "wavefill"
