"""Kills a run of two targets at one of its writes, resumes it, and looks for what was lost or counted twice.

    python -m tests.faults.killing FOLDER 1 25 49          these points; one line of JSON each
    python -m tests.faults.killing FOLDER --all --out F    all of them, and a summary as JSON

The judge knows the answer, so that a run takes a second; all else is what `optimize` does: the run folder, its git
repository, the ledger, the search of each target with its confirmation. The second target's judge flatters, so that a
demotion is among what is killed. A child of the process group dies with everything that it has started.
"""

from __future__ import annotations

import argparse
import json
import logging
import mmap
import os
import shutil
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from autokernel_hf import pipeline, tunables
from autokernel_hf.agent import Context
from autokernel_hf.archive import FINAL
from autokernel_hf.errors import RunError
from autokernel_hf.ledger import Demoted, Finished, Judged, Started
from autokernel_hf.progress import Silent
from autokernel_hf.records import (
    Candidate,
    Evaluation,
    Experiment,
    Profile,
    Proposal,
    PulledModel,
    Target,
    TargetResult,
)
from autokernel_hf.runs import Run, RunSettings
from autokernel_hf.search import Search
from tests import loop_helpers as known

EXPERIMENTS = 5
DEVICES = 1  # --devices: judge sessions side by side
TARGETS = ("first", "second")
_PLAN = struct.Struct("lll")


# --- the run that is killed ---------------------------------------------------------------------------------------


class Unsure(known.KnownJudge):
    """On one device: what is unrolled eight times may be faster than anything, or slower, so it is timed once more."""

    def evaluate(self, candidate: Candidate, incumbent: Candidate | None = None) -> Evaluation:
        found = super().evaluate(candidate, incumbent)
        if DEVICES > 1 or incumbent is None or tunables.values(candidate.source)["kUnroll"] != 8:
            return found
        unsure = {"speedup_vs_incumbent": 1.02, "ci95_vs_incumbent": (0.5, 2.0)}
        return found.model_copy(update={"workloads": (found.workloads[0].model_copy(update=unsure),)})


class Flattering(Unsure):
    """Its confirmation runs bear nothing out that takes less than 40 us."""

    def confirm(self, candidate: Candidate) -> Evaluation:
        found = super().confirm(candidate)
        us = found.workloads[0].latency_us
        if us is None or us >= 40.0:
            return found
        slow = {"speedup_vs_eager": 0.9, "ci95_vs_eager": (0.89, 0.91)}
        return found.model_copy(update={"workloads": (found.workloads[0].model_copy(update=slow),)})


class Script:
    """The same proposals in the same order, without those that were judged."""

    name = "script"
    steps = ({"kUnroll": 2}, {"kUnroll": 4}, {"kUnroll": 4, "kMode": 1}, {"kUnroll": 8}, {"kMode": 2})

    def propose(self, context: Context, n: int) -> list[Proposal]:
        if not context.attempts:
            return []  # of two that have no incumbent to beat, that would be kept which comes first
        tried = {e.digest for e in context.attempts} | {_candidate(p.source).digest for p in context.pending}
        sources = [tunables.substitute(known.SOURCE, step) for step in self.steps]
        left = [s for s in sources if _candidate(s).digest not in tried]
        return [
            Proposal(source=s, rationale=f"step {sources.index(s)}", tunables=tunables.values(s))
            for s in left[:n]
        ]


def _candidate(source: str) -> Candidate:
    return Candidate(kernel_type="rmsnorm", backend="cpp", source=source)


def _target(name: str) -> Target:
    return known.target().model_copy(update={"name": name})


def _profile(settings: RunSettings) -> Profile:
    model = PulledModel(
        id="org/model", revision=None, path=None, architecture="M", parameters=1, weights="random",
        dtype="float32", input_shape=(1, 32),
    )  # fmt: skip
    return Profile(
        spec=settings.spec, model=model, device=known.device(), total_ms=1.0, sites=(), other_share=0.5
    )


@contextmanager
def _searching(run: Run, target: Target, candidates: object, progress: object) -> Iterator[Search]:
    kind = Flattering if target.name == "second" else Unsure
    yield Search(
        target,
        [known.starter()],
        run=run,
        judge=kind(),
        more=[(f"cuda:{i}", kind()) for i in range(1, DEVICES)],
        decide=known.decide,
        diagnose=known.diagnose,
        limits=pipeline.limits_of(run.settings),
        progress=Silent(),
    )


def work(folder: Path) -> list[TargetResult]:
    """Begin the run in a folder, or go on with it: what `optimize` does between the profile and the packages."""
    pipeline.searching = _searching  # type: ignore[assignment]
    pipeline.starters = lambda *_: [known.starter()]
    pipeline.proposer_for = lambda run: Script()
    whole = [p for p in folder.glob("*") if (p / "run.json").exists()]
    if whole:
        run = Run.open(whole[0])
    else:  # killed before there was a run: nothing of it counts, and the user begins anew
        shutil.rmtree(folder, ignore_errors=True)
        run = Run.create(folder, "org/model", known.settings(max_experiments=EXPERIMENTS))
    with run:
        profile = run.profile()
        if profile is None:
            profile = _profile(run.settings)
            run.save_profile(profile)
        return [
            pipeline.optimize_target(run, profile, _target(name), Silent(), resumed=bool(whole))[0]
            for name in TARGETS
        ]


# --- killing it ---------------------------------------------------------------------------------------------------


class Plan:
    """What the shim reads: at which call to die. Made before the shim is loaded."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), _PLAN.size)

    def arm(self, stop: int, mode: int) -> None:
        self._map[:] = _PLAN.pack(0, stop, mode)

    @property
    def count(self) -> int:
        return int(_PLAN.unpack(self._map[:])[0])


def killed_at(plan: Plan, stop: int, mode: int, job: Callable[[], object]) -> bool:
    """Run a job in a process group of its own that dies at the call `stop`; whether it did. 0: it does not."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            plan.arm(stop, mode)
            job()
            code = 0
        except BaseException:  # noqa: BLE001 - told by the exit code, and on stderr
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    plan.arm(-1, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == 9:
        return True
    if os.WEXITSTATUS(status):
        raise RuntimeError(f"the run failed by itself, at call {stop} in mode {mode}")
    return False


# --- what must hold -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Outcome:
    """What a run has come to, without what differs from run to run (times, numbers)."""

    results: list[tuple[object, ...]] = field(default_factory=list)
    decisions: list[tuple[str, str, str]] = field(default_factory=list)


def outcome(folder: Path) -> Outcome:
    with Run.open(_only(folder), lock=False) as run:
        found = Outcome()
        for name in TARGETS:
            done = run.result(name)
            won = run.winner(name)
            if done is not None:
                r = done.result
                found.results.append(
                    (name, r.status, r.experiments, r.kept, r.speedup, won.digest if won else None)
                )
            found.decisions += [(name, e.digest, e.decision) for e in run.experiments(name)]
    return found


def judged_so_far(folder: Path) -> list[Experiment]:
    """What stands in the ledger after a kill, read without repairing anything."""
    whole = [p for p in folder.glob("*") if (p / "run.json").exists()]
    if not whole:
        return []
    with Run.open(whole[0], lock=False) as run:
        return run.experiments()


def problems(folder: Path, before: list[Experiment], expected: Outcome) -> list[str]:
    """What is wrong with a finished run that was killed and resumed."""
    found: list[str] = []
    path = _only(folder)
    with Run.open(path) as run:
        events, experiments = run.events(), run.experiments()
    judged = [e.record for e in events if isinstance(e, Judged)]
    if [e.experiment for e in judged[: len(before)]] != [e.experiment for e in before]:
        found.append("what was judged before the kill is not what stands in the ledger")
    numbers = [e.experiment for e in judged]
    if len(set(numbers)) != len(numbers) or (DEVICES == 1 and numbers != sorted(numbers)):
        found.append(f"numbers {numbers}")
    begun = [e.experiment for e in events if isinstance(e, Started)]
    if len(set(begun)) != len(begun) or not set(numbers) <= set(begun):
        found.append(f"begun {begun}, judged {numbers}")
    if max(Counter((e.target, e.digest, e.tag == FINAL) for e in judged).values(), default=0) > 1:
        found.append("an experiment was counted twice")
    if DEVICES == 1 and [e.target for e in judged if e.tag == FINAL] != list(TARGETS):
        found.append("there is not one finalist a target")
    if Counter(e.result.name for e in events if isinstance(e, Finished)) != Counter(TARGETS):
        found.append("a target was concluded twice, or not at all")
    if max(Counter(e.experiment for e in events if isinstance(e, Demoted)).values(), default=0) > 1:
        found.append("an experiment was demoted twice")
    now = outcome(folder)
    if DEVICES > 1:
        # Which of two is entered first is chance, and with it what is kept on the way; where it ends is not.
        if [(r[:3], r[4:]) for r in now.results] != [(r[:3], r[4:]) for r in expected.results]:
            found.append(f"another outcome: {now.results}")
        if {d[:2] for d in now.decisions} != {d[:2] for d in expected.decisions}:
            found.append("other experiments")
    elif now != expected:
        found.append(f"another outcome: {now}")
    found += _unlike(path, experiments)
    return found


def _unlike(path: Path, experiments: list[Experiment]) -> list[str]:
    """Where table, git and ledger differ."""
    found = []
    rows = [line.split("\t") for line in (path / "results.tsv").read_text().splitlines()[1:]]
    if [(r[0], r[12], r[14]) for r in rows] != [
        (str(e.experiment), e.decision, e.commit) for e in experiments
    ]:
        found.append("results.tsv differs from the ledger")

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(path), *arguments], capture_output=True, text=True, check=True
        ).stdout

    refs = dict(
        line.split() for line in git("for-each-ref", "--format=%(refname) %(objectname)").splitlines()
    )
    want = {f"refs/experiments/{e.experiment}": e.commit for e in experiments}
    if {k: v for k, v in refs.items() if k.startswith("refs/experiments/")} != want:
        found.append("refs/experiments differ from the ledger")
    for name in TARGETS:
        own = [e for e in experiments if e.target == name]
        history = git("rev-list", "--reverse", f"target/{name}").split()
        kept = [e for e in own if e.decision == "keep"]
        if history[2:] != [e.commit for e in kept]:
            found.append(f"the branch of {name} differs from the ledger")
        working = (path / "targets" / name / "kernel.cpp").read_text()
        tip = git("show", f"target/{name}:targets/{name}/kernel.cpp")
        if working != tip:
            found.append(f"the working file of {name} is not the branch's")
    if (damage := git("fsck", "--connectivity-only", "--no-dangling").strip()) != "":
        found.append(f"git fsck: {damage}")
    return found


def _only(folder: Path) -> Path:
    (path,) = [p for p in folder.glob("*") if (p / "run.json").exists()]
    return path


# --- trials -------------------------------------------------------------------------------------------------------


def trial(plan: Plan, folder: Path, stop: int, mode: int, calls: int, expected: Outcome) -> dict[str, object]:
    """Kill at one point, and at another while it is resumed; resume to the end; look."""
    shutil.rmtree(folder, ignore_errors=True)
    killed = killed_at(plan, stop, mode, lambda: work(folder))
    before = judged_so_far(folder)
    again = 1 + (stop * 337 + mode * 101) % max(1, calls - stop)  # somewhere in what is left
    killed_again = killed_at(plan, again, 1 - mode, lambda: work(folder))
    later = judged_so_far(folder)
    wrong = []
    if [e.experiment for e in later[: len(before)]] != [e.experiment for e in before]:
        wrong.append("the second kill has lost what the first had left")
    killed_at(plan, 0, 0, lambda: work(folder))
    wrong += problems(folder, later, expected)
    return {
        "stop": stop, "mode": mode, "killed": killed, "killed_again_at": again if killed_again else None,
        "judged_before": len(before), "problems": wrong,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("stops", type=int, nargs="*")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--part", default="0/1", help="i/n: of all points every n-th, from the i-th")
    parser.add_argument("--sample", type=int, help="so many points, evenly over the run, each in one mode")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    global DEVICES
    DEVICES = arguments.devices
    logging.getLogger("autokernel_hf").setLevel(logging.ERROR)
    plan = Plan(Path(os.environ["AK_KILL_PLAN"]))
    plan.arm(-1, 0)
    clean = arguments.folder / "clean"
    counted = _count(plan, clean)
    expected = outcome(clean)
    stops = [(n, m) for n in arguments.stops for m in (0, 1)]
    if arguments.all:
        first, every = map(int, arguments.part.split("/"))
        stops = [(n, n % 2) for n in range(1, counted + 1)][first::every]
    elif arguments.sample:
        last = int(
            0.97 * counted
        )  # the number differs a little: git makes a folder for a new first byte of a hash
        points = [1 + (i * (last - 1)) // max(1, arguments.sample - 1) for i in range(arguments.sample)]
        stops = [(n, i % 2) for i, n in enumerate(points)]
    began = time.monotonic()
    trials = []
    for stop, mode in stops:
        found = trial(plan, arguments.folder / "trial", stop, mode, counted, expected)
        trials.append(found)
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    summary = {
        "what": "a run of two targets is killed (SIGKILL to all its processes) at one call that changes the file system, "
        "killed again while it is resumed, and resumed to its end",
        "how": "a shared library counts write, fsync, rename, link, unlink, mkdir, ftruncate and creating open in all "
        "processes of the run, git's included; every second point dies before its call, the others in or after it",
        "date": time.strftime("%Y-%m-%d"),
        "calls_of_a_clean_run": counted,
        "experiments": EXPERIMENTS * len(TARGETS),
        "devices": DEVICES,
        "trials": len(trials),
        "killed": sum(bool(t["killed"]) for t in trials),
        "killed_twice": sum(t["killed_again_at"] is not None for t in trials),
        "with_problems": [t for t in trials if t["problems"]],
        "seconds": round(time.monotonic() - began, 1),
    }
    text = json.dumps(summary, indent=1)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    sys.stdout.write(json.dumps(summary) + "\n")


def _count(plan: Plan, folder: Path) -> int:
    """The calls of a run that nobody kills."""
    shutil.rmtree(folder, ignore_errors=True)
    counts = folder.parent / "count"

    def job() -> None:
        work(folder)
        number = plan.count
        plan.arm(-1, 0)
        counts.write_text(str(number))

    try:
        killed_at(plan, 10**9, 0, job)
    except RunError as error:
        raise SystemExit(str(error)) from error
    return int(counts.read_text())


if __name__ == "__main__":
    main()
