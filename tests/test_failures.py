"""Failures that a user can cause or cure, as the whole program tells them: one sentence, the remedy, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def cli(*arguments: str, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autokernel_hf", *arguments],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["profile", "no-such-model-anywhere", "--local-files-only"], "no-such-model-anywhere"),
        (["profile", "gpt2", "--random-weights", "--device", "cuda:7"], "cuda"),
        (["profile", "gpt2", "--random-weights", "--input-shape", "1,5000"], "1024"),
        (["optimize", "gpt2", "--random-weights", "--out", "/proc/nowhere"], "/proc/nowhere"),
        (["profile", "nothing.py:Model"], "nothing.py"),
    ],
)  # fmt: skip
def test_friendly_failures(arguments: list[str], said: str, tmp_path: Path) -> None:
    env = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = cli(*arguments, "--json", cwd=tmp_path, env=env)
    assert done.returncode in (1, 2), done.stderr
    assert "Traceback" not in done.stderr
    error = json.loads(done.stdout)["error"]
    assert said in error["message"]
    assert error["remedy"]


def test_no_compiler_is_told_with_its_remedy(tmp_path: Path, repository_root: Path) -> None:
    starter = repository_root / "autokernel_hf/kernels/cpp/rmsnorm.cpp"
    env = {"PATH": str(Path(sys.executable).parent), "AUTOKERNEL_HF_CACHE": str(tmp_path / "cache")}
    done = cli("compile", str(starter), "--arch", "x86-64-v3", "--json", cwd=tmp_path, env=env)
    assert done.returncode == 1
    assert "install" in json.loads(done.stdout)["error"]["remedy"].lower()
    # A search says so before it fetches and profiles a model.
    done = cli("optimize", "acme/any", "--device", "cpu", cwd=tmp_path, env=env)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: No C++ compiler (g++) is on PATH.\n  Install one")
    assert not (tmp_path / "runs").exists()
