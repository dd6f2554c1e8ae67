"""`wavefill doctor`: what is installed, what this machine can do, and why something cannot be used. It never fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from wavefill.cli._output import print_json

Facts = dict[str, Any]


def doctor(
    measure: Annotated[bool, typer.Option("--measure", help="Measure the read bandwidth too (a few seconds, 1 GB).",
                                          )] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Print versions, devices, backends with reasons, caches and environment variables."""
    probes = PROBES | ({"measured": _measured} if measure else {})
    sections = {title: examine(probe) for title, probe in probes.items()}
    if json:
        print_json(sections)
        return
    from rich.table import Table
    from rich.text import Text

    from wavefill.bench.report import wide_console

    console = wide_console()
    for title, facts in sections.items():
        console.print(title, style="bold", highlight=False)
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")  # a path that is cut short helps nobody
        for name, value in facts.items():
            table.add_row(Text(f"  {name}"), Text(_shown(value)))
        console.print(table)


def examine(probe: Callable[[], Facts]) -> Facts:
    """The facts of a probe; a probe that breaks gives the reason as its only fact."""
    try:
        return probe()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def _shown(value: Any) -> str:
    if value is None:
        return "not installed"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _wavefill() -> Facts:
    from pathlib import Path

    import wavefill
    from wavefill.bench import probing

    return {"version": wavefill.__version__, "commit": probing.commit() or "unknown",
            "installed in": str(Path(wavefill.__file__).parent)}


def _versions() -> Facts:
    from wavefill.bench import probing

    return {name: version for name, version in probing.versions().items() if name != "wavefill"}


def _machine() -> Facts:
    import os
    import platform

    from wavefill.hardware import this_cpu

    cpu = this_cpu()
    facts: Facts = {"system": platform.platform(), "processor": cpu.model, "cores": cpu.cores,
                    "kernels for": cpu.isa}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        facts["memory"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    return facts


def _cpu_backend() -> Facts:
    try:
        import torch
    except ImportError:
        return {"usable": "no: torch is not installed. Run: pip install 'wavefill[torch]'", **examine(_extension)}
    from wavefill.backends.cpu import MAX_HEAD_DIM, capability
    from wavefill.spec import AttentionSpec

    reason = capability(AttentionSpec(32, 8, 128, 128))
    return {"usable": "yes" if reason is None else f"no: {reason}", "KV dtypes": "bfloat16, float16, float32",
            "head sizes": f"1 to {MAX_HEAD_DIM}", "threads": torch.get_num_threads(), **examine(_extension)}


def _extension() -> Facts:
    import re
    from importlib.machinery import EXTENSION_SUFFIXES
    from pathlib import Path

    core = _load_core()
    if core is None:
        return {"extension": f"missing: no _core{EXTENSION_SUFFIXES[0]} was built. "
                             "Run: pip install --force-reinstall wavefill"}
    compiler = re.search(rb"(GCC: \([^)]*\) [\d.]+|(?:Apple )?clang version [\d.]+)", Path(core.__file__).read_bytes())
    return {"extension": core.__file__, "compiled by": compiler[1].decode() if compiler else "unknown",
            "kernels usable here": list(core.isas()), "kernel chosen": core.isa()}


def _load_core() -> Any:
    """The compiled module. It needs no torch, but the package around it does, so it is then loaded by its path."""
    import sys
    from importlib.machinery import PathFinder
    from importlib.util import find_spec, module_from_spec

    name = "wavefill.backends.cpu._core"
    if name in sys.modules:
        return sys.modules[name]
    parent = find_spec("wavefill.backends")
    folders = [f"{folder}/cpu" for folder in (parent.submodule_search_locations or ())] if parent else []
    spec = PathFinder.find_spec(name, folders) or find_spec(name)
    if spec is None or spec.loader is None:
        return None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _gpus() -> Facts:
    try:
        import torch
    except ImportError:
        return {"devices": "unknown: torch is not installed"}
    found: Facts = {}
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        from wavefill.backends.gpu import device_gap

        properties = torch.cuda.get_device_properties(i)
        gap = device_gap(i)
        found[f"cuda:{i}"] = (f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB; "
                              f"usable: {'yes' if gap is None else f'no: {gap}'}")
    return found or {"devices": "none that torch can use"}


def _transformers() -> Facts:
    try:
        import transformers  # noqa: F401
    except ImportError:
        return {"usable": "no: transformers is not installed. Run: pip install 'wavefill[transformers]'"}
    try:
        from wavefill.integrations.transformers import support
        from wavefill.integrations.transformers.continuous.detect import tested_range
    except Exception as error:  # an old release is refused at import
        return {"usable": f"no: {error}"}
    return {"usable": "yes", "model families": support.FAMILY_NAMES, "releases for generate_batch": tested_range()}


def _smollm2() -> Facts:
    from wavefill.bench import models
    from wavefill.spec import BackendUnavailable

    try:
        return {"usable": "yes", "GGUF file": str(models.smollm2_gguf())}
    except BackendUnavailable as error:
        return {"usable": f"no: {error}"}


def _caches() -> Facts:
    from wavefill import env

    folder = env.cache_dir()
    facts: Facts = {"folder": str(folder), "exists": folder.is_dir()}
    for model in sorted((folder / "models").glob("[!.]*")):
        size = sum(path.stat().st_size for path in model.iterdir())
        facts[f"models/{model.name}"] = f"{size / 2**20:.0f} MiB"
    return facts


def _environment() -> Facts:
    import os

    from wavefill import env

    facts: Facts = {}
    for variable in env.VARIABLES:
        text = os.environ.get(variable.name)
        try:
            env.get(variable.name)
            value = text if text else f"unset ({variable.default})"
        except ValueError as error:
            value = f"bad value: {error}"
        facts[variable.name] = f"{value.rstrip('.')}. {variable.doc}"
    return facts | dict.fromkeys(env.unknown(), "not a variable of wavefill; misspelt?")


def _measured() -> Facts:
    import torch

    from wavefill.bench.timing import ReadBandwidth

    bandwidth = ReadBandwidth()
    rates = sorted(bandwidth.measure() / 1e9 for _ in range(7))
    return {"read bandwidth": f"{bandwidth.median() / 1e9:.1f} GB/s with {torch.get_num_threads()} threads "
                              f"({rates[0]:.1f} to {rates[-1]:.1f} in {len(rates)} passes over 1 GiB)"}


PROBES: dict[str, Callable[[], Facts]] = {
    "wavefill": _wavefill, "versions": _versions, "machine": _machine, "CPU backend": _cpu_backend, "GPUs": _gpus,
    "transformers integration": _transformers, "smollm2 (for wavefill generate)": _smollm2, "cache": _caches,
    "environment variables": _environment,
}
