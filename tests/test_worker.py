"""What a stage's own process is like: its memory between passes, and what lies around on its import path."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from autokernel_hf.judge.sandbox import with_kept_memory
from autokernel_hf.judge.server import program

PROBE = """
import resource, torch
x = torch.ones(1024, 3072)

def chain():
    return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))

for _ in range(3):
    y = chain()
    del y
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    y = chain()
    del y
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only the GNU C library can be told")
def test_a_pass_that_was_run_before_faults_no_pages() -> None:
    """A chain of ops on tensors of 12 MiB: by default each call maps some of them anew."""
    faults = {}
    default = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    for how, environment in (("default", default), ("kept", with_kept_memory(default))):
        done = subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, env=environment
        )
        faults[how] = int(done.stdout)
    # A small block in the way may ask for a piece of memory or two more: 3072 pages of one tensor. By default it depends
    # on what lies around it: of three to eighty tensors in ten calls.
    assert faults["kept"] <= 2.5 * 3072, faults
    assert faults["default"] > faults["kept"], "the default has changed: is the measure still needed?"


@pytest.mark.parametrize("place", ["PYTHONPATH", "the current folder"])
def test_a_users_file_named_like_the_standard_librarys_harms_no_worker(place: str, tmp_path: Path) -> None:
    """torch imports cProfile, which imports profile: a broken file of that name must not be found first."""
    for name in ("profile", "statistics", "selectors"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('this is the wrong file')\n")
    (tmp_path / "mine.py").write_text("VALUE = 5\n")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if place == "PYTHONPATH":
        environment["PYTHONPATH"] = str(tmp_path)
    command = program("importlib", "cProfile", function="import_module")
    command[2] += "import profile, statistics, selectors\n"
    if place == "PYTHONPATH":
        command[2] += "import mine\nassert mine.VALUE == 5\n"
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_command_line_works_beside_such_a_file(tmp_path: Path) -> None:
    (tmp_path / "profile.py").write_text("raise RuntimeError('this is the wrong file')\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "autokernel_hf",
            "pull",
            "gpt2",
            "--random-weights",
            "--device",
            "cpu",
            "--json",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
