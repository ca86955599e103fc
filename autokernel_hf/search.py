"""The loop: propose, judge, keep or revert, until a stop rule says enough.

Each target has its own clock, from its own start. What is kept must be right everywhere and faster than the incumbent
beyond the noise; what is won must be faster than the model's own code in a confirmation run of its own.

With several devices each has a judge session and a thread, a *lane*, that takes the next proposal as soon as it is free.
A verdict counts against the incumbent of the moment in which it is entered: where another lane has kept something
meanwhile, a candidate that would be kept is judged again, against that.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from autokernel_hf import tunables
from autokernel_hf.agent import Context, NothingLeft, Proposer
from autokernel_hf.archive import FINAL, FINALISTS, beam, cell_of, elites, finalists
from autokernel_hf.errors import DeviceError, JudgeError
from autokernel_hf.figures import gain_over, scores_of, weighted
from autokernel_hf.ledger import Demoted, Finished, Judged, Round, StopKind
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
from autokernel_hf.runs import Run

logger = logging.getLogger(__name__)

_PATIENCE_S, _LOOK_EVERY_S = 30.0, 0.02
"""How long a judge waits for any of the candidates that are being compiled, before it takes the oldest; how often it looks."""
MAX_CONFIRMATIONS = 4
"""So many kept candidates are confirmed at most: with every further one chance has another throw."""


class Judging(Protocol):
    """What the loop needs of a judge session (`evaluate.Judge`)."""

    def measure_peers(self) -> tuple[WorkloadResult, ...]: ...

    def evaluate(
        self,
        candidate: Candidate,
        incumbent: Candidate | None = None,
        *,
        known: Collection[str] = (),
        meanwhile: Callable[[], None] | None = None,
    ) -> Evaluation: ...

    def confirm(self, candidate: Candidate) -> Evaluation: ...


Decide = Callable[[Evaluation], tuple[Decision, str]]
Ahead = Callable[[Candidate], bool]
Ready = Callable[[Candidate], bool]
Diagnose = Callable[[Target, Candidate, Evaluation], tuple[tuple[str, ...], str]]
"""(target, incumbent, its evaluation) -> (kinds of tunables to try first, what bounds it in words)."""


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


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a search ends: the rule, and in words."""

    kind: StopKind
    reason: str


@dataclass(frozen=True, slots=True)
class _NextUp:
    """A proposal that waits for its turn, with the digest of the incumbent of the moment when it was made.

    `compiling`: whether it is compiled ahead.
    """

    candidate: Candidate
    proposal: Proposal
    base: str
    compiling: bool


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
        more: Sequence[tuple[str, Judging]] = (),
        ahead: Ahead | None = None,
        ready: Ready | None = None,
        depth: int = 1,
        look: Diagnose | None = None,
    ) -> None:
        """
        Args:
            judge: The session that judges; None for a search that is only read.
            more: Sessions on further devices, with their names.
            ahead: Begins to compile a candidate, and returns at once, whether it does. With it the next proposals are
                asked for, and told to it, while the present one is judged; None where compiling would disturb the timing.
            ready: Whether a candidate that `ahead` was told of is compiled, or found not to compile.
            depth: How many it compiles side by side.
            look: As `diagnose`, but it may take long, to find out what a later diagnosis can tell then.
        """
        self.target = target
        self.starters = tuple(starters)
        self.run = run
        self._judge = judge
        self._more = tuple(more)
        self._device: str | None = None  # whose session the judge is, once several have worked
        self._ahead = ahead
        self._ready = ready
        self._look = look
        self._looking = threading.Lock()  # held by the lane that looks
        self._depth = depth
        self._base = ""
        self._next_up: list[_NextUp] = []  # proposed, being compiled, not begun
        self._starters_told: set[str] = set()  # digests of starters that are being compiled
        self.decide = decide
        self.diagnose = diagnose
        self.limits = limits
        self.progress = progress
        self._turn = threading.Condition()  # guards what follows, and the proposer
        self._flying: dict[int, Proposal] = {}  # by number: begun, and not entered yet
        self._sources: dict[int, Candidate] = {}
        self._end: Stop | None = None  # why no further experiment begins
        self._fault: BaseException | None = None  # what ends all lanes
        self._odd: Exception | None = None  # what went wrong while looking ahead

    @property
    def judge(self) -> Judging:
        if self._judge is None:
            raise RuntimeError("this search was opened to read only")
        return self._judge

    # One experiment -----------------------------------------------------------------------------------------------

    def experiment(self, candidate: Candidate, proposal: Proposal) -> Experiment:
        """Judge one candidate and enter it: commit, ledger, refs, table."""
        number, started = self._begin(candidate, proposal)
        return self._judged(number, started, candidate, proposal, self.judge, self._device)

    def _begin(self, candidate: Candidate, proposal: Proposal) -> tuple[int, float]:
        number = self.run.begin(
            self.target.name, candidate, proposal.rationale, dict(proposal.tunables), time.time()
        )
        # What it takes counts against the budget, so it is told by a clock that nobody sets.
        return number, time.monotonic()

    def _judged(
        self,
        number: int,
        started: float,
        candidate: Candidate,
        proposal: Proposal,
        judge: Judging,
        device: str | None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Experiment:
        incumbent = self.run.kept(self.target.name)
        while True:
            # A finalist is timed again on purpose.
            known = {} if FINAL in proposal.tags else self._machine_code()
            opponent = self.run.source(incumbent) if incumbent else None
            more: dict[str, Any] = {"known": frozenset(known)} if known else {}
            if meanwhile is not None:
                more["meanwhile"], meanwhile = meanwhile, None
            evaluation = judge.evaluate(candidate, opponent, **more)
            twin = known.get(evaluation.machine_code or "")
            if twin is None or any(w.latency_us is not None for w in evaluation.workloads):
                twin = None
                decision, reason = self.decide(evaluation)
            else:
                decision, reason = "revert", f"The same machine code as #{twin}: not judged again."
            with self.run.settling():
                now = self.run.kept(self.target.name)
                if decision == "keep" and now != incumbent:
                    incumbent = now
                    continue
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
                    seconds=time.monotonic() - started,
                    against=incumbent.experiment if incumbent else None,
                    device=device,
                    duplicate_of=twin,
                )
                self.run.enter(record)
            return record

    def _machine_code(self) -> dict[str, int]:
        """The machine code of what was found right and timed, with the experiment that it was first met in."""
        known: dict[str, int] = {}
        for attempt in self.attempts():
            code = attempt.evaluation.machine_code
            if code is not None and attempt.evaluation.status == "passed" and attempt.duplicate_of is None:
                known.setdefault(code, attempt.experiment)
        return known

    # State, from the ledger ---------------------------------------------------------------------------------------

    def attempts(self) -> list[Experiment]:
        return self.run.experiments(self.target.name)

    def incumbent(self) -> Candidate | None:
        """The best kept candidate; None until one was kept."""
        return self.run.incumbent(self.target.name)

    def _source(self, attempt: Experiment) -> Candidate:
        """An attempt's source, read from git once."""
        if attempt.experiment not in self._sources:
            self._sources[attempt.experiment] = self.run.source(attempt)
        return self._sources[attempt.experiment]

    def _expected(self, attempts: Sequence[Experiment]) -> int:
        """How many experiments this target is likely to have in the end, by its number or by its time."""
        if self.limits.max_seconds is None or not attempts:
            return self.limits.max_experiments
        mean_s = math.fsum(e.seconds for e in attempts) / len(attempts) / (1 + len(self._more))
        by_time = math.ceil(self.limits.max_seconds / max(mean_s, 1e-3))
        return min(self.limits.max_experiments, max(by_time, len(attempts)))

    def scores(self) -> dict[int, float | None]:
        """Time of the model's own code over each attempt's, by experiment number."""
        return scores_of(self.attempts())

    def context(self, *, seed: int = 0) -> Context:
        """All that a proposer may know now."""
        attempts = self.attempts()
        scores = self.scores()
        kept = self.run.kept(self.target.name)
        if kept is None:
            # Nothing was kept yet: go on from the fastest right attempt, else from the first starter.
            timed = [(s, e) for e in attempts if (s := scores[e.experiment]) is not None]
            best = max(timed, key=lambda pair: pair[0], default=None)
            incumbent = self.run.source(best[1]) if best else self.starters[0]
            evaluation = best[1].evaluation if best else None
        else:
            incumbent, evaluation = self.run.source(kept), kept.evaluation
        prescriptions: tuple[str, ...] = ()
        bound = "not known yet"
        if evaluation is not None and evaluation.workloads:
            prescriptions, bound = self.diagnose(self.target, incumbent, evaluation)
        right = {
            e.experiment: self._source(e)
            for e in attempts
            if scores[e.experiment] is not None and e.duplicate_of is None
        }
        found = elites(attempts, scores, right)
        return Context(
            target=self.target,
            incumbent=incumbent,
            attempts=tuple(attempts),
            scores=scores,
            prescriptions=prescriptions,
            bound=bound,
            pending=(*self._flying.values(), *(waiting.proposal for waiting in self._next_up)),
            beam=beam(found),
            cells={number: cell_of(candidate) for number, candidate in right.items()},
            others=found,
            remaining=max(
                0, self._expected(attempts) - len(attempts) - len(self._flying) - len(self._next_up)
            ),
            seed=seed,
        )

    # The loop -----------------------------------------------------------------------------------------------------

    def run_all(self, proposer: Proposer, *, seed: int = 0) -> tuple[TargetResult, Winner | None]:
        """Search until a stop rule, then confirm the incumbent in a run of its own.

        Raises:
            AutokernelError: The proposer's, the last device's, or the ledger's; what was entered stays entered.
        """
        # A resumed target's clock goes on where it stood: what was judged before has cost its time.
        spent = math.fsum(e.seconds for e in self.attempts()) / (1 + len(self._more))
        started = time.monotonic() - spent
        if not self._more:
            self._lane(proposer, seed, started, None, self.judge)
        else:
            self._lanes(proposer, seed, started)
        assert self._end is not None
        return self.conclude(replace(self._end, reason=self._with_note(self._end.reason)))

    def _lanes(self, proposer: Proposer, seed: int, started: float) -> None:
        """One thread a device, until none has anything left to do."""
        lost: list[tuple[str, JudgeError | DeviceError]] = []

        def work(device: str, judge: Judging) -> None:
            try:
                self._lane(proposer, seed, started, device, judge)
            except (JudgeError, DeviceError) as error:
                # One device's end is not the others': what flew there counts as lost to a crash.
                lost.append((device, error))
                if self._fault is None:
                    logger.warning("%s is given up for %s: %s", device, self.target.name, error)
            except BaseException as error:  # noqa: BLE001 - it is raised again by the thread that waits
                with self._turn:
                    self._fault = self._fault or error
                    self._turn.notify_all()

        judges = [(self.target.device, self.judge), *self._more]
        threads = [threading.Thread(target=work, args=pair, daemon=True, name=pair[0]) for pair in judges]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():  # an interrupt gets through only between two waits
                    thread.join(timeout=0.2)
        except BaseException as interrupt:
            with self._turn:
                self._fault = self._fault or interrupt
                self._turn.notify_all()
            raise
        if self._fault is not None:
            raise self._fault
        if len(lost) == len(judges):
            raise lost[0][1]
        gone = {device for device, _ in lost}
        living = [(device, judge) for device, judge in judges if device not in gone]
        self._device, self._judge = living[0]
        self._more = tuple(living[1:])

    def _lane(
        self, proposer: Proposer, seed: int, started: float, device: str | None, judge: Judging
    ) -> None:
        """Judge one proposal after the other, until there is none."""
        while (task := self._next(proposer, seed, started)) is not None:
            number, begun, candidate, proposal = task
            try:
                meanwhile = None if self._ahead is None else partial(self._prepare_next, proposer, seed)
                record = self._judged(number, begun, candidate, proposal, judge, device, meanwhile)
            finally:
                with self._turn:
                    del self._flying[number]
                    self._turn.notify_all()
            with self._turn:
                self._report(record)
                if self._odd is not None:
                    raise self._odd

    def _next(
        self, proposer: Proposer, seed: int, started: float
    ) -> tuple[int, float, Candidate, Proposal] | None:
        """The next experiment, entered as begun; None where the search ends."""
        with self._turn:
            since: float | None = None  # when nothing that waits was compiled
            while self._end is None and self._fault is None:
                found = self._starter_left()
                if found is None:
                    self._end = self.stop_reason(time.monotonic() - started)
                    if self._end is not None:
                        break
                    if len(self.attempts()) + len(self._flying) >= self.limits.max_experiments:
                        self._turn.wait()
                        continue
                    # Compilers take longer than the judge, each its time: what is ready first is judged first.
                    patient = since is None or time.monotonic() - since < _PATIENCE_S
                    found = self._taken_up(at_once=not patient)
                    if found is None and self._next_up:
                        since = since or time.monotonic()
                        self._turn.wait(_LOOK_EVERY_S)
                        continue
                    nothing = None
                    if found is None:
                        found, nothing = self._proposed(proposer, seed)
                    if found is None and self._flying:
                        # What flies may give the proposer something to go on with.
                        self._turn.wait()
                        continue
                    if found is None:
                        assert nothing is not None
                        self._end = Stop("exhausted", nothing)
                        break
                candidate, proposal = found
                number, begun = self._begin(candidate, proposal)
                self._flying[number] = proposal
                return number, begun, candidate, proposal
            self._turn.notify_all()
            return None

    def _taken_up(self, *, at_once: bool) -> tuple[Candidate, Proposal] | None:
        """The oldest proposal that is compiled, of those that are still worth judging.

        Args:
            at_once: Take the oldest where none is compiled, which the judge will wait for.
        """
        kept = self.run.kept(self.target.name)
        # A step from an incumbent that is none any more is asked for anew, from the one that is.
        self._next_up = [
            waiting
            for waiting in self._next_up
            if "opening" not in waiting.proposal.tags or kept is None or kept.digest == waiting.base
        ]
        for at, waiting in enumerate(self._next_up):
            if at_once or not waiting.compiling or self._ready is None or self._ready(waiting.candidate):
                del self._next_up[at]
                return waiting.candidate, waiting.proposal
        return None

    def _prepare_next(self, proposer: Proposer, seed: int) -> None:
        """Look ahead while a judge works, which would wait for it otherwise; what goes wrong is told after the verdict."""
        try:
            self._look_closer()  # without the lock: the other lanes go on
            with self._turn:
                self._look_ahead(proposer, seed)
        except Exception as error:  # noqa: BLE001 - raised by the lane, once the verdict is entered
            self._odd = error

    def _look_closer(self) -> None:
        """Look at what bounds the incumbent, if no other lane does."""
        kept = self.run.kept(self.target.name)
        if self._look is None or kept is None or not self._looking.acquire(blocking=False):
            return
        try:
            self._look(self.target, self._source(kept), kept.evaluation)
        finally:
            self._looking.release()

    def _look_ahead(self, proposer: Proposer, seed: int) -> None:
        """Have the next proposals compiled before the present ones have their verdicts.

        One a device, or as many as are compiled side by side: where a compiler takes longer than the judge, the judge
        would wait. What is chosen so early is chosen with fewer verdicts, so nothing is queued that need not be compiled.
        """
        if self._ahead is None:
            return
        starter = self._starter_left()
        if starter is not None:
            # It is the next one, whatever the verdict on the present one is.
            if starter[0].digest not in self._starters_told:
                self._starters_told.add(starter[0].digest)
                self._ahead(starter[0])
            return
        left = self.limits.max_experiments - len(self.attempts()) - len(self._flying) - len(self._next_up)
        lanes = 1 + len(self._more)
        # With some more than are compiled at a time a lane finds one that is ready while others take long.
        most = max(self._depth, lanes) + (2 * lanes if self._ready is not None and self._depth > 1 else 0)
        while left > 0 and len(self._next_up) < most:
            found, _ = self._proposed(proposer, seed)
            if found is None:
                return
            compiling = self._ahead(found[0])
            self._next_up.append(_NextUp(*found, base=self._base, compiling=compiling))
            left -= 1
            if not compiling and len(self._next_up) > len(self._more):
                return

    def _proposed(
        self, proposer: Proposer, seed: int
    ) -> tuple[tuple[Candidate, Proposal] | None, str | None]:
        """What the proposer wants tried, or why there is nothing."""
        context = self.context(seed=seed)
        self._base = context.incumbent.digest
        try:
            proposals = proposer.propose(context, 1)
        except NothingLeft as end:
            return None, str(end)
        if not proposals:
            return None, "nothing left to try"
        proposal = proposals[0]
        candidate = Candidate(
            kernel_type=self.target.kernel_type,
            backend=proposal.backend or context.incumbent.backend,
            source=proposal.source,
        )
        return (candidate, proposal), None

    def _with_note(self, reason: str) -> str:
        """The reason, with what the proposer entered about its own end."""
        notes = [e.note for e in self.run.events() if isinstance(e, Round) and e.target == self.target.name]
        last = next((n for n in reversed(notes) if n), None)
        return f"{reason}; {last}" if last else reason

    def try_starters(self) -> None:
        """Judge the starters that were not judged yet."""
        while (found := self._starter_left()) is not None:
            self._report(self.experiment(*found))

    def _starter_left(self) -> tuple[Candidate, Proposal] | None:
        tried = {e.digest for e in self.attempts()}
        flying = {p.source for p in self._flying.values()}
        starter = next((s for s in self.starters if s.digest not in tried and s.source not in flying), None)
        if starter is None:
            return None
        return starter, Proposal(
            source=starter.source,
            rationale=f"{starter.backend} starter",
            tags=("starter",),
            tunables=tunables.values_if_readable(starter.source),
        )

    def stop_reason(self, elapsed_s: float) -> Stop | None:
        """Why the search ends now; None to go on."""
        attempts = self.attempts()
        limits = self.limits
        if len(attempts) >= limits.max_experiments:
            return Stop("experiments", f"{limits.max_experiments} experiments done")
        if limits.max_seconds is not None and elapsed_s >= limits.max_seconds:
            return Stop("time", f"{limits.max_seconds:.0f} s spent")
        reverts = 0
        for attempt in reversed(attempts):
            if attempt.decision == "keep" or attempt.tag == "starter":
                break
            # Duplicates and finalists say nothing of what else could be tried.
            reverts += attempt.duplicate_of is None and attempt.tag != FINAL
        if reverts >= limits.max_reverts:
            return Stop("plateau", f"{reverts} experiments in a row were not kept")
        kept = [e for e in attempts if e.decision == "keep"]
        if kept:
            peak = weighted(kept[-1].evaluation, "pct_peak")
            if peak is not None and peak >= limits.pct_peak:
                return Stop("roofline", f"at {peak:.0f} % of the roofline")
            score = self.scores()[kept[-1].experiment]
            if limits.speedup is not None and score is not None and score >= limits.speedup:
                return Stop("goal", f"the goal of {limits.speedup:.2f}x against torch is reached")
        return None

    def time_finalists(self) -> None:
        """Judge what may be better than the incumbent once more, in turn with it, and keep it if it is.

        In one session, one after the other, each against the best so far. A resumed run goes on where it was ended.
        """
        own = [
            e
            for e in self.run.events()
            if isinstance(e, Judged | Demoted) and _target_of(e) == self.target.name
        ]
        if own and isinstance(own[-1], Demoted):
            return  # they were timed before the confirmation
        attempts = self.attempts()
        before = next((i for i, e in enumerate(reversed(attempts)) if e.tag != FINAL), len(attempts))
        fallen = {e.experiment for e in own if isinstance(e, Demoted)}
        barred = {e.digest for e in attempts if e.experiment in fallen}
        for _ in range(FINALISTS - before):
            kept = self.run.kept(self.target.name)
            if kept is None:
                return
            found = finalists(self.attempts(), self.scores(), kept)
            attempt = next((e for e in found if e.digest not in barred), None)
            if attempt is None:
                return
            candidate = self._source(attempt)
            proposal = Proposal(
                source=candidate.source,
                rationale=f"#{attempt.experiment} once more, against #{kept.experiment}",
                tags=(FINAL,),
                tunables=dict(attempt.tunables),
            )
            self._report(self.experiment(candidate, proposal))

    def conclude(self, stop: Stop) -> tuple[TargetResult, Winner | None]:
        """Time the finalists, confirm the incumbent against the model's own code, and enter the target's outcome.

        Where the confirmation run does not bear an incumbent out, it is demoted and the one before it takes its place.
        One that was confirmed when the target was concluded before needs no second run.
        """
        self.time_finalists()
        began = time.monotonic()
        fallen: list[str] = []
        known = self.run.result(self.target.name)
        while (kept := self.run.kept(self.target.name)) is not None and len(fallen) < MAX_CONFIRMATIONS:
            candidate = self.run.source(kept)
            if known is not None and known.result.status == "won" and known.commit == kept.commit:
                assert known.confirmation is not None
                confirmation = known.confirmation
            else:
                confirmation = self.judge.confirm(candidate)
            gain = gain_over(confirmation, "eager")
            problem = _not_borne_out(confirmation)
            if not problem:
                assert gain is not None
                noted = f"{stop.reason}; {'; '.join(fallen)}" if fallen else stop.reason
                result = self._outcome(status="won", reason=noted, backend=kept.backend).model_copy(
                    update={
                        "baseline_us": weighted(confirmation, "eager_us"),
                        "best_us": weighted(confirmation, "latency_us"),
                        "speedup": gain[0],
                        "speedup_ci95": gain[1],
                    }
                )
                self._finish(stop, began, result, confirmation, kept.commit)
                return result, Winner(target=self.target, candidate=candidate, evaluation=confirmation)
            fallen.append(f"#{kept.experiment} was kept and then taken back: {problem}")
            logger.warning("%s: %s", self.target.name, fallen[-1])
            self.run.demote(kept, f"Kept, then taken back: {problem}.", confirmation)
        attempts = self.attempts()
        right = any(e.evaluation.status == "passed" for e in attempts)
        if fallen:
            why = "; ".join(fallen)
        elif right:
            why = f"no candidate beat the model's own code ({stop.reason})"
        else:
            why = _first_failure(attempts)
        result = self._outcome(status="no_speedup" if right else "failed", reason=why)
        self._finish(stop, began, result)
        return result, None

    def _finish(
        self,
        stop: Stop,
        began: float,
        result: TargetResult,
        confirmation: Evaluation | None = None,
        commit: str | None = None,
    ) -> None:
        self.run.append(
            Finished(
                result=result,
                confirmation=confirmation,
                commit=commit,
                stopped=stop.kind,
                seconds=time.monotonic() - began,
                at=time.time(),
            )
        )

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
            self._expected(self.attempts()),
            f"#{record.experiment} {record.decision} ({record.evaluation.status}{figure}; {record.seconds:.1f} s): "
            f"{record.description}",
        )


def _target_of(event: Judged | Demoted) -> str:
    return event.record.target if isinstance(event, Judged) else event.target


def _first_failure(attempts: Sequence[Experiment]) -> str:
    if not attempts:
        return "nothing was tried"
    first = attempts[0].evaluation
    return f"no candidate was right: {first.status}: {first.reason}"


def _not_borne_out(confirmation: Evaluation) -> str:
    """What a confirmation run has against a kept candidate, as a clause; empty where it confirms it."""
    if confirmation.status != "passed":
        return f"the confirmation run found it {confirmation.status} ({confirmation.reason})"
    gain = gain_over(confirmation, "eager")
    if gain is None:
        return "the confirmation run could not time it against the model's own code"
    speedup, (low, high) = gain
    if low <= 1.0:
        return (
            f"the confirmation run found {speedup:.3f}x the speed of the model's own code "
            f"({low:.3f} to {high:.3f} at 95 %)"
        )
    return ""
