"""A run is a folder: a git repository of its own, an append-only ledger, and what the stages leave behind.

The ledger is the only truth: everything else (`results.tsv`, the branches, a resumed run's state) is rebuilt from it.
An experiment is entered in this order: its commit is made (reachable from nothing yet), the ledger line that names the
commit is written and synced, then the refs move. A crash between any two of these is repaired when the run is opened.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from autokernel_hf.errors import RecordError, RunError, ToolMissingError
from autokernel_hf.figures import RESULT_COLUMNS, result_row
from autokernel_hf.ledger import AnyEvent, Demoted, Finished, Judged, Ledger, Started, Verdict
from autokernel_hf.records import (
    SOURCE_SUFFIX,
    Backend,
    Candidate,
    Evaluation,
    Experiment,
    ModelSpec,
    Profile,
    Record,
    RunRecord,
    Scalar,
    Target,
    Verification,
    write_atomically,
)


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
    max_experiments: int | None = (
        None  # a target; None: DEFAULT_EXPERIMENTS, or what the time of a budget allows
    )
    budget_s: float | None = None
    target_speedup: float | None = None  # against the model's own code; a target that has it is done
    name: str | None = None
    license: str = "Apache-2.0"
    devices: tuple[int, ...] = ()
    created: str = ""

    @property
    def experiments_a_target(self) -> int:
        """The most experiments that a target may have."""
        if self.max_experiments is not None:
            return self.max_experiments
        by_time = self.budget_s is not None and self.proposer != "external"
        return NO_LIMIT if by_time else DEFAULT_EXPERIMENTS


DEFAULT_EXPERIMENTS = 20
NO_LIMIT = 1_000_000
_LAST_GIT_S = 2.0
"""How long a git may take that outlives the process that started it: it still holds the folder's lock."""
_PART = re.compile(r"\..+\.(?:tsv|json|md|cpp|cu|py)\.\w{8}")
"""A file that `write_atomically` has not renamed yet."""

# --- the folder ---------------------------------------------------------------------------------------------------


class Run:
    """An open run folder. Create one with `Run.create`, open one with `Run.open`; both lock it against a second process."""

    def __init__(self, path: Path, settings: RunSettings) -> None:
        self.path = path.resolve()
        self.settings = settings
        self._lock: int | None = None
        self._ledger = Ledger(self.path / "ledger.jsonl")
        self._entering = threading.RLock()  # what several threads may not do at once

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
        settings.save(path / "run.json")  # last: a folder that has it is whole
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
        run._check_repository()
        if lock:
            run._take_lock()
            run._sweep()
            run._reconcile()
        return run

    def _check_repository(self) -> None:
        """Raises RunError where the folder has lost its git repository, with which it lost all sources."""
        if not (self.path / ".git" / "HEAD").is_file():
            raise RunError(
                f"{self.path} has no git repository any more: .git is missing or damaged, and with it the source of "
                "every experiment.",
                remedy="Restore .git from a copy of the whole folder (copy it with cp -a, not file by file), or start "
                "a new run; ledger.jsonl and results.tsv still tell how this one went.",
            )

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
        until = time.monotonic() + _LAST_GIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < until:
                    time.sleep(0.05)
                    continue
                os.close(descriptor)
                raise RunError(
                    f"Another process works in {self.path}.",
                    remedy="Wait for it, or end it; the lock ends with it.",
                ) from None
        self._lock = descriptor

    def _sweep(self) -> None:
        """Remove what a killed process has left half done: git's lock files, and files that were not renamed yet.

        Whoever made them is gone: this process has the folder's lock, which every git that we start holds too.
        """
        for lock in (self.path / ".git").rglob("*.lock"):
            lock.unlink(missing_ok=True)
        for folder in (self.path, *self.path.glob("targets/*"), self.path / "llm"):
            for part in folder.glob(".*"):
                if _PART.fullmatch(part.name):
                    part.unlink(missing_ok=True)

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

    def outcome(self) -> RunRecord | None:
        """What `result.json` tells; None where `optimize` has not come to its end."""
        path = self.path / "result.json"
        return RunRecord.load(path) if path.exists() else None

    def conclude(self, record: RunRecord, at: float) -> None:
        """Tell the run's outcome in `result.json`; what was told before stays in the ledger.

        Args:
            at: Seconds since the epoch.
        """
        path = self.path / "result.json"
        if not any(isinstance(e, Verdict) for e in self.events()):
            # Of a run that ended before verdicts were entered; what cannot be read is replaced by what can.
            with contextlib.suppress(RecordError):
                if (before := self.outcome()) is not None:
                    self.append(_verdict(before, path.stat().st_mtime))
        self.append(_verdict(record, at))
        record.save(path)

    def target_dir(self, target: str) -> Path:
        return self.path / "targets" / target

    def add_target(self, target: Target, starters: Sequence[Candidate]) -> None:
        """Write a target's folder with its starters, and the branch `target/<name>` that begins with them.

        A target that has its branch is left as it is: its working file may hold what was kept, or an agent's edit.
        """
        folder = self.target_dir(target.name)
        if self._ref(self._branch(target.name)) is not None and (folder / "target.json").exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        target.save(folder / "target.json")
        files = [folder / "target.json"]
        for starter in starters:
            path = folder / f"kernel{starter.suffix}"
            write_atomically(path, starter.source)
            files.append(path)
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
        """All ledger events; see `Ledger.events`."""
        return self._ledger.events()

    def append(self, event: AnyEvent) -> None:
        """Append to the ledger, whole and on disk before it returns; see `Ledger.append`."""
        self._ledger.append(event)

    def experiments(self, target: str | None = None) -> list[Experiment]:
        """The judged experiments, in order; see `Ledger.experiments`."""
        return self._ledger.experiments(target)

    def result(self, target: str) -> Finished | None:
        """The last outcome of a target, if it was finished."""
        return self._ledger.result(target)

    def next_number(self) -> int:
        """The next experiment's number: numbers lost to a crash are not used again."""
        return self._ledger.next_number()

    def begin(
        self, target: str, candidate: Candidate, description: str, values: dict[str, Scalar], at: float
    ) -> int:
        """Enter that an experiment begins, and return its number."""
        with self._entering:
            number = self.next_number()
            self.append(
                Started(
                    experiment=number,
                    target=target,
                    backend=candidate.backend,
                    digest=candidate.digest,
                    description=description,
                    tunables=values,
                    at=at,
                )
            )
        return number

    # Experiments in git -------------------------------------------------------------------------------------------

    def kept(self, target: str) -> Experiment | None:
        """The experiment that stands at the tip of the target's branch; None while only starters stand there."""
        kept = [e for e in self.experiments(target) if e.decision == "keep"]
        return kept[-1] if kept else None

    def incumbent(self, target: str) -> Candidate | None:
        """The source of the last experiment that was kept, and not demoted since."""
        kept = self.kept(target)
        return self.source(kept) if kept else None

    def winner(self, target: str) -> Experiment | None:
        """The experiment that a won target was confirmed with."""
        done = self.result(target)
        if done is None or done.result.status != "won" or done.commit is None:
            return None
        return next((e for e in self.experiments(target) if e.commit == done.commit), None)

    def source(self, experiment: Experiment) -> Candidate:
        """The source of an experiment, from git."""
        path = self._kernel_path(experiment.target, experiment.backend)
        text = self._git("show", f"{experiment.commit}:{path}")
        return Candidate(kernel_type=experiment.kernel_type, backend=experiment.backend, source=text)

    def commit_candidate(self, target: str, candidate: Candidate, message: str) -> str:
        """Commit a candidate on top of the target's branch; no ref moves."""
        with self._entering:
            parent = self._ref(self._branch(target))
            if parent is None:
                raise RunError(
                    f"The run has no branch for target {target}.", remedy="Extract the target anew."
                )
            tree = self._tree(parent, {self._kernel_path(target, candidate.backend): candidate.source})
            return self._commit(tree, parent, message)

    @contextmanager
    def settling(self) -> Iterator[None]:
        """Nobody else's experiment is entered meanwhile."""
        with self._entering:
            yield

    def enter(self, experiment: Experiment) -> None:
        """Enter a judged experiment: ledger first, then refs, results and the working file."""
        with self._entering:
            self.append(Judged(record=experiment, at=time.time()))
            self._settle(experiment)
            self._write_results(self.experiments())

    def demote(self, experiment: Experiment, reason: str, confirmation: Evaluation) -> None:
        """Take a kept experiment back: ledger first, then the branch goes back to what was kept before it."""
        with self._entering:
            self.append(
                Demoted(
                    target=experiment.target,
                    experiment=experiment.experiment,
                    reason=reason,
                    confirmation=confirmation,
                    at=time.time(),
                )
            )
            self._settle_branch(experiment.target)
            self._write_results(self.experiments())

    def _settle(self, experiment: Experiment) -> None:
        """Make an experiment's refs what the ledger says."""
        if experiment.commit is None:
            return
        self._git("update-ref", f"refs/experiments/{experiment.experiment}", experiment.commit)
        if experiment.decision == "keep":
            self._settle_branch(experiment.target)

    def _settle_branch(self, target: str) -> None:
        """The target's branch, and the file that is worked on, stand at what was kept last."""
        kept = self.kept(target)
        branch = self._branch(target)
        if kept is not None and kept.commit is not None:
            commit, backend = kept.commit, kept.backend
        else:
            # Only a demotion leads back to the starters, which the branch began with.
            first = self._git("rev-list", "--max-parents=1", "--reverse", branch).split()[1]
            commit, backend = first, Target.load(self.target_dir(target) / "target.json").backend
        path = self._kernel_path(target, backend)
        # The file first: a crash in between leaves the branch behind the ledger, which is seen on opening.
        write_atomically(self.path / path, self._git("show", f"{commit}:{path}"))
        self._git("update-ref", branch, commit)

    def _reconcile(self) -> None:
        """Make refs and the table agree with the ledger."""
        refs = dict(
            line.split()
            for line in self._git("for-each-ref", "--format=%(refname) %(objectname)").splitlines()
        )
        experiments = self.experiments()
        for experiment in experiments:
            if experiment.commit is not None and f"refs/experiments/{experiment.experiment}" not in refs:
                self._settle(experiment)
        demoted = {e.target for e in self.events() if isinstance(e, Demoted)}
        kept = {e.target: e.commit for e in experiments if e.decision == "keep"}
        for target in kept.keys() | demoted:
            if self._ref(self._branch(target)) != kept.get(target):
                self._settle_branch(target)
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
                pass_fds=() if self._lock is None else (self._lock,),
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


def _verdict(record: RunRecord, at: float) -> Verdict:
    return Verdict(status=record.status, reason=record.reason, verification=record.verification, at=at)
