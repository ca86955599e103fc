"""The walls around a candidate: what a process behind them can do, tried by one that tries everything."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autokernel_hf.candidates import read_candidate
from autokernel_hf.doctor import _isolation
from autokernel_hf.evaluate import Judge
from autokernel_hf.judge.remote import Process
from autokernel_hf.judge.server import NamespacesFirst
from autokernel_hf.judge.watchdog import Watchdog
from tests.judge_files import HONEST, rms

ALLOWED = {"write in its own folder", "read the interpreter", "use /dev/null", "name a thread"}


def behind(kind: str, role: str, tmp_path: Path) -> dict[str, Any]:
    """The outcomes of a process behind walls, beside the home folder and the process that it must not reach."""
    home = tmp_path / "home"
    home.mkdir()
    secret = home / "token"
    secret.write_text("secret")
    (tmp_path / "cache").mkdir()
    temporary = set(Path("/tmp").glob("autokernel_hf_*"))
    ignore = "import signal, time; signal.signal(signal.SIGUSR1, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", ignore], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        try:
            done = subprocess.run(
                [sys.executable, "-m", "tests.walls_probe", kind, role, str(secret), str(other.pid)],
                env={**os.environ, "HOME": str(home), "AUTOKERNEL_HF_CACHE": str(tmp_path / "cache")},
                cwd=Path(__file__).parent.parent,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        finally:
            other.kill()
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    if found.get("refused"):
        pytest.skip("this system refuses namespaces")
    assert found["code"] == 0, found["outcomes"]
    assert set(Path("/tmp").glob("autokernel_hf_*")) == temporary, "its private folder was left behind"
    return found


def test_in_namespaces_a_candidate_reaches_nothing_but_its_own_folder(tmp_path: Path) -> None:
    found = behind("namespaces", "runner", tmp_path)
    outcomes = found["outcomes"]
    assert found["not_enforced"] == []
    assert {k for k, v in outcomes.items() if v == "done"} == ALLOWED, outcomes
    assert outcomes["write beside the sources"] == outcomes["change the judge"] == "EROFS"
    assert outcomes["write to the build cache"] == "EROFS"
    assert outcomes["read a secret"] == "ENOENT"
    assert outcomes["trace"] == outcomes["mount"] == outcomes["reach the network"] == "EPERM"
    assert outcomes["see disks"] == "False"


def test_a_builder_may_fill_the_cache_and_nothing_else(tmp_path: Path) -> None:
    outcomes = behind("namespaces", "builder", tmp_path)["outcomes"]
    assert {k for k, v in outcomes.items() if v == "done"} == {*ALLOWED, "write to the build cache"}, outcomes
    assert outcomes["read a secret"] == "ENOENT"


def landlock_version() -> int:
    libc = ctypes.CDLL(None)
    return int(libc.syscall(ctypes.c_long(444), None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


@pytest.mark.skipif(landlock_version() < 6, reason="this system's Landlock is older than signals' scope")
def test_without_namespaces_landlock_and_the_filter_hold_a_candidate(tmp_path: Path) -> None:
    found = behind("landlock", "runner", tmp_path)
    outcomes = found["outcomes"]
    # The system's own switches belong to root; a plain user cannot open them anyway.
    assert {k for k, v in outcomes.items() if v == "done"} == ALLOWED, outcomes
    assert outcomes["read a secret"] in ("EACCES", "ENOENT")
    assert outcomes["write to the build cache"] == "EACCES"
    assert outcomes["signal another"] == "EPERM"
    assert outcomes["reach the network"] == "EPERM"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["namespaces", "landlock"])
def test_the_gpus_driver_starts_behind_the_walls_and_they_hold(kind: str, tmp_path: Path) -> None:
    found = behind(kind, "runner", tmp_path)
    outcomes = found["outcomes"]
    assert {k for k, v in outcomes.items() if v == "done"} == ALLOWED, outcomes
    assert outcomes["CUDA starts"] == "True"


@pytest.mark.gpu
def test_a_kernel_on_a_gpu_is_judged_in_namespaces(caplog: pytest.LogCaptureFixture) -> None:
    candidate = read_candidate(HONEST / "rmsnorm_row.py")
    with Judge("rmsnorm", "triton", (rms(64, 256),), dtypes=("float32",), device="cuda") as judge:
        evaluation = judge.one_shot(candidate, peers=False)
    assert evaluation.status == "passed", evaluation.reason
    assert "namespaces" not in caplog.text, caplog.text


@pytest.mark.parametrize(
    ("stands_in", "tried", "later"),
    [({True, False}, [True], [True]), ({False}, [True, False], [False]), (set(), [True, False], [False])],
)
def test_namespaces_are_tried_first_and_given_up_once(
    stands_in: set[bool], tried: list[bool], later: list[bool]
) -> None:
    walls, attempts = NamespacesFirst(), []

    def attempt(isolate: bool) -> str | None:
        attempts.append(isolate)
        return f"isolated: {isolate}" if isolate in stands_in else None

    for expected in (tried, later):
        attempts.clear()
        found = walls.start(attempt)
        assert attempts == expected
        assert found == (f"isolated: {expected[-1]}" if stands_in else None)


def test_doctor_says_what_the_walls_lack() -> None:
    check = _isolation()
    assert ("namespaces" in check.detail) and (check.ok == (check.remedy == ""))


class Held(Process):
    """A process that holds more and more memory, as the watchdog sees one."""

    def __init__(self, megabytes: int) -> None:
        source = f"import time; x = b'1' * ({megabytes} << 20); print(flush=True); time.sleep(60)"
        self.popen = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
        assert self.popen.stdout is not None
        self.popen.stdout.readline()
        self.ended = False
        self.too_large = ""
        self.granted_bytes = 0
        self.spawned = self  # type: ignore[assignment]

    @property
    def pid(self) -> int:
        return self.popen.pid

    def kill(self) -> None:
        self.popen.kill()
        self.ended = True


def test_the_watchdog_ends_what_takes_too_much_memory_and_leaves_the_rest() -> None:
    small, large = Held(10), Held(300)
    dog = Watchdog(limit_bytes=200 << 20)
    try:
        dog.watch(small)
        dog.watch(large)
        assert large.popen.wait(timeout=20) == -signal.SIGKILL
        assert "took 0.3 GB of memory, more than the 0.2 GB" in large.too_large
        time.sleep(0.2)
        assert small.popen.poll() is None and small.too_large == ""
    finally:
        dog.close()
        small.popen.kill()
        small.popen.wait()
