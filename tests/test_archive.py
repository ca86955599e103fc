"""A search that does not get stuck: kinds of candidates, the beam, plateaus and revisits, by a judge that knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from autokernel_hf import tunables
from autokernel_hf.agent import Context, Playbook
from autokernel_hf.archive import BEAM, Elite, beam, cell_of, elites, stale
from autokernel_hf.figures import scores_of
from autokernel_hf.progress import Silent
from autokernel_hf.records import Candidate, Evaluation, Experiment, Proposal, Stages
from autokernel_hf.runs import Run
from autokernel_hf.search import Limits, Search
from tests.loop_helpers import SOURCE, KnownJudge, decide, diagnose, settings, target

OTHER = SOURCE + "constexpr int kRows = 2;\n"  # another structure with the same constants


def candidate(source: str = SOURCE, **values: int) -> Candidate:
    return Candidate(kernel_type="rmsnorm", backend="cpp", source=tunables.substitute(source, values))


def attempt(number: int, tried: Candidate, status: str = "passed", tag: str = "") -> Experiment:
    return Experiment(
        experiment=number, target="rmsnorm", tag=tag, description="", kernel_type="rmsnorm", backend="cpp",
        digest=tried.digest, evaluation=Evaluation(status=status, stages=Stages()), decision="revert", reason="",
        tunables=tunables.values(tried.source),
    )  # fmt: skip


def test_kinds_differ_by_structure_and_algorithm_and_not_by_sizes_or_comments() -> None:
    plain = cell_of(candidate())
    assert cell_of(candidate(kUnroll=8, kChunk=512)) == plain
    assert cell_of(candidate(SOURCE + "// a remark\n")) == plain
    assert cell_of(candidate(kMode=1)) != plain
    assert cell_of(candidate(kMode=1)).island == plain.island
    assert cell_of(candidate(OTHER)).island != plain.island


def test_an_elite_is_the_fastest_right_one_of_its_kind() -> None:
    tried = {
        1: candidate(), 2: candidate(kUnroll=2), 3: candidate(kMode=1), 4: candidate(OTHER), 5: candidate(kUnroll=4),
    }  # fmt: skip
    scores = {1: 1.0, 2: 1.4, 3: 1.1, 4: 0.9, 5: None}
    found = elites([attempt(n, c) for n, c in tried.items()], scores, tried)
    assert [(e.experiment, e.score) for e in found] == [(2, 1.4), (3, 1.1), (4, 0.9)]


def test_the_beam_takes_every_island_before_a_second_kind_of_one_and_nothing_hopeless() -> None:
    def elite(number: int, score: float, tried: Candidate) -> Elite:
        return Elite(experiment=number, candidate=tried, score=score, cell=cell_of(tried))

    found = [
        elite(1, 2.0, candidate()),
        elite(2, 1.9, candidate(kMode=1)),
        elite(3, 1.2, candidate(OTHER)),
        elite(4, 0.9, candidate(OTHER, kMode=2)),
    ]
    assert [e.experiment for e in beam(found)] == [1, 3, 2], "0.9 is less than half of 2.0"
    assert [e.experiment for e in beam(found, size=2)] == [1, 3]
    assert beam([]) == () and BEAM >= 4


def test_a_plateau_is_counted_from_the_last_real_improvement() -> None:
    attempts = [attempt(n, candidate()) for n in range(1, 7)]
    assert stale(attempts, {1: 1.0, 2: 1.5, 3: 1.2, 4: None, 5: 1.51, 6: 1.4}) == 4
    assert stale(attempts, {n: 1.0 + 0.1 * n for n in range(1, 7)}) == 0
    assert stale([], {}) == 0


class ByFile(KnownJudge):
    """Its time is a function of the whole file."""

    def us(self, candidate: Candidate) -> float:
        values = tunables.values(candidate.source)
        if "kRows" not in candidate.source:
            # A starter of 50 us whose best is 40.
            return 50.0 - 10.0 * (values["kUnroll"] == 2)
        # A starter of 60 us, two steps from 20: the first of them alone is still slower than the other kind's best.
        return 60.0 - 15.0 * (values["kUnroll"] == 2) - 25.0 * (values["kChunk"] == 2048)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run.create(tmp_path, "org/model", settings())
    made.add_target(target(), [candidate()])
    yield made
    made.close()


def search_of(run: Run, judge: KnownJudge, **limits: object) -> Search:
    return Search(
        target(),
        [candidate(), candidate(OTHER)],
        run=run,
        judge=judge,
        decide=decide,
        diagnose=diagnose,
        limits=Limits(**{"max_reverts": 99, **limits}),
        progress=Silent(),
    )


def test_a_search_that_is_stuck_goes_on_from_another_kind(run: Run) -> None:
    result, winner = search_of(run, ByFile(), max_experiments=30).run_all(Playbook())
    assert winner is not None
    assert "kRows" in winner.candidate.source
    assert result.best_us == pytest.approx(20.0)
    revisits = [e for e in run.experiments() if "revisit" in e.tag.split(",")]
    assert revisits and all(e.description.startswith("from #") for e in revisits)
    first = revisits[0]
    assert stale(*before(run, first)) >= Playbook().plateau
    kept = [e for e in run.experiments() if e.decision == "keep"]
    assert "revisit" in kept[-1].tag.split(",") or "from" in kept[-1].description or len(kept) > 2


def before(run: Run, experiment: Experiment) -> tuple[list[Experiment], dict[int, float | None]]:
    """What was known when an experiment began."""
    earlier = [e for e in run.experiments() if e.experiment < experiment.experiment]
    return earlier, scores_of(earlier)


def test_without_revisits_it_stays_at_its_first_kind(run: Run) -> None:
    """What the test above would show if revisits did nothing."""
    result, winner = search_of(run, ByFile(), max_experiments=30).run_all(Playbook(plateau=10**6))
    assert winner is not None and "kRows" not in winner.candidate.source
    assert result.best_us == pytest.approx(40.0)


def test_half_of_a_plateau_goes_to_the_incumbent_and_the_rest_evenly_to_the_others(run: Run) -> None:
    flat = KnownJudge(time_us=lambda values: 50.0)
    search_of(run, flat, max_experiments=26).run_all(Playbook())
    tags = [e.tag.split(",") for e in run.experiments()]
    revisits = [t for t in tags if "revisit" in t]
    sampled = [t for t in tags if "tpe" in t]
    assert len(revisits) >= 4 and abs(len(revisits) - len(sampled)) <= 5
    visits = Counter(next(t for t in tag if t.startswith("from-")) for tag in revisits)
    assert len(visits) >= 2
    assert max(visits.values()) - min(visits.values()) <= 2


class Interrupted(Playbook):
    def __init__(self, stop: int) -> None:
        super().__init__()
        self.stop = stop

    def propose(self, context: Context, n: int) -> list[Proposal]:
        if len(context.attempts) == self.stop:
            raise KeyboardInterrupt
        return super().propose(context, n)


def test_a_resumed_search_revisits_as_one_that_never_stopped(run: Run, tmp_path: Path) -> None:
    search_of(run, ByFile(), max_experiments=24).run_all(Playbook())
    whole = [(e.digest, e.tag) for e in run.experiments()]
    with Run.create(tmp_path / "b", "org/model", settings()) as other:
        other.add_target(target(), [candidate()])
        for stop in (7, 13):
            with pytest.raises(KeyboardInterrupt):
                search_of(other, ByFile(), max_experiments=24).run_all(Interrupted(stop))
        search_of(other, ByFile(), max_experiments=24).run_all(Playbook())
        assert [(e.digest, e.tag) for e in other.experiments()] == whole


def test_constants_of_another_file_do_not_mislead_the_sampler(run: Run) -> None:
    """Both files have the same constants; the sampler is told of the incumbent's own attempts alone."""
    search = search_of(run, ByFile(), max_experiments=12)
    search.run_all(Playbook(plateau=10**6))
    context = search.context()
    islands = {context.cells[e.experiment].island for e in context.attempts if e.experiment in context.cells}
    assert len(islands) == 2
    assert {e.cell.island for e in context.beam} == islands
