"""The columns of a verification: the passes beside the eager ones, and the times of all of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autokernel_hf.judge.statistics import bootstrap_median
from autokernel_hf.models import Inputs
from autokernel_hf.records import Interval, Latency, Speedup, SpeedupInterval

MIN_PAIRS, MAX_PAIRS = 10, 40
MIN_COMPILED_ROUNDS, MAX_COMPILED_ROUNDS = 3, 20
_NARROW = 0.005  # half-width of the interval at which more pairs are not worth their time


def compiled_pass(model: nn.Module, inputs: Inputs, mode: str | None) -> Callable[[], Any]:
    """A pass by torch.compile, in this mode."""
    compiled = torch.compile(model, dynamic=False, mode=mode)

    def run() -> Any:
        if mode is not None:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            return compiled(**inputs)

    return run


def captured_pass(model: nn.Module, inputs: Inputs, others: Inputs) -> Callable[[], Any]:
    """A pass captured in a CUDA graph as it is: the model's own operations, without their launches.

    The pass copies `inputs` to where the graph reads them, as whoever uses a graph must, and replays it.

    Args:
        others: Inputs of the same shapes to capture with, so that a replay that ignores its inputs is seen.

    Raises:
        RuntimeError: The pass cannot be captured, for example since it asks the device for a value.
    """
    static = {name: v.clone() if isinstance(v, Tensor) else v for name, v in others.items() if name in inputs}
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(2):
            model(**static)
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        output = model(**static)

    def run() -> Any:
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                static[name].copy_(value)
        graph.replay()
        return output

    return run


# Ways of running a model: the column without the kernels, that with them, and its words.
_WAYS = (
    ("compile", "compile_kernels", "under torch.compile"),
    ("compile_cudagraphs", "compile_kernels_cudagraphs", "under torch.compile with CUDA graphs"),
    ("eager_cudagraphs", "eager_kernels_cudagraphs", "in a CUDA graph"),
)


@dataclass(slots=True)
class Timing:
    """Milliseconds of passes: pairs of the two eager columns, and rounds of all columns."""

    pairs: list[dict[str, float]] = field(default_factory=list)
    rounds: list[dict[str, float]] = field(default_factory=list)
    problem: str = ""

    def enough_pairs(self, late: bool) -> bool:
        count = len(self.pairs)
        if count < MIN_PAIRS:
            return False
        if late or count >= MAX_PAIRS:
            return True
        low, high = bootstrap_median(self._ratios(self.pairs, "eager", "eager_kernels"))
        return count >= 2 * MIN_PAIRS and high - low <= 2 * _NARROW

    def enough_rounds(self, late: bool) -> bool:
        count = len(self.rounds)
        return count >= MAX_COMPILED_ROUNDS or (late and count >= MIN_COMPILED_ROUNDS)

    def latency(self) -> Latency:
        times: dict[str, list[float]] = {}
        for row in [*self.pairs, *self.rounds]:
            for name, ms in row.items():
                times.setdefault(name, []).append(ms)
        return Latency(**{name: statistics.median(values) for name, values in times.items()})

    def speedup(self) -> Speedup:
        return Speedup(vs_eager=_median(self._vs_eager()), vs_compile=_median(self._vs_compile()))

    def intervals(self) -> SpeedupInterval:
        return SpeedupInterval(vs_eager=_interval(self._vs_eager()), vs_compile=_interval(self._vs_compile()))

    def slower(self) -> tuple[str, ...]:
        """Where the kernels cost beyond doubt, 2 % or more, though they may win elsewhere: a sentence each."""
        told = []
        for plain, patched, words in _WAYS:
            ratios = self._ratios(self.rounds, plain, patched)
            interval = _interval(ratios)
            if interval is not None and interval[1] < 0.98:
                told.append(
                    f"{words} the kernels cost: {statistics.median(ratios):.3f} times the speed without them "
                    f"(95 % interval {interval[0]:.3f} to {interval[1]:.3f})"
                )
        return tuple(told)

    def _vs_eager(self) -> list[float]:
        return self._ratios([*self.pairs, *self.rounds], "eager", "eager_kernels")

    def _vs_compile(self) -> list[float]:
        """The better of torch.compile's columns over the best column with kernels, by round."""
        peer = self._fastest(lambda name: name.startswith("compile") and "kernels" not in name)
        kernels = self._fastest(lambda name: "kernels" in name)
        if peer is None or kernels is None:
            return []
        return self._ratios(self.rounds, peer, kernels)

    def _fastest(self, among: Callable[[str], bool]) -> str | None:
        names = [name for name in (self.rounds[0] if self.rounds else {}) if among(name)]
        return min(names, key=lambda n: statistics.median(r[n] for r in self.rounds), default=None)

    @staticmethod
    def _ratios(rows: Sequence[dict[str, float]], over: str, under: str) -> list[float]:
        return [row[over] / row[under] for row in rows if over in row and under in row]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _interval(values: Sequence[float]) -> Interval | None:
    return bootstrap_median(values) if values else None
