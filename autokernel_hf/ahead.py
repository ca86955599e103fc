"""Compiling ahead: the next candidates are built while the judge measures the present one.

A process of its own, nice to the others, with builders behind the judge's walls. What they build lies in the build cache,
where the judge's own builder finds it by content; a candidate that does not build is found out there, too. So nothing that
happens here can change a verdict: at worst a build was for nothing.

For CUDA C++ alone. Triton compiles for its arguments, in the process that runs it; and on a CPU a compiler would take a
core from what is being timed.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.connection
import os
import queue
import socket
import subprocess
import threading
from types import TracebackType

from autokernel_hf.errors import AutokernelError
from autokernel_hf.judge.remote import Builder, Failed
from autokernel_hf.judge.sandbox import ALL_CPUS, environment_for_children
from autokernel_hf.judge.server import NamespacesFirst, Server, program
from autokernel_hf.records import Candidate

logger = logging.getLogger(__name__)

_NICE = 10
_BUILD_TIMEOUT_S = 330.0
_CORES_A_BUILDER = 4
"""A builder for so many cores: the judge's processes and the host's part of what is timed need theirs."""
_MOST_BUILDERS = 8


class Ahead:
    """Builds what it is told of, in the background, as a context manager.

    Args:
        device: As the judge's sessions name it; it decides what a build is for.
        processes: How many builders work side by side; None for as many as the cores allow.
    """

    def __init__(self, device: str, processes: int | None = None) -> None:
        self._device = device
        cores = len(ALL_CPUS) or os.cpu_count() or 1
        self.processes = processes or max(1, min(_MOST_BUILDERS, cores // _CORES_A_BUILDER))
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: multiprocessing.connection.Connection | None = None

    def __enter__(self) -> Ahead:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            program("autokernel_hf.ahead", str(theirs.fileno()), self._device, str(self.processes)),
            env=environment_for_children(os.environ, bind=False),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._channel = multiprocessing.connection.Connection(ours.detach())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None and self._channel is not None
        self._channel.close()
        # Its children end with it; a build in mid-way leaves nothing in the cache.
        self._process.kill()
        self._process.wait()

    def __call__(self, candidate: Candidate) -> bool:
        """Build a candidate of CUDA C++; returns at once, whether it is built. Others are left to the judge."""
        if candidate.backend != "cuda" or self._channel is None:
            return False
        try:
            self._channel.send(candidate)
        except OSError:
            logger.info("nothing is compiled ahead any more: that process is gone")
            self._channel = None
            return False
        return True

    def finished(self, timeout_s: float) -> tuple[str, str] | None:
        """The digest of a candidate that is done, and its build's id, empty where it failed; None: none in time."""
        if self._channel is None or not self._channel.poll(timeout_s):
            return None
        with contextlib.suppress(EOFError, OSError):
            digest, built = self._channel.recv()
            return digest, built
        return None


def main(descriptor: str, device: str, processes: str) -> None:
    """Build what comes over an inherited descriptor, until it is closed."""
    os.nice(_NICE)
    channel = multiprocessing.connection.Connection(int(descriptor))
    crew = _Builders(channel, device)
    for _ in range(int(processes)):
        threading.Thread(target=crew.work, daemon=True).start()
    try:
        while True:
            candidate = channel.recv()
            assert isinstance(candidate, Candidate)
            crew.waiting.put(candidate)
    except (EOFError, OSError):
        pass
    finally:
        crew.close()


class _Builders:
    """Builders behind walls, each held by a thread that gives it one candidate after the other."""

    def __init__(self, channel: multiprocessing.connection.Connection, device: str) -> None:
        self.waiting: queue.Queue[Candidate] = queue.Queue()
        self._channel = channel
        self._device = device
        self._server = Server(interpret=False, device=device.partition(":")[0])
        self._walls = NamespacesFirst()
        self._starting = threading.Lock()
        self._answering = threading.Lock()
        self._running: set[Builder] = set()

    def work(self) -> None:
        builder: Builder | None = None
        while True:
            candidate = self.waiting.get()
            try:
                if builder is None or builder.ended:
                    builder = self._start()
                built = builder.build(candidate, self._device).id
            except (Failed, AutokernelError):
                built = ""  # the judge will meet it too, and say so
            with self._answering, contextlib.suppress(OSError):
                self._channel.send((candidate.digest, built))

    def _start(self) -> Builder:
        with self._starting:
            spawned = self._walls.start(lambda isolate: self._server.spawn(isolate=isolate, builder=True))
            assert spawned is not None
            builder = Builder(spawned, timeout_s=_BUILD_TIMEOUT_S)
            self._running.add(builder)
            return builder

    def close(self) -> None:
        with self._starting:
            for builder in self._running:
                builder.end()
            self._server.close()
