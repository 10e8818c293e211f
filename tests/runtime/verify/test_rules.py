"""The fast rules: equal to the scalar ones, free of host reads, safe at the edges."""

import dataclasses

import numpy as np
import pytest
import torch

from specctl.core.errors import RecipeError
from specctl.core.tree import DraftTree, NodeKind, QRows, chain_tree, empty_tree
from specctl.runtime.proof.compare import FixedNoise, differences, random_round
from specctl.runtime.sampling.gumbel_max import best_token
from specctl.runtime.sampling.noise import RoundNoise
from specctl.runtime.verify import (
    RULES,
    check_legal,
    default_rule,
    legal,
    legal_rules,
    run_rule,
)
from specctl.runtime.verify.traversal import traverse

LEGAL = [(r, k, c) for r in RULES for k in NodeKind for c in (True, False) if legal(r, k, c)]
SAMPLED = [x for x in LEGAL if x[1] is not NodeKind.POINT and x[0] not in ("greedy", "target-only")]


@pytest.mark.fast
@pytest.mark.parametrize(("rule", "kind", "is_chain"), LEGAL)
def test_a_fast_rule_decides_as_the_scalar_rule_on_random_trees(rule, kind, is_chain):
    for seed in range(6):
        rng = np.random.default_rng(seed)
        assert differences(rule, random_round(rng, kind, is_chain, num_nodes=3 + seed)) == 0


@pytest.mark.parametrize(("rule", "kind", "is_chain"), SAMPLED)
def test_a_fast_rule_decides_as_the_scalar_rule_with_a_trimmed_draft(rule, kind, is_chain):
    for seed in range(6):
        rng = np.random.default_rng(100 + seed)
        assert differences(rule, random_round(rng, kind, is_chain, kept=5)) == 0


@pytest.mark.parametrize(("rule", "kind", "is_chain"), SAMPLED)
def test_trimmed_distributions_decide_as_their_dense_form(rule, kind, is_chain):
    one = random_round(np.random.default_rng(3), kind, is_chain, kept=5)
    full = dataclasses.replace(one.tree, q=QRows(one.tree.q.dense(8)))
    trimmed = run_rule(rule, one.tree, one.scores_BTV, one.noise)
    dense = run_rule(rule, full, one.scores_BTV, one.noise)
    assert torch.equal(trimmed.path_BP, dense.path_BP)
    assert torch.equal(trimmed.next_token_B, dense.next_token_B)


@pytest.mark.parametrize(("rule", "kind", "is_chain"), LEGAL)
def test_a_rule_runs_on_the_meta_device_where_nothing_can_be_read(rule, kind, is_chain):
    one = random_round(np.random.default_rng(0), kind, is_chain, num_rows=2, kept=5)
    tree = one.tree
    q = None
    if tree.q is not None:
        q = QRows(tree.q.prob_BTK.float().to("meta"), tree.q.ids_K.to("meta"))
    fields = {
        n: getattr(tree, n).to("meta") for n in ("token_BN", "parent_BN", "rank_BN", "valid_BN")
    }
    meta = dataclasses.replace(tree, q=q, **fields)
    noise = RoundNoise([1, 2], [3, 4], [5, 6], "meta")
    scores_BTV = one.scores_BTV.float().to("meta")
    verdict = run_rule(rule, meta, scores_BTV, noise)
    assert verdict.path_BP.shape == (2, tree.depth + 1)
    assert verdict.num_accepted_B.shape == verdict.next_token_B.shape == (2,)
    assert verdict.path_BP.device.type == "meta"


@pytest.mark.parametrize("rule", RULES)
def test_an_empty_tree_emits_one_token_of_the_target(rule):
    scores_BTV = torch.full((3, 1, 5), -torch.inf)
    scores_BTV[[0, 1, 2], 0, [4, 2, 0]] = 0.0
    noise = RoundNoise([1, 2, 3], [0, 0, 0], [0, 0, 0])
    verdict = run_rule(rule, empty_tree(3, torch.device("cpu")), scores_BTV, noise)
    assert verdict.path_BP.tolist() == [[0], [0], [0]]
    assert verdict.num_accepted_B.tolist() == [0, 0, 0]
    assert verdict.next_token_B.tolist() == [4, 2, 0]


@pytest.mark.parametrize("kind", [NodeKind.IID, NodeKind.WITHOUT_REPLACEMENT])
def test_traversal_of_chains_equals_block_bit_for_bit(kind):
    one = random_round(np.random.default_rng(1), kind, True, num_rows=2000)
    blockwise = run_rule("block", one.tree, one.scores_BTV, one.noise)
    walked = traverse(one.tree, one.scores_BTV, one.noise)
    assert torch.equal(walked.path_BP, blockwise.path_BP)
    assert torch.equal(walked.next_token_B, blockwise.next_token_B)


@pytest.mark.parametrize(("rule", "kind", "is_chain"), LEGAL)
def test_padding_changes_nothing(rule, kind, is_chain):
    one = random_round(np.random.default_rng(2), kind, is_chain)
    garbage_BN = torch.where(one.tree.valid_BN, one.tree.token_BN, -1)
    other = dataclasses.replace(one.tree, token_BN=garbage_BN)
    first = run_rule(rule, one.tree, one.scores_BTV, one.noise)
    second = run_rule(rule, other, one.scores_BTV, one.noise)
    assert torch.equal(first.path_BP, second.path_BP)
    assert torch.equal(first.next_token_B, second.next_token_B)


@pytest.mark.parametrize(("rule", "kind"), [x[:2] for x in LEGAL if not x[2]])
def test_the_order_of_nodes_in_memory_does_not_matter(rule, kind):
    one = random_round(np.random.default_rng(4), kind, False, num_rows=40, num_nodes=6)
    tree = dataclasses.replace(one.tree, valid_BN=torch.ones_like(one.tree.valid_BN))
    key_BN = tree.depth_BT()[:, 1:] * 10 + torch.arange(6).flip(0)  # reversed within a level
    order_BN = key_BN.argsort(1)
    place_BN = order_BN.argsort(1)
    parent_BN = torch.where(
        tree.parent_BN < 0, -1, place_BN.gather(1, tree.parent_BN.clamp(min=0))
    ).gather(1, order_BN)
    fed_BT = torch.nn.functional.pad(order_BN + 1, (1, 0))
    q = tree.q and QRows(tree.q.prob_BTK.gather(1, fed_BT[:, :, None].expand(-1, -1, 8)))
    moved = dataclasses.replace(
        tree,
        token_BN=tree.token_BN.gather(1, order_BN),
        parent_BN=parent_BN,
        rank_BN=tree.rank_BN.gather(1, order_BN),
        q=q,
    )
    by_depth = rule == "multi-path"  # its uniforms belong to places on the path, not to nodes
    noise = FixedNoise(
        one.noise.uniform_BT if by_depth else one.noise.uniform_BT.gather(1, fed_BT),
        one.noise.final,
        one.noise.target.gather(1, fed_BT[:, :, None].expand(-1, -1, 8)),
    )
    scores_BTV = one.scores_BTV.gather(1, fed_BT[:, :, None].expand(-1, -1, 8))
    first = run_rule(rule, tree, one.scores_BTV, one.noise)
    second = run_rule(rule, moved, scores_BTV, noise)
    back_BP = torch.where(second.path_BP < 0, -1, fed_BT.gather(1, second.path_BP.clamp(min=0)))
    fed_BT = tree.fed_token_BT(torch.zeros(40, dtype=torch.long))
    read_BP, moved_BP = (  # two paths may hold the same tokens: which copy is named is no matter
        torch.where(path_BP < 0, -1, fed_BT.gather(1, path_BP.clamp(min=0)))
        for path_BP in (first.path_BP, back_BP)
    )
    assert torch.equal(read_BP, moved_BP)
    assert torch.equal(first.next_token_B, second.next_token_B)


def test_duplicate_candidates_do_not_disturb_greedy_and_target_only():
    token_BN = torch.tensor([[2, 2, 3]])
    parent_BN = torch.tensor([[-1, -1, 1]])  # the second copy of token 2 has the child
    tree = DraftTree(
        token_BN, parent_BN, torch.tensor([[0, 1, 0]]), token_BN > 0, NodeKind.POINT, 2
    )
    scores_BTV = torch.zeros(1, 4, 5)
    scores_BTV[0, 0, 2] = scores_BTV[0, 1, 3] = scores_BTV[0, 2, 3] = scores_BTV[0, 3, 4] = 90.0
    for rule in ("greedy", "target-only"):
        verdict = run_rule(rule, tree, scores_BTV, RoundNoise([0], [0], [0]))
        assert verdict.path_BP.tolist() == [[0, 2, 3]], rule
        assert verdict.next_token_B.tolist() == [4]


def test_ties_go_to_the_lowest_id():
    assert best_token(torch.tensor([[1.0, 3.0, 3.0, 3.0]])).tolist() == [1]


def fixed(num_fed, size, uniform):
    shape = (1, num_fed, size)
    return FixedNoise(torch.full(shape[:2], uniform), torch.zeros(1, size), torch.zeros(shape))


@pytest.mark.parametrize(
    "rule", ["one-hot", "chain", "block", "multi-round", "spectr", "traversal"]
)
def test_a_token_of_probability_zero_is_rejected_even_when_the_uniform_is_zero(rule):
    kind = NodeKind.POINT if rule == "one-hot" else NodeKind.IID
    q = None if rule == "one-hot" else QRows(torch.full((1, 2, 3), 1 / 3))
    tree = chain_tree(torch.tensor([[1]]), torch.ones(1, 1, dtype=torch.bool), kind, q)
    scores_BTV = torch.tensor([[[0.0, -torch.inf, 1.0], [0.0, 0.0, 0.0]]])
    verdict = run_rule(rule, tree, scores_BTV, fixed(2, 3, 0.0))
    assert verdict.num_accepted_B.tolist() == [0]
    assert verdict.next_token_B.tolist() != [1]


@pytest.mark.parametrize("rule", ["chain", "block", "multi-round", "spectr", "traversal"])
def test_a_token_that_q_cannot_draw_is_rejected(rule):
    q = QRows(torch.tensor([[[0.5, 0.0, 0.5], [0.5, 0.0, 0.5]]]))
    tree = chain_tree(torch.tensor([[1]]), torch.ones(1, 1, dtype=torch.bool), NodeKind.IID, q)
    scores_BTV = torch.tensor([[[-torch.inf, 0.0, -torch.inf], [0.0, 0.0, 0.0]]])
    verdict = run_rule(rule, tree, scores_BTV, fixed(2, 3, 0.5))
    assert verdict.num_accepted_B.tolist() == [0]
    assert verdict.next_token_B.tolist() == [1]


@pytest.mark.parametrize("rule", ["chain", "block", "multi-round", "spectr", "traversal"])
def test_an_empty_residual_falls_back_to_the_target(rule):
    distribution_V = torch.tensor([0.25, 0.75, 0.0])
    q = QRows(distribution_V.expand(1, 2, 3) * (1 + 1e-6))  # q a hair above p everywhere
    tree = chain_tree(torch.tensor([[1]]), torch.ones(1, 1, dtype=torch.bool), NodeKind.IID, q)
    scores_BTV = distribution_V.log().expand(1, 2, 3).clone()
    verdict = run_rule(rule, tree, scores_BTV, fixed(2, 3, 1 - 1e-7))
    assert verdict.next_token_B.item() in (0, 1)


@pytest.mark.parametrize(("rule", "kind", "is_chain"), SAMPLED)
def test_one_hot_distributions_of_greedy_rows_give_the_greedy_answer(rule, kind, is_chain):
    one = random_round(np.random.default_rng(7), kind, is_chain, num_rows=200)
    hard_BTV = torch.full_like(one.scores_BTV, -torch.inf)
    hard_BTV.scatter_(2, one.scores_BTV.argmax(-1, keepdim=True), 0.0)
    prob_BTK = one.tree.q.prob_BTK
    first_BT1 = prob_BTK.argmax(-1, keepdim=True)
    q = QRows(torch.zeros_like(prob_BTK).scatter_(2, first_BT1, 1.0))
    tree = dataclasses.replace(one.tree, q=q)
    drawn_BN = q.prob_BTK.argmax(-1).gather(1, tree.parent_BN + 1)
    first_child = tree.rank_BN == 0 if is_chain else _is_first(tree)
    token_BN = torch.where(first_child, drawn_BN, tree.token_BN)
    tree = dataclasses.replace(tree, token_BN=token_BN, valid_BN=tree.valid_BN)
    verdict = run_rule(rule, tree, hard_BTV, one.noise)
    for b, path in enumerate(verdict.path_BP.tolist()):
        end = max(fed for fed in path)
        assert all(
            hard_BTV[b, tree.parent_BN[b, fed - 1] + 1, tree.token_BN[b, fed - 1]] == 0.0
            for fed in path
            if fed > 0
        )
        assert int(verdict.next_token_B[b]) == int(hard_BTV[b, end].argmax())


def _is_first(tree):
    same_BNN = tree.parent_BN[:, :, None] == tree.parent_BN[:, None]
    earlier_BNN = tree.rank_BN[:, None] < tree.rank_BN[:, :, None]
    return ~(same_BNN & earlier_BNN & tree.valid_BN[:, None]).any(-1)


def test_a_row_decides_alone_whatever_batch_it_is_in():
    for rule, kind, is_chain in LEGAL:
        one = random_round(np.random.default_rng(8), kind, is_chain)
        whole = run_rule(rule, one.tree, one.scores_BTV, one.noise)
        for b in (0, 17):
            at = slice(b, b + 1)
            names = ("token_BN", "parent_BN", "rank_BN", "valid_BN")
            q = one.tree.q and QRows(one.tree.q.prob_BTK[at])
            fields = {name: getattr(one.tree, name)[at] for name in names}
            tree = dataclasses.replace(one.tree, q=q, **fields)
            noise = FixedNoise(
                *(x[at] for x in (one.noise.uniform_BT, one.noise.final, one.noise.target))
            )
            alone = run_rule(rule, tree, one.scores_BTV[at], noise)
            assert torch.equal(alone.path_BP[0], whole.path_BP[b])
            assert alone.next_token_B[0] == whole.next_token_B[b]


def test_illegal_pairs_are_refused_and_the_legal_rules_named():
    with pytest.raises(RecipeError, match="one of greedy, inverse-cdf, one-hot, target-only"):
        check_legal("block", NodeKind.POINT, True)
    with pytest.raises(RecipeError, match="not lossless for trees of kind 'iid'"):
        check_legal("block", NodeKind.IID, False)
    with pytest.raises(RecipeError, match="not lossless"):
        check_legal("one-hot", NodeKind.IID, True)
    with pytest.raises(RecipeError, match="unknown verification rule 'blok'"):
        check_legal("blok", NodeKind.IID, True)
    tree = random_round(np.random.default_rng(0), NodeKind.POINT, False).tree
    with pytest.raises(RecipeError):
        run_rule("traversal", tree, torch.zeros(50, 7, 8), RoundNoise([0], [0], [0]))


def test_the_default_rule_is_always_legal():
    for kind in NodeKind:
        for is_chain in (True, False):
            assert default_rule(kind, is_chain) in legal_rules(kind, is_chain)
