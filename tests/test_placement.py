"""Where the contenders of a comparison run: how many processes, and on which core."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch

from autokernel_hf.judge.arena import Pool
from autokernel_hf.judge.bench import Bench
from autokernel_hf.judge.cases import Scope
from autokernel_hf.judge.crew import Crew
from autokernel_hf.judge.quiet import family, on_one_core
from autokernel_hf.judge.seeds import Seeds
from autokernel_hf.judge.session import Settings
from autokernel_hf.kernels import kernel_type

RMS = kernel_type("rmsnorm")


def bench_on(device: str, *, launch_bound: bool, quick: bool = False) -> Bench:
    settings = Settings(
        kernel_type="rmsnorm", backend="triton", device=device, launch_bound=launch_bound, quick=quick
    )
    scope = Scope(kernel_type=RMS, workloads=(), dtypes=("float32",))
    return Bench(scope, settings, torch.device(device), Seeds(1))


@pytest.mark.parametrize(
    ("device", "launch_bound", "quick", "blocks"),
    [
        ("cpu", False, False, 5),
        ("cuda:0", False, False, 1),
        ("cuda:0", True, False, 5),
        ("cuda:0", True, True, 1),
    ],
)
def test_where_the_hosts_time_counts_a_comparison_is_made_between_several_pairs_of_processes(
    device: str, launch_bound: bool, quick: bool, blocks: int
) -> None:
    assert bench_on(device, launch_bound=launch_bound, quick=quick).blocks == blocks


def test_contenders_behind_the_walls_share_a_core_for_a_while() -> None:
    allowed = os.sched_getaffinity(0)
    crew = Crew(
        device="cpu", interpret=False, timeout_s=60.0, server=None, pool=Pool(1 << 16, torch.device("cpu"))
    )
    try:
        first, second = crew.take(), crew.take()
        members = [*family(first.pid), *family(second.pid)]
        seen = set()
        for seed in range(8):
            with on_one_core(members, random.Random(seed)):
                cores = [os.sched_getaffinity(thread) for thread in (0, *members)]
            assert len(cores[0]) == 1 and all(c == cores[0] for c in cores)
            seen |= cores[0]
        assert all(os.sched_getaffinity(thread) == allowed for thread in (0, *members))
        assert len(seen) > 1 or len(allowed) == 1
        second.end()
        first.end()
    finally:
        crew.close()


def test_a_process_that_has_ended_keeps_nobody_from_a_core() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with on_one_core([ended.pid], random.Random(0)):
        assert len(os.sched_getaffinity(0)) == 1
