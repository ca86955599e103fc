"""The next candidate is compiled while the judge measures the present one."""

from __future__ import annotations

import io
import multiprocessing.connection
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autokernel_hf import tunables
from autokernel_hf.agent import Context, Playbook
from autokernel_hf.ahead import Ahead
from autokernel_hf.build import build
from autokernel_hf.evaluate import Judge
from autokernel_hf.judge import compiled
from autokernel_hf.judge.remote import Compiler
from autokernel_hf.judge.server import NamespacesFirst, Server
from autokernel_hf.judge.stages import place
from autokernel_hf.kernels import kernel_type
from autokernel_hf.kernels import starter as starter_of
from autokernel_hf.ledger import Started
from autokernel_hf.progress import Silent
from autokernel_hf.records import Built, Candidate, Evaluation, Proposal
from autokernel_hf.runs import Run
from autokernel_hf.search import Limits, Search
from tests.loop_helpers import KnownJudge, decide, diagnose, formula, settings, starter, target


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run.create(tmp_path, "org/model", settings())
    made.add_target(target(), [starter()])
    yield made
    made.close()


class Watching(KnownJudge):
    """Notes what was told to be compiled by the time each candidate is judged."""

    def __init__(self, told: list[str], time_us: object = formula) -> None:
        super().__init__(time_us=time_us)
        self.told = told
        self.asked = 0
        self.known: list[tuple[str, ...]] = []

    def evaluate(
        self,
        candidate: Candidate,
        incumbent: Candidate | None = None,
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> Evaluation:
        self.asked += 1
        if meanwhile is not None:
            meanwhile()
        self.known.append(tuple(self.told))
        return super().evaluate(candidate, incumbent)


def search_of(
    run: Run,
    judge: KnownJudge,
    told: list[str] | None,
    *,
    depth: int = 1,
    starters: tuple[Candidate, ...] = (),
    **limits: object,
) -> Search:
    return Search(
        target(),
        starters or (starter(),),
        run=run,
        judge=judge,
        decide=decide,
        diagnose=diagnose,
        limits=Limits(**{"max_reverts": 99, **limits}),
        progress=Silent(),
        ahead=None if told is None else lambda candidate: told.append(candidate.digest) is None,
        depth=depth,
    )


def test_what_comes_next_is_told_before_the_present_one_is_judged(run: Run) -> None:
    told: list[str] = []
    judge = Watching(told, time_us=lambda values: 50.0)
    search_of(run, judge, told, max_experiments=14).run_all(Playbook())
    assert len(judge.judged) == 14
    for present in range(len(judge.judged) - 1):
        assert judge.judged[present + 1] in judge.known[present], (
            f"experiment {present + 2} was not told in time"
        )
    assert len(told) == len(set(told)) == 13, (
        "the starter is judged at once, and nothing is compiled for nothing"
    )


def test_the_next_starter_is_compiled_while_the_first_is_judged_and_each_once(run: Run) -> None:
    told: list[str] = []
    judge = Watching(told, time_us=lambda values: 50.0)
    others = tuple(
        starter().model_copy(update={"source": tunables.substitute(starter().source, {"kChunk": chunk})})
        for chunk in (2048, 4096)
    )
    search_of(run, judge, told, starters=(starter(), *others), max_experiments=5).run_all(Playbook())
    assert judge.judged[:3] == [starter().digest, others[0].digest, others[1].digest]
    assert judge.known[0] == (others[0].digest,) and judge.known[1] == (others[0].digest, others[1].digest)
    assert len(told) == len(set(told)) == 4 and starter().digest not in told
    assert judge.judged[3] in judge.known[2]


def test_a_step_from_an_old_incumbent_is_not_judged(run: Run) -> None:
    told: list[str] = []
    judge = Watching(told)
    result, winner = search_of(run, judge, told, max_experiments=30).run_all(Playbook())
    assert winner is not None and result.speedup == pytest.approx(5.0)
    by_number = {e.experiment: e for e in run.experiments()}
    openings = [e for e in by_number.values() if "opening" in e.tag.split(",")]
    assert len(openings) > 4
    for step in openings:
        assert step.against is not None
        base = by_number[step.against].tunables
        assert sum(base[name] != value for name, value in step.tunables.items()) == 1
    assert set(told) - set(judge.judged), "some were compiled for nothing, since an incumbent fell"


def test_the_search_is_as_good_as_one_that_waits_for_every_verdict(run: Run, tmp_path: Path) -> None:
    search_of(run, Watching([]), [], max_experiments=30).run_all(Playbook())
    with Run.create(tmp_path / "b", "org/model", settings()) as other:
        other.add_target(target(), [starter()])
        search_of(other, KnownJudge(), None, max_experiments=30).run_all(Playbook())
        best = [run_.result("rmsnorm").result.best_us for run_ in (run, other)]  # type: ignore[union-attr]
    assert best == [pytest.approx(20.0), pytest.approx(20.0)]
    assert len({e.digest for e in run.experiments()}) == len(run.experiments()) == 30


def test_the_next_is_chosen_while_the_judge_works(run: Run) -> None:
    """A proposal takes a good part of what an experiment does; the device must not wait for it."""
    told: list[str] = []
    judge = Watching(told)
    asked: list[int] = []
    book = Playbook()
    propose = book.propose

    def noted(context: Context, n: int) -> list[Proposal]:
        asked.append(judge.asked - len(judge.known))
        return propose(context, n)

    book.propose = noted  # type: ignore[method-assign]
    search_of(run, judge, told, max_experiments=12).run_all(book)
    assert asked.count(1) >= 10, "all but those that had to be chosen anew, since an incumbent fell"


def test_a_proposer_that_fails_ahead_ends_the_search_when_the_verdict_is_entered(run: Run) -> None:
    class Failing(Playbook):
        def propose(self, context: Context, n: int) -> list[Proposal]:
            if len(context.attempts) == 3:
                raise RuntimeError("no more")
            return super().propose(context, n)

    with pytest.raises(RuntimeError, match="no more"):
        search_of(run, Watching([], time_us=lambda values: 50.0), [], max_experiments=12).run_all(Failing())
    begun = [e.experiment for e in run.events() if isinstance(e, Started)]
    assert begun == [e.experiment for e in run.experiments()] and len(begun) == 4


def test_nothing_waits_beyond_the_budget(run: Run) -> None:
    told: list[str] = []
    search_of(run, Watching(told), told, max_experiments=3).run_all(Playbook())
    assert len(run.experiments()) == 3 and len(told) == 2


def test_as_many_as_are_compiled_side_by_side_are_told_ahead(run: Run) -> None:
    told: list[str] = []
    judge = Watching(told, time_us=lambda values: 50.0)
    search_of(run, judge, told, depth=4, max_experiments=14).run_all(Playbook())
    assert len(judge.judged) == len(set(judge.judged)) == 14
    # The starter is judged at once; while it is, four are compiled, and one more for each that is taken up.
    assert [len(known) for known in judge.known] == [4 + i for i in range(10)] + [13] * 4
    assert set(told) == set(judge.judged[1:])


def test_what_is_not_compiled_ahead_is_not_chosen_early_either(run: Run) -> None:
    """A proposal that waits is chosen without the verdicts before it, for nothing if no compiler works on it."""
    judge = Watching([], time_us=lambda values: 50.0)
    told: list[str] = []

    def refuses(candidate: Candidate) -> bool:
        told.append(candidate.digest)
        return False

    search = search_of(run, judge, [], depth=4, max_experiments=9)
    search._ahead = refuses
    judge.told = told
    search.run_all(Playbook())
    assert [len(known) for known in judge.known] == [1, 2, 3, 4, 5, 6, 7, 8, 8]


def test_a_proposer_that_waits_for_verdicts_is_not_hurried(run: Run) -> None:
    class Patient:
        name = "patient"

        def propose(self, context: Context, n: int) -> list[Proposal]:
            if context.pending:
                return []
            values = {"kUnroll": (2, 4, 8)[len(context.attempts) - 1]} if len(context.attempts) < 4 else None
            if values is None:
                return []
            source = tunables.substitute(starter().source, values)
            return [Proposal(source=source, rationale="x", tunables=tunables.values(source))]

    told: list[str] = []
    result, _ = search_of(run, Watching(told), told, max_experiments=9).run_all(Patient())
    assert result.experiments == 4 and told == []
    assert "nothing left to try" in result.reason


@pytest.mark.skipif(
    shutil.which("nvcc") is None and not Path("/usr/local/cuda/bin/nvcc").exists(), reason="no nvcc"
)
def test_the_builder_finds_what_was_compiled_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOKERNEL_HF_CACHE", str(tmp_path))
    source = starter_of("reduce", "cuda")
    assert source is not None
    good = Candidate(kernel_type="reduce", backend="cuda", source=source + "// ahead\n")
    bad = good.model_copy(update={"source": source + "this is no C++\n"})
    with Ahead("cuda") as ahead:
        began = os.times().elapsed
        for candidate in (bad, good):
            ahead(candidate)
        assert os.times().elapsed - began < 1.0, "it does not wait"
        assert ahead.finished(240.0) == (bad.digest, "")
        found = ahead.finished(240.0)
    built = build(good, device="cuda")
    assert found == (good.digest, built.id)
    assert built.cached


H200 = {
    "target": ["cuda", 90, 32],
    "properties": {
        "max_shared_mem": 232448, "max_num_regs": 65536, "multiprocessor_count": 132, "warpSize": 32,
        "sm_clock_rate": 1980000, "mem_clock_rate": 3201000, "mem_bus_width": 6144,
    },
}  # fmt: skip
"""What Triton's driver says of an H200."""


def test_what_triton_compiles_ahead_is_there_for_the_child_that_holds_the_same_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("AUTOKERNEL_HF_CACHE", str(tmp_path))
    source = starter_of("rmsnorm", "triton")
    assert source is not None
    candidate = Candidate(kernel_type="rmsnorm", backend="triton", source=source)
    built = build(candidate, device="cuda")
    other = build(candidate.model_copy(update={"source": source + "# another\n"}), device="cuda")
    kind = kernel_type("rmsnorm")
    calls = [
        place(kind.build({"M": m, "N": n}, "bfloat16", {}), ()).arguments for m, n in ((512, 2048), (4, 4096))
    ]
    walls = NamespacesFirst()
    server = Server(interpret=False, device="cuda")

    def compiled_of(what: Built) -> bytes:
        spawned = walls.start(lambda isolate: server.spawn(isolate=isolate))
        assert spawned is not None
        compiler = Compiler(spawned, timeout_s=120.0)
        try:
            return compiler.compile(what, calls, H200)
        finally:
            compiler.end()

    try:
        first = compiled_of(built)
        with tarfile.open(fileobj=io.BytesIO(first)) as archive:
            suffixes = [Path(n).suffix for n in archive.getnames()]
        assert suffixes.count(".cubin") == suffixes.count(".ptx") == 2, "a variant for each row length"
        assert compiled.keep(built.id, first) == len(suffixes)
        assert compiled_of(built) == compiled.packed(tmp_path / "none", frozenset()), (
            "nothing is left to compile"
        )
        assert len(compiled_of(other)) > 1 << 14, "another candidate starts with nothing"
        compiled.drop_old(3600.0)
        assert compiled.folder(built.id).is_dir()
        compiled.drop(built.id)
        assert not compiled.folder(built.id).exists()
    finally:
        server.close()


@pytest.mark.parametrize("name", ["../x", "/x", "a/b/c", "a/../b", ".hidden", "link"])
def test_nothing_but_plain_files_is_kept_of_what_a_candidate_has_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("AUTOKERNEL_HF_CACHE", str(tmp_path / "cache"))
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        member = tarfile.TarInfo(name)
        if name == "link":
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(member)
        else:
            member.size = 1
            archive.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(ValueError, match="no file of Triton's"):
        compiled.keep("_ak_x", content.getvalue())
    assert not compiled.folder("_ak_x").exists()
    with pytest.raises(ValueError):
        compiled.keep("_ak_x", b"no archive at all" * 100)


def test_answers_that_nobody_asks_for_do_not_stop_the_builders(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe holds a few hundred; a night has thousands."""
    ours, theirs = multiprocessing.connection.Pipe()
    ahead = Ahead("cuda")
    ahead._channel = ours
    candidate = starter().model_copy(update={"backend": "cuda"})
    for number in range(3000):
        assert ahead(candidate)
        theirs.recv()
        theirs.send((f"{number:064}", "_ak_rmsnorm_cuda_0123456789ab"))
    assert ahead.finished(1.0) is not None


def test_other_backends_are_left_to_the_judge(tmp_path: Path) -> None:
    with Ahead("cuda") as ahead:
        ahead(starter())
        assert ahead.finished(0.5) is None


@pytest.mark.gpu
def test_on_a_gpu_a_triton_candidate_is_judged_with_what_was_compiled_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOKERNEL_HF_CACHE", str(tmp_path))
    kind = kernel_type("matmul")
    workloads = [kind.build({"M": 512, "N": n, "K": 2048}, "bfloat16", {}) for n in (512, 2048, 8192)]
    source = starter_of("matmul", "triton")
    assert source is not None
    first = Candidate(kernel_type="matmul", backend="triton", source=source)

    def changed(**values: int) -> Candidate:
        return first.model_copy(update={"source": tunables.substitute(source, values)})

    taken = {}
    with Judge("matmul", "triton", workloads, device="cuda") as judge, Ahead("cuda:0", workloads) as ahead:
        assert judge.evaluate(first).status == "passed"
        for name, candidate in (("alone", changed(GROUP=4)), ("ahead", changed(GROUP=16))):
            if name == "ahead":
                assert ahead(candidate)
                found = ahead.finished(120.0)
                assert (
                    found is not None and found[0] == candidate.digest and compiled.folder(found[1]).is_dir()
                )
            evaluation = judge.evaluate(candidate, first)
            assert evaluation.status == "passed", evaluation.reason
            taken[name] = sum(
                s for phase, s in evaluation.phases if phase in ("compile", "smoke", "machine code")
            )
    assert taken["ahead"] < 0.6 * taken["alone"], taken
