"""The judge: the faster candidate wins, and what happens around it. What candidates do: `test_mutants`, `test_honest`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autokernel_hf.candidates import read_candidate
from autokernel_hf.errors import JudgeError, UsageError
from autokernel_hf.evaluate import Judge, decide, evaluate
from autokernel_hf.records import Candidate, Evaluation, Stages, WorkloadResult
from tests.judge_files import HONEST, MUTANTS, rms

STAGES = ("smoke", "shapes", "numerics", "determinism", "edges")


# --- hostile candidates --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cpp_judge() -> Iterator[Judge]:
    with Judge("rmsnorm", "cpp", (rms(32, 768), rms(8, 2048)), timeout_s=4) as judge:
        yield judge


def test_nothing_that_a_candidate_started_outlives_it(cpp_judge: Judge) -> None:
    source = without_threads(
        extra="#include <sys/prctl.h>\n#include <unistd.h>\n",
        before="""
  if (fork() == 0) {
    setsid();
    if (fork() == 0) {
      prctl(PR_SET_NAME, "ak_orphan");
      sleep(600);
    }
    _exit(0);
  }""",
    )
    evaluation = cpp_judge.one_shot(candidate(source), peers=False)
    assert evaluation.status == "rejected"
    assert "behind" in evaluation.reason
    assert processes_named("ak_orphan") == []


def test_a_candidate_sees_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("SOME_API_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "secret")
    monkeypatch.setenv("AK_HARMLESS", "1")
    source = without_threads(
        extra="#include <stdlib.h>\n",
        before="""
  if (getenv("HF_TOKEN") || getenv("SOME_API_KEY") || getenv("AWS_REGION")) return 701;
  if (!getenv("AK_HARMLESS")) return 702;""",
    )
    evaluation = evaluate(candidate(source), device="cpu", workloads=(rms(4, 64),), quick=True, peers=False)
    assert evaluation.status == "passed", evaluation.reason


# --- what is unsupported ----------------------------------------------------------------------------------------------


def test_cuda_candidate_without_a_gpu_is_unsupported() -> None:
    evaluation = evaluate(read_candidate(HONEST / "rmsnorm_block.cu"), device="cpu")
    assert evaluation.status == "unsupported"
    assert "GPU" in evaluation.reason


def test_dtype_outside_of_the_domain_is_unsupported() -> None:
    evaluation = evaluate(
        read_candidate(HONEST / "activation_float32_only.cpp"), device="cpu", dtypes=("float16",)
    )
    assert evaluation.status == "unsupported"
    assert "float32" in evaluation.reason


def test_a_session_judges_its_own_type_only(cpp_judge: Judge) -> None:
    with pytest.raises(UsageError, match="rmsnorm"):
        cpp_judge.evaluate(read_candidate(HONEST / "softmax_online.cpp"))


# --- the cascade and its timing ---------------------------------------------------------------------------------------

_PLAIN = """// kernel_type: rmsnorm
// {note}
#include "autokernel.h"
#include <math.h>
{extra}
extern "C" int rmsnorm(const AkTensor *x, const AkTensor *weight, double eps, double offset, const AkTensor *out,
                       const AkContext *ctx) {{{before}
  if (x->dtype != AK_F32 || weight->dtype != AK_F32) return AK_UNSUPPORTED;
  int64_t rows = 1;
  const int64_t n = x->sizes[x->ndim - 1];
  for (int d = x->ndim - 1; d >= 0; rows *= x->sizes[d--]) {{
    if (x->sizes[d] != 1 && x->strides[d] != rows) return AK_NEED_CONTIGUOUS;
  }}
  rows /= n;
  const float *in = (const float *)x->data, *w = (const float *)weight->data;
  float *result = (float *)out->data;
  for (int repeat = 0; repeat < {repeats}; ++repeat) {{
    for (int64_t row = 0; row < rows; ++row) {{
      double sum = 0;
      for (int64_t i = 0; i < n; ++i) sum += (double)in[row * n + i] * in[row * n + i];
      const float scale = (float)(1 / sqrt(sum / (double)n + eps));
      for (int64_t i = 0; i < n; ++i) {{
        ((volatile float *)result)[row * n + i] = in[row * n + i] * scale * (w[i * weight->strides[0]] + (float)offset);
      }}
    }}
  }}
  return AK_OK;
}}
"""


def without_threads(*, repeats: int = 1, extra: str = "", before: str = "", note: str = "") -> str:
    """An honest float32 candidate on one thread; `repeats` makes it slower by as much."""
    domain = "supports: dtype=float32"
    return _PLAIN.format(note=domain, extra=f"// {note}\n{extra}", before=before, repeats=repeats)


def candidate(source: str) -> Candidate:
    return Candidate(kernel_type="rmsnorm", backend="cpp", source=source)


def processes_named(name: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "comm").read_text().strip() == name:
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def session() -> Iterator[Judge]:
    with Judge("rmsnorm", "cpp", (rms(256, 768),)) as judge:
        yield judge


def test_a_candidate_that_is_faster_than_the_incumbent_is_kept_after_all_stages(session: Judge) -> None:
    evaluation = session.evaluate(candidate(without_threads()), candidate(without_threads(repeats=5)))
    decision, reason = decide(evaluation)
    assert decision == "keep", reason
    assert all(getattr(evaluation.stages, stage) == "passed" for stage in STAGES)
    (result,) = evaluation.workloads
    assert result.speedup_vs_incumbent is not None and 2.5 < result.speedup_vs_incumbent < 10
    assert result.ci95_vs_incumbent is not None
    assert result.ci95_vs_incumbent[0] <= result.speedup_vs_incumbent <= result.ci95_vs_incumbent[1]
    assert evaluation.built_id is not None and evaluation.built_id.startswith("_ak_rmsnorm_cpp_")


def test_a_loser_is_reverted_after_the_smoke_stage(session: Judge) -> None:
    evaluation = session.evaluate(candidate(without_threads(repeats=5)), candidate(without_threads()))
    decision, reason = decide(evaluation)
    assert decision == "revert"
    assert reason.startswith("Slower")
    assert evaluation.status == "passed"
    assert evaluation.stages.smoke == "passed"
    assert evaluation.stages.edges == "skipped"


def test_a_candidate_is_not_faster_than_itself(session: Judge) -> None:
    same = candidate(without_threads(note="twice"))
    evaluation = session.evaluate(same, same)
    assert decide(evaluation)[0] == "revert"
    (result,) = evaluation.workloads
    assert result.ci95_vs_incumbent is not None
    assert result.ci95_vs_incumbent[0] <= 1.01


def test_confirmation_has_timings_against_every_peer_and_all_stages(session: Judge) -> None:
    evaluation = session.confirm(candidate(without_threads()))
    assert evaluation.status == "passed", evaluation.reason
    assert evaluation.confirmed
    assert all(getattr(evaluation.stages, stage) == "passed" for stage in STAGES)
    (result,) = evaluation.workloads
    assert {"eager", "F.rms_norm", "compile"} <= set(result.peers_us)
    assert result.baseline_us == min(result.peers_us.values())
    assert result.ci95 is not None and result.speedup is not None
    assert result.gb_s == pytest.approx((2 * 256 * 768 + 768) * 4 / result.latency_us / 1e3)  # type: ignore[operator]


def test_peers_of_a_session_carry_over_to_its_candidates(session: Judge) -> None:
    (peers,) = session.measure_peers()
    assert peers.baseline in peers.peers_us
    (result,) = session.evaluate(candidate(without_threads(note="after peers"))).workloads
    assert result.baseline == peers.baseline
    assert result.speedup_vs_eager is not None
    assert peers.baseline_us is not None and peers.eager_us is not None
    assert result.speedup == pytest.approx(result.speedup_vs_eager * peers.baseline_us / peers.eager_us)


def test_every_second_of_an_evaluation_is_one_of_a_phase() -> None:
    with Judge("rmsnorm", "cpp", (rms(64, 768),)) as judge:
        for i, names in enumerate(({"interpreter", "imports", "device", "start"}, set())):
            began = time.monotonic()
            evaluation = judge.one_shot(candidate(without_threads(note=f"phases {i}")), peers=False)
            wall_s = time.monotonic() - began
            spent: dict[str, float] = {}
            for phase, seconds in evaluation.phases:
                spent[phase] = spent.get(phase, 0.0) + seconds
            assert {*names, "build", "smoke", "timing", "edges", "end"} <= set(spent)
            assert ("imports" in spent) is (i == 0), "a session is opened once"
            assert 0.85 * wall_s < sum(spent.values()) < wall_s + 0.01, (wall_s, spent)
            assert sum(spent.values()) == pytest.approx(evaluation.seconds, abs=0.02)
            assert spent.get("other", 0.0) < 0.15 * wall_s, spent


def test_a_session_that_was_opened_long_before_costs_its_first_candidate_nothing() -> None:
    with Judge("rmsnorm", "cpp", (rms(8, 64),), quick=True) as judge:
        judge.measure_peers()
        evaluation = judge.evaluate(candidate(without_threads(note="late")))
    assert {"interpreter", "imports", "device"}.isdisjoint(dict(evaluation.phases))


def test_a_given_seed_reproduces_the_verdict_to_the_element() -> None:
    zeros = read_candidate(MUTANTS / "zeros.cpp")
    first, second = (
        evaluate(zeros, device="cpu", workloads=(rms(8, 64),), seed=7, peers=False).reason for _ in range(2)
    )
    assert first == second
    assert "element" in first


# --- processes --------------------------------------------------------------------------------------------------------


def test_the_callers_process_needs_no_torch() -> None:
    code = "import sys, autokernel_hf.evaluate; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_everything_ends_with_the_referee() -> None:
    hang = read_candidate(MUTANTS / "hangs.cpp")
    before = set(descendants(os.getpid()))
    with Judge("rmsnorm", "cpp", (rms(4, 64),)) as judge:
        judge.evaluate(candidate(without_threads()))
        started = set(descendants(os.getpid())) - before
        assert len(started) >= 3  # the referee, its server, a child that is kept
        referee = judge.referee_pid
        os.kill(referee, signal.SIGKILL)
        with pytest.raises(JudgeError, match="referee ended"):
            judge.evaluate(hang)
        until = time.monotonic() + 10
        while any(alive(pid) for pid in started) and time.monotonic() < until:
            time.sleep(0.05)
        assert [pid for pid in started if alive(pid)] == []


def descendants(pid: int) -> list[int]:
    found = [pid]
    for member in found:
        for task in Path(f"/proc/{member}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:
                continue
    return found[1:]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_what_is_wrong_with_a_session_is_told_in_the_callers_process() -> None:
    with (
        pytest.raises(UsageError, match="no kernel type"),
        Judge("no_such_type", "cpp", None) as judge,
    ):
        judge.measure_peers()


# --- decide -----------------------------------------------------------------------------------------------------------


def timed(label: str, speedup: float, half: float, share: float = 1.0, **more: object) -> WorkloadResult:
    return WorkloadResult(
        label=label,
        shape=label,
        dtype="float32",
        share=share,
        latency_us=1.0,
        speedup_vs_incumbent=speedup,
        ci95_vs_incumbent=(speedup - half, speedup + half),
        **more,  # type: ignore[arg-type]
    )


def judged(*results: WorkloadResult, all_stages: bool = True, status: str = "passed") -> Evaluation:
    done = dict.fromkeys(STAGES, "passed") if all_stages else {"smoke": "passed"}
    return Evaluation(status=status, stages=Stages(**done), workloads=results, reason="seen")  # type: ignore[arg-type]


def test_keeps_what_is_faster_in_all_stages() -> None:
    assert decide(judged(timed("a", 1.2, 0.05)))[0] == "keep"


def test_tells_where_it_is_slower_though_not_all_was_timed() -> None:
    untimed = WorkloadResult(label="b", shape="b", dtype="float32")
    decision, reason = decide(judged(timed("a", 0.5, 0.1), untimed, all_stages=False))
    assert decision == "revert"
    assert "Slower on a: 0.500x" in reason


def test_reverts_what_is_within_epsilon() -> None:
    decision, reason = decide(judged(timed("a", 1.03, 0.025)))
    assert (decision, reason.startswith("No difference")) == ("revert", True)


def test_reverts_a_win_that_costs_a_workload_more_than_delta() -> None:
    decision, reason = decide(judged(timed("a", 1.5, 0.01), timed("b", 0.97, 0.02)))
    assert decision == "revert"
    assert "b is slower" in reason


def test_keeps_a_win_that_costs_a_workload_less_than_delta() -> None:
    assert decide(judged(timed("a", 1.5, 0.01), timed("b", 0.985, 0.001)))[0] == "keep"


def test_shares_weigh_the_workloads() -> None:
    rare, common = timed("rare", 3.0, 0.01, share=0.001), timed("common", 1.0, 0.005, share=1.0)
    assert decide(judged(rare, common))[0] == "revert"


def test_keeps_nothing_without_all_stages() -> None:
    decision, reason = decide(judged(timed("a", 2.0, 0.1), all_stages=False))
    assert decision == "revert"
    assert "edges" in reason


def test_keeps_nothing_that_was_not_timed_everywhere() -> None:
    untimed = WorkloadResult(label="b", shape="b", dtype="float32")
    decision, reason = decide(judged(timed("a", 2.0, 0.1), untimed))
    assert decision == "revert"
    assert "not timed" in reason


def test_without_an_incumbent_eager_is_the_opponent() -> None:
    result = WorkloadResult(
        label="a", shape="a", dtype="float32", speedup_vs_eager=1.5, ci95_vs_eager=(1.4, 1.6)
    )
    decision, reason = decide(judged(result))
    assert decision == "keep"
    assert "eager" in reason


@pytest.mark.parametrize(("status", "expected"), [("rejected", "quarantine"), ("crashed", "revert")])
def test_what_failed_is_never_kept(status: str, expected: str) -> None:
    assert decide(judged(timed("a", 2.0, 0.1), status=status)) == (expected, "seen")


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu_judge() -> Iterator[Judge]:
    with Judge("rmsnorm", "cuda", (rms(4096, 4096),), device="cuda", timeout_s=20) as judge:
        yield judge


@pytest.mark.gpu
def test_honest_kernels_of_both_kinds_pass_all_stages_on_a_gpu(gpu_judge: Judge) -> None:
    for name in ("rmsnorm_block.cu", "rmsnorm_row.py"):
        evaluation = gpu_judge.one_shot(read_candidate(HONEST / name), peers=True)
        assert evaluation.status == "passed", evaluation.reason
        assert all(getattr(evaluation.stages, stage) == "passed" for stage in STAGES)
        (result,) = evaluation.workloads
        assert result.pct_peak is not None and 10 < result.pct_peak <= 100
        assert result.host_us is not None and result.latency_us is not None
        assert evaluation.peak_vram_mb is not None


@pytest.mark.gpu
def test_a_kernel_on_a_gpu_has_warm_times_peers_and_a_state_of_the_device(gpu_judge: Judge) -> None:
    evaluation = gpu_judge.one_shot(read_candidate(HONEST / "rmsnorm_block.cu"), peers=True)
    (result,) = evaluation.workloads
    assert evaluation.status == "passed", evaluation.reason
    assert result.device_us is not None
    for warm_us in (result.hot_us, result.graph_us):
        assert warm_us is not None and 0.3 * result.device_us < warm_us < 1.2 * result.device_us
    assert (
        result.eager_us is not None and result.eager_hot_us is not None and result.eager_graph_us is not None
    )
    assert 0.3 * result.eager_us < result.eager_graph_us < 1.2 * result.eager_us
    assert {"eager", "F.rms_norm", "compile", "compile_cudagraphs"} <= set(result.peers_us)
    before, after = evaluation.device_states
    assert before.sm_mhz is not None and after.sm_mhz is not None and after.sm_mhz > 300
    assert after.power_w is not None and after.throttled is not None


@pytest.mark.gpu
def test_a_kernel_on_a_gpu_is_not_faster_than_itself(gpu_judge: Judge) -> None:
    same = read_candidate(HONEST / "rmsnorm_row.py")
    evaluation = gpu_judge.evaluate(same, same)
    assert decide(evaluation)[0] == "revert"
    (result,) = evaluation.workloads
    assert result.ci95_vs_incumbent is not None
    assert 0.98 < result.ci95_vs_incumbent[0] <= result.ci95_vs_incumbent[1] < 1.02
