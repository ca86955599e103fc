"""Clocks of a device's work: whole passes, and points within them."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)


class Clock(Protocol):
    """Times a device's work: whole passes, and points within them."""

    def pass_ms(self, run: Callable[[], Any]) -> float:
        """Wall time of a pass, from an idle device to an idle device."""
        ...

    def device_ms(self, run: Callable[[], Any]) -> float | None:
        """How long a GPU works in a pass, its waiting for launches left out; None on a CPU, and where it is not told."""

    def mark(self) -> Any: ...
    def join(self) -> None:
        """Wait until all work before is done; times between marks can be read then."""
        ...

    def between(self, begin: Any, end: Any) -> float:
        """Milliseconds."""
        ...


class CpuClock:
    def pass_ms(self, run: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e3

    def device_ms(self, run: Callable[[], Any]) -> float | None:
        return None

    def mark(self) -> int:
        return time.perf_counter_ns()

    def join(self) -> None:
        pass

    def between(self, begin: int, end: int) -> float:
        return (end - begin) / 1e6


class CudaClock:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pass_ms(self, run: Callable[[], Any]) -> float:
        self.join()
        begin = time.perf_counter()
        run()
        self.join()
        return (time.perf_counter() - begin) * 1e3

    def device_ms(self, run: Callable[[], Any]) -> float | None:
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as record

        self.join()
        with record(activities=[ProfilerActivity.CUDA]) as recorded:
            run()
            self.join()
        events = [e for e in recorded.key_averages() if e.device_type == DeviceType.CUDA]
        if not events:
            logger.warning(
                "this system records no GPU work: whether the pass waits for launches is not known"
            )
            return None
        return math.fsum(e.self_device_time_total for e in events) / 1e3

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def join(self) -> None:
        torch.cuda.synchronize(self._device)

    def between(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end))


def clock_of(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def overhead_ms(clock: Clock, pairs: int = 200) -> float:
    """The time between two marks with nothing in between."""
    marks = [(clock.mark(), clock.mark()) for _ in range(pairs)]
    clock.join()
    return statistics.median(clock.between(begin, end) for begin, end in marks)
