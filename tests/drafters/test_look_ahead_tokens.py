"""Look-ahead tokens: what each may see, what is trained, and what a round is worth."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.drafters.tokens.look_ahead_tokens import LookAhead, LookAheadOptions
from specctl.runtime.target.target import Target
from specctl_testing.drafters.head_cases import fit
from specctl_testing.drafters.parallel_runs import copying_target, decode, repeating_batch


def made(target: Target, **options: Any) -> LookAhead:
    torch.manual_seed(0)
    drafter = LookAhead(LookAheadOptions(**options), target.spec, None)
    drafter.bind(target.borrowed())
    return drafter


def test_a_round_emits_two_tokens_at_least(make_target: Any) -> None:
    """The newest token's own draft is what the target says there: untrained, too."""
    target = make_target("qwen3")
    ran = decode(target, made(target, num_heads=3), policy="chain", length=3, slots=2, tokens=24)
    assert ran.answers == decode(target, None, tokens=24).answers
    counts = [n for outcome in ran.outcomes[:-1] for n in outcome.num_accepted]
    assert min(counts) >= 1
    assert max(outcome.tree.num_nodes for outcome in ran.outcomes) == 3


def test_a_draft_sees_its_text_and_what_comes_before_it(make_target: Any, drive: Any) -> None:
    """Another embedding of the second look-ahead token changes what is said there and behind."""
    target, text = make_target("gpt_neox"), [3, 1, 4, 1, 5, 9]
    drafter = made(target, num_heads=4)
    before_TV = drive(target, drafter).chain_logits([*text, 7, 7, 7], 6)
    with torch.no_grad():
        drafter.module.tokens[1] += 1.0
    after_TV = drive(target, drafter).chain_logits([*text, 7, 7, 7], 6)
    changed = [
        not torch.allclose(a, b, atol=1e-4) for a, b in zip(before_TV, after_TV, strict=True)
    ]
    assert changed == [False, False, True, True]


def test_only_the_embeddings_learn_and_they_learn_to_look_ahead(
    make_target: Any, make_batch: Any, train_a_little: Any
) -> None:
    target = make_target(num_layers=2, vocab=24)
    drafter = made(target, num_heads=3)
    assert {n: tuple(p.shape) for n, p in drafter.trainable().items()} == {"tokens": (2, 32)}
    ahead = []
    for steps in (0, 40):
        if steps:
            train_a_little(target, drafter, steps)
        torch.manual_seed(1)
        metrics = drafter.loss(make_batch(target, drafter)).metrics
        ahead.append([float(metrics[name][0] / metrics[name][1]) for name in ("alpha", "alpha/1")])
    assert ahead[0][0] > 0.999
    assert ahead[1][0] > 0.999
    assert ahead[1][1] > ahead[0][1] + 0.05


@pytest.mark.proof
def test_of_a_text_that_repeats_learned_look_ahead_tokens_ask_for_what_random_ones_do_not(
    make_model: Any, capture_batch: Any
) -> None:
    target = copying_target(make_model, period=6)
    prompts = repeating_batch(6, rows=6, seed=2).ids_BS[:, :9].tolist()
    drafter, taus = made(target, num_heads=3), list[float]()
    for steps in (0, 50):
        batch = capture_batch(target, drafter, repeating_batch(6, rows=16, seed=0))
        fit(drafter, batch, steps, rate=5e-3)
        taus.append(decode(target, drafter, prompts, policy="chain", length=3, tokens=24).tau)
    assert taus[0] < 2.3, "the newest token's own draft and the bonus token"
    assert taus[1] > 2.7
