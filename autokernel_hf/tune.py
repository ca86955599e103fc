"""Tune a package's kernel for this device: its constants change, its code does not."""

from __future__ import annotations

import tempfile
from pathlib import Path

from autokernel_hf import tunables
from autokernel_hf.agent import Context, Playbook
from autokernel_hf.candidates import read_candidate
from autokernel_hf.errors import CandidateError, PackageError
from autokernel_hf.gpu import device_info
from autokernel_hf.kernels import kernel_type
from autokernel_hf.progress import Progress
from autokernel_hf.records import (
    Candidate,
    Evaluation,
    Experiment,
    Record,
    Scalar,
    Target,
    Workload,
)
from autokernel_hf.runs import weighted


class Configuration(Record):
    """One configuration that was tried; `speedup` is over the package's own."""

    values: dict[str, Scalar]
    status: str
    speedup: float | None


class TuneReport(Record):
    """`configs` are in the order tried; `best` holds the values to offer as a change to the package."""

    device: str
    kernel_type: str
    configs: tuple[Configuration, ...]
    best: dict[str, Scalar]
    speedup: float


def tune(
    package: str,
    *,
    version: int | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
    max_experiments: int = 12,
    progress: Progress,
) -> TuneReport:
    """Search the tunables of a package's kernel on this device.

    Raises:
        PackageError: The package has no candidate source with tunables.
    """
    from autokernel_hf.evaluate import Judge, decide

    with tempfile.TemporaryDirectory() as folder:
        candidate = candidate_of(_local(package, version, trust_remote_code, Path(folder)))
    space = tunables.parse(candidate.source)
    if not space:
        raise PackageError(f"The kernel in {package} has no tunables.", remedy="Nothing can be tuned in it.")
    info = device_info(device)
    workloads: tuple[Workload, ...] = kernel_type(candidate.kernel_type).workloads[info.kind]
    target = Target(
        name=candidate.kernel_type,
        kernel_type=candidate.kernel_type,
        backend=candidate.backend,
        share=1.0,
        attainable_speedup=1.0,
        sites=(),
        workloads=workloads,
        device=device,
    )
    own = tunables.values(candidate.source)
    configs = [Configuration(values=own, status="passed", speedup=1.0)]
    attempts: list[Experiment] = []
    scores: dict[int, float | None] = {}
    incumbent, total = candidate, 1.0
    with Judge(candidate.kernel_type, candidate.backend, workloads, device=device) as judge:
        while len(attempts) < max_experiments - 1:
            context = Context(
                target=target,
                incumbent=incumbent,
                attempts=tuple(attempts),
                scores=scores,
                prescriptions=(),
                bound="",
                remaining=max_experiments - 1 - len(attempts),
            )
            proposals = Playbook().propose(context, 1)
            if not proposals:
                break
            tried = candidate.model_copy(update={"source": proposals[0].source})
            evaluation = judge.evaluate(tried, incumbent)
            decision, _ = decide(evaluation)
            speedup = _speedup(evaluation, total)
            attempts.append(_attempt(len(attempts) + 1, tried, evaluation, decision, proposals[0].tunables))
            scores[attempts[-1].experiment] = speedup
            configs.append(
                Configuration(values=proposals[0].tunables, status=evaluation.status, speedup=speedup)
            )
            if decision == "keep" and speedup is not None:
                incumbent, total = tried, speedup
            progress.step(len(attempts) + 1, max_experiments, proposals[0].rationale)
    return TuneReport(
        device=info.name,
        kernel_type=candidate.kernel_type,
        configs=tuple(configs),
        best=tunables.values(incumbent.source),
        speedup=total,
    )


def candidate_of(package: Path) -> Candidate:
    """The candidate source that a package ships.

    Raises:
        PackageError: There is none.
    """
    for path in sorted(package.rglob("*")):
        if path.suffix in {".py", ".cu", ".cpp"} and path.is_file() and not path.name.startswith("_"):
            try:
                return read_candidate(path)
            except CandidateError:
                continue
    raise PackageError(
        f"{package} ships no kernel source that names its type.",
        remedy="Tune packages that autokernel-hf made.",
    )


def _local(package: str, version: int | None, trust_remote_code: bool, folder: Path) -> Path:
    if Path(package).is_dir():
        return Path(package)
    from autokernel_hf.hub import download

    if not trust_remote_code:
        raise PackageError(
            f"Tuning {package} runs its code.", remedy="Read it, then allow that with --trust-remote-code."
        )
    return download(package, version=version, folder=folder)


def _speedup(evaluation: Evaluation, total: float) -> float | None:
    ratio = weighted(evaluation, "speedup_vs_incumbent")
    return total * ratio if evaluation.status == "passed" and ratio is not None else None


def _attempt(
    number: int, candidate: Candidate, evaluation: Evaluation, decision: str, values: dict[str, Scalar]
) -> Experiment:
    return Experiment(
        experiment=number,
        target=candidate.kernel_type,
        tag="opening" if number == 1 else "",
        description="",
        kernel_type=candidate.kernel_type,
        backend=candidate.backend,
        digest=candidate.digest,
        evaluation=evaluation,
        decision=decision,  # type: ignore[arg-type]
        reason="",
        tunables=values,
    )
