"""The same machine code is not timed twice: what counts as the same, and how it is entered."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import pytest

from autokernel_hf import tunables
from autokernel_hf.agent import Playbook
from autokernel_hf.build import build
from autokernel_hf.evaluate import Judge
from autokernel_hf.judge.launches import plain
from autokernel_hf.kernels import kernel_type
from autokernel_hf.kernels import starter as starter_of
from autokernel_hf.machine_code import digest_of
from autokernel_hf.progress import Silent
from autokernel_hf.records import Backend, Candidate, Evaluation, Proposal, Stages
from autokernel_hf.runs import Run
from autokernel_hf.search import Limits, Search
from tests.loop_helpers import KnownJudge, decide, diagnose, settings, starter, target

HOST = """
namespace {{ const int kTwice = {constant}; int counts[2]; int others[2]; }}
{comment}
extern "C" const char* twice(int* x) {{ x[0] *= kTwice; return {word}; }}
extern "C" int count() {{ counts[0]++, others[0]++; return {counted}[1]++; }}
extern "C" int another();
extern "C" int more();
extern "C" int call() {{ return {called}(); }}
"""
KERNEL = """
namespace {{
{comment}
constexpr int kTwice = {constant};
constexpr int kUnused = {unused};
__device__ float first, second;  // both are used, or only one would be there
__constant__ float factors[2];
__global__ void twice(float* x, int n) {{
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = x[i] * kTwice * factors[0] + {variable};
  if (n < 0) first = second = x[0];
}}
}}
static __global__ void thrice(float* x, int n) {{ if (n > 0) x[0] *= 3; }}
extern "C" void launch(float* x, int n) {{
  {kernel}<<<(n + {threads} - 1) / {threads}, {threads}, {shared}>>>(x, n);
  thrice<<<1, 1>>>(x, n);
}}
"""


def compiled(tmp_path: Path, name: str, source: str, compiler: list[str]) -> Path:
    """An object in a folder of its own, whose path is part of some names that nvcc makes up."""
    folder = tmp_path / name
    folder.mkdir()
    file = folder / f"unit{'.cu' if 'nvcc' in compiler[0] else '.cpp'}"
    file.write_text(source)
    subprocess.run(
        [*compiler, "-c", str(file), "-o", str(folder / "unit.o")], check=True, capture_output=True
    )
    return folder / "unit.o"


def test_words_are_no_machine_code_and_constants_are(tmp_path: Path) -> None:
    plain_ = {"constant": 2, "comment": "", "word": '"a"', "counted": "counts", "called": "another"}

    def found(name: str, **changed: object) -> str | None:
        source = HOST.format(**(plain_ | changed))
        return digest_of([compiled(tmp_path, name, source, ["g++", "-O3", "-fPIC"])])

    first = found("a")
    assert first is not None
    assert found("words", comment="// other words\n\n\n") == first
    assert found("constant", constant=3) != first
    assert found("string", word='"b"') != first, "a string is data"
    assert found("variable", counted="others") != first, "the same instruction on another address"
    assert found("call", called="more") != first, "the same instruction on another name"


def test_what_is_no_object_has_no_digest(tmp_path: Path) -> None:
    (tmp_path / "x.o").write_bytes(b"\x7fELF\x02\x01\x01" + bytes(90))
    assert digest_of([tmp_path / "x.o"]) is None
    (tmp_path / "y.o").write_bytes(b"neither")
    assert digest_of([tmp_path / "y.o"]) is None
    good = compiled(tmp_path, "a", "int one() { return 1; }", ["g++", "-O3"])
    assert digest_of([good]) is not None
    assert digest_of([good, tmp_path / "y.o"]) is None
    (tmp_path / "short.o").write_bytes(good.read_bytes()[:-200])
    assert digest_of([tmp_path / "short.o"]) is None


NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
def test_a_kernels_code_and_its_launches_are_machine_code_and_line_numbers_are_not(tmp_path: Path) -> None:
    assert NVCC is not None
    compiler = [NVCC, "-O1", "-lineinfo", "-arch=sm_90a", "-Xcompiler", "-fPIC"]
    plain_ = {
        "constant": 2, "unused": 1, "threads": 128, "shared": 0, "comment": "", "variable": "first", "kernel": "twice",
    }  # fmt: skip
    first = digest_of([compiled(tmp_path, "a", KERNEL.format(**plain_), compiler)])
    assert first is not None
    for name, changed, same in (
        ("words", {"comment": "// one\n// two\n"}, True),
        ("unused", {"unused": 7}, True),
        ("constant", {"constant": 3}, False),
        ("threads", {"threads": 256}, False),
        ("shared", {"shared": 1024}, False),
        ("variable", {"variable": "second"}, False),
        ("kernel", {"kernel": "thrice"}, False),
    ):
        found = digest_of([compiled(tmp_path, name, KERNEL.format(**(plain_ | changed)), compiler)])
        assert found is not None and (found == first) is same, name


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
def test_a_cuda_build_tells_the_machine_code_of_the_candidate() -> None:
    source = starter_of("activation", "cuda")
    assert source is not None
    space = {t.name: t for t in tunables.parse(source)}
    threads = next(v for v in space["kThreads"].choices if v != space["kThreads"].value)

    def code(text: str) -> str | None:
        return build(Candidate(kernel_type="activation", backend="cuda", source=text)).machine_code

    first = code(source)
    assert first is not None
    assert code(source.replace("\n\n", "\n\n// other words, and another line\n", 1)) == first
    assert code(tunables.substitute(source, {"kThreads": threads})) != first


# --- Triton: compiled for a GPU that is not here, not launched ----------------------------------------------------

APART = """
import json, sys
from pathlib import Path
import torch
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from autokernel_hf.judge.launches import digest_of
from autokernel_hf.triton_compile import _Driver, _import

driver.set_active(_Driver(90))
run = JITFunction.run
JITFunction.run = lambda self, *args, grid, warmup, **options: run(self, *args, grid=grid, warmup=True, **options)
rows = [int(n) for n in sys.argv[1].split(",")]
calls = [{"x": torch.empty(n, 2048), "weight": torch.empty(2048), "eps": 1e-6} for n in rows]
print(json.dumps([digest_of(_import(Path(file)).kernel_fn, calls) for file in sys.argv[2:]]))
"""


def test_constants_that_a_call_does_not_reach_launch_the_same(tmp_path: Path, repository_root: Path) -> None:
    pytest.importorskip("triton")
    source = starter_of("rmsnorm", "triton")
    assert source is not None
    present = tunables.values(source)
    other = {t.name: next(v for v in t.choices if v != t.value) for t in tunables.parse(source)}
    assert {"LONGEST", "CHUNK", "PER_THREAD"} <= other.keys() and present["LONGEST"] > 2048
    # The longest row that is held at once, and how longer ones are read, are nothing to a row of 2048.
    versions = {
        "first": source,
        "words": source.replace("\n\n", "\n\n# other words, and another line\n", 1),
        "longest": tunables.substitute(source, {"LONGEST": other["LONGEST"]}),
        "chunk": tunables.substitute(source, {"CHUNK": other["CHUNK"]}),
        "threads": tunables.substitute(source, {"PER_THREAD": other["PER_THREAD"]}),
    }
    for name, text in versions.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "op.py").write_text(text)
    files = [str(tmp_path / name / "op.py") for name in versions]

    def digests(rows: str) -> dict[str, str]:
        done = subprocess.run(
            [sys.executable, "-c", APART, rows, *files],
            capture_output=True, text=True, check=False, cwd=repository_root,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return dict(zip(versions, json.loads(done.stdout), strict=True))

    found = digests("512")
    assert found["first"] is not None
    assert found["words"] == found["longest"] == found["chunk"] == found["first"]
    assert found["threads"] != found["first"]
    assert digests("512,511")["first"] != found["first"], "another call is another thing to launch"


def test_lines_and_paths_are_taken_out_of_ptx() -> None:
    ptx = """//
.version 8.7
\t.file\t1 "{place}" "op.py"
.visible .entry k(
)
{{
$L__func_begin0:
\t.loc\t1 {line} 0                         // op.py:{line}:0
\tadd.s32 \t%r1, %r2, {number};{note}
$L__tmp{line}:
$L__BB0_2:
}}
\t.section\t.debug_abbrev
\t{{
.b8 {line}
\t}}
\t.section\t.debug_macinfo\t{{\t}}
"""
    first = ptx.format(place="/a", line=3, number=4, note="")
    assert plain(first) == plain(ptx.format(place="/b/c", line=17, number=4, note="  // note"))
    assert plain(first) != plain(ptx.format(place="/a", line=3, number=5, note=""))
    assert "$L__BB0_2:" in plain(first) and "debug" not in plain(first)


# --- the judge, and the loop --------------------------------------------------------------------------------------


def test_the_judge_does_not_time_what_it_knows() -> None:
    source = starter_of("reduce", "cpp")
    assert source is not None
    candidate = Candidate(kernel_type="reduce", backend="cpp", source=source)
    same = candidate.model_copy(update={"source": source + "// the same in other words\n"})
    workload = kernel_type("reduce").workloads["cpu"][0]
    with Judge("reduce", "cpp", [workload], device="cpu", dtypes=["float32"], quick=True) as judge:
        first = judge.evaluate(candidate)
        assert first.status == "passed" and first.machine_code is not None
        assert first.workloads[0].latency_us is not None
        again = judge.evaluate(same, candidate, known={first.machine_code})
        done: list[float] = []
        unknown = judge.evaluate(
            same, candidate, known={"0" * 64}, meanwhile=lambda: done.append(time.monotonic())
        )
        assert len(done) == 1 and time.monotonic() - done[0] > 0.8 * unknown.seconds, "while the judge works"
    assert again.machine_code == first.machine_code and again.status == "passed"
    assert again.stages == Stages(smoke="passed") and again.workloads[0].latency_us is None
    assert "same machine code" in again.reason
    assert unknown.workloads[0].latency_us is not None


class ByMode(KnownJudge):
    """kUnroll is of no effect; what is known is not judged."""

    def __init__(self) -> None:
        super().__init__(time_us=lambda v: 50.0 + 10 * float(v["kMode"]) + float(v["kChunk"]) / 256)  # type: ignore[arg-type]
        self.skipped = 0

    def evaluate(
        self, candidate: Candidate, incumbent: Candidate | None = None, *, known: Collection[str] = ()
    ) -> Evaluation:
        values = tunables.values(candidate.source)
        code = f"{values['kMode']} {values['kChunk']}"
        if code in known:
            self.skipped += 1
            return Evaluation(status="passed", stages=Stages(smoke="passed"), machine_code=code)
        return super().evaluate(candidate, incumbent).model_copy(update={"machine_code": code})


def search_of(run: Run, judge: KnownJudge, **limits: object) -> Search:
    return Search(
        target(), [starter()], run=run, judge=judge, decide=decide, diagnose=diagnose,
        limits=Limits(**{"max_reverts": 99, **limits}), progress=Silent(),
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run.create(tmp_path, "m", settings())
    made.add_target(target(), [starter()])
    return made


def test_a_duplicate_is_entered_as_one_and_told_to_the_sampler(run: Run) -> None:
    judge = ByMode()
    with run:
        search = search_of(run, judge, max_experiments=48)
        result, winner = search.run_all(Playbook())
        experiments, scores = run.experiments(), search.scores()
    assert len(experiments) == 48 and len(judge.judged) == 12, "four values of kUnroll make one program"
    assert judge.skipped == 36
    by_number = {e.experiment: e for e in experiments}
    twins = [e for e in experiments if e.duplicate_of is not None]
    assert len(twins) == 36
    for twin in twins:
        assert twin.duplicate_of is not None
        first = by_number[twin.duplicate_of]
        assert first.duplicate_of is None and first.experiment < twin.experiment
        assert first.evaluation.machine_code == twin.evaluation.machine_code
        assert (
            twin.decision == "revert"
            and twin.reason == f"The same machine code as #{first.experiment}: not judged again."
        )
        assert not twin.evaluation.workloads and scores[twin.experiment] == scores[first.experiment]
    assert winner is not None and tunables.values(winner.candidate.source)["kMode"] == 0
    assert result.best_us == pytest.approx(52.0)


def test_duplicates_are_no_sign_of_a_plateau(run: Run) -> None:
    with run:
        search = search_of(run, ByMode(), max_reverts=3)
        search.try_starters()
        for unroll in (2, 4, 8):
            source = tunables.substitute(starter().source, {"kUnroll": unroll})
            candidate = starter().model_copy(update={"source": source})
            entered = search.experiment(candidate, Proposal(source=source, rationale="unroll"))
            assert entered.duplicate_of == 1
        assert search.stop_reason(0.0) is None
        for chunk in (2048, 4096):
            source = tunables.substitute(starter().source, {"kChunk": chunk})
            candidate = starter().model_copy(update={"source": source})
            search.experiment(candidate, Proposal(source=source, rationale="chunk"))
        assert search.stop_reason(0.0) is None
        source = tunables.substitute(starter().source, {"kMode": 2})
        candidate = starter().model_copy(update={"source": source})
        search.experiment(candidate, Proposal(source=source, rationale="mode"))
        stop = search.stop_reason(0.0)
        assert stop is not None and stop.kind == "plateau"


def test_what_was_wrong_is_judged_again_though_its_timed_calls_are_the_same(run: Run) -> None:
    """Two candidates may run the same code on the timed calls, and only one be right on the others."""

    class Strict(ByMode):
        def evaluate(
            self, candidate: Candidate, incumbent: Candidate | None = None, *, known: Collection[str] = ()
        ) -> Evaluation:
            found = super().evaluate(candidate, incumbent, known=known)
            if tunables.values(candidate.source)["kUnroll"] == 1:
                return found.model_copy(update={"status": "incorrect", "reason": "on an odd size"})
            return found

    judge = Strict()
    with run:
        search = search_of(run, judge)
        search.try_starters()
        source = tunables.substitute(starter().source, {"kUnroll": 2})
        better = search.experiment(
            starter().model_copy(update={"source": source}), Proposal(source=source, rationale="unroll")
        )
    assert judge.skipped == 0 and better.decision == "keep" and better.duplicate_of is None


# --- on a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "idle"), [("triton", "LONGEST"), ("cuda", "")])
def test_on_a_gpu_code_that_was_judged_before_is_not_timed(backend: Backend, idle: str) -> None:
    """Of CUDA C++ all code counts, also that for calls which are not timed: there words alone are of no effect."""
    source = starter_of("rmsnorm", backend)
    assert source is not None
    candidate = Candidate(kernel_type="rmsnorm", backend=backend, source=source)
    space = {t.name: t for t in tunables.parse(source)}

    def changed(name: str) -> Candidate:
        other = next(v for v in space[name].choices if v != space[name].value)
        return candidate.model_copy(update={"source": tunables.substitute(source, {name: other})})

    words = candidate.model_copy(update={"source": source.replace("\n\n", "\n\n// other words\n", 1)})
    same = changed(idle) if idle else words
    differs = changed("PER_THREAD" if backend == "triton" else "kThreads")
    workload = kernel_type("rmsnorm").build({"M": 512, "N": 2048}, "bfloat16", {})
    with Judge("rmsnorm", backend, [workload], device="cuda") as judge:
        first = judge.evaluate(candidate)
        assert first.status == "passed" and first.machine_code is not None, first.reason
        again = judge.evaluate(same, candidate, known={first.machine_code})
        other = judge.evaluate(differs, candidate, known={first.machine_code})
    assert again.machine_code == first.machine_code and again.workloads[0].latency_us is None
    assert again.stages == Stages(smoke="passed")
    assert other.machine_code not in (None, first.machine_code) and other.workloads[0].latency_us is not None
