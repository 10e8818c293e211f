"""What Anthropic's clients do, by the official `anthropic` client: messages, tools, thoughts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from specctl.runtime.measure.stats import RowStats
from specctl.server.engine_thread.contract import Piece
from specctl.server.replies import sse
from specctl.server.replies.answers import Choice
from specctl.server.replies.messages import MessagesAnswer
from specctl.server.replies.tokens import TokenTexts
from specctl.server.requests.limits import Limits
from specctl.server.requests.messages_fields import MessagesRequest
from specctl_testing.runtime.serving import StubService, stub_target
from specctl_testing.runtime.tool_targets import THINKING, WEATHER, tool_target
from specctl_testing.runtime.web import Running, make_app, post, running

if TYPE_CHECKING:  # seconds, which collecting the tests does not need
    import anthropic

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
    limits = Limits(max_new_tokens=400)
    thinking = tool_target(THINKING)
    with running(StubService(text=TEXT, ends=True, target=thinking, limits=limits)) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> anthropic.Anthropic:
    import anthropic

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
    assert [one["type"] for one in found[:2]] == ["message_start", "ping"]
    assert [one for one in found if one["type"] == "ping"] == [{"type": "ping"}]
    starts = [one for one in found if one["type"] == "content_block_start"]
    assert [one["index"] for one in starts] == [0, 1, 2]
    assert starts[2]["content_block"]["input"] == {}
    deltas = {one["delta"]["type"] for one in found if one["type"] == "content_block_delta"}
    assert deltas == {"thinking_delta", "text_delta", "input_json_delta"}


@pytest.mark.parametrize(
    ("ended", "by", "room", "reason", "sequence"),
    [
        ("stop", "END", 99, "stop_sequence", "END"),
        ("stop", 7, 99, "end_turn", None),  # a token of the target
        ("eos", None, 5, "end_turn", None),
        ("length", None, 99, "max_tokens", None),
        ("length", None, 5, "model_context_window_exceeded", None),
        ("context", None, 5, "model_context_window_exceeded", None),
    ],
)
def test_why_a_message_ended(
    ended: str, by: str | int | None, room: int, reason: str, sequence: str | None
) -> None:
    piece = Piece((1, 2), (False, True), "Hi", ("H", "i"), None, ended, (0, 1), by)

    ticket = SimpleNamespace(stats=RowStats(), outline=None)
    whole, choice = _answer(ticket, room)
    whole.add(choice, piece)
    found = whole.whole()
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)
    assert found["content"] == [{"type": "text", "text": "Hi"}]
    streamed, choice = _answer(ticket, room)
    sent = [*streamed.opening(), *streamed.events(choice, piece), *streamed.closing()]
    last = json.loads(sent[-2].split(b"data: ")[1])
    assert last["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert last["usage"]["output_tokens"] == found["usage"]["output_tokens"] == 2


def test_a_stream_that_waits_sends_pings_but_not_before_it_has_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sse, "PAUSE", 0.05)
    ended: list[str] = []

    class Slow:
        stats, outline = RowStats(), None

        async def __aiter__(self) -> AsyncIterator[Piece]:
            try:
                for text, reason in (("a", None), ("b", "eos")):
                    await asyncio.sleep(0.12)
                    yield Piece((1,), (False,), text, (text,), None, reason, (0,), None)
            finally:
                ended.append("closed")

    async def kinds(most: int) -> list[str]:
        found: list[str] = []
        events = sse.events_of(_answer(Slow())[0])
        async for sent in events:
            found.append(json.loads(sent.split(b"data: ")[1])["type"])
            if len(found) == most:
                break
        await events.aclose()
        return found

    whole = asyncio.run(kinds(99))
    assert whole[:2] == ["message_start", "ping"]
    pings = [at for at, kind in enumerate(whole) if kind == "ping"]
    assert pings == [1, 4, 5], whole  # behind the first delta, while the second one is not there
    assert whole[-1] == "message_stop"
    # one that its client leaves while it waits ends its ticket's iteration
    assert asyncio.run(kinds(5))[-1] == "ping"
    assert ended == ["closed", "closed"]


def _answer(ticket: Any, room: int = 99) -> tuple[MessagesAnswer, Choice]:
    choice = Choice(0, ticket)
    about = {"verification": "lossless", "tells_rounds": False, "tells_usage": False}
    texts = TokenTexts(stub_target())
    return MessagesAnswer("tiny", texts, **about, prompt_tokens=3, has_logprobs=False,
                          choices=(choice,), max_tokens=9, context=room), choice  # fmt: skip


def test_models_have_the_shape_of_the_client_that_lists_them(
    client: anthropic.Anthropic, server: Running
) -> None:
    from anthropic import BadRequestError, NotFoundError

    [listed] = client.models.list(limit=5)
    assert (listed.type, listed.id, listed.lifecycle) == ("model", "tiny", "active")
    assert listed.created_at.tzinfo is not None
    assert listed.max_tokens == 400 < listed.max_input_tokens
    assert client.models.retrieve("tiny") == listed
    assert not client.models.list(after_id="tiny").data
    with pytest.raises(BadRequestError, match="limit"):
        client.models.list(limit=0)
    with pytest.raises(NotFoundError) as refused:
        client.models.retrieve("other")
    assert refused.value.body["error"]["type"] == "not_found_error"
    plain = httpx.get(f"{server.url}/v1/models").json()
    assert (plain["object"], plain["data"][0]["object"]) == ("list", "model")
    assert "code" in httpx.get(f"{server.url}/v1/models/other").json()["error"]


@pytest.mark.parametrize("chunk", [2, 23, 43, 60])
def test_a_call_is_one_block_of_a_stream_whatever_text_comes_with_its_end(chunk: int) -> None:
    text = f"{CALL}x{CALL}y"
    service = StubService(text=text, ends=True, chunk=chunk, target=tool_target(THINKING))
    body = {**SENT, "messages": HELLO, "stream": True}
    blocks: list[list[Any]] = []
    sent = post(make_app(service), "/v1/messages", body).text
    lines = [line for line in sent.splitlines() if line.startswith("data: ")]
    for one in map(json.loads, (line.removeprefix("data: ") for line in lines)):
        if one["type"] == "content_block_start":
            blocks.append([one["content_block"], ""])
        elif one["type"] == "content_block_delta":
            blocks[one["index"]][1] += one["delta"].get("partial_json", "")
    calls = [block for block in blocks if block[0]["type"] == "tool_use"]
    assert [json.loads(arguments) for _, arguments in calls] == [PARIS, PARIS]
    assert len({call["id"] for call, _ in calls} - {None}) == 2


def test_more_tokens_than_there_is_room_for_are_cut_to_it(client: anthropic.Anthropic) -> None:
    """Agents name the most that they ever take."""
    found = client.messages.create(**{**SENT, "max_tokens": 20_000}, messages=HELLO)
    assert found.stop_reason == "tool_use"
    service = StubService(text="a b c d e f", limits=Limits(max_new_tokens=4))
    body = {"max_tokens": 32_000, "messages": HELLO}
    short = post(make_app(service), "/v1/messages", body).json()
    assert (short["stop_reason"], short["usage"]["output_tokens"]) == ("max_tokens", 4)


def test_a_conversation_that_ends_with_the_assistant_is_counted(
    client: anthropic.Anthropic,
) -> None:
    turns: Any = [*HELLO, {"role": "assistant", "content": "It is"}]
    assert client.messages.count_tokens(model="tiny", messages=turns).input_tokens > 0


def test_tokens_are_counted_without_an_answer(client: anthropic.Anthropic) -> None:
    few = client.messages.count_tokens(model="tiny", messages=HELLO).input_tokens
    more = client.messages.count_tokens(model="tiny", messages=HELLO, tools=[TOOL]).input_tokens
    assert 0 < few < more
    sent = {**SENT, "tools": []}
    assert client.messages.create(messages=HELLO, **sent).usage.input_tokens == few


@pytest.mark.parametrize(
    ("body", "error", "kind", "said"),
    [
        ({"model": "other"}, "NotFoundError", "not_found_error", "'tiny' is"),
        ({"max_tokens": 0}, "BadRequestError", "invalid_request_error", "max_tokens"),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": "It is"}]},
            "BadRequestError", "invalid_request_error", "ends with the assistant's words",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "BadRequestError", "invalid_request_error", "content[0].source.type",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "BadRequestError", "invalid_request_error", "tools[0]",
        ),
        (
            {"tool_choice": {"type": "tool", "name": "unknown"}},
            "BadRequestError", "invalid_request_error", "'unknown'",
        ),
        (
            {"extra_body": {"mcp_servers": [{"name": "x"}]}},
            "BadRequestError", "invalid_request_error", "mcp_servers",
        ),
        (
            {"extra_body": {"thread": {"type": "continue", "previous_message_id": "msg_1"}}},
            "BadRequestError", "invalid_request_error", "threads are not supported",
        ),
        (
            {"messages": [{"role": "user", "content": "what? " * 900}]},
            "BadRequestError", "invalid_request_error", "prompt is too long",
        ),
    ],
)  # fmt: skip
def test_refusals_have_the_shape_that_its_clients_read(
    client: anthropic.Anthropic, body: Any, error: str, kind: str,
    said: str,
) -> None:  # fmt: skip
    import anthropic

    with pytest.raises(getattr(anthropic, error)) as caught:
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
    assert (chat.reasoning_effort, chat.stop) == ("none", ["END"])
    assert chat.tenant is not None
    assert (chat.max_tokens, chat.top_k) == (500, 5)
    body.thinking = None
    assert body.as_chat().reasoning_effort == "xhigh"


def test_turns_of_one_speaker_are_combined_and_the_system_may_speak_in_between() -> None:
    calls: Any = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": i, "name": "f", "input": {}}]}
        for i in ("a", "b")
    ]
    results = [{"type": "tool_result", "tool_use_id": i, "content": i} for i in ("a", "b")]
    turns = [*HELLO, {"role": "user", "content": [{"type": "text", "text": "well?"}]}, *calls]
    turns += [{"role": "user", "content": results}, {"role": "user", "content": "so?"}]
    turns += [{"role": "system", "content": [{"type": "text", "text": "be brief"}]}]
    chat = MessagesRequest.model_validate({**SENT, "messages": turns}).as_chat()
    found = [(message.role, message.text) for message in chat.messages]
    assert found == [
        ("user", "weather?\nwell?"), ("assistant", ""), ("tool", "a"), ("tool", "b"),
        ("user", "so?"), ("system", "be brief"),
    ]  # fmt: skip
    assert [call.id for call in chat.messages[1].tool_calls] == ["a", "b"]  # type: ignore[union-attr]


def test_fields_of_other_versions_of_its_clients_mean_the_same() -> None:
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    body: dict[str, Any] = {**SENT, "messages": HELLO, "prompt_cache_key": "talk"}
    one = MessagesRequest.model_validate({**body, "output_format": schema}).as_chat()
    other = MessagesRequest.model_validate({**body, "output_config": {"format": schema}}).as_chat()
    assert one == other
    assert (one.form_field, one.prompt_cache_key) == ("response_format", "talk")
    names = ["", "x" * 300, "y" * 300]
    tenants = [
        MessagesRequest.model_validate({**body, "metadata": {"user_id": name}}).as_chat().tenant
        for name in names
    ]
    assert tenants[0] is None
    assert None not in tenants[1:]
    assert len({*tenants}) == 3
    for kind, variables in [("enabled", {"enable_thinking": True}), ("between_tools", None)]:
        thinking = {"type": kind, "budget_tokens": 1024}
        chat = MessagesRequest.model_validate({**body, "thinking": thinking}).as_chat()
        assert chat.chat_template_kwargs == variables
