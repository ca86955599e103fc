"""Tune a package's kernel for this device: its constants change, its code does not.

A Triton package holds constants by device and shape as data (`configs.json`); a compiled one has them in its binary, so
there the best of them for all shapes make a new build from the same source.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autokernel_hf import packages, tunables
from autokernel_hf.agent import Context, Playbook
from autokernel_hf.build import build
from autokernel_hf.candidates import read_candidate
from autokernel_hf.card import Backward
from autokernel_hf.errors import CandidateError, PackageError, UsageError
from autokernel_hf.export_hf import stage, write_card
from autokernel_hf.figures import gain_over
from autokernel_hf.gpu import device_info
from autokernel_hf.judge import statistics
from autokernel_hf.kernels import kernel_type, kernel_types
from autokernel_hf.progress import Progress
from autokernel_hf.records import (
    Candidate,
    Decision,
    DeviceInfo,
    Evaluation,
    Experiment,
    Interval,
    Record,
    Scalar,
    Stages,
    StageStatus,
    Target,
    TensorSpec,
    Workload,
    WorkloadResult,
)


class Configuration(Record):
    """One configuration that was tried; `speedup` is over the package's own, all workloads together."""

    values: dict[str, Scalar]
    status: str
    speedup: float | None


class ShapeConfiguration(Record):
    """What one shape gets: values other than the package's own, and how much faster that is; confirmed."""

    shape: str
    dtype: str
    values: dict[str, Scalar]
    speedup: float
    ci95: Interval


class TuneReport(Record):
    """`configs` are in the order tried; `best` is what is offered for shapes without an entry in `shapes`.

    `speedup` is over the package's own configuration, all workloads together; 1 where nothing better was found.
    `package` is where the changed package was written.
    """

    device: str
    kernel_type: str
    configs: tuple[Configuration, ...]
    best: dict[str, Scalar]
    shapes: tuple[ShapeConfiguration, ...]
    speedup: float
    package: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """A configuration for a workload, with what the judge measured of it there; the package's own has no figures."""

    source: str
    result: WorkloadResult | None = None

    @property
    def ratio(self) -> float:
        return (self.result.speedup_vs_incumbent or 1.0) if self.result is not None else 1.0


def tune(
    package: str,
    *,
    version: int | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
    max_experiments: int = 12,
    out: Path | None = None,
    progress: Progress,
) -> TuneReport:
    """Search the tunables of a package's kernel on this device.

    Args:
        out: Write the package with the configuration changed there, where a better one was found.

    Raises:
        PackageError: The package has no one candidate source with tunables.
        UsageError: A GPU's kernel cannot be timed here; or `out` would overwrite the package.
    """
    from autokernel_hf.evaluate import Judge, decide

    with tempfile.TemporaryDirectory() as temporary:
        folder = _local(package, version, trust_remote_code, Path(temporary))
        candidate = candidate_of(folder)
        _refuse_overwriting(folder, out)
        info = device_info(device)
        if candidate.backend != "cpp" and info.kind != "cuda":
            raise UsageError(
                f"The kernel in {package} runs on GPUs, and there is none here.",
                remedy="Tune it on a machine with the GPU that it is to be fast on.",
            )
        if not tunables.parse(candidate.source):
            raise PackageError(
                f"The kernel in {package} has no tunables.", remedy="Nothing can be tuned in it."
            )
        workloads: tuple[Workload, ...] = kernel_type(candidate.kernel_type).workloads[
            "cpu" if candidate.backend == "cpp" else "cuda"
        ]
        target = _target(candidate, workloads, device)
        with Judge(candidate.kernel_type, candidate.backend, workloads, device=device) as judge:
            configs = [Configuration(values=tunables.values(candidate.source), status="passed", speedup=1.0)]
            attempts: list[Experiment] = []
            scores: dict[int, float | None] = {}
            incumbent, total = candidate, 1.0
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
                # Always against the package's own configuration: that is what a change would replace.
                evaluation = judge.evaluate(tried, candidate)
                decision, _ = decide(evaluation)
                gain = gain_over(evaluation, "incumbent") if evaluation.status == "passed" else None
                attempts.append(
                    _attempt(len(attempts) + 1, tried, evaluation, decision, proposals[0].tunables)
                )
                scores[attempts[-1].experiment] = gain[0] if gain else None
                configs.append(
                    Configuration(
                        values=proposals[0].tunables,
                        status=evaluation.status,
                        speedup=gain[0] if gain else None,
                    )
                )
                if decision == "keep" and gain is not None and gain[0] > total:
                    incumbent, total = tried, gain[0]
                progress.step(len(attempts) + 1, max_experiments, proposals[0].rationale)
        choices: dict[str, _Choice] = {}
        incumbent_again = None
        if incumbent.source != candidate.source:
            incumbent_again = _confirmed(candidate, incumbent.source, workloads, device)
        if incumbent_again is None:
            incumbent = candidate
        elif candidate.backend != "triton":
            # One binary serves all shapes: what it gains here and loses there comes together.
            choices = {w.label: _Choice(source=incumbent.source, result=w) for w in incumbent_again.workloads}
        if candidate.backend == "triton":
            fastest = _fastest(candidate, attempts)
            choices = _by_shape(candidate, fastest, workloads, device, incumbent.source, incumbent_again)
        report = _report(info, candidate, incumbent, workloads, configs, choices)
        if out is not None and report.speedup > 1:
            path = _write(folder, candidate, incumbent, workloads, choices, info, out)
            report = report.model_copy(update={"package": str(path)})
    return report


# --- choosing -----------------------------------------------------------------------------------------------------


def _fastest(candidate: Candidate, attempts: Sequence[Experiment]) -> dict[str, str]:
    """For each workload by label the source that was fastest there, beyond the noise; else the package's own."""
    best: dict[str, tuple[float, str]] = {}
    for attempt in attempts:
        if attempt.evaluation.status != "passed":
            continue
        source = tunables.substitute(candidate.source, attempt.tunables)
        for result in attempt.evaluation.workloads:
            ratio = result.speedup_vs_incumbent or 1.0
            known, _ = best.setdefault(result.label, (1.0, candidate.source))
            if _surely_faster(result) and ratio > known:
                best[result.label] = (ratio, source)
    return {label: source for label, (_, source) in best.items()}


def _confirmed(
    candidate: Candidate, source: str, workloads: Sequence[Workload], device: str
) -> Evaluation | None:
    """A verdict on a configuration by a judge that had no part in choosing it; None where it is not faster again.

    What chose a configuration flatters it: only these figures count.
    """
    from autokernel_hf.evaluate import Judge, decide

    with Judge(candidate.kernel_type, candidate.backend, workloads, device=device) as judge:
        evaluation = judge.evaluate(candidate.model_copy(update={"source": source}), candidate)
    return evaluation if decide(evaluation)[0] == "keep" else None


def _by_shape(
    candidate: Candidate,
    fastest: dict[str, str],
    workloads: Sequence[Workload],
    device: str,
    rest: str,
    rest_again: Evaluation | None,
) -> dict[str, _Choice]:
    """For each workload by label the configuration that is faster there and was so again; else the package's own.

    Args:
        rest: What is best on the whole, and `rest_again` the confirmed verdict on it.
    """
    found = {label: _Choice(source=candidate.source) for label in fastest}
    for result in rest_again.workloads if rest_again is not None else ():
        if _surely_faster(result):
            found[result.label] = _Choice(source=rest, result=result)
    for source in sorted(set(fastest.values()) - {candidate.source, rest}):
        own = [w for w in workloads if fastest.get(w.label) == source]
        again = _confirmed(candidate, source, own, device)
        for result in again.workloads if again is not None else ():
            if _surely_faster(result):
                found[result.label] = _Choice(source=source, result=result)
    return found


def _surely_faster(result: WorkloadResult) -> bool:
    return result.ci95_vs_incumbent is not None and result.ci95_vs_incumbent[0] > 1


def _changed(candidate: Candidate, source: str) -> dict[str, Scalar]:
    """The constants of a source that differ from the candidate's."""
    own = tunables.values(candidate.source)
    return {name: value for name, value in tunables.values(source).items() if value != own[name]}


def _report(
    info: DeviceInfo,
    candidate: Candidate,
    incumbent: Candidate,
    workloads: Sequence[Workload],
    configs: Sequence[Configuration],
    choices: dict[str, _Choice],
) -> TuneReport:
    shapes = tuple(
        ShapeConfiguration(
            shape=w.shape,
            dtype=w.dtype,
            values=_changed(candidate, choice.source),
            speedup=choice.ratio,
            ci95=choice.result.ci95_vs_incumbent,
        )
        for w in workloads
        if (choice := choices.get(w.label)) is not None
        and choice.result is not None
        and choice.result.ci95_vs_incumbent is not None
    )
    ratios = [choices[w.label].ratio if w.label in choices else 1.0 for w in workloads]
    mean, _ = statistics.combine(ratios, [(r, r) for r in ratios], [w.share for w in workloads])
    return TuneReport(
        device=info.name,
        kernel_type=candidate.kernel_type,
        configs=tuple(configs),
        best=tunables.values(incumbent.source),
        shapes=shapes,
        speedup=mean if shapes else 1.0,
    )


# --- offering the change ------------------------------------------------------------------------------------------


def entries(
    candidate: Candidate,
    incumbent: Candidate,
    workloads: Sequence[Workload],
    sources: dict[str, str],
    device: str,
) -> list[dict[str, object]]:
    """What `configs.json` says of this device: an entry a shape, and one for the rest where it is not the file's own.

    Args:
        sources: The configuration that each workload gets, by its label.
    """
    rest = _changed(candidate, incumbent.source)
    found: list[dict[str, object]] = []
    for workload in workloads:
        values = _changed(candidate, sources.get(workload.label, incumbent.source))
        if values != rest:
            entry: dict[str, object] = {"device": device, "dtype": workload.dtype}
            found.append({**entry, "shapes": _shapes(candidate, workload), "values": values})
    return [*found, {"device": device, "values": rest}] if rest else found


def _shapes(candidate: Candidate, workload: Workload) -> list[list[int] | None]:
    """The shape of every tensor argument in the schema's order, as `configs.py` looks them up."""
    type_ = kernel_type(candidate.kernel_type)
    found: list[list[int] | None] = []
    for arg in type_.schema.args:
        if not arg.is_tensor:
            continue
        spec = workload.arg(arg.name) if arg.name in dict(workload.args) else None
        if not isinstance(spec, TensorSpec):
            found.append(None)
            continue
        shape = list(spec.shape)
        if type_.merges_rows and len(shape) >= 3:
            rows = 1
            for size in shape[:-1]:
                rows *= size
            shape = [rows, shape[-1]]
        found.append(shape)
    return found


def _write(
    folder: Path,
    candidate: Candidate,
    incumbent: Candidate,
    workloads: Sequence[Workload],
    choices: dict[str, _Choice],
    info: DeviceInfo,
    out: Path,
) -> Path:
    """The package with another configuration: same name, version and licence, a new id, a card with what tuning saw."""
    old = packages.read_variants(folder)[0]
    backward = backward_of(folder, candidate)  # ships as it was
    if candidate.backend == "triton":
        others = [e for e in packages.configs(old.path) if e["device"] != info.name]
        sources = {label: choice.source for label, choice in choices.items()}
        mine = entries(candidate, incumbent, workloads, sources, info.name)
        shipped = candidate
        built = build(candidate, device=info.kind, configs=[*others, *mine], backward=backward)
    else:
        shipped = incumbent
        archs = tuple(old.metadata.backend.archs or ())
        built = build(incumbent, archs=archs, device=info.kind, backward=backward)
    metadata = old.metadata
    package = stage(
        built,
        candidate=shipped,
        name=metadata.name,
        version=metadata.version,
        license=metadata.license,
        out=out,
        backward=backward,
    )
    rows = tuple(choice.result for choice in choices.values() if choice.result is not None)
    # Nothing is kept that did not pass all stages.
    passed: dict[str, StageStatus] = dict.fromkeys(Stages.model_fields, "passed")
    judged = Evaluation(status="passed", stages=Stages(**passed), workloads=rows, confirmed=True)
    inner = None
    if backward is not None:
        archs = built.archs if backward.backend == "cuda" else ()
        inner = Backward(candidate=backward, id=build(backward, archs=archs, device=info.kind).id)
    write_card(package, candidate=shipped, built=built, evaluation=judged, device=info, backward=inner)
    return Path(package.path)


# --- the package --------------------------------------------------------------------------------------------------


def candidate_of(package: Path) -> Candidate:
    """The candidate source that a package ships, that of its gradients aside.

    Raises:
        PackageError: There is none, or there are several.
    """
    found = _candidates_in(package)
    forwards = {name for name in found if not _computes_gradients_of(name, found)}
    if len(forwards) > 1:
        raise PackageError(
            f"{package} holds several kernels: {', '.join(sorted(forwards))}.",
            remedy="Tune each as a package of its own, and bundle them again.",
        )
    if not forwards:
        raise PackageError(
            f"{package} ships no kernel source that names its type.",
            remedy="Tune packages that autokernel-hf made.",
        )
    return found[forwards.pop()]


def backward_of(package: Path, candidate: Candidate) -> Candidate | None:
    """The source of the gradients that a package ships with its kernel; None where it has none."""
    found = _candidates_in(package)
    own = {candidate.kernel_type: candidate}
    return next((c for name, c in found.items() if _computes_gradients_of(name, own)), None)


def _computes_gradients_of(name: str, candidates: Mapping[str, Candidate]) -> bool:
    gradients = kernel_type(name).gradients if name in kernel_types() else None
    return gradients is not None and gradients.forward in candidates


def _candidates_in(package: Path) -> dict[str, Candidate]:
    """The sources of a package that name a kernel type, by it."""
    found: dict[str, Candidate] = {}
    for path in sorted(package.rglob("*")):
        if path.suffix in {".py", ".cu", ".cpp"} and path.is_file() and not path.name.startswith("_"):
            try:
                candidate = read_candidate(path)
            except CandidateError:
                continue
            found.setdefault(candidate.kernel_type, candidate)
    return found


def _refuse_overwriting(folder: Path, out: Path | None) -> None:
    """A package may hold more variants than are built here: it is never replaced by the changed one."""
    if out is None:
        return
    name = packages.read_variants(folder)[0].metadata.name
    if (out / name).exists() and (out / name).resolve() == folder.resolve():
        raise UsageError(f"{out} is where the package itself is.", remedy="Name another folder with --out.")


def _target(candidate: Candidate, workloads: tuple[Workload, ...], device: str) -> Target:
    return Target(
        name=candidate.kernel_type,
        kernel_type=candidate.kernel_type,
        backend=candidate.backend,
        share=1.0,
        attainable_speedup=1.0,
        sites=(),
        workloads=workloads,
        device=device,
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


def _attempt(
    number: int,
    candidate: Candidate,
    evaluation: Evaluation,
    decision: Decision,
    values: dict[str, Scalar],
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
        decision=decision,
        reason="",
        tunables=values,
    )
