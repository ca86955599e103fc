"""The compilers of this machine: where they are, what they are, and how they are run and listened to."""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from autokernel_hf.errors import CompileError, ToolMissingError
from autokernel_hf.records import Resources

log = logging.getLogger(__name__)

MAX_ERRORS = 8
DEFAULT_CUDA_HOME = "/usr/local/cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A program and its version, as it tells it itself."""

    path: str
    version: str


@cache
def gxx() -> Tool:
    """The C++ compiler: `CXX` if set, else g++.

    Raises:
        ToolMissingError: There is none.
    """
    path = shutil.which(os.environ.get("CXX", "g++"))
    if path is None:
        raise ToolMissingError(
            "No C++ compiler (g++) is on PATH.", remedy="Install one: apt-get install g++ (or set CXX)."
        )
    version = _first_line([path, "--version"])
    number = re.search(r"(\d+)\.\d+", version)
    if "clang" not in version and number is not None and int(number[1]) < 11:
        raise ToolMissingError(
            f"{path} is too old ({version}): it does not know the instruction sets x86-64-v2 to -v4.",
            remedy="Install g++ 11 or later, and set CXX to it.",
        )
    return Tool(path=path, version=version)


def need_binutils() -> None:
    """The programs that take object files apart, which come with a compiler's linker.

    Raises:
        ToolMissingError: One is missing.
    """
    for program in ("objcopy", "readelf"):
        if shutil.which(program) is None:
            raise ToolMissingError(
                f"{program} is not on PATH.", remedy="Install it: apt-get install binutils."
            )


@cache
def nvcc() -> Tool:
    """NVIDIA's compiler: on PATH, in CUDA_HOME, or in its usual place.

    Raises:
        ToolMissingError: There is none.
    """
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), DEFAULT_CUDA_HOME]
    places = [str(Path(home) / "bin" / "nvcc") for home in homes if home]
    path = next(filter(None, map(shutil.which, ["nvcc", *places])), None)
    if path is None:
        raise ToolMissingError(
            "No CUDA compiler (nvcc) was found on PATH or in CUDA_HOME.",
            remedy="Install the CUDA toolkit (12.8 or later) or use the triton backend.",
        )
    text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60).stdout
    match = re.search(r"release ([\d.]+), V([\d.]+)", text)
    if match is None:
        raise ToolMissingError(f"{path} does not tell its version.", remedy="Reinstall the CUDA toolkit.")
    return Tool(path=path, version=match[2])


@cache
def cuda_home() -> Path:
    """The folder of the CUDA toolkit that nvcc belongs to; a wrapper script on PATH names it by its --dryrun."""
    path = Path(nvcc().path)
    if (path.resolve().parent.parent / "include" / "cuda_runtime.h").exists():
        return path.resolve().parent.parent
    done = subprocess.run(
        [str(path), "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True, timeout=60
    )
    match = re.search(r"^#\$ TOP=(.*)$", done.stderr, re.MULTILINE)
    return (path.parent / match[1]).resolve() if match else path.parent.parent


@cache
def ninja() -> Tool:
    """ninja, on PATH or from its Python package.

    Raises:
        ToolMissingError: There is none.
    """
    path = shutil.which("ninja")
    if path is None:
        try:
            from ninja import BIN_DIR
        except ImportError:
            raise ToolMissingError("ninja is not installed.", remedy="pip install ninja") from None
        path = str(Path(BIN_DIR) / "ninja")
    return Tool(path=path, version=_first_line([path, "--version"]))


@cache
def python_include() -> str:
    """The folder of Python.h.

    Raises:
        ToolMissingError: Python's headers are not installed.
    """
    folder = sysconfig.get_path("include")
    if not (Path(folder) / "Python.h").exists():
        raise ToolMissingError(
            f"Python.h is not in {folder}.", remedy="Install Python's headers: apt-get install python3-dev."
        )
    return folder


def machine() -> str:
    """The processor's name in variant names: x86_64, aarch64."""
    return platform.machine().lower()


def _first_line(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return (done.stdout or done.stderr).splitlines()[0].strip()


# --- running ------------------------------------------------------------------------------------------------------


def run(
    command: Sequence[str], *, cwd: Path, timeout_s: float, env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run a program in a session of its own; return its exit status and its output, both streams in one.

    Whatever ends this call (the time limit, an interrupt), no process of that session survives it.

    Raises:
        CompileError: The program did not end in time.
    """
    process = subprocess.Popen(
        command,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=None if env is None else {**os.environ, **env},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        end_session(process.pid)
        raise CompileError(
            f"The compiler did not end within {timeout_s:.0f} s.",
            remedy="Simplify the candidate: fewer template instances, less unrolling.",
        ) from None
    except BaseException:
        end_session(process.pid)
        raise
    finally:
        if process.poll() is None:
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
    return process.returncode, output.decode(errors="replace")


def end_session(session: int) -> None:
    """Kill every process of a session. ninja gives each of its children a group of its own, so a group is not enough."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        members = _session_members(session)
        if not members:
            return
        for pid in members:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)
    log.warning("processes of session %d did not end: %s", session, _session_members(session))


def _session_members(session: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # After the name, which may hold anything, in parentheses: state, parent, group, session.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            members.append(int(entry.name))
    return members


# --- listening ----------------------------------------------------------------------------------------------------

_GCC = re.compile(
    r"^(?P<file>[^\s:()]+):(?P<line>\d+):(?:(?P<column>\d+):)? (?P<kind>fatal error|error): (?P<text>.*)$"
)
_NVCC = re.compile(
    r"^(?P<file>[^\s:()]+)\((?P<line>\d+)\): (?P<kind>error|catastrophic error): (?P<text>.*)$"
)
_LINK = re.compile(r"undefined reference to [`'](?P<symbol>[^']+)'")
_NVCC_ITSELF = re.compile(r"^nvcc fatal\s*: (?P<text>.*)$", re.MULTILINE)
_PTXAS = re.compile(r"^ptxas\S* (?:fatal|error)\s*: (?P<text>.*)$")


class SourceError(CompileError):
    """A compile error that knows whether it is about the candidate's own lines."""

    about_candidate: bool = False


def compile_error(output: str, source: str, file_name: str) -> SourceError:
    """A compiler's output as an error about the candidate: its own lines with their numbers, and the words to them.

    Args:
        output: What the compiler printed.
        source: The candidate.
        file_name: The name under which the compiler saw it.
    """
    if (refusal := _NVCC_ITSELF.search(output)) is not None:
        return SourceError(
            f"nvcc itself refuses: {refusal['text']}.",
            remedy="`nvcc --list-gpu-code` names the architectures that it knows.",
        )
    lines = source.splitlines()
    messages: dict[str, None] = {}  # in order, each once: three instruction sets complain thrice
    elsewhere: dict[str, None] = {}
    for text in output.splitlines():
        match = _GCC.match(text) or _NVCC.match(text)
        if match is None:
            if (link := _LINK.search(text)) is not None:
                messages.setdefault(
                    f"error: {link['symbol']} is neither defined here nor part of the C or C++ library, OpenMP or CUDA"
                )
            elif (ptxas := _PTXAS.match(text)) is not None:
                messages.setdefault(f"ptxas: {ptxas['text']}")
            continue
        words = f"error: {match['text']}"
        if Path(match["file"]).name != file_name:
            elsewhere.setdefault(f"{Path(match['file']).name}:{match['line']}: {words}")
            continue
        number = int(match["line"])
        quoted = f"\n{number:6} | {lines[number - 1]}" if 0 < number <= len(lines) else ""
        messages.setdefault(f"{file_name}:{number}: {words}{quoted}")
    found = list(messages) or list(elsewhere)
    if not found:
        found = [output.strip()[-2000:] or "The compiler failed without a word."]
    more = f"\n... and {len(found) - MAX_ERRORS} more" if len(found) > MAX_ERRORS else ""
    error = SourceError(f"{file_name} does not compile:\n" + "\n".join(found[:MAX_ERRORS]) + more)
    error.about_candidate = bool(messages)
    return error


@dataclass(frozen=True, slots=True, kw_only=True)
class PtxasUse:
    """What `ptxas -v` says of one kernel."""

    name: str  # as the linker sees it
    arch: str
    registers: int
    spill_bytes: int  # stores and loads
    shared_bytes: int  # static


def ptxas_uses(output: str) -> list[PtxasUse]:
    """What `ptxas -v` says of each kernel, in its order."""
    uses = []
    for part in re.split(r"^ptxas\S* info\s*: Compiling entry function ", output, flags=re.MULTILINE)[1:]:
        head = re.match(r"'([^']+)' for '([^']+)'", part)
        registers = re.search(r"Used (\d+) registers", part)
        if head is None or registers is None:
            continue
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        shared = re.search(r"(\d+) bytes smem", part)
        uses.append(
            PtxasUse(
                name=head[1],
                arch=head[2],
                registers=int(registers[1]),
                spill_bytes=int(spills[1]) + int(spills[2]) if spills else 0,
                shared_bytes=int(shared[1]) if shared else 0,
            )
        )
    return uses


def largest(uses: Sequence[PtxasUse]) -> Resources:
    """The most that any of the kernels takes; nothing known where there is none."""
    if not uses:
        return Resources()
    return Resources(
        registers=max(u.registers for u in uses),
        spill_bytes=max(u.spill_bytes for u in uses),
        shared_bytes=max(u.shared_bytes for u in uses),
    )


def demangled(names: Sequence[str]) -> list[str]:
    """C++ names without their parameters, as c++filt writes them; as they are where it is missing."""
    program = shutil.which("c++filt")
    if program is None or not names:
        return list(names)
    done = subprocess.run([program], input="\n".join(names), capture_output=True, text=True, timeout=60)
    plain = [re.sub(r"\(anonymous namespace\)::|^void ", "", line) for line in done.stdout.splitlines()]
    return [line.split("(", 1)[0] for line in plain]
