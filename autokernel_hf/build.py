"""Candidate in, package variant out: the folder that is judged, verified and shipped.

A compiled candidate is linked with the binding of its kernel type, which is compiled once and kept, so that a changed
candidate costs its own compilation and a link. Everything is kept by content: the id of a build is a hash of all that
went into it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import torch

from autokernel_hf import binding, contract, toolchain, variant
from autokernel_hf.cache import cache_root, folder_once
from autokernel_hf.errors import (
    AutokernelError,
    CandidateError,
    CompileError,
    PackageError,
    ToolMissingError,
    UsageError,
)
from autokernel_hf.kernels import kernel_type as find_type
from autokernel_hf.kernels import layers_source
from autokernel_hf.kernels.base import KernelType
from autokernel_hf.records import Built, Candidate, CompileReport, Resources
from autokernel_hf.triton_compile import Answer, Request

__all__ = ["build", "cache_root", "compile_only", "cpu_levels", "load"]

log = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 300.0
_RESOURCES = "resources.json"
DEFAULT_CUDA_ARCHS = ("9.0a",)
TORCH_TARGET = "0x020b000000000000ULL"  # 2.11, as the variant's name says

CPP_FLAGS = ("-O3", "-std=c++20", "-fopenmp", "-fvisibility=hidden")
CUDA_FLAGS = ("-O3", "-std=c++20", "--expt-relaxed-constexpr", "-lineinfo")
# What makes a library fit to be loaded beside others: its statics are its own, and it names no path of this machine.
_LIBRARY_FLAGS = ("-fPIC", "-fno-gnu-unique")
_BINDING_FLAGS = ("-O2", "-std=c++20", "-fvisibility=hidden", *_LIBRARY_FLAGS)


def build(candidate: Candidate, *, archs: tuple[str, ...] = (), device: str = "cpu") -> Built:
    """The package variant of a candidate, from the cache or made now.

    Args:
        archs: CUDA architectures of the binary, as the Kernel Hub writes them: 8.0, 9.0a, 9.0+PTX. Empty: that of
            the GPU here where `device` is one, else 9.0a.
        device: Where it is to run: cpu, cuda, cuda:1.

    Raises:
        CandidateError: The file breaks the candidate contract.
        CompileError: It does not compile; the message shows the candidate's own lines.
        ToolMissingError: A compiler is not installed.
        UsageError: There is no such kernel type.
    """
    started = time.monotonic()
    recipe = _recipe(candidate, archs, device)
    folder = cache_root() / "builds" / recipe.id
    cached = folder_once(folder, lambda temporary: _make(recipe, temporary))
    return Built(
        id=recipe.id,
        kernel_type=candidate.kernel_type,
        backend=candidate.backend,
        path=str(folder / recipe.id),
        variant=recipe.variant,
        archs=recipe.archs,
        resources=Resources.load(folder / _RESOURCES),
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
        if candidate.backend == "cpp":
            if arch not in cpu_levels():
                raise UsageError(
                    f"A cpp candidate cannot be compiled for {arch!r} here.",
                    remedy=f"Choose from {', '.join(cpu_levels()) or 'none: this is no x86-64 machine'}.",
                )
            _compile_objects(_recipe(candidate, (), "cpu").only(arch), work, [])
            report = CompileReport(
                arch=arch, registers=None, spill_bytes=None, shared_bytes=None, seconds=0.0
            )
        elif candidate.backend == "cuda":
            output = _compile_objects(_recipe(candidate, (_arch_name(arch),), "cpu"), work, [])
            uses = toolchain.ptxas_uses(output)
            names = toolchain.demangled([use.name for use in uses])
            report = CompileReport(
                arch=arch,
                **toolchain.largest(uses).model_dump(),
                seconds=0.0,
                log="\n".join(
                    f"{name}: {use.registers} registers, {use.spill_bytes} bytes spilled, {use.shared_bytes} bytes shared"
                    for name, use in zip(names, uses, strict=True)
                ),
            )
        else:
            report = _compile_triton(candidate, domain.dtypes, arch, work)
    return report.model_copy(update={"seconds": time.monotonic() - started})


# Dynamic and static shared memory that one block may have, by compute capability times ten.
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
        timeout_s=COMPILE_TIMEOUT_S,
        env=environment,
    )
    if not answer.exists():
        raise CompileError(f"Triton's compiler ended with status {status}:\n{output.strip()[-2000:]}")
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
    type: KernelType
    variant: str
    archs: tuple[str, ...]
    files: tuple[tuple[str, str], ...]  # the variant's Python files, with the id in place
    binding: str  # C++, empty for triton

    def only(self, arch: str) -> Recipe:
        """For one architecture: the id is no longer its own."""
        return replace(self, archs=(arch,))


def _recipe(candidate: Candidate, archs: tuple[str, ...], device: str) -> Recipe:
    type_ = find_type(candidate.kernel_type)
    domain = contract.check(candidate, type_)
    layers = layers_source(type_.name)
    templates = {
        "__init__.py": variant.init_source(type_, has_layers=layers is not None),
        "_ops.py": variant.ops_source(type_, candidate.backend, domain),
    }
    if layers is not None:
        templates["layers.py"] = layers
    source = ""
    tools: tuple[str, ...] = ()
    if candidate.backend == "triton":
        name, archs = "torch-cuda", ()
        templates["op.py"] = candidate.source
    elif candidate.backend == "cpp":
        archs = cpu_levels()
        name = f"torch-stable-abi211-cpu-{toolchain.machine()}-linux"
        source = binding.binding_source(type_, "cpp", archs)
        tools = (toolchain.gxx().version, *CPP_FLAGS, *_LIBRARY_FLAGS, *_BINDING_FLAGS)
    else:
        archs = archs or _local_archs(device)
        name = f"torch-stable-abi211-{_cuda_tag()}-{toolchain.machine()}-linux"
        source = binding.binding_source(type_, "cuda")
        tools = (
            toolchain.nvcc().version,
            toolchain.gxx().version,
            *CUDA_FLAGS,
            *_LIBRARY_FLAGS,
            *_BINDING_FLAGS,
        )
    if source:
        source_parts = (binding.RUNTIME.read_text(), binding.MODULE_SOURCE, binding.PRELUDE_SOURCE)
        tools = (*tools, *source_parts)
    content = json.dumps([candidate.source, candidate.backend, name, archs, templates, source, tools])
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    id_ = f"_ak_{type_.name}_{candidate.backend}_{digest}"
    files = tuple(
        (file, text.replace(variant.ID, id_) if file == "_ops.py" else text)
        for file, text in templates.items()
    )
    return Recipe(
        id=id_, candidate=candidate, type=type_, variant=name, archs=archs, files=files, binding=source
    )


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
    resources = Resources()
    if recipe.candidate.backend != "triton":
        work = folder / "work"
        work.mkdir()
        resources = _compile(recipe, work)
        (work / f"{recipe.id}.abi3.so").rename(made / f"{recipe.id}.abi3.so")
        shutil.rmtree(work)
    resources.save(folder / _RESOURCES)


def _compile(recipe: Recipe, work: Path) -> Resources:
    parts = _parts(recipe)
    (work / "module.c").write_text(binding.MODULE_SOURCE, encoding="utf-8")
    output = _compile_objects(recipe, work, list(_link_edges(recipe, parts)))
    if recipe.candidate.backend == "cpp":
        _refuse_initializers(work / f"{_short(recipe.archs[-1]) if recipe.archs else 'only'}.o")
    return toolchain.largest(toolchain.ptxas_uses(output))


def _compile_objects(recipe: Recipe, work: Path, more: list[Edge]) -> str:
    """Compile the candidate, and go on with `more`; return what the compilers printed.

    Raises:
        CandidateError, CompileError: It does not compile.
    """
    backend, suffix = recipe.candidate.backend, recipe.candidate.suffix
    parts = _parts(recipe)
    file_name = f"kernel{suffix}"
    (work / file_name).write_text(recipe.candidate.source, encoding="utf-8")
    (work / f"unit{suffix}").write_text(_unit(recipe.type, file_name), encoding="utf-8")
    edges = list(_cpp_edges(recipe, parts) if backend == "cpp" else _cuda_edges(recipe, parts, work))
    status, output = _ninja(work, [*edges, *more])
    if status != 0:
        raise _explained(output, recipe, file_name)
    return output


def _unit(type_: KernelType, file_name: str) -> str:
    """What the compiler sees: the candidate, and its launcher declared again, so that a wrong one has an error."""
    return f'#include "{file_name}"\n{binding.launcher_prototype(type_)};\n'


def _refuse_initializers(object_file: Path) -> None:
    """A static with a constructor runs when the library is loaded, in code of an instruction set that may be missing."""
    sections = subprocess.run(
        ["readelf", "-SW", str(object_file)], capture_output=True, text=True, timeout=60
    ).stdout
    if re.search(r"\.(init_array|ctors)\b", sections):
        raise CompileError(
            "The candidate has a static variable that is initialized when the library is loaded.",
            remedy="Make it constexpr, or a static inside the function that uses it; do not include <iostream>.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One command of a build: what it makes, from what."""

    output: str
    inputs: tuple[str, ...]
    command: str


def _ninja(work: Path, edges: Sequence[Edge]) -> tuple[int, str]:
    """Run the commands, as many at once as there are cores; return the exit status and what they printed."""
    lines = ["ninja_required_version = 1.5", ""]
    for i, edge in enumerate(edges):
        inputs = " ".join(re.sub(r"([$ :])", r"$\1", path) for path in edge.inputs)
        command = edge.command.replace("$", "$$")
        lines += [f"rule r{i}", f"  command = {command}", f"build {edge.output}: r{i} {inputs}", ""]
    (work / "build.ninja").write_text("\n".join(lines), encoding="utf-8")
    # nvcc writes the working folder into line tables; by this name it is nobody's.
    environment = {"LC_ALL": "C", "PWD": "/proc/self/cwd"}
    status, output = toolchain.run(
        [toolchain.ninja().path, "-v"], cwd=work, timeout_s=COMPILE_TIMEOUT_S, env=environment
    )
    if status != 0:
        log.debug("ninja in %s:\n%s", work, output)
    return status, output


def _explained(output: str, recipe: Recipe, file_name: str) -> AutokernelError:
    """A failed build as an error about the candidate."""
    error = toolchain.compile_error(output, recipe.candidate.source, file_name)
    prototype = f"Define: {binding.launcher_prototype(recipe.type)}"
    if error.about_candidate:
        return error
    if re.search(r"^(\S*/)?unit\.(cpp|cu)[:(]\d+", output, re.MULTILINE):
        where = re.search(rf"{file_name}:(\d+):\d+: note: previous declaration", output)
        line = f"Line {where[1]}: the" if where else "The"
        return CandidateError(
            f"{line} launcher {recipe.type.name} has another signature than the schema.", remedy=prototype
        )
    if re.search(rf"hidden symbol [`']\S*{recipe.type.name}\S*' isn't defined", output):
        return CandidateError(f"The candidate defines no launcher {recipe.type.name}.", remedy=prototype)
    return error


def _short(level: str) -> str:
    return level.rsplit("-", 1)[-1]


def _include(parts: Path) -> str:
    """Our headers, by names that no error check embeds."""
    return f"-include {shlex.quote(str(parts / 'prelude.h'))} -I{shlex.quote(str(parts))} {_unnamed(parts)}"


def _unnamed(*folders: Path) -> str:
    return " ".join(f"-ffile-prefix-map={shlex.quote(str(folder))}=." for folder in folders)


def _cpp_edges(recipe: Recipe, parts: Path) -> Iterator[Edge]:
    """The candidate once an instruction set, each shut off from the others.

    Inline functions and templates of the standard library are the same symbols in all of them, and the linker would
    keep one, perhaps of a set that the processor lacks: so they are made local, and the launcher gets its set's name.
    """
    compiler = shlex.quote(toolchain.gxx().path)
    name = recipe.type.name
    for level in recipe.archs or ("",):
        short = _short(level) or "only"
        flags = " ".join((*CPP_FLAGS, *_LIBRARY_FLAGS, f"-march={level}" if level else ""))
        yield Edge(
            output=f"{short}.raw.o",
            inputs=("unit.cpp",),
            command=f"{compiler} {flags} -w {_include(parts)} -c unit.cpp -o {short}.raw.o",
        )
        renamed = f"ak_{name}_{short}" if level else name
        symbols = {name: renamed, f"{name}_workspace": f"{renamed}_workspace"}
        keep = " ".join(f"-G {old} -G {new}" for old, new in symbols.items())
        rename = " ".join(f"--redefine-sym {old}={new}" for old, new in symbols.items() if old != new)
        yield Edge(
            output=f"{short}.o",
            inputs=(f"{short}.raw.o",),
            command=f"{compiler} -r -nostdlib -Wl,--force-group-allocation {short}.raw.o -o {short}.one.o"
            f" && objcopy {keep} {rename} {short}.one.o {short}.o",
        )
    # A name that only torch, or a BLAS inside of it, could supply would be found when the library is loaded there.
    yield Edge(
        output="closed",
        inputs=(f"{short}.raw.o",),
        command=f"{compiler} -shared -Wl,-z,defs {short}.raw.o -o closed -lgomp -lm",
    )


def _cuda_edges(recipe: Recipe, parts: Path, work: Path) -> Iterator[Edge]:
    host = toolchain.gxx()
    (work / "toolkit").symlink_to(toolchain.cuda_home())
    flags = " ".join((*CUDA_FLAGS, *map(_gencode, recipe.archs), "-Xptxas -v"))
    host_flags = ",".join(("-fvisibility=hidden", *_LIBRARY_FLAGS, *_unnamed(parts).split()))
    yield Edge(
        output="cuda.o",
        inputs=("unit.cu",),
        command=f"toolkit/bin/nvcc {flags} -ccbin {shlex.quote(host.path)} -w -Xcompiler {host_flags}"
        f" --pre-include {shlex.quote(str(parts / 'prelude.h'))} -I{shlex.quote(str(parts))}"
        " -c /proc/self/cwd/unit.cu -o cuda.o",
    )
    yield Edge(
        output="closed",
        inputs=("cuda.o",),
        command=f"{shlex.quote(host.path)} -shared -Wl,-z,defs cuda.o -o closed {_cudart()} -lm",
    )


def _gencode(arch: str) -> str:
    """nvcc's words for an architecture as the Kernel Hub writes it: 8.0, 9.0a, 9.0+PTX."""
    match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", arch)
    if match is None:
        raise UsageError(f"{arch!r} is not a CUDA architecture.", remedy="Write it as 8.0, 9.0a or 9.0+PTX.")
    number = f"{match[1]}{match[2]}{match[3]}"
    code = f"[sm_{number},compute_{number}]" if match[4] else f"sm_{number}"
    return f"-gencode arch=compute_{number},code={code}"


def _cudart() -> str:
    """How to link the CUDA runtime: shared, as torch does.

    A static one would be a second runtime in the process and needs newer symbols of glibc than manylinux_2_28 has;
    the shared one of the same major version is always there already, since torch's libraries need it.
    """
    home = toolchain.cuda_home()
    for folder in (
        "lib64",
        "lib",
        f"targets/{toolchain.machine()}-linux/lib",
        f"lib/{toolchain.machine()}-linux-gnu",
    ):
        if (home / folder / "libcudart.so").exists():
            return f"-L{shlex.quote(str(home / folder))} -lcudart"
    raise ToolMissingError(f"libcudart.so was not found in {home}.", remedy="Install the whole CUDA toolkit.")


def _link_edges(recipe: Recipe, parts: Path) -> Iterator[Edge]:
    compiler = shlex.quote(toolchain.gxx().path)
    yield Edge(
        output="module.o",
        inputs=("module.c",),
        command=f"{compiler} -x c -O1 -fPIC -DTORCH_EXTENSION_NAME={recipe.id}"
        f" -isystem {shlex.quote(toolchain.python_include())} -c module.c -o module.o",
    )
    if recipe.candidate.backend == "cuda":
        objects: tuple[str, ...] = ("cuda.o",)
        libraries = f"-ltorch_cpu -ltorch_cuda {_cudart()}"
    else:
        objects = tuple(f"{_short(level)}.o" for level in recipe.archs) or ("only.o",)
        # No libgomp: torch brings its own, under a name that differs among builds, and a second OpenMP runtime in one
        # process would have a second pool of threads. Its symbols are found through libtorch_cpu.
        libraries = "-ltorch_cpu"
    binding_object = shlex.quote(str(parts / "binding.o"))
    output = f"{recipe.id}.abi3.so"
    yield Edge(
        output=output,
        inputs=("module.o", *objects, "closed"),
        command=f"{compiler} -shared module.o {binding_object} {' '.join(objects)} -o {output} -s"
        f" -Wl,-z,now -Wl,-z,relro -Wl,--build-id=none -Wl,--version-script={shlex.quote(str(parts / 'exports'))}"
        f" -L{shlex.quote(str(parts))} -Wl,--no-as-needed {libraries} -Wl,--as-needed -lm",
    )


# --- what all candidates of a type share ---------------------------------------------------------------------------


def _parts(recipe: Recipe) -> Path:
    """The folder of the compiled binding of a kernel type, with the headers that a candidate is compiled with.

    The libraries beside it are empty: they only leave torch's names in the result, whatever torch is here.
    """
    backend = recipe.candidate.backend
    compiler = toolchain.gxx()
    torch_headers = Path(torch.__file__).parent / "include"
    files = {
        "autokernel.h": binding.HEADER.read_text(encoding="utf-8"),
        "binding.h": binding.RUNTIME.read_text(encoding="utf-8"),
        "prelude.h": binding.PRELUDE_SOURCE,
        "binding.cpp": recipe.binding,
        "exports": "{ global: PyInit_*; local: *; };\n",
    }
    flags = (
        *_BINDING_FLAGS,
        f"-DTORCH_TARGET_VERSION={TORCH_TARGET}",
        *(("-DUSE_CUDA",) if backend == "cuda" else ()),
    )
    key = hashlib.sha256(
        json.dumps([files, flags, compiler.version, torch.__version__]).encode()
    ).hexdigest()[:16]
    folder = cache_root() / "bindings" / f"{recipe.type.name}-{backend}-{key}"

    def make(temporary: Path) -> None:
        for name, text in files.items():
            (temporary / name).write_text(text, encoding="utf-8")
        program = shlex.quote(compiler.path)
        edges = [
            Edge(
                output="binding.o",
                inputs=("binding.cpp",),
                command=f"{program} {' '.join(flags)} -include prelude.h -I. -isystem {shlex.quote(str(torch_headers))}"
                f" {_unnamed(torch_headers, temporary)} -c binding.cpp -o binding.o",
            )
        ]
        for library in ("torch_cpu", "torch_cuda") if backend == "cuda" else ("torch_cpu",):
            edges.append(
                Edge(
                    output=f"lib{library}.so",
                    inputs=("exports",),
                    command=f"{program} -shared -nostdlib -x c /dev/null -Wl,-soname,lib{library}.so -o lib{library}.so",
                )
            )
        status, output = _ninja(temporary, edges)
        if status != 0:  # no candidate's fault: a compiler or a torch that this binding does not fit
            raise toolchain.compile_error(output, recipe.binding, "binding.cpp")

    folder_once(folder, make)
    return folder
