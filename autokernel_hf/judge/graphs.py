"""Calls one after the other, and calls captured in a CUDA graph: the two columns beside the cold one.

Both are taken on one input with warm caches: what a kernel takes in the best case, with and without the gaps that
launches leave. They inform; the verdict is about cold calls. Capturing is also a check: in a model that runs as a graph
a kernel must neither wait for the device, nor take memory from the driver, nor leave its stream, and a replay must read
the inputs anew.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from autokernel_hf.judge.turn import CYCLES_PER_US, as_tuple

# Taken before any candidate is imported.
_graph: Callable[[], Any] = torch.cuda.CUDAGraph
_event: Callable[..., Any] = torch.cuda.Event
_synchronize: Callable[[], None] = torch.cuda.synchronize
_delay: Callable[[int], None] = getattr(torch.cuda, "_sleep", lambda cycles: None)
_clock = time.perf_counter_ns

_REPLAYS = 7
_QUEUEING = 3.0  # the delay ahead of calls, in times of what the host takes to queue them
_LEAST_DELAY_US = 200.0


def hot(
    function: Callable[..., Any], arguments: dict[str, Any], calls: int
) -> tuple[tuple[float, ...], tuple[Any, ...]]:
    """Call one after the other on the same input, on the current stream of a GPU.

    Returns:
        The device's time of each call in microseconds, without the gaps between them; what the last one returned.
    """
    began = _clock()
    result = function(**arguments)
    host_us = (_clock() - began) / 1e3
    _synchronize()
    events = [(_event(enable_timing=True), _event(enable_timing=True)) for _ in range(calls)]
    _delay(int(max(_LEAST_DELAY_US, _QUEUEING * host_us * calls) * CYCLES_PER_US))
    for start, end in events:
        start.record()
        result = function(**arguments)
        end.record()
    _synchronize()
    return tuple(start.elapsed_time(end) * 1e3 for start, end in events), as_tuple(result)


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """Nothing is collected meanwhile: giving back what a forgotten graph or event holds breaks a capture."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Graph:
    """Some calls of a function, captured; its arguments must stay where they are.

    Raises:
        RuntimeError: It does something that cannot be captured.
    """

    def __init__(self, function: Callable[..., Any], arguments: dict[str, Any], calls: int) -> None:
        self.calls = calls
        self._graph = _graph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        result: Any = None
        with torch.cuda.stream(stream):
            function(**arguments)
            _synchronize()
            with _no_garbage():
                self._graph.capture_begin()
                try:
                    for _ in range(calls):
                        result = function(**arguments)
                except BaseException:
                    with contextlib.suppress(RuntimeError):
                        self._graph.capture_end()
                    raise
                self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self.outputs: tuple[Any, ...] = as_tuple(result)

    def replay(self, poison: int) -> None:
        """Run the calls again, over outputs of which nothing is left."""
        for output in self.outputs:
            if isinstance(output, Tensor) and output.numel():
                output.view(-1).view(torch.uint8).fill_(poison)
        self._graph.replay()
        _synchronize()

    def spin(self, replays: int) -> None:
        """Run the calls again and again, and wait for their end."""
        for _ in range(replays):
            self._graph.replay()
        _synchronize()

    def times(self) -> tuple[float, ...]:
        """The device's time of a call within a replay, in microseconds, of several replays."""
        taken = []
        for _ in range(_REPLAYS):
            start, end = _event(enable_timing=True), _event(enable_timing=True)
            _delay(int(_LEAST_DELAY_US * CYCLES_PER_US))
            start.record()
            self._graph.replay()
            end.record()
            _synchronize()
            taken.append(start.elapsed_time(end) * 1e3 / self.calls)
        return tuple(taken)
