"""Whole models in `generate()`, on a GPU or a CPU: each case one prompt and some steps, by several ways."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from wavefill.bench.decoding import Clock, StepClock, cache_of, greedy
from wavefill.bench.e2e import head_dim
from wavefill.bench.e2e_gpu_cases import DISCARDED, IN_PLACE, Case, Size, size_of, skipped

if TYPE_CHECKING:
    from torch import Tensor

#: Bytes of the read floor: far more than an L2 cache holds.
FLOOR_BYTES = 2_000_000_000
#: Steps that a profile covers, and kernels of it that are kept.
PROFILED, KERNELS_KEPT = 4, 12
#: Kernels of wavefill's attention and its cache by name, and what the names of others' attention contain.
OWN_KERNELS = frozenset(("attend", "decode", "many", "join", "join_pieces", "join_states", "merge", "prefix", "expand",
                         "offsets", "write", "enter", "leave"))
OTHERS_KERNELS = ("flash", "fmha", "attention", "softmax")
#: What warms a way up: tokens of all prompts, by device (the kernels of long prompts too, on a GPU), the least of each,
#: and those decoded after them.
WARM_PROMPTS, LEAST_WARM, WARM_NEW = {"cuda": 4096, "cpu": 48}, 48, 3

Report = Callable[[str, float], None]


@dataclass(frozen=True)
class Profile:
    """A step on the GPU: seconds in which it had a kernel, those of attention, and the longest by name.

    step: seconds of a step outside of the profiler.
    """

    step: float
    busy: float
    attention: float
    kernels: tuple[tuple[str, float], ...]

    def to_dict(self) -> dict[str, Any]:
        return {"kernels_ms": self.busy * 1e3, "attention_ms": self.attention * 1e3,
                "attention_share_of_kernels": self.attention / self.busy if self.busy else None,
                "attention_share_of_step": self.attention / self.step,
                "longest": [{"name": name, "ms": seconds * 1e3} for name, seconds in self.kernels]}


@dataclass(frozen=True)
class Outcome:
    """One way through one case; times in seconds.

    way:       as in `WAYS`, but "eager" for the own attention of a family without sdpa.
    first:     to the first token, prompt included. steps: of each later token.
    step_bytes: weights and KV that a step in the middle of the counted ones must read.
    bandwidth: bytes a second of the run's read floor, None where there is none.
    joules:    a new token. peak: bytes of GPU memory.
    chunk:     tokens of a row that the prompt was read in at once, None for all.
    absent:    why there are no times. notes: what besides did not work.
    """

    case: Case
    way: str
    first: float = 0.0
    steps: tuple[float, ...] = ()
    step_bytes: float = 0.0
    bandwidth: float | None = None
    joules: float | None = None
    peak: int | None = None
    chunk: int | None = None
    profile: Profile | None = None
    absent: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def counted(self) -> tuple[float, ...]:
        """The steps after those in which kernels and graphs are made."""
        return self.steps[DISCARDED:]

    @property
    def p50(self) -> float:
        return statistics.median(self.counted)

    @property
    def p99(self) -> float:
        """The nearest rank: the longest of fewer than 100 steps."""
        return sorted(self.counted)[math.ceil(0.99 * len(self.counted)) - 1]

    @property
    def tokens_per_s(self) -> float:
        return self.case.batch * len(self.counted) / sum(self.counted)

    @property
    def rate(self) -> float:
        """Bytes a second that the median step amounts to."""
        return self.step_bytes / self.p50

    @property
    def roofline(self) -> float | None:
        """The share that the time of only reading these bytes has in the median step."""
        return self.rate / self.bandwidth if self.bandwidth else None

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"context": self.case.context, "prompt": self.case.prompt, "batch": self.case.batch,
                                 "request": self.case.request, "way": self.way}
        if self.absent:
            return found | {"absent": self.absent}
        return found | {
            "ttft_s": self.first, "itl_ms": {"p50": self.p50 * 1e3, "p99": self.p99 * 1e3},
            "tokens_per_s": self.tokens_per_s, "step_bytes": self.step_bytes, "gbs": self.rate / 1e9,
            "roofline": self.roofline, "joules_per_token": self.joules, "peak_memory_bytes": self.peak,
            "prompt_chunk": self.chunk, "profile": self.profile and self.profile.to_dict(), "notes": list(self.notes),
            "steps_ms": [step * 1e3 for step in self.steps], "discarded_steps": DISCARDED}


@dataclass(frozen=True)
class Request:
    """The time of a whole request, its prompt and all of its output.

    composed: whether the steps between those measured, at its beginning and at its end, were taken to grow evenly.
    """

    prompt: int
    output: int
    batch: int
    way: str
    seconds: float
    composed: bool

    def to_dict(self) -> dict[str, Any]:
        return vars(self).copy()


def read_floor(model: Any) -> float | str:
    """Bytes a second of the fastest kernel that only reads pages of the model's KV heads, or why there is none."""
    from wavefill.bench import gpu_timing
    from wavefill.bench.gpu_read import Reader
    from wavefill.bench.inputs import build
    from wavefill.bench.suites import Row, load

    config = model.config.get_text_config()
    KH, D = int(config.num_key_value_heads), head_dim(config)
    row = Row("read floor", "L", int(config.num_attention_heads), KH, D, (FLOOR_BYTES // (8 * KH * 2 * D * 2),) * 8,
              cpu=False)
    timer = gpu_timing.Timer(1, 2)
    try:
        reader = Reader(build(row, "bfloat16", "paged", load().page_size, peers=False, device="cuda", count=1))
        best, times = timer.best(reader.variants())
        wrong = reader.check(best)
        return wrong or row.kv_bytes("bfloat16") / times[best]
    except Exception as error:  # the times are worth their table without a share of it
        return gpu_timing.reason(error)
    finally:
        timer.close()


class Bench:
    """The measurements of one model; `run` makes them, one after the other.

    energy, profile: on a GPU only.
    stream:     whether a streamer takes each token, and notes its time; without it, see `StepClock`.
    limit:      seconds that a case may be expected to take; it ends after twice as many.
    stop_after: seconds after which none is begun.
    """

    def __init__(self, model: Any, *, energy: bool = False, profile: bool = False, stream: bool = False,
                 limit: float = 20.0, stop_after: float = math.inf, seed: int = 0) -> None:
        self.model, self.size = model, size_of(model)
        self.device: str = model.device.type
        self.notes: list[str] = []
        self._profile, self._stream, self._seed = profile, stream, seed
        self._limit, self._end = limit, time.perf_counter() + stop_after
        self._warm: set[tuple[str, int]] = set()
        self._meter: Callable[[], float] | None = None
        self.bandwidth: float | None = None
        self._find_bandwidth()
        if energy:
            self._find_meter()

    @property
    def clock(self) -> str:
        """What notes the times, in words."""
        return "streamer" if self._stream else "generate's own waits"

    def _find_bandwidth(self) -> None:
        if self.device == "cuda":
            found = read_floor(self.model)
            if isinstance(found, str):
                self.notes.append(f"no read floor: {found}")
            else:
                self.bandwidth = found
        else:
            from wavefill.bench.timing import ReadBandwidth

            self.bandwidth = ReadBandwidth().measure()

    def _find_meter(self) -> None:
        from wavefill.bench.gpu_timing import energy_meter

        meter = energy_meter()
        if isinstance(meter, str):
            self.notes.append(f"no energy: {meter}")
        else:
            self._meter = meter

    def run(self, cases: Sequence[Case], ways: Sequence[str], report: Report = lambda description, share: None,
            done: Callable[[Outcome], None] = lambda outcome: None) -> list[Outcome]:
        """Measure every case by every way; `done` gets each outcome as it comes."""
        outcomes: list[Outcome] = []
        for i, (case, way) in enumerate((case, way) for case in cases for way in ways):
            report(f"{case}, {way}", i / (len(cases) * len(ways)))
            outcomes.append(self._outcome(case, way))
            done(outcomes[-1])
            try:
                self._clear()
            except Exception as error:  # nothing runs on the GPU any more in this process
                self.notes.append(f"the run ended after {case}, {way}: {str(error)[:200]}")
                break
        return outcomes

    def _outcome(self, case: Case, way: str) -> Outcome:
        from wavefill.bench.gpu_timing import reason

        name = self.model.config._attn_implementation if way == "sdpa" else way
        why = self._skipped(case, way)
        if why is not None:
            return Outcome(case, name, absent=why)
        try:
            with _attached(self.model, way):
                return self._measure(case, way, name)
        except Exception as error:  # a way that fails must not take the others with it
            return Outcome(case, name, absent=reason(error))

    def _skipped(self, case: Case, way: str) -> str | None:
        if time.perf_counter() > self._end:
            return "the time of --stop-after was over"
        if way == "flash" and (self.device != "cuda" or find_spec("flash_attn") is None):
            return "flash_attn is not installed" if self.device == "cuda" else "flash_attn needs a GPU"
        if way == "static" and self.device == "cuda" and find_spec("triton") is None:
            return "a static cache is compiled, which needs Triton"
        fallback = 3e12 if self.device == "cuda" else 10e9
        return skipped(self.size, case, way, self.device, memory=self._memory(), limit=self._limit,
                       bandwidth=self.bandwidth or fallback)

    def _memory(self) -> int | None:
        """Bytes that this process may have on the GPU."""
        if self.device != "cuda":
            return None
        import torch

        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()

    def _measure(self, case: Case, way: str, name: str) -> Outcome:
        import torch

        generator = torch.Generator().manual_seed(self._seed)
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        ids = torch.randint(vocabulary, (case.batch, case.prompt), generator=generator).to(self.model.device)
        if (way, case.batch) not in self._warm and way != "static":  # static compiles for each length
            short = max(WARM_PROMPTS[self.device] // case.batch, LEAST_WARM)
            self._generate(ids[:, :short], WARM_NEW, way, self._clock(lambda count: None))
            self._warm.add((way, case.batch))
        self._clear()
        memory = self._memory()
        chunk = None if memory is None else self.size.chunk(case, memory)
        chunk = None if chunk == case.prompt else chunk
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        energy: list[float] = []

        def on_count(count: int) -> None:
            if self._meter is not None and count == DISCARDED:  # one step early: what this takes counts nowhere
                energy.append(self._meter())

        clock = self._clock(on_count)
        result = self._generate(ids, case.new, way, clock, chunk=chunk, max_time=2 * self._limit)
        if self._meter is not None:
            energy.append(self._meter())
        steps = tuple(clock.seconds[1:])
        if len(steps) <= DISCARDED:
            return Outcome(case, name, absent=f"only {len(steps)} steps in {2 * self._limit:g} s")
        notes = [] if len(steps) == case.new - 1 else [
            f"{case}, {name}: stopped after {len(steps)} of {case.new - 1} steps"]
        middle = case.prompt + (DISCARDED + len(steps)) / 2 + 1
        counted = len(steps) - DISCARDED
        joules = (energy[1] - energy[0]) / ((counted + 1) * case.batch) if len(energy) == 2 else None
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else None
        profile = None
        if self._profile and way != "static":  # whose cache is full
            try:
                profile = self._profile_of(result, statistics.median(steps[DISCARDED:]), way)
            except Exception as error:  # the times stand without it
                notes.append(f"{case}, {name}: no profile: {type(error).__name__}: {str(error)[:120]}")
        return Outcome(case, name, clock.seconds[0], steps, self.size.read_by_step(middle, case.batch), self.bandwidth,
                       joules, peak, chunk, profile, notes=tuple(notes))

    def _clock(self, on_count: Callable[[int], None]) -> Clock | StepClock:
        """What notes the times of one `generate`; on_count is called with the number of tokens as they come."""
        if not self._stream:
            return StepClock(on_count)
        clock = Clock(lambda token: on_count(len(clock.seconds)))
        return clock

    def _generate(self, ids: Tensor, new: int, way: str, clock: Clock | StepClock | None = None, *,
                  chunk: int | None = None, max_time: float | None = None, cache: Any = None) -> Any:
        streamer = None if isinstance(clock, StepClock) else clock
        with clock.watch(self.model, ids.shape[1]) if isinstance(clock, StepClock) else nullcontext():
            return greedy(self.model, ids, new, streamer, cache, max_time=max_time, prefill_chunk_size=chunk,
                          cache_implementation="static" if way == "static" else None)

    def _profile_of(self, result: Any, step: float, way: str) -> Profile:
        """Some more steps on the cache that `generate` returned, under torch.profiler."""
        from torch.profiler import ProfilerActivity, profile

        cache = cache_of(result)
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            self._generate(result.sequences, PROFILED, way, cache=cache)
        times: dict[str, float] = {}
        spans: list[tuple[float, float]] = []
        for event in trace.events():
            if event.device_type.name == "CUDA":
                times[event.name] = times.get(event.name, 0.0) + event.self_device_time_total * 1e-6 / PROFILED
                spans.append((event.time_range.start * 1e-6, event.time_range.end * 1e-6))
        return profile_of(times, step, covered(spans) / PROFILED)

    def _clear(self) -> None:
        gc.collect()
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def profile_of(times: dict[str, float], step: float, busy: float) -> Profile:
    """Sums up kernels, seconds a step by name, `busy` of which the GPU had at least one."""
    longest = sorted(times.items(), key=lambda item: -item[1])[:KERNELS_KEPT]
    return Profile(step, busy, sum(t for name, t in times.items() if is_attention(name)),
                   tuple((name[:160], seconds) for name, seconds in longest))


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of what spans (begin, end) cover together: kernels begin before those before them have ended."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total


def is_attention(kernel: str) -> bool:
    """Whether a kernel's name is one of wavefill's attention and cache, or of somebody's attention."""
    return kernel in OWN_KERNELS or any(part in kernel.lower() for part in OTHERS_KERNELS)


@contextmanager
def _attached(model: Any, way: str) -> Iterator[None]:
    """Inside, the model decodes by `way`; afterwards it is as it was."""
    from wavefill.integrations.transformers import disable, enable

    turn_on: Any = enable
    before = model.config._attn_implementation
    try:
        if way in IN_PLACE:
            turn_on(model, **({"fuse": True} if way == "wavefill-fused" else {}))
        elif way == "flash":
            model.set_attn_implementation("flash_attention_2")
        yield
    finally:
        disable(model)
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before)


def whole_requests(outcomes: Sequence[Outcome]) -> list[Request]:
    """The time of each request whose beginning was measured, and its end where that is another case."""
    ends = {(o.way, o.case.batch, o.case.context): o for o in outcomes
            if o.case.request and not o.case.request[1] and not o.absent}
    found = []
    for outcome in outcomes:
        if outcome.absent or not outcome.case.request or not outcome.case.request[1]:
            continue
        prompt, output = outcome.case.request
        case, left = outcome.case, output - 1 - len(outcome.steps)
        seconds = outcome.first + sum(outcome.steps)
        if left > 0:
            end = ends.get((outcome.way, case.batch, prompt + output))
            if end is None or len(outcome.steps) <= DISCARDED:
                continue
            # Steps grow evenly with the context: those left lie between the last of one and the middle of the other.
            seconds += left * _between(outcome, end, case.context + left / 2)
        found.append(Request(prompt, output, case.batch, outcome.way, seconds, left > 0))
    return found


def _between(begin: Outcome, end: Outcome, context: float) -> float:
    """Seconds of a step at `context`, on the line through the medians of two cases."""
    a, b = (o.case.prompt + (DISCARDED + len(o.steps)) / 2 for o in (begin, end))
    if b <= a:
        return begin.p50
    return begin.p50 + (end.p50 - begin.p50) * (context - a) / (b - a)


def sizes(size: Size) -> dict[str, Any]:
    """Bytes of the model, for a report."""
    return {"weight_bytes": size.weights, "weight_bytes_a_step": size.always + size.experts * size.taken
            / max(size.there, 1), "kv_bytes_a_token": size.kv_token}
