"""verify(): healthy pairs pass; every way of breaking one is found by the check made for it."""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy import stats

from specctl.core.errors import RecipeError
from specctl.core.kv_cache import SlotKV
from specctl.core.tree import QRows
from specctl.drafters import family
from specctl.drafters.lm.small_lm import SmallLm
from specctl.runtime import verify
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.policies import make_policy
from specctl.runtime.proof import prove
from specctl.runtime.proof.reference_checks import (
    PairDistribution,
    Replay,
    chi_square,
    target_distribution,
)
from specctl.runtime.sampling.noise import RoundNoise
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.verify.walk import DraftDistribution
from specctl_testing.runtime.chat_targets import spoken_with

CHAIN, TREE = {"policy": "chain", "length": 3}, {"policy": "static-tree", "branch": (2, 2)}


@pytest.fixture(autouse=True)
def _small_level(monkeypatch):
    small = prove.ProofLevel(3, 12, samples=400, length=4, all_rules=False, enumeration="quick")
    monkeypatch.setitem(prove.LEVELS, "lossless", small)


@pytest.fixture(scope="module")
def target(make_target):
    return make_target(num_layers=2, vocab=48)


@pytest.fixture(scope="module")
def drafter(make_target, target):
    """The target with a disturbed LM head: agrees often, not always."""
    lm = make_target(num_layers=2, vocab=48).lm
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        weight = lm.module.lm_head.weight
        weight += 0.3 * weight.std() * torch.randn(weight.shape, generator=generator)
    return SmallLm.from_lm(lm, target.spec)


def battery(target, drafter, policy, sampling=None, samples=400):
    """The battery, to run one of its checks alone."""
    level = replace(prove.LEVELS["lossless"], samples=samples)
    prompts = [(1, 2, 3), (9,), (4, 4, 8, 15, 16, 23, 42)]
    sampling = sampling or Sampling(temperature=1.0)
    return prove._Battery(target, drafter, level, prompts, policy, "auto", sampling)


def failed(checks):
    return {check.name for check in checks if not check.passed}


@pytest.mark.parametrize("serve", [CHAIN, TREE])
def test_a_healthy_pair_passes(target, drafter, serve):
    proof = prove.verify(target, drafter, policy=make_policy(serve))
    assert proof.passed, proof.lines()
    names = " ".join(check.name for check in proof.checks)
    for word in (
        "exact distribution",
        "scalar",
        "greedy",
        "seeded",
        "cache",
        "distribution, ",
        "drafts follow q",
    ):
        assert word in names
    assert all(check.count > 0 for check in proof.checks)
    assert json.loads(json.dumps(proof.to_json()))["passed"] is True
    assert len(proof.lines()) == len(proof.checks) + len(proof.warnings)


@pytest.mark.parametrize("name", ["prompt-lookup", "token-recycling"])
def test_a_drafter_without_training_passes(target, name):
    entry = family(name)
    assert prove.verify(target, entry.build(entry.options(), target.spec, None)).passed


def test_every_policy_of_the_family_is_tried_greedily(target, drafter):
    proof = prove.verify(target, drafter)
    greedy = {check.name for check in proof.checks if check.name.startswith("greedy")}
    assert len(greedy) == len(family("small-lm").policies)


def test_the_distribution_under_top_k_and_penalties_is_tested_exactly(target, drafter):
    sampling = Sampling(temperature=0.8, top_k=6, repetition_penalty=1.4)
    for policy in (make_policy(TREE),):
        checks = battery(target, drafter, policy, sampling)
        rule = "block" if policy.is_chain else "traversal"
        assert not failed(checks.distribution(policy, rule) + checks.seeded())


def test_given_prompts_and_rule_are_used(target, drafter):
    prompts = [[1, 2, 3], [4, 5]]
    proof = prove.verify(target, drafter, policy=make_policy(CHAIN), rule="chain", prompts=prompts)
    assert proof.passed, proof.lines()
    assert any(check.name == "distribution, Chain chain" for check in proof.checks)
    assert next(c.count for c in proof.checks if c.name.startswith("seeded")) == 2 * 12


def test_an_unknown_level_is_refused(target, drafter):
    with pytest.raises(RecipeError, match="lossless, full"):
        prove.verify(target, drafter, level="perfect")


# -- broken on purpose ----------------------------------------------------------------------------


def swap_rule(monkeypatch, name, run):
    monkeypatch.setitem(verify.RULES, name, replace(verify.RULES[name], run=run))


def test_a_greedy_rule_that_takes_every_draft_fails(target, drafter, monkeypatch):
    right = verify.RULES["greedy"].run

    def wrong(tree, scores_BTV, noise):
        if not tree.is_chain or not tree.num_nodes:
            return right(tree, scores_BTV, noise)
        tokens_BT = torch.cat([tree.token_BN, scores_BTV[:, -1:].argmax(-1)], 1)
        hit_BTV = torch.nn.functional.one_hot(tokens_BT, scores_BTV.shape[-1]).float()
        return right(tree, hit_BTV, noise)

    swap_rule(monkeypatch, "greedy", wrong)
    assert "greedy identity, Chain" in failed(battery(target, drafter, make_policy(CHAIN)).greedy())


def test_a_rule_with_the_wrong_residual_fails_the_distribution(target, drafter, monkeypatch):
    monkeypatch.setattr(
        DraftDistribution, "minus", lambda self, distribution_BV, q_BK: distribution_BV
    )
    policy = make_policy(CHAIN)
    checks = battery(target, drafter, policy, samples=1_000)
    assert failed(checks.distribution(policy, "block")) == {"distribution, Chain block"}
    assert failed(checks.rules()) == {"rules, fast and scalar"}


def test_noise_that_forgets_the_depth_fails_the_seeded_identity(target, drafter, monkeypatch):
    right = RoundNoise.target_draw_BT

    def forgets(self, scores_BTV, depth_BT):
        return right(self, scores_BTV, torch.zeros(scores_BTV.shape[:2], dtype=torch.long))

    monkeypatch.setattr(RoundNoise, "target_draw_BT", forgets)
    assert failed(battery(target, drafter, make_policy(CHAIN)).seeded())


def test_a_cache_that_does_not_keep_the_path_fails(target, drafter, monkeypatch):
    monkeypatch.setattr(SlotKV, "keep", lambda *_: None)
    checks = battery(target, drafter, make_policy(TREE))
    assert failed(checks.caches()) == {"cache rollback"}
    assert failed(checks.greedy())


@dataclass(frozen=True)
class Spoilt:
    """A policy whose trees are changed behind the verifier's back."""

    policy: object
    spoil: object

    nodes = property(lambda self: self.policy.nodes)
    depth = property(lambda self: self.policy.depth)
    is_chain = property(lambda self: self.policy.is_chain)

    def kind(self, sampled):
        return self.policy.kind(sampled)

    def grow(self, growth):
        tree = self.policy.grow(growth)
        return self.spoil(tree) if tree.q is not None else tree


def heated(tree):
    prob_BTK = tree.q.prob_BTK.sqrt()
    return replace(tree, q=QRows(prob_BTK / prob_BTK.sum(-1, keepdim=True).clamp(min=1e-9)))


def rolled(tree):
    return replace(tree, q=QRows(tree.q.prob_BTK.roll(1, -1)))


def reversed_ids(tree):
    ids_K = torch.arange(tree.q.prob_BTK.shape[-1]).flip(0)
    return replace(tree, q=QRows(tree.q.prob_BTK, ids_K))


def argmax_tokens(tree):
    return replace(tree, token_BN=tree.q.prob_BTK[:, :-1].argmax(-1))


def not_a_distribution(tree):
    return replace(tree, q=QRows(tree.q.prob_BTK * 1.2))


@pytest.mark.parametrize("spoil", [heated, rolled, reversed_ids, argmax_tokens, not_a_distribution])
def test_a_q_that_did_not_draw_the_drafts_fails(target, drafter, spoil):
    policy = Spoilt(make_policy(CHAIN), spoil)
    found = failed(battery(target, drafter, policy, samples=300).distribution(policy, "block"))
    assert "drafts follow q, Spoilt block" in found


@pytest.mark.parametrize("spoil", [heated, argmax_tokens])
def test_a_wrong_q_shows_in_the_distribution_too(target, drafter, spoil):
    policy = Spoilt(make_policy(CHAIN), spoil)
    found = failed(battery(target, drafter, policy, samples=1_000).distribution(policy, "block"))
    assert "distribution, Spoilt block" in found


def test_a_drafter_of_another_vocabulary_passes_but_warns(target, make_target):
    model = make_target(num_layers=2, vocab=48).lm
    with torch.no_grad():
        model.module.lm_head.weight.copy_(model.module.lm_head.weight.flip(0) * 4)
    reporter = SilentReporter()
    proof = prove.verify(
        target, SmallLm.from_lm(model, target.spec), policy=make_policy(CHAIN), reporter=reporter
    )
    assert proof.passed, proof.lines()
    assert "vocabulary map" in proof.warnings[0]
    assert reporter.warnings == list(proof.warnings)


def test_a_useful_drafter_does_not_warn(target):
    proof = prove.verify(target, SmallLm.from_lm(target.lm, target.spec))
    assert proof.passed, proof.lines()
    assert not proof.warnings


# -- the witnesses --------------------------------------------------------------------------------


def test_chi_square_agrees_with_scipy():
    counts, expected = [40, 25, 35], [30.0, 30.0, 40.0]
    ours, theirs = chi_square(counts, expected), stats.chisquare(counts, expected)
    assert ours.p_value == pytest.approx(theirs.pvalue)
    assert ours.statistic == pytest.approx(theirs.statistic)


def test_a_sample_outside_the_support_is_fatal():
    assert chi_square([1, 99], [0.0, 100.0]).p_value == 0.0
    assert chi_square([0, 100], [0.0, 100.0]).p_value == 1.0


def test_the_joint_distribution_accepts_its_own_samples_and_rejects_others(target):
    prompt, count, rng = [3, 1, 4], 3_000, np.random.default_rng(0)
    sampling = Sampling(temperature=1.0)
    joint = PairDistribution(target, prompt, sampling, count)
    assert sum(joint.expected) == pytest.approx(count)
    first_V = target_distribution(target, [prompt], sampling)[0].numpy()
    second_VV = target_distribution(target, [[*prompt, t] for t in range(48)], sampling).numpy()
    firsts = rng.choice(48, count, p=first_V)
    right = [(t, rng.choice(48, p=second_VV[t])) for t in firsts]
    wrong = [(t, rng.choice(48, p=first_V)) for t in firsts]
    assert joint.test(right).p_value > 1e-3
    assert joint.test(wrong).p_value < 1e-9


def test_replay_finds_one_changed_token(target):
    from specctl.runtime.generate import generate

    for sampling in (
        Sampling(max_new_tokens=12),
        Sampling(temperature=0.9, seed=5, max_new_tokens=12),
    ):
        output = list(generate(target, [[7, 8, 9]], sampling=sampling).outputs[0].token_ids)
        clean, spoilt = Replay(), Replay()
        clean.read(target, [7, 8, 9], output, sampling)
        assert (clean.tokens, clean.unexplained) == (12, 0)
        output[-1] = (output[-1] + 1) % 48
        spoilt.read(target, [7, 8, 9], output, sampling)
        assert spoilt.unexplained == 1
        assert spoilt.first.startswith("token 11")


def test_too_few_samples_for_any_token_make_one_cell(make_target):
    joint = PairDistribution(make_target(num_layers=1), [1, 2], Sampling(temperature=50.0), 10)
    assert joint.expected == [pytest.approx(10.0)]
    assert joint.test([(0, 0)] * 10).p_value == 1.0


def test_built_in_prompts_are_turns_of_a_chat_model(tiny_target):
    chatty = spoken_with(tiny_target)
    first = {"role": "user", "content": prove.TEXTS[0]}
    assert list(prove.proof_prompts(chatty, None, 1)) == [chatty.encode_chat([first])]
    assert list(prove.proof_prompts(chatty, None, 1, chat=False)) == [chatty.encode(prove.TEXTS[0])]


def test_prompts_that_all_begin_alike_are_read_whole(target):
    header = tuple(range(8))
    prompts = [(*header, 9), (*header, 17)]
    found = prove.open_prompt(target, prompts, Sampling(temperature=1.0))
    assert found in prompts
    assert len(prove.open_prompt(target, [*prompts, (5, 6)], Sampling(temperature=1.0))) <= 8
