"""What a process behind the judge's walls can do: run as a script, it tries it all and prints the outcomes as JSON.

    python -m tests.walls_probe namespaces|landlock runner|builder SECRET_FILE PID_OF_ANOTHER

An outcome is "done", or the name of the error.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from autokernel_hf.cache import cache_root
from autokernel_hf.judge import confine
from autokernel_hf.judge.server import behind_walls

LIBC = ctypes.CDLL(None, use_errno=True)
SOURCES = Path(__file__).parent.parent


def call(name: str, *arguments: object) -> None:
    if getattr(LIBC, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)


def write(path: Path) -> None:
    path.write_text("changed")
    path.unlink()


def connect(family: int, address: object) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as found:
        found.settimeout(1)
        found.connect(address)


def outcome(action: Callable[[], object]) -> str:
    try:
        action()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, type(error).__name__)
    return "done"


def attempts(secret: Path, other: int) -> dict[str, str]:
    """Everything that a candidate must not do, and what it must be able to do."""
    private = Path(os.environ["TMPDIR"])
    return {
        "write beside the sources": outcome(lambda: write(SOURCES / "autokernel_hf" / "planted.py")),
        "change the judge": outcome(lambda: (SOURCES / "autokernel_hf/judge/checks.py").open("a").close()),
        "write to the build cache": outcome(lambda: write(cache_root() / "planted")),
        "read a secret": outcome(secret.read_text),
        "write in its own folder": outcome(lambda: write(private / "mine")),
        "read the interpreter": outcome(Path(os.__file__).read_text),
        "reach the network": outcome(lambda: connect(socket.AF_INET, ("127.0.0.1", 9))),
        "trace": outcome(lambda: call("ptrace", 0, 0, 0, 0)),
        "make namespaces": outcome(lambda: call("unshare", 0x10000000)),
        "mount": outcome(lambda: call("mount", b"tmpfs", b"/mnt", b"tmpfs", 0, None)),
        "read another's memory": outcome(lambda: Path(f"/proc/{other}/mem").open("rb").close()),
        "read another's environment": outcome(Path(f"/proc/{other}/environ").read_bytes),
        "signal another": outcome(lambda: os.kill(other, signal.SIGUSR1)),
        "use /dev/null": outcome(lambda: Path(os.devnull).open("wb").close()),
        "see disks": str(any(Path("/dev").glob("[vsx]d[a-z]")) or any(Path("/dev").glob("nvme*"))),
        "change the system": outcome(lambda: Path("/proc/sys/kernel/hostname").open("w").close()),
        "change the memory's settings": outcome(lambda: Path("/proc/sys/vm/swappiness").open("w").close()),
        "name a thread": outcome(
            lambda: Path(f"/proc/self/task/{threading.get_native_id()}/comm").open("w").close()
        ),
        "CUDA starts": str(confine.cuda_starts()),
    }


def main(kind: str, role: str, secret: str, other: str) -> None:
    def body(channel: int) -> int:
        with socket.socket(fileno=channel) as found:
            found.sendall(json.dumps(attempts(Path(secret), int(other))).encode())
        return 0

    spawned = behind_walls(body, isolate=kind == "namespaces", builder=role == "builder")
    if spawned is None:
        sys.stdout.write(json.dumps({"refused": True}))
        return
    text = b""
    while part := spawned.channel.recv(1 << 16):
        text += part
    code = spawned.wait(10.0)
    outcomes = json.loads(text) if text else spawned.output()
    sys.stdout.write(json.dumps({"code": code, "not_enforced": spawned.not_enforced, "outcomes": outcomes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
