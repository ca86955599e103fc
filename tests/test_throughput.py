"""What a GPU waits for: a judge whose device works for a while, and compilers that take longer than it, as sleeps."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from autokernel_hf.agent import Playbook
from autokernel_hf.ledger import Judged
from autokernel_hf.progress import Silent
from autokernel_hf.records import Candidate, Evaluation
from autokernel_hf.runs import Run
from autokernel_hf.search import Limits, Search
from tests.loop_helpers import KnownJudge, decide, diagnose, settings, starter, target

JUDGED_S, BUILDERS = 0.2, 4
QUICK_S, SLOW_S = 0.05, 3.0
EXPERIMENTS, COUNTED = 24, 16  # at the end only slow ones are left, whatever the order


class Compilers:
    """Stands for `Ahead`: one candidate in four takes much longer than it is judged."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(BUILDERS)
        self.builds: dict[str, Future[None]] = {}
        self.lock = threading.Lock()

    def seconds(self, candidate: Candidate) -> float:
        return random.Random(candidate.digest).choice([QUICK_S, QUICK_S, QUICK_S, SLOW_S])

    def __call__(self, candidate: Candidate) -> bool:
        with self.lock:
            self.builds.setdefault(candidate.digest, self.pool.submit(time.sleep, self.seconds(candidate)))
        return True

    def ready(self, candidate: Candidate) -> bool:
        return self.builds[candidate.digest].done()

    def need(self, candidate: Candidate) -> None:
        """What the judge's own builder does: waits for the one that is at it, or builds."""
        if candidate.digest in self.builds:
            self.builds[candidate.digest].result()
        else:
            time.sleep(self.seconds(candidate))


class Device(KnownJudge):
    """Nothing is better than the starter, so that nothing that was proposed is dropped."""

    def __init__(self, compilers: Compilers) -> None:
        super().__init__(time_us=lambda values: 50.0)
        self.compilers = compilers
        self.waited: list[float] = []
        self.began: list[float] = []

    def evaluate(
        self,
        candidate: Candidate,
        incumbent: Candidate | None = None,
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> Evaluation:
        worker = threading.Thread(target=meanwhile) if meanwhile is not None else None
        if worker is not None:
            worker.start()
        began = time.monotonic()
        self.began.append(began)
        self.compilers.need(candidate)
        self.waited.append(time.monotonic() - began)
        time.sleep(JUDGED_S)
        if worker is not None:
            worker.join()
        return super().evaluate(candidate, incumbent)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Callable[[], Run]]:
    made: list[Run] = []

    def make() -> Run:
        made.append(Run.create(tmp_path, f"m{len(made)}", settings()))
        made[-1].add_target(target(), [starter()])
        return made[-1]

    yield make
    for run in made:
        run.close()


def idle_s(run: Run, *, ready: bool) -> tuple[float, float]:
    """How long the device stood still in all, and for its own builder, after the starter, until COUNTED were judged."""
    compilers = Compilers()
    judge = Device(compilers)
    search = Search(
        target(), [starter()], run=run, judge=judge, decide=decide, diagnose=diagnose,
        limits=Limits(max_experiments=EXPERIMENTS, max_reverts=99), progress=Silent(), ahead=compilers,
        ready=compilers.ready if ready else None, depth=BUILDERS,
    )  # fmt: skip
    search.run_all(Playbook())
    compilers.pool.shutdown()
    assert len(judge.judged) == len(set(judge.judged)) == EXPERIMENTS
    whole = judge.began[COUNTED] - judge.began[1]
    return whole - JUDGED_S * (COUNTED - 1), sum(judge.waited[1:COUNTED])


@pytest.mark.slow
def test_what_is_compiled_first_is_judged_first(runs: Callable[[], Run]) -> None:
    (in_order, waiting), (as_ready, hardly) = idle_s(runs(), ready=False), idle_s(runs(), ready=True)
    said = f"idle {in_order:.2f} s in order, {as_ready:.2f} s as they are ready; for a build {waiting:.2f} and {hardly:.2f}"
    logging.getLogger(__name__).info("%s", said)
    assert hardly < 0.1 and waiting > 1.0, said
    assert as_ready < in_order - 0.6 * waiting, said


def test_what_never_gets_compiled_is_judged_in_the_end(
    runs: Callable[[], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autokernel_hf.search._PATIENCE_S", 0.1)
    run, told = runs(), []
    search = Search(
        target(), [starter()], run=run, judge=Device(Compilers()), decide=decide, diagnose=diagnose,
        limits=Limits(max_experiments=4), progress=Silent(), depth=2,
        ahead=lambda candidate: told.append(candidate.digest) is None, ready=lambda candidate: False,
    )  # fmt: skip
    search.run_all(Playbook())
    assert [e.digest for e in run.experiments()][1:] == told[:3]


def test_what_is_not_compiled_ahead_is_not_waited_for(runs: Callable[[], Run]) -> None:
    began, run = time.monotonic(), runs()
    search = Search(
        target(), [starter()], run=run, judge=Device(Compilers()), decide=decide, diagnose=diagnose,
        limits=Limits(max_experiments=5), progress=Silent(), ahead=lambda candidate: False,
        ready=lambda candidate: False, depth=2,
    )  # fmt: skip
    search.run_all(Playbook())
    assert len(run.experiments()) == 5 and time.monotonic() - began < 20


def test_other_devices_go_on_while_one_looks_closer(runs: Callable[[], Run]) -> None:
    """Reading hardware counters takes a device for many seconds, and is once for all of them."""
    run, looks = runs(), []

    def look(*_: object) -> tuple[tuple[str, ...], str]:
        looks.append(threading.current_thread().name)
        if len(looks) == 1:
            time.sleep(4.0)
            ended.append(time.time())
        return (), ""

    class Quick(Device):
        def evaluate(
            self,
            candidate: Candidate,
            incumbent: Candidate | None = None,
            *,
            meanwhile: Callable[[], None] | None = None,
        ) -> Evaluation:
            if meanwhile is not None:
                meanwhile()
            return KnownJudge.evaluate(self, candidate, incumbent)

    ended: list[float] = []
    compilers = Compilers()
    search = Search(
        target(), [starter()], run=run, judge=Quick(compilers), more=[("cuda:1", Quick(compilers))],
        decide=decide, diagnose=diagnose, limits=Limits(max_experiments=24, max_reverts=99), progress=Silent(),
        ahead=lambda candidate: True, look=look,
    )  # fmt: skip
    search.run_all(Playbook())
    events = [e for e in run.events() if isinstance(e, Judged)]
    meanwhile = [e.record.device for e in events if e.at < ended[0] and e.record.device != looks[0]]
    assert len(events) == 24 and len(meanwhile) >= 3, "the other lane did not wait"
