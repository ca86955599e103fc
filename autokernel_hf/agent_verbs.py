"""The verbs of an external coding agent: `context`, `try`, `best`, `ledger`.

The agent edits one file; everything that judges it is elsewhere. `try` judges, decides, commits and records: the agent
never touches git, the table or the ledger.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autokernel_hf import tunables
from autokernel_hf.archive import cell_of, stale
from autokernel_hf.candidates import read_candidate
from autokernel_hf.errors import CandidateError, RunError
from autokernel_hf.figures import gain_over, weighted
from autokernel_hf.records import (
    Backend,
    Decision,
    Evaluation,
    Experiment,
    Interval,
    Proposal,
    Record,
    Scalar,
    Target,
    Workload,
)
from autokernel_hf.runs import opened

if TYPE_CHECKING:
    from autokernel_hf._console import Console
    from autokernel_hf.agent import Context
    from autokernel_hf.progress import Progress


class Attempt(Record):
    """One past experiment, as an agent needs it."""

    experiment: int
    description: str
    status: str
    decision: Decision
    reason: str
    speedup_vs_eager: float | None
    tunables: dict[str, Scalar]


class Alternative(Record):
    """The best of another kind: another backend, structure or algorithm. Its source: `try`'s commit in the run's git."""

    experiment: int
    description: str
    backend: Backend
    speedup_vs_eager: float
    commit: str | None


class ContextDocument(Record):
    """What `context` tells."""

    target: str
    kernel_type: str
    schema_text: str
    device: str
    file: str  # the one file to edit
    backend: Backend
    source: str  # the incumbent
    kept: bool  # False while the incumbent is a starter that did not beat the model's own code
    speedup_vs_eager: float | None
    workloads: tuple[Workload, ...]
    bound: str
    prescriptions: tuple[str, ...]
    attempts: tuple[Attempt, ...]
    experiments_left: int
    alternatives: tuple[Alternative, ...] = ()
    since_improvement: int = 0  # experiments since the best one became better


class TryDocument(Evaluation):
    """What `try` tells: all that `bench` tells of the candidate, and what was made of it.

    `reason` is the decision's, where it has one of its own.
    """

    decision: Decision
    experiment: int
    speedup_vs_incumbent: float | None
    ci95_vs_incumbent: Interval | None


def context(run_dir: Path, target: str | None, attempts: int = 12) -> ContextDocument:
    """The task, the incumbent and the last attempts of a target. Raises RunError for no run or target."""
    from autokernel_hf.pipeline import context_of

    with opened(run_dir, lock=False) as run:
        found = run.target(target)
        known = context_of(run, found)
        kept = run.incumbent(found.name) is not None
        best = max((s for s in known.scores.values() if s is not None), default=None)
        return ContextDocument(
            target=found.name,
            kernel_type=found.kernel_type,
            schema_text=_schema(found),
            device=found.device,
            file=str(run.target_dir(found.name) / f"kernel{known.incumbent.suffix}"),
            backend=known.incumbent.backend,
            source=known.incumbent.source,
            kept=kept,
            speedup_vs_eager=best,
            workloads=found.workloads,
            bound=known.bound,
            prescriptions=known.prescriptions,
            attempts=tuple(
                Attempt(
                    experiment=a.experiment,
                    description=a.description,
                    status=a.evaluation.status,
                    decision=a.decision,
                    reason=a.reason,
                    speedup_vs_eager=known.scores.get(a.experiment),
                    tunables=a.tunables,
                )
                for a in known.attempts[-attempts:]
            ),
            experiments_left=known.remaining,
            alternatives=_alternatives(known),
            since_improvement=stale(known.attempts, known.scores),
        )


def _alternatives(known: Context) -> tuple[Alternative, ...]:
    attempts = {a.experiment: a for a in known.attempts}
    own = cell_of(known.incumbent)
    return tuple(
        Alternative(
            experiment=e.experiment,
            description=attempts[e.experiment].description,
            backend=e.candidate.backend,
            speedup_vs_eager=e.score,
            commit=attempts[e.experiment].commit,
        )
        for e in known.beam
        if e.cell != own
    )


def attempt(run_dir: Path, target: str | None, file: Path, note: str, progress: Progress) -> TryDocument:
    """Judge a file as the next experiment of a target, and record the verdict.

    Raises:
        CandidateError: The file is for another kernel type, or is no candidate.
        RunError: The budget of experiments is spent, or the run is in use.
    """
    from autokernel_hf.extract import starters
    from autokernel_hf.pipeline import searching

    with opened(run_dir) as run:
        found = run.target(target)
        candidate = read_candidate(file)
        if candidate.kernel_type != found.kernel_type:
            raise CandidateError(
                f"{file} is a {candidate.kernel_type} kernel, and the target {found.name} is {found.kernel_type}.",
                remedy="Name the right --target or file.",
            )
        if len(run.experiments(found.name)) >= run.settings.experiments_a_target:
            raise RunError(
                f"All {run.settings.experiments_a_target} experiments of {found.name} are spent.",
                remedy="Raise max_experiments in run.json, or finish with `autokernel-hf optimize --resume`.",
            )
        kind = "cuda" if found.device.startswith("cuda") else "cpu"
        with searching(run, found, starters(found, kind, run.settings.backend), progress) as search:
            search.try_starters()
            proposal = Proposal(
                source=candidate.source,
                rationale=note,
                tags=("external",),
                tunables=tunables.values_if_readable(candidate.source),
            )
            record = search.experiment(candidate, proposal)
        gain = gain_over(record.evaluation, "incumbent")
        verdict = dict(record.evaluation)
        verdict["reason"] = record.reason or record.evaluation.reason
        return TryDocument(
            **verdict,
            decision=record.decision,
            experiment=record.experiment,
            speedup_vs_incumbent=gain[0] if gain else None,
            ci95_vs_incumbent=gain[1] if gain else None,
        )


def best(run_dir: Path, target: str | None) -> dict[str, object]:
    """The best candidate: the last kept one, or the starter that the search began with."""
    with opened(run_dir, lock=False) as run:
        found = run.target(target)
        from autokernel_hf.pipeline import context_of

        known = context_of(run, found)
        kept = [e for e in known.attempts if e.decision == "keep"]
        return {
            "target": found.name,
            "kept": bool(kept),
            "experiment": kept[-1].experiment if kept else None,
            "backend": known.incumbent.backend,
            "speedup_vs_eager": known.scores.get(kept[-1].experiment) if kept else None,
            "source": known.incumbent.source,
        }


def ledger(run_dir: Path, target: str | None) -> dict[str, object]:
    """Every experiment of a run, or of one target."""
    with opened(run_dir, lock=False) as run:
        name = run.target(target).name if target is not None else None
        return {"experiments": [e.model_dump(mode="json") for e in run.experiments(name)]}


# --- text ---------------------------------------------------------------------------------------------------------


def context_text(console: Console, document: ContextDocument) -> None:
    console.line(f"# {document.target} on {document.device}")
    console.line(f"\n    {document.schema_text}\n")
    console.line(
        f"Edit {document.file}; then: autokernel-hf try FILE --note TEXT --run RUN --target {document.target}"
    )
    score = (
        f"{document.speedup_vs_eager:.3f}x the model's own code"
        if document.speedup_vs_eager
        else "not timed yet"
    )
    console.line(
        f"Incumbent: {'kept' if document.kept else 'starter'}, {score}; {document.experiments_left} experiments left"
    )
    console.line(
        f"Bound: {document.bound}"
        + (f"; try first: {', '.join(document.prescriptions)}" if document.prescriptions else "")
    )
    console.line("\n## Workloads")
    for workload in document.workloads:
        console.line(
            f"- {workload.shape} {workload.dtype}, {workload.calls} calls, {100 * workload.share:.1f} % of the pass"
        )
    console.line("\n## Last attempts")
    for item in document.attempts:
        score = f"{item.speedup_vs_eager:.3f}x" if item.speedup_vs_eager else item.status
        console.line(f"- #{item.experiment} {item.decision} {score}: {item.description}. {item.reason}")
    if document.alternatives:
        console.line(
            f"\n## The best of other kinds ({document.since_improvement} experiments since the last improvement)"
        )
    for other in document.alternatives:
        console.line(
            f"- #{other.experiment} {other.backend}, {other.speedup_vs_eager:.3f}x: {other.description} "
            f"(git show {(other.commit or '')[:12]} in the run folder)"
        )
    console.line("\n## Incumbent\n")
    console.raw(document.source)


def attempt_text(console: Console, document: TryDocument) -> None:
    ratio = f", {document.speedup_vs_incumbent:.3f}x the incumbent" if document.speedup_vs_incumbent else ""
    console.line(f"#{document.experiment} {document.decision} ({document.status}{ratio}): {document.reason}")


def ledger_text(console: Console, document: dict[str, object]) -> None:
    records = [Experiment.model_validate(e) for e in document["experiments"]]  # type: ignore[attr-defined]
    console.table(
        [
            "experiment",
            "target",
            "backend",
            "decision",
            "status",
            "against incumbent",
            "against eager",
            "description",
        ],
        [
            [
                str(e.experiment),
                e.target,
                e.backend,
                e.decision,
                e.evaluation.status,
                _ratio(weighted(e.evaluation, "speedup_vs_incumbent")),
                _ratio(weighted(e.evaluation, "speedup_vs_eager")),
                e.description,
            ]
            for e in records
        ],
    )
    if not records:
        console.line("No experiments yet.")


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}x"


def _schema(target: Target) -> str:
    from autokernel_hf.kernels import kernel_type

    return kernel_type(target.kernel_type).schema.text
