"""One contender's turn in a round: a few timed calls, each on input that was written just before.

In a model the input of such a kernel was written a moment ago by the op before it, so part of it is in the cache, and
the threads of the pool are awake. A turn reproduces that: before each timed call it copies fresh values into the input
tensors, at the same addresses, as the op before would; one untimed call goes first. On a GPU the headline is cold: the
L2 cache is overwritten between the copy and the call. A short delay ahead of the copy gives the host time to queue all
of it, so that launch overhead is hidden (the host's own time is a number of its own), and makes work on another stream
read the values of the call before.

The referee takes the turns of its peers with this function, and a child the candidate's: what differs is the callee.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autokernel_hf.judge.l2 import Persisting

# Taken before any candidate is imported: a candidate that replaces these names changes nothing here.
_clock = time.perf_counter_ns
_tensor = Tensor
_copy = Tensor.copy_
_fill = Tensor.fill_


def now_ns() -> int:
    """This process's own clock, the system's monotonic one, which shows the same in all processes."""
    return _clock()


FLUSH_FACTOR = 2  # the flush writes so many times the L2 cache
DELAY_US = (200.0, 1e5)  # at least and at most
DELAY_FACTOR = 3.0  # times what a call takes the host
CYCLES_PER_US = 2000


class WrongOutput(Exception):  # noqa: N818 - what a timed call returned, not a fault of this code
    """A timed call returned something else than tensors of the expected shapes and dtypes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Per timed call, in microseconds: on the device, and on the host until the call returned.

    `late_us` is how long after the end of the calls' own stream the device still worked; 0 on a CPU.
    """

    device_us: tuple[float, ...]
    host_us: tuple[float, ...]
    late_us: tuple[float, ...]


def as_tuple(result: object) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


class Turn:
    """Takes turns on one workload.

    Args:
        function: Called with `arguments` by keyword.
        live: The tensors among the arguments that are written before each call.
        sources: Per call, the values to write into them.
        sinks: Per call, where the outputs are copied to.
        prepare: What is done before each call, untimed, with the values written; returns the function to be timed. Only
            for peers: a backward pass has had its forward pass.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        live: Sequence[Tensor],
        sources: Sequence[Sequence[Tensor]],
        sinks: Sequence[Sequence[Tensor]],
        prepare: Callable[..., Callable[..., Any]] | None = None,
    ) -> None:
        self.function = function
        self.prepare = prepare
        self.arguments = arguments
        self.live = live
        self.sources = sources
        self.sinks = sinks

    def take(self, flush: Flush | None, delay_us: float) -> Times:
        """Take a turn: on a GPU where `flush` is given.

        `delay_us` is the time that the host has to queue a call; the same for all contenders of a round, so that the
        wall times of their turns can be compared.

        Raises:
            CandidateError: The function keeps a part of the L2 cache to itself.
        """
        return self._on_host() if flush is None else self._on_device(flush, delay_us)

    def _write(self, call: int) -> None:
        for target, source in zip(self.live, self.sources[call], strict=True):
            if target.numel():
                _copy(target, source)

    def _ready(self) -> Callable[..., Any]:
        return self.function if self.prepare is None else self.prepare(**self.arguments)

    def _keep(self, call: int, result: object) -> None:
        outputs = as_tuple(result)
        sinks = self.sinks[call]
        if len(outputs) != len(sinks):
            raise WrongOutput(f"{len(outputs)} outputs instead of {len(sinks)}")
        for sink, output in zip(sinks, outputs, strict=True):
            if type(output) is not _tensor or output.shape != sink.shape or output.dtype != sink.dtype:
                raise WrongOutput(f"{_named(output)} instead of {_named(sink)}")
            _copy(sink, output)

    def _on_host(self) -> Times:
        arguments = self.arguments
        # The untimed call has the last call's values: what it computes is of no use to the first.
        self._write(-1)
        self._keep(-1, self._ready()(**arguments))
        taken = []
        for call in range(len(self.sources)):
            self._write(call)
            function = self._ready()
            start = _clock()
            result = function(**arguments)
            taken.append((_clock() - start) / 1e3)
            self._keep(call, result)
            del result
        times = tuple(taken)
        return Times(device_us=times, host_us=times, late_us=(0.0,) * len(times))

    def _on_device(self, flush: Flush, delay_us: float) -> Times:
        arguments = self.arguments
        self._write(-1)
        _synchronize()
        self._keep(-1, self._ready()(**arguments))
        for target in self.live:
            target.zero_()  # what a call reads that does not wait for its input
        _synchronize()
        cycles = int(delay_us * CYCLES_PER_US)
        device, host, late = [], [], []
        for call in range(len(self.sources)):
            start, end, done = (_event(enable_timing=True) for _ in range(3))
            flush.persisting.forget()
            if self.prepare is None:
                function = self.function
                _delay(cycles)
                self._write(call)
            else:
                self._write(call)
                function = self._ready()
                _delay(cycles)
            _fill(flush.memory, call)
            start.record()
            began = _clock()
            result = function(**arguments)
            host.append((_clock() - began) / 1e3)
            end.record()
            # Without waiting: work on another stream has read old input, behind the delay, or is not there yet.
            self._keep(call, result)
            done.record()
            done.synchronize()
            at_end = _clock()
            _synchronize()
            late.append((_clock() - at_end) / 1e3)
            device.append(start.elapsed_time(end) * 1e3)
            del result
        return Times(device_us=tuple(device), host_us=tuple(host), late_us=tuple(late))


def _named(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{type(value).__name__} {tuple(value.shape)} {value.dtype}".replace("torch.", "")
    return type(value).__name__


@dataclass(frozen=True, slots=True)
class Flush:
    """What makes a GPU's L2 cache cold: a tensor of twice its size, and a look at what is kept from being overwritten."""

    memory: Tensor
    persisting: Persisting


def flush_for(device: torch.device) -> Flush | None:
    """What a turn on a GPU overwrites the L2 cache with, made before a candidate is there; None on a CPU."""
    if device.type != "cuda":
        return None
    l2_bytes = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or (64 << 20)
    memory = torch.empty(FLUSH_FACTOR * l2_bytes, dtype=torch.uint8, device=device)
    return Flush(memory, Persisting())


_synchronize: Callable[[], None] = torch.cuda.synchronize
_event: Callable[..., Any] = torch.cuda.Event
_delay: Callable[[int], None] = getattr(torch.cuda, "_sleep", lambda cycles: None)
