"""Predicted acceptance of a trimmed drafter is what decoding with it measures, at every size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Drafter
from specctl.core.forward.masks import document_mask
from specctl.core.language_model import Masks
from specctl.core.vocab import VocabMap
from specctl.drafters import family
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import HeldoutPrompt
from specctl.train.vocab.acceptance import Ranked, _greedy, passing, size_curves, walk
from specctl.train.vocab.chains import capture_chains, write_answers
from specctl.train.vocab.measure import measure_drafter

V, LENGTH, NEW = 32, 3, 20
PROMPTS = [HeldoutPrompt((3, 1, 4, 1 + i), "", "ab"[i % 2]) for i in range(6)]
SIZES = (4, 9, 16, 31, 32)


def overlap(
    draft_MK: Tensor, target_MV: Tensor, ranked: Ranked, ids_K: Tensor, temperature: float = 1.0
) -> Tensor:
    """float64 [M, K]: sum_v min(p(v), q_k(v)) for every size k = 1 .. K; `ids_K` names the target
    id of each rank. At temperature 0 both distributions are one-hot.

    Id v adds p(v) from the size on that keeps it until q_k(v) < p(v), and q(v) / Q_k from there on;
    so two cumulative sums over sorted events give every k in one pass."""
    if temperature == 0.0:
        best_M = target_MV.argmax(-1)
        every_N = torch.arange(1, ranked.row_K.numel() + 1, device=draft_MK.device)
        return _greedy(draft_MK, best_M, ranked, every_N)
    q_MK = (draft_MK[:, ranked.row_K].double() / temperature).softmax(-1)
    p_MK = (target_MV.double() / temperature).softmax(-1)[:, ids_K]
    mass_MK = q_MK.cumsum(-1)
    K = q_MK.shape[1]
    kept_K = torch.arange(K, device=q_MK.device).expand_as(q_MK)
    ratio_MK = torch.where(p_MK > 0, q_MK / p_MK.clamp(min=1e-300), torch.inf)
    # q_k(v) < p(v) as soon as Q_k > q(v) / p(v)
    turn_MK = torch.searchsorted(mass_MK, ratio_MK, right=True).maximum(kept_K)
    whole_MK = _from(kept_K, p_MK, K) - _from(turn_MK, p_MK, K)
    return whole_MK + _from(turn_MK, q_MK, K) / mass_MK


def _from(start_MK: Tensor, value_MK: Tensor, num_sizes: int) -> Tensor:
    """[M, K]: entry k sums the values whose start is at most k."""
    begun = F.pad(torch.zeros_like(value_MK), (0, 1)).scatter_add_(1, start_MK, value_MK)
    return begun.cumsum(-1)[:, :num_sizes]


@pytest.fixture(scope="module")
def target(make_target: Callable[..., Target]) -> Target:
    return make_target(num_layers=3, vocab=V, eos_token_id=31)


def make_drafter(target: Target, name: str, steps: int = 25) -> Drafter:
    """A drafter that has learnt a little of what the target writes."""
    torch.manual_seed(1)
    found = family(name)
    drafter = found.build(found.options(), target.spec, None)
    if drafter.needs().borrow:
        drafter.bind(target.borrowed())
    needs = drafter.needs()
    texts = [[*a.prompt, *a.tokens] for a in write_answers(target, PROMPTS, NEW)]
    ids = torch.tensor([text + [0] * (24 - len(text)) for text in texts])
    at = torch.arange(ids.shape[1]).expand_as(ids)
    zero = torch.zeros_like(ids)
    masks = Masks(document_mask(zero))
    with torch.no_grad():
        out = target.lm.dense(ids, at, masks, needs.taps, needs.teacher)
    batch = TrainBatch(ids, zero == 0, zero, at, dict(out.taps), out.logits_BTV)
    optimizer = torch.optim.Adam(drafter.trainable().values(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = drafter.loss(batch)
        (loss.sum / loss.count).backward()
        optimizer.step()
    return drafter


RANK = torch.randperm(V, generator=torch.Generator().manual_seed(3))


def kept(size: int) -> VocabMap:
    return VocabMap(RANK[:size].sort().values, V)


@pytest.mark.parametrize("name", ["eagle3", "medusa", "small-lm"])
def test_predicted_tau_and_alpha_are_those_of_decoding_with_the_trimmed_drafter(
    target: Target, name: str
) -> None:
    """Greedy chains: one pass over the full drafter predicts every size exactly."""
    drafter = make_drafter(target, name)
    policy = make_policy({"policy": "chain", "length": LENGTH})
    answers = write_answers(target, PROMPTS, NEW)
    ranked = Ranked.of(RANK, None, V)
    curves = size_curves(capture_chains(target, drafter, answers, LENGTH), ranked, SIZES)
    total = curves["a"] + curves["b"]
    measured = [
        measure_drafter(target, drafter.trimmed(kept(k)), policy, PROMPTS, NEW) for k in SIZES
    ]
    assert total.tau_N.tolist() == pytest.approx([m.tau for m in measured])
    assert total.alpha_N.tolist() == pytest.approx([m.alpha for m in measured])
    assert measured[-1].tau > 1.3, "nothing was accepted, so nothing was tested"
    assert measured[0].tau < measured[-1].tau


def test_a_drafter_already_trimmed_is_predicted_too(target: Target) -> None:
    drafter = make_drafter(target, "small-lm").trimmed(kept(20))
    rank = RANK[torch.isin(RANK, RANK[:20])]
    answers = write_answers(target, PROMPTS, NEW)
    ranked = Ranked.of(rank, drafter.vocab, V)
    curves = size_curves(capture_chains(target, drafter, answers, 2), ranked, (6, 20))
    policy = make_policy({"policy": "chain", "length": 2})
    for size, tau in zip((6, 20), (curves["a"] + curves["b"]).tau_N.tolist(), strict=True):
        small = drafter.trimmed(VocabMap(rank[:size].sort().values, V))
        assert tau == pytest.approx(measure_drafter(target, small, policy, PROMPTS, NEW).tau)


def test_shorter_drafts_are_predicted_from_the_same_chains(target: Target) -> None:
    drafter = make_drafter(target, "small-lm")
    chains = list(capture_chains(target, drafter, write_answers(target, PROMPTS, NEW), LENGTH))
    curves = size_curves(chains, Ranked.of(RANK, None, V), (16,), length=1)
    policy = make_policy({"policy": "chain", "length": 1})
    measured = measure_drafter(target, drafter.trimmed(kept(16)), policy, PROMPTS, NEW)
    assert (curves["a"] + curves["b"]).tau_N.tolist() == pytest.approx([measured.tau])


def distributions(
    draft: Tensor, judge: Tensor, size: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """p and the trimmed q over the target's ids, in float64."""
    mask = torch.full((V,), -torch.inf).double()
    mask[RANK[:size]] = 0.0
    p = (judge.double() / temperature).softmax(-1)
    return p, (draft.double() / temperature + mask).softmax(-1)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_overlap_at_every_size_is_the_sum_of_the_smaller_chances(temperature: float) -> None:
    draft, judge = torch.randn(2, 40, V, generator=torch.Generator().manual_seed(0)) * 3
    found = overlap(draft, judge, Ranked.of(RANK, None, V), RANK, temperature)
    for size in range(1, V + 1):
        if temperature == 0.0:
            _, q = distributions(draft, judge, size, 1.0)
            by_hand = (q.argmax(-1) == judge.argmax(-1)).double()
        else:
            by_hand = torch.minimum(*distributions(draft, judge, size, temperature)).sum(-1)
        torch.testing.assert_close(found[:, size - 1], by_hand)


def test_passing_is_the_chance_of_rejection_sampling(target: Target) -> None:
    drafter = make_drafter(target, "small-lm")
    chain = next(capture_chains(target, drafter, write_answers(target, PROMPTS, NEW, 1.0), 2))
    found = passing(chain, Ranked.of(RANK, None, V), SIZES, 1.0)
    for n, size in enumerate(SIZES):
        for root in range(chain.num_tokens - 1):
            p, q = distributions(chain.draft_RLK[root, 1], chain.target_RV[root + 1], size, 1.0)
            y = int(chain.label_R[root + 1])
            assert float(found[root, 1, n]) == pytest.approx(min(1.0, float(q[y] / p[y])))


def test_expected_tau_under_sampling_is_what_many_runs_average(target: Target) -> None:
    """The walk against rounds over the same text, drawn again and again with the distributions'
    chances."""
    drafter = make_drafter(target, "small-lm")
    chain = next(capture_chains(target, drafter, write_answers(target, PROMPTS, NEW, 1.0), LENGTH))
    chance = passing(chain, Ranked.of(RANK, None, V), (12,), 1.0)
    expected = float(walk(chain, chance, (12,)).rounds_N[0])
    generator, rounds, runs = torch.Generator().manual_seed(7), 0, 3000
    for _ in range(runs):
        at = 0
        while at < chain.num_tokens:
            draws = torch.rand(LENGTH, generator=generator)
            n = 0
            while n < chain.depth_R[at] and draws[n] < chance[at, n, 0]:
                n += 1
            rounds, at = rounds + 1, at + n + 1
    assert rounds / runs == pytest.approx(expected, rel=0.02)


def test_sampled_decoding_has_the_predicted_tau(target: Target) -> None:
    """Rule chain at T = 1, 200 texts: predicted and measured tau agree within 4 standard errors."""
    drafter = make_drafter(target, "small-lm").trimmed(kept(16))
    prompts = [HeldoutPrompt((3, 1, 4, 1), "", "a")] * 200
    policy = make_policy({"policy": "chain", "length": 2})
    requests = [
        Request(p.ids, Sampling(1.0, seed=i + 999, max_new_tokens=6, ignore_eos=True))
        for i, p in enumerate(prompts)
    ]
    done = Engine(target, drafter, policy, "chain", num_slots=200).run(requests)
    rounds = torch.tensor([float(c.stats.rounds) for c in done])
    rank = RANK[:16]
    answers = write_answers(target, prompts[:100], 6, 1.0, batch=100)
    answers = [a for a in answers if len(a.tokens) == 6]
    chains = capture_chains(target, drafter, answers, 2)
    curve = size_curves(chains, Ranked.of(rank, drafter.vocab, V), (16,), 1.0)["a"]
    predicted = float(curve.rounds_N[0]) / len(answers)
    assert float(rounds.mean()) == pytest.approx(predicted, abs=4 * float(rounds.std()) / 50**0.5)
