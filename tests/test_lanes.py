"""Several devices: judge sessions side by side, each in a lane of its own, and one ledger."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from autokernel_hf import pipeline, tunables
from autokernel_hf.agent import Context, Playbook
from autokernel_hf.errors import DeviceError, JudgeError, UsageError
from autokernel_hf.ledger import Judged, Started
from autokernel_hf.progress import Silent
from autokernel_hf.records import Candidate, Evaluation, Proposal
from autokernel_hf.runs import Run
from autokernel_hf.search import Limits, Search
from tests.loop_helpers import KnownJudge, decide, diagnose, formula, settings, starter, target


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run.create(tmp_path, "org/model", settings())
    made.add_target(target(), [starter()])
    yield made
    made.close()


def search_of(run: Run, judges: Sequence[KnownJudge], **limits: object) -> Search:
    return Search(
        target(),
        [starter()],
        run=run,
        judge=judges[0],
        more=[(f"cuda:{i}", judge) for i, judge in enumerate(judges[1:], start=1)],
        decide=decide,
        diagnose=diagnose,
        limits=Limits(**{"max_reverts": 99, **limits}),
        progress=Silent(),
    )


class Slow(KnownJudge):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def evaluate(self, candidate: Candidate, incumbent: Candidate | None = None) -> Evaluation:
        time.sleep(self.seconds)
        return super().evaluate(candidate, incumbent)


class Script:
    """Proposes all configurations in a fixed order."""

    name = "script"

    def __init__(self) -> None:
        self.sources = [
            tunables.substitute(starter().source, {"kUnroll": u, "kChunk": c, "kMode": m})
            for u in (1, 2, 4, 8)
            for c in (512, 1024, 2048, 4096)
            for m in (0, 1, 2)
        ]

    def propose(self, context: Context, n: int) -> list[Proposal]:
        known = {e.digest for e in context.attempts}
        known |= {digest(p.source) for p in context.pending}
        left = [s for s in self.sources if digest(s) not in known]
        return [
            Proposal(source=s, rationale="next", tags=("script",), tunables=tunables.values(s))
            for s in left[:n]
        ]


def digest(source: str) -> str:
    return Candidate(kernel_type="rmsnorm", backend="cpp", source=source).digest


def check_books(run: Run, count: int) -> None:
    """Ledger, table and git agree, and nothing was counted twice."""
    events = run.events()
    begun = [e.experiment for e in events if isinstance(e, Started)]
    judged = [e.record for e in events if isinstance(e, Judged)]
    assert begun == sorted(begun) and len(set(begun)) == len(begun)
    assert sorted(e.experiment for e in judged) == begun
    assert len(judged) == count
    assert max(Counter(e.digest for e in judged).values()) == 1
    rows = [line.split("\t") for line in (run.path / "results.tsv").read_text().splitlines()[1:]]
    assert [int(r[0]) for r in rows] == [e.experiment for e in judged]

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(run.path), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    refs = dict(
        line.split() for line in git("for-each-ref", "--format=%(refname) %(objectname)").splitlines()
    )
    assert all(refs[f"refs/experiments/{e.experiment}"] == e.commit for e in judged)
    kept = [e.commit for e in run.experiments() if e.decision == "keep"]
    history = git("rev-list", "--reverse", "target/rmsnorm").splitlines()
    assert history[2:] == kept, "each kept one stands on the one before it"


@pytest.mark.parametrize("count", [2, 3])
def test_several_devices_find_what_one_finds(run: Run, count: int) -> None:
    judges = [Slow(0.002 * (i + 1)) for i in range(count)]
    result, winner = search_of(run, judges, max_experiments=48).run_all(Script())
    assert winner is not None and result.status == "won"
    assert tunables.values(winner.candidate.source) == {"kUnroll": 4, "kChunk": 2048, "kMode": 1}
    assert result.speedup == pytest.approx(5.0)
    assert result.experiments == 48, "the starter is one of the 48 configurations"
    check_books(run, 48)
    devices = Counter(e.device for e in run.experiments())
    assert set(devices) == {"cpu", *(f"cuda:{i}" for i in range(1, count))}
    assert min(devices.values()) >= 5


def test_the_playbook_tries_nothing_twice_on_two_devices(run: Run) -> None:
    judges = [Slow(0.001), Slow(0.003)]
    result, winner = search_of(run, judges, max_experiments=24).run_all(Playbook())
    assert winner is not None and result.experiments == 24
    check_books(run, 24)
    # What was timed against an incumbent is scored by that one's own score.
    by_number = {e.experiment: e for e in run.experiments()}
    scores = search_of(run, judges).scores()
    for attempt in by_number.values():
        us = attempt.evaluation.workloads[0].latency_us
        assert us is not None
        assert scores[attempt.experiment] == pytest.approx(100.0 / us)


def test_two_devices_take_half_the_time(run: Run, tmp_path: Path) -> None:
    took = []
    for judges in ([Slow(0.25)], [Slow(0.25), Slow(0.25)]):
        with Run.create(tmp_path / "more", "m", settings()) as own:
            own.add_target(target(), [starter()])
            search = search_of(own, judges, max_experiments=13)
            search.try_starters()
            began = time.monotonic()
            search.run_all(Script())
            took.append(time.monotonic() - began)
    assert took[1] < 0.75 * took[0], took


def test_a_verdict_counts_against_what_was_kept_meanwhile(run: Run) -> None:
    """Both candidates beat the starter; the one that is entered second must beat the first."""
    good, fair = (
        Candidate(kernel_type="rmsnorm", backend="cpp", source=tunables.substitute(starter().source, values))
        for values in ({"kUnroll": 4, "kMode": 1}, {"kUnroll": 4})
    )

    def proposal(candidate: Candidate) -> Proposal:
        return Proposal(source=candidate.source, rationale="x", tunables=tunables.values(candidate.source))

    class Late(KnownJudge):
        """While it judges, another lane enters the better one."""

        def evaluate(self, candidate: Candidate, incumbent: Candidate | None = None) -> Evaluation:
            found = super().evaluate(candidate, incumbent)
            if len(self.judged) == 1:
                search_of(run, [KnownJudge()]).experiment(good, proposal(good))
            return found

    late = Late()
    search_of(run, [KnownJudge()]).try_starters()
    loser = search_of(run, [late]).experiment(fair, proposal(fair))
    winner = run.kept("rmsnorm")
    assert winner is not None and winner.digest == good.digest
    assert late.opponents == [starter().digest, good.digest], "judged again, against what was kept meanwhile"
    assert (loser.decision, loser.against) == ("revert", winner.experiment)
    assert loser.experiment < winner.experiment
    scores = search_of(run, [late]).scores()
    assert scores[loser.experiment] == pytest.approx(
        100.0 / formula({"kUnroll": 4, "kChunk": 1024, "kMode": 0})
    )
    check_books(run, 3)


def test_a_device_that_dies_takes_nothing_with_it(run: Run) -> None:
    class Dying(KnownJudge):
        def evaluate(self, candidate: Candidate, incumbent: Candidate | None = None) -> Evaluation:
            if len(self.judged) == 3:
                raise JudgeError("the GPU has fallen off the bus", remedy="")
            time.sleep(0.002)
            return super().evaluate(candidate, incumbent)

    dying, other = Dying(), Slow(0.002)
    result, winner = search_of(run, [dying, other], max_experiments=48).run_all(Script())
    assert winner is not None and result.speedup == pytest.approx(5.0)
    assert len(dying.judged) == 3
    judged = [e.digest for e in run.experiments()]
    assert len(judged) == len(set(judged)) == 48, "what was lost with the device was tried on the other"
    assert len([e for e in run.events() if isinstance(e, Started)]) == 49


def test_the_last_devices_end_is_the_targets(run: Run) -> None:
    class Dead(KnownJudge):
        def evaluate(self, candidate: Candidate, incumbent: Candidate | None = None) -> Evaluation:
            raise JudgeError("no device answers", remedy="")

    with pytest.raises(JudgeError, match="no device answers"):
        search_of(run, [Dead(), Dead()], max_experiments=4).run_all(Script())
    assert run.experiments() == []


def test_a_proposers_fault_ends_all_lanes(run: Run) -> None:
    class Faulty(Script):
        def propose(self, context: Context, n: int) -> list[Proposal]:
            if len(context.attempts) >= 5:
                raise UsageError("the key is refused", remedy="")
            return super().propose(context, n)

    with pytest.raises(UsageError, match="the key is refused"):
        search_of(run, [Slow(0.01), Slow(0.01)], max_experiments=30).run_all(Faulty())
    assert 5 <= len(run.experiments()) <= 7


def test_a_resumed_run_on_two_devices_goes_on(run: Run) -> None:
    search_of(run, [Slow(0.001), Slow(0.001)], max_experiments=9).run_all(Playbook())
    before = run.experiments()
    path = run.path
    run.close()
    with Run.open(path) as again:
        search_of(again, [Slow(0.001), Slow(0.001)], max_experiments=20).run_all(Playbook())
        assert again.experiments()[:9] == before
        check_books(again, 20)


def test_devices_of_a_run() -> None:
    on_gpu = target().model_copy(update={"device": "cuda:2"})
    assert pipeline.devices_of(settings(devices=(2, 3)), on_gpu) == ["cuda:2", "cuda:3"]
    assert pipeline.devices_of(settings(), on_gpu) == ["cuda:2"]
    assert pipeline.devices_of(settings(devices=(0, 1)), target()) == ["cpu"]


def test_devices_that_cannot_be_used_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="the model is to run on cpu"):
        pipeline._with_devices(settings(devices=(0, 1)))
    auto = settings(devices=(1, 1))
    with pytest.raises(UsageError, match="twice"):
        pipeline._with_devices(auto)
    spec = settings().spec.model_copy(update={"device": "auto"})
    wanted = settings(devices=(1, 0)).model_copy(update={"spec": spec})
    with pytest.raises(DeviceError, match=r"cuda:1 is not there"):
        pipeline._with_devices(wanted)
    monkeypatch.setattr(pipeline.worker, "call", lambda *_: None)
    assert pipeline._with_devices(wanted).spec.device == "cuda:1"
