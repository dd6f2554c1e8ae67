"""Facts of the GPUs and of this CPU that schedules and cost estimates need.

Every figure comes from the vendor's data sheet or documentation unless the record's `source` says otherwise;
`measured_read` is what a kernel that only reads has reached. TFLOP/s are dense (without sparsity), with fp32
accumulation.
"""

from __future__ import annotations

import json
import os
import platform
import re
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path

from wavefill.spec import AttentionSpec, invalid, invalid_type

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30

#: Tokens of a tile of the CPU backend: K and V of one head (D 128, bf16) are 16 KiB, so that a tile and the one that
#: streams in behind it share the first-level cache. 64 was as fast where compute binds and slower where memory does.
CPU_TILE = 32
#: The largest head size that the CPU backend has kernels for.
CPU_MAX_HEAD_DIM = 576
#: CTAs on each SM where the caller gives none: one fills an SM's shared memory with what it has on its way.
GPU_WORKERS_PER_SM = 1


@dataclass(frozen=True)
class Gpu:
    """One device as a program sees it.

    sms:           streaming multiprocessors (NVIDIA) or compute units (AMD).
    bandwidth:     bytes/s of device memory, the vendor's peak.
    memory:        bytes of device memory. The GB of vendors count binary: an H200 of "141 GB" reports 140.4 GiB.
    l2:            bytes of L2 cache.
    shared_memory: bytes of shared memory (LDS) of one SM or CU.
    bf16_flops, fp8_flops: peak FLOP/s of the tensor cores; fp8_flops is None where there is no fp8.
    exps:          exponentials/s of the special function units, at the boost clock: 16 a clock and SM (CUDA programming
                   guide, throughput of arithmetic instructions; FlashAttention-3, arXiv:2407.08608, gives 3.9e12 for an
                   H100) or CU (a quarter of 64 lanes), where the source doesn't say otherwise.
    source:        where the figures come from.
    capability:    compute capability (NVIDIA), None for others.
    link, link_gpus: bytes/s to and from the other GPUs that share NVLink, Infinity Fabric or PCIe, each way, and how
                   many these are, itself included; link is None where that is not known.
    link_latency:  seconds of an exchange of a few bytes: what NCCL plans with for its protocol LL (src/graph/tuning.cc:
                   6.6 us, and 0.6 for NVLink or 1.0 for PCIe), RCCL 12 and 0.8 (src/graph/tuning.cc there).
    network:       bytes/s to and from GPUs beyond them, each way: the network cards of the vendor's reference system,
                   a GPU's part of them.
    measured_read: bytes/s of a kernel that only reads, where that was measured.
    note:          what a reader of a figure must know.
    """

    name: str
    sms: int
    bandwidth: float
    memory: int
    l2: int
    shared_memory: int
    bf16_flops: float
    fp8_flops: float | None
    exps: float
    source: str
    capability: tuple[int, int] | None = None
    measured_read: float | None = None
    note: str = ""
    link: float | None = None
    link_gpus: int = 8
    link_latency: float = 7.2e-6
    network: float = 50e9

    @property
    def read_bandwidth(self) -> float:
        """bytes/s to plan with: the measured read bandwidth, or the vendor's peak."""
        return self.measured_read or self.bandwidth

    @property
    def read_bandwidth_source(self) -> str:
        return "measured" if self.measured_read else "data sheet"

    @property
    def workers(self) -> int:
        """CTAs that run at once, by default."""
        return GPU_WORKERS_PER_SM * self.sms

    def tile(self, columns: int) -> int:
        """Tokens of a tile for a head size."""
        return gpu_tile(columns)


@dataclass(frozen=True)
class Cpu:
    """The processor that this process runs on.

    cores: cores that the process may use (its affinity mask).
    model: name that the processor reports.
    isa:   widest of the instruction sets that the CPU kernels are compiled for: "portable", "avx2", "avx512" or
           "avx512bf16".
    """

    name: str
    cores: int
    model: str
    isa: str

    @property
    def workers(self) -> int:
        return self.cores

    def tile(self, columns: int) -> int:
        """Tokens of a tile, for any head size."""
        return CPU_TILE


Device = Gpu | Cpu


def gpu_tile(columns: int) -> int:
    """Tokens of a tile on a GPU for a head size: 32 KB of 16-bit K and V where it can be, since the work between two
    tiles is the same however many bytes they have (measured on an H200)."""
    return 128 if columns <= 64 else 64 if columns <= 128 else 32


_HOPPER = ("Data sheet (NVLink 900 GB/s both ways); NVIDIA Hopper tuning guide (228 KB of shared memory an SM, 50 MB "
           "of L2); NVIDIA DGX H100 data sheet (400 Gb/s a GPU)")

GPUS = (
    Gpu("A100", sms=108, bandwidth=2.039e12, memory=80 * _GIB, l2=40 * _MIB, shared_memory=164 * _KIB,
        bf16_flops=312e12, fp8_flops=None, exps=2.44e12, capability=(8, 0), link=300e9, network=25e9,
        source="NVIDIA A100 80GB SXM data sheet (NVLink 600 GB/s both ways); NVIDIA Ampere tuning guide (164 KB of "
               "shared memory an SM); NVIDIA DGX A100 data sheet (200 Gb/s a GPU)"),
    Gpu("H100", sms=132, bandwidth=3.35e12, memory=80 * _GIB, l2=50 * _MIB, shared_memory=228 * _KIB,
        bf16_flops=989.5e12, fp8_flops=1979e12, exps=3.87e12, capability=(9, 0), link=450e9,
        source=f"NVIDIA H100 SXM. {_HOPPER}",
        note="The data sheet prints 1,979 and 3,958 TFLOP/s with sparsity; these are their halves."),
    Gpu("H200", sms=132, bandwidth=4.8e12, memory=141 * _GIB, l2=50 * _MIB, shared_memory=228 * _KIB,
        bf16_flops=989.5e12, fp8_flops=1979e12, exps=3.87e12, capability=(9, 0), link=450e9,
        measured_read=4.575e12,
        source=f"NVIDIA H200 SXM. {_HOPPER}",
        note="The read bandwidth was measured by this project."),
    Gpu("B200", sms=148, bandwidth=8.0e12, memory=180 * _GIB, l2=126 * _MIB, shared_memory=228 * _KIB,
        bf16_flops=2250e12, fp8_flops=4500e12, exps=5e12, capability=(10, 0), link=900e9,
        source="NVIDIA DGX B200 data sheet, an eighth of it (180 GB, 64 TB/s; 72 PFLOP/s fp8 are with sparsity; "
               "14.4 TB/s of NVLink both ways; 400 Gb/s a GPU); NVIDIA Blackwell tuning guide; SMs and L2 (126.5 MiB) "
               "are driver reports; exponentials: Inside NVIDIA Blackwell Ultra (NVIDIA, 2025)",
        note="The HGX data sheet and the memory clock say 7.7 TB/s."),
    Gpu("GB200", sms=152, bandwidth=8.0e12, memory=186 * _GIB, l2=126 * _MIB, shared_memory=228 * _KIB,
        bf16_flops=2500e12, fp8_flops=5000e12, exps=5e12, capability=(10, 0), link=900e9, link_gpus=72,
        source="NVIDIA GB200 NVL72 data sheet, one of its 72 GPUs (130 TB/s of NVLink both ways; 400 Gb/s of network); "
               "NVIDIA Blackwell tuning guide; SMs are driver reports; exponentials: Inside NVIDIA Blackwell Ultra "
               "(NVIDIA, 2025)"),
    Gpu("GB300", sms=152, bandwidth=8.0e12, memory=279 * _GIB, l2=126 * _MIB, shared_memory=228 * _KIB,
        bf16_flops=2500e12, fp8_flops=5000e12, exps=10.7e12, capability=(10, 3), link=900e9, link_gpus=72,
        network=100e9,
        source="NVIDIA GB300 NVL72 data sheet, one of its 72 GPUs (20 TB, 576 TB/s, 130 TB/s of NVLink both ways, "
               "800 Gb/s of network); NVIDIA Blackwell tuning guide; SMs are driver reports; exponentials: Inside "
               "NVIDIA Blackwell Ultra (NVIDIA, 2025)",
        note="The full chip has 160 SMs."),
    Gpu("MI250X", sms=110, bandwidth=1.6384e12, memory=64 * _GIB, l2=8 * _MIB, shared_memory=64 * _KIB,
        bf16_flops=191.5e12, fp8_flops=None, exps=2.99e12, link=200e9, link_latency=12.8e-6, network=12.5e9,
        source="AMD Instinct MI250X data sheet, halved (8 Infinity Fabric links of 100 GB/s both ways); ROCm GPU "
               "specifications (L2, LDS); a node of Frontier (8 dies, 4 x 200 Gb/s)",
        note="One of the card's two dies, which HIP lists as a device of its own."),
    Gpu("MI300X", sms=304, bandwidth=5.325e12, memory=192 * _GIB, l2=32 * _MIB, shared_memory=64 * _KIB,
        bf16_flops=1307.4e12, fp8_flops=2614.9e12, exps=10.2e12, link=448e9, link_latency=12.8e-6,
        source="AMD Instinct MI300X data sheet (7 Infinity Fabric links of 128 GB/s both ways); ROCm GPU "
               "specifications (L2 of 4 MiB on each of 8 dies, LDS)",
        note="A 256 MiB Infinity Cache sits behind the L2. The network, 400 Gb/s a GPU, is a choice of this table."),
    Gpu("L40S", sms=142, bandwidth=864e9, memory=48 * _GIB, l2=96 * _MIB, shared_memory=100 * _KIB,
        bf16_flops=362.05e12, fp8_flops=733e12, exps=5.73e12, capability=(8, 9), link=32e9, link_latency=7.6e-6,
        network=25e9,
        source="NVIDIA L40S data sheet (PCIe 4.0 x16, 64 GB/s both ways); NVIDIA Ada tuning guide (100 KB of shared "
               "memory an SM)",
        note="The network, 200 Gb/s a GPU, is a choice of this table."),
    Gpu("RTX 4090", sms=128, bandwidth=1008e9, memory=24 * _GIB, l2=72 * _MIB, shared_memory=100 * _KIB,
        bf16_flops=165.2e12, fp8_flops=330.3e12, exps=5.16e12, capability=(8, 9), link=32e9, link_latency=7.6e-6,
        network=12.5e9,
        source="NVIDIA Ada GPU architecture white paper, appendix A (PCIe 4.0 x16); NVIDIA Ada tuning guide",
        note="The network, 100 Gb/s a GPU, is a choice of this table."),
)


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_GPU_BY_KEY = {_key(gpu.name): gpu for gpu in GPUS}


def device_names() -> list[str]:
    """Names that `lookup` takes."""
    return ["cpu", *(gpu.name for gpu in GPUS)]


def lookup(name: str) -> Device:
    """The device of a name; case, spaces and dashes don't count ("rtx-4090"), "cpu" is the processor here.

    Raises InvalidArgument for a name that is not in the table.
    """
    if not isinstance(name, str):
        raise invalid_type("device", "must be a name", repr(name), f"Use one of {', '.join(device_names())}.")
    if _key(name) == "cpu":
        return this_cpu()
    gpu = _GPU_BY_KEY.get(_key(name))
    if gpu is None:
        raise invalid("device", f"must be one of {', '.join(device_names())}", repr(name),
                      "Use a name of this list; for another GPU take the nearest one and pass workers.")
    return gpu


def gpu_file(path: Path) -> Gpu:
    """The GPU that a JSON file describes: an object of `Gpu`'s fields, as in {"name": "X", "sms": 100, ...}.

    Raises InvalidArgument for a file that is none, a field that is missing or unknown, and a value that is no number.
    """
    rule, step = "must be a JSON object of a GPU's fields", "docs/advise.md has an example."
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise invalid("gpu", rule, f"{str(path)!r} ({error})", step) from None
    known = {each.name: each for each in fields(Gpu)}
    needed = {name for name, each in known.items() if each.default is MISSING}
    if not isinstance(found, dict) or not needed <= set(found) <= set(known):
        raise invalid("gpu", rule, repr(path.name), f"It needs {', '.join(sorted(needed))}. {step}")
    for name, value in found.items():
        texts, none = name in ("name", "source", "note"), value is None and known[name].type.endswith("None")
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e30
        if name != "capability" and not (isinstance(value, str) if texts else none or number):
            raise invalid("gpu", f"{name} must be {'text' if texts else 'a number above 0'}", repr(value), step)
    return Gpu(**found | {"capability": tuple(found["capability"]) if found.get("capability") else None})


def this_cpu() -> Cpu:
    """What this process runs on. Cores are counted anew at each call, since an affinity mask may change."""
    model, isa = _cpu_identity()
    return Cpu("cpu", _available_cores(), model, isa)


def cpu_gap(spec: AttentionSpec) -> str | None:
    """Why the CPU backend has no kernel for `spec`, or None where it has; known without loading it."""
    for name, value in (("D", spec.D), ("DV", spec.DV)):
        if value > CPU_MAX_HEAD_DIM:
            return f"{name} is {value}; the CPU backend takes head sizes up to {CPU_MAX_HEAD_DIM}"
    return None


def _available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS and Windows have no affinity mask to ask for


@cache
def _cpu_identity() -> tuple[str, str]:
    fields = _cpuinfo()
    model = fields.get("model name") or platform.processor() or platform.machine() or "unknown processor"
    return model, _isa(set(fields.get("flags", "").split()))


def _cpuinfo(path: str = "/proc/cpuinfo") -> dict[str, str]:
    """Fields of the first processor, or nothing where there is no such file."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _isa(flags: set[str]) -> str:
    """The widest kernel that a processor with these flags runs; the compiled core makes the same choice."""
    if not {"avx2", "fma", "f16c"} <= flags:
        return "portable"
    if not {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags:
        return "avx2"
    return "avx512bf16" if {"avx512_bf16", "avx512vbmi"} <= flags else "avx512"
