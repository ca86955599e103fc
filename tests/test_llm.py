"""The chat client: every way in which a server can fail, through the real InferenceClient, and what is made of it."""

from __future__ import annotations

import email.utils
import socket
import time

import pytest

from autokernel_hf.errors import UsageError
from autokernel_hf.llm import (
    KEY_VARIABLE,
    Chat,
    ContextFullError,
    LanguageModelError,
    Patience,
    UnavailableError,
)
from autokernel_hf.llm_answers import Answer, Prices, models_url, prices_in, retry_after
from tests.llm_server import ChatServer, Step, error

ASK = [{"role": "user", "content": "Say yes."}]


@pytest.fixture(autouse=True)
def _own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    for name in (KEY_VARIABLE, "OPENAI_API_KEY", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


def chat(server: ChatServer, waits: list[float] | None = None, **patience: float) -> Chat:
    found = Patience(**{"timeout_s": 20.0, **patience})
    return Chat("m", base_url=server.url, patience=found, sleep=[].append if waits is None else waits.append)


def ask(asked: Chat, **more: float) -> Answer:
    return asked.ask(ASK, max_tokens=int(more.get("max_tokens", 64)), temperature=0.5)


def test_an_answer_comes_with_its_tokens_and_the_question_arrives_as_put() -> None:
    with ChatServer("yes", tokens=(12, 3)) as server:
        answer = ask(chat(server))
    assert (answer.text, answer.outcome, answer.retries, answer.cost_usd) == ("yes", "answered", 0, None)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.estimated) == (12, 3, False)
    (asked,) = server.asked
    assert (asked["model"], asked["max_tokens"], asked["temperature"]) == ("m", 64, 0.5)
    assert asked["messages"] == ASK


def test_tokens_that_a_server_does_not_tell_are_estimated_and_said_to_be() -> None:
    with ChatServer("x" * 300, tokens=None) as server:
        answer = ask(chat(server))
    assert answer.estimated
    assert answer.completion_tokens == 100
    assert answer.prompt_tokens >= 2


@pytest.mark.parametrize("name", ["cost", "estimated_cost"])
def test_the_cost_that_a_server_tells_is_taken(name: str) -> None:
    with ChatServer(Step(text="y", usage={"prompt_tokens": 1, "completion_tokens": 1, name: 0.25})) as server:
        assert ask(chat(server)).cost_usd == 0.25


@pytest.mark.parametrize(
    ("step", "outcome"),
    [
        (Step(text="half of", finish="length"), "cut_off"),
        (Step(text=""), "empty"),
        (Step(text=None), "empty"),
        (Step(text=" \n"), "empty"),
        (Step(text="", finish="length"), "cut_off"),  # a reasoning model that thought for too long
        (Step(text="I'm sorry, but I can't help with that."), "refused"),
        (Step(text="I'm sorry about that.\n<<<<<<< SEARCH\na\n=======\nb\n>>>>>>> REPLACE"), "answered"),
        (Step(text=None, refusal="No."), "refused"),
        (Step(text="", finish="content_filter"), "refused"),
        (error(400, "The response was filtered due to the content management policy"), "refused"),
    ],
)
def test_what_is_no_answer_is_not_taken_for_one(step: Step, outcome: str) -> None:
    with ChatServer(step) as server:
        assert ask(chat(server)).outcome == outcome
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    "step",
    [
        error(429, "slow down"),
        error(500, "oops"),
        error(502, "bad gateway"),
        error(503, "loading"),
        error(529, "overloaded"),
        Step(status=504, body=b"<html>timeout</html>", headers={"Content-Type": "text/html"}),
        Step(body=b"<html>a login page</html>", headers={"Content-Type": "text/html"}),
        Step(body=b"[]"),
        Step(body=b'{"error": {"message": "upstream failed"}}'),
        Step(drops=True),
    ],
)
def test_what_passes_is_asked_again(step: Step) -> None:
    waits: list[float] = []
    with ChatServer(step, step, "yes") as server:
        answer = ask(chat(server, waits))
    assert (answer.text, answer.retries, len(server.asked)) == ("yes", 2, 3)
    assert 1.5 <= waits[0] <= 2.5
    assert 3.0 <= waits[1] <= 5.0


def test_a_rate_limit_is_waited_for_as_told_and_no_longer_than_allowed() -> None:
    waits: list[float] = []
    limited = error(429, "slow down", headers={"Retry-After": "7"})
    with ChatServer(limited, limited, "yes") as server:
        assert ask(chat(server, waits)).text == "yes"
        assert waits == [7.0, 7.0]
    waits.clear()
    with ChatServer(error(429, "daily limit", headers={"Retry-After": "3600"})) as server:
        with pytest.raises(UnavailableError, match=r"asks to wait 3600 s"):
            ask(chat(server, waits))
        assert (waits, len(server.asked)) == ([], 1)


def test_an_outage_is_asked_again_within_bounds() -> None:
    waits: list[float] = []
    down = error(503, "down for repair")
    words = "after 4 requests: HTTP 503: down for repair"
    with ChatServer(down) as server, pytest.raises(UnavailableError, match=words) as told:
        ask(chat(server, waits, attempts=4))
    assert len(server.asked) == 4
    assert len(waits) == 3
    assert "resume" in told.value.remedy


def test_a_server_that_is_not_there_is_told_by_its_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    asked = Chat("m", base_url=url, patience=Patience(attempts=2), sleep=lambda s: None)
    with pytest.raises(UnavailableError, match="127.0.0.1"):
        ask(asked)
    with pytest.raises(LanguageModelError, match="cannot be reached"):
        asked.catalogue()


def test_a_server_that_hangs_is_given_up_and_asked_in_pieces() -> None:
    with ChatServer(Step(text="slow", hangs_s=1.5), "yes") as server:
        answer = ask(chat(server, timeout_s=0.5))
    assert (answer.text, answer.retries) == ("yes", 1)
    assert [bool(a.get("stream")) for a in server.asked] == [False, True]


def test_an_answer_that_a_gateway_cuts_off_is_had_in_pieces_from_then_on() -> None:
    with ChatServer(Step(text="a long answer", only_streams=True), tokens=(9, 4)) as server:
        asked = chat(server)
        first, second = ask(asked), ask(asked)
    assert (first.text, first.outcome, first.retries) == ("a long answer", "answered", 1)
    assert (first.prompt_tokens, first.completion_tokens) == (9, 4)
    assert second.retries == 0
    assert [bool(a.get("stream")) for a in server.asked] == [False, True, True]


def test_a_server_that_sends_no_stream_is_asked_without() -> None:
    gateway = Step(status=504, body=b"")
    no_stream = Step(body=b'{"choices": [{"message": {"content": "whole"}, "finish_reason": "stop"}]}')
    with ChatServer(gateway, no_stream) as server:
        assert ask(chat(server)).text == "whole"
    assert [bool(a.get("stream")) for a in server.asked] == [False, True, False]
    refused = error(400, "Unknown field: stream_options")
    with ChatServer(gateway, refused, "in pieces") as server:
        assert ask(chat(server)).text == "in pieces"
    assert ["stream_options" in a for a in server.asked] == [False, True, False]


def test_offline_is_about_the_hub_and_not_about_a_server_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with ChatServer("yes", models={"data": []}) as server:
        assert ask(chat(server)).text == "yes"
        assert chat(server).catalogue() == {"data": []}
    assert constants.HF_HUB_OFFLINE is True
    with pytest.raises(LanguageModelError, match="HF_HUB_OFFLINE is set"):
        ask(Chat("org/model"))


def test_a_stream_that_breaks_off_is_no_whole_answer() -> None:
    step = Step(text="half and half", only_streams=True, breaks_stream=True)
    with ChatServer(step) as server:
        answer = ask(chat(server))
    assert (answer.text, answer.outcome) == ("half a", "cut_off")


@pytest.mark.parametrize(
    ("step", "words", "remedy"),
    [
        (error(401, "Invalid API key"), "key was refused .HTTP 401: Invalid API key", KEY_VARIABLE),
        (error(403, "no permission"), "key was refused", KEY_VARIABLE),
        (error(402, "pay first"), "no credit left", "credit"),
        (error(429, "You have no quota", code="insufficient_quota"), "no credit left", "credit"),
        (error(404, "The model `m` does not exist"), "no such model or address", "--llm"),
        (error(410, "withdrawn"), "no such model or address", "--llm"),
        (
            error(400, "The requested model 'm' does not exist", code="model_not_found"),
            "no such model",
            "--llm",
        ),
        (error(400, "messages: wrong role"), "refused .HTTP 400: messages: wrong role", "--llm"),
    ],
)
def test_what_only_a_person_can_cure_is_told_at_once(step: Step, words: str, remedy: str) -> None:
    waits: list[float] = []
    with ChatServer(step) as server, pytest.raises(LanguageModelError, match=words) as told:
        ask(chat(server, waits))
    assert remedy in told.value.remedy
    assert (len(server.asked), waits) == (1, [])


@pytest.mark.parametrize(
    "step",
    [
        error(400, "This model's maximum context length is 4096 tokens. However, you requested 9000 tokens"),
        error(422, "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 9000"),
        error(413, "Payload too large"),
        error(400, "prompt is too long: 210000 tokens > 200000 maximum"),
        error(500, "Input is larger than the maximum context size of the slot"),
    ],
)
def test_a_full_context_is_told_apart_from_other_refusals(step: Step) -> None:
    with ChatServer(step) as server, pytest.raises(ContextFullError, match="does not fit the context of m"):
        ask(chat(server))
    assert len(server.asked) == 1


def test_a_server_is_asked_in_its_own_way_once_it_has_named_it() -> None:
    with ChatServer(
        error(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."),
        error(400, "Unsupported value: 'temperature' does not support 0.5"),
        "yes",
    ) as server:
        asked = chat(server)
        assert ask(asked).text == "yes"
        assert ask(asked).retries == 0
    for last in server.asked[2:]:
        assert last["max_completion_tokens"] == 64
        assert "max_tokens" not in last
        assert "temperature" not in last
    with ChatServer(error(400, "max_tokens is too large: at most 4096"), "yes") as server:
        assert ask(chat(server), max_tokens=8192).text == "yes"
    assert [a["max_tokens"] for a in server.asked] == [8192, 4096]


def test_a_hub_token_goes_to_no_server_but_hugging_faces(monkeypatch: pytest.MonkeyPatch) -> None:
    with ChatServer("yes", models={"data": []}) as server:
        ask(chat(server))
        chat(server).catalogue()
        monkeypatch.setenv(KEY_VARIABLE, "sk-own")
        ask(chat(server))
        chat(server).catalogue()
    assert not any("hf_secret" in (key or "") for key in server.keys)
    assert server.keys[2:] == ["Bearer sk-own", "Bearer sk-own"]


def test_inference_providers_are_asked_with_the_hub_token(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.inference import _providers

    models = {
        "data": [{"id": "org/m", "providers": [{"provider": "p", "pricing": {"input": 1, "output": 2}}]}]
    }
    with ChatServer("yes", models=models) as server:
        root = server.url.removesuffix("/v1")
        monkeypatch.setattr(_providers.CONVERSATIONAL_AUTO_ROUTER, "base_url", root)
        monkeypatch.setattr("autokernel_hf.llm.ROUTER", server.url)
        asked = Chat("org/m", patience=Patience(timeout_s=20.0), sleep=lambda s: None)
        assert ask(asked).text == "yes"
        assert prices_in(asked.catalogue(), "org/m") == Prices(prompt=1.0, completion=2.0)
    assert server.asked[0]["model"] == "org/m"
    assert server.keys == ["Bearer hf_secret"] * 2


def test_an_answer_holds_nothing_that_a_file_or_a_terminal_does_not_take() -> None:
    with ChatServer("a\x00b\x1b[31mc\ud800d\n\te") as server:
        assert ask(chat(server)).text == "ab[31mc?d\n\te"
    down = Step(status=503, body=b"a\x1bb", headers={"Content-Type": "text/plain"})
    with ChatServer(down) as server, pytest.raises(UnavailableError, match="503: ab[.]"):
        ask(chat(server, attempts=1))


def test_inference_providers_need_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(LanguageModelError, match="need a Hugging Face token") as told:
        Chat("org/model")
    assert "hf auth login" in told.value.remedy


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "file:///tmp", "http://", "http://a b"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="no address"):
        Chat("m", base_url=url)


def test_a_refused_key_is_found_before_the_run_begins() -> None:
    with ChatServer("yes", models=401) as server, pytest.raises(LanguageModelError, match="refuses its key"):
        chat(server).catalogue()
    with ChatServer("yes") as server:
        assert chat(server).catalogue() is None, "a server need not list its models"


def test_waiting_times_are_read_in_every_form() -> None:
    assert retry_after({"retry-after": "12"}) == 12.0
    assert retry_after({"retry-after-ms": "1500", "retry-after": "2"}) == 1.5
    soon = email.utils.formatdate(time.time() + 60, usegmt=True)
    assert retry_after({"retry-after": soon}) == pytest.approx(60, abs=2)
    assert retry_after({"ratelimit": '"api";r=0;t=42'}) == 42.0
    assert retry_after({"retry-after": "soon"}) is None
    assert retry_after({}) is None


def test_prices_are_read_from_a_servers_list() -> None:
    by_provider = {
        "data": [
            {
                "id": "org/m",
                "providers": [
                    {"provider": "a", "pricing": {"input": 0.2, "output": 0.5}},
                    {"provider": "b", "pricing": {"input": 0.1, "output": 0.9}},
                    {"provider": "c"},
                ],
            }
        ]
    }
    assert prices_in(by_provider, "org/m") == Prices(prompt=0.2, completion=0.9)
    assert prices_in(by_provider, "org/m:b") == Prices(prompt=0.1, completion=0.9)
    by_token = {"data": [{"id": "m", "pricing": {"prompt": "0.000001", "completion": "0.000004"}}]}
    found = prices_in(by_token, "m")
    assert found is not None
    assert (found.prompt, found.completion) == pytest.approx((1.0, 4.0))
    assert found.of(2_000_000, 500_000) == pytest.approx(4.0)
    for nothing in (
        None,
        [],
        {"data": None},
        {"data": ["m"]},
        {"data": [{"id": "m", "pricing": {"prompt": "?"}}]},
    ):
        assert prices_in(nothing, "m") is None


@pytest.mark.parametrize(
    "base", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "http://h:1/v1/chat/completions"]
)
def test_the_list_of_models_lies_beside_the_chat(base: str) -> None:
    assert models_url(base) == "http://h:1/v1/models"
