"""Compiled candidates: from one C++ or CUDA file, with the binding of its type, to one library.

ninja runs the compilers. The binding is compiled once a type and kept in the cache, so that a changed candidate costs
its own compilation and a link.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from autokernel_hf import binding, machine_code, toolchain
from autokernel_hf.cache import cache_root, folder_once
from autokernel_hf.errors import AutokernelError, CandidateError, CompileError, ToolMissingError, UsageError
from autokernel_hf.kernels.base import KernelType
from autokernel_hf.records import Candidate, Resources

log = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 300.0
TORCH_TARGET = "0x020b000000000000ULL"  # 2.11, as the variant's name says

CPP_FLAGS = ("-O3", "-std=c++20", "-fopenmp", "-fvisibility=hidden")
# nvcc's -O is for the code of the host, which only launches: a second less than -O3, and the same code for the device.
CUDA_FLAGS = ("-O1", "-std=c++20", "--expt-relaxed-constexpr", "-lineinfo")
_SPLIT = "--split-compile=8"  # threads; a fixed count, so that every machine makes the same bytes
# What makes a library fit to be loaded beside others: its statics are its own, and it names no path of this machine.
_LIBRARY_FLAGS = ("-fPIC", "-fno-gnu-unique")
# As the linker, the assembler and their like say it; not what a candidate's own line makes a compiler say.
_DISK_FULL = re.compile(
    r"^(?!kernel\.(?:cpp|cu)[:(]|\s*\d*\s*\|).*(No space left on device|Disk quota exceeded)", re.MULTILINE
)
# nvcc's line tables hold the time at which a source was written; 1980 is as good as any.
_SOURCE_TIME = 315532800
# By a name that is the same on every machine, wherever the folder is.
_CUDA_INCLUDE = "--pre-include parts/prelude.h -Iparts"
_BINDING_FLAGS = ("-O2", "-std=c++20", "-fvisibility=hidden", *_LIBRARY_FLAGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A candidate to be compiled.

    Args:
        id: The name of the module.
        archs: CUDA architectures, or instruction sets; none is one build with the compiler's defaults.
        binding: The C++ binding of the type.
    """

    id: str
    type: KernelType
    candidate: Candidate
    archs: tuple[str, ...]
    binding: str


def ingredients(backend: str) -> tuple[str, ...]:
    """All that goes into a library beside the candidate and its binding: flags, compilers, our own C and C++."""
    compilers = [toolchain.gxx().version]
    flags = [*_LIBRARY_FLAGS, *_BINDING_FLAGS]
    if backend == "cuda":
        compilers.append(toolchain.nvcc().version)
        flags += [*_cuda_flags(), _CUDA_INCLUDE, str(_SOURCE_TIME)]
    else:
        flags += CPP_FLAGS
    sources = (binding.RUNTIME.read_text(encoding="utf-8"), binding.MODULE_SOURCE, binding.PRELUDE_SOURCE)
    return (*compilers, *flags, *sources)


def compile_library(job: Job, work: Path) -> tuple[Resources, str | None]:
    """Compile and link `<id>.abi3.so` in a folder of its own.

    Returns:
        What the compiler says of the kernel, and the digest of the candidate's machine code where it can be told.

    Raises:
        CandidateError, CompileError, ToolMissingError: It does not compile, or there is no compiler.
    """
    parts = _parts(job)
    (work / "module.c").write_text(binding.MODULE_SOURCE, encoding="utf-8")
    output = compile_objects(job, work, list(_link_edges(job, parts)))
    if job.candidate.backend == "cpp":
        _refuse_initializers(work / f"{_short(job.archs[-1]) if job.archs else 'only'}.o")
    code = machine_code.digest_of([work / name for name in _objects(job)])
    return toolchain.largest(toolchain.ptxas_uses(output)), code


def _objects(job: Job) -> tuple[str, ...]:
    """The objects that the candidate itself becomes; the others are the same for all of its type."""
    if job.candidate.backend == "cuda":
        return ("cuda.o",)
    return tuple(f"{_short(level)}.o" for level in job.archs) or ("only.o",)


@contextmanager
def workplace(job: Job, beside: Path) -> Iterator[Path]:
    """An empty folder to compile in; for CUDA one whose path is the same on every machine.

    nvcc puts a hash of the source's real path into the names of what stands in a namespace without a name, and so into
    the binary: in a folder of its own name the same candidate would give other bytes each time.

    Args:
        beside: Where the folder is made otherwise.
    """
    place = beside / "work"
    if job.candidate.backend == "cuda":
        fixed = Path("/tmp") / f"autokernel_hf-{job.id}"  # noqa: S108 - made for this user alone, or not used
        try:
            if (
                fixed.stat().st_uid == os.getuid()
                and time.time() - fixed.stat().st_mtime > 2 * COMPILE_TIMEOUT_S
            ):
                shutil.rmtree(fixed)  # left by a process that was killed
        except FileNotFoundError:
            pass
        try:
            fixed.mkdir(mode=0o700)
            place = fixed
        except FileExistsError:
            log.warning(
                "%s is in use: this build is right, but another build of it may give other bytes.", fixed
            )
    if place.parent == beside:
        place.mkdir()
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def compile_objects(job: Job, work: Path, more: Sequence[Edge] = ()) -> str:
    """Compile the candidate, and go on with `more`; return what the compilers printed.

    Raises:
        CandidateError, CompileError: It does not compile.
        AutokernelError: The disk is full.
    """
    backend, suffix = job.candidate.backend, job.candidate.suffix
    parts = _parts(job)
    file_name = f"kernel{suffix}"
    (work / file_name).write_text(job.candidate.source, encoding="utf-8")
    (work / f"unit{suffix}").write_text(_unit(job.type, file_name), encoding="utf-8")
    for file in (file_name, f"unit{suffix}"):
        os.utime(work / file, (_SOURCE_TIME, _SOURCE_TIME))
    edges = list(_cpp_edges(job, parts) if backend == "cpp" else _cuda_edges(job, parts, work))
    status, output = _ninja(work, [*edges, *more])
    if status != 0:
        raise _explained(output, job, file_name)
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
    """Run the commands, as many at once as there are cores; return the exit status and what they printed.

    Raises:
        AutokernelError: The disk is full.
    """
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
        full = _DISK_FULL.search(output)
        if full is not None:
            # Nothing that the candidate could help: a verdict on it would be wrong.
            raise AutokernelError(
                f"The disk is full: a compiler could not write its output ({full[1]}).",
                remedy=f"Free some space in {cache_root()} and {tempfile.gettempdir()}, or set AUTOKERNEL_HF_CACHE "
                "and TMPDIR to folders on another disk.",
            )
    return status, output


def _explained(output: str, job: Job, file_name: str) -> AutokernelError:
    """A failed build as an error about the candidate."""
    error = toolchain.compile_error(output, job.candidate.source, file_name)
    prototype = f"Define: {binding.launcher_prototype(job.type)}"
    # The check that a candidate is closed comes first where it calls the launcher itself.
    missing = rf"(undefined reference to|hidden symbol) [`'](ak_)?{job.type.name}(_v\d)?'"
    if re.search(missing, output):
        return CandidateError(f"The candidate defines no launcher {job.type.name}.", remedy=prototype)
    if error.about_candidate:
        return error
    if re.search(r"^(\S*/)?unit\.(cpp|cu)[:(]\d+", output, re.MULTILINE):
        where = re.search(rf"{file_name}:(\d+):\d+: note: previous declaration", output)
        line = f"Line {where[1]}: the" if where else "The"
        return CandidateError(
            f"{line} launcher {job.type.name} has another signature than the schema.", remedy=prototype
        )
    return error


def _short(level: str) -> str:
    return level.rsplit("-", 1)[-1]


def _include(parts: Path) -> str:
    """Our headers, by names that no error check embeds."""
    return f"-include {shlex.quote(str(parts / 'prelude.h'))} -I{shlex.quote(str(parts))} {_unnamed(parts)}"


def _unnamed(*folders: Path) -> str:
    return " ".join(f"-ffile-prefix-map={shlex.quote(str(folder))}=." for folder in folders)


def _cpp_edges(job: Job, parts: Path) -> Iterator[Edge]:
    """The candidate once an instruction set, each shut off from the others.

    Inline functions and templates of the standard library are the same symbols in all of them, and the linker would
    keep one, perhaps of a set that the processor lacks: so they are made local, and the launcher gets its set's name.
    """
    compiler = shlex.quote(toolchain.gxx().path)
    toolchain.need_binutils()
    name = job.type.name
    for level in job.archs or ("",):
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


def _cuda_edges(job: Job, parts: Path, work: Path) -> Iterator[Edge]:
    host = toolchain.gxx()
    (work / "toolkit").symlink_to(toolchain.cuda_home())
    (work / "parts").symlink_to(parts.absolute())
    flags = " ".join((*_cuda_flags(), *map(_gencode, job.archs), "-Xptxas -v"))
    host_flags = ",".join(("-fvisibility=hidden", *_LIBRARY_FLAGS, *_unnamed(Path("parts")).split()))
    yield Edge(
        output="cuda.o",
        inputs=("unit.cu",),
        command=f"toolkit/bin/nvcc {flags} -ccbin {shlex.quote(host.path)} -w -Xcompiler {host_flags}"
        f" {_CUDA_INCLUDE} -c /proc/self/cwd/unit.cu -o cuda.o",
    )
    yield Edge(
        output="closed",
        inputs=("cuda.o",),
        command=f"{shlex.quote(host.path)} -shared -Wl,-z,defs cuda.o -o closed {_cudart()} -lm",
    )


def _cuda_flags() -> tuple[str, ...]:
    """nvcc's flags; where it can, it optimizes kernels side by side: three quarters of its time on a large file."""
    major, minor = map(int, toolchain.nvcc().version.split(".")[:2])
    return (*CUDA_FLAGS, _SPLIT) if (major, minor) >= (12, 4) else CUDA_FLAGS


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


def _link_edges(job: Job, parts: Path) -> Iterator[Edge]:
    compiler = shlex.quote(toolchain.gxx().path)
    yield Edge(
        output="module.o",
        inputs=("module.c",),
        command=f"{compiler} -x c -O1 -fPIC -DTORCH_EXTENSION_NAME={job.id}"
        f" -isystem {shlex.quote(toolchain.python_include())} -c module.c -o module.o",
    )
    if job.candidate.backend == "cuda":
        libraries = f"-ltorch_cpu -ltorch_cuda {_cudart()}"
    else:
        # No libgomp: torch brings its own, under a name that differs among builds, and a second OpenMP runtime in one
        # process would have a second pool of threads. Its symbols are found through libtorch_cpu.
        libraries = "-ltorch_cpu"
    objects = _objects(job)
    binding_object = shlex.quote(str(parts / "binding.o"))
    output = f"{job.id}.abi3.so"
    yield Edge(
        output=output,
        inputs=("module.o", *objects, "closed"),
        command=f"{compiler} -shared module.o {binding_object} {' '.join(objects)} -o {output} -s"
        f" -Wl,-z,now -Wl,-z,relro -Wl,--build-id=none -Wl,--version-script={shlex.quote(str(parts / 'exports'))}"
        f" -L{shlex.quote(str(parts))} -Wl,--no-as-needed {libraries} -Wl,--as-needed -lm",
    )


# --- what all candidates of a type share ---------------------------------------------------------------------------


def _parts(job: Job) -> Path:
    """The folder of the compiled binding of a kernel type, with the headers that a candidate is compiled with.

    The libraries beside it are empty: they only leave torch's names in the result, whatever torch is here.
    """
    backend = job.candidate.backend
    compiler = toolchain.gxx()
    torch_headers = Path(torch.__file__).parent / "include"
    files = {
        "autokernel.h": binding.HEADER.read_text(encoding="utf-8"),
        "binding.h": binding.RUNTIME.read_text(encoding="utf-8"),
        "prelude.h": binding.PRELUDE_SOURCE,
        "binding.cpp": job.binding,
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
    folder = cache_root() / "bindings" / f"{job.type.name}-{backend}-{key}"

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
            raise toolchain.compile_error(output, job.binding, "binding.cpp")

    folder_once(folder, make)
    return folder
