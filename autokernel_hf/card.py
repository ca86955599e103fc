"""The card of a package: its README on the Hub.

Every figure comes from a record; what was not measured is not there. The card names the repository by a placeholder
until it is published, since a package does not know where it will live.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from autokernel_hf import card_plot, contract, packages
from autokernel_hf.card_records import (
    Backward,
    Facts,
    device_of,
    limits,
    measured,
    measured_how,
    measured_on,
    numerics,
    provenance,
    public_model,
    reproduce,
    table,
    training,
    verified,
    why_not_measured,
)
from autokernel_hf.kernels import kernel_type as find_type
from autokernel_hf.kernels.base import KernelType
from autokernel_hf.records import Profile
from autokernel_hf.sources import example_call

__all__ = ["Backward", "Facts", "plot_rows", "public_model", "render", "render_bundle", "repo_placeholder"]

# Names by which transformers' modeling files mark what kernelize may replace (5.20 to 5.22).
TRANSFORMERS_HOOKS = frozenset(
    {"FastGELU", "GeLU", "GeluTanh", "NewGELU", "QuickGELU", "RMSNorm", "SiLU", "rotary_pos_emb"}
)
# Classes of torch that carry no hook, by the layer of ours that replaces their forward, and for which of them it does.
_TORCH_CLASSES = {
    "CrossEntropyLoss": ("torch.nn.CrossEntropyLoss", "lambda m: m.weight is None"),
    "LayerNorm": ("torch.nn.LayerNorm", "lambda m: len(m.normalized_shape) == 1"),
    "TorchRMSNorm": (
        "torch.nn.RMSNorm",
        "lambda m: len(m.normalized_shape) == 1 and None not in (m.weight, m.eps)",
    ),
    "Softmax": ("torch.nn.Softmax", "lambda m: m.dim is not None"),
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


def render(facts: Facts) -> str:
    """The card's text."""
    kernel_type = find_type(facts.candidate.kernel_type)
    variants = packages.read_variants(Path(facts.package.path))
    return _rendered(
        "card.md.j2",
        [facts],
        summary=_summary(facts, kernel_type),
        tags=[*_tags([facts]), facts.candidate.backend],
        variant_table=table(("variant", "device", "state"), [_variant_row(v, facts) for v in variants]),
        built_how=_built_how(facts, variants),
        domain=contract.check(facts.candidate, kernel_type).text,
        measured=measured(facts.evaluation),
        measured_how=measured_how(facts.evaluation) if facts.evaluation is not None else "",
        plot=card_plot.PLOT if card_plot.rows_of(facts.evaluation) else "",
        why_not_measured=why_not_measured(facts),
        numerics=list(numerics(facts, kernel_type)),
        limits=list(limits(facts, variants)),
        provenance_table=table(("what", "value"), list(provenance(facts))),
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
        variant_table=table(("variant", "device"), [_variant_row(v, first)[:2] for v in variants]),
        kernels=[_bundle_part(facts) for facts in parts],
        measured=any(measured(facts.evaluation) for facts in parts),
        plot=card_plot.PLOT if plot_rows(parts) else "",
        limits=list(dict.fromkeys(line for facts in parts for line in limits(facts, variants))),
        provenance_table=table(
            ("what", "value"),
            list(
                dict.fromkeys(
                    row for facts in parts for row in provenance(facts) if row[0] not in _PART_PROVENANCE
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
        device = device_of(parts[0])
        if device is not None:
            text += f" on {device.name}"
    return text + "."


def _bundle_part(facts: Facts) -> dict[str, object]:
    kernel_type = find_type(facts.candidate.kernel_type)
    # With gradients it was built again.
    judged = facts.evaluation is not None and facts.evaluation.status == "passed" and facts.backward is None
    rows = [row for row in provenance(facts) if row[0] in _PART_PROVENANCE]
    return {
        "name": kernel_type.name,
        "what": _BACKEND_WORDS[facts.candidate.backend],
        "id": facts.builts[0].id,
        "judged": judged,
        "domain": contract.check(facts.candidate, kernel_type).text,
        "measured": measured(facts.evaluation),
        "measured_how": measured_how(facts.evaluation) if facts.evaluation is not None else "",
        "why_not_measured": why_not_measured(facts),
        "numerics": list(numerics(facts, kernel_type)),
        "provenance": table(("what", "value"), rows),
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
        training=training(parts),
        backwards=[f.backward.candidate.kernel_type for f in parts if f.backward is not None],
        layer_table=table(
            ("layer", "hook", "replaces the forward of"),
            [(f"`{x.name}`", f"`{x.hook}`", docs.get(x.name, "")) for x in layers],
        ),
        measured_on=measured_on(facts),
        verified=verified(facts.verification, facts.profile),
        reproduce=reproduce(facts.settings, facts.profile),
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
    owner, fits = _TORCH_CLASSES.get(name, (None, None))
    marked_by = f'    {owner},\n    "{hook}",\n    {fits},\n' if owner else None
    return _Layer(name=name, hook=hook, marked_by=marked_by)


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


# --- what it is ---------------------------------------------------------------------------------------------------


def _summary(facts: Facts, kernel_type: KernelType) -> str:
    text = f"A {_BACKEND_WORDS[facts.candidate.backend]}: `{kernel_type.name}`"
    model = facts.profile.model if facts.profile is not None else None
    if model is not None:
        text += f", found by autokernel_hf for the calls that {public_model(model)} makes"
        device = device_of(facts)
        if device is not None:
            text += f" on {device.name}"
    return text + "."


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
    device = device_of(facts)
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
