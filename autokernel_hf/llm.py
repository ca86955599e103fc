"""A chat model behind HTTP: how it is asked, what an answer cost, and every way in which asking fails.

One client serves both ways in: Inference Providers with a Hub token, or any OpenAI-compatible server by its URL. What
passes by itself (a rate limit, an outage) is waited for here, within bounds; everything else is told by an exception
that names the cause, so that no failure looks like an answer.
"""

from __future__ import annotations

import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from autokernel_hf.errors import AutokernelError, UsageError
from autokernel_hf.hub_client import transport_errors
from autokernel_hf.llm_answers import (
    Answer,
    Failure,
    Message,
    by_words,
    estimate,
    finished,
    models_url,
    one_line,
    read_answer,
    retry_after,
    words_of,
)

logger = logging.getLogger(__name__)

ROUTER = "https://router.huggingface.co/v1"
KEY_VARIABLE = "AUTOKERNEL_HF_LLM_KEY"
_HUGGING_FACE = ("huggingface.co", "hf.co", "hf.space", "huggingface.cloud")


class LanguageModelError(AutokernelError):
    """Asking is of no use until a person does something: a bad key, no such model, no credit, a wrong address."""


class ContextFullError(AutokernelError):
    """The conversation does not fit the model's context: a shorter one may."""


class UnavailableError(AutokernelError):
    """The server could not be reached, or did not answer, within the patience; it may later."""


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
            except Failure as failure:
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

    def _wait(self, failure: Failure, failures: int, waited: float) -> float:
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
        """One request. Raises Failure."""
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
                return read_answer(self._client.chat_completion(list(messages), **arguments), messages)
        except OfflineModeIsEnabled as error:
            raise Failure(
                "fatal", "HF_HUB_OFFLINE is set", remedy="Unset it, or use --proposer playbook."
            ) from error
        except InferenceTimeoutError as error:
            dialect.stream = True
            raise Failure("passing", f"no answer within {self.patience.timeout_s:.0f} s") from error
        except HfHubHTTPError as error:
            raise self._refusal(error) from error
        except TextGenerationError as error:  # an error that came in place of a piece of a stream
            raise by_words(str(error)) or Failure("passing", one_line(str(error))) from error
        except transport_errors() as error:
            raise Failure(
                "passing", f"it cannot be reached ({one_line(str(error)) or type(error).__name__})"
            ) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            # What the client makes of a body that is not what it should be (a login page, a list, nothing).
            if "api_key" in str(error):
                raise Failure(
                    "fatal", one_line(str(error)), remedy="Set HF_TOKEN or run `hf auth login`."
                ) from error
            raise Failure(
                "passing", f"it sent no chat completion ({type(error).__name__}: {one_line(str(error))})"
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
            raise Failure("passing", "it sent no stream")
        return finished("".join(pieces), finish or "length", None, usage, messages)

    def _refusal(self, error: Any) -> Failure:
        """What an HTTP error means. `error` is huggingface_hub's HfHubHTTPError."""
        status = int(error.response.status_code)
        words = words_of(error)
        known = by_words(words, status)
        if known is not None:
            return known
        if status in (400, 422) and (adapted := self._adapt(words)) is not None:
            return adapted
        told = f"HTTP {status}{': ' + words if words else ''}"
        if status in (401, 403):
            return Failure("fatal", f"its key was refused ({told})", remedy=self._key_remedy())
        if status == 402:
            return Failure(
                "fatal", f"there is no credit left ({told})", remedy="Add credit, or choose another model."
            )
        if status in (404, 410):
            return Failure(
                "fatal",
                f"there is no such model or address ({told})",
                remedy="Check --llm and --base-url: the model may have been withdrawn.",
            )
        if status == 504:
            self._dialect.stream = True
        if status in (408, 409, 425, 429) or status >= 500:
            return Failure("passing", told, retry_after=retry_after(error.response.headers))
        return Failure("fatal", f"the request was refused ({told})", remedy="Check --llm and --base-url.")

    def _adapt(self, words: str) -> Failure | None:
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
        logger.info("%s: %s; asking again in its way.", self.model, one_line(words))
        return Failure("adapt", words)

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
                f"{self.where} cannot be reached ({one_line(str(error)) or type(error).__name__}).",
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


def check_base_url(text: str) -> None:
    """Raises UsageError where `text` is no address of a server."""
    if not re.fullmatch(r"https?://[^\s/]+\S*", text):
        raise UsageError(
            f"--base-url {text} is no address of a server.",
            remedy="Write it with http:// or https://, as in http://127.0.0.1:8000/v1.",
        )


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
