"""What works on this machine, what is missing, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from autokernel_hf.errors import ToolMissingError, first_line, last_words
from autokernel_hf.records import Record

if TYPE_CHECKING:
    from autokernel_hf.toolchain import Tool

# transformers' own gate on `kernels`, which it does not declare as a dependency: outside it every hook is a silent
# no-op. Read from `KERNELS_MIN_VERSION` and `KERNELS_MAX_VERSION` of each release.
_TRANSFORMERS_WANTS_KERNELS: tuple[tuple[str, str], ...] = (
    ("<5.17", ""),
    (">=5.17,<5.18", ">=0.16,<0.17"),
    (">=5.18,<5.20", ">=0.17.0,<0.18"),
    (">=5.20,<5.23", ">=0.17.2,<0.18"),
    (">=5.23,<5.25", ">=0.18.2,<0.19"),
)


class Check(Record):
    """One finding. `ok` False with an empty remedy is a limit of the machine, not a fault."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""


def examine() -> list[Check]:
    """All checks, none of which changes anything; one that fails itself is a finding, too."""
    checks: dict[str, Callable[[], Check]] = {
        "python": _python,
        "torch": lambda: _package("torch", "2.11"),
        "triton": lambda: _package("triton", "3.6"),
        "transformers": lambda: _package("transformers", "5.20"),
        "kernels": lambda: _package("kernels", "0.17.2"),
        "huggingface_hub": _hub_client,
        "transformers accepts kernels": _kernels_and_transformers,
        "kernels can reach the Hub": _kernels_and_telemetry,
        "ninja": lambda: _program("ninja", "pip install ninja"),
        "g++": _gxx,
        "git": lambda: _program("git", "install git: a run keeps its experiments in it"),
        "nvcc": _nvcc,
        "gpu": _gpu,
        "cpu threads": _openmp,
        "isolation of candidates": _isolation,
        "build cache": _cache,
        "hub": _hub,
    }
    return [_tried(name, check) for name, check in checks.items()]


def _tried(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - whatever is broken here is what a user wants to know
        return Check(
            name=name,
            ok=False,
            detail=f"could not be tried: {type(error).__name__}: {first_line(error)}",
            remedy="Install this program anew in an environment of its own.",
        )


def _python() -> Check:
    return Check(
        name="python",
        ok=sys.version_info >= (3, 10),
        detail=platform.python_version(),
        remedy="" if sys.version_info >= (3, 10) else "Use Python 3.10 or later.",
    )


def installed(name: str) -> str | None:
    """A package's version, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(name: str, minimum: str) -> Check:
    version = installed(name)
    if version is None:
        return Check(name=name, ok=False, detail="not installed", remedy=f"pip install '{name}>={minimum}'")
    ok = Version(version) >= Version(minimum)
    return Check(name=name, ok=ok, detail=version, remedy="" if ok else f"pip install '{name}>={minimum}'")


def _hub_client() -> Check:
    """Kernels load with older clients; what a client may write to was widened later."""
    found = _package("huggingface_hub", "1.31")
    if found.ok and Version(found.detail) < Version("2.3"):
        return found.model_copy(
            update={"detail": f"{found.detail}: loads kernels, and cannot publish them (2.3 can)"}
        )
    return found


def refused_pair(transformers: str, kernels: str) -> str | None:
    """The versions of `kernels` that a version of transformers wants, if it refuses the one given; else None."""
    for releases, wanted in _TRANSFORMERS_WANTS_KERNELS:
        if SpecifierSet(releases, prereleases=True).contains(transformers):
            accepted = not wanted or SpecifierSet(wanted, prereleases=True).contains(kernels)
            return None if accepted else wanted
    return None


def _kernels_and_transformers() -> Check:
    name = "transformers accepts kernels"
    transformers, kernels = installed("transformers"), installed("kernels")
    if transformers is None or kernels is None:
        return Check(name=name, ok=False, detail="one of them is missing", remedy="Install both.")
    wanted = refused_pair(transformers, kernels)
    if wanted is None:
        return Check(name=name, ok=True, detail=f"transformers {transformers}, kernels {kernels}")
    return Check(
        name=name,
        ok=False,
        detail=f"transformers {transformers} silently ignores kernels {kernels}: it wants {wanted}",
        remedy="pip install 'transformers>=5.20,<5.23' 'kernels>=0.17.2,<0.18'",
    )


def _kernels_and_telemetry() -> Check:
    name = "kernels can reach the Hub"
    names = [n for n in ("HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK") if _is_on(n)]
    version = installed("kernels") or ""
    if names and version.startswith("0.17"):
        return Check(
            name=name,
            ok=False,
            detail=f"kernels {version} sends an illegal User-Agent while {names[0]} is set: every Hub call fails",
            remedy=f"unset {' '.join(names)}",
        )
    return Check(name=name, ok=True, detail="no variable that breaks its calls is set")


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").upper() in {"1", "ON", "YES", "TRUE"}


def _program(name: str, remedy: str) -> Check:
    path = shutil.which(name)
    if path is None:
        return Check(name=name, ok=False, detail="not found", remedy=remedy)
    return Check(name=name, ok=True, detail=_version(path))


def _gxx() -> Check:
    """The C++ compiler that builds would use (`CXX`, or g++), with the programs that read what it makes."""
    from autokernel_hf.toolchain import gxx, need_binutils

    return _compiler("g++", gxx, need_binutils)


def _compiler(name: str, find: Callable[[], Tool], need: Callable[[], None] = lambda: None) -> Check:
    try:
        found = find()
        need()
    except ToolMissingError as error:
        return Check(name=name, ok=False, detail=error.message, remedy=error.remedy)
    return Check(name=name, ok=True, detail=found.version)


def _version(path: str) -> str:
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    lines = [line for line in (done.stdout or done.stderr).splitlines() if line.strip()]
    return lines[0] if lines else path


def _nvcc() -> Check:
    """The CUDA compiler that builds would use."""
    from autokernel_hf.toolchain import nvcc

    return _compiler("nvcc", nvcc)


def _ncu() -> Check:
    from autokernel_hf.counters import find_ncu

    path = find_ncu()
    if path is None:
        return Check(
            name="ncu",
            ok=False,
            detail="not found: diagnoses go without hardware counters",
            remedy="Install nsight-compute of the CUDA toolkit, if you want them.",
        )
    return Check(name="ncu", ok=True, detail=_version(path))


def _gpu() -> Check:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        detail = "none" if built else f"none, and torch {torch.__version__} is a CPU build"
        return Check(
            name="gpu", ok=False, detail=detail, remedy="Without one, kernels are C++ (--device cpu)."
        )
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Check(name="gpu", ok=True, detail=", ".join(names))


def _openmp() -> Check:
    import torch

    threads = torch.get_num_threads()
    return Check(
        name="cpu threads",
        ok=True,
        detail=f"{threads} thread{'s' if threads > 1 else ''}, {torch.backends.cpu.get_cpu_capability()}",
    )


def _isolation() -> Check:
    """Which of the walls around a candidate this system gives."""
    from autokernel_hf.judge.server import program

    name = "isolation of candidates"
    command = program("autokernel_hf.judge.server", function="probe")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode or not done.stdout:
        return Check(
            name=name,
            ok=False,
            detail=f"could not be tried: {last_words(done.stderr)}",
            remedy="Judge only candidates that you trust.",
        )
    found = json.loads(done.stdout)
    missing = "; ".join(found["not_enforced"])
    if found["namespaces"]:
        walls = (
            "namespaces; read-only files; home, Hub and temporary files hidden; no network; no capabilities"
        )
        return Check(
            name=name,
            ok=not missing,
            detail=walls + (f"; but {missing}" if missing else ""),
            remedy="Judge only candidates that you trust." if missing else "",
        )
    return Check(
        name=name,
        ok=False,
        detail=f"no namespaces; Landlock and a filter of system calls instead; {missing}",
        remedy="Allow unprivileged user namespaces, or judge only candidates that you trust.",
    )


def _cache() -> Check:
    from autokernel_hf.cache import cache_root

    path = cache_root()
    parent = next(p for p in (path, *path.parents) if p.exists())
    free = shutil.disk_usage(parent).free / 1e9
    ok = os.access(parent, os.W_OK) and free > 1
    remedy = "" if ok else "Set AUTOKERNEL_HF_CACHE to a folder that can be written and has a GB free."
    return Check(name="build cache", ok=ok, detail=f"{path}, {free:.0f} GB free", remedy=remedy)


def _hub() -> Check:
    from huggingface_hub import constants, get_token

    state = "offline (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else constants.ENDPOINT
    token = "a token is stored" if get_token() else "no token: public models only, no publishing"
    return Check(name="hub", ok=True, detail=f"{state}; {token}")


def device_tables() -> dict[str, object]:
    """The devices here and the table of known ones, for `gpus`."""
    import dataclasses

    import torch

    from autokernel_hf.gpu import device_info
    from autokernel_hf.known_gpus import KNOWN_GPUS

    names = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    return {
        "devices": [device_info(n).model_dump(mode="json") for n in names],
        "known": [dataclasses.asdict(spec) for spec in KNOWN_GPUS],
    }
