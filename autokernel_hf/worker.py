"""Stages that hold a model run in a process of their own.

The orchestrator (the command line, the loop) holds neither a model nor a device context: a stage that needs one is a
task here, called with a record and answered with a record. A worker that dies takes nothing with it.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

from autokernel_hf import errors
from autokernel_hf.errors import AutokernelError, JudgeError, last_words
from autokernel_hf.judge.sandbox import with_kept_memory
from autokernel_hf.judge.server import program
from autokernel_hf.progress import NOTE
from autokernel_hf.records import ModelSpec, Profile, PulledModel, Record, Site, Verification

logger = logging.getLogger(__name__)

_MARKS = {"autokernel_hf-note:": NOTE, "autokernel_hf-warning:": logging.WARNING}

R = TypeVar("R", bound=Record)


class PullRequest(Record):
    spec: ModelSpec


class ProfileRequest(Record):
    spec: ModelSpec
    trace: str | None = None
    memory_snapshot: str | None = None
    compile_log: str | None = None


class CeilingsRequest(Record):
    device: str


class DevicesRequest(Record):
    """GPUs that a run is to use, by their numbers."""

    wanted: tuple[int, ...]


class Devices(Record):
    names: tuple[str, ...]


class StagedKernel(Record):
    """A winner as `verify` needs it: what it replaces, and the package variant that replaces it."""

    target: str
    kernel_type: str
    sites: tuple[Site, ...]
    path: str


class VerifyRequest(Record):
    spec: ModelSpec
    kernels: tuple[StagedKernel, ...]
    budget_s: float | None = None
    compile: bool = True


def call(task: str, request: Record, result: type[R]) -> R:
    """Run a task in a process of its own and return its record.

    Raises:
        AutokernelError: What the task raised, as it raised it; JudgeError where the process died.
    """
    with tempfile.TemporaryDirectory(prefix="autokernel_hf-") as folder:
        asked, answered = Path(folder) / "request.json", Path(folder) / "result.json"
        asked.write_text(request.model_dump_json(), encoding="utf-8")
        process = subprocess.Popen(
            program("autokernel_hf.worker", task, str(asked), str(answered), function="_main"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env=with_kept_memory({**os.environ, "PYTHONUNBUFFERED": "1"}),
        )
        tail: list[str] = []
        assert process.stderr is not None
        reader = threading.Thread(target=_relay, args=(process.stderr, tail), daemon=True)
        reader.start()
        try:
            code = process.wait()
        finally:
            # Also what the task itself has started (compilers): the whole session ends with it.
            _end(process)
        reader.join(timeout=5)
        if not answered.exists():
            raise _ended(task, code, "\n".join(tail))
        answer = json.loads(answered.read_text(encoding="utf-8"))
    if "error" in answer:
        kind = getattr(errors, answer["error"], AutokernelError)
        raise kind(answer["message"], remedy=answer["remedy"])
    return result.model_validate(answer["ok"])


def _ended(task: str, code: int, said: str) -> JudgeError:
    """What to tell of a process that left no answer; all of what it said is in the log."""
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    words = last_words(said)
    if code == -signal.SIGKILL:
        hint = "It may have run out of memory: try a smaller --input-shape."
    elif code == 0:
        hint = "Something that it imports or runs ends the process: look for sys.exit in the model's code."
    else:
        hint = "Run it again with --debug to see all that it said; where your own code is not the cause, report it."
    return JudgeError(
        f"The {task} process ended without a result ({how}{f': {words}' if words else ''}).", remedy=hint
    )


def _relay(stream: IO[str], tail: list[str]) -> None:
    for line in stream:
        text = line.rstrip()
        if text:
            mark, _, rest = text.partition(" ")
            if mark in _MARKS:
                logger.log(_MARKS[mark], "%s", rest)
                continue
            tail.append(text)
            del tail[:-50]
            logger.debug("%s", text)


def _end(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


# --- inside the worker --------------------------------------------------------------------------------------------


def _pull(request: PullRequest) -> PulledModel:
    models = importlib.import_module("autokernel_hf.models")
    pulled: PulledModel = models.pull(request.spec)
    return pulled


def _profile(request: ProfileRequest) -> Profile:
    from autokernel_hf.models import load
    from autokernel_hf.profiler import profile

    return profile(
        load(request.spec),
        trace=Path(request.trace) if request.trace else None,
        memory_snapshot=Path(request.memory_snapshot) if request.memory_snapshot else None,
        compile_log=Path(request.compile_log) if request.compile_log else None,
    )


def _ceilings(request: CeilingsRequest) -> Record:
    from autokernel_hf.ceilings import measure_ceilings

    return measure_ceilings(request.device)


def _devices(request: DevicesRequest) -> Devices:
    from autokernel_hf.gpu import resolve_device

    return Devices(names=tuple(str(resolve_device(f"cuda:{number}")) for number in request.wanted))


def _verify(request: VerifyRequest) -> Verification:
    from autokernel_hf.models import load
    from autokernel_hf.verify import verify

    return verify(load(request.spec), request.kernels, budget_s=request.budget_s, compile=request.compile)


_TASKS: dict[str, tuple[type[Record], Callable[[Any], Record]]] = {
    "pull": (PullRequest, _pull),
    "profile": (ProfileRequest, _profile),
    "ceilings": (CeilingsRequest, _ceilings),
    "devices": (DevicesRequest, _devices),
    "verify": (VerifyRequest, _verify),
}


def _end_with(parent: int) -> None:
    """End when the orchestrator does, however it does: nobody would read the answer."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(os.getpgid(0), signal.SIGKILL)


class _Marked(logging.Formatter):
    """One line a record, with a mark by which the orchestrator knows those that it passes on."""

    def format(self, record: logging.LogRecord) -> str:
        text = " ".join(record.getMessage().split())
        mark = next((m for m, level in _MARKS.items() if level == record.levelno), None)
        return f"{mark} {text}" if mark else text


def _main(task: str, asked: str, answered: str) -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    ours = logging.getLogger("autokernel_hf")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Marked())
    ours.addHandler(handler)
    ours.propagate = False
    request_type, function = _TASKS[task]
    try:
        request = request_type.load(Path(asked))
        answer = {"ok": json.loads(function(request).model_dump_json())}
    except AutokernelError as error:
        answer = {"error": type(error).__name__, "message": error.message, "remedy": error.remedy}
    temporary = Path(answered + ".part")
    temporary.write_text(json.dumps(answer), encoding="utf-8")
    temporary.replace(answered)
