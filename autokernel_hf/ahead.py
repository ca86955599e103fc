"""Compiling ahead: the next candidate is built while the judge measures the present one.

A process of its own, nice to the others, with a builder behind the judge's walls. What it builds lies in the build cache,
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
import socket
import subprocess
from types import TracebackType

from autokernel_hf.errors import AutokernelError, JudgeError
from autokernel_hf.judge.remote import Builder, Failed
from autokernel_hf.judge.sandbox import environment_for_children
from autokernel_hf.judge.server import Server, program
from autokernel_hf.records import Candidate

logger = logging.getLogger(__name__)

_NICE = 10
_BUILD_TIMEOUT_S = 330.0


class Ahead:
    """Builds what it is told of, in the background, as a context manager.

    Args:
        device: As the judge's sessions name it; it decides what a build is for.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: multiprocessing.connection.Connection | None = None

    def __enter__(self) -> Ahead:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            program("autokernel_hf.ahead", str(theirs.fileno()), self._device),
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

    def __call__(self, candidate: Candidate) -> None:
        """Build a candidate of CUDA C++; returns at once. Others are left to the judge."""
        if candidate.backend != "cuda" or self._channel is None:
            return
        try:
            self._channel.send(candidate)
        except OSError:
            logger.info("nothing is compiled ahead any more: that process is gone")
            self._channel = None

    def finished(self, timeout_s: float) -> tuple[str, str] | None:
        """The digest of a candidate that is done, and its build's id, empty where it failed; None: none in time."""
        if self._channel is None or not self._channel.poll(timeout_s):
            return None
        with contextlib.suppress(EOFError, OSError):
            digest, built = self._channel.recv()
            return digest, built
        return None


def main(descriptor: str, device: str) -> None:
    """Build what comes over an inherited descriptor, until it is closed."""
    os.nice(_NICE)
    channel = multiprocessing.connection.Connection(int(descriptor))
    server = Server(interpret=False, device=device.partition(":")[0])
    builder: Builder | None = None
    isolate = True
    try:
        while True:
            candidate = channel.recv()
            assert isinstance(candidate, Candidate)
            if builder is None or builder.ended:
                spawned = server.spawn(isolate=True, builder=True) if isolate else None
                if spawned is None:
                    isolate = False
                    spawned = server.spawn(isolate=False, builder=True)
                assert spawned is not None
                builder = Builder(spawned, timeout_s=_BUILD_TIMEOUT_S)
            try:
                built = builder.build(candidate, device).id
            except (Failed, AutokernelError):
                built = ""  # the judge will meet it too, and say so
            channel.send((candidate.digest, built))
    except (EOFError, OSError, JudgeError):
        pass
    finally:
        if builder is not None:
            builder.end()
        server.close()
