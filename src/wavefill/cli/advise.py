"""`wavefill advise`: what a model's attention costs on a GPU, in decoding and in prompts, and what to change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from wavefill import hardware
from wavefill.cli._output import print_json, written
from wavefill.spec import MAX_LENGTH, invalid, whole


def advise(
    config: Annotated[str, typer.Argument(help="A Hugging Face config.json, a model's folder, or a shipped shape such "
                                               "as llama-3.1-8b; a wrong name lists them.")],
    gpu: Annotated[str, typer.Option(
        help=f"{', '.join(each.name for each in hardware.GPUS)}, or a .json file that describes another.")] = "H200",
    gpus: Annotated[int, typer.Option(
        help="So many of them, sharing all work evenly at no cost of communication; see --plans.")] = 1,
    context: Annotated[str, typer.Option(help="Tokens of a request, as 131072 or 128k.")] = "128k",
    batch: Annotated[int, typer.Option(help="Requests at a time.")] = 1,
    kv: Annotated[str, typer.Option(help="Format of the KV cache: bf16, fp8, int8 or int4.")] = "bf16",
    weights: Annotated[str, typer.Option(help="Format of the weights: bf16 or fp8.")] = "bf16",
    phase: Annotated[str, typer.Option(help="decode, prefill or both.")] = "both",
    page: Annotated[int, typer.Option(help="Tokens of a page of the KV cache.")] = 16,
    findings: Annotated[bool, typer.Option("--findings", help="All findings in full instead.")] = False,
    plans: Annotated[bool, typer.Option("--plans", help="Parallel plans for --gpus instead, best first.")] = False,
    target: Annotated[float, typer.Option(help="Tokens/s of a user that plans must keep.")] = 20.0,
    sweep: Annotated[str | None, typer.Option(
        help="Vary one thing instead: g (query heads a KV head), hsz (head size), length or kv.")] = None,
    html: Annotated[Path | None, typer.Option(
        help="Write the report as one page with charts to this file; with --gpus it has the plans.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Show what a model's attention costs on a GPU: time by component, what binds, what fits, and what to change."""
    from wavefill.advise import advise as compute
    from wavefill.cli import _advice

    device = hardware.gpu_file(Path(gpu).expanduser()) if gpu.lower().endswith(".json") else gpu
    report = compute(config, device, gpus=gpus, context=_tokens(context), batch=batch, kv=kv, weights=weights,
                     phase=phase, page=page, plans=plans or (html is not None and gpus > 1),
                     target=target)
    if html is not None:
        from wavefill.advise.page import write_html

        with written("--html", html):
            write_html(report, html)
    if json:
        print_json(report.to_dict())
    elif plans and report.plans:
        _advice.print_plans(report, report.plans)
    elif sweep is not None:
        _advice.print_sweep(report, sweep.lower())
    elif findings:
        _advice.print_findings(report)
    else:
        _advice.print_report(report)


def _tokens(text: str) -> int:
    """A number of tokens: 131072, 128k (of 1,024) or 1m."""
    match = re.fullmatch(r"(\d{1,12})([km]?)", text.strip().lower())
    if match is None:
        raise invalid("context", "must be a number of tokens", repr(text[:40]), "For example 131072 or 128k.")
    return whole("context", int(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2]], 1, MAX_LENGTH)
