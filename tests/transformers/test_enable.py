"""`enable` and `disable`: what they change, what they leave alone, and that nothing is left behind."""

from __future__ import annotations

import copy
import io
import json
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers.generation")

import torch
import transformers
from batching import settings
from tiny import (
    CACHE,
    FAMILIES,
    HYBRIDS,
    build,
    expected,
    fresh,
    one_thread,  # noqa: F401
    padded,
    plain,
    stock,
    tokens,
)
from transformers import DynamicCache, PreTrainedModel

from wavefill import InvalidArgument
from wavefill.integrations.transformers import WavefillCache, disable, enable, kernels
from wavefill.integrations.transformers.cache import PagedLayer, StateLayer

pytestmark = pytest.mark.transformers


def greedy(model: PreTrainedModel) -> torch.Tensor:
    return tokens(model, padded(), 12)


def everything(model: PreTrainedModel) -> dict[str, Any]:
    """All that hangs on a model and its modules, but for the weights themselves."""
    state: dict[str, Any] = {
        "config": copy.deepcopy(model.config.__dict__), "generation": model.generation_config.to_dict(),
        "config file": model.config.to_dict(),
    }
    for name, module in model.named_modules():
        state[name] = {
            key: list(value) if isinstance(value, dict) else value for key, value in module.__dict__.items()
            if key not in ("config", "generation_config")
        }
    return state


@pytest.mark.parametrize(("family", "previous"), [
    *product(["llama", "qwen2-mixed", "mistral-window", "phi3", "gemma3", *HYBRIDS], ["sdpa", "eager"]),
    ("gemma2", "eager"), ("gpt-oss", "eager"),
])
def test_disable_leaves_no_trace(family: str, previous: str) -> None:
    model = fresh(family)
    model.set_attn_implementation(previous)
    before = everything(model)
    assert enable(model) is model
    assert everything(model) != before
    greedy(model)
    assert disable(model) is model
    after = everything(model)
    assert after.keys() == before.keys()
    for name in before:
        assert after[name] == before[name], name
    out = model.generate(plain(), max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    assert type(out[CACHE]) is DynamicCache
    assert not any(isinstance(layer, PagedLayer | StateLayer) for layer in out[CACHE].layers)


def test_enabling_and_disabling_twice_is_the_same_as_once() -> None:
    model = enable(enable(fresh("llama")))
    assert torch.equal(greedy(model), expected(("short",), "llama", greedy))
    assert len(model.model._forward_pre_hooks) == 1
    for _ in range(2):
        disable(model)
        assert not model.model._forward_pre_hooks
        assert model.config._attn_implementation == "sdpa"
    assert torch.equal(greedy(enable(model)), expected(("short",), "llama", greedy))


def test_other_attention_chosen_by_hand_is_kept() -> None:
    model = enable(fresh("llama"))
    model.set_attn_implementation("eager")
    out = model.generate(plain(), max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    assert type(out[CACHE].layers[0]).__name__ == "DynamicLayer"
    enable(model)  # again, over eager now
    assert torch.equal(greedy(model), expected(("short",), "llama", greedy))
    model.set_attn_implementation("eager")
    assert disable(model).config._attn_implementation == "eager"


def test_several_models_at_once_and_others_untouched() -> None:
    first, second, other = enable(fresh("llama")), enable(fresh("mistral-window")), fresh("llama")
    for family, model in (("llama", first), ("mistral-window", second), ("llama", other)):
        assert torch.equal(greedy(model), expected(("short",), family, greedy))
    assert other.config._attn_implementation == "sdpa"
    disable(first)
    assert torch.equal(greedy(second), expected(("short",), "mistral-window", greedy))
    assert second.config._attn_implementation == "wavefill"


@pytest.mark.parametrize("previous", ["sdpa", "eager"])
def test_a_model_that_shares_the_configuration_keeps_its_bits(previous: str) -> None:
    model = fresh("mistral-window")
    model.set_attn_implementation(previous)
    twin = type(model)(model.config).eval()
    twin.load_state_dict(model.state_dict())
    assert twin.config is model.config

    def run(one: PreTrainedModel) -> list[torch.Tensor]:
        out = one.generate(**padded(), max_new_tokens=9, do_sample=False, return_dict_in_generate=True,
                           output_logits=True)
        return [out.sequences, *out.logits]

    want = run(twin)
    enable(model)
    for x, y in zip(run(twin), want, strict=True):
        assert torch.equal(x, y)
    assert torch.equal(run(model)[0], want[0])


def test_other_heads_and_the_bare_model() -> None:
    torch.manual_seed(0)
    classifier = transformers.LlamaForSequenceClassification(build("llama", num_labels=3).config).eval()
    with torch.no_grad():
        want = classifier(**padded()).logits
        torch.testing.assert_close(enable(classifier)(**padded()).logits, want, rtol=1e-4, atol=1e-5)
    bare, reference = enable(fresh("llama").model), stock("llama").model
    batch = padded()
    with torch.no_grad():
        # By position, as a bare model is often called.
        got = bare(batch["input_ids"], batch["attention_mask"])
        want = reference(batch["input_ids"], batch["attention_mask"])
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(got.last_hidden_state[real], want.last_hidden_state[real], rtol=1e-4, atol=1e-5)
    assert isinstance(got[CACHE], WavefillCache)
    disable(bare)
    assert bare.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ["llama", "qwen2-mixed"])
def test_training_is_as_without_wavefill(family: str) -> None:
    model, reference = enable(fresh(family)).train(), fresh(family).train()
    losses = []
    for one in (model, reference):
        loss = one(**padded(), labels=padded()["input_ids"]).loss
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(losses[0], losses[1])
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_a_forward_that_records_gradients_steps_aside_and_says_so() -> None:
    model, reference = enable(fresh("llama")), stock("llama")
    with pytest.warns(UserWarning, match="no_grad"):
        out = model(plain())
    assert type(out[CACHE]) is DynamicCache
    assert torch.equal(out.logits, reference(plain()).logits)
    with pytest.warns(UserWarning, match="no_grad"):
        more = model(plain(2), **{CACHE: out[CACHE]})
    assert more.logits.requires_grad
    with pytest.raises(ValueError, match="gradients"):
        model(plain(), **{CACHE: WavefillCache(model)})
    frozen = fresh("llama").requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert isinstance(enable(frozen)(plain())[CACHE], WavefillCache)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # newer releases call it activation_checkpointing_enable
@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_gradient_checkpointing_is_as_without_wavefill(family: str) -> None:
    """Up to 5.23 it keeps the cache from the layers in every forward of a model in training mode."""
    model, reference = fresh(family), fresh(family)
    batch = padded()
    batch["attention_mask"][1, 15:] = 0
    for one in (enable(model), reference):
        one.gradient_checkpointing_enable()
        one.train()
        one(**batch, labels=batch["input_ids"]).loss.backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(tokens(model, batch, 5), tokens(reference, batch, 5))
    with torch.no_grad(), pytest.raises(InvalidArgument, match=r"past_key_values: .*checkpointing.*model\.eval\(\)"):
        model(plain(), **{CACHE: WavefillCache(model)})
    assert torch.equal(greedy(model.eval()), expected(("short",), family, greedy))


class Logits(torch.nn.Module):
    def __init__(self, model: PreTrainedModel, **arguments: Any) -> None:
        super().__init__()
        self.model, self.arguments = model, arguments

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(ids, **self.arguments).logits
        return logits


@pytest.mark.filterwarnings("ignore")  # torch's, of what a trace leaves out, and that it is deprecated
@pytest.mark.parametrize("way", ["trace", "export"])
def test_a_traced_or_exported_model_is_the_one_without_wavefill(way: str) -> None:
    def made(module: torch.nn.Module) -> Any:
        if way == "trace":
            return torch.jit.trace(module, plain(9), check_trace=False)
        return torch.export.export(module, (plain(9),), strict=False).module()

    model = enable(fresh("llama"))
    ids = plain(9).flip(1)
    with torch.no_grad():
        assert torch.equal(made(Logits(model))(ids), made(Logits(stock("llama")))(ids))
        with pytest.raises(InvalidArgument, match=r"past_key_values: can't be a wavefill cache.*traced or exported"):
            made(Logits(model, **{CACHE: WavefillCache(model)}))
    assert torch.equal(greedy(model), expected(("short",), "llama", greedy))


def test_copies_and_pickles_of_an_enabled_model_are_enabled() -> None:
    model = enable(build("llama"))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(greedy(other), expected(("short",), "llama", greedy))
        disable(other)
        assert not other.model._forward_pre_hooks
        assert other.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "wavefill"
    assert model.model._forward_pre_hooks


LOAD = """
import json, sys, torch
torch.set_num_threads(1)
model = torch.load(sys.argv[1], weights_only=False)
from wavefill.integrations.transformers import disable, kernels
from wavefill.integrations.transformers.continuous import attention
calls = []
for module, name in ((kernels, "attention"), (attention, "run")):
    def counted(*args, real=getattr(module, name), name=name, **options):
        calls.append(name)
        return real(*args, **options)
    setattr(module, name, counted)
tokens = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False)[0].tolist()
batched = model.generate_batch([[5, 6, 7]], generation_config=model.generation_config)
(output,) = batched.values()
print(json.dumps([tokens, output.error, list(output.generated_tokens), sorted(set(calls))]))
disable(model)
assert "init_continuous_batching" not in vars(model) and model.config._attn_implementation == "sdpa"
"""


def test_a_pickled_model_runs_in_a_process_that_has_enabled_none(tmp_path: Path) -> None:
    model = enable(build("llama"))
    model.generation_config.update(max_new_tokens=6, do_sample=False, eos_token_id=-1,
                                   continuous_batching_config=settings())
    torch.save(model, tmp_path / "model")
    done = subprocess.run([sys.executable, "-c", LOAD, str(tmp_path / "model")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    want = tokens(stock("llama"), torch.tensor([[5, 6, 7]]), 6)[0].tolist()
    assert json.loads(done.stdout.splitlines()[-1]) == [want, None, want[3:], ["attention", "run"]]


def test_a_saved_model_knows_nothing_of_wavefill(tmp_path: Path) -> None:
    enable(fresh("qwen3")).save_pretrained(tmp_path)
    for file in tmp_path.glob("*.json"):
        assert "wavefill" not in json.dumps(json.loads(file.read_text()))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(greedy(loaded), expected(("short",), "qwen3", greedy))


def test_threads_generate_side_by_side_on_one_model() -> None:
    model, got, errors = enable(fresh("llama")), {}, []

    def work(rows: int) -> None:
        try:
            got[rows] = tokens(model, plain(5 + rows, rows), 15)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for rows in (1, 2, 3, 4):
        assert torch.equal(got[rows], tokens(stock("llama"), plain(5 + rows, rows), 15))


def test_an_interrupted_forward_leaves_nothing_for_the_next_model() -> None:
    """KeyboardInterrupt passes the hooks that end a step, so the next forward has to do without them."""
    model, other = enable(fresh("llama")), fresh("llama")

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        greedy(model)
    handle.remove()
    assert torch.equal(greedy(other), expected(("short",), "llama", greedy))
    assert torch.equal(greedy(model), expected(("short",), "llama", greedy))


@pytest.fixture
def no_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def test_a_compiled_model_gives_the_same_tokens(no_graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plainly, graphs, calls = build("mistral-window", num_hidden_layers=1), [], []
    model = enable(copy.deepcopy(plainly))
    real = kernels.attention
    monkeypatch.setattr(kernels, "attention", lambda *args, **options: calls.append(0) or real(*args, **options))

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model.compile(backend=backend)
    assert torch.equal(tokens(model, padded(), 3), tokens(plainly, padded(), 3))
    assert len(graphs) > 3, "nothing was compiled"
    assert len(calls) == 2 + 1, "wavefill was compiled away"


def test_a_compiled_model_cannot_be_one_graph(no_graphs: None) -> None:
    model = enable(fresh("llama"))
    model.compile(backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.Unsupported, match=r"wavefill.*without fullgraph=True"):
        model(plain())


@pytest.mark.parametrize("name", ["wavefill", "wavefill_over_eager"])
@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_the_registered_name_alone_stays_causal(family: str, name: str) -> None:
    """Case P2: an implementation that is chosen by name, without what `enable` sets up around it."""
    enable(fresh("llama"))  # so that the names are registered
    model = fresh(family)
    model.set_attn_implementation(name)
    assert torch.equal(greedy(model), expected(("short",), family, greedy))
    with torch.no_grad():
        torch.testing.assert_close(model(plain()).logits, stock(family)(plain()).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_passes_its_own_window(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    windows: list[int | None] = []
    real = kernels.attention

    def noted(*args: Any, window: int | None, **kwargs: Any) -> torch.Tensor:
        windows.append(window)
        return real(*args, window=window, **kwargs)

    monkeypatch.setattr(kernels, "attention", noted)
    tokens(enable(fresh(family)), plain(2), 2)
    want = {"qwen2-mixed": [None, 6, 6], "qwen3-mixed": [None, None, 5], "mistral-window": [6] * 3,
            "mistral-late-window": [26] * 3, "phi3-window": [7] * 3}
    assert windows == want.get(family, [None] * 3)
