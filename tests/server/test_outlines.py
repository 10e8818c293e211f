"""Answers from outlines over HTTP: the text, whole and streamed, what is counted and marked, stops,
cancellation, refusals."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fastapi import FastAPI

from specctl.server.engine_thread.contract import Busy, GenerateRequest, Ticket
from specctl.server.engine_thread.service import Limits, Service
from specctl.server.requests.generate_request import may_be_kept
from specctl.server.requests.protocol import ChatRequest
from specctl_testing.runtime.scripted import LIST, TEXTS, Script, scripted, with_blanks_stripped
from specctl_testing.runtime.web import error_of, events, make_app, post

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "How do trees grow?"}], "temperature": 0}
WHOLE = "\n\n".join(TEXTS.values())
GRAPH = "1. Roots (needs: none)\n2. The trunk (needs: none)\n3. Leaves (needs: 1)"


@contextmanager
def served(
    script: Callable[[str], str], refused: str = "", **limits: Any
) -> Iterator[tuple[FastAPI, Service, list[int]]]:
    """The app, its service, and how many rows every forward had. `refused`: what the template
    refuses."""
    target, lm = scripted(script)
    target = with_blanks_stripped(target)
    if refused:
        refusal = "{% if " + refused + " %}{{ raise_exception('not so') }}{% endif %}"
        target.tokenizer.chat_template = refusal + target.tokenizer.chat_template
    service = Service(target, limits=Limits(**{"max_len": 1024, "max_batch": 4, **limits}))
    app = make_app(service)  # type: ignore[arg-type]
    while service.status().state == "loading":
        time.sleep(0.005)
    lm.widths.clear()
    try:
        yield app, service, lm.widths
    finally:
        service.stop()


def streamed(app: FastAPI, body: dict[str, Any]) -> tuple[str, list[Any], Any]:
    """The text of a stream, its chunks, and the response."""
    sent = post(app, CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}})
    chunks = events(sent)
    assert chunks.pop() == "[DONE]"
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas), chunks, sent


@pytest.mark.parametrize(
    ("kind", "listed", "waves", "slots"),
    [
        ("skeleton", LIST, [[1, 2, 3]], 4),
        ("skeleton-graph", GRAPH, [[1, 2], [3]], 4),
        ("skeleton", LIST, [[1, 2, 3]], 1),
    ],
)
def test_points_are_rows_of_one_batch_and_one_answer(
    kind: str, listed: str, waves: list[list[int]], slots: int
) -> None:
    """Also where the server has one row and no queue: an answer that has begun waits."""
    texts = {**TEXTS, 1: TEXTS[1] + "\n2. The trunk"}
    queue = {"max_queue": 2} if slots == 1 else {}
    with served(Script(listed, texts), max_batch=slots, **queue) as (app, service, widths):
        whole = post(app, CHAT, {**BODY, "outline": kind})
        said = whole.json()
        [choice] = said["choices"]
        assert choice["message"]["content"] == WHOLE
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] is None
        assert whole.headers["X-Specctl-Verification"] == f"approximate:{kind}"
        stats = said["specctl"]["stats"]
        assert stats["verification"] == f"approximate:{kind}"
        assert stats["outline"]["waves"] == waves
        assert said["usage"]["completion_tokens"] == stats["outline"]["tokens"]
        assert stats["outline"]["outline_tokens"] > 0
        assert max(widths) == min(len(waves[0]), slots)
        text, chunks, sent = streamed(app, {**BODY, "outline": kind})
        assert text == WHOLE
        assert sent.headers["X-Specctl-Verification"] == f"approximate:{kind}"
        assert chunks[-1]["usage"] == said["usage"]
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
        assert chunks[-2]["specctl"]["stats"]["outline"] == stats["outline"]
        assert service.counters.requests.get("eos", 0) + service.counters.requests["stop"] == 8


def slowly(script: Script) -> Callable[[str], str]:
    """That script, which takes its time for every token."""

    def say(prompt: str) -> str:
        time.sleep(0.02)
        return script(prompt)

    return say


def test_points_do_not_wait_for_one_another_in_the_queue() -> None:
    """An answer whose points are more than the rows ends, however long it takes."""
    with served(slowly(Script(LIST, TEXTS)), max_batch=1, max_queue=0, queue_timeout=0.15) as (
        app,
        service,
        _,
    ):
        answer = post(app, CHAT, {**BODY, "outline": "skeleton"})
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"] == WHOLE
        assert "refused" not in service.counters.requests


@pytest.mark.parametrize("listed", [LIST, "I write no lists."])
def test_an_answer_that_has_begun_waits_where_the_queue_is_full(
    monkeypatch: pytest.MonkeyPatch, listed: str
) -> None:
    with served(Script("1. " + listed.removeprefix("1. "), TEXTS)) as (app, service, _):
        refused, submit = list[GenerateRequest](), service.submit

        async def full_once(request: GenerateRequest) -> Ticket:
            if request.goes_on and not refused:
                refused.append(request)
                raise Busy(1)
            return await submit(request)

        monkeypatch.setattr(service, "submit", full_once)
        answer = post(app, CHAT, {**BODY, "outline": "skeleton"})
        assert refused
        assert answer.status_code == 200
        text = answer.json()["choices"][0]["message"]["content"]
        assert text == (WHOLE if listed == LIST else "They do.")


@pytest.mark.parametrize("more", [{}, {"outline_points": 1}])
def test_without_an_outline_the_answer_is_the_plain_one(more: dict[str, int]) -> None:
    with served(Script("1. I do not write lists.", TEXTS)) as (app, _, _):
        plain = post(app, CHAT, BODY)
        ours = post(app, CHAT, {**BODY, "outline": "skeleton", **more})
        assert ours.json()["choices"] == plain.json()["choices"]
        assert streamed(app, {**BODY, "outline": "skeleton", **more})[0] == "They do."
        report = ours.json()["specctl"]["stats"]["outline"]
        assert report["why_plain"]
        extra = [one.json()["usage"]["completion_tokens"] for one in (ours, plain)]
        assert extra[0] - extra[1] == report["outline_tokens"]
        assert (report["outline_tokens"] == 0) == bool(more)
        assert "X-Specctl-Verification" not in plain.headers
        assert "outline" not in plain.json()["specctl"]["stats"]


@pytest.mark.parametrize(
    ("stop", "text"),
    [("rises", "1. Roots: they drink.\n\n2. The trunk: it "), ("\n\n2.", "1. Roots: they drink.")],
)
def test_a_stop_string_ends_the_answer_and_the_points_behind_it(stop: str, text: str) -> None:
    long = {**TEXTS, 3: TEXTS[3] + " more" * 300}
    with served(Script(LIST, long)) as (app, service, _):
        answer = post(app, CHAT, {**BODY, "outline": "skeleton", "stop": stop}).json()
        [choice] = answer["choices"]
        assert choice["message"]["content"] == text
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        report = answer["specctl"]["stats"]["outline"]
        assert answer["usage"]["completion_tokens"] == report["tokens"]
        assert streamed(app, {**BODY, "outline": "skeleton", "stop": [stop]})[0] == text
        assert service.counters.tokens < 200  # of the last point


def test_the_limit_is_that_of_the_whole_answer() -> None:
    long = {number: text + " more" * 300 for number, text in TEXTS.items()}
    with served(Script(LIST, long)) as (app, _, _):
        answer = post(app, CHAT, {**BODY, "outline": "skeleton", "max_tokens": 80}).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert 75 < answer["usage"]["completion_tokens"] <= 80
        text = answer["choices"][0]["message"]["content"]
        assert all(text.count(f"{number}. ") == 1 for number in TEXTS)


def test_draining_finishes_an_answer_that_has_begun() -> None:
    """Also its points that are not requests yet."""
    import asyncio

    import httpx

    with served(slowly(Script(GRAPH, TEXTS))) as (app, service, _):

        async def drained() -> tuple[bool, Any]:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                sent = client.post(CHAT, json={**BODY, "outline": "skeleton-graph"})
                answer = asyncio.create_task(sent)
                while not service.status().running:
                    await asyncio.sleep(0.005)
                is_drained = await service.drain(30)
                return is_drained, await answer

        is_drained, answer = asyncio.run(asyncio.wait_for(drained(), 30))
        assert is_drained
        assert answer.json()["choices"][0]["message"]["content"] == WHOLE
        assert not service.answers


def test_who_leaves_takes_all_points_along() -> None:
    import asyncio

    import httpx

    long = {number: text + " more" * 3000 for number, text in TEXTS.items()}
    with served(Script(LIST, long), max_len=2048) as (app, service, _):

        async def leave() -> None:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                answer = client.post(CHAT, json={**BODY, "outline": "skeleton"})
                task = asyncio.create_task(answer)
                while service.status().running < 3:
                    await asyncio.sleep(0.005)
                task.cancel()
                while service.status().running:
                    await asyncio.sleep(0.005)

        asyncio.run(asyncio.wait_for(leave(), 30))
        assert service.counters.requests["cancelled"] == 3


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"n": 2}, "n does not go"),
        ({"logprobs": True}, "logprobs does not go"),
        ({"response_format": {"type": "json_object"}}, "response_format does not go"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools does not go"),
        ({"min_tokens": 3}, "min_tokens does not go"),
        ({"outline": "skeletons"}, "skeleton-graph"),
        ({"outline": None, "outline_points": 3}, "needs outline"),
    ],
)
def test_what_speaks_of_one_text_is_refused_by_name(more: dict[str, Any], named: str) -> None:
    answer = post(make_app(), CHAT, {**BODY, "outline": "skeleton", **more})
    assert answer.status_code == 400
    assert named in error_of(answer)["message"]


def test_conversations_that_the_template_does_not_take_are_refused() -> None:
    """Those that are written for the outline, too."""
    alone = {**BODY, "messages": [{"role": "assistant", "content": "Yes."}]}
    with served(Script(LIST, TEXTS), "messages|length > 1") as (app, _, _):
        assert post(app, CHAT, alone).status_code == 200
        answer = post(app, CHAT, {**alone, "outline": "skeleton"})
        assert answer.status_code == 400
        assert "not so" in error_of(answer)["message"]


def test_a_point_that_the_context_has_no_room_for_has_no_text() -> None:
    """The last of eight, which would read all others."""
    titles = {number: f"{number}. Part{number}" for number in range(1, 9)}
    texts = {number: title + ":" + " more" * 300 for number, title in titles.items()}
    with served(Script("\n".join(titles.values()), texts), max_len=512) as (app, _, _):
        answer = post(app, CHAT, {**BODY, "outline": "skeleton-graph"})
        assert answer.status_code == 200
        [choice] = answer.json()["choices"]
        written = choice["message"]["content"].split("\n\n")
        assert written[0].startswith("1. Part1: more more")
        assert written[-1] == "8. Part8:"
        assert len(written) == 8
        assert choice["finish_reason"] == "length"


def test_outlines_are_written_in_chats_and_kept_nowhere() -> None:
    app = make_app()
    refused = post(app, "/v1/completions", {"prompt": "x", "outline": "skeleton"})
    assert refused.status_code == 400
    assert "/v1/chat/completions" in error_of(refused)["message"]
    assert may_be_kept(ChatRequest(**BODY))  # type: ignore[arg-type]
    assert not may_be_kept(ChatRequest(**BODY, outline="skeleton"))  # type: ignore[arg-type]
