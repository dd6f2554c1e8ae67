"""What to change: each finding says what was seen, what it costs, the change, and what the model gives with it.

A rule is a function of the setup that returns a finding or None. Gains are computed by running the model again with the
change; one below `LEAST_GAIN` is not reported. What a change does to a model's quality is not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from wavefill.advise.components import Component, padded_head
from wavefill.advise.layouts import Plan, plans
from wavefill.advise.models import Attention, Latent, Mixer, State
from wavefill.advise.plans import Planner
from wavefill.advise.setups import Setup, seconds
from wavefill.advise.tiles import tiles
from wavefill.advise.words import figure, gb, ms

#: Share of the time, or of the memory, that a change must save.
LEAST_GAIN = 0.01
#: Drafts a step, and the share of them that is taken to be right, each on its own: 1 + a + a^2 + ... tokens a step.
DRAFTS, ACCEPTED = 3, 0.7
#: What full layers may become: one in six stays full, the others have this window (Gemma-3).
WINDOW, FULL_OF = 1024, 6
#: Latents of DeepSeek-V2 and -V3: kv_lora_rank and qk_rope_head_dim.
RANK, ROPE = 512, 64
#: Tokens of a page: the smallest that copies of tiles want (docs/gpu-backend.md).
PAGE = 16
#: Attention's share of a step below which another component is looked at.
SHORT = 0.25
#: How much longer attention takes on a prompt in pages of 16 tokens than on a contiguous one: 526 TFLOP/s and 625, a
#: prompt of 8,192 on an H200 (docs/gpu-backend.md). Pages of at least a tile are taken to cost nothing.
PAGED_PROMPT = 625 / 526


@dataclass(frozen=True)
class Finding:
    """before, after: without and with the change: seconds of a step ("decode"; with drafts, and with a larger batch,
    for as many tokens), seconds of all prompts ("prefill") or bytes ("memory")."""

    rule: str
    phase: str
    seen: str
    cost: str
    change: str
    gain: str
    before: float
    after: float

    @property
    def saved(self) -> float:
        """Share of what there was before."""
        return 1 - self.after / self.before

    def to_dict(self) -> dict[str, Any]:
        return {"rule": self.rule, "phase": self.phase, "seen": self.seen, "cost": self.cost, "change": self.change,
                "gain": self.gain, "before": self.before, "after": self.after, "saved": self.saved}


def find(setup: Setup, phases: tuple[str, ...], page: int = PAGE) -> tuple[Finding, ...]:
    """Findings on the phases that are asked for, those that save the largest share first; memory that is too small
    comes before all others."""
    made = [rule(setup) for phase in phases for rule in _RULES[phase]]
    made += [fits(setup), pages(setup, page)]
    if "prefill" in phases:
        made.append(paged_prompts(setup, page))
    kept = [each for each in made if each is not None and each.saved >= LEAST_GAIN]
    return tuple(sorted(kept, key=lambda each: (each.rule != "memory", -each.saved)))


# ------------------------------------------------------------------------------------------------------- memory


def fits(setup: Setup) -> Finding | None:
    held = setup.memory
    needed, gpus = held.weights + setup.batch * held.request, setup.machine.gpus
    if needed <= held.usable:
        return None
    enough = math.ceil(needed / (held.usable / gpus))
    return Finding(
        "memory", "memory", f"weights {gb(held.weights)} and KV {gb(setup.batch * held.request)}",
        f"{gb(needed - held.usable)} more than the {gb(held.usable)} that {gpus} x {setup.machine.gpu.name} leave",
        f"{enough} GPUs at least", f"{gb(needed / gpus)} -> {gb(needed / enough)} a GPU",
        needed / gpus, needed / enough)


def pages(setup: Setup, page: int) -> Finding:
    """A request's last page is on average half empty."""
    held, least = setup.memory, min(page, PAGE)
    before, after = (setup.batch * (held.request + (size - 1) / 2 * held.token) for size in (page, least))
    waste = before - setup.batch * held.request
    return Finding(
        "page", "memory", f"pages of {page:,} tokens, requests of {setup.context:,}",
        f"{waste / before:.1%} of KV memory is the empty half of last pages, {gb(waste)}", f"pages of {least} tokens",
        f"{gb(before)} -> {gb(after)}", before, after)


# ------------------------------------------------------------------------------------------------------- decode


def group(setup: Setup) -> Finding | None:
    """Half the KV heads."""
    seen = _largest(setup, lambda mixer: isinstance(mixer, Attention) and mixer.KH % 2 == 0)
    if not isinstance(seen, Attention):
        return None
    change = setup.remade(lambda mixer, _: replace(mixer, KH=mixer.KH // 2)
                          if isinstance(mixer, Attention) and mixer.KH % 2 == 0 else mixer)
    part = next(each for each in setup.decode() if each.name == f"attention, {seen.kind}")
    prompts = change.prompts / setup.prompts - 1
    return _decode(
        "group", setup, change.step,
        f"G {seen.G} (HQ {seen.HQ}, KH {seen.KH}): {part.intensity:.3g} FLOP/B, where "
        f"{setup.machine.ridge(part.fp8):.0f} would fill the tensor cores",
        f"{ms(seconds(setup.decode(), 'attention'))} of {ms(setup.step)} read KV",
        f"G {2 * seen.G}, KH {seen.KH // 2}, as many query heads",
        f"KV {gb(setup.memory.request)} -> {gb(change.memory.request)} a request; prompts {prompts:+.1%}")


def kv_format(setup: Setup) -> Finding | None:
    """The next smaller format."""
    smaller = {"bf16": "fp8" if setup.machine.gpu.fp8_flops else "int8", "fp8": "int4", "int8": "int4"}
    to = smaller.get(setup.formats.kv)
    if to is None:
        return None
    change = setup.changed(formats=replace(setup.formats, kv=to))
    return _decode("KV format", setup, change.step, f"KV in {setup.formats.kv}", _kv_time(setup), f"KV in {to}",
                   _room(setup, change))


def window(setup: Setup) -> Finding | None:
    """A hybrid of full and windowed layers, where all are full."""
    mixers = setup.model.mixers()
    if len(mixers) > 1 or not all(isinstance(each, Attention) and not each.window for each in mixers):
        return None
    change = setup.remade(lambda mixer, index: replace(mixer, window=WINDOW)
                          if isinstance(mixer, Attention) and (index + 1) % FULL_OF else mixer)
    return _decode("hybrid layers", setup, change.step, f"all {len(setup.model.layers)} layers attend to everything",
                   _kv_time(setup), f"a window of {WINDOW:,} in five of six layers", _room(setup, change))


def latent(setup: Setup) -> Finding | None:
    """Latents of DeepSeek's size in place of K and V."""
    if not all(isinstance(each, Attention) for each in setup.model.mixers()):
        return None
    change = setup.remade(lambda mixer, _: Latent(mixer.HQ, RANK, None, mixer.D, ROPE, mixer.DV)
                          if isinstance(mixer, Attention) and mixer.window is None else mixer)
    return _decode("latents", setup, change.step,
                   f"{setup.memory.token / 1e3:,.4g} KB of KV a token", _kv_time(setup),
                   f"MLA of {RANK} + {ROPE}: {change.memory.token / 1e3:,.4g} KB", _room(setup, change))


def drafts(setup: Setup) -> Finding | None:
    """Several query tokens a step, from a draft."""
    queries = 1 + DRAFTS
    if setup.context <= queries:
        return None
    kept, step = sum(ACCEPTED**i for i in range(queries)), seconds(setup.decode(queries))
    return _decode("drafts", setup, step / kept, "one query token a request and step",
                   f"each step reads all KV and weights in {ms(setup.step)}", f"{DRAFTS} drafts checked a step",
                   f"steps of {ms(step)} that keep {kept:.2f} tokens where {ACCEPTED:.0%} of the drafts are right; it "
                   f"pays from {step / setup.step:.2f}; making drafts is not counted")


def short(setup: Setup) -> Finding | None:
    """Attention is a small part: what rules, and what makes that cheaper."""
    parts = setup.decode()
    share = seconds(parts, "attention") / setup.step
    if share >= SHORT:
        return None
    rules = max((each for each in parts if each.kind != "attention"), key=lambda each: each.seconds)
    gpu = setup.machine.gpu
    if rules.limit == "memory" and setup.formats.weights == "bf16" and gpu.fp8_flops:
        change, after = "weights in fp8", setup.changed(formats=replace(setup.formats, weights="fp8")).step
    else:
        change, after = f"a batch of {2 * setup.batch:,}", setup.changed(batch=2 * setup.batch).step / 2
    return _decode("short context", setup, after,
                   f"attention has {share:.0%} of a step at {setup.context:,} tokens{_half(setup)}",
                   f"{rules.name}: {ms(rules.seconds)} of {ms(setup.step)}, bound by {rules.limit}", change,
                   f"{ms(setup.step / setup.batch)} -> {ms(after / setup.batch)} a token of the batch")


def waves(setup: Setup) -> Finding | None:
    """Equal splits by FlashDecoding's rule, against equal tiles for every worker."""
    mixer = _largest(setup, lambda each: not isinstance(each, State))
    if mixer is None or isinstance(mixer, State):
        return None
    found = tiles(mixer, setup.batch, setup.context, setup.machine.gpu, setup.machine.gpus).schedules
    if not found:
        return None
    stream, split = found
    part = next(each for each in setup.decode() if each.name == f"attention, {mixer.kind}")
    longer = part.seconds * (split.makespan / stream.makespan - 1)
    return Finding(
        "waves", "decode",
        f"FlashDecoding's rule makes {split.items:,} pieces ({split.splits} a head) for {setup.machine.gpu.workers} "
        f"workers: waves {split.waves:,}, the last {split.last:.0%} full",
        f"{1 - split.fill:.0%} of the workers' time is idle, {ms(longer)} a step", "equal tiles a worker (stream_k)",
        f"{ms(setup.step + longer)} -> {ms(setup.step)} a step", setup.step + longer, setup.step)


def tensor_parallel(setup: Setup) -> Finding | None:
    """TP over all GPUs where there are fewer KV heads, against the fastest other plan of the same batch."""
    machine = setup.machine
    full = Plan(tp=machine.gpus, ffn_tp=machine.gpus)
    every = list(plans(setup.model, machine.gpu, machine.gpus))
    if full not in every:
        return None

    def planner(plan: Plan) -> Planner:
        return Planner(setup.model, machine.gpu, plan, setup.formats, setup.context)

    before = planner(full).step(setup.batch)
    others = [step for step in (planner(plan).step(setup.batch) for plan in every) if step.fits and step.copies == 1]
    if before.copies == 1 or not others:
        return None
    best = min(others, key=lambda step: step.seconds)
    return Finding(
        "TP > KH", "decode", f"TP {machine.gpus}: each KV head is on {before.copies:.3g} GPUs",
        f"{gb(before.copied)} hold copies; reading them takes {ms(before.copied_seconds)} of {ms(before.seconds)}",
        best.plan.name, f"{ms(before.seconds)} -> {ms(best.seconds)} a step, exchanges included; "
        f"KV {gb(before.kv)} -> {gb(best.kv)} a GPU", before.seconds, best.seconds)


# ------------------------------------------------------------------------------------------------------ prefill


def head_size(setup: Setup) -> Finding | None:
    """Heads of 128, as many numbers in all."""
    seen = _largest(setup, lambda each: isinstance(each, Attention) and _wider(each) is not None)
    wide = _wider(seen) if isinstance(seen, Attention) else None
    if not isinstance(seen, Attention) or wide is None:
        return None
    change = setup.remade(lambda mixer, _: (_wider(mixer) or mixer) if isinstance(mixer, Attention) else mixer)
    exponentials = sum(each.layers * each.exponentials for each in setup.prefill()) / (
        setup.machine.gpus * setup.machine.gpu.exps)
    padded = padded_head(seen.D)
    return Finding(
        "head size", "prefill", f"D {seen.D} of tiles of {tiles(seen, 1, setup.context, setup.machine.gpu).columns[1]}"
        + (f", computed as {padded}" if padded != seen.D else ""),
        f"{ms(exponentials)} of exponentials in {ms(setup.prompts)}", f"D 128, HQ {wide.HQ}, KH {wide.KH}: "
        "as many bytes and weights", f"{ms(setup.prompts)} -> {ms(change.prompts)} of prompts; a step "
        f"{ms(setup.step)} -> {ms(change.step)}", setup.prompts, change.prompts)


def paged_prompts(setup: Setup, page: int) -> Finding | None:
    mixer = _largest(setup, lambda each: isinstance(each, Attention))
    gpu = setup.machine.gpu
    if not isinstance(mixer, Attention) or page >= gpu.tile(mixer.D) or gpu.capability != (9, 0):
        return None
    attention = seconds(setup.prefill(), "attention")
    before = setup.prompts + attention * (PAGED_PROMPT - 1)
    return Finding(
        "page and tile", "prefill", f"a tile of {gpu.tile(mixer.D)} tokens is {-(-gpu.tile(mixer.D) // page)} pages",
        f"attention of prompts in pages takes {PAGED_PROMPT:.2f} x as long (measured): "
        f"{ms(attention * (PAGED_PROMPT - 1))}", "contiguous K and V for prompts",
        f"{ms(before)} -> {ms(setup.prompts)} of prompts", before, setup.prompts)


_RULES: dict[str, tuple[Callable[[Setup], Finding | None], ...]] = {
    "decode": (group, kv_format, window, latent, drafts, short, waves, tensor_parallel),
    "prefill": (head_size,),
}


# ------------------------------------------------------------------------------------------------------ helpers


def _decode(rule: str, setup: Setup, after: float, seen: str, cost: str, change: str, gain: str) -> Finding:
    gained = f"{ms(setup.step)} -> {ms(after)} for as many tokens; {gain}"
    return Finding(rule, "decode", seen, cost, change, gained, setup.step, after)


def _largest(setup: Setup, wanted: Callable[[Mixer], bool]) -> Mixer | None:
    """The mixer of a kind that most KV is read for."""
    parts = {each.name: each for each in setup.decode()}
    found = [each for each in setup.model.mixers() if wanted(each)]

    def read(mixer: Mixer) -> float:
        part: Component = parts[f"attention, {mixer.kind}"]
        return part.layers * part.kv

    return max(found, key=read, default=None)


def _wider(mixer: Attention) -> Attention | None:
    """The same numbers a token in heads of 128, where they come out even."""
    if mixer.D != mixer.DV or mixer.D >= 128 or mixer.HQ * mixer.D % 128 or mixer.KH * mixer.D % 128:
        return None
    HQ, KH = mixer.HQ * mixer.D // 128, mixer.KH * mixer.D // 128
    return replace(mixer, HQ=HQ, KH=KH, D=128, DV=128) if HQ % KH == 0 else None


def _half(setup: Setup) -> str:
    """From how many tokens attention would have half of a step."""
    low, high = setup.context, 1 << 24
    def half(context: int) -> bool:
        parts = setup.changed(context=context).decode()
        return 2 * seconds(parts, "attention") >= seconds(parts)
    if not half(high):
        return ""
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (low, middle) if half(middle) else (middle, high)
    return f", half from about {figure(high / 1000)} thousand"


def _kv_time(setup: Setup) -> str:
    read = sum(each.layers * each.kv for each in setup.decode() if each.kind == "attention")
    return f"{gb(read)} of KV a step, {ms(seconds(setup.decode(), 'attention'))} of {ms(setup.step)}"


def _room(before: Setup, after: Setup) -> str:
    return (f"KV {gb(before.memory.request)} -> {gb(after.memory.request)} a request, room for "
            f"{before.memory.requests:,} -> {after.memory.requests:,}")
