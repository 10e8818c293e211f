"""DSpark: the correction token by token, and the confidence that cuts a draft."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from specctl.core.drafter import Drafter
from specctl.core.errors import RecipeError
from specctl.drafters.blocks.dspark import DSparkOptions
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


@pytest.mark.parametrize("count", [3, 24])
@torch.no_grad()
def test_a_cascade_drafts_the_likeliest_chain_of_candidates(
    target: Any, drafter: Any, drive: Any, count: int
) -> None:
    """Against every chain, whose log-probability is the sum along the uncascaded scores."""
    net, moved = drafter.module, 0
    cascaded = copy(drafter)
    cascaded.options = replace(drafter.options, cascade=count)
    for text in ([5, 17, 3, 8, 21], [1, 2], [7, 7, 9], [20, 3, 11, 4]):
        rows = [drive(target, drafter).chain_logits([*text, a, a], len(text)) for a in range(24)]
        behind = [text[-1], 0, 0]
        base = [rows[0][at] - net.bias(net.before.weight[behind[at]]) for at in range(3)]
        best = [set(row.topk(count).indices.tolist()) for row in base]
        logp = [row.log_softmax(-1) for row in rows]
        chains = {
            (a, b, c): float(logp[0][0, a] + logp[a][1, b] + logp[b][2, c])
            for a, b, c in product(*best)
        }
        wanted, path = max(chains, key=chains.__getitem__), list[int]()
        for at in range(3):
            scores = drive(target, cascaded).chain_logits([*text, *path], len(text))[-1]
            assert int(scores.isfinite().sum()) == count
            if at == 0:
                assert float(scores.max()) == pytest.approx(chains[wanted], abs=1e-4)
            path.append(int(scores.argmax()))
        assert tuple(path) == wanted
        first = int(logp[0][0].argmax())
        second = int(logp[first][1].argmax())
        moved += wanted != (first, second, int(logp[second][2].argmax()))
    assert moved > 0


def test_a_cascade_changes_no_text(target: Any, drafter: Any) -> None:
    cascaded = copy(drafter)
    cascaded.options = replace(drafter.options, cascade=4)
    sampling, texts = Sampling(max_new_tokens=40, ignore_eos=True), []
    for one in (None, cascaded):
        policy = None if one is None else make_policy({"policy": "chain", "length": 3})
        done = Engine(target, one, policy).run([Request((3, 1, 4, 1, 5), sampling)])[0]
        texts.append(done.tokens)
        assert one is None or done.stats.accepted > 4
    assert texts[0] == texts[1]
    with pytest.raises(RecipeError, match="one token back"):
        DSparkOptions(correction="rnn", cascade=4)


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
