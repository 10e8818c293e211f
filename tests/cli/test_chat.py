"""`specctl chat`: turns, what is read once, commands, and what Ctrl-C means."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from specctl.api.arguments.drafting import LoadedDraft
from specctl.cli.app.console import Console
from specctl.cli.app.failures import INTERRUPTED
from specctl.cli.commands.chat.repl import Interrupts, Lines
from specctl.cli.commands.chat.session import ChatSession
from specctl.cli.options.loading import DraftChoice
from specctl.cli.options.target_choice import TargetChoice
from specctl.core.errors import Exit, SpecctlError
from specctl.runtime.generate import generate
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.data.sources.defects import Defects
from specctl.train.data.sources.sources import read_samples
from specctl_testing.cli.terminal import Terminal

LINES = "write a loop\nand a class with two methods\n"
SHORT = ("--max-new-tokens", "12")
PLAIN = LoadedDraft("plain", None, None, "auto", False)


def never() -> bool:
    return False


def say(talk: ChatSession, *texts: str) -> list[str]:
    """The answers, as they were streamed."""
    return ["".join(new for new, _ in talk.answer(text, never)) for text in texts]


@pytest.fixture(scope="module")
def loaded(tiny_target: Target) -> LoadedDraft:
    return DraftChoice("prompt-lookup").load(tiny_target)


@pytest.fixture(scope="module")
def without_template(tiny_target: Target) -> Target:
    tokenizer = AutoTokenizer.from_pretrained(str(files("specctl.recipes") / "tiny"))
    tokenizer.chat_template = None
    return replace(tiny_target, tokenizer=tokenizer, template_digest=None)


@pytest.fixture
def chat(run: Any, tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`specctl chat` with a target that is loaded already (the terminal below loads its own)."""
    monkeypatch.setattr(TargetChoice, "load", lambda choice, console, compiled, wanted: tiny_target)
    return partial(run, "chat")


# -- through a pipe --------------------------------------------------------------------------------


def test_every_line_of_a_pipe_is_a_turn_and_json_has_them_all(chat: Any) -> None:
    ran = chat("--draft", "prompt-lookup", *SHORT, "--json", stdin=LINES)
    assert ran.code == 0
    result = ran.json["result"]
    assert [turn["user"] for turn in result["turns"]] == LINES.splitlines()
    assert all(turn["answer"] and turn["tokens"] == 12 for turn in result["turns"])
    assert result["stats"]["tokens"] == 24
    assert result["stats"]["verification"] == "lossless:greedy"


def test_a_pipe_gets_the_answers_and_nothing_else_on_stdout(chat: Any) -> None:
    ran = chat(*SHORT, stdin=LINES)
    talk = json.loads(chat(*SHORT, "--json", stdin=LINES).out)["result"]["turns"]
    assert ran.out == "".join(turn["answer"] + "\n" for turn in talk)
    assert ">" not in ran.err.splitlines(), "no prompt where nobody types"


def test_an_empty_pipe_is_a_chat_without_turns(chat: Any) -> None:
    ran = chat("--json", stdin="\n  \n")
    assert (ran.code, ran.json["result"]["turns"]) == (0, [])
    assert ran.json["next"][0].startswith("specctl ")


def test_an_unknown_command_ends_a_pipe_with_the_nearest_one(chat: Any) -> None:
    ran = chat(*SHORT, "--json", stdin="hello\n/rest\n")
    assert ran.code == Exit.USAGE
    assert "/reset" in ran.json["error"]["do"]
    assert [turn["user"] for turn in ran.json["result"]["turns"]] == ["hello"]


def test_commands_work_through_a_pipe(chat: Any, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    said = f"write a loop\n/stats\n/save {path}\n/save {path}\n/reset\nwrite a loop\n/quit\nnever\n"
    ran = chat(*SHORT, stdin=said)
    assert ran.code == 0
    assert "tau 1.00" in ran.err
    assert len(path.read_text().splitlines()) == 1
    half = len(ran.out) // 2
    assert ran.out[:half] == ran.out[half:], "begun anew, it says the same"


def test_colours_without_a_terminal_are_ignored_aloud(chat: Any) -> None:
    ran = chat(*SHORT, "--show-accepted", stdin="hello\n")
    assert "--show-accepted is ignored" in ran.err
    assert "\x1b" not in ran.out


def test_every_answer_is_held_to_a_grammar(chat: Any, tmp_path: Path) -> None:
    (tmp_path / "word.regex").write_text("(yes|no)")
    flags = ("--draft", "prompt-lookup", "--grammar", tmp_path / "word.regex", "--json")
    turns = chat(*flags, stdin="is it?\nand now?\n").json["result"]["turns"]
    assert [turn["answer"] in ("yes", "no") for turn in turns] == [True, True]


def test_a_rule_that_cannot_sample_is_refused(chat: Any) -> None:
    flags = ("--draft", "prompt-lookup", "--rule", "greedy", "--temperature", "1")
    ran = chat(*flags, "--json", stdin="hello\n")
    assert (ran.code, ran.json["error"]["found"]) == (Exit.RECIPE, "temperature 1")


def test_a_context_that_is_full_is_said(chat: Any, tiny_target: Target) -> None:
    long = "word " * tiny_target.spec.max_positions
    ran = chat("--json", stdin=long + "\n")
    assert ran.code != 0
    assert "does not fit" in ran.json["error"]["what"]


# -- the conversation ------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_each_turn_is_the_continuation_of_the_whole_conversation(
    tiny_target: Target, loaded: LoadedDraft, temperature: float
) -> None:
    """Drafts and what was kept of earlier turns change nothing (float32)."""
    sampling = Sampling(temperature=temperature, seed=5, max_new_tokens=16)
    talk = ChatSession(tiny_target, loaded, sampling, system="be brief")
    answers = say(talk, "write a loop", "and a class", "now both")
    messages = [{"role": "system", "content": "be brief"}]
    for number, turn in enumerate(talk.turns):
        messages.append({"role": "user", "content": turn.user})
        prompt = tiny_target.encode_chat(messages)
        if temperature == 0:
            made = generate(tiny_target, [prompt], sampling=sampling).outputs[0]
            assert turn.completion.tokens == made.token_ids
        assert turn.completion.request.tokens == tuple(prompt)
        assert turn.completion.request.sampling.seed == 5 + number
        assert answers[number] == turn.answer
        messages.append({"role": "assistant", "content": turn.answer})


def test_only_what_is_new_is_read(tiny_target: Target, loaded: LoadedDraft) -> None:
    talk = ChatSession(tiny_target, loaded, Sampling(max_new_tokens=16))
    say(talk, "write a loop", "and a class")
    first, second = talk.turns
    assert first.reused == 0
    assert second.reused >= len(first.completion.request.tokens)


def test_after_a_reset_nothing_is_known(tiny_target: Target, loaded: LoadedDraft) -> None:
    talk = ChatSession(tiny_target, loaded, Sampling(max_new_tokens=16))
    first = say(talk, "write a loop", "and a class")[0]
    talk.reset()
    assert say(talk, "write a loop") == [first]
    assert talk.turns[0].reused == 0
    assert talk.stats().tokens == sum(t.completion.stats.tokens for t in [*talk.past, *talk.turns])


def test_without_a_template_the_text_goes_on(without_template: Target) -> None:
    talk = ChatSession(without_template, PLAIN, Sampling(max_new_tokens=16))
    first, second = say(talk, "import os", "def main(")
    text = f"import os{first}\ndef main("
    assert talk.turns[1].completion.request.tokens == tuple(without_template.encode(text))
    assert talk.record() == {"text": text + second}


def test_a_stopped_answer_is_kept_as_far_as_it_came(
    tiny_target: Target, loaded: LoadedDraft
) -> None:
    talk = ChatSession(tiny_target, loaded, Sampling(max_new_tokens=64, ignore_eos=True))
    polls = iter(range(100))
    heard = "".join(new for new, _ in talk.answer("write a loop", lambda: next(polls) >= 4))
    turn = talk.turns[0]
    assert turn.completion.finish_reason == "stopped"
    assert 0 < len(turn.completion.tokens) < 64
    assert heard == turn.answer
    say(talk, "go on")
    assert talk.turns[1].reused >= len(turn.completion.request.tokens)


def test_accepted_tokens_are_those_that_the_statistics_count(
    tiny_target: Target, loaded: LoadedDraft
) -> None:
    talk = ChatSession(tiny_target, loaded, Sampling(max_new_tokens=48, ignore_eos=True))
    pieces = list(talk.answer("def a():\n    return 1\n" * 3, never))
    shown = sum(accepted for _, accepted in pieces)
    assert 0 < shown <= talk.turns[0].completion.stats.accepted


@pytest.mark.parametrize("template", [True, False])
def test_what_is_saved_is_training_data(
    tiny_target: Target, without_template: Target, template: bool, tmp_path: Path
) -> None:
    talk = ChatSession(
        tiny_target if template else without_template, PLAIN, Sampling(max_new_tokens=8)
    )
    say(talk, "write a loop", "and a class")
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps(talk.record()) + "\n")
    defects = Defects()
    samples = list(read_samples(str(path), "auto", "train", 0, defects))
    assert (len(samples), defects.lines()) == (1, [])
    assert (len(samples[0].messages) == 4) == template


def test_a_template_that_refuses_is_an_error_with_a_remedy(tiny_target: Target) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(files("specctl.recipes") / "tiny"))
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    talk = ChatSession(replace(tiny_target, tokenizer=tokenizer), PLAIN, Sampling(), system="x")
    with pytest.raises(SpecctlError, match="no system role"):
        say(talk, "hello")


# -- what is typed ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "turns"),
    [
        ("one\ntwo\n", ["one", "two"]),
        ("one \\\ntwo\n", ["one \ntwo"]),
        ('"""\na\n\nb\n"""\nc\n', ["a\n\nb", "c"]),
        ('"""a\nb"""\n', ["a\nb"]),
        ('"""never closed\n', ["never closed"]),
        ("no end of line", ["no end of line"]),
        ("windows\r\n", ["windows"]),
        ("", []),
    ],
)
def test_lines_and_blocks_are_turns(
    typed: str, turns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    lines = Lines(Console(io.StringIO(), io.StringIO()))
    assert list(iter(lines.read, None)) == turns


def test_bytes_that_are_no_text_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8"))
    with pytest.raises(SpecctlError, match="UTF-8"):
        Lines(Console(io.StringIO(), io.StringIO())).read()


def test_the_first_ctrl_c_stops_an_answer_and_the_second_leaves() -> None:
    with Interrupts() as interrupts:
        with interrupts.answering():
            press()
            assert interrupts.is_stopped()
        with pytest.raises(KeyboardInterrupt):
            press()
        interrupts.fresh()
        assert not interrupts.is_stopped()
        with pytest.raises(KeyboardInterrupt):
            press()


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)


# -- at a terminal ---------------------------------------------------------------------------------


def test_ctrl_c_stops_the_answer_and_not_the_chat() -> None:
    words = [
        "chat",
        "--draft",
        "prompt-lookup",
        "--max-new-tokens",
        "900",
        "--set",
        "sample.ignore_eos=true",
    ]
    with Terminal([*words, "--show-accepted"]) as terminal:
        terminal.until("> ")
        terminal.press(b"write a loop\r")
        terminal.until("\x1b[32m")
        terminal.press()
        terminal.until("(stopped)")
        terminal.press(b"/nonsense\r")
        terminal.until("there is no command /nonsense")
        terminal.press(b"/stats\r")
        terminal.until("accepted per position")
        terminal.settle()
        terminal.press()
        terminal.until("once more")
        terminal.settle()
        terminal.press()
        assert terminal.wait() == INTERRUPTED
        assert "Traceback" not in terminal.shown
        assert terminal.cursor_is_shown
