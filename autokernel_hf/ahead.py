"""Compiling ahead: the next candidates are built while the judge measures the present one.

A process of its own, nice to the others, with builders behind the judge's walls. What they build lies in the build cache,
where the judge's own builder finds it by content; a candidate that does not build is found out there, too. So nothing that
happens here can change a verdict: at worst a build was for nothing.

Triton compiles for its arguments, in the process that runs it. So a process of its own takes each such candidate in, behind
the same walls, and compiles what the target's calls need; the child that is judged begins with what came of it
(`judge.compiled`). On a CPU nothing is compiled ahead: a compiler would take a core from what is being timed.
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
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar

from autokernel_hf.errors import AutokernelError
from autokernel_hf.judge import compiled
from autokernel_hf.judge.remote import Builder, Compiler, Failed, Process
from autokernel_hf.judge.sandbox import ALL_CPUS, environment_for_children
from autokernel_hf.judge.server import NamespacesFirst, Server, program
from autokernel_hf.judge.stages import place
from autokernel_hf.records import Built, Candidate, Workload

logger = logging.getLogger(__name__)

P = TypeVar("P", bound=Process)

_NICE = (
    5  # at 10, on a host whose cores others use, a build took ten times as long, and the judge waited for it
)
_BUILD_TIMEOUT_S = 330.0
_CORES_A_BUILDER = 4
"""A builder for so many cores: the judge's processes and the host's part of what is timed need theirs."""
_MOST_BUILDERS = 8
_OLD_S = 86400.0


class Ahead:
    """Builds what it is told of, in the background, as a context manager.

    Args:
        device: As the judge's sessions name it; it decides what a build is for.
        workloads: The calls that a Triton candidate is compiled for.
        processes: How many builders work side by side; None for as many as the cores allow.
    """

    def __init__(
        self, device: str, workloads: Sequence[Workload] = (), *, processes: int | None = None
    ) -> None:
        self._device = device
        self._workloads = tuple(workloads)
        self._done: deque[tuple[str, str]] = deque(maxlen=1000)
        self._kept: set[str] = set()
        self._ended: set[str] = set()  # digests of candidates that are done
        cores = len(ALL_CPUS) or os.cpu_count() or 1
        self.processes = processes or max(1, min(_MOST_BUILDERS, cores // _CORES_A_BUILDER))
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: multiprocessing.connection.Connection | None = None

    def __enter__(self) -> Ahead:
        return self

    def _start(self) -> None:
        """Start the process, when it is first wanted: a coding agent's `try` has nothing to compile ahead."""
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
        self._channel.send(self._workloads)
        compiled.drop_old(_OLD_S)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        self._take_answers(0.0)
        if self._channel is not None:
            self._channel.close()
        # Its children end with it; a build in mid-way leaves nothing in the cache.
        self._process.kill()
        self._process.wait()
        for built in self._kept:
            compiled.drop(built)

    def __call__(self, candidate: Candidate) -> bool:
        """Compile a candidate; returns at once, whether it is compiled. C++ for the CPU is left to the judge."""
        if candidate.backend == "cpp" or (candidate.backend == "triton" and not self._workloads):
            return False
        if self._process is None and self._channel is None:
            self._start()
        if self._channel is None:
            return False
        self._take_answers(0.0)  # nobody may ask for them, and a full pipe would stop the builders
        try:
            self._channel.send(candidate)
        except OSError:
            logger.info("nothing is compiled ahead any more: that process is gone")
            self._channel = None
            return False
        return True

    def ready(self, candidate: Candidate) -> bool:
        """Whether a candidate that this was told of is done; with nobody to compile any more, all are."""
        self._take_answers(0.0)
        return candidate.digest in self._ended or self._channel is None or self._is_gone()

    def _is_gone(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def finished(self, timeout_s: float) -> tuple[str, str] | None:
        """The digest of a candidate that is done, and its build's id, empty where it failed; None: none in time."""
        if not self._done:
            self._take_answers(timeout_s)
        return self._done.popleft() if self._done else None

    def _take_answers(self, timeout_s: float) -> None:
        with contextlib.suppress(EOFError, OSError):
            while self._channel is not None and self._channel.poll(timeout_s):
                digest, built = self._channel.recv()
                self._done.append((digest, built))
                self._ended.add(digest)
                if built:
                    self._kept.add(built)
                timeout_s = 0.0


def main(descriptor: str, device: str, processes: str) -> None:
    """Build what comes over an inherited descriptor, until it is closed."""
    os.nice(_NICE)
    channel = multiprocessing.connection.Connection(int(descriptor))
    crew = _Builders(channel, device, channel.recv())
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

    def __init__(
        self,
        channel: multiprocessing.connection.Connection,
        device: str,
        workloads: Sequence[Workload],
    ) -> None:
        self.waiting: queue.Queue[Candidate] = queue.Queue()
        self._channel = channel
        self._device = device
        self._calls = [place(w, ()).arguments for w in workloads]
        self._described: dict[str, Any] | None = None  # what Triton asks of the device
        self._server = Server(interpret=False, device=device.partition(":")[0])
        self._walls = NamespacesFirst()
        self._starting = threading.Lock()
        self._describing = threading.Lock()
        self._answering = threading.Lock()
        self._running: set[Process] = set()

    def work(self) -> None:
        builder: Builder | None = None
        while True:
            candidate = self.waiting.get()
            name = ""  # where it fails, the judge will meet it too, and say so
            try:
                if builder is None or builder.ended:
                    builder = self._start(Builder, builder=True)
                built = builder.build(candidate, self._device)
                if candidate.backend == "triton":
                    self._compile(built)
                name = built.id
            except (Failed, AutokernelError) as error:
                logger.debug("nothing was compiled ahead of %s: %s", candidate.digest, error)
            with self._answering, contextlib.suppress(OSError):
                self._channel.send((candidate.digest, name))

    def _compile(self, built: Built) -> None:
        """Have what the target's calls need of a Triton candidate compiled, and keep it.

        Raises:
            Failed: It does not import, or takes too long.
        """
        if compiled.folder(built.id).is_dir():
            return
        device = self._device_described()
        compiler = self._start(Compiler, builder=False)
        try:
            compiled.keep(built.id, compiler.compile(built, self._calls, device))
        except ValueError as error:
            logger.debug("what was compiled of %s is not kept: %s", built.id, error)
        finally:
            self._end(compiler)

    def _device_described(self) -> dict[str, Any]:
        with self._describing:
            if self._described is None:
                asked = self._start(Compiler, builder=False)
                try:
                    self._described = asked.device(self._device)
                finally:
                    self._end(asked)
            return self._described

    def _start(self, kind: type[P], *, builder: bool) -> P:
        with self._starting:
            spawned = self._walls.start(lambda isolate: self._server.spawn(isolate=isolate, builder=builder))
            assert spawned is not None
            process = kind(spawned, timeout_s=_BUILD_TIMEOUT_S)
            self._running.add(process)
            return process

    def _end(self, process: Process) -> None:
        process.end()
        with self._starting:
            self._running.discard(process)

    def close(self) -> None:
        with self._starting:
            for process in self._running:
                process.end()
            self._server.close()
