"""Gumiho: a serial beginning, and heads behind it that cost no pass."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from specctl_testing.drafters.head_cases import fit, make_heads, nearly_markov

FIELDS = {"feature_weight": 1.0, "num_blocks": 1, "layers": 1}


def alphas(target: Any, make_batch: Any, serial: int, heads: int) -> list[float]:
    drafter = make_heads(target, "gumiho", ttt_steps=serial, mlp_heads=heads, **FIELDS)
    fit(drafter, make_batch(target, drafter, rows=12, seq_len=36), 30)
    metrics = drafter.loss(make_batch(target, drafter, rows=12, seq_len=36, seed=1)).metrics
    names = ["alpha", *(f"alpha/{i}" for i in range(1, serial + heads))]
    return [float(metrics[name][0] / metrics[name][1]) for name in names]


def accepted(alphas: list[float]) -> float:
    """Expected accepted tokens of a chain."""
    return sum(math.prod(alphas[: i + 1]) for i in range(len(alphas)))


@pytest.mark.proof
def test_a_serial_beginning_beats_heads_alone_and_itself_alone(
    make_model: Any, make_batch: Any
) -> None:
    target = nearly_markov(make_model)
    paper, early = alphas(target, make_batch, 2, 2), alphas(target, make_batch, 1, 3)
    assert paper[2] > early[2] + 0.03, (paper, early)
    assert accepted(paper) > accepted(early) + 0.005, (paper, early)
    assert accepted(paper) > accepted(paper[:2]) + 0.01, paper


def test_late_heads_weigh_a_ninth(make_target: Any, make_batch: Any) -> None:
    """The published trainer's 1 of the serial part and .8^(i + 1) / 9 of head i."""
    target = make_target(num_layers=2, vocab=24)
    drafter = make_heads(target, "gumiho", mlp_heads=2, **FIELDS)
    assert [drafter.step_weight(step) for step in range(4)] == pytest.approx(
        [1.0, 1.0, 0.8 / 9, 0.64 / 9]
    )
    plain = make_heads(target, "gumiho", mlp_heads=2, head_weight=None, **FIELDS)
    assert [plain.step_weight(step) for step in range(4)] == pytest.approx([1.0, 0.8, 0.64, 0.512])
    batch = make_batch(target, drafter)
    share = float(drafter.loss(batch).count.detach() / plain.loss(batch).count.detach())
    assert share == pytest.approx((2 + 1.44 / 9) / 2.952, rel=0.1)  # later rows are fewer


@torch.no_grad()
def test_heads_draft_whatever_was_drafted_by_other_heads(make_target: Any, drive: Any) -> None:
    """Behind the serial tokens, distributions do not depend on the tokens that heads have
    drafted."""
    target = make_target()
    drafter = make_heads(target, "gumiho", mlp_heads=3)
    for parameter in drafter.trainable().values():
        parameter.add_(0.1 * torch.randn(parameter.shape))
    one = drive(target, drafter)
    first, second = (
        one.chain_logits([5, 17, 3, 8, 21, *drafted], 3) for drafted in ([1, 2], [7, 9])
    )
    torch.testing.assert_close(first, second)
    third = one.chain_logits([5, 17, 3, 8, 2, 1, 2], 3)  # the second serial token does matter
    assert not torch.allclose(first[2], third[2])


@torch.no_grad()
def test_heads_cost_no_pass_through_the_layers(
    make_target: Any, drive: Any, monkeypatch: Any
) -> None:
    target = make_target()
    drafter = make_heads(target, "gumiho", mlp_heads=3)
    calls = []
    through = type(drafter.module).through
    monkeypatch.setattr(
        type(drafter.module), "through", lambda *given: (calls.append(1), through(*given))[1]
    )
    assert len(drive(target, drafter).chain_logits([5, 17, 3, 8, 21, 1, 2], 3)) == 5
    assert len(calls) == 1 + 2  # the prompt, and two serial tokens
