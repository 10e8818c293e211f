"""How the flags of sampling reach the engine."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

USER = "<|user|>"


def test_a_seed_of_minus_one_is_drawn_and_told(run: Any) -> None:
    words = ("generate", "--target", "tiny", "import os", "--max-new-tokens", "12")
    words += ("--temperature", "1.5")
    ran = run(*words, "--seed", "-1")
    assert ran.code == 0, ran.err
    [seed] = re.findall(r"the seed is (\d+)", ran.err)
    again = run(*words, "--seed", seed)
    assert again.out.splitlines()[0] == ran.out.splitlines()[0]
    assert "the seed is" not in again.err


@pytest.mark.parametrize("draft", ["none", "prompt-lookup"])
def test_a_stop_string_of_the_command_line_may_be_a_control_token(run: Any, draft: str) -> None:
    """A penalty below zero makes the target repeat what the prompt holds most of."""
    words = ("generate", "--target", "tiny", USER * 4, "--set", "sample.frequency_penalty=-100")
    words += ("--max-new-tokens", "3", "--draft", draft, "--json")
    ends = {}
    for stop in ("no such text", USER):
        [output] = json.loads(run(*words, "--set", f"sample.stop={stop}").out)["result"]["outputs"]
        ends[stop] = (len(output["token_ids"]), output["text"], output["finish_reason"])
    assert ends == {"no such text": (3, "", "length"), USER: (1, "", "stop")}
