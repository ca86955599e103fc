"""Proposers: what to try next. The loop, the judge and the ledger are the same for all three.

`playbook` needs no network and no key; `llm` asks a chat model; `external` is a coding agent that works through the
command line (`context`, `try`, `best`, `ledger`) and has no object here.
"""

from __future__ import annotations

import logging
import math
import re
import zlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Protocol

from autokernel_hf import tunables
from autokernel_hf.errors import AutokernelError
from autokernel_hf.records import Candidate, Experiment, Proposal, Record, Target

logger = logging.getLogger(__name__)

_ANSWER_TOKENS = 8192  # at most, for one answer
_RETRIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """All that a proposer may know.

    Args:
        incumbent: The best candidate so far; at first a starter.
        attempts: Every judged experiment of this target, oldest first.
        scores: Time of the model's own code over the attempt's, by experiment; None for attempts without timings.
        prescriptions: Kinds of tunables to try first, from the diagnosis of the incumbent.
        bound: What bounds the incumbent, in words with numbers.
        remaining: Experiments left in the budget.
    """

    target: Target
    incumbent: Candidate
    attempts: tuple[Experiment, ...]
    scores: dict[int, float | None]
    prescriptions: tuple[str, ...]
    bound: str
    remaining: int
    seed: int = 0


class Proposer(Protocol):
    name: str

    def propose(self, context: Context, n: int) -> list[Proposal]:
        """At most n proposals, none tried before; an empty list where nothing is left to try."""


# --- playbook -----------------------------------------------------------------------------------------------------


class Playbook:
    """Searches the tunables of the incumbent's file, first where the diagnosis points, then by Optuna's TPE.

    The opening changes one constant at a time, those that act on what bounds the kernel before the others: such steps
    are readable, and tell the sampler which constants matter. State is what the ledger holds, so a resumed run goes on
    as if it had never stopped.
    """

    name = "playbook"

    def propose(self, context: Context, n: int) -> list[Proposal]:
        space = tunables.parse(context.incumbent.source)
        if not space:
            return []
        tried = {e.digest for e in context.attempts}
        opened = sum("opening" in e.tag.split(",") for e in context.attempts)
        openings = max(2, (len(context.attempts) + context.remaining) // 2) - opened
        proposals: list[Proposal] = []
        for proposal in [*self._openings(context, space), *self._sampled(context, space, n)]:
            digest = _digest(context, proposal.source)
            if digest in tried or ("opening" in proposal.tags and openings <= 0):
                continue
            tried.add(digest)
            openings -= "opening" in proposal.tags
            proposals.append(proposal)
            if len(proposals) == n:
                break
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

    def _sampled(self, context: Context, space: tuple[tunables.Tunable, ...], n: int) -> list[Proposal]:
        """Optuna's TPE over the joint space, told of every attempt on a file with the same tunables."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        size = math.prod(len(t.choices) for t in space)
        distributions = {t.name: optuna.distributions.CategoricalDistribution(list(t.choices)) for t in space}
        key = f"{context.target.name}/{context.seed}/{len(context.attempts)}"
        sampler = optuna.samplers.TPESampler(
            seed=zlib.crc32(key.encode()),
            n_startup_trials=4,
            multivariate=True,
            constant_liar=True,
        )
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for attempt in context.attempts:
            params = {k: v for k, v in attempt.tunables.items() if k in distributions}
            if set(params) != set(distributions) or any(
                v not in distributions[k].choices for k, v in params.items()
            ):
                continue
            score = context.scores.get(attempt.experiment)
            # A wrong or failing configuration is told as one that gains nothing, so that the sampler leaves its corner.
            study.add_trial(
                optuna.trial.create_trial(
                    params=params, distributions=distributions, value=score if score is not None else 0.0
                )
            )
        proposals = []
        seen: set[str] = set()
        present = tunables.values(context.incumbent.source)
        for _ in range(min(size, 50 * n)):
            trial = study.ask(distributions)
            source = tunables.substitute(context.incumbent.source, trial.params)
            changed = {k: v for k, v in trial.params.items() if v != present[k]}
            if source in seen or not changed:
                continue
            seen.add(source)
            proposals.append(
                Proposal(
                    source=source,
                    rationale=", ".join(f"{k} {present[k]} -> {v}" for k, v in changed.items()),
                    tags=("tpe",),
                    tunables=dict(trial.params),
                )
            )
        return proposals


def _digest(context: Context, source: str) -> str:
    return Candidate(
        kernel_type=context.target.kernel_type, backend=context.incumbent.backend, source=source
    ).digest


# --- language model -----------------------------------------------------------------------------------------------


class BudgetSpentError(AutokernelError):
    """The proposer may ask no more: the search ends with what it has."""


class Spent(Record):
    """Tokens that a run has spent, as the provider counted them."""

    prompt: int = 0
    completion: int = 0


class LanguageModel:
    """Asks a chat model for a whole new candidate file.

    Args:
        model: Model id of an Inference Provider, or the name that an OpenAI-compatible `base_url` knows.
        max_tokens: Budget of completion tokens for the run.
        account: Where the run keeps what it has spent, over its targets and resumptions.
    """

    name = "llm"

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        max_tokens: int | None = None,
        account: Path | None = None,
    ) -> None:
        from huggingface_hub import InferenceClient

        self.model = model
        self.max_tokens = max_tokens
        self._account = account
        self.spent = Spent.load(account) if account is not None and account.exists() else Spent()
        self._client = (
            InferenceClient(base_url=base_url, timeout=300) if base_url else InferenceClient(timeout=300)
        )

    def propose(self, context: Context, n: int) -> list[Proposal]:
        """Up to n proposals; an answer that is none is asked for again, a little less predictably.

        Raises:
            BudgetSpentError: The tokens are spent.
            AutokernelError: The model cannot be reached.
        """
        tried = {e.digest for e in context.attempts}
        proposals: list[Proposal] = []
        for index in range(n + _RETRIES):
            if len(proposals) == n:
                break
            text = self._ask(_prompt(context), temperature=min(1.2, 0.4 + 0.2 * index))
            source = code_of(text, context.incumbent.backend)
            if source is None:
                logger.warning("The model's answer held no complete code block; nothing was run from it.")
                continue
            candidate = Candidate(
                kernel_type=context.target.kernel_type, backend=context.incumbent.backend, source=source
            )
            if candidate.digest in tried:
                logger.info("The model repeated an earlier attempt; skipped.")
                continue
            tried.add(candidate.digest)
            proposals.append(
                Proposal(
                    source=source,
                    rationale=_hypothesis(text),
                    tags=("llm",),
                    tunables=tunables.values_if_readable(source),
                )
            )
        return proposals

    def _ask(self, prompt: str, temperature: float) -> str:
        from huggingface_hub.errors import HfHubHTTPError, InferenceTimeoutError

        left = _ANSWER_TOKENS
        if self.max_tokens is not None:
            left = min(left, self.max_tokens - self.spent.completion)
        if left <= 0:
            raise BudgetSpentError(
                f"the budget of {self.max_tokens} tokens is spent", remedy="Give a new run more --max-tokens."
            )
        try:
            answer = self._client.chat_completion(
                [{"role": "user", "content": prompt}],
                model=self.model,
                max_tokens=left,
                temperature=temperature,
            )
        except (HfHubHTTPError, InferenceTimeoutError, OSError) as error:
            raise AutokernelError(
                f"The language model {self.model} cannot be asked: {str(error).splitlines()[0]}",
                remedy="Check --llm, --base-url and the token, then resume the run.",
            ) from error
        if answer.usage is not None:
            self.spent = Spent(
                prompt=self.spent.prompt + answer.usage.prompt_tokens,
                completion=self.spent.completion + answer.usage.completion_tokens,
            )
            if self._account is not None:
                self.spent.save(self._account)
        choice = answer.choices[0]
        if choice.finish_reason == "length":
            logger.warning("The model's answer was cut off at its token limit.")
            return ""
        return str(choice.message.content or "")


def code_of(text: str, backend: str) -> str | None:
    """The longest closed code block of an answer that looks like a whole candidate; None where there is none."""
    blocks = re.findall(r"```[\w+]*\n(.*?)```", text, re.DOTALL)
    mark = "kernel_fn" if backend == "triton" else 'extern "C"'
    whole = [b for b in blocks if mark in b]
    return max(whole, key=len) if whole else None


def _hypothesis(text: str) -> str:
    for line in text.splitlines():
        if line.lower().startswith("hypothesis:"):
            return line.split(":", 1)[1].strip()[:200]
    return "proposed by the language model"


def _prompt(context: Context) -> str:
    from jinja2 import Template

    template = resources.files("autokernel_hf").joinpath("prompts/propose.j2").read_text(encoding="utf-8")
    page = Template(template, trim_blocks=True, lstrip_blocks=True)
    return str(page.render(context=context, attempts=context.attempts[-8:]))
