"""Make Some Noise: what is replaced, by what, and that the target alone learns from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specctl.core.batch import TrainBatch
from specctl.core.errors import RecipeError
from specctl.recipes.load import load_recipe
from specctl.recipes.low_rank import JointPart, NoisePart
from specctl.runtime.target.target import Target
from specctl.train.assemble import trainable_family
from specctl.train.joint.joint import JointModel
from specctl.train.joint.noise import noised
from specctl.train.planning.plan import plan
from specctl.train.planning.work import WorkSizes, work_of
from specctl_testing.train import small_runs as small
from specctl_testing.train.joint_cases import VOCAB, logits, make, rows, steps

PART = JointPart(rank=4, warmup=0.0, noise=NoisePart(span=3, every=8), keep="ce")


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    found: Target = make_target(num_layers=2, vocab=VOCAB)
    return found


def two_documents() -> TrainBatch:
    """Every token is its own place, so that a replaced one says where it is from."""
    ids_BS = torch.arange(40).expand(16, 40)
    document_BS = (ids_BS >= 17).long()
    position_BS = torch.where(ids_BS >= 17, ids_BS - 17, ids_BS)
    return TrainBatch(ids_BS, position_BS >= 4, document_BS, position_BS)


def test_spans_hold_tokens_of_what_stands_before_them_in_the_document() -> None:
    torch.manual_seed(0)
    batch = two_documents()
    found_BS = noised(batch, NoisePart(span=3, every=8))
    changed_BS = found_BS != batch.ids_BS
    assert not bool((changed_BS & ~batch.loss_mask_BS).any())
    for row, is_new in zip(found_BS.tolist(), changed_BS.tolist(), strict=True):
        for block in range(0, 40, 8):
            at = [t for t in range(block, block + 8) if is_new[t]]
            assert len(at) <= 3
            assert not at or at[-1] - at[0] < 3
            for t in at:
                assert (0 if t < 17 else 17) <= row[t] < at[0], "of its document, before its span"
    share = float(changed_BS.sum() / batch.loss_mask_BS.sum())
    assert 0.25 < share < 0.45  # 3 of 8, less what the borders of blocks and documents cut off


def test_labels_are_those_of_the_text_and_only_the_target_moves(target: Target) -> None:
    before = small.digest(dict(target.lm.module.named_parameters()))
    joint = JointModel(make(target, "tr-jacobi"), target, PART)
    assert joint.needs().taps == ()
    assert set(joint.trainable()) == set(joint.slow())
    torch.manual_seed(5)
    out = joint.loss(rows())
    torch.manual_seed(5)
    batch = rows()
    said = logits(target, replace(batch, ids_BS=noised(batch, PART.noise or NoisePart())))
    wanted = torch.nn.functional.cross_entropy(said[:, :-1].flatten(0, 1),
        batch.ids_BS[:, 1:].flatten(), reduction="none")  # fmt: skip
    wanted = wanted[batch.loss_mask_BS[:, 1:].flatten()].sum()
    torch.testing.assert_close(out.sum.detach(), wanted)
    steps(joint, 2)
    assert small.digest(dict(target.lm.module.named_parameters())) == before
    assert not torch.equal(logits(joint.target, rows()), logits(target, rows()))


def test_kl_is_to_what_the_original_says_of_the_text_without_noise(target: Target) -> None:
    torch.manual_seed(5)
    part = PART.model_copy(update={"keep": "kl"})
    out = JointModel(make(target, "tr-jacobi"), target, part).loss(rows())
    batch = rows()
    torch.manual_seed(5)
    JointModel(make(target, "tr-jacobi"), target, part)  # draws its additions
    noisy = replace(batch, ids_BS=noised(batch, part.noise or NoisePart()))
    p, q = logits(target, batch).log_softmax(-1), logits(target, noisy).log_softmax(-1)
    kl_BS = (p.exp() * (p - q)).sum(-1)[:, :-1]
    torch.testing.assert_close(out.sum.detach(), kl_BS[batch.loss_mask_BS[:, 1:]].sum())


@pytest.mark.parametrize(
    ("sets", "found"),
    [
        (["drafter.family=medusa"], "which has weights"),
        (["train.joint.keep=none"], "nothing is learned"),
        (["train.joint.warmup=0.2"], "warmup: 0.2"),
        (["train.compile=true"], "compile"),
    ],
)
def test_what_says_nothing_of_a_target_alone_is_refused(sets: list[str], found: str) -> None:
    with pytest.raises(RecipeError, match="no drafter to train") as raised:
        plan(load_recipe("make-some-noise", sets=sets))
    assert found in str(raised.value)


def test_a_plan_counts_what_the_target_learns() -> None:
    """Three readings (its own, its gradient's two, the original's) of every token: 8 operations a
    weight, and 6 where the text is the teacher."""
    sizes = WorkSizes(target=1000, drafter=0, trainable=0, passes=1, reads_target=False, length=4)
    for keep, each in (("kl", 8), ("ce", 6)):
        recipe = load_recipe("make-some-noise", sets=[f"train.joint.keep={keep}"])
        work = {part.name: part for part in work_of(recipe.data, recipe.train, sizes, row_tokens=1)}
        assert work["training"].batches == each * 1000 * 140 * 4 * 288


def test_a_family_without_weights_is_trained_only_where_the_target_learns() -> None:
    recipe = load_recipe("make-some-noise")
    assert trainable_family(recipe.drafter, recipe.train.joint).name == "tr-jacobi"
    alone = load_recipe("make-some-noise", sets=["train.joint.noise=null"])
    with pytest.raises(RecipeError, match="nothing to train"):
        trainable_family(alone.drafter, alone.train.joint)
    with pytest.raises(RecipeError, match="span"):
        load_recipe("make-some-noise", sets=["train.joint.noise.every=3"])
