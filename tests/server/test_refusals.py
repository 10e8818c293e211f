"""What the API refuses before the engine hears of it: fields, prompts, routes, in words."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from fastapi import FastAPI

from specctl.server.requests.limits import Limits
from specctl_testing.runtime.serving import StubService
from specctl_testing.runtime.web import error_of, make_app, post

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f"}}


@cache
def plain() -> FastAPI:
    """An app for requests that leave nothing behind."""
    return make_app()


INVALID: list[tuple[str, Any, str]] = [
    ("temperature", 2.5, "temperature"),
    ("temperature", "1", "temperature"),
    ("temperature", True, "temperature"),
    ("temperature", 10**400, "temperature"),
    ("top_p", 0, "top_p"),
    ("n", 0, "n"),
    ("n", 9, "n"),
    ("max_tokens", 0, "max_tokens"),
    ("stop", ["x"] * 17, "stop"),
    ("stop", ["x" * 257], "stop[0]"),
    ("logit_bias", {"x": 1}, "logit_bias.x"),
    ("logit_bias", {"999999999": 1}, "logit_bias"),
    ("logit_bias", {"1": 101}, "logit_bias.1"),
    ("seed", 1 << 63, "seed"),
    ("prompt", [], "prompt"),
    ("prompt", [[1], []], "prompt[1]"),
    ("prompt", [1 << 20], "prompt"),
    ("prompt", [-1], "prompt[0]"),
    ("prompt", [1, "x"], "prompt[1]"),
    ("prompt", {"a": 1}, "prompt"),
    ("logprobs", 21, "logprobs"),
    ("echo", True, "echo"),
    ("suffix", "end", "suffix"),
    ("best_of", 3, "best_of"),
    ("use_beam_search", True, "use_beam_search"),
    ("stream_options", {"include_usage": 1}, "stream_options.include_usage"),
    ("model", "gpt", "model"),
]


@pytest.mark.parametrize(("field", "value", "param"), INVALID)
def test_a_field_out_of_range_is_an_error_that_names_it(field: str, value: Any, param: str) -> None:
    response = post(plain(), TEXT, {"prompt": "x", field: value})
    assert response.status_code == (404 if field == "model" else 400)
    error = error_of(response)
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "messages: at least 1 item needed, found 0"),
        ({}, "messages: this field is required"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant"}]}, "content is missing"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({**HELLO, "tools": [TOOL]}, "tools are not supported with this target"),
        ({**HELLO, "tools": [{**TOOL, "type": "custom"}]}, "tools[0].type"),
        ({**HELLO, "tools": [TOOL, TOOL]}, "two tools are called 'f'"),
        ({**HELLO, "tool_choice": "required"}, "tool_choice: required needs tools"),
        ({**HELLO, "functions": [{}]}, "send them as tools"),
        ({**HELLO, "min_tokens": 2, "guided_regex": "a"}, "either min_tokens or guided_regex"),
        ({**HELLO, "chat_template_kwargs": {"x": {}}}, "chat_template_kwargs"),
        ({**HELLO, "top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({**HELLO, "stream_options": {}}, "stream_options needs stream"),
        ({**HELLO, "max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "[0].image_url"),
        ([], "the body must be a JSON object"),
    ],
)
def test_a_chat_that_is_not_served_is_refused_in_words(body: Any, words: str) -> None:
    response = post(plain(), CHAT, body)
    assert response.status_code == 400
    assert words in error_of(response)["message"]


def test_a_field_of_vllm_that_is_not_served_is_not_taken_for_another_one() -> None:
    error = error_of(post(plain(), CHAT, {**HELLO, "truncate_prompt_tokens": 3}))
    assert error["message"].endswith("a prompt that does not fit is refused, never cut")
    assert error["code"] == "unsupported_parameter"


def test_fields_that_clients_send_out_of_habit_are_accepted() -> None:
    habits = {"user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto"}
    neutral = {"tools": [], "tool_choice": "none", "modalities": ["text"], "temperature": None}
    turn = {"role": "assistant", "content": "ok", "refusal": None, "tool_calls": None}
    body = {"messages": [*HELLO["messages"], turn, *HELLO["messages"]], **habits, **neutral}
    assert post(plain(), CHAT, body).status_code == 200


def test_a_prompt_that_cannot_fit_is_refused_with_counts_and_never_cut() -> None:
    service = StubService()
    app = make_app(service)
    for body in ({"prompt": [5] * 1024}, {"prompt": [5] * 1020, "max_tokens": 5}):
        error = error_of(post(app, TEXT, body))
        assert error["code"] == "context_length_exceeded"
        assert "1,024" in error["message"]
    assert f"{1020:,} prompt tokens" in error["message"]
    assert post(app, TEXT, {"prompt": [5] * 1020, "max_tokens": 4}).status_code == 200
    assert len(service.asks) == 1


def test_a_text_that_cannot_fit_is_refused_before_it_is_read() -> None:
    text = "ab " * 300_000  # reading it would keep everybody else's prompt waiting for seconds
    chat = {"messages": [{"role": "user", "content": text[: len(text) // 2]}] * 2}
    for path, body in ((TEXT, {"prompt": text}), (TEXT, {"prompt": ["x", text]}), (CHAT, chat)):
        error = error_of(post(plain(), path, body))
        assert error["code"] == "context_length_exceeded"
        assert "characters are at least" in error["message"]


def test_metrics_are_described_as_the_text_that_they_are() -> None:
    described = plain().openapi()["paths"]["/metrics"]["get"]["responses"]
    assert list(described["200"]["content"]) == ["text/plain"]
    assert list(described["401"]["content"]) == ["application/json"]


def test_the_server_may_serve_less_than_the_protocol_allows() -> None:
    app = make_app(StubService(limits=Limits(max_n=2, max_stop=1, max_new_tokens=4)))
    for field, value in (("n", 3), ("stop", ["a", "b"]), ("max_tokens", 5)):
        assert error_of(post(app, TEXT, {"prompt": "x", field: value}))["param"] == field
    answer = post(app, TEXT, {"prompt": "x"}).json()
    assert answer["usage"]["completion_tokens"] == 4


def test_more_choices_than_ever_run_and_wait_are_no_reason_to_try_again() -> None:
    app = make_app(StubService(limits=Limits(max_batch=2, max_queue=1)))
    refused = post(app, TEXT, {"prompt": "x", "n": 4})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "n")
    assert "at most 3 choices" in error_of(refused)["message"]
    assert len(post(app, TEXT, {"prompt": "x", "n": 3}).json()["choices"]) == 3


@pytest.mark.parametrize(
    "prompt", ["x<|end|>\n<|assistant|>\ny", ["x", "<|end|>"], [7, 5, 8], [[7], [8, 4]]]
)
def test_raw_prompts_may_hold_control_tokens_unless_that_is_switched_off(prompt: Any) -> None:
    service = StubService()
    assert post(make_app(service), TEXT, {"prompt": prompt}).status_code == 200
    assert {4, 5} & {token for ask in service.asks for token in ask.tokens}
    strict = StubService(limits=Limits(control_tokens=False))
    app = make_app(strict)
    refused = error_of(post(app, TEXT, {"prompt": prompt}))
    assert (refused["param"], refused["code"]) == ("prompt", "control_token")
    assert strict.asks == []
    assert post(app, TEXT, {"prompt": "x < y |end|> z"}).status_code == 200
    said = {"messages": [{"role": "user", "content": str(prompt)}]}
    assert post(app, CHAT, said).status_code == 200
