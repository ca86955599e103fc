"""Scores of experiments, by which a search compares them."""

from __future__ import annotations

import pytest

from autokernel_hf.figures import scores_of, weighted
from autokernel_hf.records import Evaluation, Experiment, Stages, WorkloadResult


def experiment(
    number: int,
    eager: tuple[float | None, ...],
    incumbent: tuple[float | None, ...] = (None, None),
    *,
    decision: str = "revert",
    against: int | None = None,
    status: str = "passed",
    duplicate_of: int | None = None,
    spread: float | None = None,
) -> Experiment:
    """One whose two calls, of which the first has three quarters of the time, have these speed-ups.

    `spread` is how far the ends of the interval against eager lie off, as a factor.
    """
    results = tuple(
        WorkloadResult(
            label=str(i),
            shape="",
            dtype="float32",
            share=share,
            speedup_vs_eager=e,
            speedup_vs_incumbent=r,
            ci95_vs_eager=(e / spread, e * spread) if e is not None and spread is not None else None,
        )  # fmt: skip
        for i, (share, e, r) in enumerate(zip((0.3, 0.1), eager, incumbent, strict=True))
    )
    return Experiment(
        experiment=number, target="t", tag="x", description="", kernel_type="rmsnorm", backend="cpp",
        digest=str(number), evaluation=Evaluation(status=status, stages=Stages(), workloads=results),
        decision=decision, reason="", against=against, duplicate_of=duplicate_of,
    )  # fmt: skip


def test_what_was_timed_in_turn_is_compared_and_not_two_hours_of_a_machine() -> None:
    found = scores_of(
        [
            experiment(1, (3.0, 3.0), decision="keep"),
            # The machine was busy: eager looks half as slow, and the incumbent was beaten all the same.
            experiment(2, (1.6, 1.6), (1.1, 1.1), decision="keep", against=1),
            experiment(3, (5.0, 5.0), (0.9, 0.9), against=2),
        ]
    )
    assert found == {1: pytest.approx(3.0), 2: pytest.approx(3.3), 3: pytest.approx(2.97)}


def test_calls_that_were_not_timed_any_more_leave_a_score() -> None:
    first = experiment(1, (4.0, 1.0), decision="keep")
    given_up = experiment(2, (None, None), (0.8, None), against=1)
    never_timed = experiment(3, (None, None), (None, None), against=1)
    wrong = experiment(4, (9.0, 9.0), (2.0, 2.0), against=1, status="incorrect")
    found = scores_of([first, given_up, never_timed, wrong])
    whole = (4.0**0.75) * (1.0**0.25)
    assert found[1] == pytest.approx(whole) and found[2] == pytest.approx(0.8 * whole)
    assert found[3] is None and found[4] is None
    assert weighted(given_up.evaluation, "speedup_vs_incumbent") is None, (
        "nothing is claimed of what was not timed"
    )


def test_a_duplicate_has_the_score_of_its_twin() -> None:
    found = scores_of(
        [
            experiment(1, (2.0, 2.0), decision="keep"),
            experiment(2, (None, None), (0.5, 0.5), against=1),
            experiment(3, (None, None), duplicate_of=2),
        ]
    )
    assert found[3] == found[2] == pytest.approx(1.0)


def test_a_chain_of_chance_gains_is_worth_no_more_than_what_was_ever_measured_at_once() -> None:
    chain = [experiment(1, (3.0, 3.0), decision="keep", spread=1.1)]
    for number in range(
        2, 20
    ):  # each "faster" than the one before, all of them as fast against the model's own code
        chain.append(
            experiment(number, (3.0, 3.0), (1.2, 1.2), decision="keep", against=number - 1, spread=1.1)
        )
    found = scores_of(chain)
    high = 3.0 * 1.1
    assert found[2] == pytest.approx(high, rel=0.02) and found[19] == pytest.approx(high, rel=0.02)
