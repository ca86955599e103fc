"""What a run asks of a language model, within its budget, and how the ledger remembers it.

Every question becomes an `Asked` event with its tokens and its cost, and a page in the run's folder `llm/` that a person
can read. What was spent is always read from the ledger, so that a resumed run has the same budget and not a new one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from autokernel_hf.errors import RunError, UsageError
from autokernel_hf.ledger import Asked
from autokernel_hf.llm import Chat, ContextFullError, LanguageModelError, UnavailableError
from autokernel_hf.llm_answers import Answer, Message, Prices, estimate, prices_in
from autokernel_hf.progress import NOTE
from autokernel_hf.records import Record, write_atomically
from autokernel_hf.runs import Run

logger = logging.getLogger(__name__)

FOLDER = "llm"
_DOING = {
    "propose": "what to try",
    "repair": "a repair",
    "again": "once more, since that could not be used",
    "reflect": "what is to be learned",
    "price": "what it costs",
}
_UNANSWERED = ("unavailable", "context_full", "failed")


class ListedPrices(Record):
    """What the server's list of models said that the model costs, in US dollars per million tokens."""

    prompt: float
    completion: float


@dataclass(frozen=True, slots=True)
class Spent:
    """What a run has spent so far: tokens of questions and answers, dollars where known, and answers of any kind."""

    tokens: int
    cost_usd: float
    answers: int


def spent_by(run: Run) -> Spent:
    """The sum of all questions of a run."""
    asked = [e for e in run.events() if isinstance(e, Asked)]
    return Spent(
        tokens=sum(e.prompt_tokens + e.completion_tokens for e in asked),
        cost_usd=sum(e.cost_usd or 0.0 for e in asked),
        answers=sum(e.outcome in ("answered", "cut_off", "empty", "refused") for e in asked),
    )


def summary(run: Run) -> str | None:
    """What asking a model has cost, in a sentence; None where none was asked."""
    asked = [e for e in run.events() if isinstance(e, Asked)]
    if not asked:
        return None
    spent = spent_by(run)
    known = [e for e in asked if e.cost_usd is not None]
    cost = f", {spent.cost_usd:.4f} dollars" if known else ""
    failed = sum(e.outcome in _UNANSWERED for e in asked)
    return f"{asked[-1].model} was asked {len(asked)} times ({failed} without an answer): {spent.tokens} tokens{cost}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What a language model was asked for, and what that took: one line of a run's bill.

    Args:
        target: Whose search asked; empty for the run as a whole.
        purpose: In words; empty for all of them together.
        unanswered: Questions that brought no answer.
        estimated: Whether a server left the counting of tokens to us.
        cost_usd: None where the price of no question is known.
    """

    target: str
    purpose: str
    questions: int
    unanswered: int
    prompt_tokens: int
    completion_tokens: int
    estimated: bool
    cost_usd: float | None
    seconds: float


def bill(run: Run) -> list[Bill]:
    """What asking a model has taken: a line for each target and purpose, and the sum as the last one; empty without."""
    asked = [e for e in run.events() if isinstance(e, Asked)]
    kinds = dict.fromkeys((e.target, e.purpose) for e in asked)
    lines = [
        _bill(target, _DOING[purpose], [e for e in asked if (e.target, e.purpose) == (target, purpose)])
        for target, purpose in kinds
    ]
    return [*lines, _bill("", "", asked)] if asked else []


def _bill(target: str, purpose: str, asked: Sequence[Asked]) -> Bill:
    costs = [e.cost_usd for e in asked if e.cost_usd is not None]
    return Bill(
        target=target,
        purpose=purpose,
        questions=len(asked),
        unanswered=sum(e.outcome in _UNANSWERED for e in asked),
        prompt_tokens=sum(e.prompt_tokens for e in asked),
        completion_tokens=sum(e.completion_tokens for e in asked),
        estimated=any(e.estimated for e in asked),
        cost_usd=sum(costs) if costs else None,
        seconds=sum(e.seconds for e in asked),
    )


class BudgetSpentError(Exception):
    """--max-tokens or --max-cost leaves no room for another question."""


class Account:
    """Asks a chat model on a run's account.

    Args:
        run: Whose settings bound what may be spent.
        least_tokens: The model is not asked where the budget leaves less than this for its answer.
    """

    def __init__(self, run: Run, chat: Chat, *, least_tokens: int = 512) -> None:
        self.run = run
        self.chat = chat
        self.least_tokens = least_tokens
        # Tokens that the server counts for one that is estimated, by the longest question so far.
        self._counted: float | None = None
        self._longest = 0

    def ask(
        self,
        purpose: str,
        target: str,
        messages: Sequence[Message],
        max_tokens: int,
        temperature: float,
        *,
        note: str = "",
    ) -> Answer:
        """Put one question within the budget, and enter it in the ledger whatever comes of it.

        Args:
            purpose, target, note: For the ledger; see `Asked`.

        Raises:
            BudgetSpentError: The budget leaves no room; nothing was asked.
            LanguageModelError, UnavailableError, ContextFullError: As `Chat.ask`.
        """
        max_tokens = self._room(messages, max_tokens)
        number = 1 + sum(isinstance(e, Asked) for e in self.run.events())
        name = f"{FOLDER}/{number:05d}-{purpose}.md"
        entry = {"target": target, "model": self.chat.model, "purpose": purpose, "temperature": temperature}
        started = time.monotonic()
        logger.log(NOTE, "  asking %s: %s%s", self.chat.model, _DOING[purpose], f" ({note})" if note else "")
        try:
            answer = self.chat.ask(messages, max_tokens=max_tokens, temperature=temperature)
        except (LanguageModelError, UnavailableError, ContextFullError) as error:
            outcome = "unavailable" if isinstance(error, UnavailableError) else "failed"
            if isinstance(error, ContextFullError):
                outcome = "context_full"
            _write(self.run, name, _transcript(messages, str(error), outcome))
            self.run.append(
                Asked.model_validate(
                    entry
                    | {"outcome": outcome, "detail": error.message, "transcript": name, "at": time.time()}
                    | {"seconds": round(time.monotonic() - started, 3)}
                )
            )
            raise
        if not answer.estimated and estimate(messages) >= self._longest:
            self._longest = estimate(messages)
            self._counted = answer.prompt_tokens / max(1, self._longest)
        _write(self.run, name, _transcript(messages, answer.text, answer.outcome))
        self.run.append(
            Asked.model_validate(
                entry
                | {
                    "outcome": answer.outcome,
                    "detail": note,
                    "prompt_tokens": answer.prompt_tokens,
                    "completion_tokens": answer.completion_tokens,
                    "estimated": answer.estimated,
                    "cost_usd": self._cost(answer),
                    "seconds": round(answer.seconds, 3),
                    "retries": answer.retries,
                    "transcript": name,
                    "at": time.time(),
                }
            )
        )
        return answer

    def _room(self, messages: Sequence[Message], wanted: int) -> int:
        """How long an answer the budget allows, at most `wanted` tokens.

        The first question of a run is put whatever its estimate, since only its answer tells how the server counts: a
        budget may be passed by that one prompt. Raises BudgetSpentError where too little is left.
        """
        settings = self.run.settings
        if settings.max_tokens is None and settings.max_cost is None:
            return wanted
        spent = spent_by(self.run)
        first = spent.tokens == 0
        prompt = 0 if first else int(estimate(messages) * (self._counted or 1.0)) + 1
        least = 1 if first else min(wanted, self.least_tokens)
        if settings.max_tokens is not None:
            left = settings.max_tokens - spent.tokens - prompt
            if left < least:
                raise BudgetSpentError(
                    f"{spent.tokens} of {settings.max_tokens} tokens are spent (--max-tokens)"
                )
            wanted = min(wanted, left)
        if settings.max_cost is not None:
            left_usd = settings.max_cost - spent.cost_usd
            prices = self._prices()
            if prices is not None:
                left_usd -= prices.of(prompt, 0)
                each = prices.completion / 1e6
                enough = left_usd > 0 and (each == 0 or left_usd / each >= least)
                wanted = wanted if each == 0 or not enough else max(1, min(wanted, int(left_usd / each)))
            else:  # the server tells the cost of each answer: another one may cost as much as the dearest
                enough = left_usd > max((e.cost_usd or 0.0 for e in self._asked()), default=0.0)
            if not enough:
                raise BudgetSpentError(
                    f"{spent.cost_usd:.4f} of {settings.max_cost:.4f} dollars are spent (--max-cost)"
                )
        return wanted

    def _cost(self, answer: Answer) -> float | None:
        """Dollars: by the user's prices, else as the answer says, else by the server's list."""
        settings = self.run.settings
        if settings.price_in is None and answer.cost_usd is not None:
            return answer.cost_usd
        prices = self._prices()
        return None if prices is None else prices.of(answer.prompt_tokens, answer.completion_tokens)

    def _prices(self) -> Prices | None:
        settings = self.run.settings
        if settings.price_in is not None or settings.price_out is not None:
            return Prices(prompt=settings.price_in or 0.0, completion=settings.price_out or 0.0)
        path = self.run.path / FOLDER / "prices.json"
        if not path.exists():
            return None
        listed = ListedPrices.load(path)
        return Prices(prompt=listed.prompt, completion=listed.completion)

    def _asked(self) -> list[Asked]:
        return [e for e in self.run.events() if isinstance(e, Asked)]


# --- the start of a run -------------------------------------------------------------------------------------------


def prepare(run: Run, *, chat: Chat | None = None) -> None:
    """Before anything costs time: is the server there, does it know the key, and what does the model cost?

    Raises:
        UsageError: --max-cost without any known price, or one price without the other.
        LanguageModelError: The server cannot be reached, or refuses the key.
    """
    settings = run.settings
    if (settings.price_in is None) != (settings.price_out is None):
        raise UsageError(
            "One price alone tells no cost.", remedy="Give --price-in and --price-out, or neither."
        )
    chat = chat or chat_of(run)
    listed = prices_in(chat.catalogue(), chat.model)
    if listed is not None:
        save(run, "prices.json", ListedPrices(prompt=listed.prompt, completion=listed.completion))
    if settings.max_cost is None or settings.price_in is not None or listed is not None:
        return
    # Some servers tell the cost with each answer; a short question shows whether this one does.
    asker = Account(run, chat)
    answer = asker.ask("price", "", [{"role": "user", "content": "Answer with one word: yes."}], 16, 0.0)
    if answer.cost_usd is None:
        raise UsageError(
            f"--max-cost cannot be held: neither you nor {chat.where} told what {chat.model} costs.",
            remedy="Give --price-in and --price-out in dollars per million tokens, or bound the run with --max-tokens.",
        )


def chat_of(run: Run) -> Chat:
    """The model that a run's settings name. Raises UsageError, or LanguageModelError, as `Chat`."""
    settings = run.settings
    if settings.llm is None:  # the command line refuses this earlier
        raise UsageError("The llm proposer needs a model.", remedy="Name one with --llm.")
    return Chat(settings.llm, base_url=settings.base_url)


def _transcript(messages: Sequence[Message], answer: str, outcome: str) -> str:
    """A conversation as a page to read."""
    parts = [f"## {m['role']}\n\n{m['content'].strip()}\n" for m in messages]
    return "\n".join([*parts, f"## answer ({outcome})\n\n{answer.strip()}\n"])


def save(run: Run, name: str, record: Record) -> None:
    """Write a record into the run's folder of the language model. Raises RunError where the disk refuses."""
    _write(run, f"{FOLDER}/{name}", record.model_dump_json(indent=2) + "\n")


def _write(run: Run, name: str, text: str) -> None:
    try:
        write_atomically(run.path / name, text)
    except OSError as error:
        raise RunError(
            f"{run.path / name} cannot be written: {error.strerror}.",
            remedy="Free some disk space and resume the run.",
        ) from error
