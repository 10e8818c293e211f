"""Answers from servers: all of them, the right ones, once, whatever the servers do."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from specctl.core.errors import IncompatibleError, NetworkError, RecipeError
from specctl.recipes.schema import DataPart, Recipe, TrainPart
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.data.prepare import prepare
from specctl.train.data.prompts.answers import AnswerJob, AnswerPlan, Dialogue, PromptCut
from specctl.train.data.records.records import Sample
from specctl.train.data.written import endpoint as module
from specctl.train.data.written.endpoint import EndpointSettings, EndpointWriter
from specctl.train.data.written.regenerate import regenerate
from specctl_testing.train.dies_after import DiesAfter
from specctl_testing.train.fake_endpoint import FAULTS, FakeEndpoint

PLAN = AnswerPlan(40, 6, 8, temperature=0.9, greedy_share=0.5, seed=3, top_p=0.9, top_k=20)
PROMPTS = [PromptCut((5 + i, 7, 9 + i % 3), "d") for i in range(40)]


def written(target: Target) -> Any:
    """An answer that follows from the prompt and the seed alone, of 1 to 8 tokens."""

    def answer(ids: list[int], body: dict[str, Any]) -> list[int]:
        start = (sum(ids) + body.get("seed", 0)) % 200
        new = [20 + (start + k) % 200 for k in range(sum(ids) % 9)]
        return [*new, target.eos_ids[0]]

    return answer


def expected(target: Target, fake: FakeEndpoint, index: int) -> list[int]:
    seed = 0 if index % 2 else PLAN.seed * 1_000_003 + index  # the odd ones are greedy
    body = {"seed": seed} if seed else {}
    return fake.answer(list(PROMPTS[index].ids), body)[: PLAN.new_tokens]


def writer_for(target: Target, *fakes: FakeEndpoint, **settings: Any) -> EndpointWriter:
    said = {"requests": 8, "wait": 0.01, "patience": 20.0} | settings
    where = EndpointSettings(tuple(fake.url for fake in fakes), **said)
    return EndpointWriter(target, where, SilentReporter())


def ask(target: Target, folder: Path, writer: EndpointWriter, count: int = 40, **more: Any) -> Any:
    return regenerate(target, PROMPTS[:count], PLAN, folder, writer=writer, **more)


def test_every_prompt_is_answered_once_whatever_the_servers_do(
    chat_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ATTEMPTS", 2 * len(FAULTS) + 1)  # one prompt may meet all of them
    one = FakeEndpoint(chat_target, written(chat_target), FAULTS)
    two = FakeEndpoint(chat_target, written(chat_target), FAULTS[::-1], retry_after=None)
    with one.serving(), two.serving():
        writer = writer_for(chat_target, one, two, requests=4)
        answers = ask(chat_target, tmp_path, writer)
    assert [list(a.new_ids) for a in answers] == [expected(chat_target, one, i) for i in range(40)]
    answered = Counter(one.answered) + Counter(two.answered)
    assert answered == Counter(tuple(p.ids) for p in PROMPTS)
    assert max(one.most_open, two.most_open) <= 4
    assert min(len(one.answered), len(two.answered)) >= 5
    assert set(answers[0].turns[0].prompt_ids) == set(PROMPTS[0].ids)


def test_what_is_asked_says_all_of_the_sampling(chat_target: Target, tmp_path: Path) -> None:
    with FakeEndpoint(chat_target, written(chat_target)).serving() as fake:
        ask(chat_target, tmp_path, writer_for(chat_target, fake, requests=1), 2)
    sampled, greedy = fake.asked
    shared = {
        "model": "served",
        "max_tokens": 8,
        "stop_token_ids": list(chat_target.eos_ids),
        "return_token_ids": True,
    }
    seed = PLAN.seed * 1_000_003
    drawn = {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "seed": seed}
    assert sampled == {"prompt": list(PROMPTS[0].ids), **shared, **drawn}
    assert greedy == {"prompt": list(PROMPTS[1].ids), **shared, "temperature": 0.0}


def test_a_server_that_is_busy_is_left_alone_for_as_long_as_it_asks(
    chat_target: Target, tmp_path: Path
) -> None:
    faults = ["429"] + ["ok"] * 20
    with FakeEndpoint(chat_target, written(chat_target), faults, "0.4").serving() as fake:
        ask(chat_target, tmp_path, writer_for(chat_target, fake, requests=1), 4)
    (_, first), (_, second), *_ = fake.times
    assert second - first >= 0.4
    in_a_minute = formatdate(time.time() + 60, usegmt=True)
    assert module._retry_after(in_a_minute) == pytest.approx(57, abs=4)
    assert module._retry_after("soon") is None


def test_a_killed_job_asks_only_for_what_it_had_not(chat_target: Target, tmp_path: Path) -> None:
    with FakeEndpoint(chat_target, written(chat_target)).serving() as fake:
        with pytest.raises(KeyboardInterrupt):
            ask(chat_target, tmp_path, writer_for(chat_target, fake), console=DiesAfter(19))
        fake.answered.clear()
        moved = replace(writer_for(chat_target, fake).settings, requests=3)
        again = EndpointWriter(chat_target, moved, SilentReporter())
        answers = ask(chat_target, tmp_path, again)
    late = len(fake.answered) - (40 - 20)  # the twentieth was kept when the console died of it
    assert 0 <= late <= 2, "only what was in flight then may have been answered after it"
    assert [list(a.new_ids) for a in answers] == [expected(chat_target, fake, i) for i in range(40)]


def test_a_prompt_that_the_server_refuses_is_left_out_and_asked_again(
    chat_target: Target, tmp_path: Path
) -> None:
    fake = FakeEndpoint(chat_target, written(chat_target), ["ok", "400"] + ["ok"] * 50)
    with fake.serving():
        writer = writer_for(chat_target, fake, requests=1)
        assert len(ask(chat_target, tmp_path, writer, 5)) == 4
        assert "1 turns left out, HTTP 400" in writer.console.warnings[0]  # type: ignore[attr-defined]
        assert len(ask(chat_target, tmp_path, writer, 5)) == 5
    assert len(fake.asked) == 6


def test_a_prompt_on_which_the_server_always_fails_does_not_stop_the_others(
    chat_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ATTEMPTS", 3)

    def answer(ids: list[int], body: dict[str, Any]) -> list[int]:
        if ids == list(PROMPTS[1].ids):
            raise ConnectionAbortedError
        return written(chat_target)(ids, body)

    with FakeEndpoint(chat_target, answer).serving() as fake:
        assert len(ask(chat_target, tmp_path, writer_for(chat_target, fake), 5)) == 4


def another_id(choice: dict[str, Any]) -> None:
    choice["token_ids"] = [100_000]


def another_prompt(choice: dict[str, Any]) -> None:
    choice["prompt_token_ids"] = [0, *choice["prompt_token_ids"]]


@pytest.mark.parametrize("change", [another_id, another_prompt])
def test_another_model_s_tokens_are_refused(
    chat_target: Target, tmp_path: Path, change: Any
) -> None:
    fake = FakeEndpoint(chat_target, written(chat_target), change=change)
    with (
        fake.serving(),
        pytest.raises(IncompatibleError, match="another tokenizer than the target's"),
    ):
        ask(chat_target, tmp_path, writer_for(chat_target, fake), 3)
    assert not list(tmp_path.rglob("answers-*.bin"))


def test_answers_without_ids_are_encoded_and_it_is_said(
    chat_target: Target, tmp_path: Path
) -> None:
    def no_ids(choice: dict[str, Any]) -> None:
        del choice["token_ids"], choice["prompt_token_ids"]

    words = chat_target.tokenizer("hello world", add_special_tokens=False)["input_ids"]
    over = [*words, chat_target.eos_ids[0]]
    with FakeEndpoint(chat_target, lambda *_: over, change=no_ids).serving() as fake:
        writer = writer_for(chat_target, fake)
        (answer,) = ask(chat_target, tmp_path, writer, 1)
    assert list(answer.new_ids) == over[: PLAN.new_tokens]
    assert "without token ids" in writer.console.warnings[0]  # type: ignore[attr-defined]


def test_a_server_that_is_not_there_ends_the_run_with_what_to_do(
    chat_target: Target, tmp_path: Path
) -> None:
    gone = FakeEndpoint(chat_target, written(chat_target), url="http://127.0.0.1:9")
    with pytest.raises(NetworkError, match="no answer from the endpoint"):
        ask(chat_target, tmp_path, writer_for(chat_target, gone, patience=0.05))


def test_one_of_two_servers_may_die(chat_target: Target, tmp_path: Path) -> None:
    live = FakeEndpoint(chat_target, written(chat_target))
    dying = FakeEndpoint(chat_target, written(chat_target), ["ok"] * 3 + ["drop"] * 100)
    with live.serving(), dying.serving():
        assert len(ask(chat_target, tmp_path, writer_for(chat_target, live, dying))) == 40


def test_the_served_name_is_asked_for_and_may_be_given(chat_target: Target, tmp_path: Path) -> None:
    fake = FakeEndpoint(chat_target, written(chat_target), names=("base", "lora"))
    with fake.serving():
        with pytest.raises(RecipeError, match="no model of the target's name") as caught:
            ask(chat_target, tmp_path, writer_for(chat_target, fake))
        assert caught.value.found == "base, lora"
        assert ask(chat_target, tmp_path, writer_for(chat_target, fake, model="lora"), 1)
    assert fake.asked[-1]["model"] == "lora"


def test_a_conversation_stays_at_the_server_that_has_its_beginning(
    chat_target: Target, tmp_path: Path
) -> None:
    asked = {"role": "user", "content": "hello"}
    sample = Sample("s", "d", messages=(asked, {"role": "assistant", "content": "x"}) * 3)
    dialogue = Dialogue.of(sample)
    prompt = PromptCut(chat_target.encode_chat([asked]), "d", dialogue)
    word = chat_target.tokenizer("yes", add_special_tokens=False)["input_ids"]
    over = [*word, chat_target.eos_ids[0]]
    fakes = [FakeEndpoint(chat_target, lambda *_: over) for _ in range(2)]
    with fakes[0].serving(), fakes[1].serving():
        writer = writer_for(chat_target, *fakes)
        (answer,) = regenerate(chat_target, [prompt], PLAN, tmp_path, writer=writer)
    assert len(answer.turns) == 3
    assert sorted(len(fake.asked) for fake in fakes) == [0, 3]


@pytest.mark.parametrize("endpoint", ["localhost:8000", ",", "http://a:1,http://a:1/v1"])
def test_addresses_that_cannot_be_are_refused(endpoint: str) -> None:
    with pytest.raises(RecipeError, match=r"data\.endpoint"):
        EndpointSettings.of(endpoint, None, 1)
    assert EndpointSettings.of("http://a:1/v1/,http://b:2", None, 1).urls == (
        "http://a:1",
        "http://b:2",
    )


def test_rows_of_a_recipe_are_what_its_endpoint_wrote(chat_target: Target, tmp_path: Path) -> None:
    source = tmp_path / "text.jsonl"
    lines = [{"text": f"hello world {i}, how are you?"} for i in range(8)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with FakeEndpoint(chat_target, written(chat_target), FAULTS).serving() as fake:
        part = DataPart(
            source=str(source), prompts=8, prompt_tokens=5, new_tokens=6, endpoint=fake.url
        )
        recipe = Recipe(data=part, train=TrainPart(seq_len=24))
        data = prepare(recipe, chat_target, tmp_path)
        answers = {tuple(fake.answer(list(p), {})) for p in fake.answered}
        assert len(fake.answered) == 8 >= len(answers)
    assert data.manifest.writer == "target"
    again = prepare(recipe, chat_target, tmp_path)  # the server is gone
    assert again.digest == data.digest
    with pytest.raises(ValueError, match="endpoint is ignored with regenerate false"):
        DataPart(endpoint="http://a:1", regenerate=False)


@pytest.mark.parametrize(
    ("ids", "reply", "prompt", "kept", "reason"),
    [
        # an end of either kind is the last token, whatever is said beside it: nothing is added
        ([20, 21, "<|end|>"], {}, "chat", [20, 21, "<|end|>"], "eos"),
        ([20, 21, "<|eos|>"], {"stop_reason": None}, "chat", [20, 21, "<|eos|>"], "eos"),
        ([20, "<|end|>"], {"stop_reason": "<|end|>"}, "text", [20, "<|end|>"], "eos"),
        ([20, "<|end|>", 30], {"finish_reason": "length"}, "chat", [20, "<|end|>"], "eos"),
        ([20, 21], {"finish_reason": "length"}, "chat", [20, 21], "length"),
        # the engine leaves the end out and names it, as a token or as its spelling
        ([20, 21], {"stop_reason": "<|eos|>"}, "chat", [20, 21, "<|eos|>"], "eos"),
        ([20, 21], {"matched_stop": "<|end|>"}, "text", [20, 21, "<|end|>"], "eos"),
        # or does not name it: as answers, or as texts, end
        ([20, 21], {}, "chat", [20, 21, "<|end|>"], "eos"),
        ([20, 21], {}, "text", [20, 21, "<|eos|>"], "eos"),
        ([], {}, "chat", ["<|end|>"], "eos"),
        # a token that is an end for the engine alone, in its place or only named
        ([20, 7], {"stop_reason": 7}, "chat", [20, 7], "eos"),
        ([20], {"stop_reason": 7}, "chat", [20, 7], "eos"),
        ([20, "<|pad|>"], {}, "chat", [20, "<|pad|>"], "eos"),
        # a stop string of the server's own
        ([20, 21], {"stop_reason": "###"}, "chat", [20, 21], "stop"),
    ],
)
def test_an_answer_keeps_the_ids_that_the_engine_wrote(
    ids: list[Any],
    reply: dict[str, Any],
    prompt: str,
    kept: list[Any],
    reason: str,
    chat_target: Target,
) -> None:
    def numbers(tokens: list[Any]) -> list[int]:
        convert = chat_target.tokenizer.convert_tokens_to_ids
        return [convert(each) if isinstance(each, str) else each for each in tokens]

    fake = FakeEndpoint(chat_target, written(chat_target))
    fake.url = "http://localhost:1"
    asked = numbers(["<|bos|>", "<|user|>", 9, "<|assistant|>"] if prompt == "chat" else [9, 10])
    choice = {"finish_reason": "stop", "token_ids": numbers(ids), **reply}
    job = AnswerJob(0, 0, asked, Sampling())
    writer = writer_for(chat_target, fake)
    found = writer._read(job, {"choices": [choice]}, writer.servers[0])
    assert found == (numbers(kept), reason)


def test_an_answer_of_a_target_without_ends_keeps_its_ids(chat_target: Target) -> None:
    target = replace(chat_target, eos_ids=())
    writer = EndpointWriter(target, EndpointSettings(("http://localhost:1",)), SilentReporter())
    choice = {"finish_reason": "stop", "token_ids": [20, 21]}
    job = AnswerJob(0, 0, [9], Sampling())
    found = writer._read(job, {"choices": [choice]}, writer.servers[0])
    assert found == ([20, 21], "eos")
