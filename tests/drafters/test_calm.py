"""CALM: tokens leave where they are sure, and leave their state to the layers above."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specctl.core.errors import RecipeError
from specctl.drafters.self_speculation.calm import (
    Calm,
    CalmOptions,
    CalmState,
    ReadExits,
    calibrated,
)
from specctl.runtime.target.target import Target
from specctl.train.datastore import teach
from specctl_testing.drafters.parallel_runs import decode

TEXT = [3, 1, 4, 1, 5, 9, 2, 6]


def calm(target: Target, **options: Any) -> Calm:
    drafter = Calm(CalmOptions(**options), target.spec, None)
    drafter.bind(target.borrowed())
    return drafter


def test_the_threshold_falls_as_in_equation_5() -> None:
    options = CalmOptions(threshold=0.5, decay=4.0, over=8)
    found = options.threshold_at(torch.tensor([0.0, 4.0, 1000.0]))
    torch.testing.assert_close(found, torch.tensor([0.55, 0.45 + 0.1 * 0.135335, 0.45]))
    steady = replace(options, decay=None).threshold_at(torch.tensor([0.0, 9.0]))
    assert steady.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("measure", ["softmax", "state"])
def test_the_looser_the_threshold_the_earlier_tokens_leave(make_target: Any, measure: str) -> None:
    target, exits = make_target(num_layers=6), []
    plain = decode(target, None, tokens=10).answers
    for threshold in (0.0, 0.6, 1.0):
        drafter = calm(target, measure=measure, threshold=threshold, decay=None)
        ran = decode(target, drafter, policy="chain", length=4, tokens=10, slots=2)
        assert ran.answers == plain
        assert isinstance(ran.state, CalmState)
        exits.append(ran.state.mean_exit)
    assert exits[0] < exits[1] < exits[2] == 5


def test_a_state_that_no_longer_changes_is_left_at_once(make_model: Any) -> None:
    """Layers 2 and up add nothing: exit 3 sees that first, and is right."""
    model = make_model("llama", num_layers=6)
    with torch.no_grad():
        for layer in model.model.layers[2:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    target = Target.from_model(model)
    drafter = calm(target, measure="state", threshold=0.99999, decay=None)
    ran = decode(target, drafter, policy="chain", length=3, slots=2, tokens=20)
    assert isinstance(ran.state, CalmState)
    assert set(ran.state.taken) == {1, 2, 3}
    assert ran.state.mean_exit == 3
    assert ran.tau > 3.5


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_the_state_at_the_exit_is_propagated(
    make_target: Any, drive: Any, features: Any, round_view: Any, kind: str
) -> None:
    target = make_target(kind, num_layers=4)
    driven = drive(target, calm(target, exits=(1, 3), threshold=0.0, decay=None))
    state, root = driven.open(), len(TEXT) - 1
    driven.start(state, 0, TEXT)
    state.root(round_view({0: TEXT}))
    exit_11D = features(target, TEXT, (1,))[1][None, -1:]
    wanted = target.lm.key_value({1: exit_11D, 2: exit_11D}, torch.tensor([[root]]))
    for layer, (key, value) in wanted.items():
        torch.testing.assert_close(state.kv.key_ZJLE[layer][:, :, root], key[:, :, 0])
        torch.testing.assert_close(state.kv.value_ZJLE[layer][:, :, root], value[:, :, 0])


@pytest.mark.parametrize("measure", ["softmax", "state"])
def test_nodes_of_one_level_leave_each_by_itself(
    make_target: Any, drive: Any, round_view: Any, measure: str
) -> None:
    """Siblings and rows that leave at different exits say what each says alone, and so do their
    children, which read the keys that were left for them."""
    target, texts = make_target(num_layers=6), {0: TEXT, 1: [7, 11, 2]}
    threshold = {"softmax": 0.04, "state": 0.75}[measure]
    driven = drive(target, calm(target, measure=measure, threshold=threshold, decay=None))

    def chains(texts: dict[int, list[int]], nodes: list[int]) -> tuple[Any, torch.Tensor]:
        """Behind siblings, and behind one child of each."""
        state, count = driven.open(2), len(nodes)
        for slot, text in texts.items():
            driven.start(state, slot, text)
        state.root(round_view(texts))
        rows, parent_M = len(texts), torch.arange(count)
        token_BM = torch.tensor(nodes).expand(rows, count)
        first = state.expand(token_BM, torch.full((rows, count), -1))
        second = state.expand(token_BM * 0 + 5, parent_M.expand(rows, count))
        return state, torch.cat([first, second], dim=1)

    nodes = [2, 9, 40, 80]
    state, together_BMV = chains(texts, nodes)
    assert len(state.taken) > 2
    for slot, text in texts.items():
        for i, node in enumerate(nodes):
            _, alone_1MV = chains({slot: text}, [node])
            both_2V = together_BMV[slot, [i, len(nodes) + i]]
            torch.testing.assert_close(alone_1MV[0], both_2V, rtol=1e-4, atol=1e-4)


def test_the_calibrated_threshold_is_the_loosest_that_is_shown_to_be_right() -> None:
    """A token is wrong where its confidence is below 0.6, so that the risk of a threshold is what
    it lets pass of these. Of 200 texts Hoeffding's bound asks for 0.087 to spare."""
    sure_S1 = (torch.arange(100) + 0.5)[:, None] / 100
    exits = ReadExits(sure_S1.expand(200, 100, 1), (sure_S1 >= 0.6).expand(200, 100, 1))
    options = CalmOptions(decay=None, risk=0.2, error=0.05)
    assert calibrated(exits, options) == 0.5
    few = ReadExits(exits.sure_BSC[:40], exits.right_BSC[:40])
    assert calibrated(few, options) == 0.6
    assert calibrated(ReadExits(exits.sure_BSC, exits.right_BSC & False), options) == 0.9


def test_a_calibrated_threshold_is_kept_and_too_few_texts_are_refused(make_target: Any) -> None:
    target = make_target()
    drafter = Calm(CalmOptions(risk=0.5, error=0.2), target.spec, None)
    with pytest.raises(RecipeError, match="too few texts"):
        teach(drafter, target, [TEXT * 8] * 3)
    teach(drafter, target, [TEXT * 8] * 4)
    assert drafter.options.threshold != CalmOptions().threshold
    with pytest.raises(RecipeError, match="out of range"):
        CalmOptions(threshold=2.0)
