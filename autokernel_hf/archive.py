"""What a search has found so far as a grid of kinds: the best of each, and not only the fastest of all.

A *cell* is a strategy, which is a backend and a structure (the source with every tunable at its first choice), and within
it the values of the constants that choose an algorithm. The fastest attempt of each cell is an *elite*; the beam holds the
elites that are worth going on from, those of different strategies first. A search that is stuck at its incumbent goes on
from another elite: the best kernel is often a neighbour of the second best kind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from autokernel_hf import tunables
from autokernel_hf.errors import CandidateError
from autokernel_hf.llm_edits import structure
from autokernel_hf.records import Backend, Candidate, Experiment, Scalar

WORTH = 0.5
"""An elite slower than half of the best is left alone: no step of one constant makes up for that."""
BEAM = 6
EPSILON = 0.01
"""An improvement below it is none."""
FINALISTS = 3
FINAL = "final"
"""The tag of an experiment that judges a source once more, before a target is concluded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A kind of candidate: two in one cell differ in sizes alone.

    Args:
        strategy: Digest of the structure.
        algorithm: The values of the tunables that act on the algorithm, in the order of the file.
    """

    backend: Backend
    strategy: str
    algorithm: tuple[tuple[str, Scalar], ...]

    @property
    def island(self) -> tuple[Backend, str]:
        """What an own population of constants belongs to."""
        return self.backend, self.strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Elite:
    """The fastest right attempt of a cell; `score` is the time of the model's own code over its own."""

    experiment: int
    candidate: Candidate
    score: float
    cell: Cell


def cell_of(candidate: Candidate) -> Cell:
    """The cell of a candidate; one whose tune comments cannot be read has no algorithms."""
    return _cell(candidate.source, candidate.backend)


@lru_cache(maxsize=4096)
def _cell(source: str, backend: Backend) -> Cell:
    form = structure(source, backend)
    try:
        found = tunables.parse(source)
    except CandidateError:
        found = ()
    return Cell(
        backend=backend,
        strategy=hashlib.sha256(form.encode()).hexdigest()[:16],
        algorithm=tuple((t.name, t.value) for t in found if t.acts_on == "algorithm"),
    )


def elites(
    attempts: Sequence[Experiment], scores: Mapping[int, float | None], sources: Mapping[int, Candidate]
) -> tuple[Elite, ...]:
    """The fastest attempt of each cell, fastest first.

    Args:
        sources: The candidates by experiment number; attempts without one are passed over.
    """
    best: dict[Cell, Elite] = {}
    for attempt in attempts:
        score, candidate = scores.get(attempt.experiment), sources.get(attempt.experiment)
        if score is None or candidate is None:
            continue
        cell = cell_of(candidate)
        known = best.get(cell)
        if known is None or score > known.score:
            best[cell] = Elite(experiment=attempt.experiment, candidate=candidate, score=score, cell=cell)
    return tuple(sorted(best.values(), key=lambda e: -e.score))


def beam(found: Sequence[Elite], size: int = BEAM) -> tuple[Elite, ...]:
    """The elites that are worth going on from: the best of each island, fastest first, then the others."""
    if not found:
        return ()
    limit = WORTH * found[0].score
    worth = [e for e in found if e.score >= limit]
    seen: set[tuple[Backend, str]] = set()
    first: list[Elite] = []
    rest: list[Elite] = []
    for elite in worth:
        (rest if elite.cell.island in seen else first).append(elite)
        seen.add(elite.cell.island)
    return tuple([*first, *rest][:size])


def finalists(
    attempts: Sequence[Experiment], scores: Mapping[int, float | None], kept: Experiment
) -> tuple[Experiment, ...]:
    """What may be faster than the incumbent, though it was not kept: attempts with a higher score, best first.

    Their verdicts fell against other incumbents, in other sessions, or within their noise. Left out are those that were
    not timed on all calls, and those that were timed against this incumbent once more already.
    """
    own = scores.get(kept.experiment)
    if own is None:
        return ()
    done = {e.digest for e in attempts if e.tag == FINAL and e.against == kept.experiment}
    done |= {e.digest for e in attempts if e.decision == "keep"}
    best: dict[str, tuple[float, Experiment]] = {}
    for attempt in attempts:
        score = scores.get(attempt.experiment)
        if score is None or score <= own or attempt.duplicate_of is not None or attempt.digest in done:
            continue
        if any(w.latency_us is None for w in attempt.evaluation.workloads):
            continue
        known = best.get(attempt.digest)
        if known is None or score > known[0]:
            best[attempt.digest] = (score, attempt)
    return tuple(attempt for _, attempt in sorted(best.values(), key=lambda pair: -pair[0]))


def stale(attempts: Sequence[Experiment], scores: Mapping[int, float | None]) -> int:
    """How many attempts there were since the best score rose by more than `EPSILON`."""
    best, since = 0.0, 0
    for attempt in attempts:
        score = scores.get(attempt.experiment)
        if score is not None and score > best * (1 + EPSILON):
            best, since = score, 0
        else:
            since += attempt.duplicate_of is None and attempt.tag != FINAL
    return since
