"""A run that is killed at any write is resumed with nothing lost and nothing counted twice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
COMPILER = shutil.which("gcc") or shutil.which("cc")

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or COMPILER is None, reason="needs Linux and a C compiler"
)


def kill(folder: Path, *arguments: str) -> dict[str, Any]:
    """The summary of a series of kills; see `faults.killing`."""
    library, plan = folder / "kill.so", folder / "plan"
    assert COMPILER is not None
    source = HERE / "faults" / "kill_at_write.c"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    plan.write_bytes(bytes(64))
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.killing", str(folder), *arguments],
        cwd=HERE.parent,
        env={
            **os.environ,
            "LD_PRELOAD": str(library),
            "AK_KILL_PLAN": str(plan),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(HERE.parent),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


def check(summary: dict[str, Any], trials: int) -> None:
    assert summary["with_problems"] == []
    assert summary["trials"] == summary["killed"] == trials
    assert summary["killed_twice"] > trials / 3
    assert summary["calls_of_a_clean_run"] > 200, "the shim sees what Python and git write"


def test_a_run_that_is_killed_at_a_write_and_again_goes_on(tmp_path: Path) -> None:
    check(kill(tmp_path, "--sample", "14"), 14)


def test_so_does_one_on_two_devices(tmp_path: Path) -> None:
    check(kill(tmp_path, "--sample", "8", "--devices", "2"), 8)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_that_is_killed_at_any_of_two_hundred_writes_and_again_goes_on(tmp_path: Path) -> None:
    check(kill(tmp_path, "--sample", "200"), 200)
