"""Logs that hold no prompt and no control character; metrics that count what happened."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from prometheus_client.parser import text_string_to_metric_families

from specctl.server.logs import LOGGED, send_logs
from specctl_testing.runtime.serving import StubService
from specctl_testing.runtime.web import ask, make_app, post

SECRET = "my secret prompt"


@pytest.fixture
def lines() -> Iterator[Any]:
    """What was logged until now, parsed."""
    stream = io.StringIO()
    loggers = [logging.getLogger(name) for name in LOGGED]
    before = [(one.handlers, one.propagate, one.level) for one in loggers]
    send_logs(stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().split("\n")[:-1]]
    for one, (handlers, propagates, level) in zip(loggers, before, strict=True):
        one.handlers, one.propagate = handlers, propagates
        one.setLevel(level)


def test_a_request_is_one_line_with_counts_and_without_its_prompt(lines: Any) -> None:
    app = make_app()
    headers = {"x-request-id": "mine-1"}
    post(app, "/v1/completions", {"prompt": SECRET, "user": SECRET}, headers=headers)
    post(app, "/v1/completions", {"prompt": SECRET, "stream": True})
    post(app, "/v1/completions", {"prompt": SECRET, "temperature": 9, SECRET: 1})
    found = lines()
    assert [line["status"] for line in found] == [200, 200, 400]
    assert found[0]["request"] == "mine-1"
    for line in found[:2]:
        assert (line["completion_tokens"], line["tau"]) == (12, 3.0)
        assert line["seconds"] >= 0
    assert "secret" not in json.dumps(found)


def test_what_a_client_sends_cannot_end_a_line_or_move_the_cursor(lines: Any) -> None:
    app = make_app()
    evil = 'x\r\n{"level": "error"}\x1b[2J\u2028\u202e'
    ask(app, "GET", "/" + quote(evil))
    ask(app, "GET", "/v1/models", headers={"x-request-id": "a b", "user-agent": "\x1b[31m"})
    found = lines()
    assert [line["status"] for line in found] == [404, 200]
    assert all(re.fullmatch(r"req-[0-9a-f]{24}", line["request"]) for line in found)


def test_nothing_but_printable_ascii_is_written() -> None:
    from specctl.server.logs import JsonLines

    record = logging.LogRecord("x", 30, "f", 1, "bad \x1b[0m \u2028 %s", ("\n\ud800",), None)
    line = JsonLines().format(record)
    assert line.isascii()
    assert line.isprintable()


def test_what_the_event_loop_complains_of_is_a_line_of_its_own_without_what_failed(
    lines: Any,
) -> None:
    async def forget() -> None:
        task = asyncio.create_task(fail())
        await asyncio.sleep(0)
        del task

    async def fail() -> None:
        raise KeyError(SECRET)

    asyncio.run(forget())
    gc.collect()
    (line,) = lines()
    assert (line["event"], line["level"], line["error"]) == ("asyncio", "error", "KeyError")
    assert line["message"] == "Task exception was never retrieved"
    assert "secret" not in json.dumps(line)


def test_a_failure_is_logged_by_where_it_came_from_and_not_by_what_it_says(lines: Any) -> None:
    refuse: Any = KeyError(SECRET)
    post(make_app(StubService(refuse=refuse)), "/v1/completions", {"prompt": "x"})
    failed, request = lines()
    assert failed["error"] == "KeyError"
    assert any("serving.py" in frame for frame in failed["trace"])
    assert failed["request"] == request["request"]
    assert request["status"] == 500
    assert "secret" not in json.dumps(failed)


def scraped(app: Any) -> dict[tuple[str, tuple[str, ...]], float]:
    response = ask(app, "GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(response.text)
    return {
        (sample.name.removeprefix("specctl:"), tuple(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_count_what_happened() -> None:
    service = StubService()
    app = make_app(service)
    service.counters.accepted_per_position = [4, 2]
    service.counters.spec_disabled = 1
    service.counters.spec_off = 7
    post(app, "/v1/completions", {"prompt": "x"})
    post(app, "/v1/completions", {"prompt": "x", "temperature": 9})
    found = scraped(app)
    assert found["spec_decode_num_drafts_total", ()] == 4
    assert found["spec_decode_num_draft_tokens_total", ()] == 8
    assert found["spec_decode_num_accepted_tokens_total", ()] == 8
    assert found["spec_decode_num_accepted_tokens_per_pos_total", ("1",)] == 2
    assert found["tau", ()] == 3.0
    assert found["spec_disabled_total", ()] == 1
    assert found["spec_off_rounds_total", ()] == 7
    assert found["num_requests_running", ()] == found["num_requests_waiting", ()] == 0
    assert found["requests_total", ("length",)] == 1
    assert found["time_to_first_token_seconds_count", ()] == 1
    assert found["inter_token_latency_seconds_count", ()] == 9
    assert found["http_responses_total", ("/v1/completions", "200")] == 1
    assert found["http_responses_total", ("/v1/completions", "400")] == 1
    assert found["state", ("ready",)] == 1
    assert found["speculation_off", ()] == 0


def test_speculation_that_is_off_is_told() -> None:
    app = make_app(StubService(why_off="no drafter was given"))
    assert scraped(app)["speculation_off", ()] == 1
    assert ask(app, "GET", "/v1/status").json()["why_off"] == "no drafter was given"


def test_paths_that_do_not_exist_share_one_label() -> None:
    app = make_app()
    for number in range(5):
        ask(app, "GET", f"/nothing/{number}")
    assert scraped(app)["http_responses_total", ("unknown", "404")] == 5


def test_polls_are_no_lines_unless_something_is_wrong(lines: Any) -> None:
    service = StubService()
    app = make_app(service)
    for path in ("/health", "/ready", "/metrics", "/v1/status", "/page/app.js"):
        assert ask(app, "GET", path).status_code == 200
    assert lines() == []
    ask(app, "GET", "/page/none.js")
    assert [line["status"] for line in lines()] == [404]


def test_at_a_terminal_a_request_is_one_short_line() -> None:
    from specctl.server.logs import ShortLines

    def line(event: str, **fields: Any) -> str:
        record = logging.LogRecord("specctl.server", 20, "f", 1, event, None, None)
        record.__dict__.update(event=event, fields=fields)
        return ShortLines().format(record)

    about = {"method": "POST", "path": "/v1/x\x1b[2J\n", "status": 200, "seconds": 0.5}
    about["request"] = "r"
    found = line("request", **about, prompt_tokens=7, completion_tokens=100, tau=2.5)
    assert re.fullmatch(r"\d\d:\d\d:\d\d  200  POST /v1/x.*", found)
    assert all(word in found for word in ("0.50 s", "7 + 100 tokens", "200/s", "tau 2.50"))
    assert "r" in line("request", **{**about, "status": 400}).split()
    assert "path=a" in line("loaded", path="a")
    for text in (found, line("evil\n", path="\x1b\u2028")):
        assert text.isascii()
        assert text.isprintable()
