"""Everything that one visit to a machine with a GPU does: unpack the peers, run the tests, run the benchmark.

    python tools/gpu_session.py [--quick] [--tests] [--no-peers] [--peers fa3,xqa] [--growth] [-- BENCH OPTIONS]

Options after -- go to `wavefill bench kernels --device cuda` as they are (--rows, --schedules, --energy, ...). Nothing
is installed into the machine's Python and nothing is fetched. A folder .peers in the checkout (or --peers-from) may
hold wheels/*.whl (FlashInfer and what it imports) and fa3.so.xz (FlashAttention-3 as vLLM builds it); they are
unpacked once into build/peers, where FlashInfer's compiled kernels stay too. wavefill's own kernels are compiled first,
one on each core, and kept in build/cache. Results (JSON, Markdown, the plot) go to $OUT if that is set, or else to
build/gpu-session.

The checkout needs a compiled core for the machine's Python. Where none was built, one from a wheel that was unpacked
into build/abi3 is taken (python -m pip wheel . --no-deps, on Python 3.12).
"""

from __future__ import annotations

import argparse
import importlib.util
import lzma
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNPACKED = ROOT / "build" / "peers"
#: Compute capabilities that FlashInfer compiles for, in its own spelling: 9.0 and newer need the "a" kernels.
ARCHITECTURE_FEATURES = 9
#: What is tested: calls as users make them, and the cases that CI runs in Triton's interpreter.
TESTS = {"tests": ("tests/gpu",),
         "tests of the kernels": ("tests/kernels/test_cases.py", "tests/kernels/test_cases_scores.py",
                                  "tests/kernels/test_interpret_decode.py", "tests/kernels/test_interpret_several.py")}
#: Contexts of the growth table: batch 1, Llama-3.1-8B's shape.
GROWTH = tuple(1024 * n for n in (4, 8, 16, 32, 64, 128))


def unpack(source: Path, target: Path) -> list[str]:
    """Unpack wheels and libraries of `source` into `target` once; returns what could not be, and why."""
    problems = []
    target.mkdir(parents=True, exist_ok=True)
    wheels = sorted((source / "wheels").glob("*.whl"))
    if wheels and not (target / "site" / ".complete").exists():
        done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile",
                               "--upgrade", "--target", str(target / "site"), *map(str, wheels)],
                              capture_output=True, text=True, check=False)
        if done.returncode:
            problems.append(f"pip could not unpack the wheels: {done.stderr.strip()[-300:]}")
        else:
            (target / "site" / ".complete").touch()
    for packed in sorted(source.glob("*.so.xz")):
        library = target / packed.stem
        if not library.exists() or library.stat().st_mtime < packed.stat().st_mtime:
            _decompress(packed, library)
    for library in sorted(source.glob("*.so")):
        if not (target / library.name).exists():
            shutil.copy2(library, target / library.name)
    return problems


def _decompress(packed: Path, library: Path) -> None:
    partial = library.with_suffix(".part")
    with lzma.open(packed) as stream, partial.open("wb") as file:
        shutil.copyfileobj(stream, file, 1 << 20)
    partial.replace(library)


def environment(peers: Path | None, capability: tuple[int, int] | None, cores: int) -> dict[str, str]:
    """The variables of this process and its children: the checkout's code, and where peers are and compile."""
    added = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))),
             "WAVEFILL_CACHE_DIR": os.environ.get("WAVEFILL_CACHE_DIR") or str(ROOT / "build" / "cache")}
    if peers is not None:
        added |= {"WAVEFILL_PEERS": str(peers), "FLASHINFER_WORKSPACE_BASE": str(peers / "flashinfer"),
                  "MAX_JOBS": str(cores)}
        if capability is not None:
            major, minor = capability
            added["FLASHINFER_CUDA_ARCH_LIST"] = f"{major}.{minor}{'a' if major >= ARCHITECTURE_FEATURES else ''}"
    return {**os.environ, **added}


def capability() -> tuple[int, int] | None:
    """Compute capability of the GPU, None where there is none."""
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def step(name: str, command: list[str], variables: dict[str, str]) -> int:
    print(f"=== {name}", flush=True)
    began = time.perf_counter()
    code = subprocess.run(command, env=variables, cwd=ROOT, check=False).returncode
    print(f"=== {name}: exit code {code}, {time.perf_counter() - began:.0f} s", flush=True)
    return code


def take_core() -> None:
    """Copy the compiled core of an unpacked wheel into the checkout, if the checkout has none of its own."""
    home = ROOT / "src/wavefill/backends/cpu"
    if not any(home.glob("_core*.so")):
        for core in (ROOT / "build/abi3").rglob("_core.abi3.so"):
            shutil.copy2(core, home)


def compile_kernels() -> None:
    """Compile what the suite's rows call, a kernel on each core."""
    import wavefill
    from wavefill.bench import suites

    specs = {wavefill.AttentionSpec(row.HQ, row.KH, row.D, row.D) for row in suites.load().rows}
    print(f"{wavefill.warmup(specs, schedules=('auto', 'fixed', 'invariant'))} kernels")


def test_command(cores: int, *paths: str) -> list[str]:
    parallel = ["-n", str(min(cores, 15))] if importlib.util.find_spec("xdist") else []
    return [sys.executable, "-m", "pytest", "-q", *parallel, *paths]


def bench_command(options: argparse.Namespace, output: Path) -> list[str]:
    command = [sys.executable, "-m", "wavefill", "bench", "kernels", "--device", "cuda",
               "--output", str(output / "gpu-kernels.json"), "--plot", str(output / "gpu-kernels.png")]
    if options.no_peers:
        command.append("--no-peers")
    elif options.peers:
        command += ["--peers", options.peers]
    return command + (["--quick"] if options.quick else []) + options.bench


def growth(output: Path) -> None:
    """Batch 1 from 4K to 128K, auto and stream_k beside an unsplit kernel: the growth that splitting removes."""
    from wavefill.bench import gpu, gpu_report, probing, report, suites
    from wavefill.cli._output import save_json

    rows = [suites.Row(f"llama8b-b1-{n // 1024}k", "S", 32, 8, 128, (n,), cpu=False) for n in GROWTH]
    results, notes = gpu.run(rows, dtype="bfloat16", page_size=16, schedules=("auto", "stream_k", "fixed", "unsplit"),
                             seconds=gpu.QUICK_SECONDS)
    report.wide_console().print(report.terminal_table(*gpu_report.table(results)))
    save_json(output / "gpu-growth.json", {**probing.provenance(), **gpu.facts(), "notes": notes,
                                           "results": [result.to_dict() for result in results]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="six rows, and less time for each")
    parser.add_argument("--tests", action="store_true", help="run the tests first")
    parser.add_argument("--only-tests", action="store_true", help="run the tests and nothing else")
    parser.add_argument("--growth", action="store_true", help="the growth table too")
    parser.add_argument("--only-growth", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only-kernels", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--peers", help="names of peers, with commas between")
    parser.add_argument("--peers-from", type=Path, default=ROOT / ".peers", help="folder with wheels/ and fa3.so.xz")
    parser.add_argument("bench", nargs="*", help="options of wavefill bench kernels, after --")
    options = parser.parse_args()
    output = Path(os.environ.get("OUT") or ROOT / "build" / "gpu-session")
    output.mkdir(parents=True, exist_ok=True)
    if options.only_growth:  # a process of its own, so that the checkout's code is on its path
        growth(output)
        return 0
    if options.only_kernels:
        compile_kernels()
        return 0
    take_core()
    began = time.perf_counter()
    peers = None
    if options.peers_from.is_dir() and not (options.no_peers or options.only_tests):
        for problem in unpack(options.peers_from, UNPACKED):
            print(problem, flush=True)
        peers = UNPACKED
        print(f"=== peers unpacked, {time.perf_counter() - began:.0f} s", flush=True)
    variables = environment(peers, capability(), os.cpu_count() or 1)
    codes = []
    if options.tests or options.only_tests:
        for name, paths in TESTS.items():
            codes.append(step(name, test_command(os.cpu_count() or 1, *paths), variables))
    if not options.only_tests:
        codes.append(step("kernels", [sys.executable, __file__, "--only-kernels"], variables))
        codes.append(step("bench", bench_command(options, output), variables))
    if options.growth:
        codes.append(step("growth", [sys.executable, __file__, "--only-growth"], variables))
    print(f"=== all: {time.perf_counter() - began:.0f} s, results in {output}", flush=True)
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main())
