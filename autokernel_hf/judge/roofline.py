"""Faster than the hardware is a fault of the measurement, not a record.

The ceilings are measured on this device (`ceilings.measure_ceilings`). On a GPU they hold because the timed calls find a
cold cache; on a CPU, where the data may be in a cache, bandwidth is taken at the same footprint, and an accusation is
checked against copies made there and then, since a busy machine makes ceilings look lower than they are.
"""

from __future__ import annotations

import math
import time

import torch

from autokernel_hf.ceilings import Ceilings, roofline
from autokernel_hf.kernels.base import KernelType
from autokernel_hf.records import Workload

# How much less than the floor a time may be. Bandwidth is measured to a few per cent, and reading alone is faster than
# copying. Products of 4096^3 run at higher clocks than those that the rate was measured with, by up to a tenth.
_MEMORY_TOLERANCE = {"cuda": 0.9, "cpu": 0.5}
_COMPUTE_TOLERANCE = {"cuda": 0.8, "cpu": 0.5}
_COPY_TOLERANCE = (
    0.35  # a copy also reads what it writes, so that pure reading takes less than half of its time
)
_COPIES = (100, 1000)
_LEAST_US = 5.0  # on a CPU, calls that short are made of dispatch


def pct_peak(kernel_type: KernelType, workload: Workload, latency_us: float, ceilings: Ceilings) -> float:
    """The share of this device's measured ceiling that a time reaches, in per cent."""
    return min(100.0, 100.0 * roofline(kernel_type, workload, ceilings).floor.us / latency_us)


def beats_hardware(kernel_type: KernelType, workload: Workload, latency_us: float, ceilings: Ceilings) -> str:
    """A phrase on how a time is faster than this device can be; empty where it is not."""
    kind = ceilings.device.kind
    least = roofline(kernel_type, workload, ceilings)
    memory_us, compute_us = least.memory_us, least.compute_us
    if kind == "cpu" and latency_us < _MEMORY_TOLERANCE[kind] * memory_us:
        memory_us = _copy_floor_us(kernel_type, workload, latency_us)
    if latency_us < _MEMORY_TOLERANCE[kind] * memory_us:
        what = (
            f"its least traffic of {kernel_type.bytes_moved(workload) / 1e6:.3g} MB takes {memory_us:.3g} us"
        )
    elif latency_us < _COMPUTE_TOLERANCE[kind] * compute_us:
        what = f"its least work of {kernel_type.flops(workload) / 1e9:.3g} Gflop takes {compute_us:.3g} us"
    else:
        return ""
    return (
        f"is faster than this device can be: {latency_us:.3g} us, where {what} at the ceilings measured here"
    )


def _copy_floor_us(kernel_type: KernelType, workload: Workload, latency_us: float) -> float:
    """The floor by copies made now: as many as it takes to clear the candidate, or to be sure."""
    bytes_moved = int(kernel_type.bytes_moved(workload))
    best = math.inf
    for copies in _COPIES:
        best = min(best, _best_copy_us(bytes_moved, copies))
        if best < _LEAST_US or latency_us >= _COPY_TOLERANCE * best:
            return 0.0
    return best


def _best_copy_us(bytes_moved: int, copies: int) -> float:
    """The shortest time of a copy that reads and writes `bytes_moved` together, with all threads and with one in turn."""
    half = max(bytes_moved // 2, 1)
    source, target = torch.empty(half, dtype=torch.uint8), torch.zeros(half, dtype=torch.uint8)
    threads = torch.get_num_threads()
    best = math.inf
    try:
        for i in range(copies):
            torch.set_num_threads(threads if i % 2 else 1)
            source.fill_(i % 251)
            began = time.perf_counter_ns()
            target.copy_(source)
            best = min(best, (time.perf_counter_ns() - began) / 1e3)
    finally:
        torch.set_num_threads(threads)
    return best
