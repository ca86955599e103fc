"""Every way to fool a benchmark that we know of, as a candidate that the judge must turn down.

Each file of `mutants/` says in its first lines which status it must get, and a pattern for the reason: what the judge saw.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from autokernel_hf.build import compile_only
from autokernel_hf.candidates import read_candidate
from autokernel_hf.evaluate import Judge
from autokernel_hf.kernels import kernel_type
from autokernel_hf.records import Workload
from tests.judge_files import HONEST, MUTANTS, check_mutant, header, mutants, rms


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home with a token in it, which no candidate may see."""
    folder = tmp_path_factory.mktemp("home")
    token = folder / ".cache" / "huggingface" / "token"
    token.parent.mkdir(parents=True)
    token.write_text("hf_secret")
    before = os.environ.get("HOME")
    os.environ["HOME"] = str(folder)
    try:
        yield folder
    finally:
        if before is None:
            del os.environ["HOME"]
        else:
            os.environ["HOME"] = before


@pytest.fixture(scope="module")
def cpp_judge(home: Path) -> Iterator[Judge]:
    with Judge("rmsnorm", "cpp", (rms(32, 768), rms(8, 2048)), timeout_s=4) as judge:
        yield judge


@pytest.fixture(scope="module")
def triton_judge(home: Path) -> Iterator[Judge]:
    with Judge("rmsnorm", "triton", (rms(4, 768),), dtypes=("float32", "float16"), timeout_s=6) as judge:
        yield judge


@pytest.fixture(scope="module")
def gpu_judge() -> Iterator[Judge]:
    """One session for both kinds of kernels: each holds some gigabytes. Every dtype more takes seconds of compiling."""
    dtypes = ("float32", "float16")
    with Judge("rmsnorm", "cuda", (rms(4096, 4096),), dtypes=dtypes, device="cuda", timeout_s=10) as judge:
        yield judge


def test_every_mutant_says_what_it_must_get() -> None:
    found = sorted(MUTANTS.iterdir())
    assert len(found) >= 100
    assert {p.suffix for p in found} == {".cpp", ".py", ".cu"}
    assert [p.name for p in found if not header(p, "expect") or not header(p, "because")] == []


@pytest.mark.parametrize("name", mutants(".cpp"))
def test_cpp_mutant_gets_its_status(cpp_judge: Judge, name: str) -> None:
    check_mutant(cpp_judge, name)


def test_an_honest_cpp_candidate_passes_after_all_of_them(cpp_judge: Judge) -> None:
    evaluation = cpp_judge.one_shot(read_candidate(HONEST / "rmsnorm_plain.cpp"), peers=False)
    assert evaluation.status == "passed", evaluation.reason


@pytest.mark.parametrize("name", mutants(".py"))
def test_triton_mutant_gets_its_status(triton_judge: Judge, name: str) -> None:
    check_mutant(triton_judge, name)


def test_an_honest_triton_candidate_passes_after_all_of_them(triton_judge: Judge) -> None:
    evaluation = triton_judge.one_shot(read_candidate(HONEST / "rmsnorm_row.py"), peers=False)
    assert evaluation.status == "passed", evaluation.reason


def test_a_slow_clock_is_seen_where_a_turn_takes_milliseconds() -> None:
    with Judge("rmsnorm", "cpp", (rms(2048, 2048),), timeout_s=60) as judge:
        evaluation = judge.one_shot(read_candidate(MUTANTS / "slows_the_clock.cpp"), peers=False)
    assert evaluation.status == "rejected"
    assert "clock" in evaluation.reason or "faster than this device" in evaluation.reason


@pytest.mark.parametrize("name", [*mutants(".cpp", other_types=True), *mutants(".py", other_types=True)])
def test_mutant_of_another_type_gets_its_status(name: str) -> None:
    candidate = read_candidate(MUTANTS / name)
    with Judge(candidate.kernel_type, candidate.backend, (call_of(name),), timeout_s=20) as judge:
        check_mutant(judge, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", mutants(".py", gpu=True, other_types=True))
def test_mutant_of_another_type_gets_its_status_on_a_gpu(name: str) -> None:
    candidate = read_candidate(MUTANTS / name)
    call = call_of(name)
    with Judge(candidate.kernel_type, candidate.backend, (call,), device="cuda", timeout_s=20) as judge:
        check_mutant(judge, name)


def call_of(name: str) -> Workload:
    """The call that a mutant of another type is timed on: what it names, as axes and options, or the type's first."""
    found = kernel_type(read_candidate(MUTANTS / name).kernel_type)
    named = header(MUTANTS / name, "call")
    axes, options = json.loads(named) if named is not None else found.sweep[0]
    return found.build(axes, "float32", options)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
@pytest.mark.parametrize("name", [n for n in mutants(".cu", gpu=True) if n != "does_not_compile.cu"])
def test_cuda_mutant_compiles(name: str) -> None:
    assert compile_only(read_candidate(MUTANTS / name), "sm_90a").arch == "sm_90a"


@pytest.mark.gpu
@pytest.mark.parametrize("name", mutants(".cu", gpu=True))
def test_cuda_mutant_gets_its_status_and_the_next_candidate_is_judged(gpu_judge: Judge, name: str) -> None:
    check_mutant(gpu_judge, name)
    honest = read_candidate(HONEST / "rmsnorm_block.cu")
    evaluation = gpu_judge.evaluate(
        honest, honest
    )  # right, and no faster than itself: the other stages would add nothing
    assert evaluation.status == "passed", evaluation.reason
    assert evaluation.workloads[0].speedup_vs_incumbent is not None


@pytest.mark.gpu
@pytest.mark.parametrize("name", mutants(".py", gpu=True))
def test_triton_mutant_gets_its_status_on_a_gpu(gpu_judge: Judge, name: str) -> None:
    check_mutant(gpu_judge, name)
