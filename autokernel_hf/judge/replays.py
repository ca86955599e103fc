"""The columns beside the cold one on a GPU, and whether a candidate works in a CUDA graph: the referee's side."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import torch

from autokernel_hf.judge import checks, graphs
from autokernel_hf.judge.arena import POISON, outputs_of
from autokernel_hf.judge.remote import Child, Failed
from autokernel_hf.judge.stages import Placed, StageFailed, place
from autokernel_hf.kernels.base import Args, KernelType
from autokernel_hf.records import Workload

_MOST_CALLS = 20
_ALL_CALLS_US = 20_000.0
# Rows of replays by the referee's clock: how long one should take, how many, and how much longer than the device says a
# call in them may take, since clocks are lower under load; and what the host may take to launch a replay. It took 45 us
# on an H200 whose 16 cores had eight other sessions to serve: the device waits then, 2 us for each call of 2 us.
_ROW_US, _ROWS = 3000.0, 5
_FACTOR, _REPLAY_US = 1.6, 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmTimes:
    """Device times of a call in microseconds, one after the other and within a CUDA graph; None where not measured.

    `referee_us` is the time of a call within a graph of so many `calls` by the referee's clock.
    """

    hot_us: float | None
    graph_us: float | None
    referee_us: float | None = None
    calls: int = 1


def candidate_times(
    child: Child, kernel_type: KernelType, workload: Workload, calls: tuple[Args, Args]
) -> WarmTimes:
    """Have a candidate called in a row, and captured in a graph which is replayed on other values.

    Args:
        calls: The arguments of two calls, which the candidate has never seen.

    Raises:
        StageFailed: A call cannot be captured, or a replay does not give the right answer for the new values.
    """
    placed = place(workload, outputs_of(kernel_type, workload))
    try:
        _write(child, placed, calls[0])
        hot = child.hot(placed.arguments, placed.sinks, 3)
        count = max(1, min(_MOST_CALLS, int(_ALL_CALLS_US / median(hot))))
        hot = child.hot(placed.arguments, placed.sinks, count)
        _check(child, placed, kernel_type, workload, calls[0], "one call after the other")
        child.capture(placed.arguments, count)
        _write(child, placed, calls[1])
        replayed = child.replay(placed.sinks)
        _check(child, placed, kernel_type, workload, calls[1], "a CUDA graph replayed on new values")
        referee_us = _by_the_referees_clock(child, median(replayed), count)
    except Failed as failed:
        where = f"{workload.label} ({workload.shape}, {workload.dtype})"
        raise StageFailed(failed.status, f"Stage edges, {where}: {failed.what}.") from None
    return WarmTimes(hot_us=median(hot), graph_us=median(replayed), referee_us=referee_us, calls=count)


def _by_the_referees_clock(child: Child, said_us: float, calls: int) -> float:
    """What a call within a graph takes at least, its launches out of the way: of several rows of replays the shortest."""
    replays = max(1, round(_ROW_US / (said_us * calls)))
    overhead_us = min(child.noop() for _ in range(_ROWS))
    row_us = min(child.spin(replays, last=i + 1 == _ROWS) for i in range(_ROWS))
    return (row_us - overhead_us) / (replays * calls)


def contradiction(device_us: float, warm: WarmTimes) -> str:
    """How the device's own times contradict the referee's clock, as the rest of a sentence; empty where they do not.

    Within a graph a call takes no longer than a cold one by itself, whose input the device must fetch.
    """
    said_us = min(device_us, warm.graph_us or device_us)
    if warm.referee_us is None or warm.referee_us <= _FACTOR * said_us + _REPLAY_US / warm.calls:
        return ""
    return (
        f"says that a call takes the device {said_us:.3g} us, but within a CUDA graph it takes {warm.referee_us:.3g} us "
        "by the referee's clock"
    )


def _write(child: Child, placed: Placed, args: Args) -> None:
    for name, slot in placed.inputs:
        child.arena.write(slot, args[name])
    for slot in placed.sinks:
        child.arena.fill(slot, POISON)
    torch.cuda.synchronize(child.arena.memory.device)


def _check(
    child: Child, placed: Placed, kernel_type: KernelType, workload: Workload, args: Args, how: str
) -> None:
    outputs = [child.arena.view(slot) for slot in placed.sinks]
    outcome = checks.Oracle(kernel_type, workload, args).check(outputs)
    if outcome.problem:
        raise Failed("incorrect", f"is wrong in {how}: {outcome.problem}")


def eager_times(kernel_type: KernelType, args: Args) -> WarmTimes:
    """The same of the plain torch expression, in this process. Not all expressions can be captured."""
    prepare = getattr(kernel_type.reference, "prepare", None)  # a forward pass, which is not timed
    function = kernel_type.reference if prepare is None else prepare(**args)
    taken, _ = graphs.hot(function, args, 3)
    count = max(1, min(_MOST_CALLS, int(_ALL_CALLS_US / median(taken))))
    taken, _ = graphs.hot(function, args, count)
    if prepare is not None:  # autograd works on the stream of the forward pass, which is not the capture's
        return WarmTimes(hot_us=median(taken), graph_us=None)
    try:
        graph = graphs.Graph(function, args, count)
        graph.replay(POISON)
        replayed: float | None = median(graph.times())
    except RuntimeError:
        replayed = None
    return WarmTimes(hot_us=median(taken), graph_us=replayed)
