"""Answers of a fixed form over HTTP: what reaches the engine, and what a bad grammar may cost."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import httpx
import pytest

from specctl.runtime.sampling.grammar import GrammarError, GrammarSpec
from specctl.server.requests import grammar_compiler as forms
from specctl_testing.runtime.serving import StubService
from specctl_testing.runtime.web import BASE, error_of, make_app, post, request_all

TEXT = "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA},
                }
            },
            "json_schema",
        ),
        ({"grammar": {"type": "json_schema", "schema": SCHEMA}}, "json_schema"),
        ({"grammar": {"type": "regex", "pattern": "[0-9]+"}}, "regex"),
        ({"grammar": {"type": "lark", "grammar": 'start: "a"+'}}, "lark"),
    ],
)
def test_a_form_reaches_the_engine_compiled(fields: dict[str, Any], kind: str) -> None:
    service = StubService()
    assert post(make_app(service), TEXT, {"prompt": "x", **fields}).status_code == 200
    grammar = service.asks[0].sampling.grammar
    assert grammar is not None
    assert grammar.spec.kind == kind


def test_text_is_no_form() -> None:
    service = StubService()
    post(make_app(service), TEXT, {"prompt": "x", "response_format": {"type": "text"}})
    assert service.asks[0].sampling.grammar is None


@pytest.mark.parametrize(
    "fields",
    [
        {"grammar": {"type": "regex", "pattern": "(a"}},
        {"grammar": {"type": "regex", "pattern": "+"}},
        {"grammar": {"type": "regex", "pattern": "(" * 60_000 + ")" * 5_000}},
        {"grammar": {"type": "lark", "grammar": "start: nothing"}},
        {"grammar": {"type": "json_schema", "schema": {"type": "no such type"}}},
        {"grammar": {"type": "json_schema", "schema": {"$ref": "#/nowhere"}}},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
        {"grammar": {"type": "regex", "pattern": "a"}, "response_format": {"type": "text"}},
    ],
)
def test_a_grammar_that_is_wrong_is_400(fields: dict[str, Any]) -> None:
    service = StubService()
    response = post(make_app(service), TEXT, {"prompt": "x", **fields})
    assert response.status_code == 400
    assert "gramm" in error_of(response)["message"] or "response_format" in response.text
    assert service.asks == []


def test_while_a_grammar_is_compiled_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def slow(spec: GrammarSpec, target: object) -> None:
        gate.wait(10)
        raise GrammarError("the grammar is not valid", found="it took more than 2 s")

    monkeypatch.setattr(forms, "compile_grammar", slow)
    app = make_app()

    async def run() -> tuple[float, httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=BASE) as client:
            body = {"prompt": "x", "grammar": {"type": "regex", "pattern": "a"}}
            held = asyncio.create_task(client.post(TEXT, json=body))
            started = time.monotonic()
            assert (await client.post(TEXT, json={"prompt": "x"})).status_code == 200
            seconds = time.monotonic() - started
            assert not held.done()
            gate.set()
            return seconds, await held

    seconds, refused = asyncio.run(run())
    assert seconds < 5
    assert "took more than 2 s" in error_of(refused)["message"]


def test_few_may_wait_for_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(spec: GrammarSpec, target: object) -> None:
        time.sleep(0.1)
        raise GrammarError("the grammar is not valid")

    monkeypatch.setattr(forms, "compile_grammar", slow)
    app = make_app()
    one = ("POST", TEXT, {"json": {"prompt": "x", "grammar": {"type": "regex", "pattern": "a"}}})
    found = [response.status_code for response in request_all(app, [one] * 40)]
    assert found.count(400) == forms.MOST_WAITING
    assert found.count(429) == 40 - forms.MOST_WAITING
    assert [response.status_code for response in request_all(app, [one])] == [400]
