"""The target writes the answers: its own tokens, resumable, masked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from specctl.core.errors import IntegrityError
from specctl.core.language_model import Masks
from specctl.core.masks import document_mask
from specctl.recipes.schema import DataPart, Recipe, TrainPart
from specctl.runtime.measure.reporter import Advance, SilentReporter
from specctl.runtime.target.target import Target
from specctl.train.data import regenerate as module
from specctl.train.data.prepare import prepare
from specctl.train.data.records import Sample
from specctl.train.data.regenerate import (
    AnswerPlan,
    PromptCut,
    WrittenAnswer,
    cut_prompts,
    domain_at,
    regenerate,
    sampling_of,
    slots_for,
)
from specctl.train.data.sources import Defects

PLAN = AnswerPlan(
    prompts=10, prompt_tokens=6, new_tokens=8, temperature=0.9, greedy_share=0.5, seed=3
)


class DiesAfter(SilentReporter):
    """A console that interrupts the job when so many prompts are answered."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.left = count

    @contextmanager
    def task(self, label: str, total: int, unit: str) -> Iterator[Advance]:
        def advance(amount: int, note: str = "") -> None:
            self.left -= amount
            if self.left < 0:
                raise KeyboardInterrupt

        yield advance


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD", 4)


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


@pytest.mark.usefixtures("small_shards")
def test_a_killed_job_goes_on_without_repeating_or_losing(
    chat_target: Target, tmp_path: Path
) -> None:
    prompts = prompts_of(chat_target)
    whole = regenerate(chat_target, prompts, PLAN, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        regenerate(chat_target, prompts, PLAN, tmp_path / "cut", console=DiesAfter(6))
    done = sorted((tmp_path / "cut").rglob("*.safetensors"))
    assert [p.name for p in done] == ["shard-00000.safetensors"]
    stamp = done[0].stat().st_mtime_ns
    resumed = regenerate(chat_target, prompts, PLAN, tmp_path / "cut")
    assert resumed == whole
    assert done[0].stat().st_mtime_ns == stamp


@pytest.mark.usefixtures("small_shards")
def test_finished_answers_are_read_without_the_engine(
    chat_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(chat_target)
    first = regenerate(chat_target, prompts, PLAN, tmp_path)
    monkeypatch.setattr(module.Engine, "run", None)
    assert regenerate(chat_target, prompts, PLAN, tmp_path) == first


def test_a_broken_shard_is_an_error_that_names_it(chat_target: Target, tmp_path: Path) -> None:
    prompts = prompts_of(chat_target)
    regenerate(chat_target, prompts, PLAN, tmp_path)
    shard = next(tmp_path.rglob("shard-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(IntegrityError, match="shard-00000"):
        regenerate(chat_target, prompts, PLAN, tmp_path)


def test_a_flipped_bit_of_an_answer_is_seen(chat_target: Target, tmp_path: Path) -> None:
    prompts = prompts_of(chat_target)
    regenerate(chat_target, prompts, PLAN, tmp_path)
    shard = next(tmp_path.rglob("shard-*.safetensors"))
    body = bytearray(shard.read_bytes())
    body[-2] ^= 1
    shard.write_bytes(body)
    with pytest.raises(IntegrityError, match="does not match its hash"):
        regenerate(chat_target, prompts, PLAN, tmp_path)


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
    assert len({p.ids for p in prompts}) == len(prompts) == 10
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


def test_conversations_are_answered_from_their_last_turn_if_there_is_room(
    chat_target: Target, tmp_path: Path
) -> None:
    asked = {"role": "user", "content": "hello"}
    told = {"role": "assistant", "content": "world"}
    short = Sample("s:1", "chat", messages=(asked, told))
    long = Sample("s:2", "chat", messages=(asked, told) * 8)
    defects = Defects()
    prompts = cut_prompts(chat_target, [short, long], PLAN, defects, longest=40)
    assert [p.ids for p in prompts] == [tuple(chat_target.encode_chat([asked]))]
    assert defects.lines() == [
        "1 x conversation of more than 40 tokens: no room for an answer (first: s:2)"
    ]
    answer = regenerate(chat_target, prompts, PLAN, tmp_path)[0]
    mask = [False] * len(prompts[0].ids) + [True] * len(answer.new_ids)
    assert answer.document().mask.tolist() == mask
