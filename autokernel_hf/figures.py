"""Figures of experiments: what a judge's evaluation says of all workloads together, and a row of the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from autokernel_hf.judge import statistics
from autokernel_hf.records import Evaluation, Experiment, Interval

RESULT_COLUMNS = (
    "experiment",
    "tag",
    "kernel_type",
    "throughput_tflops",
    "latency_us",
    "pct_peak",
    "speedup_vs_pytorch",
    "correctness",
    "peak_vram_mb",
    "description",
    "target",
    "backend",
    "decision",
    "speedup_vs_incumbent",
    "commit",
)


def weighted(evaluation: Evaluation, field: str, *, partly: bool = False) -> float | None:
    """Geometric mean of a workload figure, weighted by the workloads' shares; None where one is missing.

    Args:
        partly: Leave out those that are missing; None where all are.
    """
    pairs = [(getattr(w, field), w.share) for w in evaluation.workloads]
    known = [(value, share) for value, share in pairs if value is not None and value > 0]
    if not known or (len(known) < len(pairs) and not partly):
        return None
    values = [value for value, _ in known]
    mean, _ = statistics.combine(values, [(v, v) for v in values], [share for _, share in known])
    return mean


def gain_over(evaluation: Evaluation, other: Literal["eager", "incumbent"]) -> tuple[float, Interval] | None:
    """Speed-up over the model's own code or the incumbent, all workloads together; None where one was not timed."""
    speedups = [getattr(w, f"speedup_vs_{other}") for w in evaluation.workloads]
    intervals = [getattr(w, f"ci95_vs_{other}") for w in evaluation.workloads]
    if not speedups or None in speedups or None in intervals:
        return None
    return statistics.combine(speedups, intervals, [w.share for w in evaluation.workloads])


def scores_of(experiments: Sequence[Experiment]) -> dict[int, float | None]:
    """Time of the model's own code over each experiment's, by number, for the experiments of one target in order.

    One that was timed against an incumbent gets that incumbent's score times its own ratio, since the two were timed in
    turn: scores can then be compared though the machine was busier in one hour than in another. But a product of many such
    ratios grows by their errors, of which a search keeps those upwards: no score is above what any experiment so far may have
    been against the model's own code, measured at once (the upper end of its interval). One with the machine code of another
    gets that one's. Where the judge gave up after some of the calls, since it could not be kept any more, those
    count. None: not right, or not timed.
    """
    scores: dict[int, float | None] = {}
    best: float | None = None
    ceiling: float | None = None
    for experiment in experiments:
        score = weighted(experiment.evaluation, "speedup_vs_eager", partly=True)
        ratio = weighted(experiment.evaluation, "speedup_vs_incumbent", partly=True)
        direct = gain_over(experiment.evaluation, "eager")
        if direct is not None and experiment.evaluation.status == "passed":
            ceiling = max(ceiling or 0.0, direct[1][1])
        opponent = scores.get(experiment.against) if experiment.against is not None else best
        if opponent is not None and ratio is not None:
            score = opponent * ratio
            if direct is not None and ceiling is not None:
                score = min(score, ceiling)
        if experiment.duplicate_of is not None:
            score = scores.get(experiment.duplicate_of)
        scores[experiment.experiment] = score if experiment.evaluation.status == "passed" else None
        if experiment.decision == "keep":
            best = score
    return scores


def _cell(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def result_row(experiment: Experiment) -> list[str]:
    """One row of results.tsv; figures are of the workload with the largest share, empty where not measured."""
    evaluation = experiment.evaluation
    main = max(evaluation.workloads, key=lambda w: w.share, default=None)
    text = " ".join(experiment.description.split())
    return [
        str(experiment.experiment),
        experiment.tag,
        experiment.kernel_type,
        _cell(main.tflops if main else None),
        _cell(main.latency_us if main else None, 6),
        _cell(main.pct_peak if main else None),
        _cell(weighted(evaluation, "speedup_vs_eager")),
        evaluation.status,
        _cell(evaluation.peak_vram_mb, 6),
        text,
        experiment.target,
        experiment.backend,
        experiment.decision,
        _cell(weighted(evaluation, "speedup_vs_incumbent")),
        experiment.commit or "",
    ]
