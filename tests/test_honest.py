"""No false alarms: honest kernels in many styles, which the judge must pass in every stage.

A small call of each type is timed as well.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator

import pytest

from autokernel_hf import contract
from autokernel_hf.build import compile_only
from autokernel_hf.candidates import read_candidate
from autokernel_hf.evaluate import Judge, decide
from autokernel_hf.judge.cases import Axes
from autokernel_hf.kernels import kernel_type
from autokernel_hf.records import Candidate, Evaluation, Scalar, Workload
from tests.judge_files import HONEST

STAGES = ("smoke", "shapes", "numerics", "determinism", "edges")

Open = Callable[[str, str, str, tuple[str, ...] | None], Judge]


@pytest.fixture(scope="module")
def open_judge() -> Iterator[Open]:
    """Sessions of types and backends, each opened when it is first needed and shared by the tests after it."""
    with contextlib.ExitStack() as stack:
        opened: dict[tuple[str, str, str], Judge] = {}

        def judge(name: str, backend: str, device: str, dtypes: tuple[str, ...] | None) -> Judge:
            key = (name, backend, device)
            if key not in opened:
                # One at a time: each holds processes of its own.
                stack.pop_all().close()
                opened.clear()
                workload = small_workload(name, backend)
                session = Judge(name, backend, (workload,), device=device, dtypes=dtypes, timeout_s=60)  # type: ignore[arg-type]
                opened[key] = stack.enter_context(session)
            return opened[key]

        yield judge


# A call that every honest kernel of a type supports.
OPTIONS: dict[str, dict[str, Scalar]] = {
    "activation": {"kind": "silu"},
    "gated_activation": {"kind": "silu"},
    "fused_mlp": {"activation": "silu"},
}


def small_workload(name: str, backend: str) -> Workload:
    found = kernel_type(name)
    entries: tuple[Axes, ...] = found.sweep
    axes, options = entries[0]
    return found.build(axes, "float32", {**options, **OPTIONS.get(name, {})})


def names(suffix: str) -> list[str]:
    """Sorted by type, so that kernels of one type share a session."""
    return sorted(p.name for p in HONEST.glob(f"*{suffix}") if p.name != "activation_float32_only.cpp")


def passed_all(evaluation: Evaluation) -> None:
    assert evaluation.status == "passed", evaluation.reason
    assert {stage: getattr(evaluation.stages, stage) for stage in STAGES} == dict.fromkeys(STAGES, "passed")


def test_there_are_many_of_many_types() -> None:
    read = [read_candidate(p) for p in HONEST.iterdir()]
    assert len(read) >= 30
    assert len({c.kernel_type for c in read}) >= 9
    assert {c.backend for c in read} == {"cpp", "triton", "cuda"}
    for candidate in read:
        contract.check(candidate, kernel_type(candidate.kernel_type))


@pytest.mark.parametrize("name", names(".cpp"))
def test_honest_cpp_kernel_passes_all_stages(open_judge: Open, name: str) -> None:
    candidate = read_candidate(HONEST / name)
    evaluation = open_judge(candidate.kernel_type, "cpp", "cpu", None).one_shot(candidate, peers=False)
    passed_all(evaluation)
    (result,) = evaluation.workloads
    assert result.latency_us is not None and result.latency_us > 0
    assert result.error_ratio is not None and result.error_ratio < 4


def test_honest_kernel_of_a_narrow_domain_passes_all_stages() -> None:
    workload = kernel_type("activation").build({"M": 32, "N": 768}, "float32", {"kind": "gelu_new"})
    with Judge("activation", "cpp", (workload,), timeout_s=60) as judge:
        passed_all(judge.one_shot(read_candidate(HONEST / "activation_float32_only.cpp"), peers=False))


@pytest.mark.parametrize("name", names(".py"))
def test_honest_triton_kernel_passes_in_the_interpreter_and_is_never_kept(
    open_judge: Open, name: str
) -> None:
    candidate = read_candidate(HONEST / name)
    session = open_judge(candidate.kernel_type, "triton", "cpu", ("float32", "float16"))
    evaluation = session.one_shot(candidate, peers=False)
    passed_all(evaluation)
    assert [r.latency_us for r in evaluation.workloads] == [None]
    assert decide(evaluation)[0] == "revert"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
@pytest.mark.parametrize("name", names(".cu"))
def test_honest_cuda_kernel_compiles_without_spills(name: str) -> None:
    report = compile_only(read_candidate(HONEST / name), "sm_90a")
    assert report.spill_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*names(".cu"), *names(".py")])
def test_honest_kernel_passes_all_stages_on_a_gpu(open_judge: Open, name: str) -> None:
    candidate: Candidate = read_candidate(HONEST / name)
    session = open_judge(candidate.kernel_type, candidate.backend, "cuda", None)
    evaluation = session.one_shot(candidate, peers=False)
    passed_all(evaluation)
    (result,) = evaluation.workloads
    assert result.latency_us is not None
