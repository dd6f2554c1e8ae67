"""Finding the peers of a GPU run, and compiling those that compile at their first use."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from wavefill import env
from wavefill.bench.suites import Row


def folder() -> Path | None:
    """The folder of WAVEFILL_PEERS, None when unset."""
    value = env.get("WAVEFILL_PEERS")
    return value if isinstance(value, Path) else None


def _offer(module: str) -> str | None:
    """Make a Python package importable, from the folder's site/ if need be; or say why it is not."""
    if importlib.util.find_spec(module) is not None:
        return None
    where = folder()
    if where is None:
        return f"{module} is not installed, and WAVEFILL_PEERS names no folder that holds it"
    site = where / "site"
    if not (site / module).is_dir():
        return f"{module} is neither installed nor in {site}"
    sys.path.append(str(site))
    importlib.invalidate_caches()
    return None


@cache
def flashinfer() -> str | None:
    """Why FlashInfer cannot be imported, or None once it is."""
    why = _offer("flashinfer")
    if why is None:
        try:
            importlib.import_module("flashinfer")
        except Exception as error:
            return f"flashinfer does not load: {type(error).__name__}: {str(error)[:200]}"
    return why


#: Where SGLang keeps its Triton decode kernels, newest first.
SGLANG_MODULES = ("sglang.kernels.ops.attention.decode_attention",
                  "sglang.srt.layers.attention.triton_ops.decode_attention")


@cache
def sglang() -> str | None:
    """Why SGLang's Triton decode kernels cannot be imported, or None once they are (see `sglang_kernels`)."""
    return _offer("sglang") or (None if sglang_kernels() is not None else
                                f"none of {', '.join(SGLANG_MODULES)} can be imported")


@cache
def sglang_kernels() -> Any:
    """The module of SGLang's decode kernels, None where there is none.

    It asks the server's utilities only which GPU maker it has; where the server cannot be imported (it needs dozens of
    packages), stand-ins answer that.
    """
    for name in SGLANG_MODULES:
        for stand_in in (False, True):
            if stand_in:
                _stand_in_for_the_server()
            try:
                return importlib.import_module(name)
            except Exception:
                for loaded in [module for module in sys.modules if module.startswith("sglang")]:
                    del sys.modules[loaded]
    return None


def _stand_in_for_the_server() -> None:
    utilities, environment = ModuleType("sglang.srt.utils"), ModuleType("sglang.srt.environ")
    for name in ("is_hip", "is_gfx95_supported", "is_gfx1250_supported", "is_cuda_alike"):
        setattr(utilities, name, lambda: False)
    utilities.get_device_core_count = (  # type: ignore[attr-defined]
        lambda index=0: torch.cuda.get_device_properties(index).multi_processor_count)
    environment.envs = None  # type: ignore[attr-defined]  # only AMD's kernels ask
    sys.modules |= {"sglang.srt": ModuleType("sglang.srt"), utilities.__name__: utilities,
                    environment.__name__: environment}


def _fa3_library() -> Path | None:
    """FlashAttention-3 as vLLM builds it: from the folder of peers, or an installed vLLM."""
    where = folder()
    if where is not None and (where / "fa3.so").is_file():
        return where / "fa3.so"
    spec = importlib.util.find_spec("vllm")
    for root in (spec.submodule_search_locations or []) if spec else []:
        found = Path(root) / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so"
        if found.is_file():
            return found
    return None


@cache
def fa3() -> str | None:
    """Why FlashAttention-3 cannot be loaded, or None once it is."""
    library = _fa3_library()
    if library is None:
        return "no fa3.so in the folder of WAVEFILL_PEERS, and vLLM is not installed"
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        return "its kernels are for GPUs of compute capability 9"
    load: Any = torch.ops.load_library
    try:
        load(str(library))
    except Exception as error:
        return f"{library} does not load: {str(error).splitlines()[0][:200]}"
    return None


def precompile(rows: Iterable[Row], names: Iterable[str], page_size: int, dtype: torch.dtype) -> list[str]:
    """Compile what FlashInfer's peers need for these rows, all in parallel; returns what failed, and why.

    Without it each kernel is compiled at its first use, one after the other, in 5 to 60 seconds.
    """
    names = set(names) & {"flashinfer", "batch_attention", "xqa"}
    if not names or flashinfer() is not None:
        return []
    try:
        specs = _specs(list(rows), names, page_size, dtype)
        build: Any = importlib.import_module("flashinfer.jit.core").build_jit_specs
    except Exception as error:
        return [f"FlashInfer cannot compile ahead: {type(error).__name__}: {str(error)[:200]}"]
    try:
        build(specs, verbose=False)
        return []
    except Exception:  # one kernel that does not compile stops the others; each for itself then
        with ThreadPoolExecutor(4) as pool:
            return [line for line in pool.map(_build, specs) if line]


def _specs(rows: list[Row], names: set[str], page_size: int, dtype: torch.dtype) -> list[Any]:
    jit: Any = importlib.import_module("flashinfer.jit")
    xqa: Any = importlib.import_module("flashinfer.jit.xqa")
    kinds, specs = (dtype, dtype, dtype, torch.int32), []
    for D in sorted({row.D for row in rows}):
        if "flashinfer" in names:
            specs.append(jit.gen_batch_prefill_module("fa2", *kinds, D, D, 0, False, False, False))
        if "batch_attention" in names:
            specs.append(jit.gen_batch_attention_module(*kinds, D, D, 0, False, False))
    if "xqa" in names:
        specs += [xqa.gen_xqa_module(dtype, dtype, page_size, D, G, False, dtype, 1)
                  for D, G in sorted({(row.D, row.HQ // row.KH) for row in rows})]
    return specs


def _build(spec: Any) -> str | None:
    try:
        spec.build(verbose=False)
    except Exception as error:
        errors = [line for line in str(error).splitlines() if "error" in line.lower()] or str(error).splitlines()
        return f"{spec.name} does not compile: {(errors or [''])[0][:200]}"
    return None
