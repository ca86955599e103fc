"""Every starter on the GPU here: is it right everywhere, and how fast beside what a user would pick instead?

    python benchmarks/check_starters.py --out benchmarks/results/starter-checks-h200.json --no-timing
    python benchmarks/check_starters.py --out starters.json --types rmsnorm,softmax --backends cuda --no-timing

First each starter is built and judged in a process of its own (a bad access poisons a process's GPU for good), several
at a time; then, one type after the other, the type's timed workloads are measured: peers and starters in turn within a
round, in random order, the L2 cache flushed before every call, by CUDA events, medians over the rounds. A failure is
recorded with its text and nothing else is harmed. The file is rewritten as results come in, and holds what was not
reached by the end of the budget as such. A short table is printed last.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autokernel_hf.errors import AutokernelError
from autokernel_hf.records import Backend, DeviceInfo, Record

if TYPE_CHECKING:
    from autokernel_hf.judge.cases import Stage
    from autokernel_hf.kernels.base import KernelType
    from autokernel_hf.records import Workload

BACKENDS: tuple[Backend, ...] = ("triton", "cuda", "cpp")
STAGES: tuple[Stage, ...] = ("shapes", "numerics", "edges")
MOST_ROUNDS, FEWEST_ROUNDS = 30, 5
FLUSH_BYTES = 256 << 20
RUN_AHEAD_CYCLES = 400_000  # the device waits so long that the host has queued all of a call before it starts
KEPT_FAILURES = 12


class Failure(Record):
    """A call that went wrong, or was not made as it should have been."""

    label: str
    dtype: str
    shape: str
    problem: str


class Checked(Record):
    """How one starter did over the judge's calls. `error` is what ended the process or the build, empty otherwise."""

    kernel_type: str
    backend: Backend
    built_id: str = ""
    build_s: float = 0.0
    registers: int | None = None
    spill_bytes: int | None = None
    calls: int = 0  # that the judge would make
    done: int = 0
    failed: int = 0
    failures: tuple[Failure, ...] = ()
    worst_error_ratio: float = 0.0  # the starter's error over torch's own
    seconds: float = 0.0
    error: str = ""


class Timed(Record):
    """One workload: median device time of every contender, in microseconds."""

    kernel_type: str
    label: str
    dtype: str
    shape: str
    rounds: int
    us: dict[str, float]
    spread_us: dict[str, float]  # between the quartiles
    wrong: dict[str, str]  # starters whose output of this very call was wrong
    missing: dict[str, str]  # contenders that could not run, and why
    gb_s: dict[str, float]
    tflops: dict[str, float]


class Timings(Record):
    kernel_type: str
    workloads: tuple[Timed, ...] = ()
    error: str = ""


class Report(Record):
    device: DeviceInfo
    seconds: float
    checked: tuple[Checked, ...]
    timed: tuple[Timings, ...]
    not_reached: tuple[str, ...]


# --- in a worker ----------------------------------------------------------------------------------------------------


def check(name: str, backend: Backend, device: str, out: Path, deadline: float) -> None:
    """Build a starter and make the judge's calls until the deadline."""
    from autokernel_hf import build, contract
    from autokernel_hf.judge.cases import Scope, cases_of
    from autokernel_hf.kernels import kernel_type, starter
    from autokernel_hf.records import Candidate

    started = time.monotonic()
    kind, source = kernel_type(name), starter(name, backend)
    assert source is not None
    candidate = Candidate(kernel_type=name, backend=backend, source=source)
    try:
        made = build.build(candidate, device=device)
        function = getattr(build.load(made.path), name)
    except Exception as error:  # noqa: BLE001
        Checked(kernel_type=name, backend=backend, error=text_of(error)).save(out)
        return
    scope = Scope(kernel_type=kind, workloads=(), dtypes=kind.dtypes, backend=backend)
    domain = contract.check(candidate, kind)
    cases = [case for stage in STAGES for case in cases_of(stage, scope, domain)]
    # Where the time does not suffice for all, it is spent on some of everything.
    random.Random(0).shuffle(cases)
    failures: list[Failure] = []
    done, worst, dead, saved = 0, 0.0, "", time.monotonic()

    def save() -> None:
        Checked(
            kernel_type=name,
            backend=backend,
            built_id=made.id,
            build_s=round(made.seconds, 2),
            registers=made.resources.registers,
            spill_bytes=made.resources.spill_bytes,
            calls=len(cases),
            done=done,
            failed=len(failures),
            failures=tuple(failures[:KEPT_FAILURES]),
            worst_error_ratio=round(worst, 3),
            seconds=round(time.monotonic() - started, 1),
            error=dead,
        ).save(out)

    for seed, case in enumerate(cases):
        if dead or time.time() > deadline:
            break
        workload = case.workload
        problem, ratio = outcome_of(function, kind, workload, case.refuse, device, seed)
        done, worst = seed + 1, max(worst, ratio)
        if problem:
            failures.append(
                Failure(
                    label=workload.label, dtype=workload.dtype, shape=workload.shape, problem=problem[:600]
                )
            )
            if "CUDA error" in problem and not healthy():
                dead = f"the GPU context died at {workload.label} {workload.dtype} {workload.shape}: {problem[:300]}"
        if problem or time.monotonic() - saved > 2:
            saved = time.monotonic()
            save()
    save()


def outcome_of(
    function: Callable[..., Any], kind: KernelType, workload: Workload, refuse: bool, device: str, seed: int
) -> tuple[str, float]:
    """What is wrong with a call, empty for nothing, and its error over torch's own."""
    import torch

    from autokernel_hf.judge.checks import check_values, expect
    from autokernel_hf.kernels.base import make_inputs

    try:
        args = make_inputs(kind, workload, seed, device)
        outputs = function(**args)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        if refuse:
            return "answered a call outside its domain", 0.0
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        expected = expect(kind, workload, args)
        forms = tuple((tuple(o.shape), o.dtype) for o in outputs)
        if forms != expected.specs:
            return f"outputs {forms}, not {expected.specs}", 0.0
        outcome = check_values(outputs, expected, kind, workload)
    except NotImplementedError as error:
        return "" if refuse else f"refused: {error}", 0.0
    except Exception as error:  # noqa: BLE001
        return text_of(error), 0.0
    return outcome.problem, min(outcome.error_ratio, 1e9)


def healthy() -> bool:
    import torch

    try:
        torch.zeros(8, device="cuda").sum().item()
    except Exception:  # noqa: BLE001
        return False
    return True


def measure(names: Sequence[str], backends: Sequence[Backend], folder: Path, deadline: float) -> None:
    """Time the workloads of all types that `folder` has no result of, writing one as each is done.

    First all without torch.compile, whose tuning may take longer than everything else; then, with what time is left,
    again with it. A type that ended the worker before has its error in its file, and is not tried again.
    """
    for with_compile in (False, True):
        left = [n for n in names if _wanted(folder, n, with_compile)]
        for index, name in enumerate(left):
            share = (deadline - time.time()) / (len(left) - index)
            if share < 2:
                return
            (folder / CURRENT).write_text(name, encoding="utf-8")
            measure_type(name, backends, folder, with_compile, time.time() + share)
    (folder / CURRENT).unlink(missing_ok=True)


CURRENT = "current"  # names the type that is being measured, should the worker die of it


def timings_file(folder: Path, name: str) -> Path:
    return folder / f"measure-{name}.json"


def _wanted(folder: Path, name: str, with_compile: bool) -> bool:
    path = timings_file(folder, name)
    if not path.exists():
        return not with_compile
    return with_compile and not Timings.load(path).error


def measure_type(
    name: str, backends: Sequence[Backend], folder: Path, with_compile: bool, deadline: float
) -> None:
    from autokernel_hf import build
    from autokernel_hf.kernels import kernel_type, starter
    from autokernel_hf.records import Candidate

    kind, path = kernel_type(name), timings_file(folder, name)
    starters: dict[str, Callable[..., Any]] = {}
    broken: dict[str, str] = {}
    for backend in backends:
        source = starter(name, backend)
        if source is None:
            continue
        candidate = Candidate(kernel_type=name, backend=backend, source=source)
        try:
            starters[backend] = getattr(build.load(build.build(candidate, device="cuda").path), name)
        except Exception as error:  # noqa: BLE001
            broken[backend] = text_of(error)
    before = Timings.load(path).workloads if path.exists() else ()
    results = {t.label: t for t in before}
    for workload in kind.workloads["cuda"]:
        left = deadline - time.time()
        if left < 1.5:
            break
        timed = measure_one(kind, workload, starters, broken, with_compile, left)
        # A second look that brought no torch.compile brings nothing new.
        if not with_compile or "compile" in timed.us:
            wrong = results[workload.label].wrong if workload.label in results else {}
            timed = timed.model_copy(update={"wrong": {**wrong, **timed.wrong}})
        else:
            timed = results.get(workload.label, timed).model_copy(update={"missing": timed.missing})
        results[workload.label] = timed
        Timings(kernel_type=name, workloads=tuple(results.values())).save(path)


def inputs_on_gpu(workload: Workload, kind: KernelType) -> dict[str, Any]:
    """As `make_inputs`, but drawn on the GPU: the largest tensors take seconds to draw on a CPU."""
    import torch

    from autokernel_hf.kernels.base import fill_values, materialize
    from autokernel_hf.records import TensorSpec

    generator = torch.Generator(device="cuda").manual_seed(11)
    args: dict[str, Any] = {}
    with torch.device("cuda"):
        for name, value in workload.args:
            if not isinstance(value, TensorSpec):
                args[name] = value
                continue
            fill = kind.fills.get(name)
            data = (
                fill_values(value, workload.values, generator)
                if fill is None
                else fill(name, value, workload, generator)
            )
            args[name] = materialize(data, value, "cuda")
    return args


def measure_one(
    kind: KernelType,
    workload: Workload,
    starters: dict[str, Callable[..., Any]],
    broken: dict[str, str],
    with_compile: bool,
    seconds: float,
    prepare_s: float | None = None,
) -> Timed:
    """Times of one workload.

    Args:
        seconds: For the rounds.
        prepare_s: For a peer to get ready, its imports included; as long as the rounds unless given.
    """
    import torch

    from autokernel_hf.judge.checks import check_values, expect

    device = torch.device("cuda")
    args = inputs_on_gpu(workload, kind)
    contenders = dict(starters)
    missing = dict(broken)
    for peer in kind.peers:
        if peer.name.startswith("compile") and not with_compile:
            continue
        try:
            with time_limit(seconds if prepare_s is None else prepare_s), torch.no_grad():
                call = peer.make(workload, device)
                if call is None:
                    continue
                call(**args)
                torch.cuda.synchronize()
            contenders[peer.name] = call
        except Exception as error:  # noqa: BLE001
            missing[peer.name] = text_of(error)
    wrong: dict[str, str] = {}
    for backend in starters:
        try:
            outputs = contenders[backend](**args)
            torch.cuda.synchronize()
            if not with_compile:  # once is enough: the oracle in float64 takes as long as the timing
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                problem = check_values(outputs, expect(kind, workload, args), kind, workload).problem
                if problem:
                    wrong[backend] = problem
        except Exception as error:  # noqa: BLE001
            missing[backend] = text_of(error)
            del contenders[backend]
    times = rounds_of(contenders, args, min(seconds, 3.0))
    us = {n: statistics.median(t) for n, t in times.items()}
    moved, flops = kind.bytes_moved(workload), kind.flops(workload)
    return Timed(
        kernel_type=kind.name,
        label=workload.label,
        dtype=workload.dtype,
        shape=workload.shape,
        rounds=len(next(iter(times.values()), [])),
        us={n: round(t, 2) for n, t in us.items()},
        spread_us={n: round(spread(t), 2) for n, t in times.items()},
        wrong=wrong,
        missing=missing,
        gb_s={n: round(moved / t / 1e3, 1) for n, t in us.items()},
        tflops={n: round(flops / t / 1e6, 2) for n, t in us.items()},
    )


def rounds_of(
    contenders: dict[str, Callable[..., Any]], args: dict[str, Any], seconds: float
) -> dict[str, list[float]]:
    """Device time of every contender in every round, in microseconds."""
    import torch

    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in contenders}
    dice = random.Random(1)
    with torch.no_grad():
        for call in contenders.values():  # warm
            for _ in range(3):
                call(**args)
        torch.cuda.synchronize()
        until = time.monotonic() + seconds
        for count in range(MOST_ROUNDS):
            if count >= FEWEST_ROUNDS and time.monotonic() > until:
                break
            order = list(contenders)
            dice.shuffle(order)
            events = {}
            for name in order:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(RUN_AHEAD_CYCLES)
                flush.zero_()
                start.record()
                result = contenders[name](**args)
                end.record()
                events[name] = (start, end)
                del result
            torch.cuda.synchronize()
            for name, (start, end) in events.items():
                times[name].append(1e3 * start.elapsed_time(end))
    return times


def spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return high - low


class TimeUpError(Exception):
    """A peer took too long to prepare."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Ends Python code that takes too long; torch.compile's tuning is such."""

    def stop(*_: object) -> None:
        raise TimeUpError(f"not ready after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(max(1, int(seconds)))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()[-2000:]


# --- the parent -----------------------------------------------------------------------------------------------------


def run_worker(arguments: Sequence[str], out: Path, deadline: float) -> str:
    """Run this file as a worker; what ended it early, empty if nothing did."""
    command = [sys.executable, __file__, "--out", str(out), "--deadline", str(deadline), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    with tempfile.TemporaryFile("w+") as log:
        worker = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            code = worker.wait(timeout=max(1.0, deadline + 8 - time.time()))
        except subprocess.TimeoutExpired:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
            return "stopped at the end of its time"
        log.seek(0)
        tail = log.read()[-1500:]
    return "" if code == 0 else f"exit code {code}: {tail}"


def check_worker(name: str, backend: Backend, device: str, folder: Path, deadline: float) -> Checked:
    out = folder / f"check-{name}-{backend}.json"
    arguments = ["--worker", "check", "--types", name, "--backends", backend, "--device", device]
    ended = run_worker(arguments, out, deadline)
    result = Checked.load(out) if out.exists() else Checked(kernel_type=name, backend=backend)
    if ended and not result.error:
        return result.model_copy(update={"error": ended})
    return result


def measure_workers(
    names: Sequence[str], backends: Sequence[Backend], folder: Path, deadline: float
) -> Iterator[Timings]:
    """Time all types, in as many workers as it takes: one that dies leaves its type's error, and the next goes on."""
    listed = ["--types", ",".join(names), "--backends", ",".join(backends)]
    for _ in range(len(names)):
        if deadline - time.time() < 8:
            break
        ended = run_worker(["--worker", "measure", *listed], folder, deadline)
        current = folder / CURRENT
        if not ended or not current.exists():
            break
        path = timings_file(folder, current.read_text(encoding="utf-8"))
        before = Timings.load(path) if path.exists() else Timings(kernel_type=path.stem.split("-", 1)[1])
        before.model_copy(update={"error": ended}).save(path)
    for name in names:
        if timings_file(folder, name).exists():
            yield Timings.load(timings_file(folder, name))


def table(report: Report) -> str:
    """One line a starter, then one a timed workload."""
    lines = []
    for c in report.checked:
        state = "ok" if c.calls and c.done == c.calls and not c.failed and not c.error else "PROBLEM"
        if state != "ok" and not c.failed and not c.error:
            state = "partly"
        lines.append(
            f"{c.kernel_type:17} {c.backend:7} {state:8} {c.done - c.failed}/{c.calls} right, build {c.build_s:.1f} s, "
            f"error ratio {c.worst_error_ratio:g}"
        )
        if c.error:
            lines.append(f"    {c.error.strip().splitlines()[-1][:150]}")
        lines += [f"    {f.label} {f.dtype} {f.shape}: {f.problem[:150]}" for f in c.failures[:2]]
    for timings in report.timed:
        for t in timings.workloads:
            peers = {n: us for n, us in t.us.items() if n not in BACKENDS}
            best = min(peers, key=lambda n: peers[n]) if peers else ""
            ours = " ".join(
                f"{b} {t.us[b]:.1f}" + (f" ({peers[best] / t.us[b]:.2f}x)" if best else "")
                for b in BACKENDS
                if b in t.us
            )
            flag = " WRONG " + ",".join(t.wrong) if t.wrong else ""
            lines.append(
                f"{t.kernel_type:17} {t.label} {t.dtype}: {ours} us; best peer {best} {peers.get(best, 0):.1f}{flag}"
            )
        if timings.error:
            lines.append(f"{timings.kernel_type:17} timing: {timings.error.strip().splitlines()[-1][:120]}")
    if report.not_reached:
        lines.append(f"not reached: {', '.join(report.not_reached)}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--types", default="", help="kernel types, separated by commas; default all")
    parser.add_argument(
        "--backends", default="triton,cuda", help="of triton, cuda and cpp, separated by commas"
    )
    parser.add_argument("--device", default="cuda", help="where to run; on a cpu only checks, and only cpp")
    parser.add_argument("--no-timing", action="store_true", help="check only")
    parser.add_argument("--no-checks", action="store_true", help="time only")
    parser.add_argument("--budget", type=float, default=225.0, help="seconds for everything")
    parser.add_argument("--jobs", type=int, default=8, help="starters checked at a time")
    parser.add_argument("--worker", choices=("check", "measure"), help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    started = time.time()

    from autokernel_hf.kernels import backends as backends_of
    from autokernel_hf.kernels import kernel_types

    names = [n for n in options.types.split(",") if n] or list(kernel_types())
    unknown = set(names) - set(kernel_types())
    if unknown:
        parser.error(f"no such kernel type: {', '.join(sorted(unknown))}")
    chosen: tuple[Backend, ...] = tuple(b for b in BACKENDS if b in options.backends.split(","))
    if options.worker == "check":
        check(names[0], chosen[0], options.device, options.out, options.deadline)
        return 0
    if options.worker == "measure":
        measure(names, chosen, options.out, options.deadline)
        return 0

    from autokernel_hf.gpu import device_info

    if options.device == "cpu" and (chosen != ("cpp",) or not options.no_timing):
        parser.error("on a cpu use --backends cpp --no-timing")
    try:
        device = device_info(options.device)
    except AutokernelError as error:
        print(error, file=sys.stderr)
        return 1
    end = started + options.budget
    # The checks may take this share of the time; what they leave goes to the timing.
    checks_end = end if options.no_timing else started + 0.55 * options.budget
    checked: dict[tuple[str, str], Checked] = {}
    timed: dict[str, Timings] = {}
    wanted = [(n, b) for n in names for b in chosen if b in backends_of(n)]
    # The longest builds first.
    wanted.sort(key=lambda pair: pair[0] not in ("flash_attention", "matmul", "fused_mlp"))

    def save() -> Report:
        reached = {f"{n}/{b}" for n, b in checked} | {f"{n} timing" for n in timed}
        asked = [] if options.no_checks else [f"{n}/{b}" for n, b in wanted]
        asked += [] if options.no_timing else [f"{n} timing" for n in names]
        report = Report(
            device=device,
            seconds=round(time.time() - started, 1),
            checked=tuple(checked[key] for key in sorted(checked)),
            timed=tuple(timed[n] for n in names if n in timed),
            not_reached=tuple(a for a in asked if a not in reached),
        )
        report.save(options.out)
        return report

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if not options.no_checks:
            with ThreadPoolExecutor(options.jobs) as pool:
                running = {
                    pool.submit(check_worker, n, b, options.device, folder, checks_end): (n, b)
                    for n, b in wanted
                }
                for future in as_completed(running):
                    checked[running[future]] = future.result()
                    save()
        if not options.no_timing:
            for timings in measure_workers(names, chosen, folder, end - 10):
                timed[timings.kernel_type] = timings
    report = save()
    print(table(report))
    good = all(c.calls and not c.failed and not c.error for c in report.checked)
    return 0 if good and not any(t.wrong for timings in report.timed for t in timings.workloads) else 1


if __name__ == "__main__":
    sys.exit(main())
