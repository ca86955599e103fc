"""Before a target is concluded, what may be faster than the incumbent is timed against it once more."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from autokernel_hf import tunables
from autokernel_hf.archive import FINALISTS
from autokernel_hf.errors import JudgeError
from autokernel_hf.progress import Silent
from autokernel_hf.records import Candidate, Evaluation, Experiment, Proposal
from autokernel_hf.runs import Run
from autokernel_hf.search import Limits, Search, Stop
from tests.loop_helpers import KnownJudge, decide, diagnose, settings, starter, target

STOP = Stop("plateau", "enough")


class Noisy(KnownJudge):
    """Chunk `c` takes `times[c]` us; the first time that one is judged, the interval is so wide that nothing is certain.

    `seems`: what the first time says instead, for some.
    """

    def __init__(self, times: dict[int, float], seems: dict[int, float] | None = None) -> None:
        super().__init__(time_us=lambda values: times[int(values["kChunk"])])  # type: ignore[call-overload]
        self.seems = seems or {}
        self.dies_at = -1

    def evaluate(
        self, candidate: Candidate, incumbent: Candidate | None = None, *, known: Collection[str] = ()
    ) -> Evaluation:
        if len(self.judged) == self.dies_at:
            raise JudgeError("killed")
        first = candidate.digest not in self.judged
        found = super().evaluate(candidate, incumbent)
        code = str(tunables.values(candidate.source)["kChunk"])
        assert code not in known, "a finalist is judged, though its machine code is known"
        if first and incumbent is not None:
            (result,) = found.workloads
            us = self.seems.get(int(code), result.latency_us)
            assert us is not None and result.incumbent_us is not None
            ratio = result.incumbent_us / us
            update = {"speedup_vs_incumbent": ratio, "ci95_vs_incumbent": (0.5 * ratio, 2 * ratio)}
            found = found.model_copy(update={"workloads": (result.model_copy(update=update),)})
        return found.model_copy(update={"machine_code": code})


def chunk(size: int) -> Candidate:
    return starter().model_copy(update={"source": tunables.substitute(starter().source, {"kChunk": size})})


def search_of(run: Run, judge: KnownJudge) -> Search:
    return Search(
        target(), [starter()], run=run, judge=judge, decide=decide, diagnose=diagnose,
        limits=Limits(max_reverts=3), progress=Silent(),
    )  # fmt: skip


def tried(search: Search, *sizes: int) -> None:
    search.try_starters()
    for size in sizes:
        candidate = chunk(size)
        search.experiment(
            candidate,
            Proposal(
                source=candidate.source, rationale=f"chunk {size}", tunables=tunables.values(candidate.source)
            ),
        )


def finals(run: Run) -> list[Experiment]:
    return [e for e in run.experiments() if e.tag == "final"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run.create(tmp_path, "m", settings())
    made.add_target(target(), [starter()])
    yield made
    made.close()


def test_one_that_was_lost_in_noise_is_timed_again_and_wins(run: Run) -> None:
    judge = Noisy({1024: 50.0, 512: 45.0, 2048: 40.0, 4096: 60.0})
    search = search_of(run, judge)
    tried(search, 512, 2048, 4096)
    assert [e.decision for e in run.experiments()] == ["keep", "revert", "revert", "revert"]
    result, winner = search.conclude(STOP)
    assert winner is not None and winner.candidate.digest == chunk(2048).digest
    assert result.best_us == pytest.approx(40.0) and result.kept == 2
    (final,) = finals(run)
    assert final.decision == "keep" and final.against == 1 and final.digest == chunk(2048).digest
    assert final.description == "#3 once more, against #1" and final.tunables["kChunk"] == 2048
    # 512, which is faster than the starter too, is not faster than what won against it.
    assert run.kept("rmsnorm") == final


def test_each_is_timed_against_the_best_so_far_and_only_so_many(run: Run) -> None:
    times = {1024: 50.0, 512: 50.0, 2048: 50.0, 4096: 50.0}
    judge = Noisy(times, seems={512: 30.0, 2048: 40.0, 4096: 45.0})
    search = search_of(run, judge)
    tried(search, 512, 2048, 4096)
    result, winner = search.conclude(STOP)
    assert [e.digest for e in finals(run)] == [chunk(s).digest for s in (512, 2048, 4096)]
    assert len(finals(run)) == FINALISTS and {e.decision for e in finals(run)} == {"revert"}
    assert winner is not None and winner.candidate.digest == starter().digest
    assert search.stop_reason(0.0) is not None, "three reverts before them"
    before = len(run.experiments())
    assert search_of(run, judge).conclude(STOP)[1] is not None
    assert len(run.experiments()) == before, "none of them is timed a third time"


def test_finalists_do_not_make_a_search_seem_stuck(run: Run) -> None:
    judge = Noisy({1024: 50.0, 512: 50.0, 2048: 50.0, 4096: 50.0}, seems={512: 30.0, 2048: 40.0})
    search = search_of(run, judge)
    tried(search, 512, 2048)
    search.time_finalists()
    assert len(finals(run)) == 2 and search.stop_reason(0.0) is None


def test_an_interrupted_final_goes_on_where_it_was(run: Run) -> None:
    times = {1024: 50.0, 512: 50.0, 2048: 50.0, 4096: 50.0}
    seems = {512: 30.0, 2048: 40.0, 4096: 45.0}
    judge = Noisy(times, seems)
    search = search_of(run, judge)
    tried(search, 512, 2048, 4096)
    judge.dies_at = 5
    with pytest.raises(JudgeError):
        search.conclude(STOP)
    assert len(finals(run)) == 1
    judge.dies_at = -1
    search_of(run, judge).conclude(STOP)
    assert [e.digest for e in finals(run)] == [chunk(s).digest for s in (512, 2048, 4096)]


def test_what_was_taken_back_is_no_finalist(run: Run) -> None:
    class Fickle(Noisy):
        def confirm(self, candidate: Candidate) -> Evaluation:
            found = super().confirm(candidate)
            if candidate.digest == chunk(2048).digest:
                return found.model_copy(update={"status": "incorrect", "reason": "on another seed"})
            return found

    judge = Fickle({1024: 50.0, 512: 45.0, 2048: 40.0, 4096: 60.0})
    search = search_of(run, judge)
    tried(search, 2048)
    result, winner = search.conclude(STOP)
    assert (
        winner is not None and winner.candidate.digest == starter().digest and "taken back" in result.reason
    )
    tried(search, 4096)
    search.conclude(STOP)
    assert [e.digest for e in finals(run)] == [chunk(2048).digest], "2048 is not given another throw"
