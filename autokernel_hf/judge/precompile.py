"""Compiling the variants of a Triton candidate side by side, in processes.

Triton holds the interpreter's lock for most of what it does, so that threads compile one after the other: the variants
that all stages need take ten seconds and more. A child forks itself for the length of a batch. A copy touches no device,
which a fork could not: its tensors lie on the CPU, with the dtypes, strides and alignments that variants are told by;
Triton is asked to compile and not to launch; and its driver answers from what the child knew before. What the copies
compile goes to the child's own cache on disk, where its calls find it. What they fail at is left for the call that counts.

The copies take calls off one list, the widest first: its variant may take the assembler ten times as long as another
(a row of 32768 on four warps spills), and must not be the last to be begun. Calls often need the same variant; the copy
that comes to it first compiles it, and the others go on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autokernel_hf.judge import sandbox
from autokernel_hf.judge.arena import Slot
from autokernel_hf.judge.watchdog import free_bytes, resident_bytes
from autokernel_hf.kernels.base import DTYPES, materialize
from autokernel_hf.records import TensorSpec

_MOST_PROCESSES = 16
_MEMORY_SHARE = 0.3  # of what is free, that copies may seem to take
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

    @classmethod
    def described(cls, description: dict[str, Any]) -> StillDriver:
        """What `description` has told of, without the launchers that some versions compile."""
        from triton.backends.compiler import GPUTarget

        target = GPUTarget(*description["target"])
        return cls(target, _Utils({name: int(n) for name, n in description["properties"].items()}), None)

    def description(self) -> dict[str, Any]:
        """The driver's answers as JSON takes them, for `described` in another process."""
        target = self.target
        return {
            "target": [target.backend, target.arch, target.warp_size],
            "properties": self.utils.get_device_properties(0),
        }

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


def processes_for(calls: int) -> int:
    """How many copies are worth it for so many calls, with the cores and the memory that there are; 0 for none.

    One is worth it where there is a second core: the referee draws values meanwhile.
    """
    room = int(_MEMORY_SHARE * free_bytes()) // max(resident_bytes(os.getpid()), 1)
    cores = len(sandbox.ALL_CPUS) or 1
    count = min(_MOST_PROCESSES, cores, calls, room)
    return count if min(cores, room) > 1 else 0


class Claims:
    """Who does what, among processes that share a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self, *what: object) -> bool:
        """Whether this is for the caller to do: nobody has taken it before."""
        name = hashlib.sha256(repr(what).encode()).hexdigest()
        try:
            os.close(os.open(self._folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        return True


def side_by_side(
    kernel_fn: Callable[..., Any],
    calls: Sequence[Call],
    driver: StillDriver,
    processes: int,
    *,
    close: int,
    limit_s: float,
) -> None:
    """Compile what the calls need, and wait for it.

    Args:
        close: A descriptor that is not for the copies.
        limit_s: When copies that are not done are ended.
    """
    folder = Path(tempfile.mkdtemp(prefix="compile-"))
    ordered = sorted(calls, key=_widest, reverse=True)
    pids = []
    for _ in range(processes):
        try:
            pid = os.fork()
        except OSError:  # no more processes; what is not compiled here, the calls compile themselves
            break
        if pid == 0:
            try:
                sandbox.die_with_parent()
                os.close(close)
                compile_calls(kernel_fn, ordered, driver, Claims(folder))
            finally:
                os._exit(0)
        pids.append(pid)
    until = time.monotonic() + limit_s
    while pids and time.monotonic() < until:
        time.sleep(_POLL_S)
        pids = [pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0] == 0]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    shutil.rmtree(folder, ignore_errors=True)


def _widest(call: Call) -> int:
    """The largest size of a call's tensors: what blocks grow with, and the assembler's time with them."""
    return max((max(v["spec"]["shape"], default=1) for _, v in call if isinstance(v, dict)), default=0)


def compile_calls(
    kernel_fn: Callable[..., Any], calls: Sequence[Call], driver: StillDriver, claims: Claims
) -> None:
    """Compile what calls that nobody has taken need, in this process, which is of no other use afterwards."""
    from triton.runtime import driver as drivers
    from triton.runtime.jit import JITFunction

    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    drivers.set_active(driver)
    run, compile_one = JITFunction.run, JITFunction._do_compile

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if driver.launcher_cls is not None and kernel is not None:
            with contextlib.suppress(Exception):  # some versions compile a launcher for each signature too
                if claims.take("launcher", sorted(map(str, kernel.src.signature.items()))):
                    driver.launcher_cls(kernel.src, kernel.metadata)
        return kernel

    def compile_unless_taken(self: Any, key: Any, *args: Any, **options: Any) -> Any:
        if not claims.take("variant", self.__module__, self.__name__, str(key)):
            return None
        return compile_one(self, key, *args, **options)

    JITFunction.run, JITFunction._do_compile = compile_only, compile_unless_taken
    for number, call in enumerate(calls):
        if not claims.take("call", number):
            continue
        # Whatever a candidate raises, the call that counts will raise again.
        with contextlib.suppress(BaseException):
            kernel_fn(**{name: _stand_in(value) for name, value in call})


def _stand_in(value: Any) -> Any:
    """A tensor of the same form on the CPU, holding zeros; anything else as it is."""
    if not isinstance(value, dict):
        return value
    spec: TensorSpec = Slot.from_json(value).spec
    return materialize(torch.zeros(spec.shape, dtype=DTYPES[spec.dtype]), spec)
