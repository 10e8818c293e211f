"""Fields that nothing here reads: served without them and named, or refused by a strict server."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from fastapi import FastAPI

from specctl.server.requests.unread_fields import MAX_CHARS, ignored_header
from specctl_testing.runtime.serving import StubService
from specctl_testing.runtime.tool_targets import tool_target
from specctl_testing.runtime.web import ask, error_of, make_app, post

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI: dict[str, Any] = {"role": "user", "content": "Hi"}
MARK = {"type": "ephemeral"}


@cache
def plain() -> FastAPI:
    return make_app()


@cache
def strict() -> FastAPI:
    return make_app(is_strict=True)


def talk(*turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": list(turns), "max_tokens": 2, **fields}


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SENT: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, talk({**HI, "content": [{"type": "text", "text": "Hi", "cache_control": MARK}]}),
     "messages[0].content[0].cache_control"),
    (CHAT, talk({**HI, "id": 7, "opts": {"visible": False}}), "messages[0].id, messages[0].opts"),
    (CHAT, talk({**HI, "timestamp": 1.5}), "messages[0].timestamp"),
    (CHAT, talk(HI, {"role": "assistant", "content": "4", "reasoning_details": []}, HI),
     "messages[1].reasoning_details"),
    (CHAT, talk(HI, {"role": "assistant", "content": "4", "images": []}, HI),
     "messages[1].images"),
    (CHAT, talk(HI, {"role": "assistant", "content": None, "tool_calls": [{**CALL, "extra": 1}]},
                {"role": "tool", "tool_call_id": "c1", "content": "5", "status": "success"}),
     "messages[1].tool_calls[0].extra, messages[2].status"),
    (CHAT, talk(HI, reasoning={"effort": "low", "exclude": True}),
     "reasoning.exclude, reasoning.effort"),
    (CHAT, talk(HI, top_a=0.2, chat_id="x", options={"mirostat": 2}), "chat_id, options, top_a"),
    (CHAT, talk(HI, stream_options={"chunk": 1}, stream=True), "stream_options.chunk"),
    (CHAT, talk(HI, min_length=3), "min_length"),
    (TEXT, {"prompt": "x", "n_predict": 3, "priority": 1}, "n_predict, priority"),
    (RESPONSES, {"input": [{"role": "user", "content": [
        {"type": "input_text", "text": "x", "cache_control": MARK}], "created": 3}], "betas": []},
     "betas, input[0].content[0].cache_control, input[0].created"),
    ("/tokenize", {"prompt": "x", "origin": "me"}, "origin"),
    ("/detokenize", {"tokens": [7], "origin": "me"}, "origin"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "named"), SENT)
def test_a_field_that_changes_nothing_is_named_in_a_header(
    path: str, body: dict[str, Any], named: str
) -> None:
    answer = post(plain(), path, body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-specctl-ignored"] == named
    if path in (CHAT, TEXT, RESPONSES):
        streamed = post(plain(), path, {**body, "stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.headers["x-specctl-ignored"] == named


@pytest.mark.parametrize(
    ("path", "body", "named"), [one for one in SENT if "priority" not in one[2]]
)
def test_a_strict_server_refuses_it(path: str, body: dict[str, Any], named: str) -> None:
    answer = post(strict(), path, body)
    unknown = [one for one in named.split(", ") if one != "reasoning.effort"]
    assert answer.status_code == 400
    assert (error_of(answer)["param"], error_of(answer)["code"]) == (
        unknown[0],
        "unknown_parameter",
    )


def test_a_strict_server_tells_the_known_field_that_is_nearest_and_never_the_same() -> None:
    def told(*turns: dict[str, Any], **fields: Any) -> str:
        return str(error_of(post(strict(), CHAT, talk(*turns, **fields)))["message"])

    assert told(HI, max_token=3) == "unknown field 'max_token'; did you mean 'max_tokens'?"
    assert "mean 'input'" not in told(HI, input="x")
    said = told({**HI, "reasoning": "hm"})
    assert said == "unknown field 'messages[0].reasoning'"
    assert "did you mean 'content'" in told({**HI, "contents": "x"})


@pytest.mark.parametrize("name", ["max_token", "maxTokens", "Top_P", "stops"])
def test_a_misspelt_field_is_refused_by_every_server(name: str) -> None:
    """Without the limit of `max_token` an answer has as many tokens as there is room for."""
    answer = post(plain(), CHAT, talk(HI, **{name: 1}))
    assert (answer.status_code, error_of(answer)["param"]) == (400, name)
    assert "did you mean" in str(error_of(answer)["message"])
    assert post(plain(), CHAT, talk(HI, **{name: None})).status_code == 200


def test_what_clients_send_out_of_habit_is_served_and_not_named() -> None:
    turns = [
        {"role": "system", "content": [{"type": "text", "text": "be"}, "brief"]},
        {**HI, "name": "ann", "audio": None, "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [], "function_call": None,
         "refusal": None, "annotations": [], "audio": None},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": None},
        {"role": "assistant", "content": None, "refusal": "I cannot"},
        {"role": "user", "content": []},
    ]  # fmt: skip
    neutral = {
        "stop": "", "tools": [], "tool_choice": None, "logit_bias": {}, "n": None, "seed": None,
        "max_completion_tokens": 2, "stream_options": None, "user": "u", "metadata": {"a": "b"},
        "store": False, "service_tier": "auto", "parallel_tool_calls": True, "top_logprobs": 0,
        "response_format": {"type": "text"}, "functions": None, "use_beam_search": False,
        "best_of": 1, "add_generation_prompt": True, "continue_final_message": False,
        "echo": False, "documents": None,
    }  # fmt: skip
    service = StubService()
    answer = post(make_app(service), CHAT, talk(*turns, **neutral))
    assert answer.status_code == 200, answer.text
    assert "x-specctl-ignored" not in answer.headers
    text = service.target.tokenizer.decode(service.asks[0].tokens)
    assert "be\nbrief" in text
    assert "I cannot" in text
    assert service.asks[0].sampling.stop == ()
    assert post(plain(), TEXT, {"prompt": "x", "stop": ["", "a"]}).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True},
        {"chat_template": "{{ 1 }}"},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"documents": [{"text": "x"}]},
        {"allowed_token_ids": [1]},
        {"bad_words": ["x"]},
        {"prompt_logprobs": 0},
        {"best_of": 2},
        {"truncate_prompt_tokens": 5},
        {"messages": [{**HI, "images": ["aGk="]}]},
        {"messages": [{"role": "assistant", "content": "x", "audio": {"id": "a"}}]},
    ],
)
def test_what_asks_for_another_answer_is_refused_in_any_case(fields: dict[str, Any]) -> None:
    for app in (plain(), strict()):
        answer = post(app, CHAT, {**talk(HI), **fields})
        assert answer.status_code == 400, answer.text
        assert error_of(answer)["code"] in ("unsupported_parameter", "invalid_value")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{**HI, "name": 7}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{**HI, "content": [7]}]}, "messages[0].content[0]"),
        ({"messages": [{**HI, "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "content": "", "reasoning": 1}]},
         "messages[0].reasoning"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ({"seed": "1"}, "seed"),
        ({"skip_special_tokens": 1}, "skip_special_tokens"),
        ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
    ],
)  # fmt: skip
def test_a_known_field_of_a_wrong_type_is_an_error(fields: dict[str, Any], param: str) -> None:
    answer = post(plain(), CHAT, {**talk(HI), **fields, "unheard_of": 1})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


def test_names_of_clients_make_no_header_of_their_own() -> None:
    names = ["a\r\nSet-Cookie: x=1", "b, c", "\u4f60\u597d\x00", "e" * 500, ""]
    answer = post(plain(), CHAT, {**talk(HI), **dict.fromkeys(names, 1)})
    told = answer.headers["x-specctl-ignored"]
    assert "set-cookie" not in answer.headers
    assert told.isascii()
    assert told.isprintable()
    assert len(told.split(", ")) == len(names)
    many = {**talk(HI), **{f"{'k' * 40}{at}": 1 for at in range(3000)}}
    told = post(plain(), CHAT, many).headers["x-specctl-ignored"]
    assert len(told) < MAX_CHARS + 50
    assert told.endswith(f"and {3000 - told.count(', ')} more")
    assert ignored_header([]) == {}


# -- thoughts --------------------------------------------------------------------------------------

READS = "{{% for m in messages %}}<|user|>{{{{ m.content }}}}[{{{{ {} }}}}]{{% endfor %}}"
FIELDS = {
    "reasoning_content": "m.reasoning_content",
    "reasoning": "m['reasoning']",
    "thinking": "m.get('thinking')",
}


@pytest.mark.parametrize("sent", FIELDS)
@pytest.mark.parametrize("read", FIELDS)
def test_thoughts_are_given_back_by_the_name_that_the_template_reads(sent: str, read: str) -> None:
    service = StubService(target=tool_target(READS.format(FIELDS[read])))
    turns = [HI, {"role": "assistant", "content": "4", sent: "two and two"}, HI]
    answer = post(make_app(service), CHAT, talk(*turns))
    assert answer.status_code == 200, answer.text
    assert "x-specctl-ignored" not in answer.headers
    assert "4[two and two]" in service.target.tokenizer.decode(service.asks[0].tokens)


def test_thoughts_that_the_template_does_not_read_are_named() -> None:
    turn = {"role": "assistant", "content": "4", "reasoning": "two and two"}
    answer = post(plain(), CHAT, talk(HI, turn, HI))
    assert answer.headers["x-specctl-ignored"] == "messages[1].reasoning"
    reads = make_app(StubService(target=tool_target(READS.format("m.thinking"))))
    both = {**turn, "thinking": "two and two", "reasoning_content": "other"}
    answer = post(reads, CHAT, talk(HI, both, HI))
    assert answer.headers["x-specctl-ignored"] == "messages[1].reasoning, messages[1].thinking"


def test_the_effort_may_be_asked_for_in_either_place() -> None:
    service = StubService(target=tool_target("{{ messages[0].content }}[{{ reasoning_effort }}]"))
    app = make_app(service)
    for fields in ({"reasoning_effort": "low"}, {"reasoning": {"effort": "low"}}):
        answer = post(app, CHAT, talk(HI, **fields))
        assert "x-specctl-ignored" not in answer.headers
        assert "Hi[low]" in service.target.tokenizer.decode(service.asks[-1].tokens)


# -- seeds and forms -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
def test_a_seed_of_null_or_minus_one_is_a_random_one(path: str) -> None:
    service = StubService()
    app = make_app(service)
    body = {CHAT: talk(HI), TEXT: {"prompt": "x"}, RESPONSES: {"input": "x"}}[path]
    for fields in ({}, {"seed": None}, {"seed": -1}, {"seed": -1}, {"seed": 7}):
        assert post(app, path, {**body, **fields}).status_code == 200
    seeds = [ask.sampling.seed for ask in service.asks]
    assert len(set(seeds)) == 5
    assert seeds[-1] == 7


def test_a_json_object_may_bring_its_schema() -> None:
    service = StubService()
    form = {"type": "json_object", "schema": {"type": "object"}}
    answer = post(make_app(service), CHAT, talk(HI, response_format=form))
    assert "x-specctl-ignored" not in answer.headers
    grammar = service.asks[0].sampling.grammar
    assert grammar is not None
    assert grammar.spec.kind == "json_schema"


def test_the_docs_page_lists_the_new_fields() -> None:
    page = ask(plain(), "GET", "/docs").text
    for name in ("skip_special_tokens", "include_stop_str_in_output", "reasoning"):
        assert f"<code>{name}</code>" in page
