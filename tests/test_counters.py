"""Hardware counters: what ncu writes is read and summed, and what keeps it from counting is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autokernel_hf import counters, pipeline, tunables
from autokernel_hf.build import build
from autokernel_hf.counters import METRICS, Counters, Launch, NoCountersError, launches_in, summed, why_none
from autokernel_hf.kernels import kernel_type
from autokernel_hf.kernels import starter as starter_of
from autokernel_hf.records import Backend, Candidate, Evaluation, Stages, Workload, WorkloadResult
from autokernel_hf.runs import Run
from tests.loop_helpers import settings, target
from tests.test_diagnose import H200

TIME, READ, WRITTEN = "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum"
BUSY = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
WAIT = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"


def test_all_launches_of_a_call_are_summed_and_means_are_weighted_by_time() -> None:
    found = summed(
        [
            Launch(kernel="split", values={TIME: 3000.0, READ: 600.0, WRITTEN: 50.0, BUSY: 80.0, WAIT.format("barrier"): 1.0}),
            Launch(kernel="merge", values={TIME: 1000.0, READ: 40.0, BUSY: 20.0, WAIT.format("long_scoreboard"): 5.0}),
            Launch(kernel="merge", values={TIME: 1000.0, READ: 10.0, BUSY: 20.0}),
        ]
    )  # fmt: skip
    assert found.kernels == (("split", 1), ("merge", 2))
    assert found.us == pytest.approx(5.0) and found.dram_bytes == pytest.approx(700.0)
    assert found.dram_pct == pytest.approx((3 * 80 + 20 + 20) / 5)
    # Of launches that tell: five times the waiting in a third of the time.
    assert found.stalls == (("long_scoreboard", pytest.approx(5 / 6)), ("barrier", pytest.approx(1 / 6)))
    assert found.tensor_pct is None and found.local_bytes is None and found.conflict_pct is None


def test_conflicts_are_a_part_of_the_accesses() -> None:
    values = {
        TIME: 10.0,
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": 30.0,
        "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": 120.0,
        "launch__registers_per_thread": 96.0,
    }
    found = summed([Launch(kernel="k", values=values)])
    assert found.conflict_pct == pytest.approx(25.0) and found.registers == 96


def test_a_table_is_read_past_words_units_and_what_is_not_available() -> None:
    text = (
        '==PROF== Connected to process 4242 (/usr/bin/python3)\n"ID","Kernel Name","Block Size","'
        + '","'.join((TIME, READ, BUSY))
        + '"\n"","","","ns","byte","%"\n'
        + '"0","void k<float, 4>(const float *, ""x"")","(128, 1, 1)","1,234,567","8192","n/a"\n'
        + '"1","m","(32, 1, 1)","10","0","nan"\n==PROF== Disconnected\n'
    )
    first, second = launches_in(text)
    assert first.kernel == 'void k<float, 4>(const float *, "x")'
    assert first.values == {TIME: 1234567.0, READ: 8192.0}
    assert second.values == {TIME: 10.0, READ: 0.0}
    assert launches_in("==ERROR== nothing\n") == ()


RECORDED = {
    "triton": ("short_kernel", 3.488, 2_108_672 + 1_154_560, 19.73, 22.0, 0.32, 38, 0.4585),
    "cuda": (
        "void <unnamed>::held_rows<__nv_bfloat16, 2, 1, 0, 0>(const T1 *, <unnamed>::Rows, <unnamed>::Parameter, "
        "float, float, T1 *, long, int, float)",
        4.32,
        2_114_048 + 1_619_712,
        18.16,
        23.55,
        0.24,
        32,
        0.475,
    ),
}


@pytest.mark.parametrize("backend", RECORDED)
def test_what_ncu_wrote_on_an_h200_is_read(backend: str, repository_root: Path) -> None:
    """ncu 2025.3.1 on a norm of 512 rows of 2048, as it was; without names and facts of that machine."""
    kernel, us, moved, dram_pct, occupancy, waves, registers, waiting = RECORDED[backend]
    launches = launches_in((repository_root / f"tests/recorded/ncu-rmsnorm-{backend}.csv").read_text())
    assert len(launches) == 1 and set(METRICS) <= launches[0].values.keys()
    found = summed(launches)
    assert found.kernels == ((kernel, 1),) and found.registers == registers
    assert found.us == pytest.approx(us) and found.dram_bytes == moved
    assert (found.dram_pct, found.occupancy_pct, found.waves) == (dram_pct, occupancy, waves)
    assert found.used_pct == 100.0 and found.conflict_pct == 0.0 and found.local_bytes == 0.0
    assert found.stalls[0] == ("long_scoreboard", pytest.approx(waiting, abs=1e-3))
    assert sum(part for _, part in found.stalls) == pytest.approx(1.0)


@pytest.mark.parametrize("launches", [[], [Launch(kernel="k", values={READ: 1.0})]])
def test_without_a_time_there_is_no_sum(launches: list[Launch]) -> None:
    with pytest.raises(ValueError, match="time"):
        summed(launches)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters", "administrators"),
        ("==WARNING== No kernels were profiled.", "no kernel"),
        ("==ERROR== The application returned an error code (1).\nmore", "The application returned an error code (1)"),
        ("Segmentation fault", "Segmentation fault"),
        ("", "it said nothing"),
    ],
)  # fmt: skip
def test_why_there_are_none_is_told(said: str, told: str) -> None:
    error = why_none(said)
    assert told in error.message and error.remedy


# --- the whole way, behind the walls, with a program that stands for ncu ------------------------------------------

REDUCE = kernel_type("reduce")
WORKLOAD = REDUCE.workloads["cpu"][0]


@pytest.fixture
def candidate(monkeypatch: pytest.MonkeyPatch, repository_root: Path) -> Candidate:
    source = starter_of("reduce", "cpp")
    assert source is not None
    monkeypatch.setenv("PATH", str(repository_root / "tests/tools"), prepend=":")
    return Candidate(kernel_type="reduce", backend="cpp", source=source)


def plays(monkeypatch: pytest.MonkeyPatch, **how: object) -> None:
    monkeypatch.setenv("FAKE_NCU", json.dumps({"label": WORKLOAD.label, **how}))


def test_the_call_is_the_targets_own_and_counted_behind_walls(
    candidate: Candidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = dict.fromkeys(METRICS, 2.0) | {TIME: 5000.0}
    plays(monkeypatch, launches=[["first", known], ["second", known]])
    found = counters.read(candidate, WORKLOAD, "cpu")
    assert found.kernels == (("first", 1), ("second", 1)) and found.digest == candidate.digest
    assert found.us == pytest.approx(10.0) and found.dram_bytes == pytest.approx(8.0)
    assert len(found.stalls) == len(counters.STALLS)
    assert Counters.model_validate_json(found.model_dump_json()) == found


def test_counters_that_a_chip_does_not_have_are_left_out(
    candidate: Candidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = [WAIT.format("gmma"), BUSY]
    plays(monkeypatch, unknown=missing, launches=[["k", dict.fromkeys(METRICS, 1.0)]])
    found = counters.read(candidate, WORKLOAD, "cpu")
    assert found.dram_pct is None and found.dram_bytes == pytest.approx(2.0)
    assert "gmma" not in dict(found.stalls) and "barrier" in dict(found.stalls)


def test_without_permission_it_says_so(candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    plays(monkeypatch, error="==ERROR== ERR_NVGPUCTRPERM - The user does not have permission")
    with pytest.raises(NoCountersError, match="ERR_NVGPUCTRPERM"):
        counters.read(candidate, WORKLOAD, "cpu")


def test_without_ncu_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(counters, "find_ncu", lambda: None)
    candidate = Candidate(kernel_type="reduce", backend="cpp", source="")
    with pytest.raises(NoCountersError, match="no `ncu` here"):
        counters.read(candidate, WORKLOAD, "cpu")


# --- in a run -----------------------------------------------------------------------------------------------------


def test_a_run_counts_once_for_a_kind_and_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = kernel_type("rmsnorm")
    workload = kind.build({"M": 8192, "N": 8192}, "bfloat16", {}).model_copy(update={"share": 0.1})
    source = starter_of("rmsnorm", "triton")
    assert source is not None
    first = Candidate(kernel_type="rmsnorm", backend="triton", source=source)
    values = {
        t.name: next(v for v in t.choices if v != t.value) for t in tunables.parse(source) if t.name == "TILE"
    }
    other = first.model_copy(update={"source": tunables.substitute(source, values)})
    found = target().model_copy(update={"workloads": (workload,), "device": "cuda:0"})
    asked: list[str] = []

    def read(candidate: Candidate, call: Workload, device: str) -> Counters:
        assert call == workload and device == "cuda:0"
        asked.append(candidate.digest)
        return Counters(kernels=(("k", 1),), us=9.0, digest=candidate.digest, stalls=(("barrier", 0.6),))

    def refuse(*_: object) -> Counters:
        asked.append("refused")
        raise NoCountersError("The driver keeps them.", remedy="Ask.")

    slow = Evaluation(
        status="passed",
        stages=Stages(),
        workloads=(WorkloadResult(label=workload.label, shape="", dtype="bfloat16", latency_us=400.0),),
    )
    near = slow.model_copy(update={"workloads": (slow.workloads[0].model_copy(update={"latency_us": 70.0}),)})
    with Run.create(tmp_path, "m", settings()) as run:
        H200.save(run.path / "ceilings.json")
        monkeypatch.setattr(counters, "read", refuse)
        explain = pipeline._diagnoser(run, look=True)
        for _ in range(2):
            kinds, words = explain(found, first, slow)
            assert "; no hardware counters: The driver keeps them; " in words and kinds[0] == "compute"
            assert "at its floor it would be 5.96 times as fast" in words
            assert "What to change first: compute: far from the memory's bandwidth" in words
        assert asked == ["refused"]
        explain = pipeline._diagnoser(run, look=True)
        assert "The driver keeps them" in explain(found, first, slow)[1]
        assert asked == ["refused"], "the next target's search does not ask again"
        (run.path / "counters" / "none.txt").unlink()
        monkeypatch.setattr(counters, "read", read)
        looking = pipeline._diagnoser(run, look=True)
        assert looking(found, first, near)[1].startswith("memory-bound") and asked == ["refused"]
        kinds, words = looking(found, first, slow)
        assert kinds[0] == "launch" and "warps wait for barriers 60 %" in words
        _, words = looking(found, other, slow)
        assert "counted for other constants of the same file" in words
        assert asked == ["refused", first.digest]
        # A verb of a coding agent reads what there is, and starts nothing.
        monkeypatch.setattr(counters, "read", refuse)
        assert "barriers 60 %" in pipeline._diagnoser(run)(found, first, slow)[1]
    assert asked == ["refused", first.digest]


def test_counting_takes_a_small_part_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = kernel_type("rmsnorm")
    workload = kind.build({"M": 8192, "N": 8192}, "bfloat16", {}).model_copy(update={"share": 0.1})
    found = target().model_copy(update={"workloads": (workload,), "device": "cuda:0"})
    slow = Evaluation(
        status="passed",
        stages=Stages(),
        workloads=(WorkloadResult(label=workload.label, shape="", dtype="bfloat16", latency_us=400.0),),
    )
    asked: list[Backend] = []

    def read(candidate: Candidate, call: Workload, device: str) -> Counters:
        asked.append(candidate.backend)
        return Counters(kernels=(("k", 1),), us=9.0, digest=candidate.digest, stalls=(("barrier", 0.6),))

    def of(backend: Backend) -> Candidate:
        source = starter_of("rmsnorm", backend)
        assert source is not None
        return Candidate(kernel_type="rmsnorm", backend=backend, source=source)

    spent = [0.0]
    monkeypatch.setattr(counters, "read", read)
    monkeypatch.setattr(pipeline, "spent_s", lambda run: spent[0])
    with Run.create(tmp_path, "m", settings()) as run:
        H200.save(run.path / "ceilings.json")
        explain = pipeline._diagnoser(run, look=True)
        assert "barriers 60 %" in explain(found, of("triton"), slow)[1] and asked == ["triton"]
        (file,) = (run.path / "counters").glob("*.json")
        counted = Counters.load(file)
        assert 0.0 <= counted.seconds < 1.0
        counted.model_copy(update={"seconds": 14.0}).save(file)
        spent[0] = 14.0 / pipeline.COUNTING - 1
        assert "barriers" not in explain(found, of("cuda"), slow)[1] and asked == ["triton"]
        assert "barriers" in explain(found, of("triton"), slow)[1], "what was read is there"
        spent[0] += 2
        assert "barriers 60 %" in explain(found, of("cuda"), slow)[1] and asked == ["triton", "cuda"]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_on_a_gpu_the_counters_are_the_calls(backend: Backend) -> None:
    """A norm of 64 MB moves its bytes once and has no use for tensor cores."""
    if counters.find_ncu() is None:
        pytest.skip("no ncu")
    kind = kernel_type("rmsnorm")
    workload = kind.build({"M": 4096, "N": 4096}, "bfloat16", {})
    source = starter_of("rmsnorm", backend)
    assert source is not None
    candidate = Candidate(kernel_type="rmsnorm", backend=backend, source=source)
    build(candidate, device="cuda:0")
    try:
        found = counters.read(candidate, workload, "cuda:0")
    except NoCountersError as error:
        pytest.skip(error.message)
    least = kind.bytes_moved(workload)
    assert sum(n for _, n in found.kernels) == 1
    assert (
        found.dram_bytes is not None and 0.5 * least < found.dram_bytes < 1.2 * least
    )  # writes may stay in L2
    assert found.dram_pct is not None and found.dram_pct > 40
    assert found.tensor_pct is None or found.tensor_pct < 1
    assert found.stalls and found.stalls[0][0] in counters.STALLS
