"""Compiling the variants of a Triton candidate side by side, in processes.

Triton holds the interpreter's lock for most of what it does, so that threads compile one after the other: the variants
that all stages need take ten seconds. A child forks itself for the length of a batch. A copy touches no device, which a
fork could not: its tensors lie on the CPU, with the dtypes, strides and alignments that variants are told by; Triton is
asked to compile and not to launch; and its driver answers from what the child knew before. What the copies compile goes
to the child's own cache on disk, where its calls find it. What they fail at is left for the call that counts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autokernel_hf.judge import sandbox
from autokernel_hf.judge.arena import Slot
from autokernel_hf.judge.watchdog import free_bytes, resident_bytes
from autokernel_hf.kernels.base import DTYPES, materialize
from autokernel_hf.records import TensorSpec

_MOST_PROCESSES = 8
_MEMORY_SHARE = 0.3  # of what is free, that copies may seem to take
_LONGEST_S = 60.0
_POLL_S = 0.01

Call = list[list[Any]]
"""The arguments of a call as they come over the wire: names, and slots or values."""


class _Utils:
    def __init__(self, properties: Any) -> None:
        self._properties = properties

    def get_device_properties(self, device: int) -> Any:
        return self._properties


@dataclass(frozen=True)
class StillDriver:
    """What Triton asks its driver while it compiles, answered without a device."""

    target: Any
    utils: _Utils
    launcher_cls: Callable[[Any, Any], Any] | None

    @classmethod
    def like(cls, active: Any) -> StillDriver:
        properties = active.utils.get_device_properties(active.get_current_device())
        return cls(active.get_current_target(), _Utils(properties), getattr(active, "launcher_cls", None))

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


def processes_for(calls: int) -> int:
    """How many copies are worth it for so many calls, with the cores and the memory that there are; 0 for none."""
    room = int(_MEMORY_SHARE * free_bytes()) // max(resident_bytes(os.getpid()), 1)
    cores = len(sandbox.ALL_CPUS) or 1
    count = min(_MOST_PROCESSES, cores, calls, room)
    return count if count > 1 else 0


def side_by_side(
    kernel_fn: Callable[..., Any], calls: Sequence[Call], driver: StillDriver, processes: int, *, close: int
) -> None:
    """Compile what the calls need, and wait for it.

    Args:
        close: A descriptor that is not for the copies.
    """
    pids = []
    for i in range(processes):
        try:
            pid = os.fork()
        except OSError:  # no more processes; what is not compiled here, the calls compile themselves
            break
        if pid == 0:
            try:
                sandbox.die_with_parent()
                os.close(close)
                compile_calls(kernel_fn, calls[i::processes], driver)
            finally:
                os._exit(0)
        pids.append(pid)
    until = time.monotonic() + _LONGEST_S
    while pids and time.monotonic() < until:
        time.sleep(_POLL_S)
        pids = [pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0] == 0]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def compile_calls(kernel_fn: Callable[..., Any], calls: Sequence[Call], driver: StillDriver) -> None:
    """Compile what the calls need in this process, which is of no other use afterwards."""
    from triton.runtime import driver as drivers
    from triton.runtime.jit import JITFunction

    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    drivers.set_active(driver)
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if driver.launcher_cls is not None and kernel is not None:
            with contextlib.suppress(Exception):
                driver.launcher_cls(kernel.src, kernel.metadata)  # which some versions compile too
        return kernel

    JITFunction.run = compile_only
    for call in calls:
        # Whatever a candidate raises, the call that counts will raise again.
        with contextlib.suppress(BaseException):
            kernel_fn(**{name: _stand_in(value) for name, value in call})


def _stand_in(value: Any) -> Any:
    """A tensor of the same form on the CPU, holding zeros; anything else as it is."""
    if not isinstance(value, dict):
        return value
    spec: TensorSpec = Slot.from_json(value).spec
    return materialize(torch.zeros(spec.shape, dtype=DTYPES[spec.dtype]), spec)
