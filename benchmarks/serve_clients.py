"""Clients that people use, unchanged: the openai package, huggingface_hub, httpx, curl, urllib.
Every flow returns the text that it was answered with, or asserts what it expects."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import httpx
import openai
import pydantic
from huggingface_hub import InferenceClient
from serve_common import CHAT, NAME, TEXT, Server

HELLO: list[Any] = [{"role": "user", "content": "def add(a, b):"}]
DRAWN: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
Flow = Callable[[Server], str]


def _openai(server: Server) -> openai.OpenAI:
    return openai.OpenAI(api_key=server.key or "none", base_url=f"{server.url}/v1", max_retries=0)


def _headers(server: Server) -> dict[str, str]:
    return {"Authorization": f"Bearer {server.key}"} if server.key else {}


def openai_chat(server: Server) -> str:
    answer = _openai(server).chat.completions.create(model=NAME, messages=HELLO, **DRAWN)
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    return answer.choices[0].message.content or ""


def openai_chat_stream(server: Server) -> str:
    asked: dict[str, Any] = {"model": NAME, "messages": HELLO, **DRAWN}
    counted: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = _openai(server).chat.completions.create(**asked, **counted)
    assert last.usage.completion_tokens == DRAWN["max_tokens"], last
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def openai_async(server: Server) -> str:
    """Eight at once; all get the same answer."""

    async def run() -> list[str]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(api_key=server.key or "none", base_url=url) as client:
            asked = [
                client.chat.completions.create(model=NAME, messages=HELLO, **DRAWN)
                for _ in range(8)
            ]
            return [a.choices[0].message.content or "" for a in await asyncio.gather(*asked)]

    found = set(asyncio.run(run()))
    assert len(found) == 1, found
    return found.pop()


def openai_completion(server: Server) -> str:
    """Whole and streamed; returned is what a chat client would see of the models."""
    asked: dict[str, Any] = {"model": NAME, "prompt": "def add(", "logprobs": 2, **DRAWN}
    client = _openai(server)
    whole = client.completions.create(**asked).choices[0]
    chunks = list(client.completions.create(**asked, stream=True))
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == whole.text, (text, whole.text)
    assert whole.logprobs is not None
    assert len(whole.logprobs.tokens or ()) == len(whole.logprobs.token_logprobs or ()) > 0
    return whole.text


def openai_structured(server: Server) -> str:
    """An answer held to a schema is JSON of that schema."""
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "maximum": 99}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = _openai(server).chat.completions.create(
        model=NAME, messages=HELLO, temperature=0, max_tokens=100, response_format=form
    )
    text = answer.choices[0].message.content or ""
    found = json.loads(text)
    assert isinstance(found["ok"], bool), text
    assert isinstance(found["n"], int), text
    return text


class Point(pydantic.BaseModel):
    """What the next flow asks for; bounded, so that an answer fits its tokens."""

    name: Literal["origin", "centre"]
    x: Annotated[int, pydantic.Field(ge=-99, le=99)]


def openai_parse(server: Server) -> str:
    """The client's own helper: a class in, an object of it out."""
    answer = _openai(server).chat.completions.parse(
        model=NAME, messages=HELLO, temperature=0, max_tokens=100, response_format=Point
    )
    found = answer.choices[0].message.parsed
    assert isinstance(found, Point), answer
    return found.name


def openai_models(server: Server) -> str:
    client = _openai(server)
    assert [model.id for model in client.models.list()] == [NAME]
    return client.models.retrieve(NAME).id


def openai_errors(server: Server) -> str:
    """A refusal is the exception that the client has for it, with the field that was wrong."""
    refused: openai.BadRequestError | None = None
    try:
        _openai(server).chat.completions.create(model=NAME, messages=HELLO, temperature=3)
    except openai.BadRequestError as error:
        refused = error
    assert refused is not None, "a temperature of 3 was taken"
    assert (refused.param, refused.code) == ("temperature", "invalid_value"), refused
    return str(refused.code)


def httpx_stream(server: Server) -> str:
    body = {"messages": HELLO, "stream": True, **DRAWN}
    parts: list[str] = []
    with httpx.stream("POST", server.url + CHAT, json=body, headers=_headers(server)) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
                parts.append(delta.get("content", ""))
    return "".join(parts)


def httpx_kept_alive(server: Server) -> str:
    """Many requests on one connection."""
    with httpx.Client(base_url=server.url, headers=_headers(server)) as client:
        bodies = [client.post(CHAT, json={"messages": HELLO, **DRAWN}).json() for _ in range(3)]
    texts = {body["choices"][0]["message"]["content"] for body in bodies}
    assert len(texts) == 1, texts
    return str(texts.pop())


def _curl(server: Server, path: str, body: Any) -> str:
    curl = shutil.which("curl")
    assert curl is not None, "curl is not installed"
    words = [curl, "-sS", "-N", server.url + path, "-H", "Content-Type: application/json"]
    for name, value in _headers(server).items():
        words += ["-H", f"{name}: {value}"]
    done = subprocess.run([*words, "-d", json.dumps(body)], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def curl_whole(server: Server) -> str:
    found = json.loads(_curl(server, CHAT, {"messages": HELLO, **DRAWN}))
    return str(found["choices"][0]["message"]["content"])


def curl_stream(server: Server) -> str:
    sent = _curl(server, TEXT, {"prompt": "def add(", "stream": True, **DRAWN})
    blocks = sent.strip().split("\n\n")
    assert blocks[-1] == "data: [DONE]", blocks[-1]
    chunks = [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def hub_chat(server: Server) -> str:
    """A conversation of several turns, as command-line chats have it: what was answered is sent
    back, streamed."""
    client = InferenceClient(base_url=f"{server.url}/v1", api_key=server.key or "none")
    turns, first = [*HELLO], ""
    for _ in range(3):
        stream = client.chat_completion(
            turns, model=NAME, stream=True, temperature=0.0, max_tokens=12, seed=1
        )
        parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        first = first or "".join(parts)
        turns += [
            {"role": "assistant", "content": "".join(parts)},
            {"role": "user", "content": "x"},
        ]
    return first


def urllib_chat(server: Server) -> str:
    data = json.dumps({"messages": HELLO, **DRAWN}).encode()
    headers = {"Content-Type": "application/json", **_headers(server)}
    request = urllib.request.Request(server.url + CHAT, data, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


CHATS: tuple[Flow, ...] = (
    openai_chat, openai_chat_stream, openai_async, httpx_stream, httpx_kept_alive, curl_whole,
    hub_chat, urllib_chat,
)  # fmt: skip
COMPLETIONS: tuple[Flow, ...] = (openai_completion, curl_stream)
OTHERS: tuple[Flow, ...] = (openai_structured, openai_parse, openai_models, openai_errors)


def flow_faults(
    server: Server,
    chats: Sequence[Flow] = CHATS,
    completions: Sequence[Flow] = COMPLETIONS,
    others: Sequence[Flow] = OTHERS,
) -> list[str | None]:
    """What is wrong with each flow: all chats agree on the text, and so do all completions."""
    found: list[str | None] = []
    for flows in (chats, completions):
        texts = [_tried(flow, server) for flow in flows]
        found += [None if text == texts[0] and not isinstance(text, Exception)
                  else f"{flow.__name__}: {text!r}, others {texts[0]!r}"
                  for flow, text in zip(flows, texts, strict=True)]  # fmt: skip
    for flow in others:
        text = _tried(flow, server)
        found.append(f"{flow.__name__}: {text!r}" if isinstance(text, Exception) else None)
    return found


def _tried(flow: Flow, server: Server) -> str | Exception:
    try:
        return flow(server)
    except Exception as error:  # the report says which flow failed, and how
        return error
