"""The target writes the answers: its own tokens, resumable, masked."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.core.errors import RecipeError
from specctl.core.forward.masks import document_mask
from specctl.core.language_model import Masks
from specctl.recipes.schema import DataPart, Recipe, TrainPart
from specctl.runtime.measure.reporter import Advance, SilentReporter
from specctl.runtime.target.target import Target
from specctl.train.data.prepare import prepare
from specctl.train.data.prompts.answers import (
    AnswerPlan,
    Dialogue,
    PromptCut,
    Turn,
    WrittenAnswer,
    sampling_of,
)
from specctl.train.data.prompts.prompts import cut_prompts, domain_at
from specctl.train.data.records.chat import answerable, thinking_switch
from specctl.train.data.records.records import Sample
from specctl.train.data.sources.defects import Defects
from specctl.train.data.written import regenerate as module
from specctl.train.data.written.journal import AnswerJournal
from specctl.train.data.written.regenerate import regenerate, slots_for
from specctl.train.distributed.ranks import Ranks
from specctl_testing.train.dies_after import DiesAfter

PLAN = AnswerPlan(
    prompts=10, prompt_tokens=6, new_tokens=8, temperature=0.9, greedy_share=0.5, seed=3
)


class Counting(SilentReporter):
    """A console that remembers how many prompts were to be answered."""

    total = -1

    @contextmanager
    def task(self, label: str, total: int, unit: str) -> Iterator[Advance]:
        self.total = total
        with super().task(label, total, unit) as advance:
            yield advance


def prompts_of(target: Target, plan: AnswerPlan = PLAN) -> list[PromptCut]:
    texts = [f"def f{i}(x):\n    return x + {i}\n\nhello world {i}?\n" for i in range(5)]
    samples = [Sample(f"t:{i}", "ab"[i % 2], text=text) for i, text in enumerate(texts)]
    return cut_prompts(target, samples, plan, Defects())


def test_greedy_answers_are_the_argmax_of_the_target(chat_target: Target, tmp_path: Path) -> None:
    answers = regenerate(chat_target, prompts_of(chat_target), PLAN, tmp_path)
    assert sum(a.is_greedy for a in answers) == 5
    for answer in answers:
        assert_is_argmax(chat_target, answer) if answer.is_greedy else None


def assert_is_argmax(target: Target, answer: WrittenAnswer) -> None:
    ids_1S = torch.tensor([[*answer.prompt.ids, *answer.new_ids]])
    position_1S = torch.arange(ids_1S.shape[1])[None]
    masks = Masks(document_mask(torch.zeros_like(ids_1S)))
    logits_1SV = target.lm.dense(ids_1S, position_1S, masks).logits_BTV
    assert logits_1SV is not None
    start = len(answer.prompt.ids) - 1
    assert logits_1SV[0, start:-1].argmax(-1).tolist() == list(answer.new_ids)


def test_answers_do_not_depend_on_the_batch(chat_target: Target, tmp_path: Path) -> None:
    prompts = prompts_of(chat_target)
    alone = regenerate(chat_target, prompts, PLAN, tmp_path / "a", batch=1)
    together = regenerate(chat_target, prompts, PLAN, tmp_path / "b", batch=7)
    assert [a.new_ids for a in alone] == [a.new_ids for a in together]


def test_a_killed_job_loses_what_was_in_flight_and_nothing_else(
    chat_target: Target, tmp_path: Path
) -> None:
    prompts = prompts_of(chat_target)
    whole = regenerate(chat_target, prompts, PLAN, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        regenerate(chat_target, prompts, PLAN, tmp_path / "cut", console=DiesAfter(6))
    (file,) = (tmp_path / "cut").rglob("answers-*.bin")
    before = file.read_bytes()
    console = Counting()
    assert regenerate(chat_target, prompts, PLAN, tmp_path / "cut", console=console) == whole
    assert console.total == 10 - 7  # the seventh was kept when the console died of it
    assert file.read_bytes()[: len(before)] == before


def test_finished_answers_are_read_without_the_engine(
    chat_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(chat_target)
    first = regenerate(chat_target, prompts, PLAN, tmp_path)
    monkeypatch.setattr(module.Engine, "step", None)
    assert regenerate(chat_target, prompts, PLAN, tmp_path) == first


@pytest.mark.parametrize("damage", ["torn", "flipped", "head", "inserted"])
def test_damaged_answers_are_written_again_and_the_others_are_kept(
    chat_target: Target, tmp_path: Path, damage: str
) -> None:
    prompts = prompts_of(chat_target)
    whole = regenerate(chat_target, prompts, PLAN, tmp_path)
    (file,) = tmp_path.rglob("answers-*.bin")
    body = bytearray(file.read_bytes())
    middle = body.index(b"SpcA", len(body) // 2)
    if damage == "torn":
        body = body[:-5]
    elif damage == "inserted":
        body[middle:middle] = b"SpcA and what is no record"
    else:
        body[middle + (40 if damage == "flipped" else 2)] ^= 1
    file.write_bytes(body)
    console = Counting()
    assert regenerate(chat_target, prompts, PLAN, tmp_path, console=console) == whole
    assert console.total == (0 if damage == "inserted" else 1)
    assert bool(console.warnings) == (damage != "torn")
    assert regenerate(chat_target, prompts, PLAN, tmp_path) == whole


def test_rows_that_end_make_room_at_once(chat_target: Target, tmp_path: Path) -> None:
    """With two slots, answers of 1 and 8 tokens take the rounds of their sum, not of the longest
    in each pair."""
    prompts = [PromptCut(p.ids, p.domain) for p in prompts_of(chat_target)]
    rounds = 0

    class Watched(module.EngineWriter):
        def write(self, jobs: Any, done: Any) -> None:
            step = self.engine.step

            def counted() -> Any:
                nonlocal rounds
                rounds += 1
                return step()

            self.engine.step = counted  # type: ignore[method-assign]
            short = (replace(j, sampling=replace(j.sampling, max_new_tokens=1 + 7 * (j.index % 2)))
                     for j in jobs)  # fmt: skip
            super().write(short, done)

    writer = Watched(chat_target, 40, batch=2)
    answers = regenerate(chat_target, prompts, PLAN, tmp_path, writer=writer)
    tokens = sum(len(a.new_ids) for a in answers)
    assert rounds <= tokens / 2 + 8


def test_ranks_share_the_prompts_that_are_missing(chat_target: Target, tmp_path: Path) -> None:
    class Rank(Ranks):
        def gather(self, value: Any) -> list[Any]:
            return [value]  # the other rank is not running: it comes after

    prompts = prompts_of(chat_target)
    whole = regenerate(chat_target, prompts, PLAN, tmp_path / "whole")
    first = regenerate(chat_target, prompts, PLAN, tmp_path / "two", ranks=Rank(0, 2))
    assert len(first) == 5
    alone = Counting()
    second = regenerate(
        chat_target, prompts, PLAN, tmp_path / "two", ranks=Rank(1, 2), console=alone
    )
    assert (alone.total, len(second)) == (2, 7)  # its share of the five that were left
    assert regenerate(chat_target, prompts, PLAN, tmp_path / "two") == whole


def test_another_plan_has_its_own_answers(chat_target: Target, tmp_path: Path) -> None:
    prompts = prompts_of(chat_target)
    regenerate(chat_target, prompts, PLAN, tmp_path)
    hotter = AnswerPlan(10, 6, 8, temperature=1.5, greedy_share=0.5, seed=3)
    regenerate(chat_target, prompts, hotter, tmp_path)
    assert len(list(tmp_path.glob("answers-*"))) == 2


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_the_greedy_share_is_exact_and_seeds_are_distinct(share: float) -> None:
    plan = AnswerPlan(100, 6, 8, 0.9, share, seed=1)
    samplings = [sampling_of(i, plan) for i in range(100)]
    assert sum(s.temperature == 0.0 for s in samplings) == round(100 * share)
    assert len({s.seed for s in samplings}) == 100


def test_prompts_are_distinct_and_of_the_wanted_length(chat_target: Target) -> None:
    prompts = prompts_of(chat_target)
    assert len({tuple(p.ids) for p in prompts}) == len(prompts) == 10
    assert max(len(p.ids) for p in prompts) <= PLAN.prompt_tokens
    assert prompts == prompts_of(chat_target)


def test_prepared_rows_predict_only_what_the_target_wrote(
    chat_target: Target, tmp_path: Path
) -> None:
    source = tmp_path / "text.jsonl"
    lines = [{"text": f"hello world {i}, how are you?", "domain": "d"} for i in range(8)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    part = DataPart(source=str(source), prompts=8, prompt_tokens=5, new_tokens=6)
    recipe = Recipe(data=part, train=TrainPart(seq_len=24))
    data = prepare(recipe, chat_target, tmp_path)
    answers = [a for p in (tmp_path / "data").glob("answers-*") for a in p.iterdir()]
    assert len(answers) == 1
    written = sorted(tuple(ids.tolist()) for ids, _ in data.answers())
    again = prepare(recipe, chat_target, tmp_path)
    assert written == sorted(tuple(ids.tolist()) for ids, _ in again.answers())
    assert data.manifest.writer == "target"
    assert data.manifest.loss_tokens == sum(len(ids) for ids in written) <= 8 * 6
    wider = recipe.model_copy(update={"data": part.model_copy(update={"train_on_prompt": True})})
    both = prepare(wider, chat_target, tmp_path / "both")
    assert both.manifest.loss_tokens == both.manifest.tokens - both.manifest.documents


def test_prompts_from_python_files_are_told_apart_as_code_and_docstring() -> None:
    text = (
        'x = 1\n\n\ndef f():\n    """One.\n\n    Two.\n    >>> f()\n    1\n    """\n    return x\n'
    )
    sample = Sample("pkg:a.py", "packages", text=text)
    assert domain_at(sample, text.index("Two")) == "docstring"
    assert domain_at(sample, text.index("f()\n    1")) == "docstring"
    assert domain_at(sample, 5) == domain_at(sample, len(text)) == "code"
    assert domain_at(Sample("pkg:a.py", "packages", text="def ("), 3) == "packages"
    assert domain_at(Sample("a.txt", "prose", text=text), 5) == "prose"


def test_fewer_rows_are_answered_together_when_their_caches_would_not_fit(
    make_target: Callable[..., Target],
) -> None:
    target = make_target(num_layers=2)  # 2 layers x key and value x 2 heads x 8 x 4 bytes
    assert slots_for(target, 100) == 32
    assert slots_for(target, 100, budget=256 * 100 * 5) == 5
    assert slots_for(target, 10_000, budget=1000) == 1


ASKED = {"role": "user", "content": "hello"}
TOLD = {"role": "assistant", "content": "world"}


def test_every_turn_of_a_conversation_is_answered_behind_the_answers_before(
    chat_target: Target, tmp_path: Path
) -> None:
    sample = Sample("s:1", "chat", messages=(ASKED, TOLD) * 3)
    plan = replace(PLAN, prompts=1, greedy_share=1.0, longest=120)
    (prompt,) = cut_prompts(chat_target, [sample], plan, Defects())
    assert list(prompt.ids) == chat_target.encode_chat([ASKED])
    writer = Ending(chat_target)
    (answer,) = regenerate(chat_target, [prompt], plan, tmp_path, writer=writer)
    assert [turn.finish_reason for turn in answer.turns] == ["eos", "eos", "eos"]
    said = [ASKED]
    for turn in answer.turns:
        assert list(turn.prompt_ids) == chat_target.encode_chat(said)
        content = chat_target.decode(turn.new_ids)
        said = [*said, {"role": "assistant", "content": content}, ASKED]
    (document,) = answer.documents()
    learned = [t for turn in answer.turns for t in turn.new_ids]
    assert document.ids[document.mask].tolist() == learned
    before, journal = writer.count, AnswerJournal(next(tmp_path.glob("answers-*")), "")
    assert regenerate(chat_target, [prompt], plan, tmp_path, writer=writer) == [answer]
    assert writer.count == before
    assert journal.read().turns == {}  # nothing of another plan is read


def test_a_conversation_ends_where_its_next_prompt_does_not_fit(
    chat_target: Target, tmp_path: Path
) -> None:
    sample = Sample("s:1", "chat", messages=(ASKED, TOLD) * 8)
    first = len(chat_target.encode_chat([ASKED]))
    plan = replace(PLAN, prompts=1, longest=first)
    (prompt,) = cut_prompts(chat_target, [sample], plan, Defects())
    (answer,) = regenerate(chat_target, [prompt], plan, tmp_path, writer=Ending(chat_target))
    assert len(answer.turns) == 1
    defects = Defects()
    assert cut_prompts(chat_target, [sample], replace(plan, longest=first - 1), defects) == []
    assert "no room for an answer (first: s:1)" in defects.lines()[0]


def test_what_the_template_rewrites_begins_another_document() -> None:
    turns = [
        Turn(array("i", [1, 2]), array("i", [3, 9]), "eos"),
        Turn(array("i", [1, 2, 3, 9, 4]), array("i", [5, 9]), "eos"),
        Turn(array("i", [1, 2, 9, 4, 9, 4]), array("i", [6]), "length"),  # its 3 and 5 are gone
    ]
    answer = WrittenAnswer(PromptCut((1, 2), "d"), tuple(turns), True)
    one, two = answer.documents()
    assert (one.ids.tolist(), one.ids[one.mask].tolist()) == ([1, 2, 3, 9, 4, 5, 9], [3, 9, 5, 9])
    assert (two.ids.tolist(), two.ids[two.mask].tolist()) == ([1, 2, 9, 4, 9, 4, 6], [6])


def test_a_call_whose_result_follows_stays_as_it_is() -> None:
    call = {"role": "assistant", "content": "add(2, 2)"}
    result = {"role": "tool", "content": "4"}
    dialogue = Dialogue.of(Sample("s", "d", messages=(ASKED, call, result, TOLD, ASKED)))
    assert dialogue.turns == (3, 5)
    assert dialogue.said(()) == [ASKED, call, result]
    assert dialogue.said(("four",))[3:] == [{"role": "assistant", "content": "four"}, ASKED]
    assert len(dialogue.said(("four", "x"))) == 6


def test_thinking_is_what_the_template_calls_it(chat_target: Target) -> None:
    tokenizer = copy(chat_target.tokenizer)
    tokenizer.chat_template = str(tokenizer.chat_template) + (
        "{% if enable_thinking is defined and not enable_thinking %}none{% endif %}"
    )
    assert thinking_switch(tokenizer, None) == {}
    assert thinking_switch(tokenizer, False) == {"enable_thinking": False}
    asked = answerable(tokenizer, [ASKED], (), {"enable_thinking": False})
    assert tokenizer.decode(asked).endswith("none")
    assert not tokenizer.decode(answerable(tokenizer, [ASKED])).endswith("none")
    with pytest.raises(RecipeError, match="no switch for thinking"):
        thinking_switch(chat_target.tokenizer, True)


class Ending:
    """A writer whose answers are a word and the end of the turn."""

    name = "ending"

    def __init__(self, target: Target) -> None:
        self.target, self.count = target, 0

    def write(self, jobs: Any, done: Any) -> None:
        for job in jobs:
            more = job
            while more is not None:
                self.count += 1
                words = self.target.tokenizer(f"f{more.turn}", add_special_tokens=False)
                more = done(more, [*words["input_ids"], self.target.eos_ids[0]], "eos")
