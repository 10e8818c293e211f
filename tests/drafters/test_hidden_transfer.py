"""Hidden Transfer: where pseudo states stand, what they see, and what passing layers adds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.errors import RecipeError
from specctl.drafters.tokens.hidden_transfer import HiddenTransfer, HiddenTransferOptions
from specctl.runtime.target.target import Target
from specctl_testing.drafters.head_cases import fit, make_heads
from specctl_testing.drafters.parallel_runs import copying_target, decode, repeating_batch


def made(target: Target, **options: Any) -> HiddenTransfer:
    torch.manual_seed(0)
    drafter = HiddenTransfer(HiddenTransferOptions(**options), target.spec, None)
    drafter.bind(target.borrowed())
    return drafter


def test_a_pseudo_state_is_the_map_of_the_newest_state(make_target: Any, drive: Any) -> None:
    """With maps that keep the state, and no layer's position or text to change it (the last layer's
    own parts zeroed), every place says what the target says behind the newest token."""
    target, text = make_target("qwen3", num_layers=3), [3, 1, 4, 1, 5, 9]
    drafter = made(target, num_heads=2, layer=2)
    with torch.no_grad():
        for name, weight in target.lm.module.named_parameters():
            if "layers.2" in name and ("o_proj" in name or "down_proj" in name):
                weight.zero_()
    logits_TV = drive(target, drafter).chain_logits([*text, 7, 7], 6)
    masks = target.lm.document_masks(torch.zeros(1, 5, dtype=torch.long))
    ids_15 = torch.tensor([text[:5]])
    said_TV = target.lm.dense(ids_15, torch.arange(5)[None], masks).logits_BTV[0]
    assert torch.allclose(logits_TV[0], said_TV[-1], atol=1e-4)
    assert torch.allclose(logits_TV[1], said_TV[-1], atol=1e-4)


def test_later_places_see_earlier_ones_and_the_text_before_the_root(
    make_target: Any, drive: Any
) -> None:
    """Another first map changes all places, another last one its own place alone, another root
    none."""
    target, text = make_target("gpt_neox", num_layers=3), [3, 1, 4, 1, 5, 9]
    drafter = made(target, num_heads=3, layer=1)

    def drafted(*root: int) -> list[torch.Tensor]:
        return list(drive(target, drafter).chain_logits([*text[:5], *(root or (9,)), 7, 7], 6))

    def changed(new: list[torch.Tensor]) -> list[bool]:
        return [not torch.allclose(a, b, atol=1e-4) for a, b in zip(before, new, strict=True)]

    before = drafted()
    assert changed(drafted(8)) == [False] * 3
    for index, expected in ((2, [False, False, True]), (0, [True, True, True])):
        with torch.no_grad():
            drafter.module[index].weight.mul_(-1.0)
        assert changed(drafted()) == expected
        with torch.no_grad():
            drafter.module[index].weight.mul_(-1.0)


def test_only_the_maps_learn(make_target: Any, make_batch: Any, train_a_little: Any) -> None:
    target = make_target(num_layers=3, vocab=24)
    drafter, ahead = made(target, num_heads=2, layer=2), list[float]()
    shapes = {name: tuple(weight.shape) for name, weight in drafter.trainable().items()}
    assert shapes == {"0.weight": (32, 32), "1.weight": (32, 32)}
    for steps in (0, 40):
        if steps:
            train_a_little(target, drafter, steps)
        torch.manual_seed(1)
        metrics = drafter.loss(make_batch(target, drafter)).metrics
        ahead.append(float(metrics["alpha"][0] / metrics["alpha"][1]))
    assert ahead[1] > ahead[0] + 0.05


def test_a_layer_that_is_not_there_is_refused(make_target: Any) -> None:
    with pytest.raises(RecipeError, match="layer leaves nothing"):
        made(make_target(num_layers=3), layer=3)


@pytest.mark.proof
def test_of_a_text_that_repeats_later_places_know_what_medusas_heads_cannot(
    make_model: Any, capture_batch: Any
) -> None:
    """Tokens to come stand in the text before: places attend to them, and a head that reads the
    newest state alone does not."""
    target, taus = copying_target(make_model, period=6), {}
    prompts = repeating_batch(6, rows=6, seed=2).ids_BS[:, :9].tolist()
    for name, options in (("hidden-transfer", {"layer": 2}), ("medusa", {})):
        drafter = make_heads(target, name, num_heads=3, loss="kl", **options)
        fit(drafter, capture_batch(target, drafter, repeating_batch(6, rows=16, seed=0)), 20)
        taus[name] = decode(target, drafter, prompts, policy="chain", length=3, tokens=24).tau
    assert taus["hidden-transfer"] > 3.9
    assert taus["medusa"] < 1.5
