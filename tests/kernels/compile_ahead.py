"""Variants of a Triton starter compiled side by side before a test on a GPU calls it: one after the other they take minutes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from autokernel_hf.judge import precompile
from autokernel_hf.judge.remote import _wire
from autokernel_hf.judge.stages import place
from autokernel_hf.records import Workload

MOST_PROCESSES = 4  # beside other tests


def compile_ahead(kernel_fn: Callable[..., Any], workloads: Iterable[Workload]) -> None:
    """Compile what these calls need into Triton's cache on disk, without launching anything."""
    from triton.runtime import driver

    calls = [_wire(place(w, ()).arguments) for w in {w.args: w for w in workloads}.values()]
    processes = min(MOST_PROCESSES, precompile.processes_for(len(calls)))
    if not processes:
        return
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        still = precompile.StillDriver.like(driver.active)
        precompile.side_by_side(kernel_fn, calls, still, processes, close=nothing, limit_s=100)
    finally:
        os.close(nothing)
