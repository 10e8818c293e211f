"""`specctl generate` with a chat model: a prompt is a turn, --raw continues it, JSON says which."""

from __future__ import annotations

from typing import Any

import pytest

from specctl.api.generate import generate
from specctl.cli.options.target_choice import TargetChoice
from specctl.runtime.target.target import Target
from specctl_testing.cli.ran import Run
from specctl_testing.runtime.chat_targets import spoken_with

SHORT = ("--max-new-tokens", 4, "--set", "sample.ignore_eos=true")


@pytest.fixture
def chatty(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> Target:
    """A chat model that every command loads."""
    target = spoken_with(tiny_target)

    def load(*args: Any, **more: Any) -> Target:
        return target

    monkeypatch.setattr(TargetChoice, "load", load)
    return target


def test_a_chat_model_answers_and_says_that_it_was_asked(chatty: Target, run: Run) -> None:
    ran = run("generate", "Hi", *SHORT, "--json")
    assert ran.json["result"]["chat"] is True
    assert "is a chat model: a prompt is a user's turn" in ran.err
    asked = run("generate", "Hi", *SHORT, "--json", "--chat")
    assert asked.json["result"]["outputs"] == ran.json["result"]["outputs"]
    assert "is a chat model" not in asked.err


def test_raw_continues_the_text(chatty: Target, tiny_target: Target, run: Run) -> None:
    ran = run("generate", "Hi", *SHORT, "--json", "--raw")
    assert ran.json["result"]["chat"] is False
    [output] = ran.json["result"]["outputs"]
    made = generate(tiny_target, "Hi", max_new_tokens=4, ignore_eos=True)
    assert output["token_ids"] == list(made.outputs[0].token_ids)
    assert any("--raw" in line for line in ran.json["next"])


def test_the_embedded_target_continues_texts_without_a_word(
    tiny_target: Target, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TargetChoice, "load", lambda *args, **more: tiny_target)
    ran = run("generate", "def main(", *SHORT, "--json")
    assert ran.json["result"]["chat"] is False
    assert "chat" not in ran.err
