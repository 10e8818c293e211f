"""Layers of the target that answer unverified: approximate, marked as such, and what they are sure
of stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.drafter import Drafter
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.language_model import Feed
from specctl.drafters import family
from specctl.runtime.stops import base as stops
from specctl.runtime.target.target import Target
from specctl_testing.drafters.parallel_runs import PROMPTS, Ran, decode
from specctl_testing.models import with_weak_layers

FAMILIES = {
    "layer-skip": {"layers": 2},
    "skip-layers": {"keep": 0.5},
    "depth-decay": {"most": 0.5, "least": 0.25},
    "calm": {"exits": (2, 3)},
}


CHAIN: dict[str, Any] = {"tokens": 36, "policy": "chain", "length": 3}


@pytest.fixture(scope="module")
def target(make_model: Any) -> Target:
    """Six layers, of which the upper ones add little."""
    model = with_weak_layers(make_model("llama", num_layers=6, vocab=24))
    return Target.from_model(model)


def made(target: Target, name: str, unverified: float | None) -> Drafter:
    method = family(name)
    return method.build(method.options(**FAMILIES[name], unverified=unverified), target.spec, None)


def ran(target: Target, name: str, unverified: float | None, **how: Any) -> Ran:
    return decode(
        target, made(target, name, unverified), tokens=36, policy="chain", length=3, **how
    )


def said(target: Target, text: list[int], layers: int) -> torch.Tensor:
    """What so many layers say behind a text."""
    ids_1S = torch.tensor([text])
    masks = target.lm.document_masks(torch.zeros_like(ids_1S))
    feed = Feed(ids_1S, torch.arange(len(text))[None], masks, parts=SubLayers.span(0, layers))
    with torch.no_grad():
        out = target.lm.run(feed, None)
    assert out.logits_BTV is not None
    return out.logits_BTV[0, -1].softmax(-1)


def answer(target: Target, prompt: tuple[int, ...], least: float, tokens: int) -> tuple[int, ...]:
    """Two layers draft three tokens; what they are sure of stays, the target verifies the rest."""
    text = list(prompt)
    while len(text) < len(prompt) + tokens:
        drafted, sure = list[int](), list[bool]()
        for _ in range(3):
            p_V = said(target, text + drafted, 2)
            drafted.append(int(p_V.argmax()))
            sure.append(all(sure) and float(p_V.max()) >= least)
        text += drafted[: sum(sure)]
        for token in (*drafted[sum(sure) :], None):
            text.append(int(said(target, text, 6).argmax()))
            if text[-1] != token:
                break
    return tuple(text[len(prompt) :][:tokens])


@pytest.mark.parametrize("least", [0.0, 0.12, 1.0])
def test_what_two_layers_are_sure_of_stays_and_the_target_goes_on(
    target: Target, least: float
) -> None:
    found = ran(target, "layer-skip", least, slots=2)
    wanted = [answer(target, prompt, least, 32) for prompt in PROMPTS]
    assert [one[:32] for one in found.answers] == wanted
    plain = decode(target, None, tokens=36).answers
    assert (found.answers == plain) == (least == 1.0)


@pytest.mark.parametrize("name", FAMILIES)
def test_all_is_taken_or_nothing(target: Target, name: str) -> None:
    """Rounds of a whole draft and a token of the target's; or plain decoding's text."""
    assert not made(target, name, 0.0).lossless
    assert made(target, name, None).lossless
    taken, verified = (ran(target, name, least, slots=2) for least in (0.0, 1.0))
    plain = decode(target, None, tokens=36).answers
    assert taken.tau == 4
    assert taken.answers != plain
    assert verified.answers == plain
    assert verified.tau < 4


def test_a_stop_rule_learns_nothing_of_what_was_not_verified(target: Target) -> None:
    taken, verified = (ran(target, "layer-skip", least) for least in (0.0, None))
    counts = [
        sum(len(list(stops.tested_rows(one))) for one in run.outcomes) for run in (taken, verified)
    ]
    assert counts[0] == 0 < counts[1]
