"""The verdict on paired times."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autokernel_hf.judge import statistics


def _rounds(
    generator: np.random.Generator, n: int, speedup: float, noise: float
) -> tuple[list[float], list[float]]:
    """Pairs with a common drift, independent noise of a share of the time, and a few preempted turns."""
    drift = 1 + 0.2 * np.sin(np.linspace(0, 3, n))
    base = 100 * drift * np.exp(noise * generator.standard_normal(n))
    candidate = 100 / speedup * drift * np.exp(noise * generator.standard_normal(n))
    base[generator.random(n) < 0.05] *= 3
    candidate[generator.random(n) < 0.05] *= 3
    return base.tolist(), candidate.tolist()


def _sequential(generator: np.random.Generator, speedup: float, noise: float) -> statistics.Comparison:
    base, candidate = _rounds(generator, 90, speedup, noise)
    for n in range(1, 91):
        if statistics.decided(base[:n], candidate[:n], epsilon=0.01):
            break
    return statistics.compare(base[:n], candidate[:n], epsilon=0.01)


def test_median_of_a_constant_has_an_interval_of_no_width() -> None:
    assert statistics.bootstrap_median([2.0] * 12) == (2.0, 2.0)


def test_same_data_give_the_same_interval() -> None:
    values = np.random.default_rng(1).normal(1, 0.1, 40).tolist()
    assert statistics.bootstrap_median(values) == statistics.bootstrap_median(values)


def test_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(2)
    hits = 0
    for _ in range(200):
        low, high = statistics.bootstrap_median(generator.standard_exponential(40).tolist())
        hits += low <= math.log(2) <= high
    assert 180 <= hits <= 200


def test_no_values_are_an_error() -> None:
    with pytest.raises(ValueError, match="no values"):
        statistics.bootstrap_median([])


def test_unequal_counts_are_an_error() -> None:
    with pytest.raises(ValueError):
        statistics.compare([1.0, 2.0], [1.0], epsilon=0.01)


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ((1.011, 1.2), "faster"),
        ((1.009, 1.2), "no difference"),
        ((0.8, 0.989), "slower"),
        ((0.8, 0.995), "no difference"),
        ((0.9, 1.1), "no difference"),
    ],
)
def test_different_means_an_interval_outside_epsilon(interval: tuple[float, float], expected: str) -> None:
    assert statistics.verdict(interval, 0.01) == expected


@pytest.mark.parametrize("noise", [0.003, 0.03, 0.1])
def test_the_same_kernel_twice_shows_no_difference(noise: float) -> None:
    generator = np.random.default_rng(3)
    verdicts = [_sequential(generator, 1.0, noise).verdict for _ in range(24)]
    assert verdicts.count("no difference") >= 23


def test_a_planted_difference_is_found() -> None:
    generator = np.random.default_rng(4)
    assert [_sequential(generator, 1.05, 0.02).verdict for _ in range(20)].count("faster") >= 19
    assert [_sequential(generator, 0.95, 0.02).verdict for _ in range(20)].count("slower") >= 19


def test_a_clear_loser_is_seen_after_few_rounds() -> None:
    result = _sequential(np.random.default_rng(5), 0.5, 0.02)
    assert result.verdict == "slower"
    assert result.rounds <= 2 * statistics.EARLY_ROUNDS


def test_a_winner_needs_the_full_count() -> None:
    result = _sequential(np.random.default_rng(6), 1.5, 0.02)
    assert result.verdict == "faster"
    assert result.rounds == statistics.FULL_ROUNDS


def test_values_of_a_block_are_not_taken_for_independent() -> None:
    """Five pairs of processes that differ by 5 % among themselves say less than fifty independent rounds."""
    generator = np.random.default_rng(7)
    blocks = np.repeat(np.arange(5), 10)
    values = 1 + np.array([0.05, -0.05, 0.02, 0.04, -0.03])[blocks] + 0.001 * generator.standard_normal(50)
    low, high = statistics.bootstrap_median(values.tolist(), blocks.tolist())
    assert low < 0.98
    assert high > 1.03
    assert statistics.bootstrap_median(values.tolist())[0] > low


def test_two_blocks_that_differ_say_next_to_nothing() -> None:
    low, high = statistics.bootstrap_median([1.05] * 8 + [1.10] * 8, [0] * 8 + [1] * 8)
    assert low < 0.85
    assert high > 1.3


def test_blocks_of_unequal_length_are_drawn_alike() -> None:
    blocks = [0] * 3 + [1] * 30
    low, high = statistics.bootstrap_median([1.0] * 3 + [2.0] * 30, blocks)
    assert low < 1.0
    assert high > 2.0


def test_a_block_for_each_value_is_needed() -> None:
    with pytest.raises(ValueError, match="blocks"):
        statistics.bootstrap_median([1.0, 2.0], [0])


def test_a_loss_is_told_after_few_rounds_only_where_it_is_clear() -> None:
    generator = np.random.default_rng(8)
    base = (100 * np.exp(0.05 * generator.standard_normal(16))).tolist()
    blocks = [0] * 8 + [1] * 8
    assert statistics.lost(base, [t * 1.5 for t in base[::-1]], blocks, margin=0.02)
    assert not statistics.lost(base, base[::-1], blocks, margin=0.02)
    assert not statistics.lost(base[:8], [t * 1.5 for t in base[:8]], blocks[:8], margin=0.02)


def test_workloads_combine_by_share() -> None:
    speedup, (low, high) = statistics.combine([2.0, 1.0], [(1.9, 2.1), (0.99, 1.01)], [3.0, 1.0])
    assert speedup == pytest.approx(2**0.75)
    assert low < speedup < high
    assert low > 1.9**0.75 * 0.98


def test_workloads_without_share_weigh_the_same() -> None:
    speedup, interval = statistics.combine([4.0, 1.0], [(4.0, 4.0), (1.0, 1.0)], [0.0, 0.0])
    assert speedup == pytest.approx(2.0)
    assert interval == pytest.approx((2.0, 2.0))
