"""What is known of a candidate so far, and where the seconds went: an evaluation in the making."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autokernel_hf.judge.cases import STAGES, Stage
from autokernel_hf.judge.replays import WarmTimes
from autokernel_hf.judge.session import Request
from autokernel_hf.judge.stages import Passed
from autokernel_hf.records import (
    BenchStatus,
    DeviceState,
    Evaluation,
    Resources,
    Stages,
    StageStatus,
    WorkloadResult,
)

Step = tuple[str, float, float]
"""A step of opening a session: its name, and when it began and ended, by the system's monotonic clock."""


@dataclass(slots=True)
class Sheet:
    """What is known of a candidate so far.

    Every second since it was asked for is one of a phase: `phase` closes the time before it as "other".
    """

    started: float
    stages: dict[Stage, StageStatus]
    results: dict[str, WorkloadResult] = field(
        default_factory=dict
    )  # by workload, as `key_of` tells them apart
    smoke: dict[str, Passed] | None = None
    resources: Resources = Resources()
    built_id: str | None = None
    machine_code: str | None = None
    peak_bytes: int | None = None
    confirmed: bool = False
    phases: list[tuple[str, float]] = field(default_factory=list)
    warm_times: dict[str, WarmTimes] = field(default_factory=dict)  # by workload, as the device tells
    eager_warm_times: dict[str, WarmTimes] = field(default_factory=dict)
    device_states: list[DeviceState] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    marked: float = 0.0  # until when the time is accounted for

    @classmethod
    def begun(cls, request: Request, opening: Sequence[Step]) -> Sheet:
        """A new one; what passed since the request, the opening of the session and waiting, is in its phases."""
        now = time.monotonic()
        sheet = cls(
            started=request.asked_at or now,
            stages=dict.fromkeys(STAGES, "skipped"),
            confirmed=request.confirm,
            marked=request.asked_at or now,
        )
        for name, began, ended in opening:
            if ended > sheet.marked:  # a session may have been opened long before
                sheet.lap("wait", until=max(began, sheet.marked))
                sheet.lap(name, until=ended)
        sheet.lap("wait", until=now)
        return sheet

    def lap(self, name: str, *, until: float | None = None) -> None:
        """The time since the last lap is the phase's."""
        now = time.monotonic() if until is None else until
        seconds = round(now - self.marked, 3)
        if seconds > 0:
            self.phases.append((name, seconds))
            self.marked = now

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Account for the time of a part of the evaluation."""
        self.lap("other")
        try:
            yield
        finally:
            self.lap(name)

    def evaluation(self, status: BenchStatus, reason: str) -> Evaluation:
        self.lap("other")
        return Evaluation(
            status=status,
            stages=Stages(**{stage: self.stages[stage] for stage in STAGES}),
            reason=reason,
            workloads=tuple(self._with_warm_times(r, key) for key, r in self.results.items()),
            resources=self.resources,
            peak_vram_mb=None if self.peak_bytes is None else self.peak_bytes / 2**20,
            seconds=time.monotonic() - self.started,
            phases=tuple(self.phases),
            built_id=self.built_id,
            machine_code=self.machine_code,
            confirmed=self.confirmed,
            notes=self.notes,
            device_states=tuple(self.device_states),
        )

    def _with_warm_times(self, result: WorkloadResult, key: str) -> WorkloadResult:
        if key not in self.warm_times:
            return result
        own, eager = self.warm_times[key], self.eager_warm_times[key]
        return result.model_copy(
            update={
                "hot_us": own.hot_us,
                "graph_us": own.graph_us,
                "eager_hot_us": eager.hot_us,
                "eager_graph_us": eager.graph_us,
            }
        )
