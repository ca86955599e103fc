"""Known GPUs, what is here, measured ceilings, floors, and the lock that makes measurements take turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch

from autokernel_hf import ceilings, gpu
from autokernel_hf.ceilings import Bandwidth, Ceilings
from autokernel_hf.errors import DeviceError, UsageError
from autokernel_hf.kernels import kernel_type
from autokernel_hf.known_gpus import KNOWN_GPUS, known_gpu
from autokernel_hf.records import DeviceInfo

NAMES = {
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H200": "H200 SXM",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA GH200 480GB": "GH200 96GB",
    "NVIDIA GH200 144G HBM3e": "GH200 144GB",
    "NVIDIA B200": "B200",
    "NVIDIA B300 SXM6 AC": "B300",
    "NVIDIA A100-SXM4-40GB": "A100 SXM 40GB",
    "A100-SXM4-40GB": "A100 SXM 40GB",
    "NVIDIA A100-SXM4-80GB": "A100 SXM 80GB",
    "NVIDIA A100-PCIE-40GB": "A100 PCIe 40GB",
    "NVIDIA A100 80GB PCIe": "A100 PCIe 80GB",
    "NVIDIA L40S": "L40S",
    "NVIDIA L40": "L40",
    "NVIDIA L4": "L4",
    "NVIDIA A10": "A10",
    "NVIDIA A40": "A40",
    "NVIDIA RTX A6000": "RTX A6000",
    "NVIDIA GeForce RTX 3080": "RTX 3080",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
    "NVIDIA GeForce RTX 4080": "RTX 4080",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 5080": "RTX 5080",
    "NVIDIA GeForce RTX 5090": "RTX 5090",
    "Tesla T4": "T4",
    "Tesla V100-SXM2-16GB": "V100 SXM",
    "Tesla V100-SXM2-32GB": "V100 SXM",
    "Tesla V100-PCIE-16GB": "V100 PCIe",
    "AMD Instinct MI300X": "MI300X",
    "AMD Instinct MI325X": "MI325X",
    "AMD Instinct MI350X": "MI350X",
    "AMD Instinct MI355X": "MI355X",
}


@pytest.mark.parametrize(("reported", "name"), NAMES.items())
def test_a_reported_name_finds_its_own_row(reported: str, name: str) -> None:
    spec = known_gpu(reported)
    assert spec is not None
    assert spec.name == name


def test_every_row_is_reached_by_a_reported_name() -> None:
    assert {spec.name for spec in KNOWN_GPUS} == set(NAMES.values())


@pytest.mark.parametrize(
    "reported",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H100",
        "NVIDIA A10G",
        "NVIDIA GeForce RTX 3080 Ti",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA RTX 6000 Ada Generation",
        "NVIDIA L40G",
        "Some GPU of next year",
        "",
    ],
)
def test_a_device_that_is_not_listed_has_no_row(reported: str) -> None:
    assert known_gpu(reported) is None


def test_rates_are_dense_and_each_gpu_has_its_own() -> None:
    specs = {spec.name: spec for spec in KNOWN_GPUS}
    assert specs["H100 SXM"].bf16_tflops == pytest.approx(989.4)  # 1979 is with sparsity
    assert specs["H100 PCIe"].memory_gb_s < 0.65 * specs["H100 SXM"].memory_gb_s
    assert specs["L40"].bf16_tflops == pytest.approx(specs["L40S"].bf16_tflops / 2, rel=0.01)
    assert specs["H200 SXM"].memory_gb_s == 4800
    for spec in KNOWN_GPUS:
        assert spec.source
        if spec.fp8_tflops is not None:  # twice as fast as 16 bits, everywhere
            assert spec.fp8_tflops == pytest.approx(2 * spec.fp16_tflops, rel=0.02), spec.name


# --- what is here -------------------------------------------------------------------------------------------------


def test_the_cpu_is_described_as_it_is() -> None:
    info = gpu.device_info("cpu")
    assert info.kind == "cpu"
    assert 1 <= info.units <= (os.cpu_count() or 1)
    assert info.memory_bytes > 1 << 28
    assert info.torch == torch.__version__
    assert abs(datetime.now(timezone.utc) - datetime.fromisoformat(info.date)) < timedelta(minutes=5)


def test_cores_follow_the_affinity_of_the_process() -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("no affinity on this system")
    one = next(iter(os.sched_getaffinity(0)))
    code = f"import os; os.sched_setaffinity(0, {{{one}}}); from autokernel_hf import gpu; print(gpu.device_info('cpu').units)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "1", done.stderr


def test_levels_of_x86_include_each_other() -> None:
    v2 = {"cx16", "lahf_lm", "popcnt", "ssse3", "sse4_1", "sse4_2"}
    v3 = v2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
    v4 = v3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    assert [gpu.x86_level(f) for f in (set(), v2, v3, v4)] == [
        "x86-64",
        "x86-64-v2",
        "x86-64-v3",
        "x86-64-v4",
    ]
    assert gpu.x86_level(v4 - {"fma"}) == "x86-64-v2"


def test_a_missing_gpu_is_told_with_a_remedy() -> None:
    with pytest.raises(DeviceError) as error:
        gpu.device_info("cuda:99")
    assert "cuda:99" in error.value.message
    assert error.value.remedy
    with pytest.raises(UsageError):
        gpu.resolve_device("gpu")
    with pytest.raises(UsageError):
        gpu.resolve_device("cuda:x")


def test_auto_is_a_gpu_only_where_there_is_one() -> None:
    assert gpu.resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert gpu.resolve_device(torch.device("cpu")) == torch.device("cpu")


# --- floors -------------------------------------------------------------------------------------------------------


def limits(kind: str = "cpu", units: int = 2, **changes: object) -> Ceilings:
    device = DeviceInfo(
        kind=kind,  # type: ignore[arg-type]
        name="constructed",
        arch="x",
        units=units,
        memory_bytes=1 << 34,
        torch=torch.__version__,
        date=datetime.now(timezone.utc).isoformat(),
    )
    values: dict[str, object] = {
        "device": device,
        "threads": 2,
        "busy": False,
        "bandwidths": (
            Bandwidth(footprint_bytes=1 << 20, copy_gb_s=100.0, read_gb_s=80.0),
            Bandwidth(footprint_bytes=1 << 24, copy_gb_s=20.0, read_gb_s=10.0),
        ),
        "matmul_tflops": {"float32": 0.1, "bfloat16": 0.4},
        "launch_us": 1.0,
    }
    return Ceilings.model_validate({**values, **changes})


def test_bandwidth_belongs_to_a_footprint() -> None:
    known = limits()
    assert known.bandwidth_gb_s(1 << 10) == 100.0
    assert known.bandwidth_gb_s(1 << 22) == pytest.approx(60.0)  # half way, by the logarithm
    assert known.bandwidth_gb_s(1 << 30) == 20.0
    assert (known.copy_gb_s, known.read_gb_s) == (20.0, 10.0)


def test_the_floor_is_the_largest_of_bytes_flops_and_launch() -> None:
    activation, matmul = kernel_type("activation"), kernel_type("matmul")
    large = activation.build({"M": 1024, "N": 4096}, "float32", {"kind": "gelu_new"})
    assert ceilings.floor_us(activation, large, limits()) == (pytest.approx(2 * 4 * 2**22 / 20e3), "memory")
    small = activation.build({"M": 1, "N": 8}, "float32", {"kind": "gelu_new"})
    assert ceilings.floor_us(activation, small, limits()) == (1.0, "launch")
    product = matmul.build({"M": 512, "K": 512, "N": 512}, "float32", {})
    us, bound = ceilings.floor_us(matmul, product, limits())
    assert bound == "compute"
    assert us == pytest.approx(2 * 512**3 / 0.1e6, rel=0.02)
    assert (
        ceilings.floor_us(matmul, product, limits(matmul_tflops={})).bound != "compute"
    )  # no rate is made up


def test_a_float32_product_may_come_from_three_of_tf32() -> None:
    assert limits(matmul_tflops={"float32": 50.0, "tf32": 400.0}).rate_tflops("float32") == pytest.approx(
        400 / 3
    )
    assert limits(matmul_tflops={"float32": 50.0, "tf32": 90.0}).rate_tflops("float32") == 50.0


# --- ceilings -----------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """A measurement that is short, and a count of how often it is made."""
    made: list[int] = []
    measure = ceilings._measure_cpu

    def counted(info: DeviceInfo) -> Ceilings:
        made.append(1)
        return measure(info)

    monkeypatch.setenv("AUTOKERNEL_HF_CACHE", str(tmp_path))
    monkeypatch.setattr(ceilings, "CPU_FOOTPRINTS", (1 << 16, 1 << 22))
    monkeypatch.setattr(ceilings, "_CPU_BUDGET_S", 0.0)
    monkeypatch.setattr(ceilings, "_CPU_RUNS", 4)
    monkeypatch.setattr(ceilings, "_is_busy", lambda: False)
    monkeypatch.setattr(ceilings, "_measure_cpu", counted)
    return made


def test_ceilings_are_measured_once_and_again_when_they_are_old(quick: list[int], tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    first = ceilings.measure_ceilings("cpu")
    assert torch.get_num_threads() == threads
    assert first.launch_us > 0
    assert first.matmul_tflops["float32"] > 1e-4
    assert all(b.copy_gb_s > 0.01 and b.read_gb_s > 0.01 for b in first.bandwidths)
    assert ceilings.measure_ceilings("cpu") == first
    assert len(quick) == 1

    (path,) = (tmp_path / "ceilings").iterdir()
    record = json.loads(path.read_text())
    record["device"]["date"] = (datetime.now(timezone.utc) - timedelta(days=8)).isoformat()
    path.write_text(json.dumps(record))
    ceilings.measure_ceilings("cpu")
    assert len(quick) == 2
    ceilings.measure_ceilings("cpu", refresh=True)
    assert len(quick) == 3
    path.write_text("not a record")
    ceilings.measure_ceilings("cpu")
    assert len(quick) == 4


def test_ceilings_of_a_busy_machine_soon_expire(
    quick: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "_is_busy", lambda: True)
    assert ceilings.measure_ceilings("cpu").busy
    (path,) = (tmp_path / "ceilings").iterdir()
    record = json.loads(path.read_text())
    record["device"]["date"] = (datetime.now(timezone.utc) - timedelta(minutes=11)).isoformat()
    path.write_text(json.dumps(record))
    ceilings.measure_ceilings("cpu")
    assert len(quick) == 2


# --- the lock -----------------------------------------------------------------------------------------------------

HOLDER = textwrap.dedent("""
    import sys, time
    from autokernel_hf.gpu import device_lock
    with device_lock("cpu"):
        print("held", flush=True)
        time.sleep(120)
""")


@pytest.fixture
def holder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> subprocess.Popen[str]:  # type: ignore[misc]
    """Another process that has the lock of the CPU."""
    monkeypatch.setenv("AUTOKERNEL_HF_CACHE", str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_lock_shuts_out_another_process_and_names_it(holder: subprocess.Popen[str]) -> None:
    with pytest.raises(DeviceError) as error, gpu.device_lock("cpu", timeout_s=0.2):
        pytest.fail("two processes have the lock")
    assert f"process {holder.pid}" in error.value.message
    assert error.value.remedy


def test_the_lock_of_a_killed_process_is_free(holder: subprocess.Popen[str]) -> None:
    entered = threading.Event()

    def wait_for_it() -> None:
        with gpu.device_lock("cpu", timeout_s=60):
            entered.set()

    waiter = threading.Thread(target=wait_for_it)
    waiter.start()
    assert not entered.wait(0.3)
    holder.kill()
    assert entered.wait(30)
    waiter.join()


def test_the_lock_is_free_within_its_own_thread_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOKERNEL_HF_CACHE", str(tmp_path))
    refused: list[BaseException] = []

    def other() -> None:
        try:
            with gpu.device_lock("cpu", timeout_s=0.1):
                pass
        except DeviceError as error:
            refused.append(error)

    with gpu.device_lock("cpu", timeout_s=1):
        with gpu.device_lock("cpu", timeout_s=1):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        assert len(refused) == 1
    started = time.monotonic()
    with gpu.device_lock("cpu", timeout_s=1):
        assert time.monotonic() - started < 0.5


# --- GPUs ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_ceilings_of_a_gpu_lie_below_what_its_maker_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOKERNEL_HF_CACHE", str(tmp_path))
    info = gpu.device_info("cuda:0")
    assert info.units > 0
    assert info.cuda
    before = torch.backends.cuda.matmul.allow_tf32
    measured = ceilings.measure_ceilings("cuda:0")
    assert torch.backends.cuda.matmul.allow_tf32 == before
    assert ceilings.measure_ceilings("cuda:0") == measured
    assert 0.1 < measured.launch_us < 50
    spec = known_gpu(info.name)
    if spec is None:
        pytest.skip(f"{info.name} is not in the table")
    assert info.arch == spec.arch
    assert 0.6 * spec.memory_gb_s < measured.copy_gb_s < 1.02 * spec.memory_gb_s
    assert 0.5 * spec.fp16_tflops < measured.matmul_tflops["float16"] < 1.05 * spec.fp16_tflops
    assert 0.4 * spec.fp32_tflops < measured.matmul_tflops["float32"] < 1.1 * spec.fp32_tflops
    if spec.fp8_tflops is not None:
        assert 0.3 * spec.fp8_tflops < measured.matmul_tflops["float8_e4m3fn"] < 1.05 * spec.fp8_tflops
