"""The loop: propose, judge, keep or revert, until a stop rule says enough.

Each target has its own clock, from its own start. What is kept must be right everywhere and faster than the incumbent
beyond the noise; what is won must be faster than the model's own code in a confirmation run of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from autokernel_hf import tunables
from autokernel_hf.agent import Context, NothingLeft, Proposer
from autokernel_hf.progress import Progress
from autokernel_hf.records import (
    Backend,
    Candidate,
    Decision,
    Evaluation,
    Experiment,
    Proposal,
    Target,
    TargetResult,
    TargetStatus,
    Winner,
    WorkloadResult,
)
from autokernel_hf.runs import Finished, Round, Run, Started, gain_over, scores_of, weighted


class Judging(Protocol):
    """What the loop needs of a judge session (`evaluate.Judge`)."""

    def measure_peers(self) -> tuple[WorkloadResult, ...]: ...

    def evaluate(self, candidate: Candidate, incumbent: Candidate | None = None) -> Evaluation: ...

    def confirm(self, candidate: Candidate) -> Evaluation: ...


Decide = Callable[[Evaluation], tuple[Decision, str]]
Diagnose = Callable[[Target, Evaluation], tuple[tuple[str, ...], str]]
"""(target, the incumbent's evaluation) -> (kinds of tunables to try first, what bounds it in words)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a target's search ends. Any one of these is enough.

    Args:
        max_experiments: Experiments on this target, starters included.
        max_seconds: Since this target's own start, time between an interruption and its resumption left out.
        max_reverts: Experiments in a row that were not kept.
        pct_peak: Share of the roofline, in per cent, beyond which little is left.
        speedup: Against the model's own code; None for no such goal.
    """

    max_experiments: int = 20
    max_seconds: float | None = None
    max_reverts: int = 12
    pct_peak: float = 95.0
    speedup: float | None = None


class Search:
    """The search of one target, whose state is the run's ledger."""

    def __init__(
        self,
        target: Target,
        starters: Sequence[Candidate],
        *,
        run: Run,
        judge: Judging | None,
        decide: Decide,
        diagnose: Diagnose,
        limits: Limits,
        progress: Progress,
    ) -> None:
        self.target = target
        self.starters = tuple(starters)
        self.run = run
        self._judge = judge
        self.decide = decide
        self.diagnose = diagnose
        self.limits = limits
        self.progress = progress

    @property
    def judge(self) -> Judging:
        if self._judge is None:
            raise RuntimeError("this search was opened to read only")
        return self._judge

    # One experiment -----------------------------------------------------------------------------------------------

    def experiment(self, candidate: Candidate, proposal: Proposal) -> Experiment:
        """Judge one candidate and enter it: commit, ledger, refs, table."""
        number = self.run.next_number()
        started = time.time()
        self.run.append(
            Started(
                experiment=number,
                target=self.target.name,
                backend=candidate.backend,
                digest=candidate.digest,
                description=proposal.rationale,
                tunables=proposal.tunables,
                at=started,
            )
        )
        evaluation = self.judge.evaluate(candidate, self.incumbent())
        decision, reason = self.decide(evaluation)
        message = f"Experiment {number}: {proposal.rationale}\n\n{decision}: {reason}"
        record = Experiment(
            experiment=number,
            target=self.target.name,
            tag=",".join(proposal.tags),
            description=proposal.rationale,
            kernel_type=candidate.kernel_type,
            backend=candidate.backend,
            digest=candidate.digest,
            evaluation=evaluation,
            decision=decision,
            reason=reason,
            commit=self.run.commit_candidate(self.target.name, candidate, message),
            tunables=proposal.tunables,
            seconds=time.time() - started,
        )
        self.run.enter(record)
        return record

    # State, from the ledger ---------------------------------------------------------------------------------------

    def attempts(self) -> list[Experiment]:
        return self.run.experiments(self.target.name)

    def incumbent(self) -> Candidate | None:
        """The best kept candidate; None until one was kept."""
        return self.run.incumbent(self.target.name)

    def scores(self) -> dict[int, float | None]:
        """Time of the model's own code over each attempt's, by experiment number."""
        return scores_of(self.attempts())

    def context(self, *, seed: int = 0) -> Context:
        """All that a proposer may know now."""
        attempts = self.attempts()
        scores = self.scores()
        incumbent = self.incumbent()
        evaluation = None
        if incumbent is None:
            # Nothing was kept yet: go on from the fastest right attempt, else from the first starter.
            right = [(s, e) for e in attempts if (s := scores[e.experiment]) is not None]
            best = max(right, key=lambda pair: pair[0], default=None)
            incumbent = self.run.source(best[1]) if best else self.starters[0]
            evaluation = best[1].evaluation if best else None
        else:
            evaluation = [e for e in attempts if e.decision == "keep"][-1].evaluation
        prescriptions: tuple[str, ...] = ()
        bound = "not known yet"
        if evaluation is not None and evaluation.workloads:
            prescriptions, bound = self.diagnose(self.target, evaluation)
        return Context(
            target=self.target,
            incumbent=incumbent,
            attempts=tuple(attempts),
            scores=scores,
            prescriptions=prescriptions,
            bound=bound,
            remaining=max(0, self.limits.max_experiments - len(attempts)),
            seed=seed,
        )

    # The loop -----------------------------------------------------------------------------------------------------

    def run_all(self, proposer: Proposer, *, seed: int = 0) -> tuple[TargetResult, Winner | None]:
        """Search until a stop rule, then confirm the incumbent in a run of its own."""
        # A resumed target's clock goes on where it stood: what was judged before has cost its time.
        started = time.monotonic() - math.fsum(e.seconds for e in self.attempts())
        self.try_starters()
        while (reason := self.stop_reason(time.monotonic() - started)) is None:
            try:
                proposals = proposer.propose(self.context(seed=seed), 1)
            except NothingLeft as end:
                reason = str(end)
                break
            if not proposals:
                reason = "nothing left to try"
                break
            proposal = proposals[0]
            backend = self.context(seed=seed).incumbent.backend
            candidate = Candidate(
                kernel_type=self.target.kernel_type, backend=backend, source=proposal.source
            )
            self._report(self.experiment(candidate, proposal))
        return self.conclude(self._with_note(reason))

    def _with_note(self, reason: str) -> str:
        """The reason, with what the proposer entered about its own end."""
        notes = [e.note for e in self.run.events() if isinstance(e, Round) and e.target == self.target.name]
        last = next((n for n in reversed(notes) if n), None)
        return f"{reason}; {last}" if last else reason

    def try_starters(self) -> None:
        """Judge the starters that were not judged yet."""
        tried = {e.digest for e in self.attempts()}
        for starter in self.starters:
            if starter.digest not in tried:
                proposal = Proposal(
                    source=starter.source,
                    rationale=f"{starter.backend} starter",
                    tags=("starter",),
                    tunables=tunables.values_if_readable(starter.source),
                )
                self._report(self.experiment(starter, proposal))

    def stop_reason(self, elapsed_s: float) -> str | None:
        """Why the search ends now; None to go on."""
        attempts = self.attempts()
        limits = self.limits
        if len(attempts) >= limits.max_experiments:
            return f"{limits.max_experiments} experiments done"
        if limits.max_seconds is not None and elapsed_s >= limits.max_seconds:
            return f"{limits.max_seconds:.0f} s spent"
        reverts = 0
        for attempt in reversed(attempts):
            if attempt.decision == "keep" or attempt.tag == "starter":
                break
            reverts += 1
        if reverts >= limits.max_reverts:
            return f"{reverts} experiments in a row were not kept"
        kept = [e for e in attempts if e.decision == "keep"]
        if kept:
            peak = weighted(kept[-1].evaluation, "pct_peak")
            if peak is not None and peak >= limits.pct_peak:
                return f"at {peak:.0f} % of the roofline"
            score = self.scores()[kept[-1].experiment]
            if limits.speedup is not None and score is not None and score >= limits.speedup:
                return f"the goal of {limits.speedup:.2f}x against torch is reached"
        return None

    def conclude(self, reason: str) -> tuple[TargetResult, Winner | None]:
        """Confirm the incumbent against the model's own code and enter the target's outcome."""
        attempts = self.attempts()
        incumbent = self.incumbent()
        if incumbent is None:
            right = any(e.evaluation.status == "passed" for e in attempts)
            result = self._outcome(
                status="no_speedup" if right else "failed",
                reason=f"no candidate beat the model's own code ({reason})"
                if right
                else _first_failure(attempts),
            )
            self.run.append(Finished(result=result, at=time.time()))
            return result, None
        confirmation = self.judge.confirm(incumbent)
        gain = gain_over(confirmation, "eager")
        interval = gain[1] if gain else None
        if confirmation.status != "passed":
            outcome = self._outcome(
                status="failed",
                reason=f"the winner did not pass again: {confirmation.reason}",
                backend=incumbent.backend,
            )
        elif interval is not None and interval[0] > 1.0:
            outcome = self._outcome(status="won", reason=reason, backend=incumbent.backend)
        else:
            outcome = self._outcome(
                status="no_speedup",
                reason="the confirmation run did not bear the speed-up out",
                backend=incumbent.backend,
            )
        result = outcome.model_copy(
            update={
                "baseline_us": weighted(confirmation, "eager_us"),
                "best_us": weighted(confirmation, "latency_us"),
                "speedup": gain[0] if gain else None,
                "speedup_ci95": interval,
            }
        )
        commit = [e for e in attempts if e.decision == "keep"][-1].commit
        self.run.append(Finished(result=result, confirmation=confirmation, commit=commit, at=time.time()))
        won = result.status == "won"
        winner = Winner(target=self.target, candidate=incumbent, evaluation=confirmation) if won else None
        return result, winner

    def _outcome(self, *, status: TargetStatus, reason: str, backend: Backend | None = None) -> TargetResult:
        attempts = self.attempts()
        return TargetResult(
            name=self.target.name,
            kernel_type=self.target.kernel_type,
            backend=backend or self.target.backend,
            share=self.target.share,
            experiments=len(attempts),
            kept=sum(e.decision == "keep" for e in attempts),
            status=status,
            reason=reason,
        )

    def _report(self, record: Experiment) -> None:
        ratio = weighted(record.evaluation, "speedup_vs_incumbent")
        against = "the incumbent"
        if ratio is None:
            ratio, against = weighted(record.evaluation, "speedup_vs_eager"), "eager"
        figure = f", {ratio:.3f}x {against}" if ratio is not None else ""
        self.progress.step(
            len(self.attempts()),
            self.limits.max_experiments,
            f"#{record.experiment} {record.decision} ({record.evaluation.status}{figure}; {record.seconds:.1f} s): "
            f"{record.description}",
        )


def _first_failure(attempts: Sequence[Experiment]) -> str:
    if not attempts:
        return "nothing was tried"
    first = attempts[0].evaluation
    return f"no candidate was right: {first.status}: {first.reason}"
