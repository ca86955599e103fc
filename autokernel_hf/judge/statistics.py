"""From paired times to a verdict.

A round times every contender once, in random order, so that drift (clocks, other load) falls on both sides of a pair.
What counts is the median of the paired ratios and its bootstrap interval: "different" means that the interval lies
outside [1 - epsilon, 1 + epsilon]. Everything here is a pure function of its numbers: the resampling is seeded, so the
same data always give the same verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autokernel_hf.records import Interval

Verdict = Literal["faster", "slower", "no difference"]

LEVEL = 0.95
RESAMPLES = 2000
_SEED = 20240229

# Looking at the data again and again makes a chance difference likelier, so looks are few, and ask for more certainty.
EARLY_LEVEL = 0.9998
EARLY_ROUNDS = 10
FULL_ROUNDS = 30
_LOOK_EVERY = 10
_STUDENT = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
)  # 97.5 % quantiles of t with 1, 2, ... degrees of freedom
_NARROW = (
    0.5  # half-width of an interval, in epsilons, at which more rounds cannot change a verdict that matters
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How much faster the candidate is: `speedup` is the median of baseline time over candidate time."""

    speedup: float
    interval: Interval
    verdict: Verdict
    rounds: int


def bootstrap_median(
    values: Sequence[float], blocks: Sequence[int] | None = None, *, level: float = LEVEL
) -> Interval:
    """The bootstrap interval of the median (percentile method).

    Args:
        blocks: Which block each value belongs to. Values of a block share what is fixed for a pair of processes (where
            their memory lies), so blocks are drawn first, then values within them. A few blocks show less than that
            tells: at the usual level the interval is at least Student's over the blocks' medians.

    Raises:
        ValueError: There are no values, or not a block for each.
    """
    data: NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    if data.size == 0:
        raise ValueError("no values to take a median of")
    generator = np.random.default_rng(_SEED)
    groups = np.zeros(data.size, dtype=np.int64) if blocks is None else np.asarray(blocks)
    if groups.size != data.size:
        raise ValueError("as many blocks as values are needed")
    order = np.argsort(groups, kind="stable")
    starts, sizes = np.unique(groups[order], return_index=True, return_counts=True)[1:]
    each = -(-data.size // starts.size)
    drawn = generator.integers(starts.size, size=(RESAMPLES, starts.size))
    within = generator.random((RESAMPLES, starts.size, each)) * sizes[drawn][:, :, None]
    index = starts[drawn][:, :, None] + within.astype(np.int64)
    medians = np.median(data[order][index.reshape(RESAMPLES, -1)], axis=1)
    tail = (1 - level) / 2
    low, high = np.quantile(medians, (tail, 1 - tail))
    if level == LEVEL and 1 < starts.size <= len(_STUDENT) + 1 and bool((data > 0).all()):
        logs = np.log([np.median(data[order][s : s + n]) for s, n in zip(starts, sizes, strict=True)])
        half = _STUDENT[starts.size - 2] * float(logs.std(ddof=1)) / math.sqrt(starts.size)
        centre = float(logs.mean())
        low, high = min(low, math.exp(centre - half)), max(high, math.exp(centre + half))
    return float(low), float(high)


def verdict(interval: Interval, epsilon: float) -> Verdict:
    """What an interval of a speed-up says."""
    if interval[0] > 1 + epsilon:
        return "faster"
    if interval[1] < 1 - epsilon:
        return "slower"
    return "no difference"


def compare(
    baseline_us: Sequence[float],
    candidate_us: Sequence[float],
    blocks: Sequence[int] | None = None,
    *,
    epsilon: float,
    level: float = LEVEL,
) -> Comparison:
    """Compare times that were taken in pairs.

    Raises:
        ValueError: The sequences differ in length, or are empty.
    """
    ratios = [b / c for b, c in zip(baseline_us, candidate_us, strict=True)]
    interval = bootstrap_median(ratios, blocks, level=level)
    return Comparison(
        speedup=median_speedup(baseline_us, candidate_us),
        interval=interval,
        verdict=verdict(interval, epsilon),
        rounds=len(ratios),
    )


def median_speedup(baseline_us: Sequence[float], candidate_us: Sequence[float]) -> float:
    """The median of the paired ratios."""
    return float(np.median([b / c for b, c in zip(baseline_us, candidate_us, strict=True)]))


def lost(
    baseline_us: Sequence[float],
    candidate_us: Sequence[float],
    blocks: Sequence[int] | None = None,
    *,
    margin: float,
) -> bool:
    """Whether the candidate is slower by more than `margin`, so clearly that few rounds show it."""
    if len(candidate_us) < EARLY_ROUNDS:
        return False
    return compare(baseline_us, candidate_us, blocks, epsilon=margin, level=EARLY_LEVEL).verdict == "slower"


def decided(baseline_us: Sequence[float], candidate_us: Sequence[float], *, epsilon: float) -> bool:
    """Whether further rounds between the same two processes would hardly change the verdict.

    A clear loser is seen after a few rounds. A winner, and the claim that there is no difference, need a full count.
    """
    rounds = len(candidate_us)
    if rounds < EARLY_ROUNDS or rounds % _LOOK_EVERY:
        return False
    if lost(baseline_us, candidate_us, margin=epsilon):
        return True
    if rounds < FULL_ROUNDS:
        return False
    if compare(baseline_us, candidate_us, epsilon=epsilon, level=EARLY_LEVEL).verdict == "faster":
        return True
    low, high = compare(baseline_us, candidate_us, epsilon=epsilon).interval
    return high - low <= 2 * _NARROW * epsilon or (low >= 1 - epsilon and high <= 1 + epsilon)


def combine(
    speedups: Sequence[float], intervals: Sequence[Interval], shares: Sequence[float]
) -> tuple[float, Interval]:
    """The geometric mean of several workloads' speed-ups, weighted by share, with its interval.

    The workloads are measured independently, so the half-widths of the logarithms add in quadrature. Without any share
    all weigh the same.

    Raises:
        ValueError: The sequences differ in length, or are empty.
    """
    if not speedups:
        raise ValueError("no workloads to combine")
    total = sum(shares)
    weights = [s / total if total > 0 else 1 / len(speedups) for s in shares]
    centre = below = above = 0.0
    for speedup, (low, high), weight in zip(speedups, intervals, weights, strict=True):
        centre += weight * math.log(speedup)
        below += (weight * math.log(speedup / low)) ** 2
        above += (weight * math.log(high / speedup)) ** 2
    return math.exp(centre), (math.exp(centre - math.sqrt(below)), math.exp(centre + math.sqrt(above)))
