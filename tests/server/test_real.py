"""The whole way, engine included: the embedded target behind HTTP, with prompt-lookup."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from specctl.drafters.training_free.prompt_lookup import PromptLookup, PromptLookupOptions
from specctl.runtime.generate import generate
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.server.engine_thread.service import Service
from specctl.server.requests.limits import Limits
from specctl_testing.runtime.web import Running, running

PROMPT = "import os\nimport sys\nimport os\nimport"
TALK = [{"role": "user", "content": "write a loop"}]


@pytest.fixture(scope="module")
def server(tiny_target: Target) -> Iterator[Running]:
    drafter = PromptLookup(PromptLookupOptions(), tiny_target.spec)
    with running(Service(tiny_target, drafter, limits=Limits(max_batch=4, max_len=256))) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0)


def test_a_greedy_completion_is_what_plain_generation_writes(
    client: openai.OpenAI, tiny_target: Target
) -> None:
    plain = generate(tiny_target, [PROMPT], sampling=Sampling(max_new_tokens=24)).outputs[0]
    found = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0)
    assert found.choices[0].text == plain.text
    assert found.model_extra["specctl"]["stats"]["accepted"] > 0


@pytest.mark.parametrize("seed", range(2))
def test_a_seeded_stream_says_what_the_whole_answer_says(client: openai.OpenAI, seed: int) -> None:
    asked = {"model": "tiny", "messages": TALK, "max_tokens": 24, "seed": seed, "temperature": 1.2}
    whole = client.chat.completions.create(**asked, n=2)
    stream = client.chat.completions.create(**asked, n=2, stream=True)
    texts = ["", ""]
    for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    again = client.chat.completions.create(**{**asked, "seed": seed + 1})
    assert again.choices[0].message.content == whole.choices[1].message.content


def test_logprobs_of_a_greedy_answer_are_those_of_the_best_token(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "messages": TALK, "max_tokens": 8, "temperature": 0}
    found = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    content = found.choices[0].logprobs.content
    assert len(content) == found.usage.completion_tokens
    for one in content:
        assert one.token == one.top_logprobs[0].token
        assert one.logprob == one.top_logprobs[0].logprob <= 0
    text = b"".join(bytes(one.bytes) for one in content).decode()
    assert text.startswith(found.choices[0].message.content)


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    text = client.completions.create(**asked).choices[0].text
    stop = text[len(text) // 2 :][:4]
    for stream in (False, True):
        found = client.completions.create(**asked, stop=[stop], stream=stream)
        choices = [chunk.choices[0] for chunk in (found if stream else [found])]
        assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
        assert choices[-1].finish_reason == "stop"


def test_an_answer_is_held_to_a_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["a", "b"]}, "size": {"type": "integer", "maximum": 99}},
        "required": ["name", "size"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    for seed in range(3):
        found = client.chat.completions.create(
            model="tiny", messages=TALK, response_format=form, seed=seed, max_tokens=200
        )
        thing = json.loads(found.choices[0].message.content)
        assert set(thing) == {"name", "size"}
        assert found.choices[0].finish_reason == "stop"


def test_an_answer_that_broke_off_in_its_form_is_an_error(
    client: openai.OpenAI, server: Running
) -> None:
    """Behind the first field the schema outgrows what the matcher takes on."""
    wide = {"type": "object", "properties": {f"property_{i}": {} for i in range(250)}}
    both = {"name": {"type": "string", "maxLength": 3}, "rest": wide}
    schema = {"type": "object", "properties": both, "required": ["name", "rest"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked: dict[str, Any] = {"model": "tiny", "messages": TALK, "temperature": 0}
    asked |= {"response_format": form, "max_tokens": 150}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**asked)
    assert refused.value.code == "grammar_exceeded"
    chunks: list[Any] = []
    with pytest.raises(openai.APIError, match="broke off"):
        chunks.extend(client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks).startswith("{")
    assert {chunk.choices[0].finish_reason for chunk in chunks} == {None}
    counted = httpx.get(f"{server.url}/metrics").text
    assert 'specctl:requests_total{outcome="grammar"} 2.0' in counted


def test_a_prompt_that_does_not_fit_is_told_both_counts(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="300 prompt tokens") as refused:
        client.completions.create(model="tiny", prompt=[7] * 300, max_tokens=4)
    assert refused.value.code == "context_length_exceeded"
