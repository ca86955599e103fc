"""A budget is used to its end: searches that were only stuck go on, and every configuration can be reached."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from autokernel_hf import pipeline, search, tunables
from autokernel_hf.agent import Playbook, _worth_telling
from autokernel_hf.errors import JudgeError
from autokernel_hf.ledger import Finished
from autokernel_hf.progress import Silent
from autokernel_hf.records import (
    Candidate,
    Evaluation,
    Experiment,
    Profile,
    Proposal,
    PulledModel,
    SiteProfile,
    Target,
)
from autokernel_hf.runs import DEFAULT_EXPERIMENTS, NO_LIMIT, Run
from autokernel_hf.search import Limits, Search, Stop
from tests.loop_helpers import KnownJudge, decide, device, diagnose, settings, starter, target


def search_of(run: Run, judge: KnownJudge, starters: Sequence[Candidate], **limits: object) -> Search:
    return Search(
        target(),
        starters,
        run=run,
        judge=judge,
        decide=decide,
        diagnose=diagnose,
        limits=Limits(**{"max_reverts": 10**6, **limits}),
        progress=Silent(),
    )


def test_every_configuration_of_every_file_is_tried_before_a_search_ends(tmp_path: Path) -> None:
    second = Candidate(
        kernel_type="rmsnorm",
        backend="cpp",
        source="// kernel_type: rmsnorm\n// another algorithm\nint twice();\n"
        "constexpr int kRows = 1;  // tune(block): 1, 2, 4, 8\n"
        "constexpr bool kAhead = false;  // tune(memory): false, true\n",
    )

    class TwoFiles(KnownJudge):
        def us(self, candidate: Candidate) -> float:
            if "kRows" in candidate.source:
                return 500.0 - float(
                    tunables.values(candidate.source)["kRows"]
                )  # far too slow to be revisited
            return super().us(candidate)

    files = [starter(), second]
    spaces = [math.prod(len(t.choices) for t in tunables.parse(f.source)) for f in files]
    assert spaces == [48, 8]
    with Run.create(tmp_path, "m", settings()) as run:
        run.add_target(target(), files)
        result, winner = search_of(run, TwoFiles(), files, max_experiments=NO_LIMIT).run_all(Playbook())
        experiments = run.experiments()
        done = run.result("rmsnorm")
    assert len({e.digest for e in experiments}) == len(experiments) == sum(spaces)
    assert done is not None and done.stopped == "exhausted" and "nothing left to try" in result.reason
    assert winner is not None and result.speedup == pytest.approx(5.0)


def test_a_proposal_is_made_without_making_all_of_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import optuna

    asked = Counter[str]()
    ask = optuna.study.Study.ask

    def counted(self: optuna.study.Study, *arguments: object) -> object:
        asked["n"] += 1
        return ask(self, *arguments)

    monkeypatch.setattr(optuna.study.Study, "ask", counted)
    with Run.create(tmp_path, "m", settings()) as run:
        run.add_target(target(), [starter()])
        search_of(run, KnownJudge(), [starter()], max_experiments=12).run_all(Playbook())
        sampled = [e for e in run.experiments() if e.tag == "tpe"]
    assert len(sampled) >= 2
    assert asked["n"] <= 4 * len(sampled)


def test_a_sampler_is_told_of_the_latest_and_the_best() -> None:
    told = [(float(i % 400), {"kA": i}) for i in range(1000)]
    chosen = _worth_telling(told)
    assert len(chosen) == 300
    assert [params["kA"] for _, params in chosen[-150:]] == list(range(850, 1000))
    assert [params["kA"] for _, params in chosen[:150]] == [*range(325, 400), *range(725, 800)]
    assert _worth_telling(told[:300]) == told[:300]


def test_what_a_time_is_likely_to_allow_is_known_to_the_proposer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "time", Timed.clock)
    with Run.create(tmp_path, "m", settings()) as run:
        run.add_target(target(), [starter()])
        found = search_of(
            run, Timed("rmsnorm", Counter()), [starter()], max_experiments=NO_LIMIT, max_seconds=9.5
        )
        assert found.context().remaining == NO_LIMIT, "nothing is known yet"
        found.try_starters()
        assert found.context().remaining == 10 - 1
        result, _ = found.run_all(Playbook())
        tags = Counter(e.tag.split(",")[0] for e in run.experiments())
    assert result.experiments == 10 and "s spent" in result.reason
    assert 4 <= tags["opening"] <= 5, "half of what the time allows"


# --- several targets ----------------------------------------------------------------------------------------------


def profile_of(shares: dict[str, tuple[float, float]], inner: dict[str, str] | None = None) -> Profile:
    """Sites by type: their share of the pass, and that of an ideal kernel."""
    sites = tuple(
        SiteProfile(
            name=f"h.*.{kind}", kernel_type=kind, layer="L", sites=(), share=share, calls=1, ms=share,
            attainable_ms=floor, shapes=(), bound="memory", supported=True, workloads=target().workloads,
            nested_in=f"h.*.{inner[kind]}" if inner and kind in inner else None,
        )
        for kind, (share, floor) in shares.items()
    )  # fmt: skip
    model = PulledModel(
        id="org/model", revision="a" * 40, path="x", architecture="M", parameters=1,
        weights="random", dtype="float32", input_shape=(1, 64),
    )  # fmt: skip
    return Profile(
        spec=settings().spec, model=model, device=device(), total_ms=1.0, sites=sites, other_share=0.1
    )


class Clock:
    """Stands for the module `time`: nothing but experiments takes any."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return 1e9 + self.now

    def monotonic(self) -> float:
        return self.now


class Timed(KnownJudge):
    """An experiment takes a second; the time of a candidate depends on its type."""

    clock = Clock()

    def __init__(self, kind: str, confirmed: Counter[str]) -> None:
        super().__init__()
        self.kind = kind
        self.confirmed = confirmed

    def us(self, candidate: Candidate) -> float:
        return {"softmax": 300.0, "rmsnorm": 40.0, "reduce": 60.0}[self.kind]

    def evaluate(self, candidate: Candidate, incumbent: Candidate | None = None) -> Evaluation:
        self.clock.now += 1.0
        return super().evaluate(candidate, incumbent)

    def confirm(self, candidate: Candidate) -> Evaluation:
        self.confirmed[self.kind] += 1
        return super().confirm(candidate)


@pytest.fixture
def confirmed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Targets of the test are searched in a file with 768 configurations, by a judge that knows the answer."""
    count: Counter[str] = Counter()

    def starters(found: Target, kind: str, backend: str) -> list[Candidate]:
        more = "".join(f"constexpr int kMore{i} = 1;  // tune(block): 1, 2\n" for i in range(4))
        return [
            Candidate(
                kernel_type=found.kernel_type,
                backend="cpp",
                source=starter().source.replace("rmsnorm", found.name) + more,
            )
        ]

    @contextmanager
    def judge_on(name: str, found: Target) -> Iterator[Timed]:
        yield Timed(found.name, count)

    monkeypatch.setattr(search, "time", Timed.clock)
    monkeypatch.setattr(pipeline, "starters", starters)
    monkeypatch.setattr(pipeline, "_judge_on", judge_on)
    monkeypatch.setattr(pipeline, "_decide", decide)
    monkeypatch.setattr(pipeline, "_diagnoser", lambda run, **_: diagnose)
    return count


SHARES = {"softmax": (0.4, 0.1), "rmsnorm": (0.2, 0.02), "reduce": (0.1, 0.05)}


def experiments_of(run: Run) -> dict[str, list[Experiment]]:
    return {name: run.experiments(name) for name in SHARES}


def test_targets_that_were_only_stuck_are_taken_up_again_until_the_budget_is_spent(
    tmp_path: Path, confirmed: Counter[str]
) -> None:
    with Run.create(tmp_path, "m", settings(top=3, budget_s=64.0)) as run:
        results, winners = pipeline.optimize_targets(run, profile_of(SHARES), Silent())
        spent = pipeline.spent_s(run)
        tried = experiments_of(run)
        ends = [e for e in run.events() if isinstance(e, Finished)]
    assert 64.0 * (1 - pipeline.LEAST_LEFT) <= spent <= 67.0, "each search may end one experiment late"
    assert all(len(found) > 13 for found in tried.values()), (
        "a starter and twelve that were not kept, and more"
    )
    assert len(tried["rmsnorm"]) == 13 + 12, "it promises most, and is stuck a second time"
    first = [(e.result.name, e.stopped, e.result.experiments) for e in ends[:3]]
    assert first == [("softmax", "plateau", 13), ("rmsnorm", "plateau", 13), ("reduce", "plateau", 13)]
    # In the second round softmax, thrice as slow as the model, promises less than rmsnorm, and more than reduce.
    promise = {"softmax": 0.3 / 9, "rmsnorm": 0.2 * 0.4 - 0.02, "reduce": 0.1 * 0.6 - 0.05}
    assert [e.result.name for e in ends[3:6]] == sorted(promise, key=lambda n: -promise[n])
    by_name = {r.name: r for r in results}
    assert {n: r.status for n, r in by_name.items()} == {
        "softmax": "no_speedup", "rmsnorm": "won", "reduce": "won"
    }  # fmt: skip
    assert {n: r.experiments for n, r in by_name.items()} == {n: len(found) for n, found in tried.items()}
    assert sorted(w.target.name for w in winners) == ["reduce", "rmsnorm"]
    assert confirmed == {"rmsnorm": 1, "reduce": 1}, "what was confirmed and stands needs no second run"
    assert all(len({e.digest for e in found}) == len(found) for found in tried.values())


def test_without_a_budget_a_search_that_is_stuck_ends(tmp_path: Path, confirmed: Counter[str]) -> None:
    with Run.create(tmp_path, "m", settings(top=3)) as run:
        pipeline.optimize_targets(run, profile_of(SHARES), Silent())
        assert {n: len(found) for n, found in experiments_of(run).items()} == dict.fromkeys(SHARES, 13)


def test_a_run_that_is_resumed_in_a_later_round_goes_on_there(
    tmp_path: Path, confirmed: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pipeline.optimize_target
    calls: list[str] = []

    def killed(run: Run, profile: Profile, found: Target, *more: object, **rest: object) -> object:
        calls.append(found.name)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(run, profile, found, *more, **rest)

    with Run.create(tmp_path, "m", settings(top=3, budget_s=55.0)) as run:
        monkeypatch.setattr(pipeline, "optimize_target", killed)
        with pytest.raises(KeyboardInterrupt):
            pipeline.optimize_targets(run, profile_of(SHARES), Silent())
        before = {n: len(found) for n, found in experiments_of(run).items()}
        monkeypatch.setattr(pipeline, "optimize_target", real)
        _, winners = pipeline.optimize_targets(run, profile_of(SHARES), Silent(), resumed=True)
        after = experiments_of(run)
        assert 55.0 * (1 - pipeline.LEAST_LEFT) <= pipeline.spent_s(run) <= 58.0
    assert all(len(after[n]) >= before[n] for n in SHARES)
    assert sum(map(len, after.values())) > sum(before.values())
    assert all(len({e.digest for e in found}) == len(found) for found in after.values())
    assert confirmed == {"rmsnorm": 1, "reduce": 1} and len(winners) == 2


def test_what_lies_within_a_winner_is_not_taken_up_again(tmp_path: Path, confirmed: Counter[str]) -> None:
    """softmax has most to gain and loses; rmsnorm, around it, then wins, and holds its sites."""
    profile = profile_of(SHARES, {"softmax": "rmsnorm"})
    with Run.create(tmp_path, "m", settings(top=3, budget_s=55.0)) as run:
        pipeline.optimize_targets(run, profile, Silent())
        names = [e.result.name for e in run.events() if isinstance(e, Finished)]
    assert names[:3] == ["softmax", "rmsnorm", "reduce"]
    assert len(names) > 4 and "softmax" not in names[3:]


def test_a_target_that_cannot_be_searched_any_more_ends_the_rounds_not_the_run(
    tmp_path: Path, confirmed: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(self: Timed, candidate: Candidate, incumbent: Candidate | None = None) -> Evaluation:
        if len(tried) > 20:
            raise JudgeError("it ended")
        tried.append(candidate.digest)
        return KnownJudge.evaluate(self, candidate, incumbent)

    tried: list[str] = []
    monkeypatch.setattr(Timed, "evaluate", dying)
    with Run.create(tmp_path, "m", settings(top=1, budget_s=60.0)) as run:
        (result,), winners = pipeline.optimize_targets(run, profile_of({"rmsnorm": (0.2, 0.02)}), Silent())
    assert result.status == "won" and result.experiments == 13 and len(winners) == 1


def test_how_many_experiments_a_target_may_have() -> None:
    assert settings().experiments_a_target == DEFAULT_EXPERIMENTS == 20
    assert settings(budget_s=60.0).experiments_a_target == NO_LIMIT
    assert settings(budget_s=60.0, max_experiments=7).experiments_a_target == 7
    assert settings(budget_s=60.0, proposer="external").experiments_a_target == DEFAULT_EXPERIMENTS


def test_a_candidate_that_falls_in_a_later_round_leaves_the_one_that_was_confirmed(tmp_path: Path) -> None:
    class Doubting(KnownJudge):
        def confirm(self, candidate: Candidate) -> Evaluation:
            if tunables.values(candidate.source)["kUnroll"] == 4:
                return Evaluation(status="crashed", stages=super().confirm(candidate).stages, reason="late")
            return super().confirm(candidate)

    with Run.create(tmp_path, "m", settings()) as run:
        run.add_target(target(), [starter()])
        found = search_of(run, Doubting(), [starter()])
        found.try_starters()
        first, _ = found.conclude(Stop("plateau", "stuck"))
        values = {"kUnroll": 4}
        source = tunables.substitute(starter().source, values)
        better = starter().model_copy(update={"source": source})
        kept = found.experiment(better, Proposal(source=source, rationale="unroll"))
        assert kept.decision == "keep"
        again, winner = found.conclude(Stop("time", "2 s spent"))
        assert run.kept("rmsnorm").experiment == 1  # type: ignore[union-attr]
    assert first.status == again.status == "won" and again.speedup == first.speedup
    assert winner is not None and winner.candidate == starter()
    assert "taken back" in again.reason and again.experiments == 2
