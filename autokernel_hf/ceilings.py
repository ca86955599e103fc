"""How fast a device can be, and the least time that a call can take on it.

Two sources of ceilings, never mixed. `KNOWN_GPUS` holds what makers publish, dense, for people to compare with.
`measure_ceilings` measures what this device gives here, which is what floors and diagnoses are made from: no maker's
number is ever reached, and a device that nobody has listed is measured all the same.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from autokernel_hf.cache import cache_root
from autokernel_hf.gpu import Device, device_info, device_lock, resolve_device
from autokernel_hf.kernels.base import KernelType
from autokernel_hf.records import DeviceInfo, Record, Workload

log = logging.getLogger(__name__)

CEILINGS_MAX_AGE = timedelta(days=7)
BUSY_MAX_AGE = timedelta(minutes=10)
"""Of ceilings that were measured while others used the processors: they are too low, if anything."""


class Bandwidth(Record):
    """What memory gives where `footprint_bytes` are touched again and again; bytes read and written both count."""

    footprint_bytes: int
    copy_gb_s: float
    read_gb_s: float


class Ceilings(Record):
    """The best that a device gave here: no maker's number, and no promise for another machine.

    On a CPU small data stays in caches, so bandwidth belongs to a footprint. On a GPU calls are judged with a cold
    cache, so there is one bandwidth, that of its memory.

    Args:
        matmul_tflops: By dtype, and "tf32" for float32 products that the matrix units round to TensorFloat-32.
        launch_us: The shortest time that a call takes, whatever it does.
        busy: Whether others used the processors meanwhile.
    """

    device: DeviceInfo
    threads: int
    busy: bool
    bandwidths: tuple[Bandwidth, ...]  # by rising footprint
    matmul_tflops: dict[str, float]
    launch_us: float

    @property
    def copy_gb_s(self) -> float:
        """Bandwidth of a copy beyond all caches."""
        return self.bandwidths[-1].copy_gb_s

    @property
    def read_gb_s(self) -> float:
        """Bandwidth of reading beyond all caches."""
        return self.bandwidths[-1].read_gb_s

    def bandwidth_gb_s(self, footprint_bytes: float) -> float:
        """The better of copying and reading at a footprint, between the measured ones by its logarithm."""
        points = [(math.log(b.footprint_bytes), max(b.copy_gb_s, b.read_gb_s)) for b in self.bandwidths]
        x = math.log(max(footprint_bytes, 1.0))
        if x <= points[0][0]:
            return points[0][1]
        for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
            if x <= x1:
                return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
        return points[-1][1]

    def rate_tflops(self, dtype: str) -> float | None:
        """The rate of products in a dtype; None where it was not measured.

        A float32 product may be put together from three of TensorFloat-32 without losing digits.
        """
        rate = self.matmul_tflops.get(dtype)
        tf32 = self.matmul_tflops.get("tf32")
        if dtype == "float32" and rate is not None and tf32 is not None:
            return max(rate, tf32 / 3)
        return rate


class Floor(NamedTuple):
    """The least time of a call on a device, and what sets it."""

    us: float
    bound: Literal["memory", "compute", "launch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The three floors of a call, in us. `compute_us` is 0 where the dtype's rate is not known."""

    memory_us: float
    compute_us: float
    launch_us: float

    @property
    def floor(self) -> Floor:
        candidates = (
            Floor(self.memory_us, "memory"),
            Floor(self.compute_us, "compute"),
            Floor(self.launch_us, "launch"),
        )
        return max(candidates, key=lambda floor: floor.us)


def roofline(kernel_type: KernelType, workload: Workload, ceilings: Ceilings) -> Roofline:
    """The least times for a call's bytes, for its flops, and for any call at all."""
    bytes_moved = kernel_type.bytes_moved(workload)
    rate = ceilings.rate_tflops(workload.dtype)
    return Roofline(
        memory_us=bytes_moved / ceilings.bandwidth_gb_s(bytes_moved) / 1e3,
        compute_us=kernel_type.flops(workload) / rate / 1e6 if rate else 0.0,
        launch_us=ceilings.launch_us,
    )


def floor_us(kernel_type: KernelType, workload: Workload, ceilings: Ceilings) -> Floor:
    """The least time of a call: the largest of its bytes over bandwidth, its flops over rate, and a launch."""
    return roofline(kernel_type, workload, ceilings).floor


def measure_ceilings(device: Device, *, refresh: bool = False) -> Ceilings:
    """The ceilings of a device, measured here; kept on disk for a week, for the same device, versions and threads.

    Args:
        refresh: Measure even if there is a record.

    Raises:
        DeviceError: There is no such GPU, or another process does not let go of it.
    """
    resolved = resolve_device(device)
    info = device_info(resolved)
    path = cache_root() / "ceilings" / f"{_ceilings_key(info)}.json"
    known = None if refresh else _recent(path)
    if known is not None:
        return known
    with device_lock(resolved):
        known = None if refresh else _recent(path)  # measured while this process waited
        if known is not None:
            return known
        log.info("measuring what %s can do (once a week)", info.name)
        measured = _measure_gpu(resolved, info) if resolved.type == "cuda" else _measure_cpu(info)
        measured.save(path)
    return measured


def _ceilings_key(info: DeviceInfo) -> str:
    parts = (
        info.kind,
        info.name,
        info.arch,
        info.units,
        info.memory_bytes,
        info.torch,
        info.cuda,
        info.driver,
    )
    text = "\0".join(map(str, (*parts, torch.get_num_threads() if info.kind == "cpu" else 0)))
    return f"{info.kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _recent(path: Path) -> Ceilings | None:
    """A record that is there, can be read and is not too old."""
    if not path.exists():
        return None
    try:
        record = Ceilings.load(path)
    except ValueError:  # of another version of this program
        return None
    age = datetime.now(timezone.utc) - datetime.fromisoformat(record.device.date)
    limit = BUSY_MAX_AGE if record.busy else CEILINGS_MAX_AGE
    return record if timedelta(0) <= age < limit else None


def _is_busy() -> bool:
    """Whether other programs keep the processors of this machine busy."""
    return os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1)


CPU_FOOTPRINTS = tuple(1 << n for n in (15, 17, 19, 21, 23, 25, 27, 28))
_CPU_BUDGET_S = 0.1  # a footprint and an operation
_CPU_RUNS = 20
_CPU_LARGE = 1 << 26
_SLOW_MATMUL_S = 0.3


def _measure_cpu(info: DeviceInfo) -> Ceilings:
    busy = _is_busy()
    bandwidths = []
    for footprint in CPU_FOOTPRINTS:
        copied, read = _cpu_bandwidth(footprint)
        bandwidths.append(Bandwidth(footprint_bytes=footprint, copy_gb_s=copied, read_gb_s=read))
    one = torch.zeros(1)
    launch_s = _best_s(lambda: torch.add(one, one, out=one), _CPU_BUDGET_S, _CPU_RUNS)
    return Ceilings(
        device=info,
        threads=torch.get_num_threads(),
        busy=busy,
        bandwidths=tuple(bandwidths),
        matmul_tflops={
            name: rate
            for name, dtype in (
                ("float32", torch.float32),
                ("bfloat16", torch.bfloat16),
                ("float16", torch.float16),
            )
            if (rate := _cpu_matmul_tflops(dtype)) is not None
        },
        launch_us=launch_s * 1e6,
    )


def _cpu_bandwidth(footprint: int) -> tuple[float, float]:
    """GB/s of copying and of reading: a copy's two halves, or one tensor, are `footprint` bytes together."""
    source, target = torch.zeros(footprint // 8), torch.zeros(footprint // 8)
    both = torch.zeros(footprint // 4)
    runs = _CPU_RUNS if footprint < _CPU_LARGE else _CPU_RUNS // 2
    copied = _best_s(lambda: target.copy_(source), _CPU_BUDGET_S, runs)
    read = _best_s(lambda: both.sum(), _CPU_BUDGET_S, runs)
    return footprint / copied / 1e9, footprint / read / 1e9


def _cpu_matmul_tflops(dtype: torch.dtype) -> float | None:
    size = 1024 if dtype == torch.float32 else 512
    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    started = time.perf_counter()
    try:
        torch.mm(a, b)
    except RuntimeError as error:  # a torch without this product
        log.debug("no product of %s here: %s", dtype, error)
        return None
    first = time.perf_counter() - started
    best = first if first > _SLOW_MATMUL_S else _best_s(lambda: torch.mm(a, b), _CPU_BUDGET_S, _CPU_RUNS // 2)
    return 2.0 * size**3 / best / 1e12


def _best_s(call: Callable[[], object], budget_s: float, runs: int) -> float:
    """The shortest of many runs, with all threads and with one in turn.

    What disturbs a run only ever makes it longer; small work, and all work on a busy machine, is faster on one thread.
    """
    threads = torch.get_num_threads()
    best, spent, done = math.inf, 0.0, 0
    try:
        while done < runs or spent < budget_s:
            torch.set_num_threads(threads if done % 2 else 1)
            call()
            started = time.perf_counter()
            call()
            took = time.perf_counter() - started
            best, spent, done = min(best, took), spent + took, done + 1
    finally:
        torch.set_num_threads(threads)
    return best


_GPU_BYTES = 1 << 30  # of a copy's source; far beyond any cache


def _measure_gpu(device: torch.device, info: DeviceInfo) -> Ceilings:
    busy = _is_busy()
    with torch.cuda.device(device), torch.no_grad():
        bandwidth = _gpu_bandwidth(device)
        rates = _gpu_matmul_tflops(device)
        launch_us = _gpu_launch_us(device)
        torch.cuda.empty_cache()
    return Ceilings(
        device=info,
        threads=torch.get_num_threads(),
        busy=busy,
        bandwidths=(bandwidth,),
        matmul_tflops=rates,
        launch_us=launch_us,
    )


def _gpu_bandwidth(device: torch.device) -> Bandwidth:
    free, _ = torch.cuda.mem_get_info(device)
    size = min(_GPU_BYTES, free // 8) // 4
    source = torch.zeros(size, device=device)
    target = torch.empty_like(source)
    copied = 8 * size / _best_gpu_s(lambda: target.copy_(source)) / 1e9
    read = 4 * size / _best_gpu_s(lambda: source.sum()) / 1e9
    return Bandwidth(footprint_bytes=8 * size, copy_gb_s=copied, read_gb_s=read)


def _best_gpu_s(call: Callable[[], object], runs: int = 20) -> float:
    """The shortest time of a call on the current device; the queue is filled first, so that no launch is waited for."""
    for _ in range(3):
        call()
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)
    ]
    for begin, end in marks:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return min(float(begin.elapsed_time(end)) for begin, end in marks) / 1e3


def _gpu_matmul_tflops(device: torch.device) -> dict[str, float]:
    free, _ = torch.cuda.mem_get_info(device)
    size = 8192 if free > 4 << 30 else 2048
    generator = torch.Generator(device).manual_seed(0)
    # Random numbers: a product of zeros draws less power, and runs at a higher clock.
    wide = torch.randn(2, size, size, device=device, generator=generator)
    flops, rates = 2.0 * size**3, {}
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for name, allow in (("float32", False), ("tf32", True)):
            if allow and torch.cuda.get_device_capability(device) < (8, 0):
                continue
            torch.backends.cuda.matmul.allow_tf32 = allow
            rates[name] = flops / _best_gpu_s(lambda: torch.mm(wide[0], wide[1]), 5) / 1e12
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        if name == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            continue
        a, b = wide.to(dtype).unbind()
        rates[name] = flops / _best_gpu_s(lambda a=a, b=b: torch.mm(a, b), 10) / 1e12  # type: ignore[misc]
    fp8 = _gpu_fp8_tflops(wide, flops)
    if fp8 is not None:
        rates["float8_e4m3fn"] = fp8
    return rates


def _gpu_fp8_tflops(wide: torch.Tensor, flops: float) -> float | None:
    if torch.version.hip or torch.cuda.get_device_capability(wide.device) < (8, 9):
        return None
    a, b = wide[0].to(torch.float8_e4m3fn), wide[1].to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=wide.device)
    best = _best_gpu_s(lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16), 10)
    return flops / best / 1e12


def _gpu_launch_us(device: torch.device, launches: int = 200) -> float:
    """Device time of a kernel that does next to nothing, in a queue that is never empty."""
    one = torch.zeros(1, device=device)
    best = math.inf
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(20_000_000)  # some 10 ms, in which the host fills the queue
        begin.record()
        for _ in range(launches):
            one.add_(1.0)
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best * 1e3 / launches
