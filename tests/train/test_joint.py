"""Joint training: the additions and the drafter move and nothing else, weighted as the recipe
says; what it brings and costs can be seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.errors import RecipeError
from specctl.drafters.losses.align import aim
from specctl.drafters.losses.head_losses import feature_loss
from specctl.recipes.load import load_recipe
from specctl.recipes.low_rank import JointPart
from specctl.recipes.schema import TrainPart
from specctl.runtime.target.target import Target
from specctl.train.features.capture import capture
from specctl.train.joint.joint import JointModel, changing, hidden_matrices, weight_at
from specctl.train.joint.joint_target import measured_change
from specctl.train.step.optim import build_optimizers, set_learning_rate
from specctl_testing.train import small_runs as small
from specctl_testing.train.joint_cases import AT_ONCE, VOCAB, logits, make, perturb, rows, steps


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    found: Target = make_target(num_layers=2, vocab=VOCAB)
    return found


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gpt_neox"])
def test_zero_additions_change_nothing(make_target: Any, kind: str) -> None:
    target = make_target(kind, num_layers=2, vocab=VOCAB)
    changed = changing(target, AT_ONCE)
    assert torch.equal(logits(changed, rows()), logits(target, rows()))


@pytest.mark.parametrize("name", ["medusa", "hydra", "eagle3", "glide", "dflash", "pass"])
def test_only_drafter_and_additions_move(target: Target, name: str) -> None:
    before = small.digest(dict(target.lm.module.named_parameters()))
    joint = JointModel(make(target, name), target, AT_ONCE)
    assert len(joint.slow()) == 2 * len(hidden_matrices(target)) == 2 * 2 * 7
    start = {key: tensor.clone() for key, tensor in joint.tensors().items()}
    steps(joint, 3)
    assert small.digest(dict(target.lm.module.named_parameters())) == before
    moved = {key for key, tensor in joint.tensors().items() if not torch.equal(tensor, start[key])}
    assert set(joint.slow()) <= moved
    assert any(key.startswith("drafter.") for key in moved)
    assert not torch.equal(logits(joint.target, rows()), logits(target, rows()))


def test_a_target_of_transformers_learns_alike(make_target: Any) -> None:
    target = make_target("gemma2", num_layers=2, vocab=VOCAB)
    before = small.digest(dict(target.lm.module.named_parameters()))
    joint = JointModel(make(target), target, AT_ONCE)
    steps(joint, 3)
    assert small.digest(dict(target.lm.module.named_parameters())) == before
    assert not torch.equal(logits(joint.target, rows()), logits(target, rows()))


def test_while_the_drafter_learns_alone_the_target_stays(target: Target) -> None:
    joint = JointModel(make(target), target, JointPart(rank=4, warmup=0.5, weight=1.0))
    steps(joint, 3, progress=0.4)
    assert torch.equal(logits(joint.target, rows()), logits(target, rows()))
    steps(joint, 3, progress=0.5)
    assert not torch.equal(logits(joint.target, rows()), logits(target, rows()))


def test_weight_scales_what_the_target_learns_of_the_drafter_and_not_the_drafter(
    target: Target,
) -> None:
    found = []
    for weight in (1.0, 0.25):
        part = JointPart(rank=4, warmup=0.0, weight=weight, keep="none")
        torch.manual_seed(0)
        joint = JointModel(make(target), target, part)
        perturb(joint)
        joint.loss(rows()).sum.backward()
        found.append({n: p.grad for n, p in joint.trainable().items() if p.grad is not None})
    for name, whole in found[0].items():
        share = 0.25 if name.startswith("target.") else 1.0
        torch.testing.assert_close(found[1][name], share * whole, msg=name)


def test_the_targets_states_are_a_label_that_it_cannot_move() -> None:
    """Else a target would learn states that are easy to draft, whatever they say."""
    drafted_RD, state_RD = (torch.randn(80, 8, requires_grad=True) for _ in range(2))
    feature_loss(drafted_RD, aim(rows(), 1), state_RD).sum.backward()
    assert drafted_RD.grad is not None
    assert state_RD.grad is None


def test_a_misspelled_key_is_answered_with_those_of_its_section() -> None:
    with pytest.raises(RecipeError, match="write rank instead of rnak"):
        load_recipe("medusa-2", sets=["train.joint.rnak=4"])


def test_weight_grows_over_the_ramp() -> None:
    part = JointPart(warmup=0.2, ramp=0.4, weight=2.0)
    assert weight_at(0.2, part) == 0.0
    assert weight_at(0.4, part) == pytest.approx(2.0 * 0.5**0.5)
    assert weight_at(0.7, part) == 2.0


def test_additions_learn_at_their_share_of_the_rate(target: Target) -> None:
    joint = JointModel(make(target), target, AT_ONCE)
    optimizers = build_optimizers(
        joint.trainable(), TrainPart(), frozenset({VOCAB}), joint.slow(), 0.25
    )
    set_learning_rate(optimizers, 0.1)
    rate_of = {p: g["lr"] for o in optimizers.values() for g in o.param_groups for p in g["params"]}
    for name, parameter in joint.trainable().items():
        assert rate_of[parameter] == (0.025 if name.startswith("target.") else 0.1), name


def learned(target: Target, **fields: Any) -> tuple[float, float]:
    """The drafter's loss on text that was not learned, for the target that it is left with, and how
    far that target has drifted."""
    torch.manual_seed(0)
    joint = JointModel(make(target), target, JointPart(**{"rank": 8, "weight": 1.0, **fields}))
    steps(joint, 20)
    with joint.whole() as drafter, torch.no_grad():
        out = drafter.loss(capture(joint.target, rows(7), drafter.needs()))
    return float(out.sum / out.count), measured_change(target, joint.target, [rows(7)]).kl


def test_heads_learn_more_with_their_target_than_alone_and_its_own_term_holds_it(
    target: Target,
) -> None:
    alone, together, free = (
        learned(target, warmup=warmup, keep=keep)
        for warmup, keep in ((1.0, "kl"), (0.0, "kl"), (0.0, "none"))
    )
    assert together[0] < 0.75 * alone[0]
    assert alone[1] == pytest.approx(0.0, abs=1e-6)
    assert 0.0 < together[1] < 0.5 * free[1]


def test_unknown_weights_are_refused(target: Target) -> None:
    with pytest.raises(RecipeError, match="no weight of the target"):
        changing(target, JointPart(targets=("embed_tokens", "lm_head")))
    some = JointModel(make(target), target, JointPart(targets=("q_proj", "v_proj")))
    assert len(some.slow()) == 2 * 2 * 2
