"""--jsonl: one event a line, the result last, nothing else on stdout."""

from __future__ import annotations

import io
import json
from typing import Any

from specctl.cli.app.console import Console
from specctl.core.errors import Exit, SpecctlError


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_the_last_line_is_the_result(run: Any) -> None:
    ran = run("recipes", "ls", "--jsonl")
    *_, last = events(ran.out)
    assert last["event"] == "result"
    assert last["schema"] == "specctl.recipes-ls/1"
    assert last["ok"] is True
    assert last["result"] == run("recipes", "ls", "--json").json["result"]


def test_messages_warnings_and_progress_are_events() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console(out, err)
    console.configure(jsonl=True)
    console.say("hello")
    console.warn("careful")
    with console.task("train", 3, "steps") as advance:
        for _ in range(3):
            advance(1, "loss 2.0")
    console.done({"a": 1})
    found = events(out.getvalue())
    kinds = [event["event"] for event in found]
    assert kinds == ["message", "warning", "progress", "progress", "result"]
    assert (found[2]["task"], found[2]["done"], found[2]["total"]) == ("train", 1, 3)
    assert found[3]["is_over"] is True
    assert (found[3]["done"], found[3]["note"]) == (3, "loss 2.0")
    assert found[4]["warnings"] == ["careful"]
    assert err.getvalue() == ""


def test_an_error_is_the_last_event_and_is_said_to_people_too(run: Any) -> None:
    ran = run("recipes", "show", "eagel3", "--jsonl")
    assert ran.code == Exit.RECIPE
    *_, last = events(ran.out)
    assert last["ok"] is False
    assert last["error"]["code"] == Exit.RECIPE
    assert "error[3]" in ran.err


def test_a_quiet_program_still_ends_with_its_result() -> None:
    out = io.StringIO()
    console = Console(out, io.StringIO())
    console.configure(jsonl=True, quiet=True)
    console.say("hello")
    console.fail(SpecctlError("no", do="again"))
    assert [event["event"] for event in events(out.getvalue())] == ["result"]
