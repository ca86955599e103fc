"""The judge's public face: a session that judges candidates, and a one-shot judgement.

The process that calls this holds neither a model nor a CUDA context, and never a candidate: it starts a referee (see
`judge.referee`), which does the judging in processes of its own.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, cast

from autokernel_hf import errors
from autokernel_hf.cache import need_cache
from autokernel_hf.errors import AutokernelError, JudgeError
from autokernel_hf.judge.sandbox import environment_for_children
from autokernel_hf.judge.server import program
from autokernel_hf.judge.session import Request, Settings
from autokernel_hf.judge.verdict import DELTA, EPSILON, decide
from autokernel_hf.records import Backend, Candidate, Evaluation, Workload, WorkloadResult

__all__ = ["DELTA", "EPSILON", "Judge", "decide", "evaluate"]

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0


class Judge:
    """A session of judging candidates of one kernel type and backend, as a context manager.

    Args:
        workloads: The calls to time: a target's own, or none for the type's.
        device: auto, cpu, cuda or cuda:N. C++ candidates run on the CPU whatever this says.
        dtypes: The dtypes that the stages run in; None for all that the type has.
        seed: Fixes the secret seeds, to reproduce a verdict. Leave it out in earnest.
        epsilon: A difference in speed below it is none.
        delta: What no workload may lose, however much the others gain.
        quick: Smoke stage and a short timing only; nothing that was judged so is kept.
        timeout_s: The longest that one command to a candidate (a call, a turn of timed calls) may take.
        launch_bound: Whether the calls come from a pass in which a GPU waits for the host: what a call takes is then
            the device's time or the host's, whichever is longer.

    Raises:
        DeviceError: The device is not there (from any method).
        JudgeError: The judge itself failed (from any method).
        ToolMissingError: A compiler is missing (from any method).
    """

    def __init__(
        self,
        kernel_type: str,
        backend: Backend,
        workloads: Sequence[Workload] | None,
        *,
        device: str = "cpu",
        dtypes: Sequence[str] | None = None,
        seed: int | None = None,
        epsilon: float = EPSILON,
        delta: float = DELTA,
        quick: bool = False,
        timeout_s: float = 60.0,
        launch_bound: bool = False,
    ) -> None:
        self._settings = Settings(
            kernel_type=kernel_type,
            backend=backend,
            workloads=None if workloads is None else tuple(workloads),
            dtypes=None if dtypes is None else tuple(dtypes),
            device=device,
            seed=seed,
            epsilon=epsilon,
            delta=delta,
            quick=quick,
            timeout_s=timeout_s,
            launch_bound=launch_bound,
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: multiprocessing.connection.Connection | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the session
        self._ready = False

    def __enter__(self) -> Judge:
        opened_at = time.monotonic()
        need_cache()
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            program("autokernel_hf.judge.process", str(theirs.fileno())),
            env=environment_for_children(os.environ, bind=self._settings.on_cpu),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # an interrupt on the terminal is the caller's to handle
        )
        theirs.close()
        self._channel = multiprocessing.connection.Connection(ours.detach())
        self._channel.send(replace(self._settings, opened_at=opened_at))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None and self._channel is not None
        self._channel.close()
        try:
            # In the middle of a request the referee would finish it first.
            self._process.wait(timeout=_CLOSE_TIMEOUT_S if error is None else 0.5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()

    @property
    def referee_pid(self) -> int:
        """The process that judges, while the session is open."""
        assert self._process is not None
        return self._process.pid

    def measure_peers(self) -> tuple[WorkloadResult, ...]:
        """Time what a user would pick instead; `baseline` of each result is the fastest right peer."""
        return cast("tuple[WorkloadResult, ...]", self._ask(Request(action="measure_peers")))

    def evaluate(
        self,
        candidate: Candidate,
        incumbent: Candidate | None = None,
        *,
        known: Collection[str] = (),
        meanwhile: Callable[[], None] | None = None,
    ) -> Evaluation:
        """Judge in a cascade: the smoke stage, timing against the incumbent, and, where it would be kept, all stages.

        Without an incumbent the opponent is the plain torch expression.

        Args:
            known: Machine code that was found right and timed before. A candidate that compiles to it is told by
                `Evaluation.machine_code`, and is not judged: all its stages but the first are skipped.
            meanwhile: What this process does while the referee judges. It must not raise.
        """
        return self._evaluation(
            Request(action="evaluate", candidate=candidate, incumbent=incumbent, known=frozenset(known)),
            meanwhile,
        )

    def confirm(self, candidate: Candidate) -> Evaluation:
        """Judge in all stages, in a fresh process, with timings of their own against eager and every peer."""
        return self._evaluation(
            Request(action="evaluate", candidate=candidate, all_stages=True, peers=True, confirm=True)
        )

    def one_shot(self, candidate: Candidate, *, peers: bool) -> Evaluation:
        """Judge in all stages (unless the session is quick), with timing against the peers."""
        return self._evaluation(Request(action="evaluate", candidate=candidate, all_stages=True, peers=peers))

    def _evaluation(self, request: Request, meanwhile: Callable[[], None] | None = None) -> Evaluation:
        result = self._ask(request, meanwhile)
        assert isinstance(result, Evaluation)
        return result

    def _ask(self, request: Request, meanwhile: Callable[[], None] | None = None) -> object:
        if self._channel is None:
            raise JudgeError("The session is not open.", remedy="Use it in a with statement.")
        request = replace(request, asked_at=time.monotonic())
        if not self._ready:
            self._receive()
            self._ready = True
        try:
            self._channel.send(request)
        except OSError:
            raise self._died() from None
        if meanwhile is not None:
            meanwhile()
        return self._receive()

    def _receive(self) -> object:
        assert self._channel is not None
        try:
            answer: tuple[Any, ...] = self._channel.recv()
            while answer[0] == "log":
                logger.log(answer[1], "%s", answer[2])
                answer = self._channel.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if answer[0] == "done":
            return answer[1]
        if answer[0] == "error":
            _, name, message, remedy = answer
            kind = getattr(errors, name, JudgeError)
            assert issubclass(kind, AutokernelError)
            raise kind(message, remedy=remedy)
        logger.debug("%s", answer[1])
        raise JudgeError(
            f"The judge has a fault: {errors.last_words(str(answer[1]))}",
            remedy="Please report it with the output of --debug.",
        )

    def _died(self) -> JudgeError:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        self._log.seek(0)
        said = self._log.read()[-3000:].decode(errors="replace").strip()
        logger.debug("%s", said)
        words = errors.last_words(said)
        return JudgeError(
            f"The referee ended without an answer (exit code {self._process.returncode}"
            f"{f': {words}' if words else ''}).",
            remedy="Where it was killed, this machine may have too little memory.",
        )


def evaluate(
    candidate: Candidate,
    *,
    device: str = "auto",
    workloads: Sequence[Workload] | None = None,
    dtypes: Sequence[str] | None = None,
    quick: bool = False,
    seed: int | None = None,
    peers: bool = True,
    timeout_s: float = 60.0,
) -> Evaluation:
    """Judge one candidate once: all five stages (`quick`: the first only), and its speed against the peers.

    Args:
        workloads: The calls to time; None for the type's own on this kind of device.
        dtypes: The dtypes to judge; None for all that the type has.
        peers: Whether to time every peer, or eager torch alone.

    Raises:
        AutokernelError: As `Judge`.
    """
    with Judge(
        candidate.kernel_type,
        candidate.backend,
        workloads,
        device=device,
        dtypes=dtypes,
        seed=seed,
        quick=quick,
        timeout_s=timeout_s,
    ) as judge:
        return judge.one_shot(candidate, peers=peers)
