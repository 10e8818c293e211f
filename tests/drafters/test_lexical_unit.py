"""Lexical units: where they are, where pads learn, and what is kept without a second look."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specctl.core.batch import TrainBatch
from specctl.core.language_model import Feed
from specctl.drafters.tokens.lexical_unit import LexicalUnit, LexicalUnitOptions, unit_lengths
from specctl.runtime.target.target import Target
from specctl_testing.drafters.parallel_runs import PROMPTS, decode


def made(target: Target, **options: Any) -> LexicalUnit:
    torch.manual_seed(0)
    drafter = LexicalUnit(LexicalUnitOptions(**options), target.spec, None)
    drafter.bind(target.borrowed())
    return drafter


def sure_of(batch_ids: list[int], sure: list[bool], vocab: int = 8) -> TrainBatch:
    """A text whose marked tokens have nearly all of the target's probability."""
    ids = torch.tensor([batch_ids])
    logits = torch.zeros(1, len(batch_ids), vocab)
    for t, is_sure in enumerate(sure):
        if is_sure and t:
            logits[0, t - 1, batch_ids[t]] = 9.0
    here = torch.ones_like(ids, dtype=torch.bool)
    at = torch.arange(len(batch_ids))[None]
    return TrainBatch(ids, here, torch.zeros_like(ids), at, teacher_BSV=logits)


def test_units_are_runs_of_sure_tokens() -> None:
    batch = sure_of([1, 2, 3, 4, 5, 6], [False, True, True, False, True, True])
    assert unit_lengths(batch, 0.5).tolist() == [[0, 1, 2, 0, 1, 2]]
    other = replace(batch, document_BS=torch.tensor([[0, 0, 1, 1, 1, 1]]))
    assert unit_lengths(other, 0.5).tolist() == [[0, 1, 0, 0, 1, 2]]


def test_pads_learn_inside_units_alone(make_target: Any) -> None:
    """Pad i behind token t learns where tokens t + 1 .. t + 2 + i are of one unit."""
    batch = sure_of([1, 2, 3, 4, 5, 6], [False, True, True, True, False, True])
    anchors = torch.arange(6)[None]
    target = make_target(vocab=8)
    for unit, labels in ((0.5, ([3, 4], [4])), (0.0, ([3, 4, 5, 6], [4, 5, 6]))):
        drafter = made(target, num_heads=2, unit=unit)
        for i, wanted in enumerate(labels):
            assert sorted(drafter._aimed(batch, anchors, i).label_Q.tolist()) == wanted


def spans(target: Target, drafter: LexicalUnit, prompt: tuple[int, ...], tokens: int) -> list[int]:
    """The method in its plainest form: whole forwards of text and pads, without a cache."""
    text, W, keep = list(prompt), drafter.options.num_heads, drafter.options.keep
    assert keep is not None
    while True:
        ids = torch.tensor([[*text, *[0] * W]])
        masks = target.lm.document_masks(torch.zeros_like(ids))
        last, at = target.spec.num_layers, torch.arange(ids.shape[1])[None]
        pads_1WD = drafter.module().detach()
        with torch.no_grad():
            out = target.lm.run(Feed(ids, at, masks, (last,), residual_BTD=pads_1WD), None)
        p_TV = (out.taps[last][0, -W - 1 :] @ drafter.head_weight().T).softmax(-1)
        span = [int(p_TV[0].argmax())]
        for p_V in p_TV[1:]:
            if float(p_V.max()) < keep:
                break
            span.append(int(p_V.argmax()))
        text += span
        if len(text) - len(prompt) >= tokens:
            return text[len(prompt) :][:tokens]


@pytest.mark.parametrize("keep", [0.0, 0.08, 1.0])
def test_kept_spans_are_those_of_plain_forwards(make_target: Any, keep: float) -> None:
    """Batched, in one forward a span; nothing kept is plain decoding."""
    target = make_target("qwen3", vocab=24)
    drafter = made(target, num_heads=2, keep=keep)
    assert not drafter.lossless
    ran = decode(target, drafter, slots=2, tokens=14, length=2, nodes=4)
    wanted = [tuple(spans(target, drafter, prompt, 14)) for prompt in PROMPTS]
    plain = decode(target, None, tokens=14).answers
    if keep == 1.0:
        assert ran.answers == plain
    else:
        assert [one[:10] for one in ran.answers] == [one[:10] for one in wanted]
    if keep == 0.0:
        assert ran.tau > 2
        assert ran.answers != plain


def test_verified_spans_change_nothing(make_target: Any) -> None:
    target = make_target("qwen3")
    drafter = made(target, num_heads=2)
    assert drafter.lossless
    found = decode(target, drafter, slots=2, tokens=14, length=2, nodes=8)
    assert found.answers == decode(target, None, tokens=14).answers


def test_units_are_what_training_inside_them_teaches(
    make_target: Any, make_batch: Any, train_a_little: Any
) -> None:
    """Pads that learned inside units say units better than before."""
    target = make_target(num_layers=2, vocab=24)
    drafter, losses = made(target, num_heads=2, unit=0.04, loss="ce"), list[float]()
    for steps in (0, 60):
        if steps:
            train_a_little(target, drafter, steps)
        torch.manual_seed(1)
        out = drafter.loss(make_batch(target, drafter))
        losses.append(float(out.sum.detach() / out.count))
    assert losses[1] < losses[0] - 0.03
