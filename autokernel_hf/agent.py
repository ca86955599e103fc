"""Proposers: what to try next. The loop, the judge and the ledger are the same for all three.

`playbook` needs no network and no key; `llm` asks a chat model (`llm_proposer`); `external` is a coding agent that works
through the command line (`context`, `try`, `best`, `ledger`) and has no object here.
"""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from autokernel_hf import tunables
from autokernel_hf.archive import Cell, Elite, cell_of, stale
from autokernel_hf.records import Backend, Candidate, Experiment, Proposal, Scalar, Target

_ASKED = 24  # so often the sampler is asked for something new
_TOLD = 300  # so many attempts the sampler is told of
_DRAWN = 24  # so many configurations of each distance from the incumbent are drawn
_SMALL = 4096  # a space of so many configurations is gone through to its end


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """All that a proposer may know.

    Args:
        incumbent: The best candidate so far; at first a starter.
        attempts: Every judged experiment of this target, oldest first.
        scores: Time of the model's own code over the attempt's, by experiment; None for attempts without timings.
        prescriptions: Kinds of tunables to try first, from the diagnosis of the incumbent.
        bound: What bounds the incumbent, in words with numbers.
        remaining: Experiments left in the budget; where that is a time, as many as it is likely to allow.
        pending: Proposals that are being judged now, where several devices are.
        beam: The best of each kind so far that are worth going on from, the incumbent's kind among them.
        cells: The kind of each right attempt, by experiment.
        others: The best of each kind, also of those that are not worth it as long as anything better is left.
    """

    target: Target
    incumbent: Candidate
    attempts: tuple[Experiment, ...]
    scores: dict[int, float | None]
    prescriptions: tuple[str, ...]
    bound: str
    remaining: int
    seed: int = 0
    pending: tuple[Proposal, ...] = ()
    beam: tuple[Elite, ...] = ()
    cells: Mapping[int, Cell] = field(default_factory=dict)
    others: tuple[Elite, ...] = ()


class NothingLeft(Exception):  # noqa: N818 - an end, not an error
    """A proposer has nothing left to try, and says why."""


class Proposer(Protocol):
    name: str

    def propose(self, context: Context, n: int) -> list[Proposal]:
        """At most n proposals, none tried before; an empty list, or NothingLeft, where nothing is left to try."""


# --- playbook -----------------------------------------------------------------------------------------------------


class Playbook:
    """Searches the tunables of the incumbent's file, first where the diagnosis points, then by Optuna's TPE.

    The opening changes one constant at a time, those that act on what bounds the kernel before the others: such steps
    are readable, and tell the sampler which constants matter. State is what the ledger holds, so a resumed run goes on
    as if it had never stopped.

    After a plateau of attempts without improvement every second proposal is a revisit: a step of one constant from the
    best of another kind (another backend, structure or algorithm), the one that was gone on from least. Where the sampler
    finds nothing new any more, what is left of the incumbent's space is tried, nearest to it first, and then the spaces of
    the other kinds, best first: a search ends for want of proposals only where every configuration of every file was tried.
    """

    name = "playbook"

    def __init__(self, plateau: int = 5) -> None:
        self.plateau = plateau

    def propose(self, context: Context, n: int) -> list[Proposal]:
        tried = {(e.backend, e.digest) for e in context.attempts}
        tried |= {_key(context, p) for p in context.pending}
        opened = sum("opening" in e.tag.split(",") for e in context.attempts)
        opened += sum("opening" in p.tags for p in context.pending)
        whole = len(context.attempts) + len(context.pending) + context.remaining
        openings = max(2, whole // 2) - opened
        proposals: list[Proposal] = []
        for proposal in self._in_order(context, tried):
            key = _key(context, proposal)
            if key in tried or ("opening" in proposal.tags and openings <= 0):
                continue
            tried.add(key)
            openings -= "opening" in proposal.tags
            proposals.append(proposal)
            if len(proposals) == n:
                break
        return proposals

    def _in_order(self, context: Context, tried: set[tuple[Backend, str]]) -> Iterator[Proposal]:
        """All that could be tried next, best first; each is made only when it is asked for."""
        space = tunables.parse(context.incumbent.source)
        yield from self._openings(context, space)
        yield from self._revisits(context)
        own = cell_of(context.incumbent).island
        seen = {own}
        yield from self._sampled(context, space)
        yield from self._rest(context, space)
        for elite in context.others:
            if elite.cell.island in seen:
                continue
            seen.add(elite.cell.island)
            there = replace(context, incumbent=elite.candidate)
            others = tunables.parse(elite.candidate.source)
            for proposal in itertools.chain(self._sampled(there, others), self._rest(there, others)):
                yield proposal.model_copy(
                    update={
                        "rationale": f"from #{elite.experiment} ({elite.score:.2f}x): {proposal.rationale}",
                        "tags": (*proposal.tags, f"from-{elite.experiment}"),
                        "backend": elite.candidate.backend,
                    }
                )

    def _revisits(self, context: Context) -> list[Proposal]:
        """Steps from the elites of other kinds, where the search is stuck at its incumbent."""
        since = stale(context.attempts, context.scores)
        if since < self.plateau:
            return []
        recent = [*(e.tag.split(",") for e in context.attempts[len(context.attempts) - since :])]
        recent += [list(p.tags) for p in context.pending]
        revisits = sum("revisit" in tags for tags in recent)
        others = sum("revisit" not in tags for tags in recent) - self.plateau
        if revisits > others:
            return []
        every = [e.tag.split(",") for e in context.attempts] + [list(p.tags) for p in context.pending]
        visits = Counter(tag for tags in every for tag in tags if tag.startswith("from-"))
        own = cell_of(context.incumbent)
        ranked = [e for e in context.beam if e.cell != own]
        ranked.sort(key=lambda e: visits[f"from-{e.experiment}"])  # stable: the beam's order among equals
        proposals = []
        for elite in ranked:
            steps = self._openings(
                replace(context, incumbent=elite.candidate), tunables.parse(elite.candidate.source)
            )
            # Another algorithm is another kind, which has an elite of its own if it was tried.
            for step in sorted(steps, key=lambda s: "algorithm" in s.tags):
                proposals.append(
                    step.model_copy(
                        update={
                            "rationale": f"from #{elite.experiment} ({elite.score:.2f}x): {step.rationale}",
                            "tags": ("revisit", f"from-{elite.experiment}", step.tags[-1]),
                            "backend": elite.candidate.backend,
                        }
                    )
                )
        return proposals

    def _openings(self, context: Context, space: tuple[tunables.Tunable, ...]) -> list[Proposal]:
        """One step up and one down for every constant of the incumbent, the prescribed kinds first."""
        order = {kind: i for i, kind in enumerate(context.prescriptions)}
        bound = context.bound.partition(":")[0]
        proposals = []
        for tunable in sorted(space, key=lambda t: order.get(t.acts_on, len(order))):
            at = tunable.choices.index(tunable.value)
            why = f" ({tunable.acts_on}; {bound})" if tunable.acts_on in order else ""
            for neighbour in (at + 1, at - 1):
                if not 0 <= neighbour < len(tunable.choices):
                    continue
                value = tunable.choices[neighbour]
                proposals.append(
                    Proposal(
                        source=tunables.substitute(context.incumbent.source, {tunable.name: value}),
                        rationale=f"{tunable.name} {tunable.value} -> {value}{why}",
                        tags=("opening", tunable.acts_on),
                        tunables={**tunables.values(context.incumbent.source), tunable.name: value},
                    )
                )
        return proposals

    def _sampled(self, context: Context, space: tuple[tunables.Tunable, ...]) -> Iterator[Proposal]:
        """Optuna's TPE over the joint space, told of every attempt on a file with the same tunables."""
        if not space:
            return
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        size = math.prod(len(t.choices) for t in space)
        distributions = {t.name: optuna.distributions.CategoricalDistribution(list(t.choices)) for t in space}
        key = f"{context.target.name}/{context.seed}/{len(context.attempts) + len(context.pending)}"
        sampler = optuna.samplers.TPESampler(
            seed=zlib.crc32(key.encode()),
            n_startup_trials=4,
            multivariate=True,
            constant_liar=True,
        )
        study = optuna.create_study(direction="maximize", sampler=sampler)
        island = cell_of(context.incumbent).island
        told: list[tuple[float, dict[str, Scalar]]] = []
        for attempt in context.attempts:
            cell = context.cells.get(attempt.experiment)
            if attempt.backend != island[0] or (cell is not None and cell.island != island):
                continue  # another file, even where its constants have the same names
            params = {k: v for k, v in attempt.tunables.items() if k in distributions}
            if set(params) != set(distributions) or any(
                v not in distributions[k].choices for k, v in params.items()
            ):
                continue
            # A wrong or failing configuration is told as one that gains nothing, so that the sampler leaves its corner.
            told.append((context.scores.get(attempt.experiment) or 0.0, params))
        for score, params in _worth_telling(told):
            study.add_trial(
                optuna.trial.create_trial(params=params, distributions=distributions, value=score)
            )
        for pending in context.pending:
            params = {k: v for k, v in pending.tunables.items() if k in distributions}
            if set(params) == set(distributions) and all(
                v in distributions[k].choices for k, v in params.items()
            ):
                study.add_trial(
                    optuna.trial.create_trial(
                        state=optuna.trial.TrialState.RUNNING, params=params, distributions=distributions
                    )
                )
        for _ in range(min(size, _ASKED)):
            trial = study.ask(distributions)
            if (proposal := _with(context.incumbent, trial.params, "tpe")) is not None:
                yield proposal

    def _rest(self, context: Context, space: tuple[tunables.Tunable, ...]) -> Iterator[Proposal]:
        """The incumbent's space without end: near to it first, at random, and all of it where it is small."""
        if not space:
            return
        here = {t.name: t.value for t in space}
        cell = cell_of(context.incumbent)
        # Told by their values, which takes less than making the source of each.
        known = {
            frozenset(a.tunables.items())
            for a in context.attempts
            if a.experiment in context.cells and context.cells[a.experiment].island == cell.island
        }
        key = f"{context.target.name}/{context.seed}/{len(context.attempts) + len(context.pending)}/rest"
        draw = random.Random(zlib.crc32(key.encode()))
        for changes in range(2, len(space) + 1):
            for _ in range(_DRAWN):
                chosen = draw.sample(space, changes)
                values = {**here, **{t.name: draw.choice(t.choices) for t in chosen}}
                if frozenset(values.items()) in known:
                    continue
                if (proposal := _with(context.incumbent, values, "rest")) is not None:
                    yield proposal
        if math.prod(len(t.choices) for t in space) <= _SMALL:
            for choice in itertools.product(*(t.choices for t in space)):
                values = dict(zip(here, choice, strict=True))
                if frozenset(values.items()) in known:
                    continue
                if (proposal := _with(context.incumbent, values, "rest")) is not None:
                    yield proposal


def _worth_telling(
    told: list[tuple[float, dict[str, Scalar]]],
) -> list[tuple[float, dict[str, Scalar]]]:
    """What the sampler is told in a long night: the latest and the best, or each proposal would take longer than the last."""
    if len(told) <= _TOLD:
        return told
    latest = set(range(len(told) - _TOLD // 2, len(told)))
    best = sorted(set(range(len(told))) - latest, key=lambda i: -told[i][0])[: _TOLD - len(latest)]
    return [told[i] for i in sorted(latest | set(best))]


def _with(incumbent: Candidate, values: Mapping[str, Scalar], tag: str) -> Proposal | None:
    """The incumbent with other values of its tunables; None where they are its own."""
    present = tunables.values(incumbent.source)
    changed = {k: v for k, v in values.items() if v != present[k]}
    if not changed:
        return None
    return Proposal(
        source=tunables.substitute(incumbent.source, changed),
        rationale=", ".join(f"{k} {present[k]} -> {v}" for k, v in changed.items()),
        tags=(tag,),
        tunables=dict(values),
    )


def _key(context: Context, proposal: Proposal) -> tuple[Backend, str]:
    backend = proposal.backend or context.incumbent.backend
    candidate = Candidate(kernel_type=context.target.kernel_type, backend=backend, source=proposal.source)
    return backend, candidate.digest
