"""The devices: what is here, and whose turn it is to measure on it. How fast they can be is told by `ceilings`."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import platform
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

import torch

from autokernel_hf.cache import cache_root
from autokernel_hf.errors import DeviceError, UsageError
from autokernel_hf.progress import NOTE
from autokernel_hf.records import DeviceInfo

log = logging.getLogger(__name__)

Device: TypeAlias = "str | torch.device"

LOCK_TIMEOUT_S = 1800.0
_PATIENCE_S = 2.0  # a shorter wait is not worth a word


# --- what is here -------------------------------------------------------------------------------------------------


def resolve_device(device: Device) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N` as a device that is there.

    Raises:
        DeviceError: There is no such GPU.
        UsageError: The name is none of these.
    """
    name = str(device)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda", 0) if count else torch.device("cpu")
    if name == "cpu":
        return torch.device("cpu")
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        raise UsageError(f"There is no device {name!r}.", remedy="Use auto, cpu, cuda or cuda:N.")
    index = int(match[1] or 0)
    if index >= count:
        remedy = (
            f"Use cuda:0 to cuda:{count - 1}."
            if count
            else "Use --device cpu; `autokernel-hf doctor` says what is missing."
        )
        raise DeviceError(
            f"{name} is not there: {count or 'no'} CUDA device{'' if count == 1 else 's'} found.",
            remedy=remedy,
        )
    return torch.device("cuda", index)


def device_info(device: Device) -> DeviceInfo:
    """The device of a measurement, and the versions that produce it.

    Raises:
        DeviceError: There is no such GPU.
        UsageError: The name is no device's.
    """
    resolved = resolve_device(device)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    if resolved.type == "cpu":
        return DeviceInfo(
            kind="cpu",
            name=_cpu_name(),
            arch=_cpu_arch(),
            units=_usable_cores(),
            memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            torch=torch.__version__,
            triton=_version("triton"),
            date=now,
        )
    properties = torch.cuda.get_device_properties(resolved)
    return DeviceInfo(
        kind="cuda",
        index=resolved.index,
        name=properties.name,
        arch=_gpu_arch(properties),
        units=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        torch=torch.__version__,
        triton=_version("triton"),
        cuda=torch.version.cuda or torch.version.hip,
        driver=_driver(),
        date=now,
    )


def _gpu_arch(properties: object) -> str:
    if torch.version.hip:
        return str(getattr(properties, "gcnArchName", "unknown")).partition(":")[0]
    major, minor = getattr(properties, "major", 0), getattr(properties, "minor", 0)
    # From 9.0 on, an architecture has instructions that only its own `a` target may use.
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


_LEVELS = (
    ("x86-64-v2", {"cx16", "lahf_lm", "popcnt", "ssse3", "sse4_1", "sse4_2"}),
    ("x86-64-v3", {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}),
    ("x86-64-v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
)


def x86_level(flags: set[str]) -> str:
    """The highest level of the x86-64 ABI that a processor with these /proc/cpuinfo flags has."""
    level = "x86-64"
    for name, needed in _LEVELS:
        if not needed <= flags:
            break
        level = name
    return level


@cache
def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty on other systems."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _cpu_name() -> str:
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def _cpu_arch() -> str:
    if platform.machine() != "x86_64":
        return platform.machine()
    return x86_level(set(_cpuinfo().get("flags", "").split()))


def _usable_cores() -> int:
    """Cores that this process may run on: its affinity, and its control group's share of time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = Path("/sys/fs/cgroup/cpu.max")
    if limit.exists():
        quota, _, period = limit.read_text(encoding="utf-8").partition(" ")
        if quota.strip().isdigit() and period.strip().isdigit():
            cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def _driver() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None


# --- whose turn it is ---------------------------------------------------------------------------------------------

_held: dict[str, int] = {}
_turns: dict[str, threading.RLock] = {}
_guard = threading.Lock()


@contextlib.contextmanager
def device_lock(device: Device, *, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Sole use of a device among all processes of this user, for a measurement. Nested use in one thread is free.

    The lock is the kernel's own (flock): it ends with its holder, so a killed process leaves none behind.

    Raises:
        DeviceError: Another process has it for longer than `timeout_s`.
    """
    resolved = resolve_device(device)
    name = _lock_name(resolved)
    with _guard:
        turn = _turns.setdefault(name, threading.RLock())
    if not turn.acquire(timeout=timeout_s):
        raise DeviceError(
            f"{resolved} is still in use by another thread after {timeout_s:.0f} s.",
            remedy="Measure one at a time.",
        )
    try:
        if _held.get(name, 0):
            _held[name] += 1
            try:
                yield
            finally:
                _held[name] -= 1
            return
        folder = cache_root() / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / f"device-{name}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _wait_for(descriptor, resolved, timeout_s)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            _held[name] = 1
            try:
                yield
            finally:
                _held[name] = 0
                # Not left to close(): a child that was forked meanwhile shares the lock.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)
    finally:
        turn.release()


def _lock_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    # Two processes may number the same GPU otherwise (CUDA_VISIBLE_DEVICES).
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", f"cuda-{device.index}"))


def _wait_for(descriptor: int, device: torch.device, timeout_s: float) -> None:
    started, told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            if time.monotonic() - started > timeout_s:
                raise DeviceError(
                    f"{device} is still in use by process {holder} after {timeout_s:.0f} s.",
                    remedy="Wait for that measurement, or end the process.",
                ) from None
            if not told and time.monotonic() - started > _PATIENCE_S:
                log.log(NOTE, "waiting for %s, on which process %s is measuring", device, holder)
                told = True
            time.sleep(0.05)
