"""How times are taken on a GPU: graphs of calls on rotating copies, variants by turns, medians.

A graph holds enough calls that its launch does not count, on copies that hold more than the L2 cache together, and
each call waits for the end of the one before it (see `gpu_graphs`). A time is that of the whole graph, between two
events, divided by its calls; nothing is taken off, but for calls that had to be kept apart by a kernel of their own.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from wavefill.bench import gpu_graphs
from wavefill.bench.timing import Samples, copies

#: Bytes that are read between two uses of the same copy: several times the L2 of every GPU.
ROTATED_BYTES = 300_000_000
#: Seconds that one replay should take: its launch then adds 0.2 % or less.
REPLAY_SECONDS = 0.7e-3
MOST_CALLS = 512
#: Rounds in which every variant's graph is replayed once, at least and at most.
MIN_ROUNDS, MAX_ROUNDS = 7, 100
#: The GPU waits before the first event, so that the graph is in its queue when the event fires: at least so many
#: seconds, and twice what the host took to launch the graph; in cycles of a clock that no GPU exceeds.
QUEUE_SECONDS, CLOCK = 50e-6, 2.2e9
#: Un-graphed calls in a row, few enough for the launch queue, and how often they are timed.
HOST_CALLS, HOST_BATCHES = 40, 7

Call = Callable[[int], object]

#: torch.cuda without its types, which lack some of what is called here.
cuda: Any = torch.cuda


def rotation(kv_bytes: int, free_bytes: int, per_copy: int) -> int:
    """Copies of a row's KV: at least 2, `ROTATED_BYTES` together, fewer where they would take half the free memory.

    per_copy: bytes that a copy takes, what the peers need for it included.
    """
    return max(1, min(max(2, copies(kv_bytes, ROTATED_BYTES)), int(free_bytes * 0.5) // max(per_copy, 1)))


def calls_of(kv_bytes: int, count: int, bandwidth: float = 4.5e12, start: float = 3e-6) -> int:
    """Calls of a graph: whole rotations of `count` copies that take `REPLAY_SECONDS`, going by the bytes read."""
    wanted = math.ceil(REPLAY_SECONDS / (kv_bytes / bandwidth + start))
    return max(1, min(-(-wanted // count), MOST_CALLS // count)) * count


@dataclass(frozen=True)
class Graph:
    """A captured sequence of calls.

    wait_cycles: cycles in which the host surely launches the graph.
    apart: seconds a call that the kernel between two calls takes; 0 where the graph's own edges keep calls apart.
    """

    graph: Any
    calls: int
    wait_cycles: int
    apart: float = 0.0


@dataclass(frozen=True)
class Measurement:
    """Times of some variants that were taken by turns.

    failed: variant -> why it was not captured or timed.
    apart:  variants whose calls were kept apart by a kernel, whose own time was taken off.
    """

    times: dict[str, Samples]
    failed: dict[str, str] = field(default_factory=dict)
    apart: tuple[str, ...] = ()


class Timer:
    """Captures, times and keeps graphs of one row; close it to give their memory back."""

    def __init__(self, count: int, calls: int) -> None:
        self._count, self._calls = count, calls
        self._stream = cuda.Stream()
        self._mark = torch.zeros(1, device="cuda")
        self._apart: float | None = None
        self.graphs: dict[str, Graph] = {}
        self.failed: dict[str, str] = {}

    def close(self) -> None:
        torch.cuda.synchronize()
        for kept in self.graphs.values():
            kept.graph.reset()
        self.graphs.clear()

    def add(self, variants: Mapping[str, Call]) -> None:
        """Capture each variant; one that raises is noted in `failed` and left out."""
        for name, call in variants.items():
            try:
                self.graphs[name] = self.capture(call)
            except Exception as error:
                self.failed[name] = reason(error)
                torch.cuda.synchronize()

    def capture(self, call: Call) -> Graph:
        """A graph of the calls, in rotation over the copies, warmed up."""
        self._stream.wait_stream(cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for i in range(min(2, self._count)):
                call(i)
        torch.cuda.synchronize()
        graph = self._record(call)
        if not self._kept_apart(graph):
            graph.reset()
            if self._apart is None:
                self._apart = self._time_of(self._ready(self._record(lambda copy: self._mark.add_(1)), 0.0))
            return self._ready(self._record(lambda copy: (call(copy), self._mark.add_(1))), self._apart)
        return self._ready(graph, 0.0)

    def _record(self, call: Call) -> Any:
        graph = cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(self._stream):  # torch.cuda.graph would empty torch's cache of memory each time
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for i in range(self._calls):
                    call(i % self._count)
            except Exception:
                with suppress(Exception):  # the capture is void, and the first error says why
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph

    def _kept_apart(self, graph: Any) -> bool:
        try:
            return gpu_graphs.serialize(int(graph.raw_cuda_graph()), self._calls)
        except (OSError, AttributeError, RuntimeError):
            return False

    def _ready(self, graph: Any, apart: float) -> Graph:
        """Instantiate a graph, run it, and see how long the host takes to launch it."""
        graph.instantiate()
        launch = 0.0
        for _ in range(2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            graph.replay()
            launch = time.perf_counter() - began
        torch.cuda.synchronize()
        return Graph(graph, self._calls, int((QUEUE_SECONDS + 2 * launch) * CLOCK), apart)

    @staticmethod
    def _time_of(kept: Graph) -> float:
        """Seconds a call of a graph, as a median of a few replays."""
        taken = []
        for _ in range(5):
            events = _replay(kept)
            torch.cuda.synchronize()
            taken.append(_seconds(events) / kept.calls - kept.apart)
        return statistics.median(taken)

    def measure(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> Measurement:
        """Replay every graph by turns until `seconds` are over, within `MIN_ROUNDS` and `MAX_ROUNDS`."""
        taken: dict[str, list[float]] = {name: [] for name in self.graphs}
        began = clock()
        for done in range(MAX_ROUNDS):
            if done >= MIN_ROUNDS and clock() - began > seconds:
                break
            events = {name: _replay(kept) for name, kept in self.graphs.items()}
            torch.cuda.synchronize()
            for name, pair in events.items():
                kept = self.graphs[name]
                taken[name].append(_seconds(pair) / kept.calls - kept.apart)
        return Measurement({name: Samples(tuple(values)) for name, values in taken.items()}, dict(self.failed),
                           tuple(name for name, kept in self.graphs.items() if kept.apart))

    def best(self, variants: Mapping[str, Call]) -> tuple[str, dict[str, float]]:
        """The fastest of some variants, and the median seconds of each; none of their graphs is kept."""
        found: dict[str, float] = {}
        failed: dict[str, str] = {}
        for name, call in variants.items():
            try:
                kept = self.capture(call)
                found[name] = self._time_of(kept)
                kept.graph.reset()
            except Exception as error:
                failed[name] = reason(error)
        if not found:
            raise RuntimeError("; ".join(f"{name}: {why}" for name, why in failed.items()))
        return min(found, key=found.__getitem__), found


def _replay(kept: Graph) -> tuple[Any, Any]:
    events = (cuda.Event(enable_timing=True), cuda.Event(enable_timing=True))
    cuda._sleep(kept.wait_cycles)
    events[0].record()
    kept.graph.replay()
    events[1].record()
    return events


def _seconds(events: tuple[Any, Any]) -> float:
    return float(events[0].elapsed_time(events[1])) * 1e-3


def host_seconds(
    call: Call, count: int, synchronize: Callable[[], None], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of host time of one un-graphed call: batches of calls without a wait inside, the median of batches."""
    taken = []
    for _ in range(HOST_BATCHES):
        synchronize()
        start = clock()
        for i in range(HOST_CALLS):
            call(i % count)
        taken.append((clock() - start) / HOST_CALLS)
    synchronize()
    return statistics.median(taken)


def joules(kept: Graph, meter: Callable[[], float], seconds: float = 0.4) -> float:
    """Joules of one call: the GPU's energy counter around at least `seconds` of replays, idle power included."""
    torch.cuda.synchronize()
    before, began, replays = meter(), time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(20):
            kept.graph.replay()
        torch.cuda.synchronize()
        replays += 20
    return (meter() - before) / (replays * kept.calls)


def energy_meter() -> Callable[[], float] | str:
    """The current GPU's energy counter in joules, or why it cannot be read."""
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception as error:
        return reason(error)
    return lambda: float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) * 1e-3


def reason(error: Exception) -> str:
    """One line of an exception, for a table's notes."""
    lines = str(error).strip().splitlines() or [""]
    return f"failed: {type(error).__name__}: {lines[0][:200]}"
