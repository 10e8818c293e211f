"""SDSAT: look-ahead tokens and their target learn together, and ordinary tokens never see them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Needs
from specctl.recipes.low_rank import JointPart
from specctl.runtime.target.target import Target
from specctl.train.features.capture import capture
from specctl.train.joint.joint import JointModel
from specctl_testing.train import small_runs as small
from specctl_testing.train.joint_cases import VOCAB, logits, make, perturb, rows, steps

PART = JointPart(rank=4, warmup=0.0, weight=0.5, keep="none")
PLACES = 3


def joined(target: Target, part: JointPart = PART, **options: Any) -> JointModel:
    drafter = make(target, "pass", num_heads=PLACES, anchors=20, **options)
    return JointModel(drafter, target, part)


def text(num_rows: int = 4, length: int = 20) -> TrainBatch:
    batch = rows()
    names = ("ids_BS", "loss_mask_BS", "document_BS", "position_BS")
    return replace(batch, **{n: getattr(batch, n)[:num_rows, :length] for n in names}, progress=1.0)


def place_loss(joint: JointModel, batch: TrainBatch) -> Tensor:
    """The cross-entropy of all places behind all anchors of one row: every anchor read apart, in a
    whole forward of the text up to it with the look-ahead tokens behind it, as while serving."""
    lm, found, ids_S = joint.target.lm, list[Tensor](), batch.ids_BS[0]
    ahead_TD = joint.module["drafter"]()
    text_SD = capture(joint.target, batch, Needs(taps=(0,))).taps[0][0]
    for anchor in range(len(ids_S) - 1):
        x_1SD = torch.cat([text_SD[: anchor + 1], ahead_TD])[None]
        at_1S = torch.arange(x_1SD.shape[1])[None]
        masks = lm.document_masks(torch.zeros_like(at_1S))
        out = lm.dense(torch.zeros_like(at_1S), at_1S, masks, residual_BSD=x_1SD)
        assert out.logits_BTV is not None
        for i in range(PLACES):
            label = anchor + 1 + i
            if 2 <= label < len(ids_S):
                said_1V = out.logits_BTV[:, anchor + i]
                found.append(F.cross_entropy(said_1V, ids_S[label : label + 1]))
    return torch.stack(found).mean()


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_adaptive_tokens_are_read_by_the_layers_that_learn(make_target: Any, kind: str) -> None:
    """The loss is that of whole forwards of the changed target, anchor by anchor, by its weight;
    every addition learns from it."""
    joint = joined(make_target(kind, num_layers=2, vocab=VOCAB), loss="ce")
    perturb(joint)
    batch = text(1, 9)
    out = joint.loss(batch)
    with torch.no_grad():
        wanted = PART.weight * place_loss(joint, batch)
    torch.testing.assert_close((out.sum / out.count).detach(), wanted)
    out.sum.backward()
    for name, learned in joint.trainable().items():
        assert learned.grad is not None, name
        assert float(learned.grad.abs().max()) > 0, name


def test_ordinary_tokens_do_not_see_adaptive_ones(make_target: Any) -> None:
    """What the target says of the text, and so its own loss, is the same whatever they are."""
    target = make_target(num_layers=2, vocab=VOCAB)
    joint = joined(target, PART.model_copy(update={"keep": "kl"}))
    perturb(joint)
    said = []
    for _ in range(2):
        torch.manual_seed(1)
        metrics = joint.loss(text()).metrics
        said.append((float(metrics["target_kl"][0]), float(metrics["alpha/1"][0])))
        with torch.no_grad():
            joint.module["drafter"].tokens.normal_()
    assert said[0][0] == said[1][0] > 0
    assert said[0][1] != said[1][1]


def test_the_drafter_runs_the_layers_of_the_target_it_is_for(make_target: Any) -> None:
    """In the warm-up those of the original, which nothing moves; later those that learn."""
    target = make_target(num_layers=2, vocab=VOCAB)
    before = small.digest(dict(target.lm.module.named_parameters()))
    joint = joined(target, PART.model_copy(update={"warmup": 0.5}))
    tokens = joint.module["drafter"].tokens.detach().clone()
    steps(joint, 2, progress=0.2)
    assert torch.equal(logits(joint.target, rows()), logits(target, rows()))
    assert not torch.equal(joint.module["drafter"].tokens, tokens)
    steps(joint, 2, progress=0.7)
    assert not torch.equal(logits(joint.target, rows()), logits(target, rows()))
    assert small.digest(dict(target.lm.module.named_parameters())) == before
    again = joined(target)
    perturb(joint, 1.0)
    again.load_tensors(joint.tensors())  # as a run that goes on: no loss was asked for yet
    for one, learner in ((joint, joint.target), (again, again.target), (again, target)):
        with one.whole() as drafter:
            metrics = drafter.loss(capture(learner, text(), drafter.needs())).metrics
        same = float(metrics["top1"][0] / metrics["top1"][1])
        assert (same == 1.0) is (learner is not target)
