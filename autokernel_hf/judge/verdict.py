"""Keep, revert or quarantine: a pure function of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autokernel_hf.judge import statistics
from autokernel_hf.records import Decision, Evaluation, Interval, WorkloadResult

EPSILON = 0.01
DELTA = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What all timed workloads together show: `over` names what the candidate was timed against."""

    over: str
    speedup: float
    interval: Interval
    worst: float
    worst_label: str


def gain_of(results: Sequence[WorkloadResult]) -> Gain | None:
    """The gain over the incumbent, or over eager where there was none; None where a workload has no timing."""
    for over in ("incumbent", "eager"):
        rows = [
            (r.label, r.share, r.speedup_vs_incumbent, r.ci95_vs_incumbent)
            if over == "incumbent"
            else (r.label, r.share, r.speedup_vs_eager, r.ci95_vs_eager)
            for r in results
        ]
        timed = [(label, share, s, i) for label, share, s, i in rows if s is not None and i is not None]
        if not timed or len(timed) != len(rows):
            continue
        speedup, interval = statistics.combine(
            [s for _, _, s, _ in timed], [i for _, _, _, i in timed], [share for _, share, _, _ in timed]
        )
        label, _, worst, _ = min(timed, key=lambda row: row[2])
        return Gain(over=over, speedup=speedup, interval=interval, worst=worst, worst_label=label)
    return None


def why_not_keep(results: Sequence[WorkloadResult], *, epsilon: float, delta: float) -> str:
    """Why these timings do not make a winner, as a sentence; empty where they do."""
    for result in results:
        interval = result.ci95_vs_incumbent
        if interval is not None and interval[1] < 1 - delta:
            return (
                f"Slower on {result.label}: {result.speedup_vs_incumbent:.3f}x the speed of the incumbent "
                f"({interval[0]:.3f} to {interval[1]:.3f} at 95 %)."
            )
    gain = gain_of(results)
    if gain is None:
        for result in results:
            if result.speedup_vs_incumbent is not None:
                return (
                    f"Not faster on {result.label}: {result.speedup_vs_incumbent:.3f}x the speed of the incumbent; the "
                    "other workloads were not timed."
                )
        return "It was not timed on all workloads."
    low, high = gain.interval
    measured = f"{gain.speedup:.3f}x the speed of {_named(gain.over)} ({low:.3f} to {high:.3f} at 95 %)"
    if low <= 1 + epsilon:
        if high < 1 - epsilon:
            return f"Slower: {measured}."
        return f"No difference beyond {epsilon:.1%}: {measured}."
    if gain.worst < 1 - delta:
        return f"Faster as a whole, but {gain.worst_label} is slower: {gain.worst:.3f}x {_named(gain.over)}."
    return ""


def _named(over: str) -> str:
    return "the incumbent" if over == "incumbent" else "eager torch"


def decide(evaluation: Evaluation, *, epsilon: float = EPSILON, delta: float = DELTA) -> tuple[Decision, str]:
    """What becomes of a judged candidate, and why.

    Kept is what passed all five stages and whose speed-up over the incumbent (over eager torch where there is none),
    as the geometric mean over the workloads weighted by share, has an interval above 1 + `epsilon`, while no workload
    lost more than `delta`. What tampered is put in quarantine.
    """
    if evaluation.status == "rejected":
        return "quarantine", evaluation.reason or "The judge rejected it."
    if evaluation.status != "passed":
        return "revert", evaluation.reason or f"It is {evaluation.status}."
    reason = why_not_keep(evaluation.workloads, epsilon=epsilon, delta=delta)
    if reason:
        return "revert", reason
    stages = evaluation.stages.model_dump()
    missing = [name for name, status in stages.items() if status != "passed"]
    if missing:
        return "revert", f"Not all stages ran: {', '.join(missing)} did not."
    gain = gain_of(evaluation.workloads)
    assert gain is not None
    low, high = gain.interval
    return (
        "keep",
        f"{gain.speedup:.3f}x the speed of {_named(gain.over)} ({low:.3f} to {high:.3f} at 95 %), all stages passed.",
    )
