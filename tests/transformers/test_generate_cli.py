"""`wavefill generate` on tiny models of each kind it takes, a folder and a GGUF file; SmolLM2 where it is installed."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from wavefill import cli
from wavefill.bench import decoding, gguf, prompts, shapes
from wavefill.bench import models as store
from wavefill.bench.divergence import Comparison, FirstDifference
from wavefill.spec import BackendUnavailable, InvalidArgument

pytestmark = pytest.mark.transformers

CHAT = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
runner = CliRunner()


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([prompts.built_in_text()[:8000]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT, bos_token=SPECIAL[1],
                                   eos_token=SPECIAL[2], pad_token=SPECIAL[2], unk_token=SPECIAL[0])


def make_model(vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, bos_token_id=1, eos_token_id=2, pad_token_id=2,
        initializer_range=0.3, rms_norm_eps=2**-20)  # a number that float32 holds exactly, as GGUF must
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tokenizer = make_tokenizer()
    make_model(len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(autouse=True)
def _small_measurements(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, since several on such small tensors mostly wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr("wavefill.bench.timing.ROTATED_BYTES", 1 << 20)
    monkeypatch.setattr("wavefill.bench.e2e.SHORT_ROUNDS", 2)
    yield
    torch.set_num_threads(threads)


def generate(folder: Path, *arguments: str, **more: Any) -> Result:
    result = runner.invoke(cli.app, ["generate", "--model", str(folder), *arguments], **more)
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_comparison(folder: Path, tmp_path: Path, dtype: str) -> None:
    file = tmp_path / "out" / "demo.json"
    result = generate(folder, "--compare", "sdpa", "--context", "300", "--max-new-tokens", "40", "--dtype", dtype,
                      "--json", "--output", str(file))
    found = json.loads(result.stdout)
    assert json.loads(file.read_text()) == found
    assert found["prompt"] == {"source": "wavefill/data/alice.txt", "tokens": 300}
    run, = found["runs"]
    assert run["dtype"] == dtype
    assert run["tokens"]["acceptable"]
    if dtype == "float32":
        assert run["tokens"]["identical"]
        assert run["tokens"]["count"] == 40
    apart = decoding.slow_in(getattr(torch, dtype))
    assert run["sdpa"]["attention"] == "sdpa"
    for way in ("wavefill", "sdpa"):
        # 40 tokens in blocks of 16, 16 and 8, less the first of each; one counted round of 16 at 64. A prompt that is
        # read apart takes one more.
        assert len(run[way]["steps_ms"]) == 37 - apart
        assert len(run[way]["steps_at_64_ms"]) == 15 - apart
        assert run[way]["tokens_per_s"] > 0
        assert run[way]["first_token_s"] > 0
    assert run["speedup"]["token"] == pytest.approx(run["sdpa"]["ms_per_token"] / run["wavefill"]["ms_per_token"])
    # 2 layers, 2 KV heads, K and V of 8 elements; from the middle of the short blocks to the middle of the long ones.
    per_token = 2 * 2 * 2 * 8 * (4 if dtype == "float32" else 2)
    assert run["kv_bytes_per_token"] == per_token * (320 - 72)
    assert run["read_bandwidth_gbs"] > 0
    for key in ("command", "cpu", "threads", "versions", "commit"):
        assert key in found


def test_a_short_prompt_has_no_growing_part(folder: Path) -> None:
    result = generate(folder, "--compare", "sdpa", "--context", "100", "--max-new-tokens", "4", "--json")
    run, = json.loads(result.stdout)["runs"]
    assert "growing_ms" not in run["wavefill"]
    assert run["speedup"]["growing"] is None
    assert run["speedup"]["token"] > 0


def test_text_is_streamed_and_summed_up(folder: Path) -> None:
    result = generate(folder, "--compare", "sdpa", "--context", "200", "--max-new-tokens", "20", "--dtype", "both")
    for words in ("float32", "bfloat16", "tokens/s", "transformers sdpa", "speed-up", "GB/s", "grows with context"):
        assert words in result.stdout
    assert "tokens are identical" in result.stdout


def test_a_family_with_a_soft_cap_is_labelled_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    shapes.build(shapes.find("gemma-2-9b", layers=1), "float32", 0, vocab_size=len(tokenizer), hidden_size=48,
                 intermediate_size=64, num_attention_heads=4, num_key_value_heads=2).save_pretrained(tmp_path)
    arguments = ("--compare", "sdpa", "--context", "60", "--max-new-tokens", "4")
    shown = generate(tmp_path, *arguments).stdout
    assert "transformers eager" in shown
    assert "sdpa" not in shown
    run, = json.loads(generate(tmp_path, *arguments, "--json").stdout)["runs"]
    assert run["sdpa"]["attention"] == "eager"

    first = FirstDifference(3, (7, 8), (1.0, 1.0), 2.0, (3.0, 0.1), "float64", within_rounding=False)
    monkeypatch.setattr("wavefill.bench.e2e.compare", lambda *_: Comparison(False, 8, 3.0, first))
    result = runner.invoke(cli.app, ["generate", "--model", str(tmp_path), *arguments])
    assert "eager 8, whose logits" in result.stdout
    assert "error: the tokens differ from eager's" in result.stderr
    assert "sdpa" not in result.output


def test_other_tokens_are_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = FirstDifference(3, (7, 8), (1.0, 1.0), 2.0, (3.0, 0.1), "float64", within_rounding=False)
    monkeypatch.setattr("wavefill.bench.e2e.compare", lambda *_: Comparison(False, 8, 3.0, first))
    result = runner.invoke(cli.app, ["generate", "--model", str(folder), "--compare", "sdpa", "--context", "200",
                                     "--max-new-tokens", "8"])
    assert result.exit_code == 1
    assert "MORE THAN ROUNDING EXPLAINS" in result.stdout
    assert "error: the tokens differ from sdpa's" in result.stderr


@pytest.mark.parametrize("linear", ["torch", "flat"])
def test_linear_layers_are_switched_for_wavefills_blocks_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch, linear: str
) -> None:
    blocks: list[tuple[str, set[str]]] = []
    real = decoding.greedy  # called within each block, once the model was turned to its way

    def noted(model: Any, *arguments: Any, **settings: Any) -> Any:
        kinds = {type(module).__name__ for module in model.modules() if isinstance(module, torch.nn.Linear)}
        blocks.append((model.config._attn_implementation, kinds))
        return real(model, *arguments, **settings)

    monkeypatch.setattr(decoding, "greedy", noted)
    result = generate(folder, "--compare", "sdpa", "--context", "200", "--max-new-tokens", "20", "--json",
                      "--linear", linear)
    found = json.loads(result.stdout)
    assert found["linear"] == linear
    assert found["runs"][0]["tokens"]["identical"]
    ours, theirs = ("wavefill", {"FlatLinear" if linear == "flat" else "Linear"}), ("sdpa", {"Linear"})
    assert blocks == [ours, theirs] * 2 + [theirs, ours] * 2  # two rounds at 64, blocks of 16 and 4 at 200


def test_flat_linear_layers_without_a_comparison(folder: Path) -> None:
    arguments = ("--context", "150", "--max-new-tokens", "30", "--linear")
    texts = [json.loads(generate(folder, *arguments, linear, "--json").stdout)["runs"][0]["text"]
             for linear in ("torch", "flat")]
    assert texts[0] == texts[1]
    assert "wavefill with --linear flat" in generate(folder, *arguments, "flat").stdout
    assert "wavefill with --linear torch" in generate(folder, "--context", "150", "--max-new-tokens", "2").stdout


def test_other_linear_layers_are_refused(folder: Path) -> None:
    result = runner.invoke(cli.app, ["generate", "--model", str(folder), "--linear", "int8"])
    assert result.exit_code == 2
    assert "--linear: must be one of torch, flat; got 'int8'. Use one of these." in result.stderr
    assert "Traceback" not in result.output


def test_tokens_are_those_of_plain_generate(folder: Path) -> None:
    found = json.loads(generate(folder, "--context", "150", "--max-new-tokens", "30", "--json").stdout)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = prompts.build(tokenizer, None, 150, chat=True, room=480).ids
    expected = model.generate(torch.tensor([ids]), max_new_tokens=30, do_sample=False)[0, 150:].tolist()
    stop = expected.index(2) if 2 in expected else len(expected)
    assert found["runs"][0]["text"] == tokenizer.decode(expected[:stop], skip_special_tokens=True)


def test_prompts_from_a_file_and_from_standard_input(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Down the rabbit-hole went Alice.\n", encoding="utf-8")
    outputs = [json.loads(result.stdout) for result in (
        generate(folder, "--prompt", str(file), "--json", "--max-new-tokens", "5"),
        generate(folder, "--prompt", "-", "--json", "--max-new-tokens", "5", input=file.read_text()),
        generate(folder, "--prompt", str(file), "--raw", "--json", "--max-new-tokens", "5"),
    )]
    assert outputs[0]["runs"][0]["text"] == outputs[1]["runs"][0]["text"]
    assert [o["prompt"]["source"] for o in outputs] == [str(file), "-", str(file)]
    assert outputs[0]["prompt"]["tokens"] > outputs[2]["prompt"]["tokens"]


@pytest.mark.parametrize(("arguments", "words"), [
    (["--context", "100000"], "error: --context: "),
    (["--context", "0"], "error: --context: "),
    (["--context", "510", "--max-new-tokens", "20"], "room for the new tokens"),
], ids=["too_long", "too_short", "no_room"])
def test_contexts_that_cannot_be(folder: Path, arguments: list[str], words: str) -> None:
    result = runner.invoke(cli.app, ["generate", "--model", str(folder), *arguments])
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.output


class TestPrompt:
    @pytest.mark.parametrize("context", [100, 301, 480])
    def test_it_has_exactly_the_tokens_asked_for(self, context: int) -> None:
        tokenizer = make_tokenizer()
        prompt = prompts.build(tokenizer, None, context, chat=True, room=480)
        assert len(prompt.ids) == context
        assert prompts.built_in_text().startswith(tokenizer.decode(prompt.ids))

    @pytest.mark.parametrize("chat", [True, False])
    def test_a_given_text_gets_the_chat_form(self, chat: bool) -> None:
        tokenizer = make_tokenizer()
        text = "Who is Dinah? " * 20
        whole = prompts.build(tokenizer, text, None, chat=chat, room=480)
        assert tokenizer.decode(whole.ids) == (
            f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" if chat else text)
        cut = prompts.build(tokenizer, text, len(whole.ids) - 30, chat=chat, room=480)
        assert len(cut.ids) == len(whole.ids) - 30
        assert tokenizer.decode(cut.ids).rstrip().endswith("<|im_start|>assistant") is chat

    def test_the_default_fills_a_small_model(self) -> None:
        assert len(prompts.build(make_tokenizer(), None, None, chat=True, room=333).ids) == 333

    def test_the_shipped_text_holds_the_models_whole_context(self) -> None:
        assert len(prompts.built_in_text()) > 33_000
        assert prompts.built_in_text().isascii()

    @pytest.mark.parametrize(("text", "context"), [("", None), ("short", 400)], ids=["empty", "too_short"])
    def test_texts_that_do_not_do(self, text: str, context: int | None) -> None:
        with pytest.raises(InvalidArgument):
            prompts.build(make_tokenizer(), text, context, chat=True, room=480)


class TestDecoder:
    def test_blocks_go_on_where_the_last_one_ended(self, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        whole, parts = (decoding.Decoder("sdpa", model, list(range(5, 40)), lambda m: m) for _ in range(2))
        whole.block(12)
        for count in (5, 1, 6):
            parts.block(count)
        assert parts.tokens == whole.tokens
        assert len(parts.logits) == 12
        assert len(whole.steps) == 11
        assert len(parts.steps) == 9
        assert parts.first > 0

    @pytest.mark.parametrize("ends", [int, lambda token: [token, 3]], ids=["one", "several"])
    def test_only_a_block_that_is_to_stop_ends_at_the_models_end(self, folder: Path, ends: Any) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        free, stopped, whole = (decoding.Decoder("sdpa", model, list(range(5, 40)), lambda m: m) for _ in range(3))
        free.block(8)
        model.generation_config.eos_token_id = ends(free.tokens[0])
        before = model.generation_config
        stopped.block(8, stop_at_end=True)
        assert stopped.tokens == free.tokens[:1]
        whole.block(8)
        assert whole.tokens == free.tokens
        assert model.generation_config is before
        assert before.eos_token_id == ends(free.tokens[0])

    def test_tokens_are_the_likeliest_whatever_the_model_would_have_drawn(self, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=50.0, min_new_tokens=3)
        decoder = decoding.Decoder("sdpa", model, list(range(5, 40)), lambda m: m)
        decoder.block(8)
        assert decoder.tokens == [int(row.argmax()) for row in decoder.logits]

    def test_the_models_settings_come_back_after_a_failure(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        before = model.generation_config
        monkeypatch.setattr(model, "forward", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            decoding.greedy(model, torch.tensor([[5, 6]]), 2)
        assert model.generation_config is before

    def test_the_listener_is_not_timed(self) -> None:
        clock = decoding.Clock(lambda token: __import__("time").sleep(0.05))
        clock.put(torch.tensor([[1, 2, 3]]))
        for token in range(3):
            clock.put(torch.tensor([token]))
        assert len(clock.seconds) == 3
        assert sum(clock.seconds[1:]) < 0.05


def write_gguf(path: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, **changes: str) -> None:
    """A GGUF file as llama.cpp's converter writes it: float32 weights, rows of q and k interleaved."""
    writer_module = pytest.importorskip("gguf", reason="the gguf package is not installed")
    config, backend = model.config, json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer = writer_module.GGUFWriter(str(path), changes.get("architecture", "llama"))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    vocabulary = sorted(backend["vocab"], key=backend["vocab"].__getitem__)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in backend["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT)
    names = {hf: ours for ours, hf in gguf._TOP.items()}
    for layer in range(config.num_hidden_layers):
        names |= {f"model.layers.{layer}.{hf}.weight": f"blk.{layer}.{ours}.weight" for ours, hf in gguf._BLOCK.items()}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue  # tied
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:
            rows, columns = weight.shape
            weight = weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)
        writer.add_tensor(names[name], weight.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class TestGguf:
    def test_a_conversion_gives_the_same_model_and_tokens(self, tmp_path: Path) -> None:
        tokenizer = make_tokenizer()
        model = make_model(len(tokenizer))
        for parameter in model.parameters():  # bfloat16 is what the folder stores, and logits can then be equal
            parameter.data = parameter.data.to(torch.bfloat16).float()
        source, target = tmp_path / "tiny.gguf", tmp_path / "folder"
        write_gguf(source, model, tokenizer)
        target.mkdir()
        shares: list[float] = []
        gguf.convert(source, target, lambda description, share: shares.append(share))
        assert shares == sorted(shares)

        loaded = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        read = AutoTokenizer.from_pretrained(target)
        text = "Alice was 7 in 1859; `Oh dear!' said the Rabbit. <|im_start|>user\n"
        ids = tokenizer(text).input_ids
        assert read(text).input_ids == ids
        assert read.decode(ids) == tokenizer.decode(ids)
        assert read.eos_token == "<|im_end|>"
        assert read.eos_token_id == loaded.config.eos_token_id == loaded.generation_config.eos_token_id == 2
        chat = [{"role": "user", "content": "hi"}]
        assert read.apply_chat_template(chat, tokenize=False) == tokenizer.apply_chat_template(chat, tokenize=False)
        with torch.inference_mode():
            assert torch.equal(loaded(torch.tensor([ids])).logits, model(torch.tensor([ids])).logits)

    def test_a_file_of_another_kind_is_refused(self, tmp_path: Path) -> None:
        tokenizer = make_tokenizer()
        write_gguf(tmp_path / "other.gguf", make_model(len(tokenizer)), tokenizer, architecture="mamba")
        with pytest.raises(InvalidArgument, match="must be a Llama model"):
            gguf.convert(tmp_path / "other.gguf", tmp_path, lambda description, share: None)

    def test_a_tensor_of_another_kind_is_refused(self) -> None:
        assert gguf.hf_name("blk.11.attn_q.weight") == "model.layers.11.self_attn.q_proj.weight"
        with pytest.raises(InvalidArgument, match="tensors of a Llama model"):
            gguf.hf_name("blk.0.ffn_gate_inp.weight")


@pytest.mark.slow
def test_smollm2_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real model, from the installed package to text, converted into a cache of its own."""
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    try:
        store.smollm2_gguf()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    monkeypatch.setenv("WAVEFILL_CACHE_DIR", str(tmp_path))
    question = tmp_path / "question.txt"
    question.write_text("What is the capital of France?", encoding="utf-8")
    found = json.loads(runner.invoke(cli.app, ["generate", "--prompt", str(question), "--compare", "sdpa", "--json",
                                               "--max-new-tokens", "16"]).stdout)
    assert "Paris" in found["runs"][0]["text"]
    assert found["runs"][0]["tokens"]["identical"]
