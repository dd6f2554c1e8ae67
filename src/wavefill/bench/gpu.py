"""The kernel suite on a GPU: wavefill, its peers and the read floor, by turns in one run."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from wavefill.bench import gpu_peer_setup, gpu_peers, gpu_timing, verify
from wavefill.bench.gpu_peers import PEERS, GpuPeer
from wavefill.bench.gpu_read import Reader
from wavefill.bench.gpu_timing import Timer, reason
from wavefill.bench.inputs import DTYPES, Inputs, build
from wavefill.bench.results import READ, RowResult
from wavefill.bench.suites import Row
from wavefill.spec import BackendUnavailable, Fixed, ScheduleArg, complaint, invalid

#: The device of the inputs.
DEVICE = "cuda"
#: Schedules by the names of the table's columns.
SCHEDULES: dict[str, ScheduleArg] = {
    "auto": "auto", "stream_k": "stream_k", "fixed": "fixed", "invariant": "invariant",
    "flashdecoding": Fixed(rule="flashdecoding"), "unsplit": Fixed(splits=1),
}
#: Those that run unless others are named: an unsplit kernel takes a hundred times longer on a long context.
DEFAULT_SCHEDULES = ("auto", "stream_k", "fixed", "invariant", "flashdecoding")
#: Seconds of timing that a row takes, and the rows and seconds of a quick look.
ROW_SECONDS, QUICK_SECONDS = 2.0, 0.4
QUICK_ROWS = ("llama8b-b1-1k", "llama8b-b1-8k", "llama70b-tp8-b1-128k", "llama8b-b1-64k", "llama8b-b16-8k",
              "llama8b-ragged-two-long")
#: Requests of a row whose results are checked; every head of each.
CHECKED_REQUESTS = 32

Report = Callable[[str, float], None]


@dataclass(frozen=True)
class GpuResult(RowResult):
    """A row's outcome with what only a GPU has.

    host_s:  variant -> seconds of host time of one call without a graph.
    plan_s:  peer -> seconds of host time of its step before the kernels, which `times` leaves out.
    joules:  variant -> energy of one call, where it was asked for.
    apart:   variants that a kernel between the calls kept apart; its own time was taken off.
    copies, calls: copies of the KV that were rotated through, and calls of a graph.
    read_config: the fastest kernel of the read floor, and read_s the time of each.
    checked: requests whose results were compared with the oracle.
    """

    host_s: dict[str, float] = field(default_factory=dict)
    plan_s: dict[str, float] = field(default_factory=dict)
    joules: dict[str, float] = field(default_factory=dict)
    apart: tuple[str, ...] = ()
    copies: int = 0
    calls: int = 0
    read_config: str | None = None
    read_s: dict[str, float] = field(default_factory=dict)
    checked: int = 0

    def to_dict(self) -> dict[str, Any]:
        def us(values: Mapping[str, float]) -> dict[str, float]:
            return {name: value * 1e6 for name, value in values.items()}

        return {**super().to_dict(), "host_us": us(self.host_s), "plan_us": us(self.plan_s), "joules": self.joules,
                "kept_apart_by_a_kernel": list(self.apart), "copies": self.copies, "calls_of_a_graph": self.calls,
                "read_config": self.read_config, "read_us": us(self.read_s), "requests_checked": self.checked}


def require() -> None:
    """Raises BackendUnavailable where there is no GPU that torch can use."""
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        raise BackendUnavailable(complaint(
            "--device", "cuda needs a GPU that PyTorch can use", "no GPU" if built else "a PyTorch built without CUDA",
            "Run it on a machine with one, or leave the option out to measure this processor." if built else
            "Install PyTorch for CUDA (https://pytorch.org), or leave the option out to measure this processor."))


def choose_peers(text: str | None) -> tuple[GpuPeer, ...]:
    """Peers by names with commas between; None for those that run by default, "none" for none."""
    if text is None:
        return tuple(peer for peer in PEERS if peer.default)
    by_name = {peer.name: peer for peer in PEERS}
    names = [] if text == "none" else list(by_name) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in by_name:
            raise invalid("--peers", f"takes all, none, or some of {', '.join(by_name)}", repr(name),
                          "Use these names.")
    return tuple(by_name[name] for name in dict.fromkeys(names))


def run(
    rows: Iterable[Row],
    *,
    dtype: str,
    page_size: int,
    order: str = "HND",
    schedules: Sequence[str] = DEFAULT_SCHEDULES,
    peers: Sequence[GpuPeer] = (),
    seconds: float = ROW_SECONDS,
    energy: bool = False,
    report: Report = lambda description, share: None,
    done: Callable[[GpuResult], None] = lambda result: None,
) -> tuple[list[GpuResult], list[str]]:
    """Measure each row on paged KV. The first of `schedules` is the one called "wavefill".

    done: called with each row's result as it comes, for runs that may be cut short.

    Returns the results, and notes on what did not work for the run as a whole.
    """
    require()
    rows = tuple(rows)
    meter = gpu_timing.energy_meter() if energy else "not asked for"
    notes = [f"no energy: {meter}"] if energy and isinstance(meter, str) else []
    report("compiling peers", 0.0)
    notes += gpu_peer_setup.precompile(rows, [peer.name for peer in peers], page_size, DTYPES[dtype])
    results = []
    for i, row in enumerate(rows):
        report(row.name, i / len(rows))
        try:
            result = _row(row, dtype, page_size, order, schedules, peers, seconds, meter)
        except Exception as error:  # the rows before it are worth their time all the same
            result = GpuResult(row, dtype, row.kv_bytes(dtype), {}, {}, {"wavefill": reason(error)})
        results.append(result)
        done(result)
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception as error:  # nothing runs on the GPU any more in this process
            notes.append(f"the run ended after {row.name}: {reason(error)}")
            break
    return results, notes


def _row(row: Row, dtype: str, page_size: int, order: str, schedules: Sequence[str], peers: Sequence[GpuPeer],
         seconds: float, meter: Callable[[], float] | str) -> GpuResult:
    kv_bytes = row.kv_bytes(dtype)
    absent = {peer.name: why for peer in peers if (why := peer.gap(row)) is not None}
    peers = [peer for peer in peers if peer.name not in absent]
    contiguous = any(not peer.paged for peer in peers)
    count = gpu_timing.rotation(kv_bytes, torch.cuda.mem_get_info()[0], kv_bytes * (2 if contiguous else 1))
    inputs = build(row, dtype, "paged", page_size, order=order, peers=contiguous, device=DEVICE, count=count)
    calls = gpu_timing.calls_of(kv_bytes, count)
    judge, timer = _Judge(inputs), Timer(count, calls)
    variants = _wavefill(inputs, schedules, judge, absent)
    plan_s: dict[str, float] = {}
    for peer in peers:
        try:
            prepared = peer.prepare(inputs)
            if (why := judge.of_peer(peer.name, prepared.call, count)) is not None:
                absent[peer.name] = why
                continue
        except Exception as error:  # a peer that breaks must not take the run with it; its reason is shown
            absent[peer.name] = reason(error)
            continue
        variants[peer.name] = prepared.call
        if prepared.plan_s is not None:
            plan_s[peer.name] = prepared.plan_s
    read_config, read_s = _read(inputs, timer, variants, absent)
    try:
        timer.add(variants)
        measured = timer.measure(seconds)
        paged = [name for name in variants if name == "wavefill" or name in gpu_peers.PAGED]
        host_s = {name: gpu_timing.host_seconds(variants[name], count, torch.cuda.synchronize) for name in paged
                  if name in measured.times}
        joules = {} if isinstance(meter, str) else {
            name: gpu_timing.joules(timer.graphs[name], meter) for name in (*paged, READ) if name in timer.graphs}
    finally:
        timer.close()
    return GpuResult(row, dtype, kv_bytes, measured.times, judge.errors, {**absent, **measured.failed}, host_s, plan_s,
                     joules, measured.apart, count, calls, read_config, read_s, len(judge.requests))


class _Judge:
    """Compares results with the oracle of a sample of requests, all heads of each."""

    def __init__(self, inputs: Inputs) -> None:
        self.requests = verify.sample(inputs.row.lens, CHECKED_REQUESTS)
        self.errors: dict[str, float] = {}
        self._inputs, self._exact = inputs, verify.oracle(inputs, self.requests)

    def of_peer(self, name: str, call: Callable[[int], Tensor], count: int) -> str | None:
        """None if a peer's results are right on the first and the last copy, or what is wrong."""
        return self._verdict(name, call, count, self._exact,
                             verify.peer_bound(self._exact, self._inputs.q.dtype))

    def of_wavefill(self, name: str, call: Callable[[int], Tensor], count: int,
                    inputs: Inputs | None = None) -> str | None:
        """The same for wavefill; with `inputs`, against an oracle of their own."""
        exact = self._exact if inputs is None else verify.oracle(inputs, self.requests)
        return self._verdict(name, call, count, exact, verify.bound(exact, self._inputs.q.dtype, None))

    def _verdict(self, name: str, call: Callable[[int], Tensor], count: int, exact: Tensor, most: float) -> str | None:
        worst = 0.0
        for copy in (0, count - 1):
            result = call(copy)
            worst = max(worst, verify.error(result[self.requests], exact))
            if not bool(torch.isfinite(result).all()):
                worst = float("inf")
            result.fill_(float("nan"))  # it is the variant's own output: what the next call leaves out will show
        self.errors[name] = worst
        return None if worst <= most else f"wrong result: error {worst:.2g}, at most {most:.2g} is rounding"


def _wavefill(inputs: Inputs, schedules: Sequence[str], judge: _Judge,
              absent: dict[str, str]) -> dict[str, Callable[[int], object]]:
    """wavefill's variants that are right, and the reasons of the others in `absent`."""
    variants: dict[str, Callable[[int], object]] = {}
    wanted: list[tuple[str, Inputs, str]] = [
        ("wavefill" if i == 0 else f"wavefill:{name}", inputs, name) for i, name in enumerate(schedules)]
    if inputs.even is not None:
        table, lens = inputs.even
        wanted.append(("wavefill:even", replace(inputs, block_table=table, lens=lens), schedules[0]))
    for name, made, schedule in wanted:
        call = partial(_attend, made, torch.full_like(made.q, float("nan")), SCHEDULES[schedule])
        try:
            why = judge.of_wavefill(name, call, len(made.copies), None if made is inputs else made)
        except Exception as error:  # a schedule that fails must not hide the times of the others
            why = reason(error)
        if why is None:
            variants[name] = call
        else:
            absent[name] = why
    return variants


def _attend(inputs: Inputs, out: Tensor, schedule: ScheduleArg, copy: int) -> Tensor:
    from wavefill import decode_attention

    kv = inputs.copies[copy]
    decode_attention(inputs.q, kv.k, kv.v, inputs.lens, inputs.block_table, schedule=schedule, out=out)
    return out


def _read(inputs: Inputs, timer: Timer, variants: dict[str, Callable[[int], object]],
          absent: dict[str, str]) -> tuple[str | None, dict[str, float]]:
    """Choose the read floor's kernel and add it to the variants."""
    try:
        reader = Reader(inputs)
        kernels = reader.variants()
        best, times = timer.best(kernels)
        why = reader.check(best)
    except Exception as error:
        absent[READ] = reason(error)
        return None, {}
    if why is None:
        variants[READ] = kernels[best]
    else:
        absent[READ] = why
    return best, times


def facts() -> dict[str, Any]:
    """The GPU and the software that belongs to it."""
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    packages: dict[str, str | None] = {}
    for package in ("triton", "flashinfer-python", "vllm", "nvidia-ml-py"):
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = None
    return {
        "gpu": properties.name, "sms": properties.multi_processor_count, "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "compute_capability": f"{properties.major}.{properties.minor}", "driver": _driver(),
        "cuda": torch.version.cuda, "gpu_packages": packages,
    }


def _driver() -> str | None:
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                              capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None
