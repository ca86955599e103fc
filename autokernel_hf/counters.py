"""Hardware counters of one call of a candidate, read by Nsight Compute (`ncu`) behind the judge's walls.

The call is one of the target's own: same shapes, strides, dtypes and device as those that are timed. Only launches
between two marks are counted, between which nothing but the candidate is called, and all of them are summed: an op of two
kernels is diagnosed as a whole. Clocks are left alone. Before each launch ncu flushes the caches, as the judge does before
a call; what a second kernel would find in the cache of what the first wrote there is therefore read again.

Counters are an addition: without ncu, or where the driver keeps counters for administrators, `NoCountersError` says why.
Source: Nsight Compute CLI documentation (options, metric names); metric names as `ncu --query-metrics` lists them for GH100.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from autokernel_hf.errors import AutokernelError
from autokernel_hf.judge.sandbox import environment_for_children
from autokernel_hf.judge.server import NamespacesFirst, Spawned, behind_walls, program
from autokernel_hf.records import Candidate, Record, Workload

_TIME = "gpu__time_duration.sum"
_STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = {
    "long_scoreboard": "global or local memory",
    "short_scoreboard": "shared memory",
    "mio_throttle": "the queue to shared memory",
    "lg_throttle": "the queue to global memory",
    "barrier": "barriers",
    "membar": "memory fences",
    "wait": "fixed latencies",
    "math_pipe_throttle": "busy arithmetic units",
    "no_instruction": "instructions",
    "branch_resolving": "branches",
    "drain": "stores at the end",
    "gmma": "tensor core results",
}
"""What a warp that could not issue was waiting for, by the name of the counter."""
METRICS = (
    _TIME,
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__waves_per_multiprocessor",
    "launch__registers_per_thread",
    "smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.pct",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum",
    "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum",
    *(_STALLED.format(name) for name in STALLS),
)

_TIMEOUT_S = 60.0  # it takes some 14; the device waits meanwhile
_UNKNOWN = re.compile(r"[Ff]ailed to find metric (?:name )?['\"]?([\w.]+)")


class NoCountersError(AutokernelError):
    """Counters cannot be had here, or not of this candidate."""


class Launch(Record):
    """One launch of a kernel, with its counters by their names in ncu."""

    kernel: str
    values: dict[str, float]


class Counters(Record):
    """The counters of one call, over all of its launches: sums, and means that are weighted by the launches' times.

    Args:
        kernels: Name and number of launches, in the order of their first.
        us: The launches' time under the profiler; nothing to be compared with the judge's.
        dram_bytes: Read from and written to the GPU's memory.
        dram_pct, sm_pct, tensor_pct: Of the peak rate of memory, of the busiest unit of the multiprocessors, of tensor
            cores.
        occupancy_pct: Warps that were resident while a multiprocessor worked, of the most that fit.
        waves: Blocks over those that fit at once, of the largest launch.
        used_pct: Bytes that loads asked for, of the sectors that were moved for them.
        conflict_pct: Accesses to shared memory that repeat others because of bank conflicts.
        local_bytes: Loads and stores of spilled registers and local arrays.
        digest: Of the candidate that was counted.
        seconds: What reading them took, the device with it.
        stalls: What warps waited for (a key of STALLS), as a part of all waiting that is told apart, largest first.
    """

    kernels: tuple[tuple[str, int], ...]
    us: float
    digest: str = ""
    seconds: float = 0.0
    dram_bytes: float | None = None
    dram_pct: float | None = None
    sm_pct: float | None = None
    tensor_pct: float | None = None
    occupancy_pct: float | None = None
    waves: float | None = None
    registers: int | None = None
    used_pct: float | None = None
    conflict_pct: float | None = None
    local_bytes: float | None = None
    stalls: tuple[tuple[str, float], ...] = ()


def launches_in(text: str) -> tuple[Launch, ...]:
    """The launches in what `ncu --csv --page raw --print-units base` wrote, in their order."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    found = []
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        if not (row.get("ID") or "").isdecimal():
            continue  # the row of units
        values = {}
        for name, value in row.items():
            if name and "__" in name and value:
                try:
                    number = float(value.replace(",", ""))
                except ValueError:
                    continue  # n/a
                if math.isfinite(number):
                    values[name] = number
        found.append(Launch(kernel=row.get("Kernel Name") or "?", values=values))
    return tuple(found)


def summed(launches: Sequence[Launch]) -> Counters:
    """All launches of a call together.

    Raises:
        ValueError: There is none, or none with a time.
    """
    times = [launch.values.get(_TIME, 0.0) for launch in launches]
    if not math.fsum(times) > 0:
        raise ValueError("no launch has a time")

    def total(*names: str) -> float | None:
        found = [launch.values[n] for launch in launches for n in names if n in launch.values]
        return math.fsum(found) if found else None

    def mean(name: str) -> float | None:
        pairs = [
            (t, launch.values[name])
            for t, launch in zip(times, launches, strict=True)
            if name in launch.values
        ]
        weight = math.fsum(t for t, _ in pairs)
        return math.fsum(t * v for t, v in pairs) / weight if weight > 0 else None

    def most(name: str) -> float | None:
        return max((launch.values[name] for launch in launches if name in launch.values), default=None)

    conflicts = total("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum")
    accesses = total("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum")
    registers = most("launch__registers_per_thread")
    waiting = {name: mean(_STALLED.format(name)) or 0.0 for name in STALLS}
    whole = math.fsum(waiting.values())
    ranked = sorted(waiting.items(), key=lambda pair: -pair[1]) if whole > 0 else []
    return Counters(
        kernels=tuple(Counter(launch.kernel for launch in launches).items()),
        us=math.fsum(times) / 1e3,
        dram_bytes=total("dram__bytes_read.sum", "dram__bytes_write.sum"),
        dram_pct=mean("dram__throughput.avg.pct_of_peak_sustained_elapsed"),
        sm_pct=mean("sm__throughput.avg.pct_of_peak_sustained_elapsed"),
        tensor_pct=mean("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"),
        occupancy_pct=mean("sm__warps_active.avg.pct_of_peak_sustained_active"),
        waves=most("launch__waves_per_multiprocessor"),
        registers=None if registers is None else int(registers),
        used_pct=mean("smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.pct"),
        conflict_pct=None if conflicts is None or not accesses else 100 * conflicts / accesses,
        local_bytes=total(
            "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum", "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum"
        ),
        stalls=tuple((name, value / whole) for name, value in ranked if value > 0),
    )


def why_none(said: str) -> NoCountersError:
    """What ncu's words mean where it counted nothing."""
    if "ERR_NVGPUCTRPERM" in said or "permission to access NVIDIA GPU Performance Counters" in said:
        return NoCountersError(
            "The GPU's driver keeps hardware counters for administrators (ERR_NVGPUCTRPERM).",
            remedy="An administrator can open them: NVreg_RestrictProfilingToAdminUsers=0 as an option of the nvidia module.",
        )
    if "No kernels were profiled" in said or "no kernels were profiled" in said.lower():
        return NoCountersError(
            "ncu saw no kernel of the candidate.", remedy="Nothing is wrong with the candidate's time."
        )
    words = [line.split("== ", 1)[-1].strip() for line in said.splitlines() if line.startswith("==ERROR")]
    last = words or [line.strip() for line in said.splitlines() if line.strip()][-1:] or ["it said nothing"]
    return NoCountersError(
        f"ncu counted nothing: {last[0][:300]}", remedy="The diagnosis goes without counters."
    )


def find_ncu() -> str | None:
    """The program, on the path or where CUDA's toolkit puts it; None where there is none."""
    own = sorted(map(str, Path("/opt/nvidia/nsight-compute").glob("*/ncu")), reverse=True)
    places = ["/usr/local/cuda/bin/ncu", *own]
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [f"{home}/bin/ncu", *places] if home else places
    return shutil.which("ncu") or next((p for p in places if os.access(p, os.X_OK)), None)


# --- reading them -------------------------------------------------------------------------------------------------


class _Request(Record):
    """What is to be called, and by which program it is watched."""

    candidate: Candidate
    workload: Workload
    device: str
    ncu: str
    shared_memory: bool = False  # whether this ncu can do without the network, which is behind the walls
    path: str = ""  # of the build


class _Answer(Record):
    counters: Counters | None = None
    said: str = ""


def read(candidate: Candidate, workload: Workload, device: str) -> Counters:
    """The counters of one call of a candidate that was judged before. It takes 13 to 15 s on an H200, and the device alone.

    Raises:
        NoCountersError: They cannot be had.
    """
    ncu = find_ncu()
    if ncu is None:
        raise NoCountersError(
            "Hardware counters need Nsight Compute, and there is no `ncu` here.",
            remedy="Install nsight-compute of CUDA's toolkit.",
        )
    try:
        told = subprocess.run([ncu, "--help"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCountersError(f"{ncu} does not run: {error}", remedy="Install it anew.") from None
    request = _Request(
        candidate=candidate,
        workload=workload,
        device=device,
        ncu=ncu,
        shared_memory="--communicator" in told,
    )
    with tempfile.TemporaryDirectory(prefix="autokernel_hf-") as place:
        asked, answered = Path(place, "request.json"), Path(place, "answer.json")
        request.save(asked)
        done = subprocess.run(
            program("autokernel_hf.counters", str(asked), str(answered)),
            env=environment_for_children(os.environ, bind=False),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if not answered.exists():
            raise why_none(done.stderr)
        answer = _Answer.load(answered)
    if answer.counters is None:
        raise why_none(answer.said)
    return answer.counters.model_copy(update={"digest": candidate.digest})


def main(asked: str, answered: str) -> None:
    """Have the call made behind the walls, with the device for us alone."""
    from autokernel_hf import gpu
    from autokernel_hf.build import build

    request = _Request.load(Path(asked))
    built = build(request.candidate, device=request.device)
    request = request.model_copy(update={"path": built.path})
    with gpu.device_lock(request.device):
        _watched(request).save(Path(answered))


def _watched(request: _Request) -> _Answer:
    """The call under ncu, in namespaces or, where that counts nothing, without."""
    unknown: set[str] = set()
    said = ""

    def attempt(isolate: bool) -> Counters | None:
        nonlocal said
        while True:
            text, said = _run(request, tuple(m for m in METRICS if m not in unknown), isolate=isolate)
            try:
                return summed(launches_in(text))
            except ValueError:
                # Another chip or version has other counters: those that it does not know are left out.
                missing = {m for m in _UNKNOWN.findall(f"{text}\n{said}") if m in METRICS} - unknown - {_TIME}
                said = f"{text}\n{said}"
                if not missing:
                    return None
                unknown.update(missing)

    return _Answer(counters=NamespacesFirst().start(attempt), said=said[-4000:])


def _run(request: _Request, metrics: Sequence[str], *, isolate: bool) -> tuple[str, str]:
    """What ncu wrote into its file, and what it and the program said; both empty where there are no such walls."""
    content = request.model_dump_json().encode()

    def body(channel: int) -> int:
        own = Path(os.environ["TMPDIR"]) / "counters"
        own.mkdir()
        (own / "request.json").write_bytes(content)
        try:
            heard = subprocess.run(
                command(request, metrics),
                cwd=own,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_TIMEOUT_S,
                check=False,
            ).stdout
        except subprocess.TimeoutExpired as late:
            heard = (late.stdout or b"") + f"\n==ERROR== it did not end within {_TIMEOUT_S:.0f} s\n".encode()
        log = own / "counters.csv"
        parts = [log.read_bytes() if log.exists() else b"", heard[-4000:]]
        with socket.socket(fileno=channel) as found:
            found.sendall(json.dumps([p.decode(errors="replace") for p in parts]).encode())
        return 0

    spawned: Spawned | None = behind_walls(body, isolate=isolate)
    if spawned is None:
        return "", "no walls can be put up here"
    answer = bytearray()
    while part := spawned.channel.recv(1 << 20):
        answer += part
    spawned.wait(10.0)
    try:
        text, said = json.loads(answer)
    except ValueError:
        text, said = "", spawned.output()
    spawned.close()
    return str(text), str(said)


def command(request: _Request, metrics: Sequence[str]) -> list[str]:
    """ncu's command line, to be run in the folder that holds `request.json`."""
    watched = program("autokernel_hf.counters", "request.json", function="call")
    options = ["--csv", "--page", "raw", "--print-units", "base", "--log-file", "counters.csv"]
    options += ["--clock-control", "none", "--cache-control", "all", "--replay-mode", "kernel"]
    options += ["--profile-from-start", "off", "--metrics", ",".join(metrics)]
    options += ["--communicator", "shmem"] if request.shared_memory else []
    return [request.ncu, *options, *watched]


def call(asked: str) -> None:
    """Under ncu: call the candidate twice so that all is compiled, and once between the marks."""
    import torch

    from autokernel_hf import build
    from autokernel_hf.kernels import kernel_type
    from autokernel_hf.kernels.base import make_inputs

    request = _Request.load(Path(asked))
    torch.cuda.set_device(request.device)
    function = getattr(build.load(request.path), request.candidate.kernel_type)
    found = kernel_type(request.candidate.kernel_type)
    arguments = dict(make_inputs(found, request.workload, 1, request.device))
    with torch.no_grad():
        for _ in range(2):
            function(**arguments)
        torch.cuda.synchronize()
        marks = torch.cuda.cudart()
        marks.cudaProfilerStart()
        function(**arguments)
        torch.cuda.synchronize()
        marks.cudaProfilerStop()


if __name__ == "__main__":
    main(*sys.argv[1:])
