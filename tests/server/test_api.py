"""The API's answers, over a stub of the engine: shapes, streams, limits, errors."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from fastapi import FastAPI

from specctl.server.engine_thread.contract import Busy, Unavailable
from specctl.server.requests.limits import Limits
from specctl_testing.runtime.serving import StubService
from specctl_testing.runtime.web import ask, error_of, events, make_app, post, request_all

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
SCRIPTS = "caf\u00e9 \U0001f600 \u4f60\u597d \u05e9\u05dc\u05d5\u05dd\u2028line \u2713\n"


@cache
def plain() -> FastAPI:
    """An app for requests that leave nothing behind."""
    return make_app()


def text_of(path: str, choice: dict[str, Any]) -> str:
    return choice["text"] if path == TEXT else choice["message"]["content"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("chunk", [1, 3])
def test_a_stream_says_what_the_whole_answer_says(path: str, chunk: int) -> None:
    app = make_app(StubService(text=SCRIPTS, chunk=chunk))
    body = (HELLO if path == CHAT else {"prompt": "x"}) | {"n": 2, "max_tokens": 64}
    body |= {"logprobs": 2} if path == TEXT else {"logprobs": True, "top_logprobs": 2}
    whole = post(app, path, body).json()
    sent = post(app, path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    chunks = events(sent)
    assert chunks.pop() == "[DONE]"
    assert "[DONE]" not in chunks
    assert sent.text.isascii()
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    for index in range(2):
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        texts = [p["text"] if path == TEXT else p["delta"].get("content", "") for p in parts]
        expected = whole["choices"][index]
        assert "".join(texts) == text_of(path, expected) == SCRIPTS
        assert [p["finish_reason"] for p in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == expected["finish_reason"] == "length"
        name = "tokens" if path == TEXT else "content"
        drawn = [x for p in parts for x in p["logprobs"][name]]
        assert drawn == expected["logprobs"][name]
    assert len({c["id"] for c in chunks}) == 1


def test_the_first_chunk_of_a_chat_names_the_role_and_no_other_does() -> None:
    chunks = events(post(plain(), CHAT, {**HELLO, "stream": True}))[:-1]
    roles = [chunk["choices"][0]["delta"].get("role") for chunk in chunks]
    assert roles == ["assistant"] + [None] * (len(chunks) - 1)


def test_the_role_is_named_although_the_first_token_is_half_a_character() -> None:
    app = make_app(StubService(text="\u00e9t\u00e9", chunk=1))
    chunks = events(post(app, CHAT, {**HELLO, "stream": True}))[:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "\u00e9t\u00e9"
    assert [delta.get("role") for delta in deltas[1:]] == [None] * (len(deltas) - 1)


def test_every_answer_says_what_speculation_did_and_how_it_was_verified() -> None:
    whole = post(plain(), TEXT, {"prompt": "x", "max_tokens": 6}).json()["specctl"]["stats"]
    assert (whole["verification"], whole["rounds"], whole["tau"]) == ("lossless", 2, 3.0)
    assert whole["accepted_per_position"] == [1.0, 1.0]
    chunks = events(post(plain(), TEXT, {"prompt": "x", "max_tokens": 6, "stream": True}))
    assert chunks[-2]["specctl"]["stats"] == whole


def test_spans_colour_the_text_by_token_where_they_are_asked_for() -> None:
    body = {"prompt": "x", "stream": True, "specctl": True}
    chunks = [c["specctl"] for c in events(post(plain(), TEXT, body))[:-1]]
    spans = [span for chunk in chunks for span in chunk["spans"]]
    assert "".join(spans) == StubService().text
    assert chunks[0]["accepted"] == [False, True, True]


def test_several_prompts_make_choices_in_their_order_with_seeds_of_their_own() -> None:
    service = StubService()
    prompts = [[1, 2], [3, 4, 5]]
    answer = post(make_app(service), TEXT, {"prompt": prompts, "n": 2, "seed": 7}).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 5
    assert [ask.tokens for ask in service.asks] == [(1, 2), (1, 2), (3, 4, 5), (3, 4, 5)]
    assert [ask.sampling.seed for ask in service.asks] == [7, 8, 9, 10]


def test_a_seed_may_be_any_64_bit_integer() -> None:
    service = StubService()
    app = make_app(service)
    for seed in (-(1 << 63), -1, (1 << 63) - 1):
        assert post(app, TEXT, {"prompt": "x", "seed": seed, "n": 2}).status_code == 200
    assert all(0 <= ask.sampling.seed < 1 << 63 for ask in service.asks)


def test_sampling_fields_arrive_as_they_were_sent() -> None:
    service = StubService()
    sent = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": -1.5}
    sent |= {"frequency_penalty": 2, "repetition_penalty": 1.1, "stop": ["a", "b"]}
    post(make_app(service), TEXT, {"prompt": "x", "logit_bias": {"7": -100}, **sent})
    got = service.asks[0].sampling
    found = {name: getattr(got, name) for name in sent}
    assert found == {**sent, "stop": ("a", "b")}
    assert got.logit_bias == {7: -100}
    assert got.max_new_tokens == 16


def test_a_temperature_that_float32_cannot_divide_by_is_greedy() -> None:
    service = StubService()
    post(make_app(service), TEXT, {"prompt": "x", "temperature": 1e-30})
    assert service.asks[0].sampling.greedy


def test_a_chat_without_a_limit_may_fill_the_context() -> None:
    service = StubService()
    post(make_app(service), CHAT, HELLO)
    got = service.asks[0]
    assert got.sampling.max_new_tokens == service.status().context - len(got.tokens)


def test_conversations_of_different_owners_never_meet() -> None:
    from specctl.server.auth import Keys

    service = StubService()
    app = make_app(service, keys=Keys.of(["one", "two"]))
    for key in ("one", "two", "one"):
        body = {"prompt": "x", "prompt_cache_key": "c"}
        post(app, TEXT, body, headers={"X-Api-Key": key})
    names = [ask.conversation for ask in service.asks]
    assert names[0] == names[2] != names[1]
    assert "c" not in names


def test_a_full_queue_is_429_and_says_when_to_come_back() -> None:
    response = post(make_app(StubService(refuse=Busy(3))), TEXT, {"prompt": "x"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert error_of(response)["type"] == "rate_limit_error"


def test_overload_refuses_exactly_what_does_not_fit() -> None:
    service = StubService(delay=0.02, limits=Limits(max_batch=2, max_queue=4))
    app = make_app(service)
    stream = {"json": {"prompt": "x", "stream": True}}
    found = request_all(app, [("POST", TEXT, stream)] * 60)
    statuses = [response.status_code for response in found]
    assert (statuses.count(200), statuses.count(429)) == (6, 54)
    assert all(r.headers["retry-after"] for r in found if r.status_code == 429)
    assert all(events(r)[-1] == "[DONE]" for r in found if r.status_code == 200)


@pytest.mark.parametrize("stream", [False, True])
def test_an_ask_that_waited_too_long_is_429_streamed_or_not(stream: bool) -> None:
    class Slow(StubService):
        async def _answer(self, ticket: Any) -> None:
            ticket.deliver(Busy(4, "the request waited too long"))

    response = post(make_app(Slow()), TEXT, {"prompt": "x", "stream": stream})
    assert (response.status_code, response.headers["retry-after"]) == (429, "4")
    assert "waited too long" in error_of(response)["message"]


def test_of_several_choices_none_is_left_behind_when_one_is_refused() -> None:
    class Full(StubService):
        async def submit(self, ask: Any) -> Any:
            if len(self.asks) == 2:
                raise Busy(1)
            return await super().submit(ask)

    service = Full(delay=5)
    assert post(make_app(service), TEXT, {"prompt": "x", "n": 3}).status_code == 429
    assert service.counters.requests == {"cancelled": 2}


@pytest.mark.parametrize("state", ["loading", "draining", "stopped", "failed"])
def test_a_server_that_is_not_ready_answers_503(state: str) -> None:
    service = StubService()
    app = make_app(service)
    service.state = state
    for response in (ask(app, "GET", "/ready"), post(app, TEXT, {"prompt": "x"})):
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert error_of(response)["code"] == state
    assert ask(app, "GET", "/health").status_code == (503 if state == "failed" else 200)
    refusing = make_app(StubService(refuse=Unavailable("draining")))
    assert post(refusing, TEXT, {"prompt": "x"}).status_code == 503


def test_a_failure_is_500_before_the_first_event_and_an_event_behind_it() -> None:
    for stream in (True, False):
        app = make_app(StubService(fail_after=0))
        response = post(app, TEXT, {"prompt": "x", "stream": stream})
        assert response.status_code == 500
        assert error_of(response)["type"] == "server_error"
    chunks = events(
        post(make_app(StubService(fail_after=1)), TEXT, {"prompt": "x", "stream": True})
    )
    assert chunks[0]["choices"][0]["text"]
    assert chunks[-1]["error"]["type"] == "server_error"
    assert "[DONE]" not in chunks


def test_a_fault_of_ours_is_500_without_its_text() -> None:
    app = make_app(StubService(refuse=KeyError("secret prompt")))  # type: ignore[arg-type]
    response = post(app, TEXT, {"prompt": "x"}, headers={"x-request-id": "mine"})
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert "secret" not in response.text
    assert response.headers["x-request-id"] == "mine"


def test_unknown_routes_and_methods_have_the_same_shape() -> None:
    app = plain()
    for path, instead in (
        ("/v1/chat/completion", "/v1/chat/completions?"),
        ("/chat/completions", "/v1/chat/completions?"),
        ("/v1/v1/completions", "/v1/completions?"),
        ("/v1/message", "/v1/messages?"),
        ("/v1/model", "/v1/models?"),
        ("/api/generate", "/docs lists every route"),
        ("/v1/nothing", "/docs lists every route"),
    ):
        refused = ask(app, "POST", path)
        message = error_of(refused)["message"]
        assert (refused.status_code, message.startswith(f"there is no POST {path}; ")) == (
            404,
            True,
        )
        assert message.endswith(instead), message
    theirs = post(app, "/v1/message", {}, headers={"anthropic-version": "2023-06-01"}).json()
    assert (theirs["type"], theirs["error"]["type"]) == ("error", "not_found_error")
    assert "/v1/messages?" in theirs["error"]["message"]
    response = ask(app, "PUT", TEXT)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert error_of(response)["message"] == f"this route does not answer PUT {TEXT}, but POST"
    assert ask(app, "OPTIONS", TEXT, headers={"Origin": "http://a"}).status_code == 405


def test_models_lists_the_one_that_is_served() -> None:
    app = plain()
    listed = ask(app, "GET", "/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["tiny"]
    assert ask(app, "GET", "/v1/models/tiny").json() == listed[0]
    assert error_of(ask(app, "GET", "/v1/models/a/b"))["code"] == "model_not_found"
