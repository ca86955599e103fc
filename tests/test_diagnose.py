"""Diagnoses of constructed cases: each bound, and what is prescribed for it."""

from __future__ import annotations

import pytest

from autokernel_hf.ceilings import Bandwidth
from autokernel_hf.counters import Counters
from autokernel_hf.diagnose import diagnose
from autokernel_hf.kernels import kernel_type
from autokernel_hf.records import Resources
from autokernel_hf.tunables import ACTS_ON
from tests.test_gpu_table import limits

H200 = limits(
    "cuda",
    132,
    bandwidths=(Bandwidth(footprint_bytes=1 << 31, copy_gb_s=4000.0, read_gb_s=4000.0),),
    matmul_tflops={"bfloat16": 800.0, "float32": 50.0},
    launch_us=2.0,
)
RMSNORM, MATMUL = kernel_type("rmsnorm"), kernel_type("matmul")
LARGE_NORM = RMSNORM.build({"M": 8192, "N": 8192}, "bfloat16", {})  # 268 MB: 67 us at 4000 GB/s
LARGE_PRODUCT = MATMUL.build(
    {"M": 8192, "K": 8192, "N": 8192}, "bfloat16", {}
)  # 1.1 Tflop: 1374 us at 800 TFLOP/s


def test_near_the_memorys_roof_memory_is_the_bound() -> None:
    found = diagnose(RMSNORM, LARGE_NORM, 80.0, H200, Resources())
    assert found.bound == "memory"
    assert found.floor_us == pytest.approx(67.1, rel=0.01)
    assert found.pct_of_floor == pytest.approx(83.9, rel=0.01)
    assert found.prescriptions[0] == "memory"
    assert "3356 of 4000 GB/s (84 %)" in found.evidence


def test_near_the_arithmetics_roof_compute_is_the_bound() -> None:
    found = diagnose(MATMUL, LARGE_PRODUCT, 1600.0, H200, Resources(registers=168))
    assert found.bound == "compute"
    assert found.floor_us == pytest.approx(1374.4, rel=0.001)
    assert found.prescriptions[0] == "block"
    assert "168 registers" in found.evidence


def test_a_call_as_short_as_a_launch_is_bound_by_the_launch() -> None:
    tiny = RMSNORM.build({"M": 4, "N": 512}, "bfloat16", {})
    found = diagnose(RMSNORM, tiny, 4.0, H200, Resources())
    assert found.bound == "launch"
    assert found.pct_of_floor == pytest.approx(50.0)
    assert found.prescriptions[0] == "launch"


def test_little_work_leaves_a_gpu_underutilized() -> None:
    few_rows = RMSNORM.build({"M": 8, "N": 16384}, "bfloat16", {})
    found = diagnose(RMSNORM, few_rows, 20.0, H200, Resources())
    assert found.bound == "underutilized"
    assert found.prescriptions[0] == "block"


def test_much_work_far_from_both_roofs_waits() -> None:
    found = diagnose(RMSNORM, LARGE_NORM, 400.0, H200, Resources(registers=32))
    assert found.bound == "latency"
    assert found.pct_of_floor == pytest.approx(16.8, rel=0.01)
    assert found.prescriptions[0] == "compute"
    crowded = diagnose(RMSNORM, LARGE_NORM, 400.0, H200, Resources(registers=255))
    assert crowded.prescriptions[0] == "block"
    assert "255 registers" in crowded.reasons[0]


def test_spilled_registers_come_first_whatever_the_bound() -> None:
    for latency_us in (80.0, 400.0):
        found = diagnose(RMSNORM, LARGE_NORM, latency_us, H200, Resources(registers=255, spill_bytes=128))
        assert found.prescriptions[:2] == ("block", "compute")
        assert "128 bytes" in found.reasons[0]
        assert "128 bytes spilled" in found.evidence


def test_on_a_cpu_the_roof_is_that_of_the_footprint() -> None:
    activation = kernel_type("activation")
    in_cache = activation.build({"M": 128, "N": 1024}, "float32", {"kind": "silu"})  # 1 MB: 100 GB/s
    beyond = activation.build({"M": 4096, "N": 1024}, "float32", {"kind": "silu"})  # 34 MB: 20 GB/s
    assert diagnose(activation, in_cache, 50.0, limits()).bound == "latency"
    assert diagnose(activation, in_cache, 12.0, limits()).bound == "memory"
    assert diagnose(activation, beyond, 2000.0, limits()).bound == "memory"


FAR = 400.0  # us, where the memory allows 67
LEAST = float(RMSNORM.bytes_moved(LARGE_NORM))


def counters(**values: object) -> Counters:
    return Counters(kernels=(("k", 2),), us=FAR, **values)


def test_counters_tell_a_kernel_that_moves_too_much_from_one_that_waits() -> None:
    assert diagnose(RMSNORM, LARGE_NORM, FAR, H200, Resources()).bound == "latency"
    busy = counters(dram_pct=84.0, dram_bytes=4.9 * LEAST, waves=6.0)
    found = diagnose(RMSNORM, LARGE_NORM, FAR, H200, Resources(), busy)
    assert found.bound == "memory" and found.prescriptions[0] == "algorithm"
    assert "4.9 times the least bytes" in found.reasons[0]
    assert (
        "by hardware counters over 2 launches: 4.90 times the least bytes moved, 84 % of the memory's peak"
        in found.evidence
    )
    busy = counters(sm_pct=20.0, tensor_pct=71.0, dram_bytes=LEAST)
    assert diagnose(RMSNORM, LARGE_NORM, FAR, H200, Resources(), busy).bound == "compute"


@pytest.mark.parametrize(
    ("values", "first", "said"),
    [
        ({"stalls": (("long_scoreboard", 0.7), ("barrier", 0.2))}, "memory", "70 % of the waiting is for global or local memory"),
        ({"stalls": (("long_scoreboard", 0.7),), "occupancy_pct": 12.0}, "block", "12 % of the warps that fit"),
        ({"stalls": (("barrier", 0.5),)}, "launch", "50 % of the waiting is for barriers"),
        ({"stalls": (("short_scoreboard", 0.5),), "conflict_pct": 45.0}, "memory", "bank conflicts"),
        ({"stalls": (("wait", 0.5),)}, "compute", "fixed latencies"),
        ({"used_pct": 25.0}, "memory", "25 % of the bytes that loads move are asked for"),
        ({"local_bytes": 4096.0}, "block", "4096 bytes go to spilled registers"),
    ],
)  # fmt: skip
def test_what_warps_wait_for_comes_first(values: dict[str, object], first: str, said: str) -> None:
    found = diagnose(RMSNORM, LARGE_NORM, FAR, H200, Resources(), counters(**values))
    assert found.bound == "latency"
    assert found.prescriptions[0] == first and said in found.reasons[0]
    assert len(set(found.prescriptions)) == len(found.prescriptions) == len(found.reasons)


def test_counters_leave_what_the_time_tells_alone() -> None:
    idle = counters(dram_pct=5.0, waves=0.1)
    assert diagnose(RMSNORM, LARGE_NORM, 80.0, H200, Resources(), idle).bound == "memory"
    tiny = RMSNORM.build({"M": 4, "N": 512}, "bfloat16", {})
    assert diagnose(RMSNORM, tiny, 4.0, H200, Resources(), idle).bound == "launch"
    assert diagnose(RMSNORM, LARGE_NORM, FAR, H200, Resources(), idle).bound == "underutilized"


def test_every_prescription_is_a_kind_of_tunable_with_its_reason() -> None:
    for latency_us in (3.0, 70.0, 400.0, 1e5):
        for workload in (LARGE_NORM, RMSNORM.build({"M": 8, "N": 16384}, "bfloat16", {})):
            found = diagnose(RMSNORM, workload, latency_us, H200, Resources(registers=255, spill_bytes=8))
            assert set(found.prescriptions) <= set(ACTS_ON)
            assert len(set(found.prescriptions)) == len(found.prescriptions) == len(found.reasons) > 0


def test_a_time_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        diagnose(RMSNORM, LARGE_NORM, 0.0, H200)
