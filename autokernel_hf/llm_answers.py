"""Reading what a chat model's server sent: answers, failures by their words, waits, and price lists.

Servers differ in how they say a thing: one failure comes under several status codes, and an error may come with status
200. What is read here is told in our own terms; what follows from it is `llm.Chat`'s to decide.
"""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Message = dict[str, str]
"""{"role": "system" | "user" | "assistant", "content": text}"""

CHARACTERS_PER_TOKEN = 3  # of source code, rather too few than too many: an estimate shall not be too low


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer.

    Args:
        text: What the model said; empty if it refused or said nothing.
        outcome: `cut_off` if it ended at its token limit or in mid-stream, `refused` if the model or a filter declined.
        prompt_tokens, completion_tokens: As the server counted them, else estimated (`estimated`).
        cost_usd: Where the server tells it.
        retries: Requests that failed before this one.
    """

    text: str
    outcome: Literal["answered", "cut_off", "empty", "refused"]
    prompt_tokens: int
    completion_tokens: int
    estimated: bool = False
    cost_usd: float | None = None
    seconds: float = 0.0
    retries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """US dollars per million tokens."""

    prompt: float
    completion: float

    def of(self, prompt_tokens: int, completion_tokens: int) -> float:
        return (self.prompt * prompt_tokens + self.completion * completion_tokens) / 1e6


class Failure(Exception):  # noqa: N818 - never leaves `llm`
    """Why a request brought no answer; what follows from it is `Chat.ask`'s to decide."""

    def __init__(
        self,
        kind: Literal["passing", "context", "refused", "adapt", "fatal"],
        words: str,
        *,
        remedy: str = "",
        retry_after: float | None = None,
    ) -> None:
        super().__init__(words)
        self.kind = kind
        self.words = words
        self.remedy = remedy
        self.retry_after = retry_after


def estimate(messages: Sequence[Message]) -> int:
    """About how many tokens a conversation has, rather too many than too few."""
    return sum(len(m["content"]) // CHARACTERS_PER_TOKEN + 8 for m in messages)


_REFUSALS = re.compile(
    r"(i['’]m sorry|i am sorry|sorry,|i can(no|['’])t |i cannot|i['’]m (unable|not able)|i am (unable|not able)"
    r"|as an ai\b|i must decline|i won['’]t )",
    re.IGNORECASE,
)
_CONTEXT = re.compile(
    r"context[ _-]?(length|window|size)|maximum context|too many (input )?tokens|(prompt|input|inputs|request) (is|are) too "
    r"(long|large)|tokens? exceed|exceeds? (the )?(model'?s )?(max|context)|`inputs` tokens \+ `max_new_tokens`|larger than "
    r"the maximum",
    re.IGNORECASE,
)
_NO_MODEL = re.compile(
    r"model[^.]{0,80}(not exist|not found|not supported by any provider|no longer|decommissioned|not a chat model)"
    r"|model_not_(found|supported)|unknown model|no such model",
    re.IGNORECASE,
)
_FILTERED = re.compile(r"content[ _](filter|policy|management)|safety (system|filter)|flagged", re.IGNORECASE)
_NO_CREDIT = re.compile(r"insufficient_quota|exceeded your monthly|out of credits?\b", re.IGNORECASE)


def by_words(words: str, status: int = 200) -> Failure | None:
    """A failure that servers report under several status codes, told by its words."""
    if status in (401, 403, 404):
        return None
    if _CONTEXT.search(words) or status == 413:
        return Failure("context", one_line(words) or "HTTP 413")
    if _FILTERED.search(words) and status in (200, 400, 422):
        return Failure("refused", one_line(words))
    if _NO_CREDIT.search(words):
        return Failure(
            "fatal",
            f"there is no credit left ({one_line(words)})",
            remedy="Add credit, or choose another model.",
        )
    if _NO_MODEL.search(words) and status < 500:
        return Failure(
            "fatal",
            f"there is no such model ({one_line(words)})",
            remedy="Check --llm: the model may have been withdrawn.",
        )
    return None


def read_answer(said: Any, messages: Sequence[Message]) -> Answer:
    """An Answer of a ChatCompletionOutput. Raises Failure where a server reports an error with status 200."""
    if not said.choices:
        error = getattr(said, "error", None)
        words = error.get("message", "") if isinstance(error, Mapping) else str(error or "")
        raise by_words(words) or Failure("passing", one_line(words) or "an answer without choices")
    choice = said.choices[0]
    message = choice.message
    refusal = getattr(message, "refusal", None) if message is not None else None
    content = message.content if message is not None else None
    if isinstance(content, list):  # some servers send it in parts
        content = "".join(p.get("text", "") for p in content if isinstance(p, Mapping))
    return finished(str(content or ""), choice.finish_reason, refusal, said.usage, messages)


def finished(text: str, finish: str | None, refusal: Any, usage: Any, messages: Sequence[Message]) -> Answer:
    text = printable(text)
    outcome: Literal["answered", "cut_off", "empty", "refused"] = "answered"
    if (
        refusal
        or finish == "content_filter"
        or (_REFUSALS.match(text.strip()) and "```" not in text and "<<<<<" not in text)
    ):
        outcome = "refused"
    elif finish == "length":
        outcome = "cut_off"
    elif not text.strip():
        outcome = "empty"
    counted = (
        usage is not None
        and isinstance(usage.prompt_tokens, int)
        and isinstance(usage.completion_tokens, int)
    )
    return Answer(
        text=text,
        outcome=outcome,
        prompt_tokens=usage.prompt_tokens if counted else estimate(messages),
        completion_tokens=usage.completion_tokens if counted else len(text) // CHARACTERS_PER_TOKEN,
        estimated=not counted,
        cost_usd=_cost(usage),
    )


def _cost(usage: Any) -> float | None:
    for name in ("cost", "estimated_cost", "total_cost"):
        value = getattr(usage, name, None)
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
            return float(value)
    return None


def words_of(error: Any) -> str:
    """What a server said about an error, without the client's own wording."""
    text = error.server_message or ""
    if not text:
        try:
            text = error.response.text
        except RuntimeError:  # a stream that was not read
            text = ""
        if "<html" in text.lower():
            text = re.sub(r"<[^>]+>", " ", text)
    # {'message': '...', 'type': ...}: the client prints the object as it is.
    inner = re.search(r"""["']message["']\s*:\s*(["'])(.*?)\1\s*[,}]""", text, re.DOTALL)
    code = re.search(r"""["']code["']\s*:\s*["'](\w+)["']""", text)
    return one_line((inner[2] if inner else text) + (f" ({code[1]})" if code else ""))


def printable(text: str) -> str:
    """Text that any file, commit message and terminal takes: no control characters, no halves of surrogate pairs."""
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "", text.encode("utf-8", "replace").decode("utf-8"))


def one_line(text: str, most: int = 300) -> str:
    """Text as one line of bounded length, without a full stop."""
    flat = " ".join(printable(text).split()).rstrip(".")
    return flat if len(flat) <= most else flat[: most - 3] + "..."


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait: Retry-After (seconds or a date), retry-after-ms, RateLimit's t=."""
    milliseconds = headers.get("retry-after-ms")
    if milliseconds is not None and re.fullmatch(r"\d+(\.\d+)?", milliseconds.strip()):
        return float(milliseconds) / 1000
    text = (headers.get("retry-after") or "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    if text:
        try:
            return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
        except (TypeError, ValueError):
            return None
    limits = re.search(r"\bt=(\d+)", headers.get("ratelimit") or "")
    return float(limits[1]) if limits else None


def models_url(base_url: str) -> str:
    """Where an OpenAI-compatible server lists its models."""
    plain = base_url.rstrip("/").removesuffix("/chat/completions").rstrip("/")
    return f"{plain}/models" if plain.endswith("/v1") else f"{plain}/v1/models"


def prices_in(document: Any, model: str) -> Prices | None:
    """The price of a model in a server's list.

    Two forms are known: `pricing` with `input` and `output` in dollars per million tokens, one for each of a model's
    `providers`; and `pricing` with `prompt` and `completion` in dollars per token, as text.
    """
    entries = document.get("data") if isinstance(document, Mapping) else None
    name, _, provider = model.partition(":")
    found: list[Prices] = []
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, Mapping) or entry.get("id") not in (model, name):
            continue
        offers = [p for p in entry.get("providers") or () if isinstance(p, Mapping)]
        named = [p for p in offers if p.get("provider") == provider]
        for offer in (named or offers) or [entry]:
            pricing = offer.get("pricing")
            if not isinstance(pricing, Mapping):
                continue
            for keys, factor in ((("input", "output"), 1.0), (("prompt", "completion"), 1e6)):
                try:
                    found.append(
                        Prices(
                            prompt=float(pricing[keys[0]]) * factor,
                            completion=float(pricing[keys[1]]) * factor,
                        )
                    )
                except (KeyError, TypeError, ValueError):
                    continue
    if not found:
        return None
    return Prices(prompt=max(p.prompt for p in found), completion=max(p.completion for p in found))
