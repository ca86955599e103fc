"""The stages in order; read this first.

    pull -> profile -> extract -> optimize -> verify -> export          (publish and load are `hub`)

Each stage takes the last one's record and returns its own. What holds a model or a device context runs in a process of
its own (`worker`, `judge`); this module holds neither, and decides nothing that a stage can decide.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from autokernel_hf import llm_account, llm_proposer, worker
from autokernel_hf.agent import Context, Playbook, Proposer
from autokernel_hf.archive import cell_of
from autokernel_hf.cache import need_cache
from autokernel_hf.errors import AutokernelError, UsageError
from autokernel_hf.extract import extract, starters
from autokernel_hf.figures import scores_of
from autokernel_hf.ledger import Finished
from autokernel_hf.llm import LanguageModelError
from autokernel_hf.progress import NOTE, Progress, Silent
from autokernel_hf.records import (
    Candidate,
    Decision,
    Evaluation,
    ModelSpec,
    Profile,
    PulledModel,
    RunModel,
    RunRecord,
    RunStatus,
    Target,
    TargetResult,
    Verification,
    Winner,
    Workload,
    write_atomically,
)
from autokernel_hf.runs import Run, RunSettings
from autokernel_hf.search import Diagnose, Judging, Limits, Search, Stop
from autokernel_hf.settings import check_settings
from autokernel_hf.shipping import finish, stage, status_of, verify_the_helpful, winner_of
from autokernel_hf.toolchain import gxx

logger = logging.getLogger(__name__)


def optimize(
    settings: RunSettings,
    *,
    out: Path = Path("runs"),
    resume: Path | None = None,
    progress: Progress | None = None,
) -> RunRecord:
    """The whole main job: from a model's name to verified, exported kernels.

    Args:
        settings: What to do; with `resume`, the run's own settings are used instead.
        out: Where run folders are made.
        resume: A run folder to go on with.
        progress: Who listens.

    Raises:
        AutokernelError: A known failure; the run folder, if there is one, can be resumed.
    """
    progress = progress or Silent()
    started = time.monotonic()
    need_cache()
    if resume is not None:
        run = Run.open(resume)
        progress.stage(f"Resuming {resume}")
    else:
        check_settings(settings)
        settings = _with_devices(settings)
        if settings.spec.device == "cpu":
            gxx()  # all kernels of a CPU are C++: without a compiler nothing can come of it
        progress.stage(f"Pulling {settings.spec.model}")
        pulled = pull(settings.spec)
        run = Run.create(out, pulled.id, settings)
    with run, _interruptible(run):
        settings = run.settings
        if settings.proposer == "llm" and resume is None:
            progress.stage(f"Looking for {settings.llm}")
            llm_account.prepare(run)
        profile = run.profile() or profile_into(run, progress)
        results, winners = optimize_targets(run, profile, progress, resumed=resume is not None)
        if (asked := llm_account.summary(run)) is not None:
            logger.log(NOTE, "%s.", asked)
        staged = stage(run, profile.model, winners, progress)
        staged, verification = verify_the_helpful(run, staged, progress)
        packages = finish(run, profile, staged, verification, progress)
        record = RunRecord(
            status=_status(results, verification),
            reason=_reason(results, verification),
            run_dir=str(run.path),
            model=RunModel(
                id=profile.model.id,
                revision=profile.model.revision,
                architecture=profile.model.architecture,
                weights=profile.model.weights,
            ),
            device=profile.device,
            targets=tuple(sorted(results, key=lambda r: -r.share)),
            verification=verification,
            packages=tuple(packages),
            seconds=round(time.monotonic() - started, 1),
        )
        run.conclude(record, time.time())
        from autokernel_hf.report import write_report

        write_report(run.path)
    return record


def _with_devices(settings: RunSettings) -> RunSettings:
    """The settings with the first of several devices as the model's, where all of them are there.

    Raises:
        UsageError: Several devices for something else than GPUs, or one twice.
        DeviceError: One of them is not there.
    """
    if not settings.devices:
        return settings
    first = f"cuda:{settings.devices[0]}"
    if len(set(settings.devices)) < len(settings.devices):
        raise UsageError("A device stands twice in the list of devices.", remedy="Name each once.")
    if settings.spec.device not in ("auto", "cuda", first):
        raise UsageError(
            f"The devices are GPUs of which {first} is the first, and the model is to run on {settings.spec.device}.",
            remedy="Leave --device away, or name the model's device first in --devices.",
        )
    worker.call("devices", worker.DevicesRequest(wanted=settings.devices), worker.Devices)
    return settings.model_copy(update={"spec": settings.spec.model_copy(update={"device": first})})


@contextmanager
def _interruptible(run: Run) -> Iterator[None]:
    """An interrupt, and a language model that cannot be asked, say which run can be resumed."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(str(run.path)) from None
    except LanguageModelError as error:
        raise LanguageModelError(
            error.message,
            remedy=f"{error.remedy} Then go on with: autokernel-hf optimize --resume {run.path}",
        ) from error


# --- the stages ---------------------------------------------------------------------------------------------------


def pull(spec: ModelSpec) -> PulledModel:
    """Fetch and check a model, its revision pinned."""
    return worker.call("pull", worker.PullRequest(spec=spec), PulledModel)


def profile_model(
    spec: ModelSpec,
    *,
    trace: Path | None = None,
    memory_snapshot: Path | None = None,
    compile_log: Path | None = None,
) -> Profile:
    """Where the time of one forward pass goes."""
    request = worker.ProfileRequest(
        spec=spec,
        trace=str(trace.resolve()) if trace else None,
        memory_snapshot=str(memory_snapshot.resolve()) if memory_snapshot else None,
        compile_log=str(compile_log.resolve()) if compile_log else None,
    )
    return worker.call("profile", request, Profile)


def profile_into(run: Run, progress: Progress) -> Profile:
    """Profile a run's model and keep the result in its folder."""
    progress.stage("Profiling")
    profile = profile_model(run.settings.spec)
    run.save_profile(profile)
    covered = 100 * (1 - profile.other_share)
    waits = ""
    if profile.launch_bound:
        waits = f", in which the GPU works for {profile.device_ms:.1f} ms and waits for launches else"
    progress.step(
        1,
        1,
        f"one pass takes {profile.total_ms:.1f} ms{waits}; sites of known types are {covered:.0f} % of it",
    )
    return profile


def prepare(run: Run, profile: Profile) -> list[Target]:
    """Write the targets of a profile into a run folder, each with its starters (`extract` as a command)."""
    targets, _ = extract(profile, top=run.settings.top, backend=run.settings.backend)
    for target in targets:
        run.add_target(target, starters(target, profile.device.kind, run.settings.backend))
    return targets


def optimize_targets(
    run: Run, profile: Profile, progress: Progress, *, resumed: bool = False
) -> tuple[list[TargetResult], list[Winner]]:
    """Search the targets of a profile, `--top` of them, that with most to gain first.

    What there is to gain is counted anew after each: a target without a winner leaves its sites to the types that lie
    within it, and its time to the others. With a budget, targets are taken up again as long as it lasts.
    """
    settings = run.settings
    found: dict[str, TargetResult] = {}
    winners: dict[str, Winner] = {}
    while True:
        # A target that is left to a coding agent keeps its place until the agent is done.
        settled = {name: r.status in ("won", "skipped") for name, r in found.items()}
        targets, passed_over = extract(
            profile, top=settings.top - len(found), backend=settings.backend, settled=settled
        )
        if not targets:
            break
        result, winner = optimize_target(
            run, profile, targets[0], progress, resumed=resumed, limits=limits_for(run, targets)
        )
        found[result.name] = result
        if winner is not None:
            winners[result.name] = winner
    if settings.budget_s is not None and settings.proposer != "external":
        _go_on(run, profile, progress, found, winners)
    return [*passed_over, *found.values()], list(winners.values())


LEAST_LEFT = 0.03
"""A part of the budget below it is not worth another start of the judge."""


def _go_on(
    run: Run,
    profile: Profile,
    progress: Progress,
    found: dict[str, TargetResult],
    winners: dict[str, Winner],
) -> None:
    """Spend what is left of the budget: take up targets whose search was only stuck, with twice the patience.

    Those first that promise most. A target whose sites a winner holds meanwhile is left alone.
    """
    budget_s = run.settings.budget_s
    assert budget_s is not None
    lost: set[str] = set()  # could not be searched any more
    while budget_s - spent_s(run) > LEAST_LEFT * budget_s:
        waiting = [(target, *_promise(run, target)) for target in _stuck(run, profile, found)]
        waiting = [each for each in waiting if each[1] > 0 and each[0].name not in lost]
        if not waiting:
            return
        # A round after the other: one that has been taken up less often comes first.
        least = min(rounds for _, _, rounds in waiting)
        due = sorted((each for each in waiting if each[2] == least), key=lambda each: -each[1])
        target, promise, rounds = due[0]
        part = promise / math.fsum(p for _, p, _ in due)
        own = math.fsum(e.seconds for e in run.experiments(target.name)) / len(
            devices_of(run.settings, target)
        )
        limits = limits_of(run.settings)
        limits = replace(
            limits,
            max_seconds=own + (budget_s - spent_s(run)) * part,
            max_reverts=limits.max_reverts * 2**rounds,
        )
        result, winner = optimize_target(run, profile, target, progress, limits=limits, again=True)
        if _promise(run, target)[1] == rounds:  # it failed before its end: what was known of it stands
            lost.add(target.name)
            continue
        found[result.name] = result
        winners.pop(result.name, None)
        if winner is not None:
            winners[result.name] = winner


def _stuck(run: Run, profile: Profile, found: dict[str, TargetResult]) -> list[Target]:
    """The targets that ended for want of patience or of their part of the time, and whose sites nobody else holds."""
    stuck = []
    for name in found:
        done = run.result(name)
        if done is None or done.stopped not in ("plateau", "time"):
            continue
        others = {n: r.status == "won" for n, r in found.items() if n != name}
        targets, _ = extract(profile, top=len(profile.sites), backend=run.settings.backend, settled=others)
        stuck += [t for t in targets if t.name == name]
    return stuck


def _promise(run: Run, target: Target) -> tuple[float, int]:
    """What may still be gained at a target, as a part of the pass, and how often it was concluded so far.

    That is the time of its best so far above the floor; less where even the best is slower than the model's own code,
    since it has that to make up first.
    """
    concluded = [e for e in run.events() if isinstance(e, Finished) and e.result.name == target.name]
    best = max((s for s in scores_of(run.experiments(target.name)).values() if s is not None), default=0.0)
    floor = target.share - (1 - 1 / target.attainable_speedup)
    left = target.share / max(best, 1.0) - max(floor, 0.0)
    return max(left, 0.0) * min(best, 1.0) ** 2, len(concluded)


def spent_s(run: Run) -> float:
    """How much of its time a run has used, in seconds: experiments, and the confirmation of what won."""
    lanes = max(1, len(run.settings.devices))
    concluded = math.fsum(e.seconds for e in run.events() if isinstance(e, Finished))
    return math.fsum(e.seconds for e in run.experiments()) / lanes + concluded


def limits_for(run: Run, waiting: Sequence[Target]) -> Limits:
    """When the search of the first of the waiting targets ends.

    Of the time that the targets before it have left of --budget it gets a part by what it can bring (Amdahl).
    """
    limits = limits_of(run.settings)
    if run.settings.budget_s is None:
        return limits
    names = {t.name for t in waiting}
    lanes = len(devices_of(run.settings, waiting[0]))
    own = math.fsum(e.seconds for e in run.experiments() if e.target in names) / lanes
    gains = [1 - 1 / t.attainable_speedup for t in waiting]
    part = gains[0] / math.fsum(gains) if math.fsum(gains) > 0 else 1 / len(gains)
    return replace(limits, max_seconds=max(0.0, run.settings.budget_s - (spent_s(run) - own)) * part)


def optimize_target(
    run: Run,
    profile: Profile,
    target: Target,
    progress: Progress,
    *,
    resumed: bool = False,
    limits: Limits | None = None,
    again: bool = False,
) -> tuple[TargetResult, Winner | None]:
    """Search one target; a finished one is read from the ledger instead, but where it is to be searched again.

    A target that is left to a coding agent is concluded when the run is resumed and the agent has tried something, and
    again when it has tried more since.
    """
    settings = run.settings
    tried = run.experiments(target.name)
    done = run.result(target.name)
    if (
        not again
        and done is not None
        and (settings.proposer != "external" or len(tried) <= done.result.experiments)
    ):
        return done.result, winner_of(run, target)
    once_more = "Going on with" if again else "Optimizing"
    progress.stage(f"{once_more} {target.name} ({100 * target.share:.1f} % of the pass)")
    candidates = starters(target, profile.device.kind, settings.backend)
    run.add_target(target, candidates)
    proposer = proposer_for(run)
    try:
        with searching(run, target, candidates, progress) as search:
            search.limits = limits or search.limits
            if proposer is None:
                search.try_starters()
                if resumed and any(e.tag != "starter" for e in tried):
                    return search.conclude(Stop("agent", "the coding agent's experiments are done"))
                return TargetResult(
                    name=target.name,
                    kernel_type=target.kernel_type,
                    backend=target.backend,
                    share=target.share,
                    experiments=len(search.attempts()),
                    status="skipped",
                    reason="left to a coding agent: see program.md, then `autokernel-hf optimize --resume`",
                ), None
            return search.run_all(proposer, seed=settings.spec.seed)
    except (UsageError, LanguageModelError):
        raise  # it would be the same for every target
    except AutokernelError as error:
        # One target's misfortune is not the others': it is told in the result.
        logger.warning("%s: %s", target.name, error)
        return TargetResult(
            name=target.name,
            kernel_type=target.kernel_type,
            backend=target.backend,
            share=target.share,
            experiments=len(run.experiments(target.name)),
            status="failed",
            reason=str(error),
        ), None


@contextmanager
def searching(
    run: Run, target: Target, candidates: Sequence[Candidate], progress: Progress
) -> Iterator[Search]:
    """A target's search with its judge sessions, one a device (also for the verbs of a coding agent)."""
    with contextlib.ExitStack() as sessions:
        judges = [
            (device, sessions.enter_context(_judge_on(device, target)))
            for device in devices_of(run.settings, target)
        ]
        ahead, ready, depth = None, None, 1
        if target.device.startswith("cuda"):
            from autokernel_hf.ahead import Ahead

            ahead = sessions.enter_context(Ahead(target.device, target.workloads))
            ready, depth = ahead.ready, ahead.processes
        yield Search(
            target,
            candidates,
            run=run,
            judge=judges[0][1],
            more=judges[1:],
            ahead=ahead,
            ready=ready,
            depth=depth,
            decide=_decide,
            diagnose=_diagnoser(run),
            look=_diagnoser(run, look=True) if ahead is not None else None,
            limits=limits_of(run.settings),
            progress=progress,
        )


def devices_of(settings: RunSettings, target: Target) -> list[str]:
    """The devices that judge a target's candidates; the first is the one that the model was profiled on."""
    if not settings.devices or not target.device.startswith("cuda"):
        return [target.device]
    return [f"cuda:{number}" for number in settings.devices]


def _judge_on(device: str, target: Target) -> contextlib.AbstractContextManager[Judging]:
    from autokernel_hf.evaluate import Judge

    need_cache()
    return Judge(
        target.kernel_type,
        target.backend,
        target.workloads,
        device=device,
        launch_bound=target.launch_bound,
    )


def context_of(run: Run, target: Target) -> Context:
    """All that a proposer may know of a target now; starts no judge."""
    kind = "cuda" if target.device.startswith("cuda") else "cpu"
    search = Search(
        target,
        starters(target, kind, run.settings.backend),
        run=run,
        judge=None,
        decide=_decide,
        diagnose=_diagnoser(run),
        limits=limits_of(run.settings),
        progress=Silent(),
    )
    return search.context(seed=run.settings.spec.seed)


def limits_of(settings: RunSettings) -> Limits:
    budget = settings.budget_s / max(1, settings.top) if settings.budget_s is not None else None
    return Limits(
        max_experiments=settings.experiments_a_target, max_seconds=budget, speedup=settings.target_speedup
    )


def proposer_for(run: Run) -> Proposer | None:
    """The proposer of a run; None for `external`, which works through the command line."""
    settings = run.settings
    if settings.proposer == "playbook":
        return Playbook()
    if settings.proposer == "external":
        return None
    return llm_proposer.proposer_of(run)


# --- helpers ------------------------------------------------------------------------------------------------------


def _decide(evaluation: Evaluation) -> tuple[Decision, str]:
    from autokernel_hf.evaluate import decide

    return decide(evaluation)


COUNTING = 0.05
"""The part of a run's time that hardware counters may take, but for the first."""


def _diagnoser(run: Run, *, look: bool = False) -> Diagnose:
    """The diagnosis of a run's kernels, against ceilings that a worker measured: this process has no device context.

    Args:
        look: Whether hardware counters are read where the time alone does not tell what a kernel waits for. That takes
            the device for some 14 s, so it is done once for a kind of candidate, and never for more than `COUNTING` of
            the run's time; what was read stays in the run.
    """
    from autokernel_hf.ceilings import Ceilings
    from autokernel_hf.counters import Counters, NoCountersError
    from autokernel_hf.counters import read as read_counters
    from autokernel_hf.diagnose import diagnose
    from autokernel_hf.kernels import kernel_type

    why_not = run.path / "counters" / "none.txt"  # why there are none on this machine, once that is known
    refused = [why_not.read_text(encoding="utf-8")] if why_not.exists() else []

    def counters_of(target: Target, candidate: Candidate, workload: Workload) -> Counters | None:
        cell = cell_of(candidate)
        path = run.path / "counters" / f"{target.name}-{candidate.backend}-{cell.strategy}.json"
        if path.exists():
            return Counters.load(path)
        if not look or refused:
            return None
        taken = math.fsum(Counters.load(p).seconds for p in path.parent.glob("*.json"))
        if taken > COUNTING * spent_s(run):
            return None  # a later diagnosis may
        began = time.monotonic()
        try:
            found = read_counters(candidate, workload, target.device)
        except NoCountersError as error:
            refused.append(error.message)
            write_atomically(why_not, error.message)
            logger.log(NOTE, "The diagnosis goes without hardware counters. %s", error)
            return None
        found = found.model_copy(update={"seconds": round(time.monotonic() - began, 1)})
        found.save(path)
        return found

    def explain(target: Target, candidate: Candidate, evaluation: Evaluation) -> tuple[tuple[str, ...], str]:
        workload = max(target.workloads, key=lambda w: w.share)
        timed = next((w for w in evaluation.workloads if w.label == workload.label), None)
        if timed is None or timed.latency_us is None:
            return (), "not known yet"
        path = run.path / "ceilings.json"
        if not path.exists():
            worker.call("ceilings", worker.CeilingsRequest(device=target.device), Ceilings).save(path)
        ceilings = Ceilings.load(path)
        type_ = kernel_type(target.kernel_type)
        found = diagnose(type_, workload, timed.latency_us, ceilings, evaluation.resources)
        lacking = ""
        if found.bound in ("latency", "underutilized") and target.device.startswith("cuda"):
            counters = counters_of(target, candidate, workload)
            if counters is not None:
                found = diagnose(type_, workload, timed.latency_us, ceilings, evaluation.resources, counters)
                if counters.digest != candidate.digest:
                    lacking = " (counted for other constants of the same file)"
            elif refused:
                lacking = f"; no hardware counters: {refused[0].rstrip('.')}"
        gain = f"at its floor it would be {100 / found.pct_of_floor:.3g} times as fast"
        first = "; ".join(f"{k}: {r}" for k, r in zip(found.prescriptions[:3], found.reasons, strict=False))
        words = f"{found.bound}-bound: {found.evidence}{lacking}; {gain}. What to change first: {first}"
        return tuple(found.prescriptions), words

    return explain


def _status(results: Sequence[TargetResult], verification: Verification | None) -> RunStatus:
    if verification is not None:
        return status_of(verification)
    tried = [r for r in results if r.status != "skipped"]
    return "failed" if tried and all(r.status == "failed" for r in tried) else "no_speedup"


def _reason(results: Sequence[TargetResult], verification: Verification | None) -> str:
    if verification is not None:
        return verification.reason
    tried = [r for r in results if r.status != "skipped" or r.backend is not None]
    if not tried:
        return "no kernel type has enough to gain in this model on this device"
    return "; ".join(f"{r.name}: {r.reason}" for r in tried)
