"""The processor that a turn has: waiting until one is free, and the same one for all.

Threads of an OpenMP pool spin for a while after a parallel region ends. The contenders of a round live in several
processes, so without waiting the pool of the one that just finished takes a core from the one whose turn it is.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

_POLL_S = 0.001


def wait_for_quiet(pids: Iterable[int], *, limit_s: float) -> bool:
    """Wait until no thread of these processes, of their descendants, and no other thread of this one, runs.

    Returns:
        Whether that was reached within the limit.
    """
    roots = list(pids)
    deadline = time.monotonic() + limit_s
    while True:
        if not _own_threads_run() and not any(_runs(pid) for root in roots for pid in family(root)):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)


def _own_threads_run() -> bool:
    me = str(threading.get_native_id())
    return any(_state(task) == "R" for task in Path("/proc/self/task").iterdir() if task.name != me)


def _runs(pid: int) -> bool:
    try:
        return any(_state(task) == "R" for task in Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return False  # it has ended


def _state(task: Path) -> str:
    try:
        text = (task / "stat").read_text()
    except OSError:
        return ""
    return text.rsplit(")", 1)[1].split()[0]


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for member in found:
        try:
            for task in Path(f"/proc/{member}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


@contextlib.contextmanager
def on_one_core(pids: Iterable[int], dice: random.Random) -> Iterator[None]:
    """Have this thread and the first threads of other processes share a core for a while, drawn from those allowed.

    For contenders that take turns: only one of them runs at a time.
    """
    allowed = os.sched_getaffinity(0)
    core = {dice.choice(sorted(allowed))}
    threads = [0, *pids]
    for thread in threads:
        _bind(thread, core)
    try:
        yield
    finally:
        for thread in threads:
            _bind(thread, allowed)


def _bind(thread: int, cores: set[int]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended, which others will tell
        os.sched_setaffinity(thread, cores)
