"""CLLM: windows, states of Jacobi trajectories, and what is learned behind them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.errors import RecipeError
from specctl.recipes.load import load_recipe
from specctl.recipes.low_rank import JointPart, TrajectoryPart
from specctl.runtime.target.target import Target
from specctl.train.joint.joint import JointModel
from specctl.train.joint.trajectory import trajectory_state, windows
from specctl.train.planning.plan import plan
from specctl_testing.train.joint_cases import VOCAB, logits, make, rows, steps

PART = TrajectoryPart(window=4, most=2)


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    found: Target = make_target(num_layers=2, vocab=VOCAB)
    return found


def two_documents() -> TrainBatch:
    """The first token of 20 of a document of 17 may not be predicted; the second has 3 tokens."""
    ids_BS = torch.arange(20).expand(8, 20)
    document_BS = (ids_BS >= 17).long()
    position_BS = torch.where(ids_BS >= 17, ids_BS - 17, ids_BS)
    return TrainBatch(ids_BS, position_BS >= 6, document_BS, position_BS)


def test_a_window_lies_in_what_is_to_be_predicted_and_only_where_there_is_room() -> None:
    torch.manual_seed(0)
    inside_BS, first_BS = windows(two_documents(), 4)
    starts = set()
    for inside, first in zip(inside_BS, first_BS, strict=True):
        at = inside.nonzero()[:, 0].tolist()
        assert at == list(range(at[0], at[0] + 4))
        assert 6 <= at[0] <= 13
        assert first[:17].tolist() == [at[0]] * 17
        starts.add(at[0])
    assert len(starts) > 2


def test_an_iteration_reads_what_stands_before_each_place() -> None:
    """A target that says one more than it reads ends at the text itself, one place an iteration."""
    batch, asked = two_documents(), list[Tensor]()

    def next_number(ids_BS: Tensor, row_Q: Tensor) -> Tensor:
        asked.append(row_Q)
        return ids_BS.flatten()[row_Q] + 1

    torch.manual_seed(1)
    state = trajectory_state(batch, PART, next_number)
    torch.manual_seed(1)
    inside_BS, _ = windows(batch, PART.window)
    wrong_B = ((state.ids_BS != batch.ids_BS) & inside_BS).sum(1)
    assert torch.equal(state.ids_BS[~inside_BS], batch.ids_BS[~inside_BS])
    assert sorted(set(wrong_B.tolist())) == [2, 3, 4]  # after 2, 1 and 0 iterations
    for row, wrong in enumerate(wrong_B.tolist()):
        at = int(inside_BS[row].nonzero()[0])
        learns = state.learns_BS[row].nonzero()[:, 0].tolist()
        assert learns == list(range(at + 4 - wrong + 1, at + 4))
    assert len(asked) == 2


def test_behind_a_state_it_learns_what_it_says_behind_the_text(target: Target) -> None:
    joint = JointModel(
        make(target, "jacobi"), target, JointPart(rank=4, warmup=0.0, keep="ce", trajectory=PART)
    )
    torch.manual_seed(5)
    out = joint.loss(rows())
    torch.manual_seed(5)
    batch = rows()

    def read(ids_BS: Tensor, row_Q: Tensor) -> Tensor:
        return logits(target, replace(batch, ids_BS=ids_BS)).flatten(0, 1)[row_Q].argmax(-1)

    state = trajectory_state(batch, PART, read)
    p = logits(joint.target, batch).log_softmax(-1)
    q = logits(joint.target, replace(batch, ids_BS=state.ids_BS)).log_softmax(-1)
    kl_BS = (p.exp() * (p - q)).sum(-1)[:, :-1]
    wanted = kl_BS[state.learns_BS[:, 1:]]
    total, count = out.metrics["consistency"]
    assert int(count) == len(wanted) > 0
    torch.testing.assert_close(total, wanted.sum().detach())
    before = float(total / count)
    steps(joint, 6)
    torch.manual_seed(5)
    total, count = joint.loss(rows()).metrics["consistency"]
    assert float(total / count) < before


def test_two_ways_to_train_a_target_alone_and_a_drafter_with_weights_are_refused() -> None:
    with pytest.raises(RecipeError, match="two ways"):
        load_recipe("cllm", sets=["train.joint.noise.span=3"])
    with pytest.raises(RecipeError, match=r"train\.joint\.trajectory") as raised:
        plan(load_recipe("cllm", sets=["drafter.family=medusa", "drafter.options={}"]))
    assert "drafter.family=jacobi" in str(raised.value)
