"""Variants of a Triton candidate compiled by copies of a process, which touch no device."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autokernel_hf.judge import precompile, sandbox
from autokernel_hf.judge.cases import Scope, cases_of
from autokernel_hf.judge.remote import _wire
from autokernel_hf.judge.stages import place
from autokernel_hf.kernels import kernel_type
from autokernel_hf.variant import Domain

ROOT = Path(__file__).parent.parent

PROGRAM = """
import importlib.util, json, socket, sys
from triton.backends.compiler import GPUTarget
from autokernel_hf.judge import precompile, sandbox

calls, processes = json.loads(sys.argv[1]), int(sys.argv[2])
spec = importlib.util.spec_from_file_location("op", "autokernel_hf/kernels/triton/rmsnorm.py")
op = importlib.util.module_from_spec(spec)
spec.loader.exec_module(op)
driver = precompile.StillDriver(GPUTarget("cuda", 90, 32), precompile._Utils({"max_shared_mem": 232448}), None)
precompile.side_by_side(op.kernel_fn, calls, driver, processes, close=socket.socket().detach(), limit_s=500)
"""


def edge_calls(count: int) -> list[Any]:
    """Calls of rmsnorm in unlike layouts."""
    found = kernel_type("rmsnorm")
    scope = Scope(kernel_type=found, workloads=(), dtypes=("float16",))
    cases = cases_of("edges", scope, Domain(dtypes=found.dtypes, values={}))
    return [_wire(place(case.workload, ()).arguments) for case in cases[-count:]]


def test_copies_compile_what_the_calls_need_into_one_cache(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    calls = edge_calls(6)
    kernels = []
    for processes in (2, 1):
        subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(calls), str(processes)],
            cwd=ROOT,
            env=environment,
            check=True,
        )
        kernels.append(sorted(path.parent.name for path in tmp_path.rglob("*.cubin")))
    assert len(kernels[0]) >= 3
    assert kernels[1] == kernels[0], "the second time nothing was left to compile"


def test_copies_make_each_call_once_and_the_widest_first(tmp_path: Path) -> None:
    found = kernel_type("rmsnorm")
    widths = (64, 4096, 128, 1024)
    calls = [_wire(place(found.build({"M": 2, "N": n}, "float32", {}), ()).arguments) for n in widths]
    made = tmp_path / "made"

    def kernel_fn(x: Any, **others: Any) -> None:
        with made.open("a") as file:
            file.write(f"{x.shape[-1]}\n")
        time.sleep(0.05)

    driver = precompile.StillDriver(None, precompile._Utils({}), None)
    for processes in (1, 3):
        made.write_text("")
        ours, theirs = socket.socketpair()
        precompile.side_by_side(kernel_fn, calls, driver, processes, close=theirs.fileno(), limit_s=60)
        ours.close()
        theirs.close()
        done = [int(line) for line in made.read_text().split()]
        assert sorted(done) == sorted(widths)
        if processes == 1:
            assert done == [4096, 1024, 128, 64]


def test_a_copy_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "compile_calls", lambda *_: time.sleep(60))
    ours, theirs = socket.socketpair()
    driver = precompile.StillDriver(None, precompile._Utils({}), None)
    began = time.monotonic()
    precompile.side_by_side(lambda: None, [], driver, 2, close=theirs.fileno(), limit_s=0.3)
    assert time.monotonic() - began < 5
    theirs.close()
    assert ours.recv(1) == b"", "no copy holds the channel"


def test_few_calls_or_little_memory_get_few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "resident_bytes", lambda pid: 1 << 30)
    monkeypatch.setattr(precompile, "free_bytes", lambda: 100 << 30)
    monkeypatch.setattr(sandbox, "ALL_CPUS", set(range(16)))
    assert precompile.processes_for(60) == 16
    assert precompile.processes_for(1) == 1
    assert precompile.processes_for(3) == 3
    monkeypatch.setattr(precompile, "free_bytes", lambda: 8 << 30)
    assert precompile.processes_for(60) == 2
    monkeypatch.setattr(precompile, "free_bytes", lambda: 6 << 30)
    assert precompile.processes_for(60) == 0
    monkeypatch.setattr(precompile, "free_bytes", lambda: 100 << 30)
    monkeypatch.setattr(sandbox, "ALL_CPUS", {0})
    assert precompile.processes_for(60) == 0
