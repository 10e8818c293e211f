"""DSpark: the correction token by token, and the confidence that cuts a draft."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.drafter import Drafter
from specctl.core.errors import RecipeError
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.measure.cost_table import CostTable
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl_testing.drafters.head_cases import alphas, learned, make_heads, nearly_markov, train
from specctl_testing.drafters.parallel_runs import Recorder

STEPS = 40


@pytest.fixture(scope="module")
def target(make_model: Any) -> Any:
    return nearly_markov(make_model)


@pytest.fixture(scope="module")
def drafter(target: Any, make_batch: Any) -> Any:
    made = make_heads(target, "dspark", num_heads=3, layers=2, confidence_weight=1.0)
    train(target, made, make_batch, STEPS)
    return made


@pytest.mark.proof
def test_without_the_correction_late_slots_are_worse(
    target: Any, drafter: Any, make_batch: Any
) -> None:
    corrected = alphas(target, drafter, make_batch)
    plain = learned(target, "dspark", make_batch, STEPS, layers=2, rank=0)
    assert all(a > b + 0.03 for a, b in zip(corrected[1:], plain[1:], strict=True)), (
        corrected,
        plain,
    )


def test_the_correction_is_the_low_rank_product_of_the_token_before(
    target: Any, drafter: Any, drive: Any
) -> None:
    """Two last tokens that differ: the logits behind them differ by W2 (W1[a] - W1[b]), exactly."""
    text, net = [5, 17, 3, 8, 21], drafter.module
    with torch.no_grad():
        first, second = (
            drive(target, drafter).chain_logits([*text, token], len(text))[1] for token in (4, 7)
        )
        expected = net.bias(net.before.weight[4] - net.before.weight[7])
    torch.testing.assert_close(first - second, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_confidence_head_is_calibrated_on_new_text(
    target: Any, drafter: Any, make_batch: Any
) -> None:
    metrics = drafter.loss(make_batch(target, drafter, rows=24, seq_len=48, seed=2)).metrics
    for name in ("confidence_bias", "confidence_bias/2"):
        assert abs(float(metrics[name][0] / metrics[name][1])) < 0.05, metrics[name]


def drafts(target: Target, drafter: Drafter, threshold: float) -> tuple[int, int, list[Any]]:
    """Drafted, accepted, answers under the stop rule."""
    recorder = Recorder(CostTable({0: 1.0}, {0: 1.0}, "", "", 1))
    policy = make_policy(
        {"policy": "chain", "length": 3, "stop": "confidence-head", "threshold": threshold}
    )
    engine = Engine(target, drafter, policy, num_slots=2, chooser=recorder)
    sampling = Sampling(max_new_tokens=40, ignore_eos=True)
    done = engine.run([Request((3, 1, 4, 1, 5), sampling), Request((20, 2, 20), sampling)])
    drafted = sum(int(outcome.tree.valid_BN.sum()) for outcome in recorder.outcomes)
    accepted = sum(sum(outcome.num_accepted) for outcome in recorder.outcomes)
    return drafted, accepted, [c.tokens for c in done]


def test_a_draft_is_cut_where_its_survival_is_unlikely(target: Any, drafter: Any) -> None:
    whole, hits, answers = drafts(target, drafter, 0.0)
    cut, kept, same = drafts(target, drafter, 0.5)
    assert same == answers
    assert cut < whole
    assert kept / cut > hits / whole


def test_a_drafter_without_confidence_is_refused_in_words(target: Any) -> None:
    with pytest.raises(RecipeError, match="does not estimate"):
        drafts(target, make_heads(target, "recurrent", num_heads=3), 0.5)
