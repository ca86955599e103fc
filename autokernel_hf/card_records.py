"""What a card tells from the records of a run: what was measured, verified and judged, and where the kernel comes from."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autokernel_hf import packages
from autokernel_hf.kernels import kernel_type as find_type
from autokernel_hf.kernels.base import KernelType
from autokernel_hf.records import (
    Built,
    Candidate,
    DeviceInfo,
    Evaluation,
    Interval,
    Package,
    Profile,
    PulledModel,
    Verification,
    WorkloadResult,
)
from autokernel_hf.runs import RunSettings
from autokernel_hf.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """The kernel of a kernel's gradients, as it ships.

    Args:
        id: Of its build, whose folder lies in the package's variants.
        evaluation: What the judge said of it, where it was asked.
    """

    candidate: Candidate
    id: str
    evaluation: Evaluation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that a card is made from; what is None was not there.

    Args:
        builts: The builds that the package ships; the first is the one that was judged.
        backward: What computes the gradients.
        device: Where the evaluation's figures are from.
        commit: The commit of the run that holds the candidate.
    """

    package: Package
    candidate: Candidate
    builts: tuple[Built, ...]
    license: str
    backward: Backward | None = None
    evaluation: Evaluation | None = None
    verification: Verification | None = None
    profile: Profile | None = None
    settings: RunSettings | None = None
    device: DeviceInfo | None = None
    commit: str | None = None


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def public_model(model: PulledModel) -> str:
    """How a card may name a model: by its Hub id; a local folder or file only by its last part."""
    local = model.revision is None and ("/" in model.id or ":" in model.id or "\\" in model.id)
    return f"`{Path(model.id).name}` (a local model)" if local else f"`{model.id}`"


def device_of(facts: Facts) -> DeviceInfo | None:
    if facts.device is not None:
        return facts.device
    if facts.verification is not None and facts.verification.device is not None:
        return facts.verification.device
    return facts.profile.device if facts.profile is not None else None


def measured_on(facts: Facts) -> str:
    device = device_of(facts)
    if device is None:
        return ""
    units = "cores" if device.kind == "cpu" else "multiprocessors"
    versions = [f"torch {device.torch}"]
    versions += [
        f"{n} {v}"
        for n, v in (("triton", device.triton), ("CUDA", device.cuda), ("driver", device.driver))
        if v
    ]
    return f"On {device.name} ({device.arch}, {device.units} {units}), {', '.join(versions)}, {device.date[:10]}."


def measured(evaluation: Evaluation | None) -> str:
    rows = [w for w in evaluation.workloads if w.latency_us is not None] if evaluation is not None else []
    if not rows:
        return ""
    eager = any(w.speedup_vs_eager is not None and w.baseline != "eager" for w in rows)
    rate = any(w.gb_s is not None or w.tflops is not None for w in rows)
    headers = ["shape", "dtype", "this kernel", "fastest peer", "its time", "speed-up (95 %)"]
    headers += ["against eager (95 %)"] if eager else []
    headers += ["rate"] if rate else []
    lines = []
    for w in rows:
        line = [w.shape, w.dtype, _time(w.latency_us), w.baseline or "–", _time(w.baseline_us)]
        line.append(_speedup(w.speedup, w.ci95))
        line += [_speedup(w.speedup_vs_eager, w.ci95_vs_eager)] if eager else []
        line += [_rate(w)] if rate else []
        lines.append(line)
    text = table(headers, lines)
    peers = [f"- {w.shape} {w.dtype}: {_peers(w)}" for w in rows if w.peers_us]
    return text + ("\n\nAll peers:\n\n" + "\n".join(peers) if peers else "")


def _peers(w: WorkloadResult) -> str:
    return ", ".join(
        f"{name} {_time(us)}" for name, us in sorted(w.peers_us.items(), key=lambda item: item[1])
    )


def _time(us: float | None) -> str:
    if us is None:
        return "–"
    return f"{us:.3g} µs" if us < 1000 else f"{us / 1000:.3g} ms"


def _speedup(value: float | None, interval: Interval | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}×" + (f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval is not None else "")


def _rate(w: WorkloadResult) -> str:
    words = [f"{w.gb_s:.3g} GB/s"] if w.gb_s is not None else []
    words += [f"{w.tflops:.3g} TFLOP/s"] if w.tflops is not None and w.gb_s is None else []
    words += [f"{w.pct_peak:.0f} % of peak"] if w.pct_peak is not None else []
    return ", ".join(words) or "–"


def measured_how(evaluation: Evaluation) -> str:
    source = (
        "They are from a confirmation run of their own, not from the search that chose this kernel."
        if evaluation.confirmed
        else "They are from the run that judged this kernel."
    )
    return (
        "Kernel and peer are timed in turn within each round, with fresh inputs; a speed-up is the peer's time over the "
        "kernel's, as the median of the paired ratios with its 95 % interval. The fastest peer is the fastest of those "
        f"whose numbers are right. {source}"
    )


def why_not_measured(facts: Facts) -> str:
    if facts.evaluation is None:
        return ": exported from a file, without a run"
    if facts.candidate.backend == "triton":
        return ": without a GPU a Triton kernel is checked in the interpreter and never timed"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verified:
    intro: str
    table: str
    lines: tuple[str, ...]


def verified(verification: Verification | None, profile: Profile | None) -> _Verified | None:
    if verification is None:
        return None
    model = profile.model if profile is not None else None
    what = "The model"
    if model is not None:
        shape = " × ".join(map(str, model.input_shape))
        what = f"{public_model(model)} ({model.architecture}, {model.weights} weights, input {shape}, {model.dtype})"
    targets = ", ".join(sorted(verification.kernel_calls))
    latency = verification.latency_ms
    columns = (
        ("eager", latency.eager),
        ("eager, with the kernels", latency.eager_kernels),
        ("torch.compile", latency.compile),
        ("torch.compile, with the kernels", latency.compile_kernels),
        ("torch.compile with CUDA graphs", latency.compile_cudagraphs),
        ("torch.compile with CUDA graphs and the kernels", latency.compile_kernels_cudagraphs),
        ("captured in a CUDA graph", latency.eager_cudagraphs),
        ("captured in a CUDA graph, with the kernels", latency.eager_kernels_cudagraphs),
    )
    rows = [(name, f"{ms:.4g}") for name, ms in columns if ms is not None]
    ci = verification.speedup_ci95
    lines = []
    if verification.speedup.vs_eager is not None:
        lines.append(f"against eager: {_speedup(verification.speedup.vs_eager, ci.vs_eager)}")
    if verification.speedup.vs_compile is not None:
        lines.append(
            f"the best of torch.compile over the best with kernels: {_speedup(verification.speedup.vs_compile, ci.vs_compile)}"
        )
    lines.append(
        "calls of each kernel in one pass: "
        + ", ".join(f"{name} {count}" for name, count in sorted(verification.kernel_calls.items()))
    )
    error = verification.error
    if error is not None:
        words = [f"largest error {error.max_abs:.3g}", f"{error.ratio_to_eager:.2f} times eager's own"]
        words += (
            [f"top-1 agreement {100 * error.top1_agreement:.2f} %"]
            if error.top1_agreement is not None
            else []
        )
        words += [f"KL {error.kl:.3g}"] if error.kl is not None else []
        lines.append("outputs against a run in higher precision: " + ", ".join(words))
    lines += list(verification.notes)
    return _Verified(
        intro=f"{what}, one forward pass with all kernels of the run in place ({targets}), patched with the layers that "
        "ship.",
        table=table(("forward pass", "ms"), rows) if rows else "",
        lines=tuple(lines),
    )


def numerics(facts: Facts, kernel_type: KernelType) -> Iterable[str]:
    evaluation = facts.evaluation
    yield f"Tolerance: {kernel_type.tolerance.why}."
    yield from _numerics_of_gradients(facts)
    if evaluation is None:
        yield "Not judged: exported from a file, without a run."
        return
    stages = evaluation.stages
    told = ", ".join(f"{name} {getattr(stages, name)}" for name in type(stages).model_fields)
    yield f"Judged against a float64 oracle: {told}."
    errors = [w for w in evaluation.workloads if w.max_abs_error is not None]
    for w in errors:
        ratio = f", {w.error_ratio:.2f} times that of torch in {w.dtype}" if w.error_ratio is not None else ""
        yield f"{w.shape} {w.dtype}: largest error {w.max_abs_error:.3g}{ratio}."


def _numerics_of_gradients(facts: Facts) -> Iterable[str]:
    if facts.backward is None:
        return
    judged = facts.backward.evaluation
    yield f"Gradients, tolerance: {find_type(facts.backward.candidate.kernel_type).tolerance.why}."
    if judged is None:
        yield "Gradients: not judged."
        return
    told = ", ".join(f"{name} {getattr(judged.stages, name)}" for name in type(judged.stages).model_fields)
    yield f"Gradients, judged against a float64 oracle by themselves: {told}."
    for w in judged.workloads:
        if w.latency_us is not None:
            against = f"; {_speedup(w.speedup, w.ci95)} against {w.baseline}" if w.baseline else ""
            yield f"Gradients, {w.shape} {w.dtype}: {_time(w.latency_us)}{against}."


def training(parts: Sequence[Facts]) -> str:
    """What layers say of training, and whether it is so."""
    trained = [f.candidate.kernel_type for f in parts if f.backward is not None]
    if not trained:
        return "`has_backward` is False: they are for inference (`Mode.INFERENCE`)."
    if len(trained) == len(parts):
        return "`has_backward` is True: gradients come from a kernel, too, so they can be trained (`Mode.TRAINING`)."
    named = ", ".join(f"`{name}`" for name in trained)
    return f"`has_backward` is True for those of {named}, and False for the others, which are for inference."


def limits(facts: Facts, variants: Sequence[packages.Variant]) -> Iterable[str]:
    name = facts.candidate.kernel_type
    gradients = find_type(facts.backward.candidate.kernel_type).gradients if facts.backward else None
    if gradients is None:
        yield f"`{name}` has no backward: a call that needs a gradient raises instead of being silently wrong."
    else:
        yield (
            f"`{name}` has gradients of {', '.join(gradients.of)}, and of no other argument; a call that needs another, or "
            "a second derivative, raises instead of being silently wrong."
        )
    yield "Outputs are new and contiguous; inputs may have any strides."
    if facts.candidate.backend == "triton":
        yield "Without a GPU the package loads and its functions fail, except in Triton's interpreter."
    else:
        yield f"Linux with glibc 2.28 or later, torch 2.11 or later; variants: {', '.join(v.name for v in variants)}."
    if facts.verification is not None or (facts.evaluation is not None and facts.evaluation.workloads):
        yield "The figures above are of one machine and of these shapes; another may rank the peers differently."


def provenance(facts: Facts) -> Iterable[tuple[str, str]]:
    yield "kernel type", f"`{facts.candidate.kernel_type}`, backend `{facts.candidate.backend}`"
    shipped = packages.read_variants(Path(facts.package.path))
    yield "id", ", ".join(dict.fromkeys(f"`{variant.metadata.id}`" for variant in shipped))
    yield "source (SHA-256)", f"`{facts.candidate.digest}`"
    if facts.backward is not None:
        own = facts.backward
        yield "gradients", f"`{own.candidate.kernel_type}`, `{own.id}`, source `{own.candidate.digest}`"
    yield "made by", f"autokernel_hf {__version__}"
    model = facts.profile.model if facts.profile is not None else None
    if model is not None:
        yield "for the model", public_model(model)
        if model.revision is not None:
            yield "at revision", f"`{model.revision}`"
        yield "its weights", model.weights
    if facts.commit is not None:
        yield "commit of the run", f"`{facts.commit}`"
    yield "licence", facts.license


def reproduce(settings: RunSettings | None, profile: Profile | None) -> str:
    """The command that makes the same run again, without anything of this machine in it."""
    if settings is None or profile is None:
        return ""
    spec, model = settings.spec, profile.model
    name = model.id if model.revision is not None or spec.random_weights else Path(model.id).name
    words = ["autokernel-hf", "optimize", name]
    if model.revision is not None:
        words += ["--revision", model.revision]
    words += ["--random-weights"] if spec.random_weights else []
    words += ["--task", spec.task] if spec.task else []
    words += ["--input-shape", ",".join(map(str, model.input_shape)), "--dtype", model.dtype]
    words += ["--device", profile.device.kind]
    words += ["--attn", spec.attn] if spec.attn else []
    words += ["--seed", str(spec.seed)] if spec.seed else []
    words += ["--backend", settings.backend] if settings.backend != "auto" else []
    words += ["--proposer", settings.proposer] if settings.proposer != "playbook" else []
    words += ["--llm", settings.llm] if settings.llm else []
    words += ["--top", str(settings.top)]
    if settings.budget_s is not None:
        words += ["--budget", f"{settings.budget_s:g}s"]
    if settings.max_experiments is not None:
        words += ["--max-experiments", str(settings.max_experiments)]
    return shlex.join(words)
