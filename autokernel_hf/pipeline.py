"""The stages in order; read this first.

    pull -> profile -> extract -> optimize -> verify -> export          (publish and load are `hub`)

Each stage takes the last one's record and returns its own. What holds a model or a device context runs in a process of
its own (`worker`, `judge`); this module holds neither, and decides nothing that a stage can decide.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autokernel_hf import llm_account, llm_proposer, worker
from autokernel_hf.agent import Context, Playbook, Proposer
from autokernel_hf.errors import AutokernelError, RunError, UsageError
from autokernel_hf.extract import extract, starters
from autokernel_hf.llm import LanguageModelError
from autokernel_hf.progress import NOTE, Progress, Silent
from autokernel_hf.records import (
    Built,
    Candidate,
    Decision,
    Evaluation,
    ModelSpec,
    Package,
    Profile,
    PulledModel,
    RunModel,
    RunRecord,
    Target,
    TargetResult,
    Verification,
    Winner,
)
from autokernel_hf.runs import Run, RunSettings
from autokernel_hf.search import Diagnose, Limits, Search

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A winner's package variant, in the run's staging area: what verify loads and export finishes."""

    winner: Winner
    built: Built
    package: Package


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
    if resume is not None:
        run = Run.open(resume)
        progress.stage(f"Resuming {resume}")
    else:
        _check_names(settings)
        progress.stage(f"Pulling {settings.spec.model}")
        pulled = pull(settings.spec)
        run = Run.create(out, pulled.id, settings)
    with run, _interruptible(run):
        settings = run.settings
        if settings.proposer == "llm" and resume is None:
            progress.stage(f"Looking for {settings.llm}")
            llm_account.prepare(run)
        profile = run.profile() or profile_into(run, progress)
        targets, results = extract(profile, top=settings.top, backend=settings.backend)
        winners: list[Winner] = []
        for target in targets:
            result, winner = optimize_target(run, profile, target, progress, resumed=resume is not None)
            results.append(result)
            if winner is not None:
                winners.append(winner)
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
        record.save(run.path / "result.json")
        from autokernel_hf.report import write_report

        write_report(run.path)
    return record


def _check_names(settings: RunSettings) -> None:
    """Refuse a name or a licence now that would be refused when the search is done.

    Raises:
        UsageError: No package can be called so, whichever kernels win; or it is no licence.
    """
    from autokernel_hf.export_hf import check_license, package_name
    from autokernel_hf.kernels import kernel_types

    check_license(settings.license)
    if settings.name is not None:
        package_name(settings.name, max(kernel_types(), key=len))


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


def optimize_target(
    run: Run, profile: Profile, target: Target, progress: Progress, *, resumed: bool = False
) -> tuple[TargetResult, Winner | None]:
    """Search one target; a finished one is read from the ledger instead.

    A target that is left to a coding agent is concluded when the run is resumed and the agent has tried something, and
    again when it has tried more since.
    """
    settings = run.settings
    tried = run.experiments(target.name)
    done = run.result(target.name)
    if done is not None and (settings.proposer != "external" or len(tried) <= done.result.experiments):
        return done.result, _winner_of(run, target)
    progress.stage(f"Optimizing {target.name} ({100 * target.share:.1f} % of the pass)")
    candidates = starters(target, profile.device.kind, settings.backend)
    run.add_target(target, candidates)
    proposer = proposer_for(run)
    try:
        with searching(run, target, candidates, progress) as search:
            if proposer is None:
                search.try_starters()
                if resumed and any(e.tag != "starter" for e in tried):
                    return search.conclude("the coding agent's experiments are done")
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
    """A target's search with its judge session (also for the verbs of a coding agent)."""
    from autokernel_hf.evaluate import Judge

    with Judge(
        target.kernel_type,
        target.backend,
        target.workloads,
        device=target.device,
        launch_bound=target.launch_bound,
    ) as judge:
        yield Search(
            target,
            candidates,
            run=run,
            judge=judge,
            decide=_decide,
            diagnose=_diagnoser(run),
            limits=limits_of(run.settings),
            progress=progress,
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
        max_experiments=settings.max_experiments, max_seconds=budget, speedup=settings.target_speedup
    )


def proposer_for(run: Run) -> Proposer | None:
    """The proposer of a run; None for `external`, which works through the command line."""
    settings = run.settings
    if settings.proposer == "playbook":
        return Playbook()
    if settings.proposer == "external":
        return None
    return llm_proposer.proposer_of(run)


def stage(
    run: Run, model: PulledModel, winners: Sequence[Winner], progress: Progress, *, out: Path | None = None
) -> list[Staged]:
    """Put the winners' judged builds into package folders, which verify loads from: the run's own, or those in `out`."""
    from autokernel_hf.build import build
    from autokernel_hf.export_hf import name_of_model, package_name
    from autokernel_hf.export_hf import stage as stage_package

    if not winners:
        return []
    progress.stage("Staging packages")
    base = run.settings.name or name_of_model(model.id)
    staged = []
    for winner in winners:
        kind = "cuda" if winner.target.device.startswith("cuda") else "cpu"
        built = build(winner.candidate, device=kind)
        name = package_name(
            base, winner.target.kernel_type if len(winners) > 1 or not run.settings.name else None
        )
        package = stage_package(
            built,
            candidate=winner.candidate,
            name=name,
            license=run.settings.license,
            out=out or run.path / "packages",
        )
        staged.append(Staged(winner=winner, built=built, package=package))
    return staged


def verify_the_helpful(
    run: Run, staged: Sequence[Staged], progress: Progress
) -> tuple[list[Staged], Verification | None]:
    """Verify all staged kernels together; where that fails, those that make the model faster by themselves.

    The kernels that were left out lose their package.
    """
    import shutil

    if not staged:
        return [], None
    verification = verify(run, staged, progress)
    if verification.passed or len(staged) == 1:
        return list(staged), verification
    alone = {s.winner.target.name: verify(run, [s], progress, quick=True) for s in staged}
    helpful = [s for s in staged if alone[s.winner.target.name].passed]
    if not helpful or len(helpful) == len(staged):
        # Each or none helps: nothing better is known than what all together showed.
        return list(staged), verification
    for item in staged:
        if item not in helpful:
            shutil.rmtree(item.package.path, ignore_errors=True)
    left_out = "; ".join(
        f"{name} was left out: {found.reason}" for name, found in alone.items() if not found.passed
    )
    verification = verify(run, helpful, progress)
    verification = verification.model_copy(update={"notes": (*verification.notes, left_out)})
    run.save_verification(verification)
    return helpful, verification


def verify(
    run: Run, staged: Sequence[Staged], progress: Progress | None = None, *, quick: bool = False
) -> Verification:
    """The whole model with the staged packages in place: right, and faster.

    Args:
        quick: Without torch.compile's columns, and not kept in the run folder: an answer on the way to the run's own.
    """
    names = ", ".join(s.winner.target.name for s in staged)
    (progress or Silent()).stage(f"Verifying the whole model with {names}")
    profile = run.profile()
    request = worker.VerifyRequest(
        # As the profile settled it: the same commit, and the same folder wherever this is called from.
        spec=profile.spec if profile is not None else run.settings.spec,
        kernels=tuple(
            worker.StagedKernel(
                target=s.winner.target.name,
                kernel_type=s.winner.target.kernel_type,
                sites=s.winner.target.sites,
                path=str(Path(s.package.path).resolve() / "build" / s.built.variant),
            )
            for s in staged
        ),
        compile=not quick,
    )
    verification = worker.call("verify", request, Verification)
    if not quick:
        run.save_verification(verification)
    return verification


def finish(
    run: Run,
    profile: Profile,
    staged: Sequence[Staged],
    verification: Verification | None,
    progress: Progress,
) -> list[Package]:
    """Write the cards of verified packages; packages that did not help the model are removed again."""
    import shutil

    from autokernel_hf.export_hf import write_card

    if verification is None or not verification.passed:
        for item in staged:
            shutil.rmtree(item.package.path, ignore_errors=True)
        return []
    progress.stage("Writing cards")
    for item in staged:
        write_card(
            item.package,
            candidate=item.winner.candidate,
            built=item.built,
            evaluation=item.winner.evaluation,
            verification=verification,
            profile=profile,
            run_settings=run.settings,
            commit=run.kept_commit(item.winner.target.name),
        )
    return [item.package for item in staged]


def verify_again(run: Run, progress: Progress) -> Verification:
    """Verify the winners of a finished run once more. Its packages, which have their cards, are left as they are.

    Raises:
        RunError: The run has no winners.
    """
    profile, winners = winners_of(run)
    with tempfile.TemporaryDirectory(prefix="autokernel_hf-") as folder:
        return verify(run, stage(run, profile.model, winners, progress, out=Path(folder)), progress)


def export(
    *sources: Path,
    name: str,
    version: int = 1,
    archs: tuple[str, ...] = (),
    license: str = "Apache-2.0",
    out: Path,
    bundle: bool = False,
) -> list[Package]:
    """Packages of a run's winners, or of candidate files.

    Args:
        sources: One run folder, or one candidate file; or several files, for a bundle.
        archs: CUDA architectures to build for.
        bundle: All kernels in one package.

    Raises:
        AutokernelError: The run has no winners, or a file does not compile.
    """
    from autokernel_hf.bundle import export_files
    from autokernel_hf.candidates import read_candidate
    from autokernel_hf.export_hf import check_license, export_file

    check_license(license)
    runs = [source for source in sources if (source / "run.json").exists()]
    if len(sources) > 1 and (runs or not bundle):
        raise UsageError(
            "Several sources make one package only with --bundle, and only where all are candidate files.",
            remedy="Export them one by one.",
        )
    if runs:
        with Run.open(runs[0]) as run:
            return _export_run(
                run, name=name, version=version, archs=archs, license=license, out=out, bundle=bundle
            )
    candidates = [read_candidate(source) for source in sources]
    if bundle:
        return [export_files(candidates, name, version=version, archs=archs, license=license, out=out)]
    return [export_file(candidates[0], name, version=version, archs=archs, license=license, out=out)]


def _export_run(
    run: Run,
    *,
    name: str,
    version: int,
    archs: tuple[str, ...],
    license: str,
    out: Path,
    bundle: bool,
) -> list[Package]:
    from autokernel_hf.build import build
    from autokernel_hf.bundle import Part, stage_bundle, write_bundle_card
    from autokernel_hf.export_hf import package_name, write_card
    from autokernel_hf.export_hf import stage as stage_package

    profile, winners = winners_of(run)
    if archs and not any(winner.candidate.backend == "cuda" for winner in winners):
        raise UsageError("None of this run's kernels is a CUDA one.", remedy="Leave --archs away.")
    verification = run.verification()
    if verification is not None and _is_wrong(verification):
        raise RunError(
            f"The model was not right with this run's kernels: {verification.reason}",
            remedy="Run verify again; nothing of this run is exported before it says that they are right.",
        )
    parts = []
    for winner in winners:
        built = build(winner.candidate, device=profile.device.kind)
        # A binary for more architectures is built again from the judged source; the card says so.
        if archs and winner.candidate.backend == "cuda":
            built = build(winner.candidate, archs=tuple(dict.fromkeys((*built.archs, *archs))))
        commit = run.kept_commit(winner.target.name)
        parts.append(
            Part(candidate=winner.candidate, built=built, evaluation=winner.evaluation, commit=commit)
        )
    if bundle and len(parts) > 1:
        package = stage_bundle(
            parts, name=package_name(name, None), version=version, license=license, out=out
        )
        write_bundle_card(
            package, parts, verification=verification, profile=profile, run_settings=run.settings
        )
        return [package]
    packages = []
    for part in parts:
        package = stage_package(
            part.built,
            candidate=part.candidate,
            name=package_name(name, part.candidate.kernel_type if len(parts) > 1 else None),
            version=version,
            license=license,
            out=out,
        )
        write_card(
            package,
            candidate=part.candidate,
            built=part.built,
            evaluation=part.evaluation,
            verification=verification,
            profile=profile,
            run_settings=run.settings,
            commit=part.commit,
        )
        packages.append(package)
    return packages


def winners_of(run: Run) -> tuple[Profile, list[Winner]]:
    """The winners of a finished run, from its ledger, without those that its verification left out.

    Raises:
        RunError: The run has none.
    """
    profile = run.profile()
    verification = run.verification()
    winners = [
        winner
        for target in run.targets()
        if (winner := _winner_of(run, target)) is not None
        and (verification is None or not verification.passed or target.name in verification.kernel_calls)
    ]
    if profile is None or not winners:
        raise RunError(
            f"{run.path} has no winners.",
            remedy="Run optimize first; `autokernel-hf ledger` shows how it went.",
        )
    return profile, winners


# --- helpers ------------------------------------------------------------------------------------------------------


def _winner_of(run: Run, target: Target) -> Winner | None:
    done = run.result(target.name)
    if done is None or done.result.status != "won" or done.confirmation is None:
        return None
    candidate = run.incumbent(target.name)
    if candidate is None:
        return None
    return Winner(target=target, candidate=candidate, evaluation=done.confirmation)


def _decide(evaluation: Evaluation) -> tuple[Decision, str]:
    from autokernel_hf.evaluate import decide

    return decide(evaluation)


def _diagnoser(run: Run) -> Diagnose:
    """The diagnosis of a run's kernels, against ceilings that a worker measured: this process has no device context."""
    from autokernel_hf.diagnose import diagnose
    from autokernel_hf.gpu import Ceilings
    from autokernel_hf.kernels import kernel_type

    def explain(target: Target, evaluation: Evaluation) -> tuple[tuple[str, ...], str]:
        workload = max(target.workloads, key=lambda w: w.share)
        timed = next((w for w in evaluation.workloads if w.label == workload.label), None)
        if timed is None or timed.latency_us is None:
            return (), "not known yet"
        path = run.path / "ceilings.json"
        if not path.exists():
            worker.call("ceilings", worker.CeilingsRequest(device=target.device), Ceilings).save(path)
        found = diagnose(
            kernel_type(target.kernel_type),
            workload,
            timed.latency_us,
            Ceilings.load(path),
            evaluation.resources,
        )
        return tuple(found.prescriptions), f"{found.bound}-bound: {found.evidence}"

    return explain


def _is_wrong(verification: Verification) -> bool:
    """Whether the model was not right with the kernels, or could not be run: nothing is timed then."""
    return not verification.passed and (verification.error is None or verification.speedup.vs_eager is None)


def _status(
    results: Sequence[TargetResult], verification: Verification | None
) -> Literal["won", "no_speedup", "failed"]:
    if verification is not None:
        if verification.passed:
            return "won"
        return "failed" if _is_wrong(verification) else "no_speedup"
    tried = [r for r in results if r.status != "skipped"]
    return "failed" if tried and all(r.status == "failed" for r in tried) else "no_speedup"


def _reason(results: Sequence[TargetResult], verification: Verification | None) -> str:
    if verification is not None:
        return verification.reason
    tried = [r for r in results if r.status != "skipped"]
    if not tried:
        return "no kernel type has enough to gain in this model on this device"
    return "; ".join(f"{r.name}: {r.reason}" for r in tried)
