"""Relaxed rules: against their definitions, their exact end, their curve, their mark."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specctl.api.arguments.attention_only import attention_only
from specctl.cli.options.names import check_drafting
from specctl.core.errors import RecipeError, SpecctlError
from specctl.core.tree import DraftTree, NodeKind, chain_tree
from specctl.drafters.training_free.prompt_lookup import PromptLookup, PromptLookupOptions
from specctl.export.package.folder import save_package
from specctl.export.package.manifest import read_manifest
from specctl.recipes.serve import check_serve
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.policies.direct import Direct
from specctl.runtime.policies.static_tree import StaticTree
from specctl.runtime.proof import prove
from specctl.runtime.proof.reference_checks import WatchedPolicy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.verify.choice import check_rule
from specctl.runtime.verify.relaxed import Relaxation, relaxation
from specctl_testing.runtime.pairs import disturbed

FIELDS = {"num_layers": 1, "vocab": 16}
EXACT = ("fly:2", "typical:2:1e6")  # numbers that no entropy and no probability reaches


def made(rule: str) -> Relaxation:
    found = relaxation(rule)
    assert found is not None
    return found


def random_chain(rng: np.random.Generator) -> tuple[DraftTree, Tensor, Tensor]:
    """Rows of different lengths over five tokens, of which some cannot be written; and choices."""
    token_BN = torch.from_numpy(rng.integers(0, 5, (6, 9)))
    length_B1 = torch.from_numpy(rng.integers(0, 10, (6, 1)))
    tree = chain_tree(token_BN, torch.arange(9) < length_B1, NodeKind.POINT)
    scores_BTV = torch.from_numpy(rng.normal(0, 1.5, (6, 10, 5))).float()
    scores_BTV[torch.from_numpy(rng.random((6, 10, 5)) < 0.1)] = -torch.inf
    scores_BTV[:, :, 0] = scores_BTV[:, :, 0].clamp(min=-3)
    wrong_BT = torch.from_numpy(rng.random((6, 10)) < 0.25)
    drafted_BT = torch.nn.functional.pad(token_BN, (0, 1))
    return tree, torch.where(wrong_BT, (drafted_BT + 1) % 5, drafted_BT), scores_BTV


def probabilities(scores_V: Tensor) -> list[float]:
    weights = [math.exp(float(s)) for s in scores_V]
    return [w / sum(weights) for w in weights]


def fly_accepts(
    tokens: list[int], choices: list[int], scores_NV: Tensor, threshold: float, window: int
) -> int:
    """The number of accepted nodes, from the definition, one node after the other."""
    width = min(window, len(tokens) - 1)
    for i, token in enumerate(tokens):
        if token == choices[i]:
            continue
        p = probabilities(scores_NV[i])
        top = sorted(p)[-3:]
        shares = [x / sum(top) for x in top if x > 0]
        entropy = -sum(x * math.log(x) for x in shares) / math.log(3)
        behind = range(i + 1, i + 1 + width)
        is_clean = all(j < len(tokens) and tokens[j] == choices[j] for j in behind)
        if not (width and entropy >= threshold and is_clean and p[token] > 0):
            return i
    return len(tokens)


def test_fly_lets_stand_what_its_definition_says() -> None:
    rng, relaxed_rows = np.random.default_rng(0), 0
    for threshold, window in itertools.product((0.0, 0.3, 0.6, 1.01), (1, 2, 6)):
        for _ in range(15):
            tree, choice_BT, scores_BTV = random_chain(rng)
            verdict = made(f"fly:{threshold}:{window}").verdict(tree, choice_BT, scores_BTV)
            for b, length in enumerate(tree.valid_BN.sum(1).tolist()):
                tokens, choices = tree.token_BN[b, :length].tolist(), choice_BT[b].tolist()
                wanted = fly_accepts(tokens, choices, scores_BTV[b], threshold, window)
                assert int(verdict.num_accepted_B[b]) == wanted
                assert int(verdict.next_token_B[b]) == choices[wanted]
                relaxed_rows += wanted > fly_accepts(tokens, choices, scores_BTV[b], 2.0, window)
    assert relaxed_rows > 50


def test_typical_follows_the_longest_path_of_probable_tokens_in_a_tree() -> None:
    """root -> 0 (chosen)          -> 1 (probable) -> 2 (improbable)
    root -> 3 (banned)          -> 4 -> 4 -> 4"""
    parents, tokens = [-1, 0, 1, -1, 3, 4, 5], [0, 1, 2, 3, 4, 4, 4]
    shape_BN = torch.zeros(1, 7, dtype=torch.long)
    tree = DraftTree(
        torch.tensor([tokens]), torch.tensor([parents]), shape_BN, shape_BN == 0, NodeKind.POINT, 4
    )
    scores_BTV = torch.tensor([0.5, 0.3, 0.01, 0.0, 0.19]).log().expand(1, 8, 5)
    choice_BT = torch.zeros(1, 8, dtype=torch.long)
    verdict = made("typical:0.09:0.3").verdict(tree, choice_BT, scores_BTV)
    assert verdict.path_BP.tolist() == [[0, 1, 2, -1, -1]]
    entropy = -sum(p * math.log(p) for p in (0.5, 0.3, 0.01, 0.19))
    below, above = (0.3 * math.exp(entropy) * x for x in (0.99, 1.01))
    for delta, accepted in ((below, 2), (above, 1)):  # 0.3 reaches one threshold, not the other
        verdict = made(f"typical:1:{delta}").verdict(tree, choice_BT, scores_BTV)
        assert verdict.num_accepted_B.tolist() == [accepted]


def emitted(rule: str, p_TV: Tensor, drafts: list[list[int]]) -> tuple[float, float]:
    """Tokens a round, and the total variation of the first token from the target's: every draw of
    the target at every node of every draft (all as likely) enumerated."""
    rounds, first_V, V = 0.0, torch.zeros(p_TV.shape[1]), p_TV.shape[1]
    scores_BTV = p_TV.log()[None]
    for draft in drafts:
        tree = chain_tree(torch.tensor([draft]), torch.ones(1, len(draft)).bool(), NodeKind.POINT)
        for choices in itertools.product(range(V), repeat=len(p_TV)):
            weight = math.prod(float(p_TV[t, c]) for t, c in enumerate(choices)) / len(drafts)
            verdict = made(rule).verdict(tree, torch.tensor([choices]), scores_BTV)
            count = int(verdict.num_accepted_B)
            rounds += weight * (count + 1)
            first_V[draft[0] if count else choices[0]] += weight
    return rounds, float((first_V - p_TV[0]).abs().sum() / 2)


def test_the_curve_goes_from_lossless_to_longer_rounds_further_from_the_target() -> None:
    """Every point is exact: three tokens, drafts of three, all 81 outcomes of each."""
    p_TV = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1], [0.4, 0.4, 0.2], [0.8, 0.1, 0.1]])
    drafts = [[1, 0, 0], [2, 1, 1], [0, 0, 1]]
    for family in (
        ("fly:2", "fly:0.9:2", "fly:0:1"),
        ("typical:2:1e6", "typical:.25:1", "typical:0"),
    ):
        curve = [emitted(rule, p_TV, drafts) for rule in family]
        taus, distances = zip(*curve, strict=True)
        assert distances[0] == pytest.approx(0, abs=1e-6)
        assert list(taus) == sorted(taus)
        assert taus[0] + 0.05 < taus[-1]
        assert list(distances) == sorted(distances)
        assert distances[-1] > 0.02
    assert emitted("typical:0", p_TV, drafts)[0] == pytest.approx(4)


@pytest.fixture(scope="module")
def target(make_target: Any) -> Any:
    return make_target(**FIELDS)


@pytest.fixture(scope="module")
def drafter(make_target: Any, target: Any) -> Any:
    return disturbed(make_target, target, **FIELDS)


def texts(target: Any, drafter: Any, rule: str) -> tuple[list[tuple[int, ...]], float]:
    """Greedy and sampled rows side by side, one of them with a banned token."""
    usual: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
    samplings = [
        Sampling(**usual),
        Sampling(temperature=1.0, seed=3, **usual),
        Sampling(temperature=0.7, seed=4, logit_bias={5: -math.inf, 2: -math.inf}, **usual),
    ]
    policy = make_policy({"policy": "chain", "length": 5})
    engine = Engine(target, drafter, policy, rule, num_slots=3)
    done = engine.run([Request((1, 2), sampling) for sampling in samplings])
    return [c.tokens for c in done], sum(c.stats.rounds for c in done)


def test_the_exact_end_is_lossless_and_the_defaults_are_not(target: Any, drafter: Any) -> None:
    exact, rounds = texts(target, drafter, "target-only")
    for rule in EXACT:
        assert texts(target, drafter, rule) == (exact, rounds)
    for rule in ("fly:0:2", "typical"):
        relaxed, fewer = texts(target, drafter, rule)
        assert relaxed != exact
        assert fewer < rounds
        assert not {5, 2} & set(relaxed[2])  # what cannot be written never stands
        alone = Engine(target, drafter, make_policy({"policy": "chain", "length": 5}), rule)
        greedy = Request((1, 2), Sampling(max_new_tokens=24, ignore_eos=True))
        assert alone.run([greedy])[0].tokens == relaxed[0]  # whatever stands beside it
        short = Request((1, 2), Sampling(max_new_tokens=21, ignore_eos=True))
        pair = Engine(target, drafter, alone.policy, rule, num_slots=2)
        assert [row.tokens for row in pair.run([short, greedy])] == [
            alone.run([short])[0].tokens,
            relaxed[0],
        ]


def test_a_relaxed_rule_is_marked_and_refused_where_it_cannot_be(
    target: Any, drafter: Any, tmp_path: Path
) -> None:
    sampling = Sampling(max_new_tokens=4)
    stats = generate(target, [[1, 2]], drafter=drafter, sampling=sampling, rule="fly:0.5").stats
    assert stats.verification == "approximate:fly:0.5:6"
    about: dict[str, Any] = {"recipe_digest": "0" * 64, "acceptance": None, "command": ["specctl"]}
    lookup = PromptLookup(PromptLookupOptions(), target.spec)
    for rule, mark in (("fly:0.5", "approximate"), ("auto", "lossless")):
        save_package(lookup, target, tmp_path / rule, serve={"rule": rule}, **about)
        assert read_manifest(tmp_path / rule).verification == mark
    with pytest.raises(RecipeError, match="rule typical is approximate"):
        prove.verify(target, drafter, rule="typical")
    check_rule("fly", lookup, WatchedPolicy(Direct()))  # as a package of it is measured by a proof
    for tree in (make_policy({"policy": "static-tree"}), WatchedPolicy(StaticTree())):
        with pytest.raises(RecipeError, match="relaxes chains only"):
            Engine(target, drafter, tree, "fly")
    with pytest.raises(RecipeError, match="relaxes nothing"):
        generate(target, [[1, 2]], drafter=drafter, rule="typical", parallel=True)
    by_flags = ["prompt-lookup"], True, None, "fly"
    by_package = [tmp_path / "fly:0.5"], True
    for before_loading in (by_flags, by_package):
        with pytest.raises(RecipeError, match="relaxes nothing"):
            attention_only(*before_loading)
    assert attention_only([tmp_path / "fly:0.5"], False) == ()
    assert attention_only([tmp_path / "fly:0.5"], True, None, "auto")
    assert attention_only([tmp_path / "fly:0.5"], True, "static-tree")  # the rule was the chain's
    with pytest.raises(ValueError, match="parallel beside rule fly"):
        check_serve({"rule": "fly", "parallel": True})
    for wrong in ("fly:x", "fly:-1", "fly:1:0", "fly:1:2.5", "typical:1:2:3"):
        with pytest.raises(RecipeError, match="has other numbers"):
            check_drafting(None, wrong, None, None)  # before anything is loaded
    for rule in ("fly:.", "fly:e", "fly:nan"):
        with pytest.raises(SpecctlError, match="cannot be described"):
            save_package(lookup, target, tmp_path / "wrong", serve={"rule": rule}, **about)
    save_package(lookup, target, tmp_path / "small", serve={"rule": "typical:1e-3"}, **about)
    assert relaxation("target-only") is None
