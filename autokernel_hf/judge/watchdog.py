"""Ends a process that takes more memory than this machine can spare, before the system ends something else."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from autokernel_hf.judge.quiet import family
from autokernel_hf.judge.remote import Process

_EVERY_S = 0.05
_FAMILIES_EVERY = 10
_SHARE = 0.7  # of what is free when the session starts


def free_bytes() -> int:
    """The memory that can be had now without swapping; of all where the system does not tell."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def resident_bytes(pid: int) -> int:
    """The memory that a process holds; 0 where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    except OSError:
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


class Watchdog:
    """Looks at processes many times a second, from the referee, and ends those that hold too much.

    A look costs some microseconds, so that it does not show in what is timed; which processes a process has started is
    looked up less often.

    Args:
        limit_bytes: What one process with its descendants may hold beyond what it was given; None for most of what is
            free now.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes if limit_bytes is not None else int(_SHARE * free_bytes())
        self._watched: list[Process] = []
        self._families: dict[int, list[int]] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def watch(self, process: Process) -> None:
        with self._lock:
            self._watched.append(process)

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        looks = 0
        while not self._over.wait(_EVERY_S):
            with self._lock:
                self._watched = [p for p in self._watched if not p.ended]
                watched = list(self._watched)
            if looks % _FAMILIES_EVERY == 0:
                self._families = {p.pid: family(p.pid) for p in watched}
            looks += 1
            for process in watched:
                members = self._families.get(process.pid, [process.pid])
                held = sum(map(resident_bytes, members)) - process.granted_bytes
                if held > self.limit_bytes:
                    process.too_large = (
                        f"took {held / 1e9:.1f} GB of memory, more than the {self.limit_bytes / 1e9:.1f} GB that "
                        "this machine can spare"
                    )
                    process.spawned.kill()
