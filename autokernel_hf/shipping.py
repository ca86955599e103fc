"""Winners to packages: staged, verified in the whole model, finished with a card, or exported later.

Every function takes what the run folder holds; what needs a model runs in a worker.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from autokernel_hf import worker
from autokernel_hf.errors import RunError, UsageError
from autokernel_hf.progress import Progress, Silent
from autokernel_hf.records import (
    Built,
    Candidate,
    Package,
    Profile,
    PulledModel,
    RunStatus,
    Target,
    Verification,
    Winner,
)
from autokernel_hf.runs import Run

if TYPE_CHECKING:
    from autokernel_hf import card

logger = logging.getLogger(__name__)

STARTER = "starter"  # in the place of a file


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A winner's package variant, in the run's staging area: what verify loads and export finishes."""

    winner: Winner
    built: Built
    package: Package


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
            commit=_commit_of(run, item.winner.target),
        )
    return [item.package for item in staged]


def verify_again(run: Run, progress: Progress) -> Verification:
    """Verify the winners of a finished run once more: `result.json` and the report tell the new verdict from then on.

    Its packages, which have their cards, are left as they are.

    Raises:
        RunError: The run has no winners.
    """
    profile, winners = winners_of(run)
    with tempfile.TemporaryDirectory(prefix="autokernel_hf-") as folder:
        verification = verify(run, stage(run, profile.model, winners, progress, out=Path(folder)), progress)
    told = run.outcome()
    if told is not None:
        from autokernel_hf.report import write_report

        news = {
            "status": status_of(verification),
            "reason": verification.reason,
            "verification": verification,
        }
        run.conclude(told.model_copy(update=news), time.time())
        write_report(run.path)
    return verification


def export(
    *sources: Path,
    name: str,
    version: int = 1,
    archs: tuple[str, ...] = (),
    license: str = "Apache-2.0",
    out: Path,
    bundle: bool = False,
    backward: Sequence[str] = (),
) -> list[Package]:
    """Packages of a run's winners, or of candidate files.

    Args:
        sources: One run folder, or one candidate file; or several files, for a bundle.
        archs: CUDA architectures to build for.
        bundle: All kernels in one package.
        backward: Files with kernels of gradients, to ship with those whose gradients they compute; `starter` for the
            starters of all others. Those of a run are judged on the calls that its model makes, and what does not pass
            is left out.

    Raises:
        AutokernelError: The run has no winners, or a file does not compile.
        UsageError: A backward is of none of these kernels.
    """
    from autokernel_hf.bundle import export_files
    from autokernel_hf.candidates import read_candidate
    from autokernel_hf.export_hf import check_license, export_file
    from autokernel_hf.packages import check_version

    check_license(license)
    check_version(version)
    runs = [source for source in sources if (source / "run.json").exists()]
    if len(sources) > 1 and (runs or not bundle):
        raise UsageError(
            "Several sources make one package only with --bundle, and only where all are candidate files.",
            remedy="Export them one by one.",
        )
    if runs:
        with Run.open(runs[0]) as run:
            return _export_run(
                run,
                name=name,
                version=version,
                archs=archs,
                license=license,
                out=out,
                bundle=bundle,
                backward=backward,
            )
    for source in sources:
        if source.is_dir() or not source.exists():
            found = (
                "neither a run folder, which has a run.json, nor a file" if source.is_dir() else "not there"
            )
            raise RunError(f"{source} is {found}.", remedy="Name a run folder or a candidate file.")
    candidates = [read_candidate(source) for source in sources]
    backwards = _backwards_of(candidates, backward)
    if bundle:
        return [
            export_files(
                candidates,
                name,
                version=version,
                archs=archs,
                license=license,
                out=out,
                backwards=backwards,
            )
        ]
    return [
        export_file(
            candidates[0],
            name,
            version=version,
            archs=archs,
            license=license,
            out=out,
            backward=backwards.get(candidates[0].kernel_type),
        )
    ]


def _backwards_of(candidates: Sequence[Candidate], named: Sequence[str]) -> dict[str, Candidate]:
    """The kernels of gradients to ship, by the type whose gradients they compute.

    Args:
        named: Files, or `starter`.

    Raises:
        UsageError: One is of none of the candidates, or there is no starter.
    """
    from autokernel_hf.candidates import read_candidate
    from autokernel_hf.kernels import kernel_type, starter

    types = [candidate.kernel_type for candidate in candidates]
    found: dict[str, Candidate] = {}
    for file in (Path(name) for name in named if name != STARTER):
        own = read_candidate(file)
        gradients = kernel_type(own.kernel_type).gradients
        if gradients is None or gradients.forward not in types:
            raise UsageError(
                f"{file} is a {own.kernel_type}, which computes no gradients of {', '.join(types)}.",
                remedy="Name a file of type <type>_backward with --backward.",
            )
        found[gradients.forward] = own
    if STARTER in named:
        for candidate in candidates:
            name = f"{candidate.kernel_type}_backward"
            source = starter(name, candidate.backend)
            if candidate.kernel_type in found:
                continue
            if source is not None:
                found[candidate.kernel_type] = Candidate(
                    kernel_type=name, backend=candidate.backend, source=source
                )
            else:
                logger.warning(
                    "There is no %s starter of a %s: it is exported without.", candidate.backend, name
                )
        if not found:
            raise UsageError(
                f"There is no {candidates[0].backend} starter for the gradients of {', '.join(types)}.",
                remedy="Leave --backward away, or name a file of your own.",
            )
    return found


def _export_run(
    run: Run,
    *,
    name: str,
    version: int,
    archs: tuple[str, ...],
    license: str,
    out: Path,
    bundle: bool,
    backward: Sequence[str] = (),
) -> list[Package]:
    from autokernel_hf.build import build
    from autokernel_hf.bundle import Part, stage_bundle, write_bundle_card
    from autokernel_hf.export_hf import chosen_name, write_card
    from autokernel_hf.export_hf import stage as stage_package

    profile, winners = winners_of(run)
    if archs and not any(winner.candidate.backend == "cuda" for winner in winners):
        raise UsageError("None of this run's kernels is a CUDA one.", remedy="Leave --archs away.")
    verification = run.verification()
    if verification is not None and is_wrong(verification):
        raise RunError(
            f"The model was not right with this run's kernels: {verification.reason}",
            remedy="Run verify again; nothing of this run is exported before it says that they are right.",
        )
    backwards = _backwards_of([winner.candidate for winner in winners], backward)
    parts = []
    for winner in winners:
        shipped = _judged_backward(winner, backwards.get(winner.candidate.kernel_type))
        inner = shipped.candidate if shipped is not None else None
        built = build(winner.candidate, device=profile.device.kind, backward=inner)
        # A binary for more architectures is built again from the judged source; the card says so.
        if archs and winner.candidate.backend == "cuda":
            more = tuple(dict.fromkeys((*built.archs, *archs)))
            built = build(winner.candidate, archs=more, backward=inner)
            if shipped is not None:
                shipped = replace(shipped, id=build(shipped.candidate, archs=more).id)
        parts.append(
            Part(
                candidate=winner.candidate,
                built=built,
                evaluation=winner.evaluation,
                commit=_commit_of(run, winner.target),
                backward=shipped,
            )
        )
    if bundle and len(parts) > 1:
        package = stage_bundle(
            parts, name=chosen_name(name, None, out), version=version, license=license, out=out
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
            name=chosen_name(name, part.candidate.kernel_type if len(parts) > 1 else None, out),
            version=version,
            license=license,
            out=out,
            backward=part.backward.candidate if part.backward is not None else None,
        )
        write_card(
            package,
            backward=part.backward,
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


def _judged_backward(winner: Winner, candidate: Candidate | None) -> card.Backward | None:
    """A kernel of gradients with the judge's word on it, on the calls that follow the model's; None where it fails."""
    from autokernel_hf import card
    from autokernel_hf.evaluate import evaluate
    from autokernel_hf.kernels import kernel_type
    from autokernel_hf.kernels._backward import backward_workload

    if candidate is None:
        return None
    own, forward = kernel_type(candidate.kernel_type), kernel_type(winner.candidate.kernel_type)
    calls = [backward_workload(own, forward, workload) for workload in winner.target.workloads]
    logger.info("Judging %s", candidate.kernel_type)
    evaluation = evaluate(candidate, device=winner.target.device, workloads=calls)
    if evaluation.status != "passed" or evaluation.built_id is None:
        logger.warning(
            "%s is exported without its gradients, which the judge refused: %s",
            winner.candidate.kernel_type,
            evaluation.reason,
        )
        return None
    return card.Backward(candidate=candidate, id=evaluation.built_id, evaluation=evaluation)


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
        if (winner := winner_of(run, target)) is not None
        and (verification is None or not verification.passed or target.name in verification.kernel_calls)
    ]
    if profile is None or not winners:
        raise RunError(
            f"{run.path} has no winners.",
            remedy="Run optimize first; `autokernel-hf ledger` shows how it went.",
        )
    return profile, winners


def winner_of(run: Run, target: Target) -> Winner | None:
    """A won target's candidate with its confirmation run; None where it did not win."""
    done, won = run.result(target.name), run.winner(target.name)
    if done is None or done.confirmation is None or won is None:
        return None
    return Winner(target=target, candidate=run.source(won), evaluation=done.confirmation)


def _commit_of(run: Run, target: Target) -> str | None:
    won = run.winner(target.name)
    return won.commit if won is not None else None


def status_of(verification: Verification) -> RunStatus:
    """What a run with winners has come to, by the check of the whole model with them."""
    if verification.passed:
        return "won"
    return "failed" if is_wrong(verification) else "no_speedup"


def is_wrong(verification: Verification) -> bool:
    """Whether the model was not right with the kernels, or could not be run: nothing is timed then."""
    return not verification.passed and (verification.error is None or verification.speedup.vs_eager is None)
