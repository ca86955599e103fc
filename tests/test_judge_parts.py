"""Parts of the judge on their own: guard bands, calls in a row, the L2 cache's share, the state of a GPU, peers."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from autokernel_hf.build import build, load
from autokernel_hf.candidates import read_candidate
from autokernel_hf.errors import AutokernelError, CandidateError, CompileError, DeviceError, ToolMissingError
from autokernel_hf.evaluate import Judge
from autokernel_hf.judge import child, confine, l2, near, referee, replays, telemetry, timing
from autokernel_hf.judge.arena import Arena, Pool
from autokernel_hf.judge.bands import Bands
from autokernel_hf.judge.cases import Scope
from autokernel_hf.judge.referee import Referee
from autokernel_hf.judge.remote import Child, Failed
from autokernel_hf.judge.server import Server
from autokernel_hf.judge.session import Request
from autokernel_hf.judge.sheet import Sheet
from autokernel_hf.judge.stages import StageFailed
from autokernel_hf.judge.turn import Times
from autokernel_hf.kernels import kernel_type, kernel_types
from autokernel_hf.kernels.base import make_inputs
from autokernel_hf.variant import Domain
from tests.judge_files import HONEST, MUTANTS, rms

CPU = torch.device("cpu")
RMS = kernel_type("rmsnorm")


# --- guard bands ------------------------------------------------------------------------------------------------------


def called(path: Path, x: torch.Tensor) -> tuple[torch.Tensor, Bands, Any]:
    """A compiled candidate, called between bands: its output, the bands, and the call."""
    built = build(read_candidate(path), device="cpu")
    function = load(built.path).rmsnorm
    bands = Bands(CPU, next(Path(built.path).glob("*.so")))
    weight = torch.ones(x.shape[-1])
    with bands:
        output = function(x=x, weight=weight, eps=1e-6)
    return output, bands, lambda: function(x=x, weight=weight, eps=1e-6)


def test_a_compiled_call_gets_bands_around_its_output_and_its_workspace() -> None:
    x = torch.randn(5, 33)
    output, bands, call = called(HONEST / "rmsnorm_workspace.cpp", x)
    torch.testing.assert_close(output, RMS.reference(x, torch.ones(33), 1e-6)[0])
    assert output.is_contiguous() and output.untyped_storage().nbytes() == output.nbytes + 2 * (1 << 16)
    assert bands.count == 2
    assert bands.written((output,)) == ""
    after = call()
    assert bands.count == 2, "a call after it gets none"
    assert after.untyped_storage().nbytes() == after.nbytes
    assert torch.equal(after, output)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("writes_beside_its_output.cpp", "its output: 256 bytes behind the end of 660"),
        ("writes_before_its_output.cpp", "its output: 16 bytes before the start of 660"),
        ("writes_beside_its_workspace.cpp", "its scratch memory: 8 bytes behind the end of 40"),
    ],
)
def test_what_a_compiled_call_writes_beside_is_told(name: str, said: str) -> None:
    output, bands, _ = called(MUTANTS / name, torch.randn(5, 33))
    assert bands.written((output,)) == f"writes beside {said}"


@pytest.mark.parametrize("make", ["empty", "empty_like", "new_empty", "zeros", "clone", "contiguous"])
def test_what_python_allocates_gets_bands_and_keeps_its_values(make: str) -> None:
    x = torch.arange(12.0).reshape(3, 4).T
    makers = {
        "empty": lambda: torch.empty(4, 3),
        "empty_like": lambda: torch.empty_like(x),
        "new_empty": lambda: x.new_empty((2, 5), dtype=torch.float16),
        "zeros": lambda: torch.zeros(7),
        "clone": lambda: x.clone(),
        "contiguous": lambda: x.contiguous(),
    }
    plain = makers[make]()
    bands = Bands(CPU, None)
    with bands:
        made = makers[make]()
    assert (made.shape, made.stride(), made.dtype) == (plain.shape, plain.stride(), plain.dtype)
    if make in ("zeros", "clone", "contiguous"):
        assert torch.equal(made, plain)
    assert bands.count == 1 and bands.written((made,)) == ""
    behind = made.as_strided((1,), (1,), made.storage_offset() + made.numel())
    behind.zero_()
    assert (
        bands.written((made,))
        == f"writes beside its output: {made.element_size()} bytes behind the end of {made.nbytes}"
    )


def test_what_is_made_on_another_device_stays_there() -> None:
    bands = Bands(CPU, None)
    x = torch.ones(3)
    with bands:
        made = torch.empty(3, device="meta")
        copied = x.to("meta")
    assert made.device.type == copied.device.type == "meta"
    assert bands.count == 0


# --- calls in a row ---------------------------------------------------------------------------------------------------


class Clocked:
    """A contender in a child: what its own clock says of a call, and what the referee's sees of a row, try by try."""

    def __init__(self, said_us: float, row_factors: list[float]) -> None:
        self.name, self.pid, self.child = "candidate", 0, self
        self.places = self
        self.arguments = ()
        self.said_us, self.factors, self.tries = said_us, row_factors, 0

    def noop(self) -> float:
        return 100.0

    def loop(self, arguments: object, calls: int) -> float:
        self.tries += 1
        return 100.0 + calls * self.said_us * self.factors[(self.tries - 1) % len(self.factors)]


def check_row(contender: Clocked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "wait_for_quiet", lambda pids, limit_s: True)
    values = timing.Values(RMS, rms(4, 64), CPU, [1, 2])
    column, said_us = timing.Column(), contender.said_us
    for noise in (1.0, 1.3, 1.0, 4.0, 1.0):  # what other programs do to some rounds
        times = Times(device_us=(said_us * noise,) * 3, host_us=(said_us,) * 3, late_us=(0.0,) * 3)
        column.add(times, 1.0, 0)
    rounds = timing.Rounds(
        values,
        [timing.Local("eager", RMS.reference, values)],
        {"candidate": column},
        torch_error=(0.0,),
        seed=1,
    )
    rounds._check_row(cast("timing.Remote", contender))


def test_a_row_that_takes_what_the_clock_says_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    contender = Clocked(10.0, [1.2])
    check_row(contender, monkeypatch)
    assert contender.tries == 1


def test_a_busy_machine_may_make_nearly_all_rows_long(monkeypatch: pytest.MonkeyPatch) -> None:
    contender = Clocked(10.0, [9.0] * 59 + [1.4])
    check_row(contender, monkeypatch)
    assert contender.tries == 60


@pytest.mark.parametrize("said_us", [0.4, 50.0, 900.0, 5000.0])
@pytest.mark.parametrize("factor", [1.75, 5.0])
def test_a_clock_at_four_sevenths_of_the_speed_is_found(
    said_us: float, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Failed, match="by the referee's clock") as caught:
        check_row(Clocked(said_us, [factor]), monkeypatch)
    assert caught.value.status == "rejected"


@pytest.mark.parametrize(
    ("device_us", "graph_us", "referee_us", "calls", "found"),
    [
        (22.6, 18.2, 18.4, 20, False),
        (7.0, 2.2, 2.6, 20, False),  # launches are most of a cold call
        (5.1, 1.6, 3.81, 20, False),  # as measured on a GPU with eight sessions: the host was late
        (8.0, 18.2, 18.4, 20, True),  # two fifths of it
        (22.6, 8.0, 18.4, 20, True),  # the graph's own time
        (500.0, 500.0, 990.0, 1, True),
        (22.6, 18.2, None, 1, False),
    ],
)
def test_device_times_are_held_against_a_graph_by_the_referees_clock(
    device_us: float, graph_us: float, referee_us: float | None, calls: int, found: bool
) -> None:
    warm = replays.WarmTimes(hot_us=device_us, graph_us=graph_us, referee_us=referee_us, calls=calls)
    assert bool(replays.contradiction(device_us, warm)) is found


# --- the L2 cache's share ---------------------------------------------------------------------------------------------


class Driver:
    """As much of CUDA's driver as is asked about the cache."""

    def __init__(self, set_aside: int) -> None:
        self.set_aside, self.resets = set_aside, 0

    def cuCtxGetLimit(self, size: Any, limit: int) -> int:  # noqa: N802 - the driver's name
        assert limit == 6
        size._obj.value = self.set_aside
        return 0

    def cuCtxResetPersistingL2Cache(self) -> int:  # noqa: N802
        self.resets += 1
        return 0


def test_what_persists_in_the_cache_is_forgotten_and_a_larger_share_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(4096)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    share = l2.Persisting()
    share.forget()
    assert driver.resets == 1
    driver.set_aside = 1 << 20
    with pytest.raises(CandidateError, match="sets 1048576 bytes of the L2 cache aside"):
        share.forget()


def test_without_a_driver_there_is_nothing_to_forget() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a driver here")
    l2.Persisting().forget()


# --- the state of a GPU -----------------------------------------------------------------------------------------------


class Nvml:
    """As much of NVML as is asked: a hot GPU at its power limit, which does not tell its memory's clock."""

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: object, value: Any) -> int:  # noqa: N802
        value._obj.value = 0x4 | 0x20
        return 0

    def nvmlDeviceGetPowerUsage(self, handle: object, value: Any) -> int:  # noqa: N802
        value._obj.value = 699_500
        return 0

    def nvmlDeviceGetClockInfo(self, handle: object, kind: ctypes.c_int, value: Any) -> int:  # noqa: N802
        value._obj.value = 1410
        return 0 if kind.value == 1 else 3

    def nvmlDeviceGetTemperature(self, handle: object, sensor: ctypes.c_int, value: Any) -> int:  # noqa: N802
        value._obj.value = 83
        return 0


def test_the_state_of_a_gpu_is_what_its_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_nvml", lambda: Nvml())
    monkeypatch.setattr(telemetry, "_handle", lambda index: ctypes.c_void_p(1))
    state = telemetry.device_state(torch.device("cuda", 0))
    assert state is not None
    assert (state.sm_mhz, state.memory_mhz, state.power_w, state.temperature_c) == (1410, None, 699.5, 83)
    assert state.throttled == ("power_cap", "thermal")


def test_a_cpu_has_no_state() -> None:
    assert telemetry.device_state(CPU) is None


# --- peers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(kernel_types()))
def test_compile_with_graphs_is_a_peer_of_its_own_and_of_a_gpu_only(name: str) -> None:
    found = kernel_type(name)
    names = [peer.name for peer in found.peers]
    if found.gradients is not None:  # a backward pass by autograd, which is not captured
        assert names[:2] == ["eager", "compile"] and "compile_cudagraphs" not in names
        return
    assert names[0] == "eager" and names.index("compile_cudagraphs") == names.index("compile") + 1
    axes, options = found.sweep[0]
    workload = found.build(axes, "float32", options)
    graphs = next(peer for peer in found.peers if peer.name == "compile_cudagraphs")
    assert graphs.make(workload, CPU) is None


# --- an arena that is lent --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(interpret=False, device="cpu")
    yield server
    server.close()


def opened(server: Server, pool: Pool) -> Child:
    spawned = server.spawn(isolate=True) or server.spawn(isolate=False)
    assert spawned is not None
    child = Child(spawned, pool, device="cpu", timeout_s=10)
    child.open()
    return child


def test_a_child_works_on_in_its_own_arena_after_one_was_lent(server: Server) -> None:
    pool, large = Pool(1 << 16, CPU), Arena.create(1 << 20, CPU)
    child = opened(server, pool)
    own = child.arena
    with child.lent(large):
        assert child.arena is large and child.noop() > 0
    assert child.arena is own and child.noop() > 0
    with pytest.raises(Failed), child.lent(large):
        raise Failed("out_of_memory", "ran out of memory")
    assert not child.ended and child.arena is own and child.noop() > 0
    with pytest.raises(Failed), child.lent(large):
        raise Failed("incorrect", "was wrong")
    assert child.ended and child.arena is own
    assert pool.take() is own


def test_a_child_that_ends_with_a_lent_arena_gives_back_its_own(server: Server) -> None:
    pool = Pool(1 << 16, CPU)
    child = opened(server, pool)
    own = child.arena
    with (
        pytest.raises(Failed, match="ended before it returned") as caught,
        child.lent(Arena.create(1 << 20, CPU)),
    ):
        child.spawned.kill()
        child.noop()
    assert caught.value.status == "crashed"
    assert pool.take() is own


# --- a GPU whose memory others hold -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("free_gb", "taken"), [(1.0, True), (100.0, False)])
def test_memory_that_others_hold_is_no_verdict(
    free_gb: float, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free_gb * 1e9), int(140e9)))
    judging = object.__new__(Referee)
    judging.device = torch.device("cuda", 0)
    judging.scope = Scope(kernel_type=RMS, workloads=(rms(4096, 4096),), dtypes=("float32",))
    if not taken:
        judging._must_have_memory()
        return
    with pytest.raises(
        DeviceError, match=r"Other processes hold the memory of this GPU: 1.0 of 140.0 GB are free"
    ):
        judging._must_have_memory()


@pytest.mark.parametrize("name", ["rmsnorm_row.py", "overflows.py", "overflows.cu"])
def test_what_overflows_by_its_source_does_not_pass_where_it_could_not_be_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(referee.huge, "fits", lambda *arguments: False)
    monkeypatch.setattr(referee.gpu, "device_lock", lambda device: contextlib.nullcontext())
    judging = object.__new__(Referee)
    judging.device, judging.kernel_type = torch.device("cuda", 0), RMS
    judging.scope = Scope(kernel_type=RMS, workloads=(), dtypes=("float16",))
    sheet = Sheet.begun(Request(action="evaluate"), ())
    domain = Domain(dtypes=RMS.dtypes, values={})
    path = (HONEST if name.startswith("rms") else MUTANTS) / name
    arguments = (cast("Child", None), read_candidate(path), domain, sheet)
    if path.parent == HONEST:
        judging._more_than_32_bits(*arguments)
        assert sheet.stages["edges"] == "passed"
        assert "131075x16384 (float16)" in sheet.notes[0]
        return
    with pytest.raises(StageFailed, match="131075x16384.*could not be run.*64 bits") as caught:
        judging._more_than_32_bits(*arguments)
    assert caught.value.status == "incorrect"
    assert sheet.stages["edges"] == "failed"


# --- a disk without room ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "machine"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EROFS, "Read-only file system"), True),
        (CompileError("ninja: fatal error: kernel.o: No space left on device", remedy=""), True),
        (CompileError("kernel.cpp:1: error: expected ';'", remedy=""), False),
        (OSError(errno.ENOENT, "No such file"), False),
    ],
)
def test_a_full_disk_is_the_machines_fault_and_not_a_candidates(
    error: Exception, machine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(candidate: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(child.build, "build", fails)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = child._Worker(theirs)
        candidate = read_candidate(HONEST / "rmsnorm_plain.cpp")
        request = {"op": "build", "candidate": candidate.model_dump(mode="json"), "device": "cpu"}
        with pytest.raises(ToolMissingError if machine else type(error)) as caught:
            worker.do(request)
    expected = (
        "tool_missing" if machine else "compile_error" if isinstance(error, CompileError) else "crashed"
    )
    assert child.classify(caught.value) == expected
    if machine:
        assert "AUTOKERNEL_HF_CACHE" in str(caught.value)


def test_a_cache_that_cannot_be_made_does_not_keep_the_walls_from_standing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOKERNEL_HF_CACHE", str(tmp_path / "file" / "cache"))
    assert confine.walls({"HOME": str(tmp_path)}, builder=True).writable == ()
    with (
        pytest.raises(AutokernelError, match="cannot be written"),
        Judge("rmsnorm", "cpp", (rms(4, 64),)),
    ):
        pass


# --- what is near -----------------------------------------------------------------------------------------------------


def test_an_output_too_large_to_keep_is_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = rms(64, 33, "bfloat16")
    wanted = RMS.reference(**make_inputs(RMS, workload, 3))[0]
    for part in (1 << 20, 100):
        monkeypatch.setattr(near, "_PART", part)
        look = near.Near(wanted, RMS, workload, torch_error=1e-3)
        for row in (0, 31, 63):
            for off in (0.0, 1e-3, 1.0):
                output = wanted.clone()
                output[row, 5] += off
                assert look.holds(output) == (off < 1.0)


# --- what a session need not wait for ---------------------------------------------------------------------------------


def test_telling_a_wrong_element_imports_nothing() -> None:
    """Functions of torch that import sympy, or its compiler, at their first call cost each session seconds."""
    program = (
        "import sys\n"
        "from autokernel_hf.judge import checks\n"
        "from autokernel_hf.kernels import kernel_type\n"
        "from autokernel_hf.kernels.base import make_inputs\n"
        "found = kernel_type('rmsnorm')\n"
        "workload = found.build({'M': 4, 'N': 64}, 'float32', {})\n"
        "before = set(sys.modules)\n"
        "calls = tuple(make_inputs(found, workload, seed) for seed in (1, 2))\n"
        "assert checks.admit(found, workload, calls) == ()\n"
        "print(sorted(m for m in set(sys.modules) - before if m.partition('.')[0] in ('sympy', 'mpmath', 'torch')))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_server_runs_no_thread_of_its_own_when_it_forks(device: str) -> None:
    """For a GPU it hashes Triton's files beside its imports; a fork with that thread about might take its locks along."""
    code = (
        "import sys, threading; from autokernel_hf.judge.server import _preload; _preload(sys.argv[1]); "
        "print(threading.active_count(), 'triton.compiler.code_generator' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, device], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", str(device == "cuda")]
