"""Memory-bound kernels beside all that a user would pick instead, and beside a plain copy of the same number of bytes.

    python benchmarks/kernels.py --out benchmarks/results/kernels-h200.json
    python benchmarks/kernels.py --out lab.json --only layernorm,softmax --candidate lab/*.cu --no-peers
    python benchmarks/kernels.py --out sweep.json --only reduce --backends cuda --sweep --no-peers

Every shape is first made right: a contender of ours whose output misses the float64 oracle by more than the type's own
tolerance is named and not timed. Then come rounds, in each of which every contender is called once, in random order,
with the L2 cache overwritten before it and the host far enough ahead that launches cost nothing. The yardstick takes
part in every round: a copy of the bytes that the type must move (a read, where next to nothing is written). What is told
are medians, and the median of the ratios to the yardstick within a round, with its bootstrap interval at 95 %.

What compiles at a first call does so beforehand, in a process for each type, all at once; nothing is timed meanwhile.
The first pass goes without torch.compile, whose tuning may take longer than everything else; the second repeats the
shapes of the published table with it, as long as the budget lasts. Of peers that are backward passes the forward pass is
not timed (`--only rmsnorm_backward,...`; types of gradients are measured only where they are named). CUDA graphs save launches, which are no part of these
times, so torch.compile goes without them. The host's time of a call is told beside the device's.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parent))

from check_starters import FLUSH_BYTES, inputs_on_gpu, text_of, time_limit  # noqa: E402

from autokernel_hf import build, tunables  # noqa: E402
from autokernel_hf.candidates import read_candidate  # noqa: E402
from autokernel_hf.ceilings import measure_ceilings  # noqa: E402
from autokernel_hf.errors import AutokernelError  # noqa: E402
from autokernel_hf.gpu import device_info  # noqa: E402
from autokernel_hf.judge.checks import check_values, expect  # noqa: E402
from autokernel_hf.judge.statistics import bootstrap_median  # noqa: E402
from autokernel_hf.kernels import kernel_type, starter  # noqa: E402
from autokernel_hf.records import Backend, Candidate, DeviceInfo, Interval, Record, Scalar  # noqa: E402

if TYPE_CHECKING:
    from autokernel_hf.kernels.base import KernelType
    from autokernel_hf.records import Workload

BACKENDS: tuple[Backend, ...] = ("triton", "cuda")
READS = ("cross_entropy", "reduce")  # types that write next to nothing
ROUNDS = 40
WARM_CALLS = 3
HEAD_START_CYCLES = 500_000  # some 250 us, in which the host queues a call
COMPILE_S = 40.0
GRACE_S = 10.0  # that a worker may take beyond its deadline

Shape = tuple[Mapping[str, int], Mapping[str, Scalar]]
Call = Callable[..., Any]


def rows(*shapes: tuple[int, int], **options: Scalar) -> list[Shape]:
    return [({"M": M, "N": N}, options) for M, N in shapes]


def heads(*shapes: tuple[int, int, int, int, int], **options: Scalar) -> list[Shape]:
    return [(dict(zip(("B", "Hq", "Hk", "S", "D"), shape, strict=True)), options) for shape in shapes]


def losses(*shapes: tuple[int, int], **options: Scalar) -> list[Shape]:
    return [({"N": N, "V": V}, options) for N, V in shapes]


# The shapes of the published anchors; all bfloat16 where nothing else is said.
TABLE: dict[str, list[Shape]] = {
    "rmsnorm": rows((4096, 4096), (8192, 8192), (32768, 4096), (512, 2048)),
    "layernorm": rows((4096, 4096), (8192, 8192), (8192, 768)),
    "add_norm": rows((4096, 4096), (8192, 8192), (512, 2048)) + rows((8192, 768), kind="layer"),
    "gated_activation": rows((4096, 11008), (512, 8192), kind="silu"),
    "activation": rows((4096, 11008), kind="silu") + rows((16384, 8192), kind="gelu_tanh"),
    "reduce": rows((4096, 4096), (8192, 8192), (64, 1048576)),
    "rotary_embedding": heads((1, 32, 8, 2048, 128), (8, 32, 8, 4096, 128)),
    "softmax": rows((4096, 4096), (8192, 8192), (4096, 50257), (32768, 1024)),
    "cross_entropy": losses((4096, 32000), (8192, 50257), (4096, 128256)),
}
# Rows from 128 to 131072, odd lengths, other dimensions and options, sizes of a decoding step.
MORE: dict[str, list[Shape]] = {
    "rmsnorm": rows(
        (131072, 128), (16384, 1023), (4096, 4099), (2048, 16384), (512, 65536), (256, 131072), (8, 4096)
    ),
    "layernorm": rows((131072, 128), (16384, 1023), (2048, 16384), (256, 131072), (8, 4096)),
    "softmax": rows((131072, 128), (16384, 1023), (2048, 16384), (256, 131072)) + rows((4096, 4096), dim=0),
    "add_norm": rows((131072, 128), (4096, 4099), (2048, 16384), (256, 131072), (8, 4096)),
    "activation": rows((1024, 3072), kind="gelu_new") + rows((4096, 3072), (4099, 3071), kind="gelu"),
    "gated_activation": rows((4099, 3071), kind="gelu_tanh") + rows((8, 8192), kind="silu"),
    "cross_entropy": losses((8192, 50257), label_smoothing=0.1, reduction="none") + losses((512, 32000)),
    "reduce": rows((4096, 4096), (64, 1048576), dim=0)
    + rows((131072, 128), op="max")
    + rows((16384, 1023), op="mean")
    + [
        ({"L": 64, "M": 1024, "N": 1024}, {"dim": 1}),
        ({"L": 64, "M": 1024, "N": 1000}, {"dim": 1, "op": "max"}),
    ],
    "rotary_embedding": heads((1, 32, 8, 1, 128), (64, 32, 8, 1, 128))
    + heads((1, 32, 8, 2048, 128), interleaved=True)
    + heads((4, 12, 12, 1024, 64)),
}


BACKWARD = (
    "rmsnorm",
    "layernorm",
    "activation",
    "gated_activation",
    "cross_entropy",
    "softmax",
    "rotary_embedding",
)
for _name in BACKWARD:  # the forward's own
    TABLE[f"{_name}_backward"] = TABLE[_name]
    MORE[f"{_name}_backward"] = MORE[_name]


def workloads_of(kind: KernelType, table_only: bool) -> list[tuple[Workload, bool]]:
    """The timed calls of a type, and whether each is of the published table."""
    shapes = [(shape, True) for shape in TABLE[kind.name]]
    shapes += [(shape, False) for shape in ([] if table_only else MORE[kind.name])]
    return [(kind.build(axes, "bfloat16", options), known) for (axes, options), known in shapes]


# --- records --------------------------------------------------------------------------------------------------------


class Measured(Record):
    """One contender on one shape. `ratio` is its time over the yardstick's, within a round."""

    us: float
    ci95: Interval
    ratio: float
    ratio_ci95: Interval
    host_us: float  # until the call returned
    tb_s: float


class Row(Record):
    """One shape: all contenders, in turn within a round."""

    kernel_type: str
    label: str
    dtype: str
    shape: str
    in_table: bool
    bytes_moved: float
    yardstick: str  # copy, or read
    yardstick_us: float
    rounds: int
    peers: tuple[str, ...]
    contenders: dict[str, Measured]
    wrong: dict[str, str]  # ours that missed the oracle
    missing: dict[str, str]  # what could not run, and why


class Tried(Record):
    """A source of ours: its registers and spills are the largest of its kernels'."""

    name: str
    kernel_type: str
    backend: Backend
    digest: str
    tunables: dict[str, Scalar]
    registers: int | None = None
    spill_bytes: int | None = None
    error: str = ""


class Results(Record):
    rows: tuple[Row, ...] = ()
    sources: tuple[Tried, ...] = ()
    seconds: dict[str, float] = {}
    errors: dict[str, str] = {}  # what ended a worker, by type


class Report(Record):
    device: DeviceInfo
    driver: str | None
    date: str
    copy_tb_s: float
    read_tb_s: float
    launch_us: float
    liger: str | None
    command: str
    seconds: float
    results: Results
    not_reached: tuple[str, ...]


# --- the yardsticks -------------------------------------------------------------------------------------------------


@triton.jit
def read_kernel(x_ptr, out_ptr, words, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reads its part and leaves one number, so that nothing of it can be left out."""
    start = tl.program_id(0).to(tl.int64) * WORDS
    lane = tl.arange(0, WORDS)
    x = tl.load(x_ptr + start + lane, mask=lane < words - start, other=0)
    tl.store(out_ptr + tl.program_id(0), tl.max(x, 0))


READ_TILES = (
    (2048, 1),
    (4096, 1),
    (4096, 2),
    (8192, 2),
    (8192, 4),
    (16384, 4),
    (16384, 8),
    (32768, 8),
)  # bytes and warps of a program


def make_read(count: float) -> list[Call]:
    """Readers of `count` bytes, one for each way to cut them."""
    words = max(int(count) // 4, 1)
    data = torch.ones(words, dtype=torch.int32, device="cuda")
    out = torch.empty(words // (READ_TILES[0][0] // 4) + 1, dtype=torch.int32, device="cuda")

    def reader(tile: int, warps: int) -> Call:
        grid = (math.ceil(words / (tile // 4)),)
        return lambda **_: read_kernel[grid](data, out, words, WORDS=tile // 4, num_warps=warps)

    return [reader(tile, warps) for tile, warps in READ_TILES]


def make_copy(count: float) -> list[Call]:
    """torch's own copy, of half as many bytes: as many are read as are written."""
    source = torch.ones(max(int(count) // 8, 1), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return [lambda **_: target.copy_(source)]


def yardstick_for(kind: KernelType, workload: Workload) -> tuple[str, Call]:
    """What moves the same bytes and computes nothing; of several ways the fastest here."""
    name = "read" if kind.name in READS else "copy"
    ways = (make_read if name == "read" else make_copy)(kind.bytes_moved(workload))
    if len(ways) == 1:
        return name, ways[0]
    times = rounds_of({str(n): way for n, way in enumerate(ways)}, {}, 12)[0]
    return name, ways[min(range(len(ways)), key=lambda n: statistics.median(times[str(n)]))]


# --- rounds ---------------------------------------------------------------------------------------------------------


def rounds_of(
    contenders: Mapping[str, Call], args: dict[str, Any], count: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Time on the device and on the host of every contender in every round, in microseconds.

    A peer that has something to `prepare` (a forward pass) does so once, before.
    """
    prepared = {n: call.prepare(**args) for n, call in contenders.items() if hasattr(call, "prepare")}
    contenders = {**contenders, **prepared}
    head_start = HEAD_START_CYCLES * (4 if prepared else 1)  # autograd queues a chain of ops
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    device: dict[str, list[float]] = {name: [] for name in contenders}
    host: dict[str, list[float]] = {name: [] for name in contenders}
    dice = random.Random(1)
    with torch.no_grad():
        for call in contenders.values():
            for _ in range(WARM_CALLS):
                call(**args)
        torch.cuda.synchronize()
        for number in range(count):
            order = list(contenders)
            dice.shuffle(order)
            events = {}
            for name in order:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(head_start)
                flush.fill_(number)
                start.record()
                began = time.perf_counter()
                result = contenders[name](**args)
                host[name].append(1e6 * (time.perf_counter() - began))
                end.record()
                events[name] = (start, end)
                del result
            torch.cuda.synchronize()
            for name, (start, end) in events.items():
                device[name].append(1e3 * start.elapsed_time(end))
    return device, host


def measured(us: Sequence[float], yard: Sequence[float], host: Sequence[float], count: float) -> Measured:
    ratios = [t / y for t, y in zip(us, yard, strict=True)]
    middle = statistics.median(us)
    return Measured(
        us=round(middle, 2),
        ci95=_rounded(bootstrap_median(us), 2),
        ratio=round(statistics.median(ratios), 4),
        ratio_ci95=_rounded(bootstrap_median(ratios), 4),
        host_us=round(statistics.median(host), 1),
        tb_s=round(count / middle / 1e6, 3),
    )


def _rounded(interval: Interval, digits: int) -> Interval:
    return round(interval[0], digits), round(interval[1], digits)


# --- one shape ------------------------------------------------------------------------------------------------------


def problem_of(call: Call, kind: KernelType, workload: Workload, args: dict[str, Any], expected: Any) -> str:
    """What is wrong with a call's outputs; empty where nothing is."""
    outputs = call(**args)
    torch.cuda.synchronize()
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    forms = tuple((tuple(o.shape), o.dtype) for o in outputs)
    if forms != expected.specs:
        return f"outputs {forms}, not {expected.specs}"
    return str(check_values(outputs, expected, kind, workload).problem)


def measure(
    kind: KernelType,
    workload: Workload,
    in_table: bool,
    ours: Mapping[str, Call],
    broken: Mapping[str, str],
    options: argparse.Namespace,
    with_compile: bool,
    before: Row | None,
) -> Row:
    args = inputs_on_gpu(workload, kind)
    contenders: dict[str, Call] = {}
    missing, wrong = dict(broken), {}
    if before is not None:  # checked then
        missing, wrong = before.missing, before.wrong
        contenders = {n: call for n, call in ours.items() if n in before.contenders}
    expected = expect(kind, workload, args) if before is None else None
    for name, call in ours.items() if before is None else ():
        try:
            problem = problem_of(call, kind, workload, args, expected)
        except NotImplementedError as error:
            missing[name] = text_of(error)
            continue
        if problem:
            wrong[name] = problem[:400]
        else:
            contenders[name] = call
    del expected
    peers = []
    for peer in [] if options.no_peers else kind.peers:
        if peer.name == "compile_cudagraphs" or (peer.name == "compile" and not with_compile):
            continue
        try:
            with time_limit(COMPILE_S), torch.no_grad():
                made = peer.make(workload, torch.device("cuda"))
                if made is None:
                    continue
                made(**args)
                torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001
            missing[peer.name] = text_of(error)[:400]
            continue
        contenders[peer.name] = made
        peers.append(peer.name)
    yardstick, call = yardstick_for(kind, workload)
    device, host = rounds_of({yardstick: call, **contenders}, args, options.rounds)
    moved, yard = kind.bytes_moved(workload), device[yardstick]
    return Row(
        kernel_type=kind.name,
        label=workload.label,
        dtype=workload.dtype,
        shape=workload.shape,
        in_table=in_table,
        bytes_moved=moved,
        yardstick=yardstick,
        yardstick_us=round(statistics.median(yard), 2),
        rounds=options.rounds,
        peers=tuple(peers),
        contenders={name: measured(device[name], yard, host[name], moved) for name in contenders},
        wrong=wrong,
        missing=missing,
    )


# --- what is ours ---------------------------------------------------------------------------------------------------


def sources_of(options: argparse.Namespace) -> dict[str, list[tuple[str, Candidate]]]:
    """By type, the sources to measure: starters, named files, and with `--sweep` each with one constant changed."""
    found: dict[str, list[tuple[str, Candidate]]] = {}
    if not options.no_starters:
        for name in options.types:
            for backend in options.backends:
                source = starter(name, backend)
                if source is not None:
                    candidate = Candidate(kernel_type=name, backend=backend, source=source)
                    found.setdefault(name, []).append((backend, candidate))
    for path in options.candidate:
        candidate = read_candidate(path)
        if candidate.kernel_type in options.types:
            found.setdefault(candidate.kernel_type, []).append((path.name, candidate))
    if options.sweep:
        for named in found.values():
            named += [variant for name, candidate in tuple(named) for variant in variants(name, candidate)]
    return found


def variants(name: str, candidate: Candidate) -> Iterator[tuple[str, Candidate]]:
    for tunable in tunables.parse(candidate.source):
        for choice in tunable.choices:
            if choice != tunable.value:
                source = tunables.substitute(candidate.source, {tunable.name: choice})
                yield f"{name}:{tunable.name}={choice}", candidate.model_copy(update={"source": source})


def built(
    sources: Mapping[str, Sequence[tuple[str, Candidate]]], jobs: int
) -> tuple[dict[str, dict[str, Call]], dict[str, list[Tried]]]:
    """Build all, several at a time, and load them, by type; what does not build has its reason in its record."""

    def one(named: tuple[str, Candidate]) -> tuple[Tried, str]:
        name, candidate = named
        record = Tried(
            name=name,
            kernel_type=candidate.kernel_type,
            backend=candidate.backend,
            digest=candidate.digest[:16],
            tunables=tunables.values_if_readable(candidate.source),
        )
        try:
            made = build.build(candidate, device="cuda")
        except AutokernelError as error:
            return record.model_copy(update={"error": text_of(error)[:1500]}), ""
        resources = {"registers": made.resources.registers, "spill_bytes": made.resources.spill_bytes}
        return record.model_copy(update=resources), made.path

    calls: dict[str, dict[str, Call]] = {name: {} for name in sources}
    tried: dict[str, list[Tried]] = {name: [] for name in sources}
    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(one, [named for listed in sources.values() for named in listed]))
    for record, path in results:
        tried[record.kernel_type].append(record)
        if not record.error:
            loaded = build.load(path)
            calls[record.kernel_type][record.name] = getattr(loaded, record.kernel_type)
    return calls, tried


# --- the worker -----------------------------------------------------------------------------------------------------

CURRENT = "current"  # names the type that is being measured, should the worker die of it


def results_file(folder: Path, name: str) -> Path:
    return folder / f"results-{name}.json"


def work(options: argparse.Namespace) -> None:
    """Measure all types that have no result yet; then again with torch.compile, as long as the time lasts."""
    calls, tried = built(sources_of(options), options.jobs)
    # The second time for what the first, with even shares, had to leave.
    for with_compile in (False, False) if options.no_peers else (False, False, True):
        left = [name for name in options.types if wanted(options, name, with_compile)]
        for index, name in enumerate(left):
            share = (options.deadline - time.time()) / (len(left) - index)
            if share < 2:
                return
            (options.folder / CURRENT).write_text(name, encoding="utf-8")
            began = time.time()
            path = results_file(options.folder, name)
            results = Results.load(path) if path.exists() else Results()
            results = results.model_copy(update={"sources": tuple(tried.get(name, []))})
            measure_type(name, calls.get(name, {}), results, options, with_compile, began + share)
            results = Results.load(path)
            took = results.seconds.get(name, 0.0) + time.time() - began
            results.model_copy(update={"seconds": {name: round(took, 1)}}).save(path)
    (options.folder / CURRENT).unlink(missing_ok=True)


def warm(options: argparse.Namespace) -> None:
    """Build and call once all that a type's measurements will call, so that their compilers have done their work."""
    (name,) = options.types
    calls, _ = built(sources_of(options), options.jobs)
    kind = kernel_type(name)
    for workload, _ in workloads_of(kind, options.table):
        peers = [peer for peer in kind.peers if not options.no_peers and not peer.name.startswith("compile")]
        made = [peer.make(workload, torch.device("cuda")) for peer in peers]
        args = inputs_on_gpu(workload, kind)
        for call in (*calls.get(name, {}).values(), *filter(None, made)):
            try:
                with torch.no_grad():
                    call(**args)
                    torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001
                print(f"{name} {workload.label}: {text_of(error)[:200]}", file=sys.stderr)
                if "CUDA error" in str(error):
                    return  # the context is gone; the measurement will tell
        del args
        torch.cuda.empty_cache()


def wanted(options: argparse.Namespace, name: str, with_compile: bool) -> bool:
    """Whether a pass has something to do at a type: what no pass has measured, or torch.compile."""
    path = results_file(options.folder, name)
    if not path.exists():
        return True
    known = Results.load(path)
    return not known.errors and (with_compile or bool(unreached(options, name, known)))


def unreached(options: argparse.Namespace, name: str, known: Results) -> list[str]:
    """The labels of a type's shapes that have no row."""
    measured = {row.label for row in known.rows if row.kernel_type == name}
    labels = [workload.label for workload, _ in workloads_of(kernel_type(name), options.table)]
    return [label for label in labels if label not in measured]


def measure_type(
    name: str,
    ours: Mapping[str, Call],
    results: Results,
    options: argparse.Namespace,
    with_compile: bool,
    until: float,
) -> None:
    kind, path = kernel_type(name), results_file(options.folder, name)
    broken = {t.name: t.error for t in results.sources if t.error}
    found = {row.label: row for row in results.rows}
    results.save(path)
    for workload, in_table in workloads_of(kind, options.table or with_compile):
        if time.time() > until:
            break
        if not with_compile and workload.label in found:
            continue
        row = measure(
            kind, workload, in_table, ours, broken, options, with_compile, found.get(workload.label)
        )
        # A second look that brought no torch.compile brings nothing new but the reason.
        if with_compile and "compile" not in row.contenders and row.label in found:
            row = found[row.label].model_copy(update={"missing": row.missing})
        found[row.label] = row
        results = results.model_copy(update={"rows": tuple(found.values())})
        results.save(path)
        print(line(row), flush=True)
        torch.cuda.empty_cache()


# --- the parent -----------------------------------------------------------------------------------------------------


def run_workers(options: argparse.Namespace, save: Callable[[], object]) -> None:
    """As many workers as it takes: one that dies leaves its type's error, and the next goes on."""
    command = [
        sys.executable,
        *sys.argv,
        "--folder",
        str(options.folder),
        "--deadline",
        str(options.deadline),
    ]
    for _ in range(len(options.types)):
        if options.deadline - time.time() < 5:
            return
        with tempfile.TemporaryFile("w+") as log:
            worker = subprocess.Popen(command, stderr=log, start_new_session=True)
            code: int | str | None = None
            while code is None:
                try:
                    code = worker.wait(timeout=4)
                except subprocess.TimeoutExpired:
                    save()
                    if time.time() > options.deadline + GRACE_S:
                        os.killpg(worker.pid, signal.SIGKILL)
                        worker.wait()
                        code = "stopped at the end of its time"
            log.seek(0)
            told = log.read()[-1500:]
        current = options.folder / CURRENT
        if code == 0 or not current.exists():
            if code != 0:
                print(told, file=sys.stderr)
            return
        name = current.read_text(encoding="utf-8")
        path = results_file(options.folder, name)
        before = Results.load(path) if path.exists() else Results()
        before.model_copy(update={"errors": {name: f"{code}: {told}"}}).save(path)


def run_warm(options: argparse.Namespace) -> None:
    """A process for each type, until all are done or their time is up."""
    until = time.time() + options.warm
    base = [sys.executable, *sys.argv, "--folder", str(options.folder), "--jobs", "3"]
    workers = [
        subprocess.Popen([*base, "--warm-type", name], stdout=subprocess.DEVNULL, start_new_session=True)
        for name in options.types
    ]
    for worker in workers:
        try:
            worker.wait(timeout=max(0.1, until - time.time()))
        except subprocess.TimeoutExpired:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


def merged(options: argparse.Namespace) -> Results:
    parts = [Results.load(p) for n in options.types if (p := results_file(options.folder, n)).exists()]
    return Results(
        rows=tuple(row for part in parts for row in part.rows),
        sources=tuple(source for part in parts for source in part.sources),
        seconds={name: s for part in parts for name, s in part.seconds.items()},
        errors={name: e for part in parts for name, e in part.errors.items()},
    )


def line(row: Row, most: int = 40) -> str:
    """One shape: the yardstick, the fastest of ours as multiples of it, and the best peer."""
    told = [f"{row.kernel_type} {row.label} {row.dtype}: {row.yardstick} {row.yardstick_us:.1f} us"]
    ours = {n: m for n, m in row.contenders.items() if n not in row.peers}
    told += [f"{n} {m.us:.1f} ({m.ratio:.3f})" for n, m in sorted(ours.items(), key=lambda i: i[1].us)[:most]]
    if row.peers:
        best = min(row.peers, key=lambda n: row.contenders[n].us)
        told.append(f"best peer {best} {row.contenders[best].us:.1f} ({row.contenders[best].ratio:.3f})")
    told += [f"{n} WRONG: {text.splitlines()[0][:150]}" for n, text in row.wrong.items()]
    return "; ".join(told)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument(
        "--only", default="", help="kernel types, separated by commas; default all memory-bound ones"
    )
    parser.add_argument(
        "--backends", default="triton,cuda", help="starters of which backends, separated by commas"
    )
    parser.add_argument(
        "--candidate", type=Path, nargs="*", default=[], help="further files, measured beside them"
    )
    parser.add_argument("--sweep", action="store_true", help="also each source with one constant changed")
    parser.add_argument("--table", action="store_true", help="only the shapes of the published table")
    parser.add_argument("--no-peers", action="store_true", help="only ours and the yardstick")
    parser.add_argument("--no-starters", action="store_true", help="only the files of --candidate")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for everything")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--warm", type=float, default=60.0, help="seconds for compiling beforehand; 0 for none"
    )
    parser.add_argument("--jobs", type=int, default=12, help="sources built at a time")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--warm-type", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    named = [n for n in options.only.split(",") if n]
    options.types = named or [n for n in TABLE if not n.endswith("_backward")]
    options.backends = [b for b in BACKENDS if b in options.backends.split(",")]
    unknown = set(options.types) - set(TABLE)
    if unknown:
        parser.error(f"no memory-bound kernel type: {', '.join(sorted(unknown))}")
    if options.warm_type is not None:
        options.types = [options.warm_type]
        warm(options)
        return 0
    if options.folder is not None:
        work(options)
        return 0

    started = time.time()
    try:
        device = device_info("cuda")
        ceilings = measure_ceilings("cuda")
    except AutokernelError as error:
        print(error, file=sys.stderr)
        return 1

    def save() -> Report:
        results = merged(options)
        left = [f"{n} {label}" for n in options.types for label in unreached(options, n, results)]
        report = Report(
            device=device,
            driver=device.driver,
            date=device.date,
            copy_tb_s=round(ceilings.copy_gb_s / 1e3, 3),
            read_tb_s=round(ceilings.read_gb_s / 1e3, 3),
            launch_us=round(ceilings.launch_us, 3),
            liger=_version("liger-kernel"),
            command=" ".join(["benchmarks/kernels.py", *(Path(a).name for a in sys.argv[1:])]),
            seconds=round(time.time() - started, 1),
            results=results,
            not_reached=tuple(left),
        )
        report.save(options.out)
        return report

    with tempfile.TemporaryDirectory() as temporary:
        options.folder = Path(temporary)
        options.deadline = started + options.budget - GRACE_S - 6
        if options.warm > 0:
            run_warm(options)
            print(f"compiled beforehand until {time.time() - started:.0f} s", flush=True)
        run_workers(options, save)
        report = save()
    results = report.results
    print(
        f"copy {report.copy_tb_s} TB/s, read {report.read_tb_s} TB/s, launch {report.launch_us} us, {report.date}"
    )
    for row in results.rows:
        print(line(row, 4))
    for source in results.sources:
        if source.error or source.spill_bytes:
            print(f"{source.name}: spills {source.spill_bytes} bytes {source.error.strip()[-300:]}")
    for name, text in results.errors.items():
        print(f"{name}: {text.strip()[-300:]}")
    if report.not_reached:
        print(f"not reached: {', '.join(report.not_reached)}")
    return 0 if results.rows and not results.errors and not any(row.wrong for row in results.rows) else 1


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
