"""A run is a folder: a git repository of its own, an append-only ledger, and what the stages leave behind.

The ledger is the only truth: everything else (`results.tsv`, the branches, a resumed run's state) is rebuilt from it.
An experiment is entered in this order: its commit is made (reachable from nothing yet), the ledger line that names the
commit is written and synced, then the refs move. A crash between any two of these is repaired when the run is opened.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from autokernel_hf.errors import RecordError, RunError, ToolMissingError
from autokernel_hf.judge import statistics
from autokernel_hf.records import (
    SOURCE_SUFFIX,
    Backend,
    Candidate,
    Evaluation,
    Experiment,
    Interval,
    ModelSpec,
    Profile,
    Record,
    Scalar,
    Target,
    TargetResult,
    Verification,
    write_atomically,
)

RESULT_COLUMNS = (
    "experiment",
    "tag",
    "kernel_type",
    "throughput_tflops",
    "latency_us",
    "pct_peak",
    "speedup_vs_pytorch",
    "correctness",
    "peak_vram_mb",
    "description",
    "target",
    "backend",
    "decision",
    "speedup_vs_incumbent",
    "commit",
)


# --- ledger events ------------------------------------------------------------------------------------------------


class Started(Record):
    """An experiment begins; without a `Judged` of the same number it was lost to a crash."""

    event: Literal["started"] = "started"
    experiment: int
    target: str
    backend: Backend
    digest: str
    description: str
    tunables: dict[str, Scalar] = Field(default_factory=dict)
    at: float


class Judged(Record):
    """An experiment's verdict, and the commit that holds its source."""

    event: Literal["judged"] = "judged"
    record: Experiment
    at: float


class Finished(Record):
    """A target's outcome, with the confirmation run of its winner."""

    event: Literal["finished"] = "finished"
    result: TargetResult
    confirmation: Evaluation | None = None
    commit: str | None = None
    at: float


class Asked(Record):
    """A language model was asked: what it spent, and what came of it.

    `outcome` is that of the answer (`answered`, `cut_off`, `empty`, `refused`) or of the failure (`unavailable`,
    `context_full`, `failed`). Tokens are the server's count, or `estimated`; a failed question is counted as none.
    """

    event: Literal["asked"] = "asked"
    target: str
    model: str
    purpose: Literal["propose", "repair", "again", "reflect", "price"]
    outcome: Literal["answered", "cut_off", "empty", "refused", "unavailable", "context_full", "failed"]
    detail: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    estimated: bool = False
    cost_usd: float | None = None  # None: no price is known
    temperature: float | None = None
    seconds: float = 0.0
    retries: int = 0
    transcript: str | None = None  # the conversation, as a file in the run folder
    at: float


class Round(Record):
    """A language model's round is over: how many proposals may be judged, and why the others may not."""

    event: Literal["round"] = "round"
    target: str
    kind: Literal["propose", "repair"]
    usable: int
    unusable: tuple[str, ...] = ()
    note: str = ""  # what follows from it, where that is not the next round
    at: float


class Reflected(Record):
    """What was learned from an experiment: the working memory of a language model."""

    event: Literal["reflected"] = "reflected"
    target: str
    experiment: int
    expected: str
    happened: str
    why: str = ""  # the model's own line; empty where it gave none
    at: float


AnyEvent: TypeAlias = Started | Judged | Finished | Asked | Round | Reflected
_EVENT: TypeAdapter[AnyEvent] = TypeAdapter(Annotated[AnyEvent, Field(discriminator="event")])


class RunSettings(Record):
    """`run.json`: what was asked for; enough to resume."""

    schema_version: int = 1
    spec: ModelSpec
    backend: str = "auto"
    proposer: str = "playbook"
    llm: str | None = None
    base_url: str | None = None
    max_tokens: int | None = None
    max_cost: float | None = None
    price_in: float | None = None  # US dollars per million prompt tokens
    price_out: float | None = None  # the same of completion tokens
    top: int = 3
    max_experiments: int = 20
    budget_s: float | None = None
    target_speedup: float | None = None  # against the model's own code; a target that has it is done
    name: str | None = None
    license: str = "Apache-2.0"
    devices: tuple[int, ...] = ()
    created: str = ""


# --- the folder ---------------------------------------------------------------------------------------------------


class Run:
    """An open run folder. Create one with `Run.create`, open one with `Run.open`; both lock it against a second process."""

    def __init__(self, path: Path, settings: RunSettings) -> None:
        self.path = path.resolve()
        self.settings = settings
        self._lock: int | None = None

    # Opening ------------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, parent: Path, label: str, settings: RunSettings) -> Run:
        """Make a new run folder `parent/<label>-<time>`.

        Raises:
            RunError: The folder cannot be written.
        """
        if shutil.which("git") is None:
            raise _no_git()
        slug = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-") or "model"
        stamp = time.strftime("%Y%m%d-%H%M%S")
        try:
            parent.mkdir(parents=True, exist_ok=True)
            for attempt in range(100):
                path = parent / (f"{slug}-{stamp}" + (f"-{attempt}" if attempt else ""))
                try:
                    path.mkdir()
                    break
                except FileExistsError:
                    continue
            else:
                raise RunError(f"No free run folder under {parent}.", remedy="Name another with --out.")
            run = cls(path, settings)
            (path / "targets").mkdir()
            settings.save(path / "run.json")
        except OSError as error:
            raise RunError(
                f"Cannot write a run folder under {parent}: {error.strerror}.",
                remedy="Name another folder with --out.",
            ) from error
        run._git("init", "-q", "--template=", "-b", "main")
        # An identity of its own, so that it works where git has none, no hooks of the user's, and commits that survive a
        # power cut.
        for key, value in (
            ("user.name", "autokernel-hf"),
            ("user.email", "autokernel-hf@localhost"),
            ("commit.gpgsign", "false"),
            ("core.hooksPath", os.devnull),
            ("core.fsync", "committed,reference"),
            ("gc.auto", "0"),
        ):
            run._git("config", key, value)
        ignored = [
            "/*",
            "!/.gitignore",
            "!/targets/",
            "/targets/*/*",
            "!/targets/*/kernel.*",
            "!/targets/*/target.json",
        ]
        (path / ".gitignore").write_text("\n".join(ignored) + "\n", encoding="utf-8")
        run._git("add", ".gitignore")
        run._git("commit", "-q", "-m", "Start of the run")
        run._take_lock()
        run._write_results([])
        return run

    @classmethod
    def open(cls, path: Path, *, lock: bool = True) -> Run:
        """Open a run folder, and repair what a crash may have left.

        Raises:
            RunError: Not a run folder, of another version, or in use by another process.
        """
        if not (path / "run.json").exists():
            raise RunError(
                f"{path} is not a run folder: it has no run.json.",
                remedy="Name a folder that optimize or extract made.",
            )
        try:
            settings = RunSettings.load(path / "run.json")
        except RecordError as error:
            raise RunError(
                error.message,
                remedy="Open the run with the version of autokernel-hf that made it.",
            ) from error
        run = cls(path, settings)
        if lock:
            run._take_lock()
            run._reconcile()
        return run

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_lock(self) -> None:
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise RunError(
                f"Another process works in {self.path}.",
                remedy="Wait for it, or end it; the lock ends with it.",
            ) from None
        self._lock = descriptor

    # Profile and targets ------------------------------------------------------------------------------------------

    def save_profile(self, profile: Profile) -> None:
        profile.save(self.path / "profile.json")

    def profile(self) -> Profile | None:
        path = self.path / "profile.json"
        return Profile.load(path) if path.exists() else None

    def save_verification(self, verification: Verification) -> None:
        verification.save(self.path / "verification.json")

    def verification(self) -> Verification | None:
        path = self.path / "verification.json"
        return Verification.load(path) if path.exists() else None

    def target_dir(self, target: str) -> Path:
        return self.path / "targets" / target

    def add_target(self, target: Target, starters: Sequence[Candidate]) -> None:
        """Write a target's folder with its starters, and the branch `target/<name>` that begins with them."""
        folder = self.target_dir(target.name)
        folder.mkdir(parents=True, exist_ok=True)
        target.save(folder / "target.json")
        files = [folder / "target.json"]
        for starter in starters:
            path = folder / f"kernel{starter.suffix}"
            path.write_text(starter.source, encoding="utf-8")
            files.append(path)
        if self._ref(self._branch(target.name)) is not None:
            return
        parent = self._ref("refs/heads/main")
        assert parent is not None
        tree = self._tree(
            parent, {str(p.relative_to(self.path)): p.read_text(encoding="utf-8") for p in files}
        )
        commit = self._commit(tree, parent, f"Starters for {target.name}")
        self._git("update-ref", self._branch(target.name), commit)

    def targets(self) -> list[Target]:
        found = [Target.load(p) for p in self.path.glob("targets/*/target.json")]
        return sorted(found, key=lambda t: -t.share)

    def target(self, name: str | None) -> Target:
        """The target of a name, or the only one.

        Raises:
            RunError: There is none of that name, or several and no name.
        """
        targets = self.targets()
        if not targets:
            raise RunError(
                f"{self.path} has no targets yet.",
                remedy="They come with the profile: go on with `autokernel-hf optimize --resume`.",
            )
        names = ", ".join(t.name for t in targets)
        if name is None and len(targets) == 1:
            return targets[0]
        for target in targets:
            if target.name == name:
                return target
        what = f"The run has no target {name!r}" if name else "The run has several targets"
        raise RunError(f"{what}: {names}.", remedy="Name one with --target.")

    # Ledger -------------------------------------------------------------------------------------------------------

    def events(self) -> list[AnyEvent]:
        """All ledger events. A torn last line, the mark of a crash in mid-write, is no event."""
        path = self.path / "ledger.jsonl"
        if not path.exists():
            return []
        lines = path.read_bytes().split(b"\n")
        events = []
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                events.append(_EVENT.validate_json(line))
            except ValidationError as error:
                if number >= len(lines):  # no newline behind it: the write was cut short
                    break
                raise RunError(
                    f"{path}:{number} is not a ledger line of this version.",
                    remedy="Restore the file from a copy.",
                ) from error
        return events

    def append(self, event: AnyEvent) -> None:
        """Append to the ledger, whole and on disk before it returns."""
        path = self.path / "ledger.jsonl"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                # A torn line from a crash: cut it off, or it would swallow this one.
                whole = path.read_bytes().rfind(b"\n") + 1
                os.ftruncate(descriptor, whole)
            data = event.model_dump_json().encode() + b"\n"
            if os.write(descriptor, data) != len(data):
                raise RunError(
                    f"{path} could not be written whole.", remedy="Free some disk space and resume the run."
                )
            os.fsync(descriptor)
        except OSError as error:
            raise RunError(
                f"{path} cannot be written: {error.strerror}.",
                remedy="Free some disk space and resume the run.",
            ) from error
        finally:
            os.close(descriptor)

    def experiments(self, target: str | None = None) -> list[Experiment]:
        """The judged experiments, in order."""
        return [
            e.record for e in self.events() if isinstance(e, Judged) and target in (None, e.record.target)
        ]

    def result(self, target: str) -> Finished | None:
        """The last outcome of a target, if it was finished."""
        found = [e for e in self.events() if isinstance(e, Finished) and e.result.name == target]
        return found[-1] if found else None

    def next_number(self) -> int:
        """The next experiment's number: numbers lost to a crash are not used again."""
        numbers = [
            e.experiment if isinstance(e, Started) else e.record.experiment
            for e in self.events()
            if isinstance(e, Started | Judged)
        ]
        return max(numbers, default=0) + 1

    # Experiments in git -------------------------------------------------------------------------------------------

    def incumbent(self, target: str) -> Candidate | None:
        """The source that the target's branch holds, if an experiment was kept; None while only starters stand there."""
        kept = [e for e in self.experiments(target) if e.decision == "keep"]
        return self.source(kept[-1]) if kept else None

    def kept_commit(self, target: str) -> str | None:
        """The commit of the target's incumbent."""
        kept = [e for e in self.experiments(target) if e.decision == "keep"]
        return kept[-1].commit if kept else None

    def source(self, experiment: Experiment) -> Candidate:
        """The source of an experiment, from git."""
        path = self._kernel_path(experiment.target, experiment.backend)
        text = self._git("show", f"{experiment.commit}:{path}")
        return Candidate(kernel_type=experiment.kernel_type, backend=experiment.backend, source=text)

    def commit_candidate(self, target: str, candidate: Candidate, message: str) -> str:
        """Commit a candidate on top of the target's branch; no ref moves."""
        parent = self._ref(self._branch(target))
        if parent is None:
            raise RunError(f"The run has no branch for target {target}.", remedy="Extract the target anew.")
        tree = self._tree(parent, {self._kernel_path(target, candidate.backend): candidate.source})
        return self._commit(tree, parent, message)

    def enter(self, experiment: Experiment) -> None:
        """Enter a judged experiment: ledger first, then refs, results and the working file."""
        self.append(Judged(record=experiment, at=time.time()))
        self._settle(experiment)
        self._write_results(self.experiments())

    def _settle(self, experiment: Experiment) -> None:
        if experiment.commit is None:
            return
        self._git("update-ref", f"refs/experiments/{experiment.experiment}", experiment.commit)
        if experiment.decision == "keep":
            self._git("update-ref", self._branch(experiment.target), experiment.commit)
            path = self._kernel_path(experiment.target, experiment.backend)
            write_atomically(self.path / path, self._git("show", f"{experiment.commit}:{path}"))

    def _reconcile(self) -> None:
        """Make refs and the table agree with the ledger."""
        experiments = self.experiments()
        for experiment in experiments:
            if (
                experiment.commit is not None
                and self._ref(f"refs/experiments/{experiment.experiment}") is None
            ):
                self._settle(experiment)
        kept = {e.target: e for e in experiments if e.decision == "keep"}
        for experiment in kept.values():
            if (
                experiment.commit is not None
                and self._ref(self._branch(experiment.target)) != experiment.commit
            ):
                self._settle(experiment)
        self._write_results(experiments)

    def _write_results(self, experiments: Sequence[Experiment]) -> None:
        rows = ["\t".join(RESULT_COLUMNS)]
        rows += ["\t".join(result_row(e)) for e in experiments]
        write_atomically(self.path / "results.tsv", "\n".join(rows) + "\n")

    @staticmethod
    def _branch(target: str) -> str:
        return f"refs/heads/target/{target}"

    @staticmethod
    def _kernel_path(target: str, backend: Backend) -> str:
        return f"targets/{target}/kernel{SOURCE_SUFFIX[backend]}"

    # git plumbing: no checkout, so that the working file of an agent is never touched by surprise -----------------

    def _tree(self, parent: str, files: dict[str, str]) -> str:
        index = self.path / ".git" / "autokernel-index"
        environment = {"GIT_INDEX_FILE": str(index)}
        self._git("read-tree", parent, env=environment)
        for path, text in files.items():
            blob = self._git("hash-object", "-w", "--stdin", input_text=text).strip()
            self._git("update-index", "--add", "--cacheinfo", f"100644,{blob},{path}", env=environment)
        tree = self._git("write-tree", env=environment).strip()
        index.unlink(missing_ok=True)
        return tree

    def _commit(self, tree: str, parent: str, message: str) -> str:
        return self._git("commit-tree", tree, "-p", parent, "-F", "-", input_text=message).strip()

    def _ref(self, name: str) -> str | None:
        found = self._git("for-each-ref", "--format=%(objectname)", name).strip()
        return found or None

    def _git(self, *arguments: str, input_text: str | None = None, env: dict[str, str] | None = None) -> str:
        # The caller's own git variables must not lead into another repository.
        clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        command = ["git", "--git-dir", str(self.path / ".git"), "--work-tree", str(self.path), *arguments]
        if arguments[0] == "init":
            command = ["git", "init", *arguments[1:], str(self.path)]
        try:
            done = subprocess.run(
                command,
                input=input_text,
                capture_output=True,
                text=True,
                cwd=self.path,
                env={**clean, **(env or {})},
                check=False,
            )
        except FileNotFoundError:
            raise _no_git() from None
        if done.returncode:
            raise RunError(
                f"git {arguments[0]} failed in {self.path}: {done.stderr.strip()}",
                remedy="Check the folder and its disk.",
            )
        return done.stdout


def _no_git() -> ToolMissingError:
    return ToolMissingError("git is not installed.", remedy="Install git: a run keeps its experiments in it.")


@contextmanager
def opened(path: Path, *, lock: bool = True) -> Iterator[Run]:
    """`Run.open` as a context manager."""
    run = Run.open(path, lock=lock)
    try:
        yield run
    finally:
        run.close()


# --- figures of an experiment -------------------------------------------------------------------------------------


def weighted(evaluation: Evaluation, field: str) -> float | None:
    """Geometric mean of a workload figure, weighted by the workloads' shares; None where one is missing."""
    values = [getattr(w, field) for w in evaluation.workloads]
    if not values or any(v is None or v <= 0 for v in values):
        return None
    mean, _ = statistics.combine(values, [(v, v) for v in values], [w.share for w in evaluation.workloads])
    return mean


def gain_over(evaluation: Evaluation, other: Literal["eager", "incumbent"]) -> tuple[float, Interval] | None:
    """Speed-up over the model's own code or the incumbent, all workloads together; None where one was not timed."""
    speedups = [getattr(w, f"speedup_vs_{other}") for w in evaluation.workloads]
    intervals = [getattr(w, f"ci95_vs_{other}") for w in evaluation.workloads]
    if not speedups or None in speedups or None in intervals:
        return None
    return statistics.combine(speedups, intervals, [w.share for w in evaluation.workloads])


def scores_of(experiments: Sequence[Experiment]) -> dict[int, float | None]:
    """Time of the model's own code over each experiment's, by number, for the experiments of one target in order.

    One that was timed against the incumbent alone gets the incumbent's score times its own ratio; None: not right, or
    not timed.
    """
    scores: dict[int, float | None] = {}
    best: float | None = None
    for experiment in experiments:
        score = weighted(experiment.evaluation, "speedup_vs_eager")
        ratio = weighted(experiment.evaluation, "speedup_vs_incumbent")
        if score is None and best is not None and ratio is not None:
            score = best * ratio
        scores[experiment.experiment] = score if experiment.evaluation.status == "passed" else None
        if experiment.decision == "keep":
            best = score
    return scores


def _cell(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def result_row(experiment: Experiment) -> list[str]:
    """One row of results.tsv; figures are of the workload with the largest share, empty where not measured."""
    evaluation = experiment.evaluation
    main = max(evaluation.workloads, key=lambda w: w.share, default=None)
    text = " ".join(experiment.description.split())
    return [
        str(experiment.experiment),
        experiment.tag,
        experiment.kernel_type,
        _cell(main.tflops if main else None),
        _cell(main.latency_us if main else None, 6),
        _cell(main.pct_peak if main else None),
        _cell(weighted(evaluation, "speedup_vs_eager")),
        evaluation.status,
        _cell(evaluation.peak_vram_mb, 6),
        text,
        experiment.target,
        experiment.backend,
        experiment.decision,
        _cell(weighted(evaluation, "speedup_vs_incumbent")),
        experiment.commit or "",
    ]
