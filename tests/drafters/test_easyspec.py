"""EasySpec: attentions of a group read one state, and known tokens keep exact keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.drafter import Space
from specctl.drafters.self_speculation.easyspec import EasySpec, EasySpecOptions, EasySpecState
from specctl.runtime.target.target import Target
from specctl_testing.drafters.parallel_runs import decode

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def easyspec(target: Target, **options: Any) -> EasySpec:
    drafter = EasySpec(EasySpecOptions(**options), target.spec, None)
    drafter.bind(target.borrowed())
    return drafter


def test_all_layers_but_the_last_are_grouped() -> None:
    assert EasySpecOptions(group=4).groups(8) == [range(4), range(4, 7)]
    assert EasySpecOptions(group=1).groups(3) == [range(1), range(1, 2)]


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_groups_of_one_are_the_target(make_target: Any, kind: str) -> None:
    target = make_target(kind)
    ran = decode(target, easyspec(target, group=1), policy="chain", length=3, slots=2)
    assert ran.tau > 3.9
    assert decode(target, easyspec(target, group=3), policy="chain", length=3, slots=2).tau < 3.5


def test_a_group_adds_what_its_attentions_make_of_one_state(make_target: Any, drive: Any) -> None:
    """Written out with the modules of a model of four layers, of which three are a group."""
    target = make_target(num_layers=4)
    driven = drive(target, easyspec(target, group=3))
    found_TV = driven.chain_logits(TEXT, 1)
    lm, x = target.lm, target.lm.module.model.embed_tokens.weight[torch.tensor([TEXT])]
    S = len(TEXT)
    mask = torch.ones(S, S, dtype=torch.bool).tril()[None, None]
    scores, rope = lm._scores_and_rope(mask, torch.arange(S)[None], x.dtype)
    layers = lm.module.weights().layers
    with torch.no_grad():
        added = [lm._attention(x, layers[i], i, rope, scores, None) - x for i in range(3)]
        for i in range(3):
            x = lm._mlp(x + added[i], layers[i])
        x = lm._mlp(lm._attention(x, layers[3], 3, rope, scores, None), layers[3])
        torch.testing.assert_close(found_TV, lm.lm_head(x)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("calibrate", [True, False])
def test_keys_of_the_answer_are_exact_where_they_are_calibrated(
    make_target: Any, drive: Any, calibrate: bool
) -> None:
    target = make_target()
    drafter = easyspec(target, group=3, calibrate=calibrate)
    ran = decode(target, drafter, [TEXT], policy="chain", length=3, tokens=12)
    assert ran.answers == decode(target, None, [TEXT], tokens=12).answers
    fresh = drafter.open(Space(1, 64, 16, target.device, target.dtype))
    drive(target, drafter).start(fresh, 0, [*TEXT, *ran.answers[0]])
    assert isinstance(ran.state, EasySpecState)
    count = ran.state.num_known[0]
    assert count > len(TEXT) + 6
    same = [
        torch.allclose(ours[0, :, :count], theirs[0, :, :count], atol=1e-4)
        for ours, theirs in zip(ran.state.kv.key_ZJLE, fresh.kv.key_ZJLE, strict=True)
    ]
    assert same == ([True] * 4 if calibrate else [True, False, False, False])
