"""The language model as a proposer: rounds of candidates, repairs, reflexions, and the playbook on what was kept.

    round: several candidates at rising temperature -> judged one by one -> repairs of those that failed -> one line on
    each that says why -> where a new structure was kept, the playbook searches its constants -> next round

All state is in the run folder: the ledger holds what was asked and spent (`Asked`), how rounds ended (`Round`) and what was
learned (`Reflected`); `llm/` holds the conversations and the candidates that wait for the judge. A round that brings
nothing is entered too; after a few of them the playbook goes on alone, and the target's outcome says so.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autokernel_hf import contract, llm_prompts, tunables
from autokernel_hf.agent import Context, NothingLeft, Playbook, Proposer
from autokernel_hf.errors import CandidateError
from autokernel_hf.kernels import kernel_type as find_type
from autokernel_hf.ledger import Reflected, Round
from autokernel_hf.llm import Chat, ContextFullError, LanguageModelError, UnavailableError
from autokernel_hf.llm_account import FOLDER, Account, BudgetSpentError, chat_of, save, spent_by
from autokernel_hf.llm_answers import Answer, Message
from autokernel_hf.llm_edits import Reading, normalised, read, structure
from autokernel_hf.llm_prompts import LEVELS, Shown
from autokernel_hf.records import Candidate, Experiment, Proposal, Record
from autokernel_hf.runs import Run

logger = logging.getLogger(__name__)

_REPAIRABLE = (
    "compile_error",
    "incorrect",
    "nondeterministic",
    "crashed",
    "timeout",
    "out_of_memory",
    "rejected",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How the model is asked.

    Args:
        temperatures: Of a round's candidates, one each.
        repairs: Of one candidate at most, one after the other.
        playbook_turns: Experiments that the playbook gets on a structure of the model's that was kept.
        fruitless_rounds: Rounds in a row without a usable proposal, after which the model is asked no more.
        answer_tokens: The longest answer; one that is cut off may be twice as long when it is asked for again.
        reflect_tokens: The longest answer that says why attempts came out as they did.
    """

    temperatures: tuple[float, ...] = (0.3, 0.7, 1.0)
    repairs: int = 2
    playbook_turns: int = 6
    fruitless_rounds: int = 3
    answer_tokens: int = 8192
    reflect_tokens: int = 1024


class Pending(Record):
    """Proposals of a round that wait for the judge."""

    proposals: tuple[Proposal, ...] = ()


def proposer_of(run: Run) -> LanguageModel:
    """The proposer that a run's settings ask for.

    Raises:
        UsageError: No model is named, or the address is none.
        LanguageModelError: Inference Providers without a token.
    """
    return LanguageModel(run, chat_of(run))


# --- the proposer -------------------------------------------------------------------------------------------------


class LanguageModel:
    """Asks a chat model for candidates.

    Args:
        run: Whose settings bound what may be spent, and whose folder is the memory.
        playbook: Searches the tunables of what the model wrote, and goes on alone where the model is asked no more.
    """

    name = "llm"

    def __init__(
        self, run: Run, chat: Chat, *, rules: Rules | None = None, playbook: Proposer | None = None
    ) -> None:
        self.run = run
        self.chat = chat
        self.rules = rules or Rules()
        self._playbook = playbook or Playbook()
        self._fruitless = 0
        self._over: str | None = None  # why the model is asked no more for this target
        self._level = 0
        self._answer_tokens = self.rules.answer_tokens
        self._account = Account(run, chat)
        self._handed: Counter[str] = Counter()
        self._sources: dict[str, str] = {}
        self._forms: dict[str, str] = {}

    def propose(self, context: Context, n: int) -> list[Proposal]:
        """At most n proposals that were not tried before.

        Raises:
            LanguageModelError: The model has never answered in this run, and cannot be asked as things are.
            NothingLeft: The model is asked no more, and the playbook has nothing left either.
        """
        tried = {e.digest for e in context.attempts}
        tried |= {self._digest(context, p) for p in context.pending}
        waiting = [p for p in self._pending(context) if self._digest(context, p) not in tried]
        # A proposal that was handed out and never entered is not handed out for ever.
        waiting = [p for p in waiting if self._handed[self._digest(context, p)] < 2]
        if not waiting and self._over is None and context.pending:
            return []  # repairs and reasons are asked for when the whole round is judged
        if not waiting and self._over is None:
            try:
                waiting = self._turn(context, n)
            except BudgetSpentError as error:
                self._end(context, str(error))
            except LanguageModelError as error:
                if not spent_by(self.run).answers:
                    raise
                self._end(context, error.message)
        if not waiting:
            waiting = self._of_playbook(context, n)
        if not waiting:
            raise NothingLeft("nothing left to try")
        for proposal in waiting[:n]:
            self._handed[self._digest(context, proposal)] += 1
        return waiting[:n]

    def _turn(self, context: Context, n: int) -> list[Proposal]:
        """What comes next: repairs, reflexions, the playbook's turn, or a new round."""
        events = [
            e for e in self.run.events() if isinstance(e, Reflected) and e.target == context.target.name
        ]
        reflected = {e.experiment for e in events}
        own = [e for e in context.attempts if "llm" in e.tag.split(",") and e.experiment not in reflected]
        repairs = self._repairs(context, own)
        if repairs:
            return repairs
        if own:
            self._reflect(context, own)
        if self._playbook_has_its_turn(context) and (found := self._of_playbook(context, n)):
            return found
        while self._over is None:
            proposals, outage = self._round(context)
            if proposals:
                self._fruitless = 0
                return proposals
            self._fruitless += 1
            if self._fruitless >= self.rules.fruitless_rounds:
                self._end(context, f"{self.chat.model} made no usable proposal in {self._fruitless} rounds")
            elif outage and (found := self._of_playbook(context, 1)):
                logger.warning("The playbook makes one experiment until the model is asked again.")
                return found
        return []

    def _of_playbook(self, context: Context, n: int) -> list[Proposal]:
        try:
            return self._playbook.propose(context, n)
        except NothingLeft:
            return []

    def _end(self, context: Context, reason: str) -> None:
        """From here on this target is the playbook's."""
        self._over = reason
        logger.warning("%s: %s. The playbook goes on alone.", context.target.name, reason.rstrip("."))
        self.run.append(
            Round(
                target=context.target.name, kind="propose", usable=0, at=time.time(),
                note=f"the language model was asked no more: {reason.rstrip('.')}",
            )
        )  # fmt: skip

    # Rounds -------------------------------------------------------------------------------------------------------

    def _round(self, context: Context) -> tuple[list[Proposal], bool]:
        """A new round: several candidates, and whether an outage ended it."""
        number = sum(isinstance(e, Round) and e.target == context.target.name for e in self.run.events())
        proposals: list[Proposal] = []
        unusable: list[str] = []
        outage = False
        ended: BudgetSpentError | LanguageModelError | None = None
        temperatures = self.rules.temperatures[: max(1, context.remaining)]
        for index, temperature in enumerate(temperatures):
            proposed = [p.rationale for p in proposals]

            def build(level: int, sample: int = number + index, said: Sequence[str] = tuple(proposed)) -> str:
                return self._prompt(context, level, sample, said)

            try:
                reading = self._candidate(context, "propose", build, context.incumbent.source, temperature)
            except UnavailableError as error:
                self._fatal_if_first(error)
                unusable.append(error.message)
                outage = True
                break
            except ContextFullError as error:
                self._fatal_if_first(error)
                unusable.append(error.message)
                break
            except (BudgetSpentError, LanguageModelError) as error:
                # What was proposed before has been paid for; the next question meets the same end.
                ended = error
                break
            self._take(context, reading, proposals, unusable, tags=("llm",))
        if proposals or unusable:
            self._close(context, "propose", proposals, unusable)
        if ended is not None and not proposals:
            raise ended
        return proposals, outage

    def _repairs(self, context: Context, own: Sequence[Experiment]) -> list[Proposal]:
        """New versions of candidates that failed and were not repaired yet."""
        repaired = {tag for e in context.attempts for tag in e.tag.split(",") if tag.startswith("repair-of-")}
        broken = [
            e
            for e in own
            if e.evaluation.status in _REPAIRABLE
            and f"repair-of-{e.experiment}" not in repaired
            and _repairs_before(e, context.attempts) < self.rules.repairs
        ][: max(0, context.remaining)]
        if not broken:
            return []
        proposals: list[Proposal] = []
        unusable: list[str] = []
        for attempt in broken:
            source = self._source(attempt)
            failed = llm_prompts.shown(attempt, None, words=3000)

            def build(level: int, failed: Shown = failed, source: str = source) -> str:
                del level  # there is nothing in it to leave out
                return llm_prompts.repair(failed, source)

            try:
                reading = self._candidate(context, "repair", build, source, 0.2)
            except (UnavailableError, ContextFullError) as error:
                unusable.append(error.message)
                continue
            except BudgetSpentError as error:
                unusable.append(str(error))
                break
            tags = ("llm", "repair", f"repair-of-{attempt.experiment}")
            self._take(context, reading, proposals, unusable, tags=tags)
        self._close(context, "repair", proposals, unusable)
        return proposals

    def _take(
        self,
        context: Context,
        reading: Reading,
        proposals: list[Proposal],
        unusable: list[str],
        *,
        tags: tuple[str, ...],
    ) -> None:
        """Make a proposal of an answer, unless it is none or was tried before."""
        if reading.source is None:
            unusable.append(f"{reading.fault}: {reading.words}")
            return
        backend = context.incumbent.backend
        form = normalised(reading.source, backend)
        for attempt in context.attempts:
            if attempt.backend == backend and self._form(attempt) == form:
                unusable.append(
                    f"repeats #{attempt.experiment} ({attempt.decision}, {attempt.evaluation.status})"
                )
                return
        if any(normalised(p.source, backend) == form for p in proposals):
            unusable.append("repeats another answer of this round")
            return
        proposals.append(
            Proposal(
                source=reading.source,
                rationale=reading.hypothesis or "proposed by the language model",
                tags=tags,
                tunables=tunables.values(reading.source),
            )
        )

    def _close(self, context: Context, kind: str, proposals: list[Proposal], unusable: list[str]) -> None:
        """Enter a round, its proposals before it: a crash in between loses nothing."""
        save(self.run, f"pending-{context.target.name}.json", Pending(proposals=tuple(proposals)))
        self.run.append(
            Round(
                target=context.target.name,
                kind="repair" if kind == "repair" else "propose",
                usable=len(proposals),
                unusable=tuple(unusable),
                at=time.time(),
            )
        )
        for words in unusable:
            logger.warning(
                "%s: an answer of %s was not used: %s", context.target.name, self.chat.model, words
            )

    def _pending(self, context: Context) -> list[Proposal]:
        path = self.run.path / FOLDER / f"pending-{context.target.name}.json"
        return list(Pending.load(path).proposals) if path.exists() else []

    def _playbook_has_its_turn(self, context: Context) -> bool:
        """Whether the last thing kept of the model's has a new structure that the playbook has not searched enough."""
        kept = [i for i, e in enumerate(context.attempts) if e.decision == "keep"]
        own = [i for i in kept if "llm" in context.attempts[i].tag.split(",")]
        if not own:
            return False
        last = own[-1]
        turns = sum("llm" not in e.tag.split(",") for e in context.attempts[last + 1 :])
        if turns >= self.rules.playbook_turns:
            return False
        before = [i for i in kept if i < last]
        if not before:
            return True
        old, new = context.attempts[before[-1]], context.attempts[last]
        return old.backend != new.backend or structure(self._source(old), old.backend) != structure(
            self._source(new), new.backend
        )

    # Reflexion ----------------------------------------------------------------------------------------------------

    def _reflect(self, context: Context, own: Sequence[Experiment]) -> None:
        """Enter what was expected, what happened, and the model's line on why, for each attempt."""
        incumbent = context.incumbent.source
        shown = [
            llm_prompts.shown(e, context.scores.get(e.experiment), source=self._source(e), against=incumbent)
            for e in own
        ]
        target = context.target
        prompt = llm_prompts.reflect(target.kernel_type, context.incumbent.backend, shown)
        lines: dict[int, str] = {}
        try:
            answer = self._account.ask(
                "reflect", target.name, [{"role": "user", "content": prompt}], self.rules.reflect_tokens, 0.2
            )
            lines = reasons_in(answer.text, [e.experiment for e in own])
            if not lines:
                logger.warning("%s gave no reason for its attempts; what happened is kept.", self.chat.model)
        except (UnavailableError, ContextFullError, LanguageModelError, BudgetSpentError) as error:
            logger.warning("No reasons were asked for: %s", error)
        for attempt, told in zip(own, shown, strict=True):
            self.run.append(
                Reflected(
                    target=target.name,
                    experiment=attempt.experiment,
                    expected=attempt.description,
                    happened=told.words,
                    why=lines.get(attempt.experiment, ""),
                    at=time.time(),
                )
            )

    # Asking -------------------------------------------------------------------------------------------------------

    def _prompt(self, context: Context, level: int, sample: int, proposed: Sequence[str]) -> str:
        attempts, scores = context.attempts, context.scores
        right = [(s, e) for e in attempts if (s := scores.get(e.experiment)) is not None]
        best = max(right, key=lambda pair: pair[0], default=None)
        slow = min(
            (p for p in right if best is None or p[1] is not best[1]), key=lambda pair: pair[0], default=None
        )
        failed = next((e for e in reversed(attempts) if e.evaluation.status != "passed"), None)
        worst = slow[1] if slow else failed
        incumbent = context.incumbent.source

        def show(attempt: Experiment) -> Shown:
            return llm_prompts.shown(
                attempt,
                scores.get(attempt.experiment),
                words=800,
                source=self._source(attempt),
                against=incumbent,
            )

        return llm_prompts.propose(
            context,
            LEVELS[level],
            best=show(best[1]) if best else None,
            worst=show(worst) if worst else None,
            attempts=[llm_prompts.shown(e, scores.get(e.experiment)) for e in attempts],
            reflexions=[
                e for e in self.run.events() if isinstance(e, Reflected) and e.target == context.target.name
            ],
            proposed=proposed,
            sample=sample,
        )

    def _candidate(
        self, context: Context, purpose: str, build: Callable[[int], str], parent: str, temperature: float
    ) -> Reading:
        """Ask for one candidate, and once more where the answer cannot be used."""
        target, backend = context.target.name, context.incumbent.backend
        system = llm_prompts.system(context.target.kernel_type, backend)
        while True:
            messages: list[Message] = [
                {"role": "system", "content": system},
                {"role": "user", "content": build(self._level)},
            ]
            try:
                note = LEVELS[self._level].said if self._level else ""
                answer = self._account.ask(
                    purpose, target, messages, self._answer_tokens, temperature, note=note
                )
                break
            except ContextFullError:
                if self._level + 1 >= len(LEVELS):
                    raise
                self._level += 1
                self._answer_tokens = max(1024, self._answer_tokens // 2)
                logger.warning(
                    "The context of %s is full: from here on it is asked %s, for at most %d tokens.",
                    self.chat.model, LEVELS[self._level].said, self._answer_tokens,
                )  # fmt: skip
        reading = self._read(context, answer, parent)
        if reading.fault in (None, "refused"):
            return reading
        cut_off = reading.fault == "cut_off"
        said = answer.text if len(answer.text) < 6000 and not cut_off else answer.text[:500] + "\n..."
        messages += [
            {"role": "assistant", "content": said.strip() or "..."},
            {"role": "user", "content": llm_prompts.again(str(reading.fault), reading.words)},
        ]
        limit = self._answer_tokens * (2 if cut_off else 1)
        try:
            answer = self._account.ask("again", target, messages, limit, temperature)
        except (ContextFullError, BudgetSpentError):
            return reading
        second = self._read(context, answer, parent)
        if cut_off and second.fault != "cut_off" and answer.completion_tokens > self._answer_tokens:
            self._answer_tokens = limit  # a model that thinks long needs it every time
        return replace(second, hypothesis=second.hypothesis or reading.hypothesis)

    def _read(self, context: Context, answer: Answer, parent: str) -> Reading:
        """The candidate in an answer, held against the contract before any judge sees it."""
        backend, kind = context.incumbent.backend, context.target.kernel_type
        if answer.outcome == "refused":
            return Reading(fault="refused", words=f"The model refused: {' '.join(answer.text.split())[:200]}")
        reading = read(answer.text, parent=parent, backend=backend, cut_off=answer.outcome == "cut_off")
        if reading.source is None:
            return reading
        try:
            contract.check(
                Candidate(kernel_type=kind, backend=backend, source=reading.source), find_type(kind)
            )
            tunables.parse(reading.source)
        except CandidateError as error:
            return replace(reading, source=None, fault="contract", words=str(error))
        return reading

    # Helpers ------------------------------------------------------------------------------------------------------

    def _fatal_if_first(self, error: UnavailableError | ContextFullError) -> None:
        """A model that has never answered is more likely the wrong one than one that is out for a while."""
        if not spent_by(self.run).answers:
            raise LanguageModelError(error.message, remedy=error.remedy) from error

    def _source(self, attempt: Experiment) -> str:
        if attempt.digest not in self._sources:
            self._sources[attempt.digest] = self.run.source(attempt).source
        return self._sources[attempt.digest]

    def _form(self, attempt: Experiment) -> str:
        if attempt.digest not in self._forms:
            self._forms[attempt.digest] = normalised(self._source(attempt), attempt.backend)
        return self._forms[attempt.digest]

    @staticmethod
    def _digest(context: Context, proposal: Proposal) -> str:
        return Candidate(
            kernel_type=context.target.kernel_type, backend=context.incumbent.backend, source=proposal.source
        ).digest


def reasons_in(text: str, experiments: Sequence[int]) -> dict[int, str]:
    """The lines `#number: why` of an answer, for the experiments that were asked about; one alone needs no number."""
    text = re.sub(r"```.*?(```|\Z)", "", re.sub(r"(?s)\A.*</think(?:ing)?>", "", text), flags=re.DOTALL)
    found: dict[int, str] = {}
    for line in text.splitlines():
        match = re.match(r"[\s*_-]*#?(\d+)[*_ ]*[:.)-][*_]*\s*(\S.*)", line)
        if match and int(match[1]) in experiments:
            found.setdefault(int(match[1]), " ".join(match[2].split())[:300])
    if not found and len(experiments) == 1:
        prose = next((line.strip(" #*_-") for line in text.splitlines() if re.search(r"\w{3}", line)), "")
        if prose and not prose.startswith(("<", "=", ">")):
            found[experiments[0]] = " ".join(prose.split())[:300]
    return found


def _repairs_before(attempt: Experiment, attempts: Sequence[Experiment]) -> int:
    """How many repairs led to an attempt."""
    numbers = {e.experiment: e for e in attempts}
    count = 0
    current: Experiment | None = attempt
    while current is not None:
        of = next((t for t in current.tag.split(",") if t.startswith("repair-of-")), None)
        if of is None:
            break
        count += 1
        current = numbers.get(int(of.removeprefix("repair-of-")))
    return count
