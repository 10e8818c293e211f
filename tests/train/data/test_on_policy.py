"""Text that the drafter writes while it is trained: whose words, which prompts, exact resumes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specctl.core.batch import TrainBatch
from specctl.core.errors import RecipeError
from specctl.core.vocab import VocabMap
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.data.on_policy import OnPolicy, Writing
from specctl.train.data.prompts.answers import AnswerPlan
from specctl.train.data.rows.pack import Document, pack
from specctl.train.data.rows.rows import TokenData, write_rows
from specctl.train.data.rows.supply import Order, Text, joined
from specctl.train.data.sources.defects import Defects
from specctl.train.distributed.ranks import Ranks
from specctl.train.stop import Interrupted
from specctl_testing.train import small_runs as runs
from specctl_testing.train.two_processes import run_twice

SEQ_LEN, ROOM, VOCAB = 60, 30, 96


@pytest.fixture(scope="module")
def target() -> Target:
    return runs.random_target(seed=0)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.words(tmp_path_factory.mktemp("text"))


def random_data(folder: Path, num_documents: int = 40) -> TokenData:
    """Documents of 12 tokens, the last 6 of which are to be predicted."""
    rng = np.random.default_rng(0)
    documents = [
        Document(rng.integers(0, VOCAB, 12).astype(np.int32), np.arange(12) > 5, "text")
        for _ in range(num_documents)
    ]
    rows = pack(documents, SEQ_LEN, 0, 0)
    folder.mkdir()
    return TokenData(folder, write_rows(folder, rows, "0" * 64, {}, "source", Defects()))


def on_policy(
    folder: Path, make_target: Callable[..., Target], num_rows: int = 5, **changes: Any
) -> OnPolicy:
    target = make_target(num_layers=2, dtype=torch.float64)
    torch.manual_seed(1)
    vocab = VocabMap(torch.arange(0, VOCAB, 3), VOCAB) if changes.get("trimmed") else None
    options = SmallLmOptions(layers=1, width=16, heads=2, kv_heads=1, head_dim=8)
    drafter = SmallLm(options, target.spec, vocab)
    drafter.to(torch.device("cpu"), torch.float64)
    with torch.no_grad():
        for parameter in drafter.module.parameters():
            parameter.normal_(std=0.5)
    plan = AnswerPlan(num_rows, 8, 10, changes.get("temperature", 1.0), 0.5, 7)
    order = Order(num_rows, 0, 0.5)
    writing = Writing(plan, order, 4, 6, SEQ_LEN, ROOM, 0, False)
    ranks = changes.get("ranks", Ranks())
    return OnPolicy(drafter, target, random_data(folder), writing, ranks)


def test_fresh_rows_take_their_share_and_every_other_row_still_comes_once_an_epoch() -> None:
    order = Order(num_rows=10, seed=3, fresh=0.4)
    stream = [row for step in range(50) for row in order.take(4 * step, 4)]
    still = [row for row in stream if row < 10]
    fresh = [row - 10 for row in stream if row >= 10]
    assert fresh == list(range(80))
    for epoch in range(12):
        assert sorted(still[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert still == Order(10, 3).take(0, 120)
    for first in range(0, 200, 10):
        assert sum(row >= 10 for row in stream[first : first + 10]) == 4


def test_the_drafter_writes_what_its_own_distribution_says(
    tmp_path: Path, make_target: Callable[..., Target]
) -> None:
    text = on_policy(tmp_path / "data", make_target, trimmed=True)
    lm = text.drafter.language_model()
    assert lm is not None
    prompt = (5, 9, 41, 7)
    writer = runs.replace(text.target, lm=lm)
    done = Engine(writer, num_slots=1).run([Request(prompt, Sampling(max_new_tokens=8))])[0]
    ids = list(prompt)
    for token in done.tokens:
        batch = torch.tensor([ids])
        masks = text.drafter.lm.document_masks(torch.zeros_like(batch))
        out = text.drafter.lm.dense(batch, torch.arange(len(ids))[None], masks)
        assert out.logits_BTV is not None
        kept = text.drafter.vocab
        assert kept is not None
        assert token == int(kept.ids_K[out.logits_BTV[0, -1].argmax()])
        ids.append(token)
    text.refresh(0, 0)
    batch = text.batch(range(3))
    said = batch.ids_BS[batch.loss_mask_BS]
    assert len(said) > 30
    assert bool((said % 3 == 0).all())


def test_prompts_are_beginnings_of_training_documents_and_only_answers_are_learned(
    tmp_path: Path, make_target: Callable[..., Target]
) -> None:
    text = on_policy(tmp_path / "data", make_target, num_rows=5)
    known = text.data.batch(range(text.data.num_rows))
    training = text.data.batch(range(5))  # the rows behind them are kept for measuring
    openings = {
        tuple(ids[number == document][:6].tolist())
        for ids, number in zip(training.ids_BS, training.document_BS, strict=True)
        for document in number[number >= 0].unique()
    }
    assert text.data.num_rows > 5
    assert len(openings) < known.document_BS.max() + 1
    text.refresh(0, 0)
    batch = text.batch(range(12))
    seen = set()
    for ids, number, learned in zip(
        batch.ids_BS, batch.document_BS, batch.loss_mask_BS, strict=True
    ):
        assert (number >= 0).any()
        for document in number[number >= 0].unique():
            here = number == document
            seen.add(tuple(ids[here][:6].tolist()))
            assert learned[here].tolist() == [False] * 6 + [True] * (int(here.sum()) - 6)
    assert seen <= openings
    assert len(seen) > 5


def test_what_a_row_holds_does_not_depend_on_the_rows_written_with_it(
    tmp_path: Path, make_target: Callable[..., Target]
) -> None:
    text = on_policy(tmp_path / "data", make_target)
    whole = text.write(text.drafter, range(3, 9))
    parts = [text.write(text.drafter, numbers) for numbers in (range(3, 4), range(4, 9))]
    for name in ("ids_RS", "mask_RS", "document_RS", "position_RS"):
        found = [getattr(part, name) for part in parts]
        if name == "document_RS":
            found = [np.where(x >= 0, 0, -1) for x in found]
            assert np.array_equal(np.where(whole.document_RS >= 0, 0, -1), np.concatenate(found))
        else:
            assert np.array_equal(getattr(whole, name), np.concatenate(found))
    other = text.write(text.drafter, range(30, 36))
    assert not np.array_equal(whole.ids_RS, other.ids_RS)


def test_text_is_written_anew_only_when_it_is_due_and_follows_the_weights(
    tmp_path: Path, make_target: Callable[..., Target]
) -> None:
    text = on_policy(tmp_path / "data", make_target)
    text.refresh(0, 0)
    first = text.batch(range(12)).ids_BS
    assert text.drafter.module.training
    with torch.no_grad():
        for parameter in text.drafter.module.parameters():
            parameter.mul_(-1.0)
    text.refresh(3, 18)
    assert torch.equal(text.batch(range(12)).ids_BS, first)
    text.refresh(4, 24)
    second = text.batch(range(12, 24)).ids_BS
    assert second.shape == first.shape
    with pytest.raises(IndexError):
        text.batch([24])


def test_a_text_put_back_reads_on_without_writing(
    tmp_path: Path, make_target: Callable[..., Target]
) -> None:
    text = on_policy(tmp_path / "one", make_target)
    assert text.tensors() == {}
    text.refresh(4, 24)
    again = on_policy(tmp_path / "two", make_target)
    again.load_tensors(text.tensors())
    with torch.no_grad():
        for parameter in again.drafter.module.parameters():
            parameter.zero_()
    again.refresh(6, 36)
    for mine, theirs in zip(
        runs.parts(text.batch([12, 20])), runs.parts(again.batch([12, 20])), strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.proof
def test_two_processes_read_what_the_first_one_wrote(
    tmp_path: Path, make_target: Callable[..., Target]
) -> None:
    alone = on_policy(tmp_path / "alone", make_target)
    alone.refresh(0, 0)
    run_twice(Path(__file__).with_name("on_policy_ranks.py"), str(tmp_path), timeout=300)
    digests = json.loads((tmp_path / "digests.json").read_text())
    assert digests == [runs.digest(alone.tensors())] * 2


def test_batches_of_different_width_are_joined_with_padding() -> None:
    def batch(width: int) -> TrainBatch:
        ones = torch.ones(2, width, dtype=torch.long)
        return TrainBatch(ones, ones.bool(), ones, ones)

    both = joined([batch(3), batch(5)])
    assert both.ids_BS.shape == (4, 5)
    assert both.document_BS[:2, 3:].eq(-1).all()
    assert both.loss_mask_BS.dtype == torch.bool
    assert not both.loss_mask_BS[:2, 3:].any()


@pytest.mark.parametrize(("share", "at"), [(0.5, 4), (1.0, 3)])
def test_a_stopped_run_with_its_own_text_resumes_bit_for_bit(
    tmp_path: Path, target: Target, text: Path, share: float, at: int
) -> None:
    """Stopped between two writings, and just before one."""
    sets: dict[str, Any] = {"data__on_policy": share, "data__on_policy_every": 3}
    sets |= {"vocab__size": 40, "train__steps": 6, "data__new_tokens": 8}
    if share == 1.0:
        sets |= {"data__regenerate": False, "data__limit_tokens": 1500}
    recipe = runs.small_recipe("distill", text, **sets)
    whole = runs.run(recipe, tmp_path / "whole", target)
    with pytest.raises(Interrupted), runs.stopped_before(target, step=at):
        runs.run(recipe, tmp_path / "cut", target)
    again = runs.run(recipe, tmp_path / "cut", target)
    assert f"continuing from step {at}" in again.said
    assert again.digest == whole.digest


@pytest.mark.parametrize(
    ("name", "sets", "wrong"),
    [
        ("medusa", {}, "data.on_policy"),
        ("distill", {"drafter__options__loss": "ce"}, "drafter.options.loss"),
    ],
)
def test_a_drafter_that_cannot_write_or_would_learn_its_own_words_is_refused(
    tmp_path: Path, target: Target, text: Path, name: str, sets: dict[str, Any], wrong: str
) -> None:
    recipe = runs.small_recipe(name, text, data__on_policy=0.5, **sets)
    with pytest.raises(RecipeError) as caught:
        runs.run(recipe, tmp_path, target)
    assert caught.value.where == wrong


def test_a_text_that_never_changes_has_nothing_to_save() -> None:
    text = Text()
    text.refresh(0, 0)
    text.load_tensors(text.tensors())
    assert text.tensors() == {}
