"""`enable(linear="flat")` on whole models: tokens, logits, what is switched and switched back, copies."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers.generation")

import torch
from tiny import (
    FAMILIES,
    build,
    expected,
    fresh,
    one_thread,  # noqa: F401
    padded,
    plain,
    stock,
    teacher_forced,
    tokens,
)
from torch import Tensor, nn
from transformers import PreTrainedModel

from wavefill import InvalidArgument, UnsupportedModel
from wavefill.integrations.transformers import disable, enable
from wavefill.integrations.transformers.linears import MAX_ROWS, FlatLinear

pytestmark = pytest.mark.transformers

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODES: dict[str, Callable[[PreTrainedModel], Tensor]] = {
    "greedy": lambda model: tokens(model, plain(), 30),
    "padded": lambda model: tokens(model, padded(), 50),
    "beams": lambda model: tokens(model, padded(), num_beams=4, num_return_sequences=2),
    "prompt-lookup": lambda model: tokens(model, plain(), prompt_lookup_num_tokens=3),
}


def flat(model: PreTrainedModel) -> PreTrainedModel:
    return enable(model, linear="flat")


def kinds(model: nn.Module) -> set[type]:
    """Classes of the linear layers."""
    return {type(module) for module in model.modules() if isinstance(module, nn.Linear)}


# ---- the whole model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_sdpa(family: str, mode: str) -> None:
    run = MODES[mode]
    assert torch.equal(run(flat(fresh(family))), expected((mode,), family, run))


def test_every_layer_of_every_step_goes_through_the_kernel(kernel_rows: list[int]) -> None:
    model = flat(fresh("llama"))
    layers = sum(isinstance(module, nn.Linear) for module in model.modules())
    assert layers == 3 * 7 + 1
    tokens(model, padded(), 4)
    # The prompt's 3 x 19 rows are PyTorch's, but for the head, which takes the last of each.
    assert kernel_rows == [3] + [3] * layers * 3
    kernel_rows.clear()
    tokens(model, plain(MAX_ROWS), 1)
    assert kernel_rows == [MAX_ROWS] * (layers - 1) + [1]
    kernel_rows.clear()
    tokens(model, plain(MAX_ROWS + 1), 1)
    assert kernel_rows == [1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "llama-g5", "qwen2", "qwen3", "mistral", "phi3"])
def test_logits_are_as_near_float64_as_those_of_sdpa(family: str, dtype: torch.dtype, kernel_rows: list[int]) -> None:
    batch = padded(3, 40, (11, 0, 2))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    low = fresh(family).to(dtype)
    real = mask.bool()
    truth = teacher_forced(copy.deepcopy(low).to(torch.float64), ids, mask, 21)[real]
    errors = [(teacher_forced(model, ids, mask, 21)[real].double() - truth).abs()
              for model in (copy.deepcopy(low), flat(low))]
    assert kernel_rows
    eps = torch.finfo(dtype).eps
    assert errors[1].max() <= 2 * errors[0].max() + 4 * eps * truth.abs().max()
    assert errors[1].mean() <= 1.2 * errors[0].mean() + eps


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_disable_brings_back_the_classes_and_the_bits(family: str) -> None:
    model = fresh(family)
    ids = plain(9)
    with torch.no_grad():
        before = model(ids).logits
        flat(model)
        assert kinds(model) == {FlatLinear}
        assert not torch.equal(model(ids).logits, before), "the same bits, so the test can't tell"
        for _ in range(2):
            disable(model)
            assert kinds(model) == {nn.Linear}
            assert torch.equal(model(ids).logits, before)


def test_enabling_again_switches_only_the_layers(kernel_rows: list[int]) -> None:
    model = fresh("llama")
    run = MODES["greedy"]
    for linear, kind in (("flat", FlatLinear), ("flat", FlatLinear), ("torch", nn.Linear), ("flat", FlatLinear)):
        kernel_rows.clear()
        assert enable(model, linear=linear) is model
        assert kinds(model) == {kind}
        assert len(model.model._forward_pre_hooks) == 1
        assert torch.equal(run(model), expected(("greedy",), "llama", run))
        assert bool(kernel_rows) == (kind is FlatLinear)
    assert kinds(enable(model)) == {nn.Linear}


@pytest.mark.parametrize("linear", ["Flat", "", None, True, 1, ["flat"], torch.ones(2)], ids=repr)
def test_other_words_are_refused_before_anything_changes(linear: Any) -> None:
    model = fresh("llama")
    with pytest.raises(InvalidArgument, match=r'linear: must be "torch" or "flat"; got .*leaves the linear layers'):
        enable(model, linear=linear)
    assert kinds(model) == {nn.Linear}
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(UnsupportedModel):
        enable(model.double(), linear="flat")
    assert kinds(model) == {nn.Linear}


def test_the_bare_model_has_no_head_to_switch() -> None:
    model = fresh("llama")
    flat(model.model)
    assert type(model.lm_head) is nn.Linear
    assert kinds(model.model) == {FlatLinear}
    disable(model)
    flat(model)
    disable(model.model)  # leaves the head, which it doesn't see
    disable(model)
    assert kinds(model) == {nn.Linear}


class Adapter(nn.Linear):
    """A subclass with a forward of its own, as adapters and quantised layers are."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_subclasses_are_left_alone(kernel_rows: list[int]) -> None:
    model, reference = fresh("llama"), fresh("llama")
    for one in (model, reference):
        one.model.layers[0].mlp.up_proj.__class__ = Adapter
    flat(model)
    assert type(model.model.layers[0].mlp.up_proj) is Adapter
    assert kinds(model) == {Adapter, FlatLinear}
    assert torch.equal(tokens(model, plain()), tokens(reference, plain()))
    assert len(kernel_rows) % 24 == 0, "one call a step and layer but one"
    disable(model)
    assert kinds(model) == {Adapter, nn.Linear}


def test_tied_weights_stay_tied() -> None:
    model = fresh("llama")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    reference = copy.deepcopy(model)
    flat(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.state_dict().keys() == reference.state_dict().keys()
    assert torch.equal(tokens(model, plain()), tokens(reference, plain()))
    other = copy.deepcopy(model)
    assert other.lm_head.weight is not model.lm_head.weight
    assert other.lm_head.weight is other.model.embed_tokens.weight


def test_training_has_the_bits_of_pytorch(kernel_rows: list[int]) -> None:
    model, reference = flat(fresh("llama")).train(), enable(fresh("llama")).train()
    ids = plain(9)
    for one in (model, reference):
        one(ids, labels=ids).loss.backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert not kernel_rows
    assert torch.equal(tokens(model.eval(), ids), tokens(stock("llama"), ids))
    assert kernel_rows


def test_threads_generate_side_by_side_on_one_model() -> None:
    model, got = flat(fresh("llama")), {}

    def work(count: int) -> None:
        got[count] = tokens(model, plain(5 + count, count), 15)

    workers = [threading.Thread(target=work, args=(count,)) for count in (1, 2, 3, 4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for count in (1, 2, 3, 4):
        assert torch.equal(got[count], tokens(stock("llama"), plain(5 + count, count), 15))


# ---- copies


def test_copies_and_pickles_are_flat_and_can_be_disabled(kernel_rows: list[int], tmp_path: Path) -> None:
    # Built anew: up to 5.23 the hooks of a forward that captured outputs keep a model from being pickled.
    model, run = flat(build("llama")), MODES["greedy"]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        kernel_rows.clear()
        assert kinds(other) == {FlatLinear}
        assert torch.equal(run(other), expected(("greedy",), "llama", run))
        assert kernel_rows
        assert kinds(disable(other)) == {nn.Linear}
    assert kinds(model) == {FlatLinear}
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert kinds(loaded) == {nn.Linear}
    assert torch.equal(run(loaded), expected(("greedy",), "llama", run))


LOAD = """
import pickle, sys, torch
torch.set_num_threads(1)
with open(sys.argv[1], "rb") as file:
    model = pickle.load(file)
from wavefill.backends import cpu
calls, real = [], cpu.linear
cpu.linear = lambda *args: calls.append(0) or real(*args)
print(model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False)[0].tolist())
assert len(calls) == 22 * 6, len(calls)
from wavefill.integrations.transformers import disable
assert type(disable(model).lm_head) is torch.nn.Linear
"""


def test_a_pickled_model_runs_in_a_process_that_has_enabled_none(tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.write_bytes(pickle.dumps(flat(build("llama"))))
    done = subprocess.run([sys.executable, "-c", LOAD, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == str(tokens(stock("llama"), torch.tensor([[5, 6, 7]]), 6)[0].tolist())


@pytest.fixture
def no_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def test_a_compiled_model_gives_the_same_tokens(no_graphs: None) -> None:
    model = flat(fresh("llama"))
    model.compile(backend="eager")
    assert torch.equal(tokens(model, padded(), 3), tokens(stock("llama"), padded(), 3))
