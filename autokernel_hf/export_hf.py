"""Winners to Kernel Hub packages: the folders that were judged, byte for byte, with what a Hub wants beside them."""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from autokernel_hf import card, card_plot, packages
from autokernel_hf.build import build
from autokernel_hf.errors import CandidateError, PackageError, UsageError
from autokernel_hf.kernels import kernel_type
from autokernel_hf.progress import NOTE
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

logger = logging.getLogger(__name__)

MAX_NAME = 80  # the Hub allows 96 for namespace and name together
_MAX_STEM = 50  # leaves room for every kernel type
_LICENSE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]{1,63}")
# Words of a Triton source that only NVIDIA's compiler knows: such a kernel gets no variant for AMD.
_NVIDIA_ONLY = re.compile(
    r"inline_asm_elementwise|extra\.cuda|float8_e4m3fn|tensor_descriptor|TensorDescriptor|experimental_descriptor"
)


# --- names --------------------------------------------------------------------------------------------------------


def package_name(base: str, kernel_type: str | None) -> str:
    """A name that the Kernel Hub takes: lowercase letters, digits and dashes, from a letter to a letter or digit.

    Args:
        base: What the user called it, or a model's name.
        kernel_type: Added at the end where a run exports several kernels.

    Raises:
        UsageError: Nothing of it can stand in a name, or it is too long.
    """
    stem = _stem(base)
    name = f"{stem}-{kernel_type.replace('_', '-')}" if kernel_type is not None and stem else stem
    if not packages.is_name(name) or len(name) > MAX_NAME:
        raise UsageError(
            f"{base!r} cannot be made a kernel's name.",
            remedy=f"Give one of 2 to {MAX_NAME} lowercase letters, digits and dashes with --name, such as gpt2-gelu.",
        )
    return name


def chosen_name(base: str, kernel_type: str | None, out: Path) -> str:
    """`package_name` of what a user chose, who is told where it becomes another one.

    Raises:
        UsageError: As `package_name`; or another name was written than that of a package that is there.
    """
    name = package_name(base, kernel_type)
    plain = base if kernel_type is None else f"{base}-{kernel_type.replace('_', '-')}"
    if name == plain:
        return name
    if (out / name).exists():
        raise UsageError(
            f"{base!r} becomes {name!r} on the Kernel Hub, and {out / name} is there already.",
            remedy=f"Write --name {name.removesuffix(plain.removeprefix(base))} to make that one anew, or choose another name.",
        )
    logger.log(NOTE, "The package is called %s: the Kernel Hub takes no %r.", name, base)
    return name


def _stem(base: str) -> str:
    plain = unicodedata.normalize("NFKD", base).encode("ascii", "ignore").decode().lower()
    stem = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
    return f"k-{stem}" if stem and stem[0].isdigit() else stem


def name_of_model(model_id: str) -> str:
    """What a model's packages are called where the user chose no name; no model's name is too odd or too long for it."""
    stem = _stem(model_id.rstrip("/").split("/")[-1])[:_MAX_STEM].strip("-")
    return stem if len(stem) > 1 else "model"


def check_license(license: str) -> None:
    """Raises UsageError where this is no licence's identifier: it stands in metadata, cards and build files."""
    if not _LICENSE.fullmatch(license):
        raise UsageError(
            f"{license!r} is no licence's identifier.",
            remedy="Use one such as Apache-2.0, MIT or BSD-3-Clause.",
        )


# --- staging ------------------------------------------------------------------------------------------------------


def stage(
    built: Built | Sequence[Built],
    *,
    candidate: Candidate,
    name: str,
    version: int = 1,
    license: str = "apache-2.0",
    out: Path,
    interpreter: bool = False,
    backward: Candidate | None = None,
) -> Package:
    """Make `out/<name>`, a package without its card, from the folders that were judged.

    The same candidate, builds, name and version give the same bytes. A package that is there under the name is
    replaced; any other folder is not touched.

    Args:
        built: The build, or builds for several devices; the judged one first. Of two builds of one variant the one
            for more architectures ships.
        interpreter: Add a `torch-cpu` variant of a Triton kernel. It only runs in Triton's interpreter, so a published
            one would fail on every CPU: for tests.
        backward: The kernel of the gradients, with which `built` was built.

    Raises:
        PackageError: A build does not fit the Hub's rules (ABI, names), holds something private, or the folder is in
            the way.
    """
    builts = (built,) if isinstance(built, Built) else tuple(built)
    if not packages.is_name(name):
        raise UsageError(f"{name!r} is not a kernel's name.", remedy="Use `package_name` to make one.")
    packages.check_version(version)
    destination = out / name
    refuse_foreign(destination, [candidate.kernel_type])
    out.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=out))
    try:
        for one in _one_a_variant(builts):
            for variant, backend in variants_of(one, candidate, interpreter, backward):
                _copy_variant(one, temporary / "build" / variant, name, version, license, backend)
        archs = tuple(dict.fromkeys(arch for one in builts for arch in one.archs))
        for path, text in source_files(
            candidate,
            name=name,
            version=version,
            license=license,
            archs=archs,
            configs=packages.configs(Path(builts[0].path)),
            gradients=gradients_by(backward),
        ).items():
            write_atomically(temporary / path, text)
        if backward is not None:
            write_backward_sources(backward, temporary, name, version, license, archs)
        refuse_unfit(temporary, name)
        make_readable(temporary)
        if destination.exists():
            tell_replaced(destination, temporary)
            shutil.rmtree(destination)
        temporary.rename(destination)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    first = packages.read_variants(destination)[0].path
    exported = packages.exported_names(first)
    return Package(
        path=str(destination),
        name=name,
        version=version,
        variants=tuple(v.name for v in packages.read_variants(destination)),
        functions=tuple(n for n in exported if n != "layers"),
        layers=packages.layer_names(first),
    )


def _one_a_variant(builts: Sequence[Built]) -> list[Built]:
    """The builds to ship: of several for one variant, the one whose binary serves all their architectures."""
    chosen: dict[str, Built] = {}
    for variant in dict.fromkeys(built.variant for built in builts):
        rivals = [built for built in builts if built.variant == variant]
        wanted = {arch for built in rivals for arch in built.archs}
        complete = [built for built in rivals if wanted <= set(built.archs)]
        if not complete:
            raise PackageError(
                f"No build of {variant} serves all of {', '.join(sorted(wanted))}.",
                remedy="Build one binary for all of them.",
            )
        chosen[variant] = complete[0]
    return list(chosen.values())


def gradients_by(backward: Candidate | None) -> tuple[str, ...]:
    """Of which arguments a kernel computes the gradients."""
    gradients = kernel_type(backward.kernel_type).gradients if backward is not None else None
    return gradients.of if gradients is not None else ()


def write_backward_sources(
    backward: Candidate, folder: Path, name: str, version: int, license: str, archs: Sequence[str]
) -> None:
    """A project of its own for the kernel of the gradients, without its tests: the package has no such function."""
    kind = backward.kernel_type
    own = f"{name}-{kind.replace('_', '-')}"
    for path, text in source_files(backward, name=own, version=version, license=license, archs=archs).items():
        if not path.startswith(("tests/", "benchmarks/")):
            write_atomically(folder / "sources" / kind / path, text)


def variants_of(
    built: Built, candidate: Candidate, interpreter: bool = False, backward: Candidate | None = None
) -> list[tuple[str, str]]:
    """The variants that a build ships as, with their backends."""
    if candidate.backend != "triton":
        return [(built.variant, packages.backend_of_variant(built.variant))]
    backends = ["cuda"]
    if not any(_NVIDIA_ONLY.search(c.source) for c in (candidate, backward) if c is not None):
        backends.append("rocm")
    if interpreter:
        backends.append("cpu")
    return [(f"torch-{backend}", backend) for backend in backends]


def _copy_variant(built: Built, target: Path, name: str, version: int, license: str, backend: str) -> None:
    if target.exists():
        raise PackageError(
            f"Two builds are for the variant {target.name}.", remedy="Export them as two packages."
        )
    target.mkdir(parents=True)
    for path, file in packages.files_of(Path(built.path)):
        if path == "metadata.json":
            continue
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target / path)
    packages.write_metadata(
        target,
        name=name,
        id=built.id,
        version=version,
        license=license,
        backend=backend,
        archs=built.archs if backend == "cuda" else None,
    )


def refuse_foreign(destination: Path, functions: Sequence[str]) -> None:
    """Keep away from a folder that is no package of ours, or one of other functions than these."""
    if not destination.exists():
        return
    if not destination.is_dir() or (any(destination.iterdir()) and not (destination / "build").is_dir()):
        raise PackageError(
            f"{destination} is in the way: it is no package.", remedy="Remove it, or choose another name."
        )
    held = {name for variant in _variants_in(destination) for name in packages.exported_names(variant.path)}
    held.discard("layers")
    if held and held != set(functions):
        raise PackageError(
            f"{destination} is in the way: it is a package of {', '.join(sorted(held))}, and not of {', '.join(functions)}.",
            remedy="Remove it, or choose another name.",
        )


def _variants_in(folder: Path) -> tuple[packages.Variant, ...]:
    """A package's variants; none of one that is damaged."""
    try:
        return packages.read_variants(folder)
    except PackageError:
        return ()


def tell_replaced(destination: Path, new: Path) -> None:
    """Say so where a package takes the place of one that holds something else."""
    old, fresh = _variants_in(destination), packages.read_variants(new)
    if old and {(v.name, v.metadata.id, v.metadata.version) for v in old} != {
        (v.name, v.metadata.id, v.metadata.version) for v in fresh
    }:
        told = ", ".join(dict.fromkeys(f"{v.metadata.id} (version {v.metadata.version})" for v in old))
        logger.log(NOTE, "%s replaces what was there: %s.", destination, told)


def refuse_unfit(package: Path, name: str) -> None:
    problems = packages.inspect(package)
    if problems:
        raise PackageError(
            f"{name} would not load everywhere: {problems[0]}.",
            remedy="This is a fault of the build; run `autokernel-hf doctor`, and report it with the compiler's version.",
        )
    private = packages.private_strings(package)
    if private:
        raise PackageError(
            f"{name} would publish something private: {private[0]}.",
            remedy="Remove it from the candidate's source and export again.",
        )


def make_readable(package: Path) -> None:
    """The usual rights, whatever the temporary folder's were."""
    package.chmod(0o755)
    for path in package.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


# --- the card -----------------------------------------------------------------------------------------------------


def write_card(
    package: Package,
    *,
    candidate: Candidate,
    built: Built | Sequence[Built],
    evaluation: Evaluation | None = None,
    verification: Verification | None = None,
    profile: Profile | None = None,
    run_settings: RunSettings | None = None,
    device: DeviceInfo | None = None,
    commit: str | None = None,
    backward: card.Backward | None = None,
) -> Path:
    """Write a staged package's README.md from the records of its run.

    Args:
        device: Where `evaluation` was measured, where neither `verification` nor `profile` says it.
        commit: The commit of the run's repository that holds the candidate.
        backward: The kernel of the gradients that the package holds.

    Raises:
        PackageError: Something private got into it.
    """
    folder = Path(package.path)
    metadata = packages.read_variants(folder)[0].metadata
    text = card.render(
        card.Facts(
            package=package,
            candidate=candidate,
            builts=(built,) if isinstance(built, Built) else tuple(built),
            license=metadata.license,
            backward=backward,
            evaluation=evaluation,
            verification=verification,
            profile=profile,
            settings=run_settings,
            device=device,
            commit=commit,
        )
    )
    card_plot.draw(card_plot.rows_of(evaluation), folder / card_plot.PLOT)
    path = folder / "README.md"
    write_atomically(path, text)
    path.chmod(0o644)
    refuse_private_card(folder)
    return path


def refuse_private_card(package: Path) -> None:
    """Take a card away that tells something of this machine, and say so."""
    private = [found for found in packages.private_strings(package) if found.startswith("README.md")]
    if private:
        (package / "README.md").unlink()
        raise PackageError(
            f"The card would publish something private: {private[0]}.",
            remedy="Run with a model name that holds no local path.",
        )


def export_file(
    candidate: Candidate,
    name: str,
    *,
    version: int = 1,
    license: str = "apache-2.0",
    archs: Sequence[str] = (),
    device: str = "cpu",
    out: Path = Path("packages"),
    evaluation: Evaluation | None = None,
    backward: Candidate | None = None,
) -> Package:
    """A package from one candidate file: built, staged, with a card that says it was not part of a run.

    Args:
        archs: CUDA architectures, as the Hub writes them (8.0, 9.0a, 9.0+PTX); that of the GPU here where empty.
        evaluation: What the judge said of it, where it was asked.
        backward: The kernel of its gradients.

    Raises:
        AutokernelError: The candidate breaks its contract, does not compile, or the package is refused.
    """
    if archs and candidate.backend != "cuda":
        raise CandidateError(
            f"A {candidate.backend} kernel has no CUDA architectures.", remedy="Leave --archs away."
        )
    made = build(candidate, archs=tuple(archs), device=device, backward=backward)
    package = stage(
        made,
        candidate=candidate,
        name=chosen_name(name, None, out),
        version=version,
        license=license,
        out=out,
        backward=backward,
    )
    shipped = None
    if backward is not None:
        shipped = card.Backward(candidate=backward, id=build(backward, archs=made.archs, device=device).id)
    write_card(package, candidate=candidate, built=made, evaluation=evaluation, backward=shipped)
    return package
