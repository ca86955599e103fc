"""A chat model behind HTTP: how it is asked, what an answer cost, and every way in which asking fails.

One client serves both ways in: Inference Providers with a Hub token, or any OpenAI-compatible server by its URL. What
passes by itself (a rate limit, an outage) is waited for here, within bounds; everything else is told by an exception
that names the cause, so that no failure looks like an answer.
"""

from __future__ import annotations

import email.utils
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import urlsplit

from autokernel_hf.errors import AutokernelError, UsageError
from autokernel_hf.hub_client import transport_errors

logger = logging.getLogger(__name__)

Message = dict[str, str]
"""{"role": "system" | "user" | "assistant", "content": text}"""

ROUTER = "https://router.huggingface.co/v1"
KEY_VARIABLE = "AUTOKERNEL_HF_LLM_KEY"
CHARACTERS_PER_TOKEN = 3  # of source code, rather too few than too many: an estimate shall not be too low
_HUGGING_FACE = ("huggingface.co", "hf.co", "hf.space", "huggingface.cloud")


class LanguageModelError(AutokernelError):
    """Asking is of no use until a person does something: a bad key, no such model, no credit, a wrong address."""


class ContextFullError(AutokernelError):
    """The conversation does not fit the model's context: a shorter one may."""


class UnavailableError(AutokernelError):
    """The server could not be reached, or did not answer, within the patience; it may later."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long one question may take.

    Args:
        attempts: Requests at most.
        wait_s: Seconds of waiting between them, all together; a server that asks for more is given up.
        timeout_s: Seconds until a request that brings nothing is given up.
        first_s: The first wait where the server names none; each later one is twice as long.
    """

    attempts: int = 5
    wait_s: float = 300.0
    timeout_s: float = 600.0
    first_s: float = 2.0


@dataclass(slots=True)
class _Dialect:
    """What a server was found to want; kept for all later questions."""

    stream: bool = False  # a gateway cut a long answer off: have it in pieces
    no_stream: bool = False  # it was asked to, and sent none
    no_stream_options: bool = False  # it cannot be asked to count the tokens of a stream
    no_temperature: bool = False
    completion_limit: bool = False  # max_completion_tokens instead of max_tokens
    most_tokens: int | None = None  # the largest answer that it allows


class Chat:
    """A chat model.

    Args:
        model: Id of a model of Inference Providers (`org/name`, or `org/name:provider`), or the name that the server at
            `base_url` knows.
        base_url: An OpenAI-compatible server, as `http://127.0.0.1:8000/v1`.
        sleep: Waits; tests pass their own.

    Raises:
        UsageError: `base_url` is no URL.
        LanguageModelError: Inference Providers without a Hub token.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        patience: Patience | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        from huggingface_hub import InferenceClient, get_token

        if base_url is not None:
            check_base_url(base_url)
        if base_url is None and get_token() is None:
            raise LanguageModelError(
                "Inference Providers need a Hugging Face token, and there is none.",
                remedy="Set HF_TOKEN or run `hf auth login`, or name a server of your own with --base-url.",
            )
        self.model = model
        self.base_url = base_url
        self.patience = patience or Patience()
        self._sleep = sleep
        self._dialect = _Dialect()
        if base_url is None:
            self._client = InferenceClient(timeout=self.patience.timeout_s)
        else:
            # Without a key the client would send the user's Hub token, to whatever server this is.
            key = _key_for(base_url) or "none"
            self._client = InferenceClient(base_url=base_url, api_key=key, timeout=self.patience.timeout_s)

    @property
    def where(self) -> str:
        return self.base_url or "Inference Providers"

    # Asking -------------------------------------------------------------------------------------------------------

    def ask(self, messages: Sequence[Message], *, max_tokens: int, temperature: float) -> Answer:
        """Put one question, again if need be.

        Args:
            max_tokens: The longest answer.

        Raises:
            LanguageModelError, ContextFullError, UnavailableError: See there.
        """
        started = time.monotonic()
        waited = 0.0
        retries = 0
        adapted = 0
        while True:
            try:
                answer = self._request(messages, max_tokens, temperature)
            except _Failure as failure:
                if failure.kind == "adapt" and adapted < 6:
                    adapted += 1
                    continue
                if failure.kind == "refused":
                    answer = Answer(
                        text="",
                        outcome="refused",
                        prompt_tokens=estimate(messages),
                        completion_tokens=0,
                        estimated=True,
                    )
                elif failure.kind == "context":
                    raise ContextFullError(
                        f"The question does not fit the context of {self.model}: {failure.words}",
                        remedy="Choose a model with a longer context.",
                    ) from failure
                elif failure.kind != "passing":
                    raise LanguageModelError(
                        f"{self.model} at {self.where} cannot be asked: {failure.words}",
                        remedy=failure.remedy,
                    ) from failure
                else:
                    retries += 1
                    wait = self._wait(failure, retries, waited)
                    logger.warning("%s: %s; asking again in %.0f s.", self.model, failure.words, wait)
                    self._sleep(wait)
                    waited += wait
                    continue
            return replace(answer, seconds=time.monotonic() - started, retries=retries)

    def _wait(self, failure: _Failure, failures: int, waited: float) -> float:
        """Seconds until the next request. Raises UnavailableError where patience is at an end."""
        patience = self.patience
        told = failure.retry_after
        wait = patience.first_s * 2 ** (failures - 1) * random.uniform(0.75, 1.25) if told is None else told
        if failures >= patience.attempts or waited + wait > patience.wait_s:
            asked = (
                f" It asks to wait {told:.0f} s."
                if told is not None and waited + told > patience.wait_s
                else ""
            )
            raise UnavailableError(
                f"{self.model} at {self.where} does not answer after {failures} requests: {failure.words}.{asked}",
                remedy="Check the server, or resume the run later.",
            ) from failure
        return wait

    def _request(self, messages: Sequence[Message], max_tokens: int, temperature: float) -> Answer:
        """One request. Raises _Failure."""
        from huggingface_hub.errors import (
            HfHubHTTPError,
            InferenceTimeoutError,
            OfflineModeIsEnabled,
            TextGenerationError,
        )

        dialect = self._dialect
        limit = min(max_tokens, dialect.most_tokens or max_tokens)
        arguments: dict[str, Any] = {"model": self.model}
        if dialect.completion_limit:
            arguments["extra_body"] = {"max_completion_tokens": limit}
        else:
            arguments["max_tokens"] = limit
        if not dialect.no_temperature:
            arguments["temperature"] = temperature
        try:
            with self._offline_but_for_own():
                if dialect.stream and not dialect.no_stream:
                    return self._streamed(messages, arguments)
                return _answer(self._client.chat_completion(list(messages), **arguments), messages)
        except OfflineModeIsEnabled as error:
            raise _Failure(
                "fatal", "HF_HUB_OFFLINE is set", remedy="Unset it, or use --proposer playbook."
            ) from error
        except InferenceTimeoutError as error:
            dialect.stream = True
            raise _Failure("passing", f"no answer within {self.patience.timeout_s:.0f} s") from error
        except HfHubHTTPError as error:
            raise self._refusal(error) from error
        except TextGenerationError as error:  # an error that came in place of a piece of a stream
            raise _by_words(str(error)) or _Failure("passing", _line(str(error))) from error
        except transport_errors() as error:
            raise _Failure(
                "passing", f"it cannot be reached ({_line(str(error)) or type(error).__name__})"
            ) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            # What the client makes of a body that is not what it should be (a login page, a list, nothing).
            if "api_key" in str(error):
                raise _Failure(
                    "fatal", _line(str(error)), remedy="Set HF_TOKEN or run `hf auth login`."
                ) from error
            raise _Failure(
                "passing", f"it sent no chat completion ({type(error).__name__}: {_line(str(error))})"
            ) from error

    def _streamed(self, messages: Sequence[Message], arguments: dict[str, Any]) -> Answer:
        """The same answer in pieces, so that no gateway waits in silence."""
        pieces: list[str] = []
        finish: str | None = None
        usage: Any = None
        chunk = None
        if not self._dialect.no_stream_options:
            arguments = {**arguments, "stream_options": {"include_usage": True}}
        for chunk in self._client.chat_completion(list(messages), stream=True, **arguments):
            usage = chunk.usage or usage
            for choice in chunk.choices or ():
                if choice.delta is not None and choice.delta.content:
                    pieces.append(choice.delta.content)
                finish = choice.finish_reason or finish
        if chunk is None:
            self._dialect.no_stream = True
            raise _Failure("passing", "it sent no stream")
        return _finished("".join(pieces), finish or "length", None, usage, messages)

    def _refusal(self, error: Any) -> _Failure:
        """What an HTTP error means. `error` is huggingface_hub's HfHubHTTPError."""
        status = int(error.response.status_code)
        words = _words_of(error)
        known = _by_words(words, status)
        if known is not None:
            return known
        if status in (400, 422) and (adapted := self._adapt(words)) is not None:
            return adapted
        told = f"HTTP {status}{': ' + words if words else ''}"
        if status in (401, 403):
            return _Failure("fatal", f"its key was refused ({told})", remedy=self._key_remedy())
        if status == 402:
            return _Failure(
                "fatal", f"there is no credit left ({told})", remedy="Add credit, or choose another model."
            )
        if status in (404, 410):
            return _Failure(
                "fatal",
                f"there is no such model or address ({told})",
                remedy="Check --llm and --base-url: the model may have been withdrawn.",
            )
        if status == 504:
            self._dialect.stream = True
        if status in (408, 409, 425, 429) or status >= 500:
            return _Failure("passing", told, retry_after=retry_after(error.response.headers))
        return _Failure("fatal", f"the request was refused ({told})", remedy="Check --llm and --base-url.")

    def _adapt(self, words: str) -> _Failure | None:
        """A server that names a parameter it does not take is asked again without it."""
        dialect, text = self._dialect, words.lower()
        if "stream_options" in text and not dialect.no_stream_options:
            dialect.no_stream_options = True
        elif "max_completion_tokens" in text and not dialect.completion_limit:
            dialect.completion_limit = True
        elif "temperature" in text and not dialect.no_temperature:
            dialect.no_temperature = True
        elif re.search(r"max_(completion_|new_)?tokens", text) and (dialect.most_tokens or 1 << 20) > 512:
            dialect.most_tokens = (dialect.most_tokens or 8192) // 2
        else:
            return None
        logger.info("%s: %s; asking again in its way.", self.model, _line(words))
        return _Failure("adapt", words)

    def _key_remedy(self) -> str:
        if self.base_url is None:
            return "Use a Hub token that may call Inference Providers (HF_TOKEN, or `hf auth login`)."
        return f"Set {KEY_VARIABLE} to a key of that server."

    @contextmanager
    def _offline_but_for_own(self) -> Iterator[None]:
        """HF_HUB_OFFLINE is about the Hub: a server that the user named and that is not Hugging Face's is asked all the same.

        huggingface_hub's session refuses every address while the flag is up, so it is down for the request.
        """
        from huggingface_hub import constants

        offline = constants.HF_HUB_OFFLINE
        if self.base_url is not None and not _is_hugging_faces(self.base_url):
            constants.HF_HUB_OFFLINE = False
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = offline

    # Before a run -------------------------------------------------------------------------------------------------------

    def catalogue(self) -> Any:
        """The server's list of models, a JSON document; None where it has none.

        Raises:
            LanguageModelError: The server cannot be reached, or refuses the key.
        """
        from huggingface_hub.utils import build_hf_headers, get_session

        url = models_url(self.base_url or ROUTER)
        if self.base_url is None:
            headers = build_hf_headers()
        else:
            key = _key_for(self.base_url)
            headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            with self._offline_but_for_own():
                response = get_session().get(url, headers=headers, timeout=min(30.0, self.patience.timeout_s))
        except transport_errors() as error:
            raise LanguageModelError(
                f"{self.where} cannot be reached ({_line(str(error)) or type(error).__name__}).",
                remedy="Check --base-url and that the server runs, or use --proposer playbook.",
            ) from error
        if response.status_code in (401, 403):
            raise LanguageModelError(
                f"{self.where} refuses its key (HTTP {response.status_code}).", remedy=self._key_remedy()
            )
        try:
            return response.json() if response.status_code == 200 else None
        except ValueError:
            return None


class _Failure(Exception):  # noqa: N818 - never leaves this module
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


def check_base_url(text: str) -> None:
    """Raises UsageError where `text` is no address of a server."""
    if not re.fullmatch(r"https?://[^\s/]+\S*", text):
        raise UsageError(
            f"--base-url {text} is no address of a server.",
            remedy="Write it with http:// or https://, as in http://127.0.0.1:8000/v1.",
        )


# --- reading what came back ---------------------------------------------------------------------------------------

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


def _by_words(words: str, status: int = 200) -> _Failure | None:
    """A failure that servers report under several status codes, told by its words."""
    if status in (401, 403, 404):
        return None
    if _CONTEXT.search(words) or status == 413:
        return _Failure("context", _line(words) or "HTTP 413")
    if _FILTERED.search(words) and status in (200, 400, 422):
        return _Failure("refused", _line(words))
    if _NO_CREDIT.search(words):
        return _Failure(
            "fatal",
            f"there is no credit left ({_line(words)})",
            remedy="Add credit, or choose another model.",
        )
    if _NO_MODEL.search(words) and status < 500:
        return _Failure(
            "fatal",
            f"there is no such model ({_line(words)})",
            remedy="Check --llm: the model may have been withdrawn.",
        )
    return None


def _answer(said: Any, messages: Sequence[Message]) -> Answer:
    """An Answer of a ChatCompletionOutput. Raises _Failure where a server reports an error with status 200."""
    if not said.choices:
        error = getattr(said, "error", None)
        words = error.get("message", "") if isinstance(error, Mapping) else str(error or "")
        raise _by_words(words) or _Failure("passing", _line(words) or "an answer without choices")
    choice = said.choices[0]
    message = choice.message
    refusal = getattr(message, "refusal", None) if message is not None else None
    content = message.content if message is not None else None
    if isinstance(content, list):  # some servers send it in parts
        content = "".join(p.get("text", "") for p in content if isinstance(p, Mapping))
    return _finished(str(content or ""), choice.finish_reason, refusal, said.usage, messages)


def _finished(text: str, finish: str | None, refusal: Any, usage: Any, messages: Sequence[Message]) -> Answer:
    text = _printable(text)
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


def _words_of(error: Any) -> str:
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
    return _line((inner[2] if inner else text) + (f" ({code[1]})" if code else ""))


def _printable(text: str) -> str:
    """Text that any file, commit message and terminal takes: no control characters, no halves of surrogate pairs."""
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "", text.encode("utf-8", "replace").decode("utf-8"))


def _line(text: str, most: int = 300) -> str:
    """Text as one line of bounded length, without a full stop."""
    flat = " ".join(_printable(text).split()).rstrip(".")
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


def _key_for(base_url: str) -> str | None:
    """The key for a server: its own variable, the Hub token for Hugging Face's hosts, OpenAI's for OpenAI's."""
    own = os.environ.get(KEY_VARIABLE)
    if own:
        return own
    if _is_hugging_faces(base_url):
        from huggingface_hub import get_token

        token: str | None = get_token()
        return token
    if urlsplit(base_url).hostname == "api.openai.com":
        return os.environ.get("OPENAI_API_KEY")
    return None


def _is_hugging_faces(base_url: str) -> bool:
    host = (urlsplit(base_url).hostname or "").lower()
    return any(host == h or host.endswith(f".{h}") for h in _HUGGING_FACE)
