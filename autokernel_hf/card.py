"""The card of a package: its README on the Hub.

Every figure comes from a record; what was not measured is not there. The card names the repository by a placeholder
until it is published, since a package does not know where it will live.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from autokernel_hf import card_plot, contract, packages
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
from autokernel_hf.sources import example_call
from autokernel_hf.version import __version__

# Names by which transformers' modeling files mark what kernelize may replace (5.20 to 5.22).
TRANSFORMERS_HOOKS = frozenset(
    {"FastGELU", "GeLU", "GeluTanh", "NewGELU", "QuickGELU", "RMSNorm", "SiLU", "rotary_pos_emb"}
)
# Classes of torch that carry no hook, by the layer of ours that replaces their forward, and for which of them it does.
_TORCH_CLASSES = {
    "LayerNorm": "torch.nn.LayerNorm, {hook}, lambda m: len(m.normalized_shape) == 1",
    "TorchRMSNorm": "torch.nn.RMSNorm, {hook}, lambda m: len(m.normalized_shape) == 1 and None not in (m.weight, m.eps)",
    "Softmax": "torch.nn.Softmax, {hook}, lambda m: m.dim is not None",
}
# Licences by which the Hub files a repository; others are named beside `other`.
_HUB_LICENSES = frozenset(
    {
        "apache-2.0",
        "mit",
        "bsd-2-clause",
        "bsd-3-clause",
        "bsd-3-clause-clear",
        "isc",
        "mpl-2.0",
        "unlicense",
        "cc0-1.0",
        "gpl-2.0",
        "gpl-3.0",
        "lgpl-2.1",
        "lgpl-3.0",
        "agpl-3.0",
        "bsl-1.0",
        "zlib",
    }
)
_BACKEND_WORDS = {"triton": "Triton kernel", "cuda": "CUDA C++ kernel", "cpp": "C++ kernel for CPUs"}


def repo_placeholder(name: str) -> str:
    """What stands in a card for the repository until the package is published."""
    return f"NAMESPACE/{name}"


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


def render(facts: Facts) -> str:
    """The card's text."""
    kernel_type = find_type(facts.candidate.kernel_type)
    variants = packages.read_variants(Path(facts.package.path))
    return _rendered(
        "card.md.j2",
        [facts],
        summary=_summary(facts, kernel_type),
        tags=[*_tags([facts]), facts.candidate.backend],
        variant_table=_table(("variant", "device", "state"), [_variant_row(v, facts) for v in variants]),
        built_how=_built_how(facts, variants),
        domain=contract.check(facts.candidate, kernel_type).text,
        measured=_measured(facts.evaluation),
        measured_how=_measured_how(facts.evaluation) if facts.evaluation is not None else "",
        plot=card_plot.PLOT if card_plot.rows_of(facts.evaluation) else "",
        why_not_measured=_why_not_measured(facts),
        numerics=list(_numerics(facts, kernel_type)),
        limits=list(_limits(facts, variants)),
        provenance_table=_table(("", ""), list(_provenance(facts))),
    )


def render_bundle(parts: Sequence[Facts]) -> str:
    """The card's text of a package of several kernels.

    Args:
        parts: What is known of each kernel; all of one package, device and run.
    """
    first = parts[0]
    variants = packages.read_variants(Path(first.package.path))
    return _rendered(
        "bundle.md.j2",
        parts,
        summary=_bundle_summary(parts),
        tags=_tags(parts),
        variant_table=_table(("variant", "device"), [_variant_row(v, first)[:2] for v in variants]),
        kernels=[_bundle_part(facts) for facts in parts],
        measured=any(_measured(facts.evaluation) for facts in parts),
        plot=card_plot.PLOT if plot_rows(parts) else "",
        limits=list(dict.fromkeys(line for facts in parts for line in _limits(facts, variants))),
        provenance_table=_table(
            ("", ""),
            list(
                dict.fromkeys(
                    row for facts in parts for row in _provenance(facts) if row[0] not in _PART_PROVENANCE
                )
            ),
        ),
    )


def plot_rows(parts: Sequence[Facts]) -> list[card_plot.Row]:
    """What the picture of a bundle shows."""
    return [row for f in parts for row in card_plot.rows_of(f.evaluation, f.candidate.kernel_type)]


# What a bundle's card tells of each kernel, and not of all together.
_PART_PROVENANCE = ("kernel type", "source (SHA-256)", "gradients", "commit of the run")


def _bundle_summary(parts: Sequence[Facts]) -> str:
    names = ", ".join(f"`{facts.candidate.kernel_type}`" for facts in parts)
    text = f"{len(parts)} kernels in one package: {names}"
    model = parts[0].profile.model if parts[0].profile is not None else None
    if model is not None:
        text += f"; found by autokernel_hf for the calls that {public_model(model)} makes"
        device = _device(parts[0])
        if device is not None:
            text += f" on {device.name}"
    return text + "."


def _bundle_part(facts: Facts) -> dict[str, object]:
    kernel_type = find_type(facts.candidate.kernel_type)
    # With gradients it was built again.
    judged = facts.evaluation is not None and facts.evaluation.status == "passed" and facts.backward is None
    rows = [row for row in _provenance(facts) if row[0] in _PART_PROVENANCE]
    return {
        "name": kernel_type.name,
        "what": _BACKEND_WORDS[facts.candidate.backend],
        "id": facts.builts[0].id,
        "judged": judged,
        "domain": contract.check(facts.candidate, kernel_type).text,
        "measured": _measured(facts.evaluation),
        "measured_how": _measured_how(facts.evaluation) if facts.evaluation is not None else "",
        "why_not_measured": _why_not_measured(facts),
        "numerics": list(_numerics(facts, kernel_type)),
        "provenance": _table(("", ""), rows),
    }


def _tags(parts: Sequence[Facts]) -> list[str]:
    types = [facts.candidate.kernel_type for facts in parts]
    return ["kernel", "autokernel-hf", *types, _device_type(parts[0])]


def _device_type(facts: Facts) -> str:
    return "cpu" if facts.candidate.backend == "cpp" else "cuda"


def _rendered(template: str, parts: Sequence[Facts], **more: object) -> str:
    """A template with what all cards tell: how to use the package, and what is in it."""
    facts = parts[0]
    package, device_type = facts.package, _device_type(facts)
    folder = packages.read_variants(Path(package.path))[0].path
    types = [find_type(part.candidate.kernel_type) for part in parts]
    hooks = {layer.name: layer.hook for kernel_type in types for layer in kernel_type.layers}
    usable = [name for kernel_type in types for name in packages.usable_layers(folder, kernel_type.name)]
    layers = [_layer(name, hooks.get(name, name)) for name in usable]
    docs = {
        name: text for kernel_type in types for name, text in _layer_docs(folder, kernel_type.name).items()
    }
    found = [layer for layer in layers if layer.hook in TRANSFORMERS_HOOKS]
    hooked = _one_a_hook(found, _layers_of_model(facts.profile))
    examples = [
        line
        for part, kernel_type in zip(parts, types, strict=True)
        for line in example_call(kernel_type, contract.check(part.candidate, kernel_type), device_type)
    ]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    text = environment.get_template(template).render(
        name=package.name,
        repo=repo_placeholder(package.name),
        version=package.version,
        license=facts.license,
        license_id=facts.license.lower() if facts.license.lower() in _HUB_LICENSES else "other",
        example="\n".join(examples),
        device_type=device_type,
        functions=[kernel_type.schema.text for kernel_type in types],
        layers=layers,
        hooked=hooked,
        alternatives=_alternatives(hooked, found),
        chosen_by_model=bool({layer.name for layer in hooked} & _layers_of_model(facts.profile)),
        marked=[layer for layer in layers if layer.marked_by is not None],
        unusable=[n for n in packages.layer_names(folder) if n not in usable],
        training=_training(parts),
        backwards=[f.backward.candidate.kernel_type for f in parts if f.backward is not None],
        layer_table=_table(
            ("layer", "hook", "replaces the forward of"),
            [(f"`{x.name}`", f"`{x.hook}`", docs.get(x.name, "")) for x in layers],
        ),
        measured_on=_measured_on(facts),
        verified=_verified(facts.verification, facts.profile),
        reproduce=_reproduce(facts.settings, facts.profile),
        **more,
    )
    return _without_double_blanks(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """A layer, the hook it is known by, and how a class of torch is marked with that hook."""

    name: str
    hook: str
    marked_by: str | None


def _layer(name: str, hook: str) -> _Layer:
    marked = _TORCH_CLASSES.get(name)
    return _Layer(name=name, hook=hook, marked_by=marked.format(hook=f'"{hook}"') if marked else None)


def _layers_of_model(profile: Profile | None) -> set[str]:
    """The layers that fit the places of the model that the run was for."""
    return {site.layer for site in profile.sites} if profile is not None else set()


def _one_a_hook(layers: Sequence[_Layer], wanted: set[str]) -> list[_Layer]:
    """A mapping takes one layer a hook: that of the run's model, else the first, which fits most models."""
    chosen: dict[str, _Layer] = {}
    for layer in layers:
        known = chosen.setdefault(layer.hook, layer)
        if layer.name in wanted and known.name not in wanted:
            chosen[layer.hook] = layer
    return list(chosen.values())


def _alternatives(hooked: Sequence[_Layer], layers: Sequence[_Layer]) -> list[tuple[str, str, list[str]]]:
    """(hook, the layer in the mapping, other layers of the same hook)."""
    found = []
    for layer in hooked:
        others = [f"`{x.name}`" for x in layers if x.hook == layer.hook and x.name != layer.name]
        if others:
            found.append((layer.hook, layer.name, others))
    return found


def _without_double_blanks(text: str) -> str:
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    # Two blank lines belong between functions of a code block.
    return (
        text.replace("}\n\ndef ", "}\n\n\ndef ")
        .replace(")\n\ndef ", ")\n\n\ndef ")
        .replace("ak\n\ndef ", "ak\n\n\ndef ")
    )


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


# --- what it is ---------------------------------------------------------------------------------------------------


def _summary(facts: Facts, kernel_type: KernelType) -> str:
    text = f"A {_BACKEND_WORDS[facts.candidate.backend]}: `{kernel_type.name}`"
    model = facts.profile.model if facts.profile is not None else None
    if model is not None:
        text += f", found by autokernel_hf for the calls that {public_model(model)} makes"
        device = _device(facts)
        if device is not None:
            text += f" on {device.name}"
    return text + "."


def public_model(model: PulledModel) -> str:
    """How a card may name a model: by its Hub id; a local folder or file only by its last part."""
    local = model.revision is None and ("/" in model.id or ":" in model.id or "\\" in model.id)
    return f"`{Path(model.id).name}` (a local model)" if local else f"`{model.id}`"


def _device(facts: Facts) -> DeviceInfo | None:
    if facts.device is not None:
        return facts.device
    if facts.verification is not None and facts.verification.device is not None:
        return facts.verification.device
    return facts.profile.device if facts.profile is not None else None


def _layer_docs(variant: Path, function: str) -> dict[str, str]:
    file = packages.part_of(variant, function) / "layers.py"
    tree = ast.parse(file.read_text(encoding="utf-8")) if file.exists() else None
    classes = (node for node in (tree.body if tree else ()) if isinstance(node, ast.ClassDef))
    return {
        node.name: (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ") for node in classes
    }


def _variant_row(variant: packages.Variant, facts: Facts) -> tuple[str, str, str]:
    name, metadata = variant.name, variant.metadata
    # A build for more architectures, or with a backward, is another binary than the judged one, if from the same source.
    same = metadata.id == facts.builts[0].id and facts.backward is None
    judged = same and facts.evaluation is not None and facts.evaluation.status == "passed"
    device = _device(facts)
    here = f"judged on {device.name}" if judged and device is not None else "judged" if judged else "built"
    if metadata.backend.type == "cpu":
        levels = ", ".join(facts.builts[0].archs)
        picked = f" ({levels}, picked at import)" if levels else ""
        return f"`{name}`", f"CPU{picked}", here if facts.candidate.backend == "cpp" else _interpreter_only()
    if metadata.backend.type == "rocm":
        return f"`{name}`", "AMD GPU", "the same source; not run on AMD hardware"
    if facts.candidate.backend == "triton":
        return f"`{name}`", "NVIDIA GPU; compiled by Triton for the one at hand", here
    archs = metadata.backend.archs or ()
    run = _digits(device.arch) if judged and device is not None and device.kind == "cuda" else ""
    states = [f"{arch}: {here if _digits(arch) == run else 'compiled, not run'}" for arch in archs]
    return f"`{name}`", f"NVIDIA GPU of capability {', '.join(archs)}", "; ".join(states)


def _digits(arch: str) -> str:
    """The capability alone: 90 of sm_90a, 9.0a and 9.0+PTX."""
    return "".join(c for c in arch if c.isdigit())


def _interpreter_only() -> str:
    return "for tests only: runs in Triton's interpreter (`TRITON_INTERPRET=1`)"


def _built_how(facts: Facts, variants: Sequence[packages.Variant]) -> str:
    if facts.candidate.backend == "triton":
        judged = " as it was judged" if facts.evaluation is not None else ""
        text = f"A Triton kernel has nothing compiled in it: the variants hold the source{judged}."
        return text + _tuned(packages.configs(variants[0].path))
    ids = {v.metadata.id for v in variants}
    if facts.backward is not None and facts.evaluation is not None:
        own = facts.backward
        same = own.evaluation is not None and own.evaluation.built_id == own.id
        relation = " The kernel was built again, from the judged source, together with its gradients'" + (
            ", whose folder is, byte for byte, what was judged." if same else "."
        )
    elif facts.builts[0].id in ids and facts.evaluation is not None:
        relation = " What is here is, byte for byte, what was judged."
    elif facts.evaluation is not None:
        relation = f" It was built again, from the judged source, for more architectures than the judged `{facts.builts[0].id}`."
    else:
        relation = ""
    return (
        "The compiled variants were built with ninja by autokernel_hf, not by kernel-builder, against torch's stable ABI "
        f"of version 2.11; `kernel-abi-check` finds them clean for Python {packages.PYTHON_ABI} and "
        f"{packages.MANYLINUX}.{relation}"
    )


def _tuned(entries: Sequence[Mapping[str, object]]) -> str:
    """For which devices `configs.json` has other constants than the source."""
    devices = dict.fromkeys(str(entry["device"]) for entry in entries)
    told = []
    for device in devices:
        own = [entry for entry in entries if entry["device"] == device]
        shapes = sum("shapes" in entry for entry in own)
        parts = [f"{shapes} shape{'s' if shapes != 1 else ''}"] if shapes else []
        parts += ["all other shapes"] if shapes < len(own) else []
        told.append(f"{device} ({' and '.join(parts)})")
    return f" Its constants are other ones, by `configs.json`, on {'; '.join(told)}." if told else ""


# --- what it does -------------------------------------------------------------------------------------------------


def _measured_on(facts: Facts) -> str:
    device = _device(facts)
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


def _measured(evaluation: Evaluation | None) -> str:
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
    text = _table(headers, lines)
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


def _measured_how(evaluation: Evaluation) -> str:
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


def _why_not_measured(facts: Facts) -> str:
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


def _verified(verification: Verification | None, profile: Profile | None) -> _Verified | None:
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
        table=_table(("forward pass", "ms"), rows) if rows else "",
        lines=tuple(lines),
    )


def _numerics(facts: Facts, kernel_type: KernelType) -> Iterable[str]:
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


def _training(parts: Sequence[Facts]) -> str:
    """What layers say of training, and whether it is so."""
    trained = [f.candidate.kernel_type for f in parts if f.backward is not None]
    if not trained:
        return "`has_backward` is False: they are for inference (`Mode.INFERENCE`)."
    if len(trained) == len(parts):
        return "`has_backward` is True: gradients come from a kernel, too, so they can be trained (`Mode.TRAINING`)."
    named = ", ".join(f"`{name}`" for name in trained)
    return f"`has_backward` is True for those of {named}, and False for the others, which are for inference."


def _limits(facts: Facts, variants: Sequence[packages.Variant]) -> Iterable[str]:
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


def _provenance(facts: Facts) -> Iterable[tuple[str, str]]:
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


def _reproduce(settings: RunSettings | None, profile: Profile | None) -> str:
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
