"""Where answers of the server end: fields that mean what they mean in vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI

from specctl.runtime.target.target import Target
from specctl_testing.runtime.served_target import served
from specctl_testing.runtime.web import events, post

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPT = "import os\nimport sys\nimport os\nimport sys\nimport"
GREEDY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
USER = "<|user|>"


@pytest.fixture(scope="module")
def app(tiny_target: Target) -> Iterator[FastAPI]:
    """The embedded target, with a drafter, in this process."""
    with served(tiny_target, max_batch=2) as app:
        yield app


def choice(app: FastAPI, **fields: Any) -> dict[str, Any]:
    """The choice of an answer; that of a stream has the same text and ends the same way."""
    answer = post(app, TEXT, {**GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    [whole] = answer.json()["choices"]
    chunks = events(post(app, TEXT, {**GREEDY, **fields, "stream": True}))[:-1]
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for name in ("finish_reason", "stop_reason"):
        assert parts[-1][name] == whole[name]
        assert all(part[name] is None for part in parts[:-1])
    if whole["logprobs"] is not None:
        told = [at for part in parts for at in (part["logprobs"] or {}).get("text_offset", [])]
        assert told == whole["logprobs"]["text_offset"]
    return whole


def drawn(token: int) -> dict[str, Any]:
    """Fields that make the target draw this token and no other."""
    return {"logit_bias": {str(token): 100}}


def marker(target: Target, name: str) -> int:
    return int(target.tokenizer.convert_tokens_to_ids(name))


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("stop", [None, ["\nimport o"], ["import sys\nimport o"], ["sys"]])
def test_text_offset_is_where_a_token_begins_whatever_is_looked_for(
    app: FastAPI, draft: bool, stop: list[str] | None
) -> None:
    logprobs = choice(app, logprobs=1, stop=stop, draft=draft)["logprobs"]
    at, places = 0, []
    for token in logprobs["tokens"]:
        places.append(at)
        at += len(token)
    assert logprobs["text_offset"] == places


@pytest.mark.parametrize("stop", [USER, [USER], ["no", USER]])
def test_a_stop_string_that_is_a_control_token_stops(
    app: FastAPI, tiny_target: Target, stop: Any
) -> None:
    found = choice(app, stop=stop, **drawn(marker(tiny_target, USER)))
    assert (found["finish_reason"], found["stop_reason"], found["text"]) == ("stop", USER, "")
    talk = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "stop": stop}
    chat = post(app, CHAT, {**talk, **drawn(marker(tiny_target, USER))}).json()
    assert chat["usage"]["completion_tokens"] == 1
    assert chat["choices"][0]["stop_reason"] == USER


def test_control_tokens_are_spelled_where_they_are_not_to_be_skipped(
    app: FastAPI, tiny_target: Target
) -> None:
    always = {**drawn(marker(tiny_target, USER)), "max_tokens": 3}
    assert choice(app, **always)["text"] == ""
    assert choice(app, **always, skip_special_tokens=True)["text"] == ""
    assert choice(app, **always, skip_special_tokens=False)["text"] == USER * 3
    answer = post(app, TEXT, {**GREEDY, "skip_special_tokens": False})
    assert "x-specctl-ignored" not in answer.headers


def test_the_end_of_a_text_is_told_only_where_it_is_kept_and_not_skipped(
    app: FastAPI, tiny_target: Target
) -> None:
    end = tiny_target.eos_ids[0]
    spelled = str(tiny_target.tokenizer.convert_ids_to_tokens(end))
    shown, kept = {"skip_special_tokens": False}, {"include_stop_str_in_output": True}
    for fields, text in (({}, ""), (shown, ""), (kept, ""), ({**shown, **kept}, spelled)):
        found = choice(app, **drawn(end), **fields)
        assert (found["text"], found["finish_reason"]) == (text, "stop"), fields
        assert found["stop_reason"] is None


def test_the_text_ends_with_the_stop_string_where_that_is_included(app: FastAPI) -> None:
    whole = choice(app)["text"]
    stop = whole[3:5]
    before = whole[: whole.index(stop)]
    found = choice(app, stop=stop)
    assert (found["text"], found["stop_reason"]) == (before, stop)
    kept = choice(app, stop=stop, include_stop_str_in_output=True)
    assert (kept["text"], kept["stop_reason"]) == (before + stop, stop)


def test_a_stop_token_is_named_and_its_text_is_left_out_unless_it_is_included(
    app: FastAPI, tiny_target: Target
) -> None:
    whole = choice(app)["text"]
    ids = tiny_target.tokenizer.encode(PROMPT + whole, add_special_tokens=False)
    new = ids[len(tiny_target.tokenizer.encode(PROMPT, add_special_tokens=False)) :]
    before, word = tiny_target.decode(new[:1]), tiny_target.decode(new[1:2])
    assert whole.startswith(before + word)
    found = choice(app, stop_token_ids=[new[1]])
    assert (found["text"], found["stop_reason"]) == (before, new[1])
    kept = choice(app, stop_token_ids=[new[1]], include_stop_str_in_output=True)
    assert (kept["text"], kept["finish_reason"]) == (before + word, "stop")
