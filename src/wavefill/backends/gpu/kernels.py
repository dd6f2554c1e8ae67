"""Compiled Triton kernels: which variants there are, compiling them, and launching one with little work on the host.

A variant is keyed by what changes its code (head sizes, group, dtype, page size, kind of schedule, tile) and never by
lengths or table width. A batch chooses among a few of them (the merge's shapes, and the scan of many requests), all of
which `warm.warmup` compiles. Kernels are compiled by signature and launched through Triton's own launcher, without its
per-call specialisation.
"""

from __future__ import annotations

import atexit
import tempfile
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from wavefill import env

#: Kernels compiled so far in this process; tests hold it still while lengths and batches change.
compiled_count = 0
_compiling = threading.Lock()
Made = TypeVar("Made")

#: How rows are cut, as in `cursor`; ROUNDS is many.cu's alone.
STREAM_K, SPLITS, CHUNKS, ROUNDS = range(4)
POINTERS = {"SEQ": "*i32", "TABLE": "*i32", "BEFORE": "*i64", "LSE": "*fp32", "PART_O": "*fp32", "PART_M": "*fp32",
            "PART_L": "*fp32", "SINK": "*fp32", "SLOPES": "*fp32", "MASK": "*i32", "STARTS": "*i32", "LENS": "*i32",
            "ROWS": "*i32", "GIVEN": "*i32", "FLAGS": "*i32", "GATE": "*i32", "FOUND": "*fp32", "SLOTS": "*i64",
            "LSES": "*fp32"}
#: Pointers to elements of the dtype of a variant.
ELEMENTS = ("Q", "K", "V", "OUT", "NEW_K", "NEW_V", "OUTS", "X", "DELTA", "SUM", "WEIGHT", "QKV", "COS", "SIN",
            "Q_WEIGHT", "K_WEIGHT", "GATE_UP")
TRITON_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Variant:
    """One kernel with its compile-time choices.

    kernel:    "portable", "merge", "pieces", "prefix", "expand", "enter", "leave", "write", "join_states", "norm",
               "rotate" or "gate".
    dtype:     of q, K, V and the output.
    constants: compile-time arguments, as sorted pairs.
    aligned:   arguments that are multiples of 16 (pointers always are, but for those in `unaligned`).
    pdl:       launched as a dependent of the kernel before it.
    """

    kernel: str
    dtype: str
    constants: tuple[tuple[str, Any], ...]
    num_warps: int
    num_stages: int = 1
    aligned: tuple[str, ...] = ()
    unaligned: tuple[str, ...] = ()
    pdl: bool = False


def source(variant: Variant) -> Any:
    """What `triton.compile` takes for a variant."""
    from triton.compiler import ASTSource

    kernel = function(variant.kernel)
    names = kernel.arg_names
    constants = dict(variant.constants)
    element = TRITON_DTYPES[variant.dtype]
    signature: dict[str, str] = {}
    for name in names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in ELEMENTS:
            signature[name] = f"*{element}"
        elif name in POINTERS:
            signature[name] = POINTERS[name]
        elif name in ("qk_scale", "cap", "eps"):
            signature[name] = "fp32"
        else:
            signature[name] = "i64" if name.startswith("s_") else "i32"
    aligned = [n for n in names if signature[n].startswith("*") and n not in variant.unaligned] + list(variant.aligned)
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    return ASTSource(kernel, signature, constexprs={(names.index(n),): v for n, v in constants.items()}, attrs=attrs)


def options(variant: Variant) -> dict[str, Any]:
    """The options of `triton.compile`."""
    return {"num_warps": variant.num_warps, "num_stages": variant.num_stages} | (
        {"launch_pdl": True} if variant.pdl else {})


def function(kernel: str) -> Any:
    """The kernel's function, as Triton made it."""
    from wavefill.backends.gpu import append, around, fused, merge, portable, rows, states

    return {"portable": portable.attend, "merge": merge.merge, "pieces": merge.join_pieces, "prefix": merge.prefix,
            "expand": rows.expand, "enter": around.enter, "leave": around.leave, "write": append.write,
            "join_states": states.join_states, "norm": fused.norm, "rotate": fused.rotate, "gate": fused.gate}[kernel]


@cache
def values(variant: Variant) -> tuple[Any, ...]:
    """The compile-time arguments in the order of the kernel's parameters; they stand last there."""
    given = dict(variant.constants)
    return tuple(given[name] for name in function(variant.kernel).arg_names if name in given)


class Compiled:
    """A variant on one device, ready to launch."""

    def __init__(self, variant: Variant) -> None:
        from triton.runtime import driver

        with _own_cache():
            self._kernel = _compile(variant, driver.active.get_current_target())
            self._run = self._kernel.run  # loads the module
        self._function = self._kernel.function
        self._packed = self._kernel.packed_metadata

    def __call__(self, grid: tuple[int, int, int], stream: int, *args: Any) -> None:
        self._run(*grid, stream, self._function, self._packed, None, None, None, *args)


def compile_only(variant: Variant, target: Any) -> None:
    """Compile a variant for a target into the folder that `Compiled` loads from; needs no GPU."""
    with _own_cache():
        _compile(variant, target)


def _compile(variant: Variant, target: Any) -> Any:
    import triton

    return triton.compile(source(variant), target=target, options=options(variant))


@contextmanager
def _own_cache() -> Iterator[None]:
    """Triton's cache of compiled kernels is ours for a while."""
    from triton import knobs

    with knobs.cache.scope():
        folder = _cache_folder(knobs.cache.dir)
        if folder is not None:
            knobs.cache.dir = folder
        yield


def _cache_folder(triton_folder: str) -> str | None:
    """Where compiled kernels are kept, None for Triton's own folder.

    WAVEFILL_CACHE_DIR moves them; where neither can be written (a read-only home), a folder of this process serves.
    """
    if env.get("WAVEFILL_CACHE_DIR") is None:
        folder, own = Path(triton_folder), None
    else:
        folder = env.cache_dir() / "triton"
        own = str(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return own
    except OSError:
        return _process_folder()


@cache
def _process_folder() -> str:
    folder = tempfile.TemporaryDirectory(prefix="wavefill-")
    atexit.register(folder.cleanup)
    return folder.name


_ready: dict[tuple[Hashable, int], Any] = {}


def once(variant: Hashable, device: int, make: Callable[[], Made]) -> Made:
    """What `make` gave for a variant, of Triton's or of `nvrtc`, on a device; it is called once for each."""
    global compiled_count
    found: Made | None = _ready.get((variant, device))
    if found is None:
        with _compiling:
            found = _ready.get((variant, device))
            if found is None:
                compiled_count += 1
                found = _ready[variant, device] = make()
    return found


def compiled(variant: Variant, device: int) -> Compiled:
    """The compiled variant on a device, which must be the current one."""
    return once(variant, device, lambda: Compiled(variant))


def is_compiled(variant: Hashable, device: int) -> bool:
    """Whether `once` would make nothing."""
    return (variant, device) in _ready


def constants(values: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Compile-time arguments as a `Variant` takes them."""
    return tuple(sorted(values.items()))
