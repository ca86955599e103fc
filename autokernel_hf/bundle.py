"""Several kernels in one package: one repository, one version, one `get_kernel`.

    <package>/build/<variant>/__init__.py          every function, `layers`, and what transformers looks for
    <package>/build/<variant>/layers.py            every layer class
    <package>/build/<variant>/_ak_rmsnorm_.../     each kernel, byte for byte the folder that was judged
    <package>/sources/<type>/                      what kernel-builder needs to build that kernel again
    <package>/tests, benchmarks                    of all kernels, against the package as a whole

A build variant holds all kernels or does not exist: which functions a user gets never depends on the machine.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autokernel_hf import card, card_plot, packages, variant
from autokernel_hf.build import build
from autokernel_hf.errors import CandidateError, PackageError, UsageError
from autokernel_hf.export_hf import (
    chosen_name,
    gradients_by,
    make_readable,
    refuse_foreign,
    refuse_private_card,
    refuse_unfit,
    tell_replaced,
    variants_of,
    write_backward_sources,
)
from autokernel_hf.records import (
    Built,
    Candidate,
    DeviceInfo,
    Evaluation,
    Package,
    Profile,
    Verification,
    write_atomically,
)
from autokernel_hf.runs import RunSettings
from autokernel_hf.sources import source_files

# Of a kernel's own sources these are tried against the whole package, so they stand at its top.
_SHARED_FOLDERS = ("tests/", "benchmarks/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One kernel of a bundle.

    Args:
        evaluation: What the judge said of it, where it was asked.
        commit: The commit of the run's repository that holds the candidate.
        backward: The kernel of the gradients, with which `built` was built.
    """

    candidate: Candidate
    built: Built
    evaluation: Evaluation | None = None
    commit: str | None = None
    backward: card.Backward | None = None


def stage_bundle(
    parts: Sequence[Part], *, name: str, version: int = 1, license: str = "apache-2.0", out: Path
) -> Package:
    """Make `out/<name>`, a package of several kernels without its card.

    The same parts, name and version give the same bytes. A package that is there under the name is replaced.

    Raises:
        UsageError: The name is no kernel's, or there are no parts.
        PackageError: The parts cannot be in one build variant, or one does not fit the Hub's rules.
    """
    if not packages.is_name(name):
        raise UsageError(f"{name!r} is not a kernel's name.", remedy="Use `package_name` to make one.")
    ordered = _ordered(parts)
    targets = _variants(ordered)
    packages.check_version(version)
    destination = out / name
    refuse_foreign(destination, [part.candidate.kernel_type for part in ordered])
    out.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=out))
    try:
        for target, backend in targets:
            _write_variant(ordered, temporary / "build" / target, name, version, license, backend)
        for part in ordered:
            _write_sources(part, temporary, name, version, license)
        refuse_unfit(temporary, name)
        make_readable(temporary)
        if destination.exists():
            tell_replaced(destination, temporary)
            shutil.rmtree(destination)
        temporary.rename(destination)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    first = packages.read_variants(destination)[0].path
    return Package(
        path=str(destination),
        name=name,
        version=version,
        variants=tuple(v.name for v in packages.read_variants(destination)),
        functions=tuple(n for n in packages.exported_names(first) if n != "layers"),
        layers=packages.layer_names(first),
    )


def write_bundle_card(
    package: Package,
    parts: Sequence[Part],
    *,
    verification: Verification | None = None,
    profile: Profile | None = None,
    run_settings: RunSettings | None = None,
    device: DeviceInfo | None = None,
) -> Path:
    """Write a staged bundle's README.md from the records of its run.

    Raises:
        PackageError: Something private got into it.
    """
    folder = Path(package.path)
    license = packages.read_variants(folder)[0].metadata.license
    facts = [
        card.Facts(
            package=package,
            candidate=part.candidate,
            builts=(part.built,),
            license=license,
            backward=part.backward,
            evaluation=part.evaluation,
            verification=verification,
            profile=profile,
            settings=run_settings,
            device=device,
            commit=part.commit,
        )
        for part in _ordered(parts)
    ]
    card_plot.draw(card.plot_rows(facts), folder / card_plot.PLOT)
    path = folder / "README.md"
    write_atomically(path, card.render_bundle(facts))
    path.chmod(0o644)
    refuse_private_card(folder)
    return path


def export_files(
    candidates: Sequence[Candidate],
    name: str,
    *,
    version: int = 1,
    license: str = "apache-2.0",
    archs: Sequence[str] = (),
    device: str = "cpu",
    out: Path = Path("packages"),
    backwards: Mapping[str, Candidate] | None = None,
) -> Package:
    """One package from several candidate files, with a card that says they were not part of a run.

    Args:
        archs: CUDA architectures, as the Hub writes them; that of the GPU here where empty.
        backwards: The kernels of gradients, by the type whose gradients they compute.

    Raises:
        AutokernelError: A candidate breaks its contract or does not compile, or the package is refused.
    """
    if archs and not any(candidate.backend == "cuda" for candidate in candidates):
        raise CandidateError("None of these kernels is a CUDA one.", remedy="Leave --archs away.")
    parts = []
    for candidate in candidates:
        own = tuple(archs) if candidate.backend == "cuda" else ()
        backward = (backwards or {}).get(candidate.kernel_type)
        shipped = None
        if backward is not None:
            shipped = card.Backward(candidate=backward, id=build(backward, archs=own, device=device).id)
        built = build(candidate, archs=own, device=device, backward=backward)
        parts.append(Part(candidate=candidate, built=built, backward=shipped))
    package = stage_bundle(
        parts, name=chosen_name(name, None, out), version=version, license=license, out=out
    )
    write_bundle_card(package, parts)
    return package


# --- which variants -----------------------------------------------------------------------------------------------


def _ordered(parts: Sequence[Part]) -> list[Part]:
    """By kernel type, whatever order they came in."""
    if not parts:
        raise UsageError("There are no kernels to bundle.", remedy="Name at least one.")
    types = [part.candidate.kernel_type for part in parts]
    twice = sorted({name for name in types if types.count(name) > 1})
    if twice:
        raise PackageError(
            f"Two kernels of type {twice[0]} cannot be in one package: both are called {twice[0]}.",
            remedy="Choose one, or export two packages.",
        )
    return sorted(parts, key=lambda part: part.candidate.kernel_type)


def _variants(parts: Sequence[Part]) -> list[tuple[str, str]]:
    """The build variants in which all parts can be, with their backends."""
    compiled = [part for part in parts if part.candidate.backend != "triton"]
    triton = [part for part in parts if part.candidate.backend == "triton"]
    if not compiled:
        each = [
            variants_of(
                part.built,
                part.candidate,
                backward=part.backward.candidate if part.backward is not None else None,
            )
            for part in triton
        ]
        return [found for found in each[0] if all(found in others for others in each)]
    names = list(dict.fromkeys(part.built.variant for part in compiled))
    backends = {packages.backend_of_variant(name) for name in names}
    if len(backends) > 1 or (triton and backends == {"cpu"}):
        raise PackageError(
            "Kernels for a CPU and kernels for a GPU cannot be in one build variant.",
            remedy="Export one bundle for the CPU and one for the GPU.",
        )
    if len(names) > 1:
        raise PackageError(
            f"The kernels were built for different systems: {', '.join(names)}.",
            remedy="Build them again here.",
        )
    archs = {part.built.archs for part in compiled}
    if len(archs) > 1:
        told = " and ".join(sorted(", ".join(one) for one in archs))
        raise PackageError(
            f"The kernels were built for different architectures: {told}.",
            remedy="Name the architectures with --archs.",
        )
    return [(names[0], backends.pop())]


# --- what is inside -----------------------------------------------------------------------------------------------


def _write_variant(
    parts: Sequence[Part], target: Path, name: str, version: int, license: str, backend: str
) -> None:
    target.mkdir(parents=True)
    for part in parts:
        for path, file in packages.files_of(Path(part.built.path)):
            if path == "metadata.json":
                continue
            place = target / part.built.id / path
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)
    layers = _layers_source(parts)
    files = {"__init__.py": _init_source(parts, layers is not None)}
    if layers is not None:
        files["layers.py"] = layers
    for path, text in files.items():
        (target / path).write_text(text, encoding="utf-8")
    content = json.dumps([name, [part.built.id for part in parts], files], sort_keys=True)
    archs = next((part.built.archs for part in parts if part.candidate.backend == "cuda"), None)
    packages.write_metadata(
        target,
        name=name,
        id=f"_ak_bundle_{hashlib.sha256(content.encode()).hexdigest()[:12]}",
        version=version,
        license=license,
        backend=backend,
        archs=archs if backend == "cuda" else None,
    )


def _init_source(parts: Sequence[Part], layers: bool) -> str:
    """`__init__.py` of a bundle's variant: every kernel is loaded from its folder, none is changed."""
    names = [part.candidate.kernel_type for part in parts]
    lines = [
        f'"""{", ".join(names)}: each folder here is one kernel, as in a package of its own."""',
        variant.LOADER,
    ]
    lines.append("")
    lines += [f'_{part.candidate.kernel_type} = _load("{part.built.id}")' for part in parts]
    lines += [f"{name} = _{name}.{name}" for name in names]
    for part in parts:
        own = Path(part.built.path) / "layers.py"
        hooks = variant.attention_hooks(own.read_text(encoding="utf-8")) if own.exists() else []
        # Not in __all__: these are for transformers, whose interface they follow, not for a caller.
        lines += [f"{hook} = _{part.candidate.kernel_type}.{hook}" for hook in hooks]
    if layers:
        lines += ["", "from . import layers  # noqa: E402"]
    exported = sorted([*names, *(["layers"] if layers else [])])
    listed = ", ".join(f'"{name}"' for name in exported)
    lines += ["", f"__all__ = [{listed}]"]
    return "\n".join(lines) + "\n"


def _layers_source(parts: Sequence[Part]) -> str | None:
    """`layers.py` of a bundle's variant; None where no part has layers.

    Raises:
        PackageError: Two parts have a layer of the same name.
    """
    owners: dict[str, str] = {}
    for part in parts:
        for layer in packages.layer_names(Path(part.built.path)):
            if layer in owners:
                raise PackageError(
                    f"{owners[layer]} and {part.candidate.kernel_type} both have a layer {layer}.",
                    remedy="Export them as two packages.",
                )
            owners[layer] = part.candidate.kernel_type
    if not owners:
        return None
    modules = ", ".join(f"_{name}" for name in dict.fromkeys(owners.values()))
    lines = ['"""The layers of all kernels here."""', "", f"from . import {modules}", ""]
    lines += [f"{layer} = _{owner}.layers.{layer}" for layer, owner in owners.items()]
    return "\n".join(lines) + "\n"


def _write_sources(part: Part, folder: Path, name: str, version: int, license: str) -> None:
    """A kernel's sources: a project of its own for kernel-builder, its tests and benchmark beside all others'.

    One project for all would link every kernel into one library, where helpers of the same name in two candidates meet.
    """
    kind = part.candidate.kernel_type
    own = f"{name}-{kind.replace('_', '-')}"
    files = source_files(
        part.candidate,
        name=own,
        version=version,
        license=license,
        archs=part.built.archs,
        configs=packages.configs(Path(part.built.path)),
        gradients=gradients_by(part.backward.candidate if part.backward is not None else None),
    )
    for path, text in files.items():
        shared = path.startswith(_SHARED_FOLDERS)
        write_atomically(folder / path if shared else folder / "sources" / kind / path, text)
    if part.backward is not None:
        write_backward_sources(part.backward.candidate, folder, name, version, license, part.built.archs)
