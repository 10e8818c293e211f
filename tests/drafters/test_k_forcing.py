"""K-Forcing: whose tokens the slots learn, that serving reads noise as training does, and what the
noise is worth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specctl.core.drafter import Budget, RoundView, SharedNoise, Space
from specctl.core.inverse_cdf import inverse_cdf
from specctl.drafters import family
from specctl.drafters.tokens.k_forcing import KForcing, KForcingOptions, Rollout
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Completion, Request
from specctl.runtime.policies import make_policy
from specctl.runtime.proof.exact_distribution import ExactDistribution
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl_testing.drafters.parallel_runs import decode


def made(target: Target, **options: Any) -> KForcing:
    torch.manual_seed(0)
    drafter = KForcing(KForcingOptions(**{"rank": 16, "code": 16, **options}), target.spec, None)
    drafter.bind(target.borrowed())
    return drafter


def stirred(drafter: KForcing) -> KForcing:
    """Weights that begin at zero are given a value, so that noise matters."""
    with torch.no_grad():
        for weight in drafter.module.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return drafter


def sampled(target: Target, drafter: Any, serve: dict[str, Any], heat: float) -> list[Completion]:
    requests = [
        Request((3, 1, 4, 1), Sampling(heat, seed=seed, max_new_tokens=24, ignore_eos=True))
        for seed in range(6)
    ]
    return Engine(target, drafter, make_policy(serve), "inverse-cdf", num_slots=4).run(requests)


def test_one_seed_gives_one_text_and_the_first_draft_is_the_targets_draw(make_target: Any) -> None:
    target = make_target(num_layers=2, vocab=24)
    drafter = stirred(made(target, num_heads=3))
    done = sampled(target, drafter, {"policy": "direct", "length": 4}, 1.0)
    assert all(row.stats.accepted_at[0] == row.stats.tested_at[0] > 0 for row in done)
    found = family("prompt-lookup")
    lookup = found.build(found.options(), target.spec, None)
    other = sampled(target, lookup, {"policy": "direct", "length": 2}, 1.0)
    assert [row.tokens for row in done] == [row.tokens for row in other]
    assert len({row.tokens for row in done}) > 1


def test_greedy_text_is_the_targets_and_a_round_emits_two_tokens(make_target: Any) -> None:
    target = make_target("qwen3")
    ran = decode(target, stirred(made(target)), length=5, slots=2, tokens=24)
    assert ran.answers == decode(target, None, tokens=24).answers
    assert min(n for outcome in ran.outcomes[:-1] for n in outcome.num_accepted) >= 1
    assert max(outcome.tree.num_nodes for outcome in ran.outcomes) == 5


def test_greedy_and_sampled_rows_join_and_leave_under_one_rule(make_target: Any) -> None:
    """Rows of a batch have the text that they have alone, greedy ones that of greedy decoding."""
    target = make_target(num_layers=2, vocab=24)
    drafter = stirred(made(target, num_heads=3))
    for heats in ((0.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.7, 0.0)):
        requests = [
            Request((3, 1, 4), Sampling(heat, seed=i, max_new_tokens=4 + 3 * i, ignore_eos=True))
            for i, heat in enumerate(heats)
        ]
        policy = make_policy({"policy": "direct", "length": 3})
        done = [
            [row.tokens for row in Engine(target, drafter, policy, rule, n).run(requests)]
            for rule, n in (("inverse-cdf", 3), ("inverse-cdf", 1), ("greedy", 1))
        ]
        assert done[0] == done[1]
        for heat, ours, greedy in zip(heats, done[0], done[2], strict=True):
            assert heat > 0 or ours == greedy


def test_texts_follow_the_targets_distribution(make_target: Any) -> None:
    """All texts of three tokens, drafts of slots that read the very numbers."""
    target = make_target(num_layers=2, vocab=6, hidden=32)
    drafter, sampling = stirred(made(target, num_heads=3)), Sampling(1.3, max_new_tokens=3)
    sampling = replace(sampling, ignore_eos=True)
    requests = [Request((1, 2, 3), replace(sampling, seed=seed)) for seed in range(800)]
    policy = make_policy({"policy": "direct", "length": 3})
    done = Engine(target, drafter, policy, "inverse-cdf", num_slots=200).run(requests)
    exact = ExactDistribution.of(target, (1, 2, 3), sampling)
    assert exact.test([row.tokens for row in done]).p_value > 1e-3


def test_stages_double_the_slots_and_at_once_there_is_one(make_target: Any) -> None:
    target = make_target(num_layers=2, vocab=24)
    five, four = made(target), made(target, num_heads=4)
    assert [five.num_slots(at) for at in (0.0, 0.3, 0.4, 0.66, 0.67, 1.0)] == [1, 1, 2, 2, 4, 4]
    assert [four.num_slots(at) for at in (0.0, 0.49, 0.5)] == [1, 1, 3]
    assert made(target, progressive=False).num_slots(0.0) == 4


def test_without_a_stage_before_the_slots_learn_what_the_target_draws_on_the_same_noise(
    make_target: Any, make_batch: Any
) -> None:
    """Token by token by cacheless forwards. With self-forcing the second is still the target's."""
    target = make_target(num_layers=2, vocab=24)
    drafter = stirred(made(target, num_heads=4, progressive=False))
    batch = make_batch(target, drafter, rows=2)
    anchor_BA = torch.tensor([[4, 7], [12, 15]])
    uniform_BAN = torch.rand(2, 2, 4, dtype=torch.float64)
    heat_BA = torch.tensor([[1.0, 0.0], [0.7, 1.0]])
    rollout = Rollout(anchor_BA, uniform_BAN, heat_BA)
    tokens = drafter.rollout(batch, rollout, 3)
    forced = stirred(made(target, num_heads=4))
    assert torch.equal(forced.rollout(batch, rollout, 3)[1], tokens[1])
    for b, a in ((0, 0), (0, 1), (1, 0), (1, 1)):
        first = int((batch.document_BS[b] == batch.document_BS[b, anchor_BA[b, a]]).nonzero()[0])
        text = batch.ids_BS[b, first : int(anchor_BA[b, a]) + 1].tolist()
        for i in range(4):
            logits_V = dense(target, text)
            if heat_BA[b, a] > 0:
                p_V = (logits_V.double() / heat_BA[b, a]).softmax(-1)
                wanted = int(inverse_cdf(p_V[None], uniform_BAN[b, a, i][None])[0])
            else:
                wanted = int(logits_V.argmax())
            assert int(tokens[i][b, a]) == wanted
            text.append(wanted)


def dense(target: Target, text: list[int]) -> torch.Tensor:
    ids = torch.tensor([text])
    masks = target.lm.document_masks(torch.zeros_like(ids))
    with torch.no_grad():
        out = target.lm.dense(ids, torch.arange(len(text))[None], masks)
    assert out.logits_BTV is not None
    return out.logits_BTV[0, -1]


@pytest.mark.parametrize("heat", [0.0, 0.8])
def test_serving_reads_the_slots_as_training_does(
    make_target: Any, make_batch: Any, drive: Any, heat: float
) -> None:
    target = make_target(num_layers=3, vocab=24)
    drafter = stirred(made(target, num_heads=4))
    batch = make_batch(target, drafter, rows=1)
    uniform_1N = torch.rand(1, 4, dtype=torch.float64)
    rollout = Rollout(torch.tensor([[6]]), uniform_1N[None], torch.full((1, 1), heat))
    trained_ND = drafter._read_behind(batch, rollout, [], 0, 3)[0, 0]
    text = batch.ids_BS[0, :7].tolist()
    hand = drive(target, drafter)
    state = drafter.open(Space(1, 64, 16, target.device, target.dtype))
    hand.start(state, 0, text)
    slot_1 = torch.zeros(1, dtype=torch.long)
    view = RoundView((0,), slot_1, torch.tensor([text[-1]]), torch.tensor([6]), (tuple(text),))
    shared = SharedNoise(
        lambda n: uniform_1N[:, :n], torch.tensor([heat]), lambda logits: logits.softmax(-1)
    )
    tree = state.propose(replace(view, shared=shared), Budget(9, 9))
    torch.testing.assert_close(state._ready_BMD[0], trained_ND)
    said = (trained_ND @ drafter.head_weight().T).argmax(-1)
    assert tree.token_BN[0, 1:].tolist() == said[1:].tolist()
    before = state._ready_BMD.clone()
    changed = replace(shared, uniform=lambda n: 1 - uniform_1N[:, :n])
    state.propose(replace(view, shared=changed), Budget(9, 9))
    same = [
        torch.allclose(a, b, atol=1e-5) for a, b in zip(before[0], state._ready_BMD[0], strict=True)
    ]
    assert same == ([True] * 4 if heat == 0 else [True, False, False, False])


@pytest.mark.proof
def test_trained_slots_hit_the_draw_more_often_than_without_noise(
    make_target: Any, make_batch: Any
) -> None:
    """Drafts are a function of the noise: a drafter that does not see it stays behind."""
    target, hits = make_target(num_layers=1, vocab=8, hidden=32), {}
    for noise in ("uniform", "constant"):
        drafter = made(target, num_heads=2, noise=noise, greedy_share=0.0, anchors=24)
        batch = make_batch(target, drafter, rows=8)
        optimizer = torch.optim.Adam(drafter.trainable().values(), lr=1e-2)
        right = total = 0.0
        for step in range(60):
            out = drafter.loss(batch)
            optimizer.zero_grad()
            (out.sum / out.count).backward()
            optimizer.step()
            if step >= 40:
                right += float(out.metrics["top1"][0])
                total += float(out.metrics["top1"][1])
        hits[noise] = right / total
    assert hits["uniform"] > hits["constant"] + 0.08
