"""Probes and forced nodes: what is fed for its logits only changes no verdict, what is forced is
taken, and the rest stays exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.tree import DraftTree, NodeKind, QRows, fitted
from specctl.runtime.sampling.noise import RoundNoise
from specctl.runtime.verify import RULES, legal, run_rule
from specctl.runtime.verify.forced import with_forced

B, V = 64, 7
SHAPES = {"chain": (-1, 0, 1), "tree": (-1, -1, 0, 0, 1, 4)}
PROBES = (-1, 0, 1, 1)  # parents among the probes, -1 = the root


def drawn(kind: NodeKind, shape: tuple[int, ...], seed: int = 3) -> DraftTree:
    """B random trees of one shape; siblings differ, distributions are random."""
    generator = torch.Generator().manual_seed(seed)
    N = len(shape)
    parent_BN = torch.tensor(shape).expand(B, N)
    rank_N = torch.tensor([shape[:n].count(parent) for n, parent in enumerate(shape)])
    first_BN = torch.randint(0, V, (B, N + 1), generator=generator).gather(1, parent_BN + 1)
    q = None
    if kind is not NodeKind.POINT:
        q = QRows(torch.rand(B, N + 1, V, generator=generator).softmax(-1))
    return DraftTree(
        (first_BN + rank_N) % V,
        parent_BN,
        rank_N.expand(B, N),
        torch.ones(B, N, dtype=torch.bool),
        kind,
        depth=3,
        is_chain=shape == SHAPES["chain"],
        q=q,
    )


def with_probes(tree: DraftTree, seed: int = 4) -> DraftTree:
    """The same tree with a little tree of probes behind it, whose tokens repeat the drafts'."""
    M, N = len(PROBES), tree.num_nodes
    parents = torch.tensor([p + N if p >= 0 else -1 for p in PROBES]).expand(B, M)
    token_BM = torch.randint(0, V, (B, M), generator=torch.Generator().manual_seed(seed))
    token_BM[:, 0] = tree.token_BN[:, 0]
    q = tree.q
    if q is not None:
        q = QRows(torch.cat([q.prob_BTK, torch.zeros(B, M, V)], 1))
    none_BM = torch.zeros(B, M, dtype=torch.bool)
    return replace(
        tree,
        token_BN=torch.cat([tree.token_BN, token_BM], 1),
        parent_BN=torch.cat([tree.parent_BN, parents], 1),
        rank_BN=torch.cat([tree.rank_BN, torch.zeros_like(token_BM)], 1),
        valid_BN=torch.cat([tree.valid_BN, none_BM], 1),
        is_chain=False,
        q=q,
        num_probes=M,
        probe_depth=3,
    )


def scores_of(tree: DraftTree) -> Tensor:
    """Random scores that often agree with the draft."""
    generator = torch.Generator().manual_seed(9)
    scores_BTV = torch.randn(B, tree.num_nodes + 1, V, generator=generator)
    liked = torch.rand(B, tree.num_nodes, generator=generator) < 0.7
    row_BN = torch.arange(B)[:, None].expand_as(tree.token_BN)
    scores_BTV[row_BN, tree.parent_BN + 1, tree.token_BN] += 4.0 * liked
    return scores_BTV


def noise() -> RoundNoise:
    return RoundNoise(list(range(B)), [5] * B, [17] * B)


CASES = [
    (rule, kind, shape)
    for rule in RULES
    for kind in NodeKind
    for shape in SHAPES
    if legal(rule, kind, False) and (shape == "tree" or legal(rule, kind, True))
]


@pytest.mark.parametrize(("rule", "kind", "shape"), CASES)
def test_no_rule_sees_a_probe(rule: str, kind: NodeKind, shape: str) -> None:
    alone = drawn(kind, SHAPES[shape])
    alone = replace(alone, is_chain=False)
    probed = with_probes(alone)
    scores_BTV = scores_of(probed)
    short_BTV = scores_BTV[:, : alone.num_nodes + 1].contiguous()
    wanted = run_rule(rule, alone, short_BTV, noise())
    found = run_rule(rule, probed, scores_BTV, noise())
    assert int(wanted.num_accepted_B.sum()) > B // 4
    assert torch.equal(found.path_BP, wanted.path_BP)
    assert torch.equal(found.num_accepted_B, wanted.num_accepted_B)
    assert torch.equal(found.next_token_B, wanted.next_token_B)


def test_probes_are_fed_at_their_depth_and_kept_when_nothing_is_drafted() -> None:
    tree = with_probes(drawn(NodeKind.POINT, SHAPES["tree"]))
    assert tree.depth_BT()[0, -4:].tolist() == [1, 2, 3, 3]
    empty = fitted(replace(tree, valid_BN=torch.zeros_like(tree.valid_BN)))
    assert empty.num_nodes == empty.num_probes == 4
    assert empty.depth == 0
    assert empty.parent_BN[0].tolist() == list(PROBES)
    assert empty.depth_BT()[0].tolist() == [0, 1, 2, 3, 3]


@pytest.mark.parametrize("rule", ["greedy", "target-only", "one-hot"])
def test_forced_nodes_are_taken_and_the_rest_is_verified(rule: str) -> None:
    tree = replace(drawn(NodeKind.POINT, SHAPES["chain"]), is_chain=False)
    forced_BN = torch.tensor([True, True, False]).expand(B, 3)
    scores_BTV = scores_of(tree)
    verdict = run_rule(
        rule, tree, with_forced(scores_BTV, replace(tree, forced_BN=forced_BN)), noise()
    )
    assert int(verdict.num_accepted_B.min()) == 2
    assert 0 < int((verdict.num_accepted_B == 3).sum()) < B
    if rule == "greedy":
        best_BT = scores_BTV.argmax(-1)
        agrees_B = best_BT[:, 2] == tree.token_BN[:, 2]
        assert torch.equal(verdict.num_accepted_B == 3, agrees_B)
        last_B1 = verdict.num_accepted_B[:, None]
        assert torch.equal(verdict.next_token_B, best_BT.gather(1, last_B1)[:, 0])


def test_without_forced_nodes_the_scores_are_the_targets_own() -> None:
    tree = drawn(NodeKind.POINT, SHAPES["chain"])
    scores_BTV = scores_of(tree)
    assert with_forced(scores_BTV, tree) is scores_BTV


def test_a_lossless_drafter_may_not_force(make_target: Any) -> None:
    from specctl.drafters.training_free.prompt_lookup import (
        PromptLookup,
        PromptLookupOptions,
        PromptLookupState,
    )
    from specctl.runtime.engine.engine import Engine
    from specctl.runtime.engine.request import Request

    class Pushy(PromptLookupState):
        def propose(self, view: Any, budget: Any) -> DraftTree:
            tree = super().propose(view, budget)
            return replace(tree, forced_BN=tree.valid_BN)

    class Drafter(PromptLookup):
        def open(self, space: Any) -> PromptLookupState:
            return Pushy(self.options, space)

    target = make_target(num_layers=2, vocab=24)
    drafter = Drafter(PromptLookupOptions(), target.spec)
    with pytest.raises(AssertionError, match="approximate"):
        Engine(target, drafter).run([Request((1, 2, 1, 2, 1))])
