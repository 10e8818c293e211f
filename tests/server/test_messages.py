"""What Anthropic's clients do, by the official `anthropic` client: messages, tools, thoughts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import anthropic
import httpx
import pytest

from specctl.runtime.measure.stats import RowStats
from specctl.server.engine_thread.contract import Piece
from specctl.server.replies.answers import Choice
from specctl.server.replies.messages import MessagesAnswer
from specctl.server.replies.tokens import TokenTexts
from specctl.server.requests.messages_fields import MessagesRequest
from specctl_testing.runtime.serving import StubService, stub_target
from specctl_testing.runtime.tool_targets import THINKING, WEATHER, tool_target
from specctl_testing.runtime.web import Running, running

PARIS = {"city": "Paris", "unit": "C"}
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(PARIS)}}}\n</tool_call>'
TEXT = f"<think>\nlook it up\n</think>\n\nOne moment.\n{CALL}"
TOOL: Any = {
    "name": "get_weather",
    "description": WEATHER["function"]["description"],
    "input_schema": WEATHER["function"]["parameters"],
}
HELLO: Any = [{"role": "user", "content": "weather?"}]
SENT: Any = {"model": "tiny", "max_tokens": 500, "tools": [TOOL]}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(StubService(text=TEXT, ends=True, target=tool_target(THINKING))) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(api_key="none", base_url=server.url, max_retries=0)


def test_a_message_has_blocks_and_goes_on_with_them(client: anthropic.Anthropic) -> None:
    found = client.messages.create(messages=HELLO, system="be brief", **SENT)
    assert [block.type for block in found.content] == ["thinking", "text", "tool_use"]
    thoughts, text, call = found.content
    assert (thoughts.thinking, text.text) == ("look it up", "One moment.")
    assert (call.name, call.input, found.stop_reason) == ("get_weather", PARIS, "tool_use")
    assert found.usage.input_tokens > 0
    assert found.usage.output_tokens > 0
    assert found.model_extra["specctl"]["stats"]["verification"] == "lossless"
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "21"}
    turns = [*HELLO, {"role": "assistant", "content": found.content}]
    turns.append({"role": "user", "content": [result, {"type": "text", "text": "and now?"}]})
    again = client.messages.create(messages=turns, **SENT)
    assert again.content[1].text == "One moment."


def test_a_stream_says_what_the_whole_message_says(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(messages=HELLO, **SENT)
    with client.messages.stream(messages=HELLO, **SENT) as stream:
        kinds = [event.type for event in stream]
        built = stream.get_final_message()
    assert [block.type for block in built.content] == [block.type for block in whole.content]
    assert [built.content[0].thinking, built.content[1].text] == ["look it up", "One moment."]
    assert (built.content[2].input, built.stop_reason) == (PARIS, "tool_use")
    assert built.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3


def test_the_events_are_named_and_numbered_as_the_protocol_says(server: Running) -> None:
    body = {**SENT, "messages": HELLO, "stream": True}
    text = httpx.post(f"{server.url}/v1/messages", json=body, timeout=60).text
    events = [part.split("\n") for part in text.strip().split("\n\n")]
    found = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert [name.removeprefix("event: ") for name, _ in events] == [one["type"] for one in found]
    assert "[DONE]" not in text
    starts = [one for one in found if one["type"] == "content_block_start"]
    assert [one["index"] for one in starts] == [0, 1, 2]
    assert starts[2]["content_block"]["input"] == {}
    deltas = {one["delta"]["type"] for one in found if one["type"] == "content_block_delta"}
    assert deltas == {"thinking_delta", "text_delta", "input_json_delta"}


@pytest.mark.parametrize(
    ("ended", "by", "reason", "sequence"),
    [
        ("stop", "END", "stop_sequence", "END"),
        ("stop", 7, "end_turn", None),  # a token of the target
        ("eos", None, "end_turn", None),
        ("length", None, "max_tokens", None),
        ("context", None, "max_tokens", None),
    ],
)
def test_why_a_message_ended(
    ended: str, by: str | int | None, reason: str, sequence: str | None
) -> None:
    piece = Piece((1, 2), (False, True), "Hi", ("H", "i"), None, ended, (0, 1), by)

    def answer() -> tuple[MessagesAnswer, Choice]:
        choice = Choice(0, cast(Any, SimpleNamespace(stats=RowStats())))
        about = {"verification": "lossless", "tells_rounds": False, "tells_usage": False}
        texts = TokenTexts(stub_target())
        return MessagesAnswer("tiny", texts, **about, prompt_tokens=3, has_logprobs=False,
                              choices=(choice,)), choice  # fmt: skip

    whole, choice = answer()
    whole.add(choice, piece)
    found = whole.whole()
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)
    assert found["content"] == [{"type": "text", "text": "Hi"}]
    streamed, choice = answer()
    sent = [*streamed.opening(), *streamed.events(choice, piece), *streamed.closing()]
    last = json.loads(sent[-2].split(b"data: ")[1])
    assert last["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert last["usage"]["output_tokens"] == found["usage"]["output_tokens"] == 2


def test_tokens_are_counted_without_an_answer(client: anthropic.Anthropic) -> None:
    few = client.messages.count_tokens(model="tiny", messages=HELLO).input_tokens
    more = client.messages.count_tokens(model="tiny", messages=HELLO, tools=[TOOL]).input_tokens
    assert 0 < few < more
    sent = {**SENT, "tools": []}
    assert client.messages.create(messages=HELLO, **sent).usage.input_tokens == few


@pytest.mark.parametrize(
    ("body", "error", "kind", "said"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "not_found_error", "'tiny' is"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error", "max_tokens"),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": "It is"}]},
            anthropic.BadRequestError, "invalid_request_error", "ends with the assistant's words",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            anthropic.BadRequestError, "invalid_request_error", "image",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            anthropic.BadRequestError, "invalid_request_error", "tools[0]",
        ),
        (
            {"tool_choice": {"type": "tool", "name": "unknown"}},
            anthropic.BadRequestError, "invalid_request_error", "'unknown'",
        ),
        (
            {"extra_body": {"mcp_servers": [{"name": "x"}]}},
            anthropic.BadRequestError, "invalid_request_error", "mcp_servers",
        ),
    ],
)  # fmt: skip
def test_refusals_have_the_shape_that_its_clients_read(
    client: anthropic.Anthropic, body: Any, error: type[anthropic.APIStatusError], kind: str,
    said: str,
) -> None:  # fmt: skip
    with pytest.raises(error) as caught:
        client.messages.create(**{**SENT, "messages": HELLO, **body})
    found: Any = caught.value.body
    assert found["type"] == "error"
    assert found["error"]["type"] == kind
    assert said in found["error"]["message"]


def test_a_request_becomes_the_chat_request_that_says_the_same() -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": PARIS}
    image_free = [{"type": "text", "text": "21"}, {"type": "text", "text": "degrees"}]
    body = MessagesRequest.model_validate(
        {
            **SENT,
            "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "messages": [
                *HELLO,
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "redacted_thinking", "data": "y"},
                    {"type": "text", "text": "One moment."},
                    call,
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": image_free},
                    {"type": "text", "text": "so?"},
                ]},
            ],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "thinking": {"type": "disabled"},
            "stop_sequences": ["END", ""],
            "metadata": {"user_id": "u1"},
            "output_config": {"effort": "max"},
            "top_k": 5,
        }
    )  # fmt: skip
    chat = body.as_chat()
    roles = [message.role for message in chat.messages]
    assert roles == ["system", "user", "assistant", "tool", "user"]
    assert [message.text for message in chat.messages] == [
        "a\nb", "weather?", "One moment.", "21\ndegrees", "so?"
    ]  # fmt: skip
    assert json.loads(chat.messages[2].tool_calls[0].function.arguments) == PARIS  # type: ignore[union-attr,index]
    assert chat.messages[2].reasoning_content == "hm"  # type: ignore[union-attr]
    assert (chat.tool_choice, chat.parallel_tool_calls) == ("required", False)
    assert (chat.reasoning_effort, chat.stop, chat.tenant) == ("none", ["END"], "u1")
    assert (chat.max_tokens, chat.top_k) == (500, 5)
    body.thinking = None
    assert body.as_chat().reasoning_effort == "xhigh"
