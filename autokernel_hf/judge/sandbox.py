"""What keeps a child from harming others beside its walls (`confine`): secrets, namespaces, and ending it whole."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

_SECRET = re.compile(
    r"(TOKEN|API_?KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|PRIVATE|COOKIE|SESSION_KEY|ACCESS_KEY)", re.IGNORECASE
)
_SECRET_FAMILIES = (
    "AWS_",
    "AZURE_",
    "GOOGLE_",
    "GCP_",
    "GITHUB_",
    "GITLAB_",
    "SSH_",
    "OPENAI_",
    "ANTHROPIC_",
    "WANDB_",
)
# Not secrets, though their names match: without them tokenizers and compilers behave otherwise.
_HARMLESS = frozenset({"TOKENIZERS_PARALLELISM"})

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


# How long the threads of an OpenMP pool spin after a parallel region before they sleep: about 0.4 ms instead of 12 (GNU)
# or 200 (Intel). Within a chain of ops nothing changes; but where another program holds a core, a thread that spins for
# the one that it waits for keeps it from running: on two busy cores a 0.2 ms GELU took 20 ms.
_SPINNING = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
# A thread a core, and there it stays. Otherwise a busy machine may put both threads of a pool on one core, in one process
# and not in another, for seconds: 0.9 ms for the same GELU, against 0.2.
_BINDING = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
_THREADS_ARE_THE_USERS = (
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
)
# Settings of GNU's malloc: see `with_kept_memory`.
_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the largest that it accepts
    "MALLOC_TOP_PAD_": str(64 << 20),
}

# Taken when this module is imported, which is before torch and its OpenMP are: binding narrows it.
ALL_CPUS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def with_kept_memory(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process whose C library (GNU's) keeps what it has freed.

    By default it maps large blocks anew, or trims its heap, as its history has it: a page fault for each 4 KB of an output
    turns a 0.1 ms kernel into a 0.8 ms one, in some processes and not in others, and a chain of ops on tensors of some MB
    (GPT-2's activation at 1 x 1024: 9200 faults a call) costs as much again in one pass and nothing in the next. With this
    a process stays in the state in which a long-running one ends up, the same for all contenders; it favours the plain
    model, whose chains have more temporaries. What the user has set stays as it is.
    """
    return {**_MEMORY, **environment}


def environment_for_children(environment: Mapping[str, str], *, bind: bool) -> dict[str, str]:
    """The environment of the judge's own processes: without secrets, and with what makes times comparable.

    Args:
        bind: Whether kernels are timed on the CPU. What the user has set stays as it is.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if name in _HARMLESS or not (_SECRET.search(name) or name.upper().startswith(_SECRET_FAMILIES))
    }
    spinning = {} if "OMP_WAIT_POLICY" in kept else _SPINNING
    binding = _BINDING if bind and not any(name in kept for name in _THREADS_ARE_THE_USERS) else {}
    return with_kept_memory({**spinning, **binding, **kept})


@contextlib.contextmanager
def on_all_cores() -> Iterator[None]:
    """Let what is started here (compilers) run anywhere, though this thread is bound to a core."""
    if not ALL_CPUS:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, ALL_CPUS)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def die_with_parent() -> None:
    """Have this process killed when its parent ends, however that ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent ends: a double fork does not escape it."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def isolate() -> bool:
    """Put the children that this process will fork into mount, process and network namespaces of their own.

    Returns:
        Whether the system allowed it.
    """
    flags = _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET
    user, group = os.geteuid(), os.getegid()
    if user != 0:
        flags |= _CLONE_NEWUSER
    if _libc.unshare(flags) != 0:
        if ctypes.get_errno() in (errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.ENOSPC):
            return False
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if user != 0:
        with contextlib.suppress(OSError):
            Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True


def end_descendants() -> None:
    """Kill everything below this process, and reap it. Needs `adopt_orphans` to have been called before."""
    while True:
        children = _children()
        if not children:
            return
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    text = ""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            text += (task / "children").read_text() + " "
    return [int(pid) for pid in text.split()]
