"""LayerSkip's training: weights and curricula of exits, dropped layers, and what is learned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.errors import RecipeError
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.language_model import Feed
from specctl.recipes.load import load_recipe
from specctl.recipes.low_rank import EarlyExitPart, JointPart
from specctl.runtime.target.target import Target
from specctl.train.joint import early_exit
from specctl.train.joint.early_exit import exit_weights, exits_on, kept_layers
from specctl.train.joint.joint import JointModel
from specctl.train.planning.plan import plan
from specctl_testing.train.joint_cases import VOCAB, logits, make, rows, steps


def joint_of(target: Target, **early: Any) -> JointModel:
    part = JointPart(rank=4, warmup=0.0, early_exit=EarlyExitPart(**early))
    return JointModel(make(target, "layer-skip"), target, part)


def said_with(target: Target, batch: TrainBatch, parts: SubLayers) -> Tensor:
    """Logits of the layers `parts`, with the final norm and the head."""
    masks = target.lm.document_masks(batch.document_BS)
    feed = Feed(batch.ids_BS, batch.position_BS, masks, parts=parts)
    with torch.no_grad():
        found = target.lm.run(feed, None).logits_BTV
    assert found is not None
    return found


def test_weights_of_exits_are_the_papers() -> None:
    """Five layers, e = .5 (0, 1, 3, 6) and 4 + .5 * 6 = 7 for the last."""
    found = exit_weights(5, EarlyExitPart(scale=0.5), {0, 2, 3})
    assert found == pytest.approx({2: 1.5 / 11.5, 3: 3 / 11.5, 4: 7 / 11.5})
    assert exit_weights(5, EarlyExitPart(scale=0.0), {1, 2}) == {4: 1.0}


def test_exits_take_turns_or_join_from_the_top() -> None:
    torch.manual_seed(0)
    seen = {frozenset(exits_on(9, EarlyExitPart(every=4), 0.0)) for _ in range(60)}
    assert seen == {frozenset({0, 4}), frozenset({1, 5}), frozenset({2, 6}), frozenset({3, 7})}
    joining = EarlyExitPart(every=None)
    found = [exits_on(5, joining, progress) for progress in (0.0, 0.1, 0.25, 0.5, 1.0)]
    assert found == [set(), {3}, {2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3}]


def test_upper_layers_are_dropped_more_often() -> None:
    torch.manual_seed(0)
    drawn = [kept_layers(5, EarlyExitPart(dropout=0.4)) for _ in range(4000)]
    assert all(parts.attention == parts.mlp for parts in drawn)
    dropped = [sum(layer not in parts.mlp for parts in drawn) / 4000 for layer in range(5)]
    assert dropped == pytest.approx([0.4 * (2 ** (i / 4) - 1) for i in range(5)], abs=0.025)
    assert dropped[0] == 0


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
@pytest.mark.parametrize("dropout", [0.0, 0.6])
def test_every_exit_learns_what_the_whole_original_says(
    kind: str, dropout: float, make_target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is the weighted mean of KL at the exits, of the layers that each row kept."""
    target = make_target(kind, num_layers=3, vocab=VOCAB)
    joint, batch, kept = joint_of(target, every=1, dropout=dropout), rows(), list[SubLayers]()
    drawn = early_exit.kept_layers

    def draw(*given: Any) -> SubLayers:
        kept.append(drawn(*given))
        return kept[-1]

    monkeypatch.setattr(early_exit, "kept_layers", draw)
    steps(joint, 3)  # away from the original, so that no term is zero
    kept.clear()
    torch.manual_seed(4)
    out = joint.loss(batch)
    assert len(kept) == (4 if dropout else 0)
    ran = kept or [SubLayers.span(0, 3)] * 4
    assert (len({parts.mlp for parts in ran}) > 1) == bool(dropout)
    p = logits(target, batch).log_softmax(-1)
    wanted, early = 0.0, 0.0
    for layer, weight in {1: 1 / 4, 2: 3 / 4}.items():  # e = 0, 1 and 2 + 1
        said = [SubLayers(*(tuple(i for i in parts.mlp if i <= layer),) * 2) for parts in ran]
        row = [said_with(joint.target, batch, parts)[i] for i, parts in enumerate(said)]
        q = torch.stack(row).log_softmax(-1)
        kl_BS = (p.exp() * (p - q)).sum(-1)[:, :-1]
        mean = float(kl_BS[batch.loss_mask_BS[:, 1:]].mean())
        wanted += weight * mean
        early = mean if layer == 1 else early
    assert float((out.sum / out.count).detach()) == pytest.approx(wanted, rel=1e-4)
    total, count = out.metrics["target_kl_early"]
    assert float(total / count) == pytest.approx(early, rel=1e-4)


def test_a_target_learns_to_be_read_early(make_target: Any) -> None:
    target = make_target(num_layers=3, vocab=VOCAB)
    joint = joint_of(target, every=1, dropout=0.0)

    def early() -> float:
        total, count = joint.loss(rows(100)).metrics["target_kl_early"]  # one of those it reads
        return float(total / count)

    before = early()
    steps(joint, 12)
    assert early() < 0.8 * before
    assert all("target." in name for name in joint.trainable())


def test_it_goes_with_a_family_that_leaves_early() -> None:
    sets = ["drafter.family=medusa", "drafter.options={}"]
    with pytest.raises(RecipeError, match=r"train\.joint\.early_exit") as raised:
        plan(load_recipe("layer-skip-trained", sets=sets))
    assert "drafter.family=layer-skip" in str(raised.value)
    with pytest.raises(RecipeError, match="noise and early_exit are two ways"):
        load_recipe("layer-skip-trained", sets=["train.joint.noise.span=3"])


def test_the_text_itself_is_learned_where_it_is_asked_for(make_target: Any) -> None:
    target = make_target(num_layers=3, vocab=VOCAB)
    joint = joint_of(target, every=1, dropout=0.0)
    joint.part = replace_keep(joint.part)
    assert {"target_ce", "target_ce_early"} <= set(joint.loss(rows()).metrics)


def replace_keep(part: JointPart) -> JointPart:
    return part.model_copy(update={"keep": "ce"})
