"""The loop: what is kept, what the ledger and git hold, what a crash leaves, and when it stops."""

from __future__ import annotations

import pkgutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

import autokernel_hf
from autokernel_hf import pipeline, shipping, tunables, worker
from autokernel_hf.agent import Context, Playbook
from autokernel_hf.errors import RunError
from autokernel_hf.figures import RESULT_COLUMNS
from autokernel_hf.ledger import Finished, Judged, Started
from autokernel_hf.progress import Silent
from autokernel_hf.records import (
    Built,
    Candidate,
    Evaluation,
    Latency,
    ModelSpec,
    Package,
    Profile,
    Proposal,
    PulledModel,
    Resources,
    SiteProfile,
    Speedup,
    SpeedupInterval,
    Target,
    TargetResult,
    Verification,
    Winner,
)
from autokernel_hf.runs import Run
from autokernel_hf.search import Limits, Search, Stop
from tests.loop_helpers import (
    EAGER_US,
    KnownJudge,
    decide,
    device,
    diagnose,
    formula,
    settings,
    starter,
    target,
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run.create(tmp_path, "org/model", settings())
    made.add_target(target(), [starter()])
    yield made
    made.close()


def search_of(run: Run, judge: KnownJudge, **limits: object) -> Search:
    return Search(
        target(),
        [starter()],
        run=run,
        judge=judge,
        decide=decide,
        diagnose=diagnose,
        limits=Limits(**limits),
        progress=Silent(),
    )


def git(run: Run, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(run.path), *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_playbook_finds_the_best_configuration_of_a_small_space(run: Run) -> None:
    judge = KnownJudge()
    result, winner = search_of(run, judge, max_experiments=30, max_reverts=30).run_all(Playbook())
    assert winner is not None
    assert tunables.values(winner.candidate.source) == {"kUnroll": 4, "kChunk": 2048, "kMode": 1}
    assert result.status == "won"
    assert result.speedup == pytest.approx(5.0)
    assert result.baseline_us == pytest.approx(100.0)
    assert len(set(judge.judged)) == len(judge.judged), "the same source was judged twice"


def test_first_experiments_change_one_constant_that_the_diagnosis_points_at(run: Run) -> None:
    search_of(run, KnownJudge(), max_experiments=3, max_reverts=9).run_all(Playbook())
    start, second, _ = run.experiments()
    changed = {k for k, v in second.tunables.items() if v != start.tunables[k]}
    assert changed == {"kChunk"}, "kChunk acts on memory, which is what bounds this kernel"


def test_incorrect_candidates_are_reverted_and_never_win(run: Run) -> None:
    judge = KnownJudge(wrong=lambda values: values["kMode"] == 1)
    result, winner = search_of(run, judge, max_experiments=25, max_reverts=25).run_all(Playbook())
    assert winner is not None
    assert tunables.values(winner.candidate.source)["kMode"] != 1
    wrong = [e for e in run.experiments() if e.evaluation.status == "incorrect"]
    assert wrong
    assert {e.decision for e in wrong} == {"revert"}
    assert result.kept == sum(e.decision == "keep" for e in run.experiments())


class Fickle(KnownJudge):
    """Confirms only what is slower than a bound: the search's own timings flattered the rest."""

    def __init__(self, honest_us: float, status: str = "passed") -> None:
        super().__init__()
        self.honest_us = honest_us
        self.status = status
        self.confirmed: list[str] = []

    def confirm(self, candidate: Candidate) -> Evaluation:
        self.confirmed.append(candidate.digest)
        found = super().confirm(candidate)
        us = found.workloads[0].latency_us
        assert us is not None
        if us >= self.honest_us:
            return found
        slow = found.workloads[0].model_copy(
            update={"latency_us": 101.0, "speedup_vs_eager": 0.99, "ci95_vs_eager": (0.98, 1.0)}
        )
        return found.model_copy(update={"workloads": (slow,), "status": self.status, "reason": "it lied"})


@pytest.mark.parametrize("status", ["passed", "incorrect"])
def test_where_the_confirmation_fails_the_next_best_kept_one_wins(run: Run, status: str) -> None:
    judge = Fickle(honest_us=28.0, status=status)
    result, winner = search_of(run, judge, max_experiments=30, max_reverts=30).run_all(Playbook())
    everything = [e.record for e in run.events() if isinstance(e, Judged)]
    kept_once = [e for e in everything if e.decision == "keep"]
    flattered = [e for e in kept_once if formula(dict(e.tunables)) < 28.0]
    honest = [e for e in kept_once if formula(dict(e.tunables)) >= 28.0]
    assert flattered and honest, "the case needs some of both"
    assert winner is not None and result.status == "won"
    assert winner.candidate.digest == honest[-1].digest
    assert result.best_us == pytest.approx(formula(dict(honest[-1].tunables)))
    assert judge.confirmed == [e.digest for e in (*reversed(flattered), honest[-1])]
    # Told in the outcome, the ledger, the table and git.
    assert all(f"#{e.experiment} was kept and then taken back" in result.reason for e in flattered)
    assert result.kept == len(honest)
    by_number = {e.experiment: e for e in run.experiments()}
    assert {by_number[e.experiment].decision for e in flattered} == {"revert"}
    rows = [line.split("\t") for line in (run.path / "results.tsv").read_text().splitlines()[1:]]
    assert [int(r[0]) for r in rows if r[12] == "keep"] == [e.experiment for e in honest]
    assert git(run, "rev-parse", "target/rmsnorm") == honest[-1].commit
    assert (run.target_dir("rmsnorm") / "kernel.cpp").read_text() == winner.candidate.source
    assert git(run, "rev-parse", f"refs/experiments/{flattered[-1].experiment}") == flattered[-1].commit
    assert run.winner("rmsnorm") == by_number[honest[-1].experiment]
    # And after a crash before the branch moved back.
    git(run, "update-ref", "refs/heads/target/rmsnorm", flattered[-1].commit)
    path = run.path
    run.close()
    with Run.open(path) as again:
        assert git(again, "rev-parse", "target/rmsnorm") == honest[-1].commit
        found = shipping.winner_of(again, target())
        assert found is not None and found.candidate == winner.candidate


def test_where_no_kept_one_is_confirmed_the_branch_is_back_at_the_starter(run: Run) -> None:
    judge = Fickle(honest_us=1e9)
    search = search_of(run, judge, max_experiments=1)
    result, winner = search.run_all(Playbook())
    assert winner is None and result.status == "no_speedup" and result.kept == 0
    assert "0.990x the speed of the model's own code (0.980 to 1.000 at 95 %)" in result.reason
    first = git(run, "rev-list", "--reverse", "target/rmsnorm").splitlines()
    assert len(first) == 2, "the run's start and the starters"
    assert (run.target_dir("rmsnorm") / "kernel.cpp").read_text() == starter().source
    assert run.incumbent("rmsnorm") is None and run.winner("rmsnorm") is None


def test_no_winner_where_nothing_beats_the_models_own_code(run: Run) -> None:
    judge = KnownJudge(time_us=lambda values: formula(values) * 10)
    result, winner = search_of(run, judge, max_experiments=5).run_all(Playbook())
    assert winner is None
    assert result.status == "no_speedup"
    assert result.kept == 0
    assert result.experiments == 5


def test_kept_experiments_advance_the_branch_and_reverted_ones_stay_reachable(run: Run) -> None:
    search_of(run, KnownJudge(), max_experiments=8, max_reverts=9).run_all(Playbook())
    experiments = run.experiments()
    kept = [e for e in experiments if e.decision == "keep"]
    reverted = [e for e in experiments if e.decision == "revert"]
    assert kept
    assert reverted
    assert git(run, "rev-parse", "target/rmsnorm") == kept[-1].commit
    history = git(run, "rev-list", "target/rmsnorm").splitlines()
    assert [c for c in history if c in {e.commit for e in kept}] == [e.commit for e in reversed(kept)]
    for experiment in reverted:
        assert git(run, "rev-parse", f"refs/experiments/{experiment.experiment}") == experiment.commit
        assert experiment.commit not in history
    working = (run.target_dir("rmsnorm") / "kernel.cpp").read_text()
    assert working == run.source(kept[-1]).source
    assert git(run, "show", "-s", "--format=%an", kept[-1].commit) == "autokernel-hf"


def test_results_table_has_the_contract_columns_and_a_row_for_each_experiment(run: Run) -> None:
    search_of(run, KnownJudge(), max_experiments=4).run_all(Playbook())
    rows = [line.split("\t") for line in (run.path / "results.tsv").read_text().splitlines()]
    assert tuple(rows[0]) == RESULT_COLUMNS
    assert rows[0][:10] == [
        "experiment", "tag", "kernel_type", "throughput_tflops", "latency_us",
        "pct_peak", "speedup_vs_pytorch", "correctness", "peak_vram_mb", "description",
    ]  # fmt: skip
    assert [r[0] for r in rows[1:]] == ["1", "2", "3", "4"]
    assert float(rows[1][4]) == pytest.approx(54.6)
    assert float(rows[1][6]) == pytest.approx(100 / 54.6, rel=1e-3)


def test_stop_rules(run: Run) -> None:
    search = search_of(run, KnownJudge(time_us=lambda v: 50.0), max_experiments=50, max_reverts=3)
    result, _ = search.run_all(Playbook())
    assert result.experiments == 4, "the starter, then three that were not faster"
    assert "3 experiments in a row" in result.reason
    assert search_of(run, KnownJudge(), max_seconds=0.0).stop_reason(0.1) == Stop("time", "0 s spent")
    assert "2.00x against torch" in str(
        search_of(run, KnownJudge(), speedup=2.0, max_reverts=99).stop_reason(0.0)
    )
    # 100 us by the model's own code, 50 us by the starter: the starter reaches 2.0 and not 2.1.
    assert search_of(run, KnownJudge(), speedup=2.1, max_reverts=99).stop_reason(0.0) is None


def test_a_search_ends_at_its_share_of_the_roofline(run: Run) -> None:
    judge = KnownJudge(pct_peak=lambda us: 100 * 10 / us)
    limits = {"max_experiments": 50, "max_reverts": 50, "pct_peak": 30.0}
    result, winner = search_of(run, judge, **limits).run_all(Playbook())
    assert winner is not None and result.best_us is not None
    assert result.best_us <= 10 / 0.3 < EAGER_US
    assert result.reason.endswith("% of the roofline")
    kept = [e for e in run.experiments() if e.decision == "keep"]
    assert kept[-1] == run.experiments()[-1], "it ends as soon as one gets there"


def test_a_resumed_targets_time_is_counted_on(run: Run) -> None:
    class Slow(KnownJudge):
        def evaluate(self, candidate: Candidate, incumbent: Candidate | None = None) -> Evaluation:
            time.sleep(0.05)
            return super().evaluate(candidate, incumbent)

    search_of(run, Slow(), max_experiments=4, max_reverts=30).run_all(Playbook())
    again = search_of(run, Slow(), max_experiments=9, max_seconds=0.2, max_reverts=30)
    result, _ = again.run_all(Playbook())
    assert result.experiments == 4, "its 0.2 s were spent before"
    assert search_of(run, Slow(), max_experiments=9, max_seconds=60.0).stop_reason(0.0) is None


def test_what_a_run_asks_for_becomes_its_limits() -> None:
    asked = settings(max_experiments=7, budget_s=60.0, top=3, target_speedup=2.5)
    assert pipeline.limits_of(asked) == Limits(max_experiments=7, max_seconds=20.0, speedup=2.5)


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_a_clock_that_is_set_spends_no_budget(run: Run, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    real = time.time

    class Jumping(KnownJudge):
        def evaluate(self, candidate: Candidate, incumbent: Candidate | None = None) -> Evaluation:
            monkeypatch.setattr(time, "time", lambda: real() + jump * len(self.judged))
            return super().evaluate(candidate, incumbent)

    result, _ = search_of(run, Jumping(), max_experiments=4, max_seconds=300.0).run_all(Playbook())
    assert result.experiments == 4
    assert all(0.0 <= e.seconds < 100.0 for e in run.experiments())


def with_gain(name: str, speedup: float) -> Target:
    return target().model_copy(update={"name": name, "attainable_speedup": speedup})


def test_the_time_that_is_left_is_shared_by_what_there_is_to_gain(tmp_path: Path) -> None:
    # 20 % and 5 % of the pass.
    waiting = [with_gain("much", 1.25), with_gain("little", 1 / 0.95)]
    with Run.create(tmp_path, "m", settings(budget_s=100.0, top=2)) as run:
        assert pipeline.limits_for(run, waiting).max_seconds == pytest.approx(80.0)
        run.add_target(waiting[0], [starter()])
        slow = KnownJudge()
        search = Search(
            waiting[0], [starter()], run=run, judge=slow, decide=decide, diagnose=diagnose,
            limits=Limits(max_experiments=1), progress=Silent(),
        )  # fmt: skip
        search.try_starters()
        (first,) = run.experiments()
        assert first.target == "much"
        # What the first did not use is the second's.
        assert pipeline.limits_for(run, waiting[1:]).max_seconds == pytest.approx(100.0 - first.seconds)
    with Run.create(tmp_path, "m", settings(top=2)) as run:
        assert pipeline.limits_for(run, waiting).max_seconds is None


@pytest.mark.parametrize("status", ["won", "no_speedup"])
def test_what_lies_within_a_target_is_tried_where_that_one_does_not_win(
    run: Run, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """An MLP as a whole has more to gain than the activation in it, and a norm least."""
    base = profile_of(settings().spec)

    def site(kind: str, ms: float, nested_in: str | None = None) -> SiteProfile:
        return SiteProfile(
            name=f"h.*.{kind}", kernel_type=kind, layer="L", sites=(), share=ms, calls=1, ms=ms,
            attainable_ms=0.0, shapes=(), bound="memory", supported=True, workloads=(), nested_in=nested_in,
        )  # fmt: skip

    sites = (
        site("softmax", 0.3),
        site("activation", 0.2, nested_in="h.*.softmax"),
        site("rmsnorm", 0.1),
        site("reduce", 0.05),
    )
    profile = base.model_copy(update={"sites": sites})
    tried: list[str] = []

    def optimize_target(run: Run, profile: Profile, target: Target, *_: object, **__: object) -> object:
        tried.append(target.name)
        known = status if target.name == "softmax" else "no_speedup"
        return TargetResult(
            name=target.name, kernel_type=target.name, backend="cpp", share=0.1, status=known
        ), None

    monkeypatch.setattr(pipeline, "optimize_target", optimize_target)
    settled = run.settings.model_copy(update={"top": 3})
    monkeypatch.setattr(run, "settings", settled)
    results, _ = pipeline.optimize_targets(run, profile, Silent())
    if status == "won":
        assert tried == ["softmax", "rmsnorm", "reduce"]
        (inner,) = [r for r in results if r.name == "activation"]
        assert inner.status == "skipped" and "overlap those of a target" in inner.reason
    else:
        assert tried == ["softmax", "activation", "rmsnorm"]
        (last,) = [r for r in results if r.name == "reduce"]
        assert last.status == "skipped" and last.reason == "beyond the top 3"
    assert sorted(r.name for r in results) == ["activation", "reduce", "rmsnorm", "softmax"]


def test_no_module_takes_the_place_of_a_public_function() -> None:
    """Importing a module sets it as an attribute of its package, over a function of the same name."""
    for module in pkgutil.iter_modules(autokernel_hf.__path__):
        assert module.name not in autokernel_hf.__all__
    assert all(callable(getattr(autokernel_hf, name)) for name in ("apply", "load", "optimize", "restore"))


def test_options_that_nothing_heeds_are_refused() -> None:
    with pytest.raises(TypeError, match="no option gpus"):
        autokernel_hf.optimize("gpt2", random_weights=True, gpus=(0, 1))


def test_a_resumed_search_goes_on_where_it_stopped(run: Run) -> None:
    search_of(run, KnownJudge(), max_experiments=4, max_reverts=30).run_all(Playbook())
    before = run.experiments()
    path = run.path
    run.close()
    with Run.open(path) as again:
        judge = KnownJudge()
        search_of(again, judge, max_experiments=9, max_reverts=30).run_all(Playbook())
        after = again.experiments()
    assert after[:4] == before
    assert [e.experiment for e in after] == list(range(1, 10))
    assert not {e.digest for e in before} & set(judge.judged)


def test_a_torn_ledger_line_is_cut_off_and_numbers_are_not_used_twice(run: Run) -> None:
    search_of(run, KnownJudge(), max_experiments=2).run_all(Playbook())
    run.append(
        Started(
            experiment=3, target="rmsnorm", backend="cpp", digest="d", description="lost to a crash", at=0.0
        )
    )
    with (run.path / "ledger.jsonl").open("a") as file:
        file.write('{"event":"judged","record":{"exper')
    assert len(run.events()) == 6, "four of two experiments, one outcome, one start"
    assert run.next_number() == 4
    run.append(Started(experiment=4, target="rmsnorm", backend="cpp", digest="d", description="next", at=0.0))
    assert [type(e) for e in run.events()][-2:] == [Started, Started]


def test_a_crash_between_ledger_and_refs_is_repaired_on_opening(run: Run) -> None:
    search = search_of(run, KnownJudge(), max_experiments=1)
    search.try_starters()
    kept = run.experiments()[-1]
    assert kept.decision == "keep"
    git(run, "update-ref", "-d", "refs/experiments/1")
    git(run, "update-ref", "refs/heads/target/rmsnorm", f"{kept.commit}^")
    (run.path / "results.tsv").unlink()
    path = run.path
    run.close()
    with Run.open(path) as again:
        assert git(again, "rev-parse", "target/rmsnorm") == kept.commit
        assert git(again, "rev-parse", "refs/experiments/1") == kept.commit
        assert len((path / "results.tsv").read_text().splitlines()) == 2


def test_what_a_killed_git_leaves_is_removed_on_opening(run: Run) -> None:
    search_of(run, KnownJudge(), max_experiments=2).try_starters()
    path = run.path
    run.close()
    left = [".git/autokernel-index.lock", ".git/refs/heads/target/rmsnorm.lock", ".results.tsv.abcd1234"]
    for name in left:
        (path / name).write_text("")
    with Run.open(path) as again:
        assert not any((path / name).exists() for name in left)
        search_of(again, KnownJudge(), max_experiments=3).run_all(Playbook())
        assert len(again.experiments()) == 3


def test_a_git_that_outlives_its_process_is_waited_for(run: Run) -> None:
    """Its lock files are not a dead process's; it holds the run's lock until it ends."""
    assert run._lock is not None
    path, began = run.path, time.monotonic()
    git_still_there = subprocess.Popen(["sleep", "0.5"], pass_fds=(run._lock,))
    run.close()
    with Run.open(path):
        assert time.monotonic() - began > 0.3
    git_still_there.wait()


def test_resuming_leaves_an_agents_working_file_alone(run: Run) -> None:
    search_of(run, KnownJudge(), max_experiments=1).try_starters()
    file = run.target_dir("rmsnorm") / "kernel.cpp"
    file.write_text(file.read_text() + "// half an idea\n")
    path = run.path
    run.close()
    with Run.open(path) as again:
        again.add_target(target(), [starter()])
        assert file.read_text().endswith("// half an idea\n")


def test_a_run_folder_without_its_repository_is_told(run: Run) -> None:
    path = run.path
    run.close()
    (path / ".git").rename(path.parent / "lost")
    with pytest.raises(RunError, match=r"has no git repository any more: .* the source of every experiment"):
        Run.open(path, lock=False)


def test_a_damaged_ledger_is_refused_not_ignored(run: Run) -> None:
    with (run.path / "ledger.jsonl").open("a") as file:
        file.write('{"event":"judged"}\n')
    with pytest.raises(RunError, match=r"ledger.jsonl:1"):
        run.events()


def test_a_relative_folder_works_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Run.create(Path("runs"), "model", settings()) as made:
        monkeypatch.chdir("/")
        made.add_target(target(), [starter()])
        assert made.path.parent == tmp_path / "runs"
        assert [t.name for t in made.targets()] == ["rmsnorm"]


def test_two_processes_exclude_each_other(run: Run) -> None:
    with pytest.raises(RunError, match="Another process"):
        Run.open(run.path)


def test_the_runs_git_ignores_what_a_reset_must_not_erase(run: Run) -> None:
    search_of(run, KnownJudge(), max_experiments=2).run_all(Playbook())
    ignored = git(run, "check-ignore", "results.tsv", "ledger.jsonl", "run.json").splitlines()
    assert ignored == ["results.tsv", "ledger.jsonl", "run.json"]


def test_a_users_own_git_variables_do_not_lead_elsewhere(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "users"
    subprocess.run(["git", "init", "-q", str(other)], check=True)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    search_of(run, KnownJudge(), max_experiments=1).try_starters()
    monkeypatch.delenv("GIT_DIR")
    assert git(run, "rev-parse", "refs/experiments/1") == run.experiments()[0].commit
    assert subprocess.run(
        ["git", "-C", str(other), "rev-parse", "-q", "--verify", "HEAD"], check=False
    ).returncode


def test_a_users_hooks_and_templates_stay_out_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in ("pre-commit", "commit-msg", "reference-transaction"):
        (hooks / name).write_text("#!/bin/sh\nexit 1\n")
        (hooks / name).chmod(0o755)
    (tmp_path / ".gitconfig").write_text(
        f"[core]\n\thooksPath = {hooks}\n[init]\n\ttemplateDir = {tmp_path}\n[commit]\n\tgpgSign = true\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with Run.create(tmp_path / "runs", "org/model", settings()) as run:
        run.add_target(target(), [starter()])
        search_of(run, KnownJudge()).try_starters()
        assert [e.decision for e in run.experiments()] == ["keep"]
        assert not (run.path / ".git" / "hooks").exists()


def test_the_ledger_tells_one_story_with_the_events(run: Run) -> None:
    search_of(run, KnownJudge(), max_experiments=3).run_all(Playbook())
    kinds = [type(e) for e in run.events()]
    assert kinds == [Started, Judged] * 3 + [Finished]
    assert run.result("rmsnorm").result.experiments == 3


def test_playbook_ends_when_its_space_is_exhausted() -> None:
    source = "// kernel_type: rmsnorm\nconstexpr int kA = 1;  // tune(memory): 1, 2\n"
    candidate = starter().model_copy(update={"source": source})
    context = Context(
        target=target(),
        incumbent=candidate,
        attempts=(),
        scores={},
        prescriptions=(),
        bound="",
        remaining=9,
    )
    proposals = Playbook().propose(context, 9)
    assert [p.tunables for p in proposals] == [{"kA": 2}]


def staged(run: Run, name: str) -> shipping.Staged:
    """A staged winner called `name`, whose package is a folder that exists."""
    folder = run.path / "packages" / name
    folder.mkdir(parents=True)
    winner = Winner(
        target=target().model_copy(update={"name": name}),
        candidate=starter(),
        evaluation=KnownJudge().confirm(starter()),
    )
    built = Built(
        id=f"_ak_{name}", kernel_type="rmsnorm", backend="cpp", path=str(folder), variant="v", archs=(),
        resources=Resources(), seconds=0.0, cached=False,
    )  # fmt: skip
    package = Package(
        path=str(folder), name=name, version=1, variants=("v",), functions=("rmsnorm",), layers=()
    )
    return shipping.Staged(winner=winner, built=built, package=package)


def model_gain(gains: dict[str, float], asked: list[tuple[str, ...]]) -> Callable[..., Verification]:
    """A stand-in for the verification of a model, in which the kernels' gains add up."""

    def verify(
        run: Run, kernels: Sequence[shipping.Staged], progress: object = None, *, quick: bool = False
    ) -> Verification:
        names = tuple(k.winner.target.name for k in kernels)
        asked.append(names)
        ratio = 1 + sum(gains[n] for n in names)
        return Verification(
            passed=ratio > 1,
            kernel_calls=dict.fromkeys(names, 4),
            latency_ms=Latency(),
            speedup=Speedup(vs_eager=ratio),
            speedup_ci95=SpeedupInterval(),
            error=None,
            reason=f"{ratio:.2f} times as fast",
        )

    return verify


def test_a_kernel_that_slows_the_model_is_left_out_and_the_others_are_verified_without_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = [staged(run, n) for n in ("good", "bad", "fair")]
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(shipping, "verify", model_gain({"good": 0.1, "bad": -0.3, "fair": 0.05}, asked))
    left, verification = shipping.verify_the_helpful(run, kernels, Silent())
    assert asked == [("good", "bad", "fair"), ("good",), ("bad",), ("fair",), ("good", "fair")]
    assert [k.package.name for k in left] == ["good", "fair"]
    assert verification is not None and verification.passed
    assert verification.speedup.vs_eager == pytest.approx(1.15)
    assert verification.notes == ("bad was left out: 0.70 times as fast",)
    assert run.verification() == verification
    assert [p.name for p in sorted((run.path / "packages").iterdir())] == ["fair", "good"]


def test_kernels_that_help_together_are_verified_once_and_where_none_helps_all_are_told(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = [staged(run, n) for n in ("one", "two")]
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(shipping, "verify", model_gain({"one": 0.1, "two": 0.1}, asked))
    left, verification = shipping.verify_the_helpful(run, kernels, Silent())
    assert (len(left), len(asked), verification.passed) == (2, 1, True)
    asked.clear()
    monkeypatch.setattr(shipping, "verify", model_gain({"one": -0.1, "two": -0.1}, asked))
    left, verification = shipping.verify_the_helpful(run, kernels, Silent())
    assert asked == [("one", "two"), ("one",), ("two",)]
    assert not verification.passed and verification.kernel_calls == {"one": 4, "two": 4}


def test_only_a_full_verification_is_the_runs_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = staged(run, "one")
    found = model_gain({"one": 0.1}, [])(run, [kernel])
    monkeypatch.setattr(shipping.worker, "call", lambda *_: found)
    assert shipping.verify(run, [kernel], quick=True) == found
    assert run.verification() is None
    assert shipping.verify(run, [kernel]) == run.verification() == found


def profile_of(spec: ModelSpec) -> Profile:
    model = PulledModel(
        id="org/model", revision=None, path=None, architecture="M", parameters=1, weights="random",
        dtype="float32", input_shape=(1, 32),
    )  # fmt: skip
    return Profile(spec=spec, model=model, device=device(), total_ms=1.0, sites=(), other_share=0.5)


def test_the_model_that_was_profiled_is_verified_at_its_commit(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = settings().spec.model_copy(update={"model": "org/model", "revision": "a" * 40})
    run.save_profile(profile_of(pinned))
    asked: list[ModelSpec] = []
    known = model_gain({"one": 0.1}, [])(run, [staged(run, "one")])

    def call(task: str, request: worker.VerifyRequest, result: type[Verification]) -> Verification:
        asked.append(request.spec)
        return known

    monkeypatch.setattr(worker, "call", call)
    assert shipping.verify(run, [staged(run, "two")]) == known
    assert asked == [pinned]
    assert asked != [run.settings.spec]


def test_kernels_that_make_the_model_wrong_are_not_exported(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save_profile(profile_of(settings().spec))
    winner = staged(run, "one").winner
    monkeypatch.setattr(shipping, "winners_of", lambda run: (run.profile(), [winner]))
    run.save_verification(
        Verification(
            passed=False, kernel_calls={"one": 4}, latency_ms=Latency(), speedup=Speedup(),
            speedup_ci95=SpeedupInterval(), error=None, reason="the logits differ",
        )
    )  # fmt: skip
    run.close()
    with pytest.raises(RunError, match="not right with this run's kernels: the logits differ"):
        shipping.export(run.path, name="mine", out=tmp_path / "packages")
    assert not (tmp_path / "packages").exists()


def test_a_resumed_run_concludes_what_a_coding_agent_has_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = profile_of(settings().spec)
    with Run.create(tmp_path, "org/model", settings(proposer="external")) as run:

        @contextmanager
        def searching(*_: object) -> Iterator[Search]:
            yield search_of(run, KnownJudge())

        monkeypatch.setattr(pipeline, "searching", searching)
        monkeypatch.setattr(pipeline, "starters", lambda *_: [starter()])
        outcomes = []
        for changed in (None, "kUnroll = 4", "kUnroll = 2"):
            if changed is not None:
                tried = starter().model_copy(
                    update={"source": starter().source.replace("kUnroll = 1", changed)}
                )
                proposal = Proposal(source=tried.source, rationale="by hand", tags=("external",))
                search_of(run, KnownJudge()).experiment(tried, proposal)
            for _ in range(2):
                outcomes.append(pipeline.optimize_target(run, profile, target(), Silent(), resumed=True))
        assert [r.status for r, _ in outcomes] == ["skipped", "skipped", "won", "won", "won", "won"]
        assert [r.experiments for r, _ in outcomes] == [1, 1, 2, 2, 3, 3]
        assert all(w is not None and "kUnroll = 4" in w.candidate.source for _, w in outcomes[2:])
        finished = [e for e in run.events() if isinstance(e, Finished)]
        assert len(finished) == 2, "concluded once for each change, and read from the ledger else"
