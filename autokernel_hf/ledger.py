"""The ledger: an append-only file of events, one JSON document a line, and the only truth about a run."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from autokernel_hf.errors import RunError
from autokernel_hf.records import (
    Backend,
    Evaluation,
    Experiment,
    Record,
    RunStatus,
    Scalar,
    TargetResult,
    Verification,
)

# --- ledger events ------------------------------------------------------------------------------------------------


class Started(Record):
    """An experiment begins; without a `Judged` of the same number it was lost to a crash."""

    event: Literal["started"] = "started"
    experiment: int
    target: str
    backend: Backend
    digest: str
    description: str
    tunables: dict[str, Scalar] = Field(default_factory=dict)
    at: float


class Judged(Record):
    """An experiment's verdict, and the commit that holds its source."""

    event: Literal["judged"] = "judged"
    record: Experiment
    at: float


class Demoted(Record):
    """A kept experiment did not bear its confirmation run out: from here on it counts as not kept."""

    event: Literal["demoted"] = "demoted"
    target: str
    experiment: int
    reason: str
    confirmation: Evaluation
    at: float


StopKind: TypeAlias = Literal["experiments", "time", "plateau", "roofline", "goal", "exhausted", "agent"]
"""What ended a search; `agent`: a coding agent's work is done."""


class Finished(Record):
    """A target's outcome; of a won one also the winner's confirmation run and commit.

    `stopped` is what ended the search (None in ledgers of before). `seconds` is what the conclusion took, confirmation
    runs above all.
    """

    event: Literal["finished"] = "finished"
    result: TargetResult
    confirmation: Evaluation | None = None
    commit: str | None = None
    stopped: StopKind | None = None
    seconds: float = 0.0
    at: float


class Asked(Record):
    """A language model was asked: what it spent, and what came of it.

    `outcome` is that of the answer (`answered`, `cut_off`, `empty`, `refused`) or of the failure (`unavailable`,
    `context_full`, `failed`). Tokens are the server's count, or `estimated`; a failed question is counted as none.
    """

    event: Literal["asked"] = "asked"
    target: str
    model: str
    purpose: Literal["propose", "repair", "again", "reflect", "price"]
    outcome: Literal["answered", "cut_off", "empty", "refused", "unavailable", "context_full", "failed"]
    detail: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    estimated: bool = False
    cost_usd: float | None = None  # None: no price is known
    temperature: float | None = None
    seconds: float = 0.0
    retries: int = 0
    transcript: str | None = None  # the conversation, as a file in the run folder
    at: float


class Round(Record):
    """A language model's round is over: how many proposals may be judged, and why the others may not."""

    event: Literal["round"] = "round"
    target: str
    kind: Literal["propose", "repair"]
    usable: int
    unusable: tuple[str, ...] = ()
    note: str = ""  # what follows from it, where that is not the next round
    at: float


class Reflected(Record):
    """What was learned from an experiment: the working memory of a language model."""

    event: Literal["reflected"] = "reflected"
    target: str
    experiment: int
    expected: str
    happened: str
    why: str = ""  # the model's own line; empty where it gave none
    at: float


class Verdict(Record):
    """The outcome of the whole run, as `result.json` has told it from then on: the last one is the latest."""

    event: Literal["verdict"] = "verdict"
    status: RunStatus
    reason: str = ""
    verification: Verification | None
    at: float


AnyEvent: TypeAlias = Started | Judged | Demoted | Finished | Asked | Round | Reflected | Verdict
_EVENT: TypeAdapter[AnyEvent] = TypeAdapter(Annotated[AnyEvent, Field(discriminator="event")])


class Ledger:
    """The file. Reads only what was added since it last read, so that a long run stays fast; safe among threads.

    Another process may append to the same file (a coding agent's `try`): its events are seen too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._events: list[AnyEvent] = []
        self._read = 0  # bytes that the events so far take
        self._lines = 0

    def events(self) -> list[AnyEvent]:
        """All events, oldest first. A torn last line, the mark of a crash in mid-write, is no event.

        Raises:
            RunError: A line is none of this version.
        """
        with self._lock:
            self._catch_up()
            return list(self._events)

    def _catch_up(self) -> None:
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._read:  # another file than the one that was read
                    self._events, self._read, self._lines = [], 0, 0
                file.seek(self._read)
                new = file.read()
        except FileNotFoundError:
            self._events, self._read, self._lines = [], 0, 0
            return
        whole = new[: new.rfind(b"\n") + 1]  # what no newline ends was cut short
        for line in whole.splitlines(keepends=True):
            if line.strip():
                try:
                    self._events.append(_EVENT.validate_json(line))
                except ValidationError as error:
                    raise RunError(
                        f"{self.path}:{self._lines + 1} is not a ledger line of this version.",
                        remedy="Restore the file from a copy.",
                    ) from error
            self._read += len(line)
            self._lines += 1

    def append(self, event: AnyEvent) -> None:
        """Append an event, whole and on disk before it returns.

        Raises:
            RunError: The file cannot be written.
        """
        with self._lock:
            self._append(event.model_dump_json().encode() + b"\n")

    def _append(self, data: bytes) -> None:
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise self._refused(error) from error
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                # A torn line from a crash: cut it off, or it would swallow this one.
                os.ftruncate(descriptor, self.path.read_bytes().rfind(b"\n") + 1)
            if os.write(descriptor, data) != len(data):
                raise RunError(
                    f"{self.path} could not be written whole.",
                    remedy="Free some disk space and resume the run.",
                )
            os.fsync(descriptor)
        except OSError as error:
            raise self._refused(error) from error
        finally:
            os.close(descriptor)

    def _refused(self, error: OSError) -> RunError:
        return RunError(
            f"{self.path} cannot be written: {error.strerror}.",
            remedy="Free some disk space and resume the run.",
        )

    def experiments(self, target: str | None = None) -> list[Experiment]:
        """The judged experiments in the order of their verdicts; a demoted one is reverted, and says why."""
        events = self.events()
        demoted = {e.experiment: e.reason for e in events if isinstance(e, Demoted)}
        found = [e.record for e in events if isinstance(e, Judged) and target in (None, e.record.target)]
        return [
            e.model_copy(update={"decision": "revert", "reason": demoted[e.experiment]})
            if e.experiment in demoted
            else e
            for e in found
        ]

    def result(self, target: str) -> Finished | None:
        """The last outcome of a target, if it was finished."""
        found = [e for e in self.events() if isinstance(e, Finished) and e.result.name == target]
        return found[-1] if found else None

    def next_number(self) -> int:
        """The next experiment's number: numbers lost to a crash are not used again."""
        numbers = [
            e.experiment if isinstance(e, Started) else e.record.experiment
            for e in self.events()
            if isinstance(e, Started | Judged)
        ]
        return max(numbers, default=0) + 1
