"""The hardware table and what is read of the processor here."""

from __future__ import annotations

import os

import pytest

from wavefill import hardware
from wavefill.spec import InvalidArgument, InvalidType


@pytest.mark.parametrize(("name", "found"), [
    ("h200", "H200"), ("H200", "H200"), ("rtx 4090", "RTX 4090"), ("RTX-4090", "RTX 4090"), ("rtx4090", "RTX 4090"),
    ("gb300", "GB300"), ("MI300X", "MI300X"), ("CPU", "cpu"),
])
def test_lookup_ignores_case_and_separators(name, found):
    assert hardware.lookup(name).name == found


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(InvalidArgument) as caught:
        hardware.lookup("h300")
    for name in hardware.device_names():
        assert name in str(caught.value)
    with pytest.raises(InvalidType, match="device: must be a name"):
        hardware.lookup(3)


def test_every_issue_gpu_is_there_with_a_source():
    names = {gpu.name for gpu in hardware.GPUS}
    assert names == {"A100", "H100", "H200", "B200", "GB200", "GB300", "MI250X", "MI300X", "L40S", "RTX 4090"}
    assert all(gpu.source for gpu in hardware.GPUS)
    assert {gpu.name for gpu in hardware.GPUS if "SMs" in gpu.source and "driver reports" in gpu.source} == {
        "B200", "GB200", "GB300"}


@pytest.mark.parametrize("gpu", hardware.GPUS, ids=lambda gpu: gpu.name)
def test_figures_are_of_the_right_size(gpu):
    """Catches a slip of a unit: decode's ridge point and the bytes an SM can hold and fetch."""
    assert 64 <= gpu.sms <= 304
    assert 5e9 <= gpu.bandwidth / gpu.sms <= 60e9
    assert 24 <= gpu.memory / 2**30 <= 288
    assert 2**20 * 8 <= gpu.l2 <= 2**20 * 128
    assert gpu.shared_memory in {k * 1024 for k in (64, 100, 164, 228)}
    assert 100 <= gpu.bf16_flops / gpu.bandwidth <= 450
    assert gpu.fp8_flops is None or gpu.fp8_flops == pytest.approx(2 * gpu.bf16_flops, rel=0.02)
    assert gpu.measured_read is None or gpu.measured_read < gpu.bandwidth


def test_the_measured_bandwidth_wins():
    assert hardware.lookup("h200").read_bandwidth == 4.575e12
    assert hardware.lookup("h100").read_bandwidth == 3.35e12


def test_this_cpu_counts_the_cores_that_it_may_use():
    cpu = hardware.this_cpu()
    assert cpu.cores == cpu.workers == len(os.sched_getaffinity(0))
    assert cpu.model
    assert cpu.tile(128) == hardware.CPU_TILE == 32


AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}


@pytest.mark.parametrize(("flags", "isa"), [
    (set(), "portable"), ({"avx2"}, "portable"), (AVX2, "avx2"), (AVX2 | {"avx512f"}, "avx2"), (AVX512, "avx512"),
    (AVX512 | {"avx512_bf16"}, "avx512"), (AVX512 | {"avx512_bf16", "avx512vbmi"}, "avx512bf16"),
])
def test_isa_of_flags(flags, isa):
    assert hardware._isa(flags) == isa


def test_isa_is_the_core_s_own_choice():
    core = pytest.importorskip("wavefill.backends.cpu._core")
    assert hardware.this_cpu().isa in core.isas()


def test_no_cpuinfo_is_no_error(tmp_path):
    assert hardware._cpuinfo(str(tmp_path / "none")) == {}
    (tmp_path / "info").write_text("model name\t: A : B\nflags\t\t: avx2 fma\n\nmodel name\t: second\n")
    assert hardware._cpuinfo(str(tmp_path / "info")) == {"model name": "A : B", "flags": "avx2 fma"}
