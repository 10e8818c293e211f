"""What agents do, by the official `openai` client: tools, parse(), responses; smaller routes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from specctl import __version__
from specctl.runtime.target.target import Target
from specctl.server.engine_thread.service import Service
from specctl.server.requests.chat_template import ChatStyle
from specctl.server.requests.limits import Limits
from specctl_testing.runtime.serving import StubService
from specctl_testing.runtime.tool_targets import THINKING, TIME, WEATHER, tool_target
from specctl_testing.runtime.web import Running, ask, error_of, make_app, post, running

HELLO: list[Any] = [{"role": "user", "content": "weather?"}]
PARIS = '{"city": "Paris", "unit": "C"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
TEXT = f"<think>\nlook it up\n</think>\n\nOne moment.\n{CALL}"
FLAT = {"type": "function", **WEATHER["function"]}


class Weather(BaseModel):
    city: str
    unit: str


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(StubService(text=TEXT, ends=True, target=tool_target(THINKING))) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0)


def test_the_helper_for_streams_puts_a_call_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=HELLO, tools=[WEATHER]) as stream:
        kinds = {event.type for event in stream}
        built = stream.get_final_completion().choices[0]
    [call] = built.message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("get_weather", PARIS)
    assert built.finish_reason == "tool_calls"
    assert "tool_calls.function.arguments.delta" in kinds


def test_a_call_is_answered_in_the_next_turn(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="tiny", messages=HELLO, tools=[WEATHER, TIME])
    message = first.choices[0].message
    assert message.model_extra["reasoning_content"] == "look it up"
    [call] = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "21"}
    turns = [*HELLO, message, result]  # the object itself, as examples have it
    again = client.chat.completions.create(model="tiny", messages=turns, tools=[WEATHER])
    assert again.choices[0].message.content == "One moment."


def test_parse_gives_arguments_as_objects(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Weather, name="get_weather")
    parsed = client.chat.completions.parse(model="tiny", messages=HELLO, tools=[tool])
    [call] = parsed.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Weather(city="Paris", unit="C")


def test_a_response_has_items_and_goes_on_with_them(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "tools": [FLAT], "store": False}
    found = client.responses.create(input="weather?", instructions="be brief", **asked)
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call"]
    thoughts, message, call = found.output
    assert thoughts.content[0].text == "look it up"
    assert message.content[0].text == found.output_text == "One moment."
    assert (call.name, call.arguments) == ("get_weather", PARIS)
    assert (found.status, found.store) == ("completed", False)
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
    turns = [{"role": "user", "content": "weather?"}, *found.output, result]
    assert client.responses.create(input=turns, **asked).output_text == "One moment."


def test_a_streamed_response_says_what_the_whole_one_says(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "weather?", "tools": [FLAT]}
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert (
        kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    )

    def joined(kind: str) -> str:
        return "".join(event.delta for event in events if event.type == kind)

    assert joined("response.output_text.delta") == "One moment."
    assert joined("response.reasoning_text.delta") == "look it up"
    assert joined("response.function_call_arguments.delta") == PARIS
    whole = client.responses.create(**asked)
    final = events[-1].response
    assert final.output_text == whole.output_text
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_text == "One moment."


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"store": True}, "store is not supported"),
        ({"previous_response_id": "resp_1"}, "send the whole conversation"),
        ({"conversation": "c"}, "conversation is not supported"),
        ({"background": True}, "background is not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice: required needs tools"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ],
)
def test_what_a_response_cannot_be_is_refused_in_words(fields: dict[str, Any], words: str) -> None:
    refused = post(make_app(), "/v1/responses", {"input": "x", **fields})
    assert refused.status_code == 400
    assert words in error_of(refused)["message"]


def test_a_response_that_is_cut_or_breaks_off_says_so() -> None:
    cut = post(make_app(), "/v1/responses", {"input": "x", "max_output_tokens": 3}).json()
    assert cut["status"] == "incomplete"
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
    broken = post(
        make_app(StubService(fail_after=1)), "/v1/responses", {"input": "x", "stream": True}
    )
    last = json.loads(broken.text.strip().split("data: ")[-1])
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert "the server failed" in last["response"]["error"]["message"]


# -- what vLLM's clients send ----------------------------------------------------------------------


def test_fields_of_vllm_do_what_they_say_or_are_named() -> None:
    service = StubService()
    body = {"prompt": "x", "max_tokens": 9, "ignore_eos": True, "stop_token_ids": [7, 8]}
    body |= {"top_k": -1, "min_tokens": 4, "draft": False}
    ignored = {"priority": 1, "guided_decoding_backend": "x", "cache_salt": None}
    answer = post(make_app(service), "/v1/completions", {**body, **ignored})
    assert answer.headers["x-specctl-ignored"] == "guided_decoding_backend, priority"
    got = service.asks[0]
    assert (got.sampling.ignore_eos, got.sampling.stop_token_ids) == (True, (7, 8))
    assert (got.sampling.top_k, got.drafts) == (None, False)
    assert len(got.sampling.processors) == 1
    plain = post(make_app(), "/v1/completions", {"prompt": "x"})
    assert "x-specctl-ignored" not in plain.headers
    said = {"messages": HELLO, "reasoning_effort": "low", "stream": True}
    chat = post(make_app(), "/v1/chat/completions", said)
    assert chat.headers["x-specctl-ignored"] == "reasoning_effort"


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"guided_json": {"type": "object"}}, "json_schema"),
        ({"guided_json": '{"type": "object"}'}, "json_schema"),
        ({"guided_regex": "a+"}, "regex"),
        ({"guided_choice": ["yes", "no"]}, "lark"),
        ({"guided_grammar": 'root ::= "a" | "b"'}, "lark"),
        ({"structured_outputs": {"choice": ["a/b", 'c"d']}}, "lark"),
        ({"structured_outputs": {"json": {"type": "object"}}}, "json_schema"),
        ({"structured_outputs": {"json_object": True}}, "json_object"),
    ],
)
def test_guided_fields_are_grammars(fields: dict[str, Any], kind: str) -> None:
    service = StubService()
    answer = post(make_app(service), "/v1/completions", {"prompt": "x", **fields})
    assert answer.status_code == 200, answer.text
    assert service.asks[0].sampling.grammar.spec.kind == kind


# -- smaller routes --------------------------------------------------------------------------------


def test_texts_are_made_tokens_and_tokens_texts() -> None:
    service = StubService()
    app = make_app(service)
    found = post(app, "/tokenize", {"prompt": "def f():", "return_token_strs": True}).json()
    assert found["tokens"] == service.target.encode("def f():")
    assert (found["count"], len(found["token_strs"])) == (len(found["tokens"]),) * 2
    assert found["max_model_len"] == 1024
    back = post(app, "/detokenize", {"tokens": found["tokens"]}).json()
    assert back == {"prompt": "def f():"}
    chat = post(app, "/tokenize", {"messages": HELLO}).json()["tokens"]
    post(app, "/v1/chat/completions", {"messages": HELLO})
    assert service.asks[0].tokens == tuple(chat)
    assert error_of(post(app, "/detokenize", {"tokens": [1 << 20]}))["param"] == "tokens"
    assert "either prompt or messages" in error_of(post(app, "/tokenize", {}))["message"]


def test_version_and_what_is_not_served() -> None:
    app = make_app()
    assert ask(app, "GET", "/version").json() == {"version": __version__}
    refused = post(app, "/v1/embeddings", {"input": "x", "model": "tiny"})
    assert (refused.status_code, error_of(refused)["code"]) == (404, "unsupported_endpoint")
    assert "embeddings are not served" in error_of(refused)["message"]


def test_docs_are_a_page_of_their_own_that_names_every_route_and_field() -> None:
    app = make_app()
    page = ask(app, "GET", "/docs")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    schema = app.openapi()
    for path in schema["paths"]:
        assert path in page.text
    for name in ("messages", "tool_choice", "previous_response_id", "guided_json"):
        assert f"<code>{name}</code>" in page.text
    assert "://" not in page.text
    assert "<script" not in page.text


# -- the embedded target ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tiny_target: Target) -> Iterator[openai.OpenAI]:
    service = Service(tiny_target, limits=Limits(max_batch=4, max_len=512))
    with running(service, style=ChatStyle.of(tiny_target, "hermes")) as found:
        yield openai.OpenAI(api_key="none", base_url=f"{found.url}/v1", max_retries=0)


def test_a_strict_call_of_the_embedded_target_is_always_one(real: openai.OpenAI) -> None:
    """It has never seen a tool: whatever it draws, the grammar makes a call of it."""
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": [strict], "seed": 1}
    asked |= {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    choice = real.chat.completions.create(**asked, temperature=1.3).choices[0]
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "unit"}
    assert arguments["unit"] in ("C", "F")
    assert len(arguments["city"]) <= 12
    with real.chat.completions.stream(**asked, temperature=1.3) as stream:
        built = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert built.function.arguments == call.function.arguments


def test_min_tokens_and_stop_tokens_hold_in_the_engine(real: openai.OpenAI) -> None:
    url = str(real.base_url) + "completions"
    body = {"prompt": "def f(x):", "max_tokens": 24, "temperature": 0, "logit_bias": {"1": 100}}
    short = httpx.post(url, json=body, timeout=60).json()
    assert short["usage"]["completion_tokens"] == 1, "the end of the text is drawn at once"
    longer = httpx.post(url, json={**body, "min_tokens": 7}, timeout=60).json()
    assert longer["usage"]["completion_tokens"] == 8
    plain = {"prompt": "def f(x):", "max_tokens": 12, "temperature": 0, "logprobs": 0}
    tokens = httpx.post(url, json=plain, timeout=60).json()["choices"][0]["text"]
    root = str(real.base_url).replace("/v1/", "")
    ids = httpx.post(f"{root}/tokenize", json={"prompt": tokens}, timeout=60).json()["tokens"]
    stopped = httpx.post(url, json={**plain, "stop_token_ids": [ids[1]]}, timeout=60).json()
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] <= 2
