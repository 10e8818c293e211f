"""The official `openai` client, unchanged, through a real server on a port of its own."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from specctl.server.auth import Keys
from specctl.server.engine_thread.contract import Busy
from specctl_testing.runtime.serving import StubService
from specctl_testing.runtime.web import Running, running

ANSWER = StubService().text
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(StubService(), keys=Keys.of(["right"])) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(api_key="right", base_url=f"{server.url}/v1", max_retries=0)


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "specctl"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_a_chat_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HELLO, n=2)
    assert [choice.message.content for choice in answer.choices] == [ANSWER] * 2
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id.startswith("req-")


def test_a_chat_is_streamed_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == ANSWER
    assert chunks[-1].usage.completion_tokens == 12


def test_the_helper_for_streams_builds_the_same_answer(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=HELLO) as stream:
        kinds = {event.type for event in stream}
        built = stream.current_completion_snapshot
    assert built.choices[0].message.content == ANSWER
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_a_completion_is_answered_and_streamed(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "def", "max_tokens": 12, "seed": 1, "stop": ["@"]}
    assert client.completions.create(**asked).choices[0].text == ANSWER
    stream = client.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == ANSWER


def test_logprobs_come_in_both_shapes(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=3
    )
    content = chat.choices[0].logprobs.content
    assert b"".join(bytes(one.bytes) for one in content).decode() == "def add(a"
    assert [len(one.top_logprobs) for one in content] == [2, 2, 2]
    text = client.completions.create(model="tiny", prompt="x", logprobs=2, max_tokens=3)
    found = text.choices[0].logprobs
    assert (found.tokens, found.text_offset) == (["def", " add", "(a"], [0, 3, 7])
    assert found.token_logprobs == [-0.5] * 3
    assert [len(top) for top in found.top_logprobs] == [2, 2, 2]


def test_extensions_pass_through_extra_body(client: openai.OpenAI) -> None:
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "specctl": True}
    answer = client.chat.completions.create(model="tiny", messages=HELLO, extra_body=extra)
    assert answer.model_extra["specctl"]["stats"]["verification"] == "lossless"


def test_the_raw_response_and_the_async_client_work(server: Running, client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=HELLO, extra_headers={"X-Request-Id": "mine.1"}
    )
    assert raw.headers["x-request-id"] == "mine.1"
    assert raw.parse().choices[0].message.content == ANSWER

    async def run() -> str:
        async with openai.AsyncOpenAI(api_key="right", base_url=f"{server.url}/v1") as one:
            found = await one.chat.completions.create(model="tiny", messages=HELLO)
            return found.choices[0].message.content

    import asyncio

    assert asyncio.run(run()) == ANSWER


def test_errors_are_the_exceptions_that_the_client_has_for_them(
    server: Running, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=3)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt", messages=HELLO)
    wrong = openai.OpenAI(api_key="wrong", base_url=f"{server.url}/v1", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_a_refusal_and_a_failure_reach_the_client_as_such() -> None:
    with running(StubService(refuse=Busy(2))) as server:
        client = openai.OpenAI(api_key="x", base_url=f"{server.url}/v1", max_retries=0)
        with pytest.raises(openai.RateLimitError) as busy:
            client.completions.create(model="tiny", prompt="x")
        assert busy.value.response.headers["retry-after"] == "2"
    with running(StubService(fail_after=1)) as server:
        client = openai.OpenAI(api_key="x", base_url=f"{server.url}/v1", max_retries=0)
        with pytest.raises(openai.APIError, match="the server failed"):
            list(client.completions.create(model="tiny", prompt="x", stream=True))
