"""Kernels in CUDA C++: compiling them through NVRTC, without a GPU if need be, and loading them."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from importlib import resources
from typing import Any, ClassVar

import torch

from wavefill import env
from wavefill.backends.gpu import kernels
from wavefill.backends.gpu.memory import done

ARCHITECTURE = "sm_90a"


class Build:
    """One compilation: all that changes the code, a frozen dataclass.

    entry: the kernel's name. files: its sources in cuda/, the main one first.
    """

    entry: ClassVar[str]
    files: ClassVar[tuple[str, ...]]

    @property
    def header(self) -> str:
        """variant.cuh."""
        raise NotImplementedError

    @property
    def dynamic_bytes(self) -> int:
        """Dynamic shared memory of a program."""
        raise NotImplementedError


def header(macros: Mapping[str, int], values: Mapping[str, int]) -> str:
    """A variant.cuh of macros, which the preprocessor asks for, and of constants."""
    return "\n".join([*(f"#define {name} {value}" for name, value in macros.items()),
                      *(f"constexpr int {name} = {value};" for name, value in values.items()), ""])


def compiler_gap() -> str | None:
    """Why the kernel cannot be compiled here, with what to do about it; None when it can."""
    cuda = (torch.version.cuda or "13").split(".", maxsplit=1)[0]
    try:
        from cuda.bindings import nvrtc

        done(nvrtc.nvrtcVersion())
    except ImportError as error:
        return f"cuda.bindings cannot be imported ({error}). Run: pip install 'cuda-bindings=={cuda}.*'"
    except RuntimeError as error:  # cuda.bindings says so when it finds no library
        return f"NVRTC cannot be used ({error}). Run: pip install 'nvidia-cuda-nvrtc{'-cu12' if cuda == '12' else ''}'"
    return None


def sources(build: Build) -> dict[str, str]:
    """The files of a build's kernel by their names, the main one first."""
    folder = resources.files("wavefill.backends.gpu") / "cuda"
    return {name: (folder / name).read_text() for name in build.files}


def compile_source(build: Build, options: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """The machine code of a build and what the compiler said; needs no GPU. RuntimeError where it fails."""
    from cuda.bindings import nvrtc

    main, texts = build.files[0], {**sources(build), "variant.cuh": build.header}
    program = done(nvrtc.nvrtcCreateProgram(texts[main].encode(), main.encode(), len(texts),
                                             [text.encode() for text in texts.values()],
                                             [name.encode() for name in texts]))
    try:
        given = (f"--gpu-architecture={ARCHITECTURE}", "--std=c++17", "-diag-suppress=128,177,186", *options)
        status, = nvrtc.nvrtcCompileProgram(program, len(given), [option.encode() for option in given])
        log = b" " * done(nvrtc.nvrtcGetProgramLogSize(program))
        done(nvrtc.nvrtcGetProgramLog(program, log))
        said = log.decode(errors="replace").strip("\0 \n")
        if int(status):
            raise RuntimeError(f"NVRTC could not compile {main}: {said}")
        code = b" " * done(nvrtc.nvrtcGetCUBINSize(program))
        done(nvrtc.nvrtcGetCUBIN(program, code))
        return code, said
    finally:
        done(nvrtc.nvrtcDestroyProgram(program))


def machine_code(build: Build) -> bytes:
    """The machine code of a build, from the cache folder if it is there; the folder is not needed to go on."""
    from cuda.bindings import nvrtc

    version = done(nvrtc.nvrtcVersion())
    what = version, ARCHITECTURE, build.header, sorted(sources(build).items())
    key = hashlib.sha256(repr(what).encode()).hexdigest()
    path = env.cache_dir() / "cuda" / f"{build.entry}-{key[:32]}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        code, _ = compile_source(build)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(code)
                file.flush()
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
    except OSError:
        pass  # a read-only or full disk: the next process compiles again
    return code


def function(build: Build, device: int) -> Any:
    """A build as a function of a device's context, which must be the current one; compiled at the first call."""
    return kernels.once(build, device, lambda: _load(build, device))


def _load(build: Build, device: int) -> Any:
    from cuda.bindings import driver

    if not int(done(driver.cuCtxGetCurrent())):  # a thread that has not called CUDA yet
        done(driver.cuCtxSetCurrent(done(driver.cuDevicePrimaryCtxRetain(device))))
    module = done(driver.cuModuleLoadData(machine_code(build)))
    found = done(driver.cuModuleGetFunction(module, build.entry.encode()))
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    done(driver.cuFuncSetAttribute(found, most, build.dynamic_bytes))
    return found
