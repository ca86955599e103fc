"""Candidate in, package variant out: the folder that is judged, verified and shipped.

A compiled candidate is linked with the binding of its kernel type, which is compiled once and kept, so that a changed
candidate costs its own compilation and a link. Everything is kept by content: the id of a build is a hash of all that
went into it.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType

from autokernel_hf import binding, contract, native, toolchain, variant
from autokernel_hf.cache import cache_root, folder_once
from autokernel_hf.errors import (
    AutokernelError,
    CompileError,
    PackageError,
    UsageError,
    last_words,
)
from autokernel_hf.kernels import kernel_type as find_type
from autokernel_hf.kernels import layers_source
from autokernel_hf.native import Job
from autokernel_hf.records import Built, Candidate, CompileReport, Resources
from autokernel_hf.triton_compile import Answer, Request

__all__ = ["build", "cache_root", "compile_only", "cpu_levels", "load"]

log = logging.getLogger(__name__)

_RESOURCES, _MACHINE_CODE = "resources.json", "machine_code"  # beside the variant
_CACHE_ERRORS = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
DEFAULT_CUDA_ARCHS = ("9.0a",)


def build(
    candidate: Candidate,
    *,
    archs: tuple[str, ...] = (),
    device: str = "cpu",
    configs: Sequence[Mapping[str, object]] = (),
    backward: Candidate | None = None,
) -> Built:
    """The package variant of a candidate, from the cache or made now.

    Args:
        archs: CUDA architectures of the binary, as the Kernel Hub writes them: 8.0, 9.0a, 9.0+PTX. Empty: that of
            the GPU here where `device` is one, else 9.0a.
        device: Where it is to run: cpu, cuda, cuda:1.
        configs: Other values for a Triton kernel's constants, by device and shape (`kernels/_configs.py`).
        backward: The kernel of its gradients. Its own variant lies within this one, as it was built by itself.

    Raises:
        CandidateError: The file breaks the candidate contract, or its backward is that of another kernel or supports less.
        CompileError: It does not compile; the message shows the candidate's own lines.
        ToolMissingError: A compiler is not installed.
        UsageError: There is no such kernel type.
    """
    started = time.monotonic()
    inner = None if backward is None else build(backward, archs=archs, device=device)
    recipe = _recipe(candidate, archs, device, configs, backward, inner)
    folder = cache_root() / "builds" / recipe.id
    try:
        cached = folder_once(folder, lambda temporary: _make(recipe, temporary))
    except OSError as error:
        if error.errno not in _CACHE_ERRORS:
            raise
        raise AutokernelError(
            f"The build cache {cache_root()} cannot be written: {error.strerror}.",
            remedy="Free some space, or set AUTOKERNEL_HF_CACHE to a folder that you can write.",
        ) from None
    return Built(
        id=recipe.id,
        kernel_type=candidate.kernel_type,
        backend=candidate.backend,
        path=str(folder / recipe.id),
        variant=recipe.variant,
        archs=recipe.archs,
        resources=Resources.load(folder / _RESOURCES),
        machine_code=code.read_text(encoding="utf-8") if (code := folder / _MACHINE_CODE).exists() else None,
        seconds=time.monotonic() - started,
        cached=cached,
    )


def compile_only(candidate: Candidate, arch: str) -> CompileReport:
    """Compile a candidate for an architecture that need not be here; nothing is kept or run.

    Args:
        arch: sm_80, sm_90, sm_90a, sm_100, ... for cuda and triton; x86-64-v2, -v3 or -v4 for cpp.

    Raises:
        CandidateError, CompileError, ToolMissingError, UsageError: As `build`.
    """
    started = time.monotonic()
    type_ = find_type(candidate.kernel_type)
    domain = contract.check(candidate, type_)
    with tempfile.TemporaryDirectory(prefix="autokernel_hf-") as folder:
        work = Path(folder)
        if candidate.backend == "triton":
            report = _compile_triton(candidate, domain.dtypes, arch, work)
        elif candidate.backend == "cuda":
            report = _compile_cuda(_job(candidate, (_arch_name(arch),), "cpu"), arch, work)
        else:
            if arch not in cpu_levels():
                raise UsageError(
                    f"A cpp candidate cannot be compiled for {arch!r} here.",
                    remedy=f"Choose from {', '.join(cpu_levels())}."
                    if cpu_levels()
                    else "Use an x86-64 machine.",
                )
            native.compile_objects(replace(_job(candidate, (), "cpu"), archs=(arch,)), work)
            report = CompileReport(
                arch=arch, registers=None, spill_bytes=None, shared_bytes=None, seconds=0.0
            )
    return report.model_copy(update={"seconds": time.monotonic() - started})


# Shared memory that one block may have, by compute capability times ten.
_SHARED_LIMITS = {
    75: 65536,
    80: 166912,
    86: 101376,
    87: 166912,
    89: 101376,
    90: 232448,
    100: 232448,
    103: 232448,
    120: 101376,
}


def _compile_cuda(job: Job, arch: str, work: Path) -> CompileReport:
    uses = toolchain.ptxas_uses(native.compile_objects(job, work))
    names = toolchain.demangled([use.name for use in uses])
    log_lines = (
        f"{name}: {use.registers} registers, {use.spill_bytes} bytes spilled, {use.shared_bytes} bytes shared"
        for name, use in zip(names, uses, strict=True)
    )
    most = toolchain.largest(uses)
    return CompileReport(
        arch=arch,
        registers=most.registers,
        spill_bytes=most.spill_bytes,
        shared_bytes=most.shared_bytes,
        seconds=0.0,
        log="\n".join(log_lines),
    )


def _compile_triton(candidate: Candidate, dtypes: tuple[str, ...], arch: str, work: Path) -> CompileReport:
    capability = int(_arch_name(arch).rstrip("af").replace(".", ""))
    file, request, answer = work / "kernel.py", work / "request.json", work / "answer.json"
    file.write_text(candidate.source, encoding="utf-8")
    Request(file=str(file), kernel_type=candidate.kernel_type, capability=capability, dtypes=dtypes).save(
        request
    )
    environment = {"TRITON_CACHE_DIR": str(work / "cache"), "TRITON_INTERPRET": "0"}
    status, output = toolchain.run(
        [sys.executable, "-m", "autokernel_hf.triton_compile", str(request), str(answer)],
        cwd=work,
        timeout_s=native.COMPILE_TIMEOUT_S,
        env=environment,
    )
    if not answer.exists():
        raise CompileError(
            f"Triton's compiler ended with status {status}: {last_words(output)}.",
            remedy=f"Where other architectures compile, this Triton does not know {arch}: choose a newer one.",
        )
    result = Answer.load(answer)
    if result.error:
        raise CompileError(f"kernel.py does not compile:\n{result.error}")
    limit = _SHARED_LIMITS.get(capability)
    for kernel in result.kernels:
        if limit is not None and kernel.shared_bytes > limit:
            raise CompileError(
                f"{kernel.name} needs {kernel.shared_bytes} bytes of shared memory; a block of {arch} has {limit}.",
                remedy="Make its tiles or the number of stages smaller.",
            )
    return CompileReport(
        arch=arch,
        registers=max(k.registers for k in result.kernels),
        spill_bytes=max(k.spill_bytes for k in result.kernels),
        shared_bytes=max(k.shared_bytes for k in result.kernels),
        seconds=0.0,
        log="\n".join(
            f"{k.name}: {k.num_warps} warps, {k.registers} registers, {k.spill_bytes} bytes spilled, "
            f"{k.shared_bytes} bytes shared"
            for k in result.kernels
        ),
    )


def _arch_name(arch: str) -> str:
    """sm_90a as the Kernel Hub writes it: 9.0a."""
    match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch)
    if match is None:
        raise UsageError(
            f"{arch!r} is not a CUDA architecture.", remedy="Write it as sm_80, sm_90 or sm_90a."
        )
    return f"{match[1]}.{match[2]}{match[3]}"


def load(path: str | Path) -> ModuleType:
    """The module of a package variant, imported under its id as the `kernels` library does; once a process.

    Raises:
        PackageError: The folder is no variant, or does not load.
    """
    folder = Path(path).resolve()
    name = _id_of(folder)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    if spec is None or spec.loader is None:
        raise PackageError(f"{folder} is not a kernel variant: it cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _no_bytecode():
            spec.loader.exec_module(module)
    except BaseException as error:
        for loaded in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
            del sys.modules[loaded]
        if isinstance(error, (ImportError, OSError)):
            raise PackageError(f"{folder} does not load: {error}") from error
        raise
    return module


def _id_of(folder: Path) -> str:
    metadata = folder / "metadata.json"
    if metadata.exists():
        return str(json.loads(metadata.read_text(encoding="utf-8"))["id"])
    if not (folder / "_ops.py").exists():
        raise PackageError(f"{folder} is not a kernel variant: it has no _ops.py.")
    return folder.name


@contextmanager
def _no_bytecode() -> Iterator[None]:
    """Importing writes nothing into the folder: what ships has digests."""
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


# --- recipes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that goes into a build, and the id that follows from it."""

    id: str
    candidate: Candidate
    variant: str
    archs: tuple[str, ...]
    files: tuple[tuple[str, str], ...]  # the variant's Python files, with the id in place
    job: Job | None  # for compiled backends
    inner: Built | None = None  # of the kernel of its gradients


def _recipe(
    candidate: Candidate,
    archs: tuple[str, ...],
    device: str,
    configs: Sequence[Mapping[str, object]] = (),
    backward: Candidate | None = None,
    inner: Built | None = None,
) -> Recipe:
    type_ = find_type(candidate.kernel_type)
    domain = contract.check(candidate, type_)
    layers = layers_source(type_.name)
    derivative = None
    if backward is not None and inner is not None:
        contract.check_backward(candidate, domain, backward)
        derivative = variant.Derivative(kernel_type=find_type(backward.kernel_type), id=inner.id)
        layers = variant.with_backward(layers) if layers is not None else None
    templates = {
        "__init__.py": variant.init_source(type_, layers),
        "_ops.py": variant.ops_source(type_, candidate.backend, domain, derivative),
    }
    if layers is not None:
        templates["layers.py"] = layers
    job = None
    if candidate.backend == "triton":
        name, archs = "torch-cuda", ()
        templates["op.py"] = candidate.source
        templates |= variant.config_files(type_, configs)
        more: tuple[str, ...] = ()
    else:
        if candidate.backend == "cpp":
            archs, tag = cpu_levels(), "cpu"
            source = binding.binding_source(type_, "cpp", archs)
        else:
            archs, tag = archs or _local_archs(device), _cuda_tag()
            source = binding.binding_source(type_, "cuda")
        name = f"torch-stable-abi211-{tag}-{toolchain.machine()}-linux"
        more = (source, *native.ingredients(candidate.backend))
    content = json.dumps([candidate.source, candidate.backend, name, archs, templates, more])
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    id_ = f"_ak_{type_.name}_{candidate.backend}_{digest}"
    if candidate.backend != "triton":
        job = Job(id=id_, type=type_, candidate=candidate, archs=archs, binding=source)
    files = tuple(
        (file, text.replace(variant.ID, id_) if file == "_ops.py" else text)
        for file, text in templates.items()
    )
    return Recipe(id=id_, candidate=candidate, variant=name, archs=archs, files=files, job=job, inner=inner)


def _job(candidate: Candidate, archs: tuple[str, ...], device: str) -> Job:
    job = _recipe(candidate, archs, device).job
    assert job is not None  # the callers' backends are compiled
    return job


def cpu_levels() -> tuple[str, ...]:
    """The instruction sets a cpp candidate is compiled for, lowest first; one, unnamed, build elsewhere than on x86."""
    return binding.CPU_LEVELS if toolchain.machine() == "x86_64" else ()


def _cuda_tag() -> str:
    major, minor = toolchain.nvcc().version.split(".")[:2]
    return f"cu{major}{minor}"


def _local_archs(device: str) -> tuple[str, ...]:
    if not device.startswith("cuda"):
        return DEFAULT_CUDA_ARCHS
    capability = _capability(device)
    if capability is None:
        return DEFAULT_CUDA_ARCHS
    # From 9.0 on, an architecture has instructions of its own (wgmma, TMA forms) that only its `a` target may use.
    return (f"{capability}a" if int(capability.split(".")[0]) >= 9 else capability,)


@cache
def _capability(device: str) -> str | None:
    """The compute capability of a GPU here, without starting a CUDA context in this process; None without a GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    done = subprocess.run(
        [program, "--query-gpu=compute_cap", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    rows = [r.strip() for r in done.stdout.splitlines() if re.fullmatch(r"\s*\d+\.\d+\s*", r)]
    if done.returncode != 0 or not rows:
        return None
    index = int(device.partition(":")[2] or 0)
    return rows[index] if index < len(rows) else rows[0]


# --- making -------------------------------------------------------------------------------------------------------


def _make(recipe: Recipe, folder: Path) -> None:
    """Fill a folder of the cache: the variant, under its id, and what the compiler said of the kernel."""
    made = folder / recipe.id
    made.mkdir()
    for file, text in recipe.files:
        (made / file).write_text(text, encoding="utf-8")
    if recipe.inner is not None:
        shutil.copytree(
            recipe.inner.path, made / recipe.inner.id, ignore=shutil.ignore_patterns("__pycache__")
        )
    resources = Resources()
    if recipe.job is not None:
        with native.workplace(recipe.job, folder) as work:
            resources, code = native.compile_library(recipe.job, work)
            if code is not None:
                (folder / _MACHINE_CODE).write_text(code, encoding="utf-8")
            shutil.copyfile(work / f"{recipe.id}.abi3.so", made / f"{recipe.id}.abi3.so")
            (made / f"{recipe.id}.abi3.so").chmod(0o755)
    resources.save(folder / _RESOURCES)
