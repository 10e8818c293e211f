"""The test of the tests: bugs that really happened, put in on purpose, must be caught.

One table: each mutant names the check that kills it. The same check passes on the right code.
"""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from specctl.core.drafter import RoundView
from specctl.core.tree import DraftTree, NodeKind, QRows, chain_tree, empty_tree
from specctl.runtime.proof.cases import make_case
from specctl.runtime.proof.compare import FixedNoise, random_round, scalar_round
from specctl.runtime.proof.enumerate import all_drafts, enumerate_case, top_drafts
from specctl.runtime.sampling.gumbel_max import best_token
from specctl.runtime.sampling.noise import RoundNoise
from specctl.runtime.sampling.sampling import Sampling, SamplingBatch
from specctl.runtime.verify import run_rule, scalar
from specctl.runtime.verify.scalar_parts import norm, positive, without
from specctl.runtime.verify.walk import chain_verdict
from specctl_testing.runtime import sibling_mutants
from specctl_testing.runtime.mutants import Mutant, as_drafts, as_q, as_rule, is_exact, ratio

IID, WOR, POINT = NodeKind.IID, NodeKind.WITHOUT_REPLACEMENT, NodeKind.POINT


# -- wrong scalar rules ---------------------------------------------------------------------------


def walk_chain(accept, residual, last=lambda tree, at: tree.p[at]):
    """Token-level verification with exchangeable parts."""

    def rule(tree, chooser):
        at = 0
        while tree.children[at]:
            child = tree.children[at][0]
            if not chooser.flip(child, accept(tree, at, tree.token[child])):
                return at, norm(residual(tree, at), tree.p[at])
            at = child
        return at, norm(last(tree, at), tree.p[at])

    return rule


def right_ratio(tree, at, x):
    return ratio(tree.p[at][x], tree.q[at][x])


def right_residual(tree, at):
    return positive(tree.p[at] - tree.q[at])


def next_row(tree, at):
    return min(at + 1, len(tree.p) - 1)


residual_is_p = walk_chain(right_ratio, lambda tree, at: tree.p[at])
residual_turned_around = walk_chain(right_ratio, lambda tree, at: positive(tree.q[at] - tree.p[at]))
ratio_without_q = walk_chain(lambda tree, at, x: tree.p[at][x], right_residual)
always_accepts = walk_chain(lambda tree, at, x: 1.0, right_residual)
never_accepts = walk_chain(lambda tree, at, x: 0.0, right_residual)
row_off_by_one = walk_chain(
    lambda tree, at, x: ratio(tree.p[next_row(tree, at)][x], tree.q[at][x]), right_residual
)
bonus_of_the_wrong_row = walk_chain(
    right_ratio, right_residual, lambda tree, at: tree.p[max(at - 1, 0)]
)
bonus_minus_q = walk_chain(right_ratio, right_residual, right_residual)


def withdraws_unlikely_drafts(tree, chooser):
    for fed in range(1, len(tree.token)):
        if tree.q[fed - 1][tree.token[fed]] < 0.4:
            children = [c if t < fed - 1 else [] for t, c in enumerate(tree.children)]
            cut = dataclasses.replace(tree, children=children)
            return scalar.chain(cut, chooser)
    return scalar.chain(tree, chooser)


def walk_block(threshold, stop_early=False, keep_weight=True):
    def rule(tree, chooser):
        p, q, last = tree.p, tree.q, len(tree.token) - 1
        weight, ended = 1.0, (0, norm(positive(p[0] - q[0]), p[0]))
        for i in range(1, last + 1):
            weight = ratio(weight * p[i - 1][tree.token[i]], q[i - 1][tree.token[i]])
            excess = positive((weight if keep_weight else 1.0) * p[i] - q[i])
            if chooser.flip(i, threshold(weight, excess.sum(), i == last)):
                ended = (i, p[i] if i == last else norm(excess, p[i]))
            elif stop_early:
                break
        return ended

    return rule


def right_threshold(weight, mass, is_last):
    whole = mass + (1.0 - weight)
    return weight if is_last else (mass / whole if whole > 0 else 0.0)


block_stops_at_first_failure = walk_block(right_threshold, stop_early=True)
block_without_look_ahead = walk_block(lambda weight, mass, is_last: weight)
block_residual_without_weight = walk_block(right_threshold, keep_weight=False)


def walk_siblings(
    update_r, update_s, threshold=lambda t, seen: t, children=lambda tree, at: tree.children[at]
):
    """Recursive rejection with exchangeable parts."""

    def rule(tree, chooser):
        at, r, s = 0, tree.p[0], tree.q[0]
        while True:
            seen = 0.0
            for child in children(tree, at):
                token = tree.token[child]
                test = ratio(r[token], s[token])
                if chooser.flip(child, threshold(test, seen)):
                    at, r, s = child, tree.p[child], tree.q[child]
                    break
                seen = max(seen, test)
                r, s = update_r(r, s), update_s(s, token)
            else:
                return at, norm(r, tree.p[at])

    return rule


def right_r(r, s):
    return norm(positive(r - s), np.zeros_like(r))


def unique_children(tree, at):
    found = {tree.token[child]: child for child in reversed(tree.children[at])}
    return sorted(found.values())


def same_uniform(test, seen):
    """The chance of u < test for a u already known to be at least `seen`."""
    return max(0.0, (test - seen) / (1 - seen)) if seen < 1 else 0.0


residual_not_scaled = walk_siblings(lambda r, s: positive(r - s), without)
residual_kept = walk_siblings(lambda r, s: r, without)
drawn_token_stays_in_q = walk_siblings(right_r, lambda s, token: s)
shared_uniform = walk_siblings(right_r, lambda s, token: s, same_uniform)
duplicates_dropped = walk_siblings(right_r, lambda s, token: s, children=unique_children)
iid_treated_as_distinct = walk_siblings(right_r, without)


def one_hot_without_residual(tree, chooser):
    at = 0
    while True:
        for child in tree.children[at]:
            if chooser.flip(child, float(tree.p[at][tree.token[child]])):
                at = child
                break
        else:
            return at, tree.p[at]


def one_hot_not_renormalised(tree, chooser):
    at, distribution = 0, tree.p[0]
    while True:
        for child in tree.children[at]:
            if chooser.flip(child, float(distribution[tree.token[child]])):
                at, distribution = child, tree.p[child]
                break
            distribution = np.where(
                np.arange(len(distribution)) == tree.token[child], 0.0, distribution
            )
        else:
            return at, norm(distribution, tree.p[at])


def walk_tree(
    update_q, entry="lazy", distribution_after=lambda p, w, q: norm(positive(w * p - q), p)
):
    """Traversal with exchangeable parts."""

    def rule(tree, chooser):
        w, p, q = {0: 1.0}, list(tree.p), list(tree.q)

        def visit(at):
            early = w[at], p[at]
            for child in tree.children[at]:
                x = tree.token[child]
                weight, distribution = (w[at], p[at]) if entry == "lazy" else early
                w[child] = ratio(weight * distribution[x], q[at][x])
                found = visit(child)
                if found is not None:
                    return found
                mass = positive(w[at] * p[at] - q[at]).sum()
                p[at] = distribution_after(p[at], w[at], q[at])
                whole = mass + (1.0 - w[at])
                w[at] = mass / whole if whole > 0 else 0.0
                q[at] = update_q(q[at], x)
            return (at, p[at]) if at == 0 or chooser.flip(at, w[at]) else None

        return visit(0)

    return rule


stale_parent = walk_tree(without, entry="early")
traversal_without_q_update = walk_tree(lambda q, x: q)
traversal_zeroing_iid = walk_tree(without)
traversal_without_weight = walk_tree(
    without, distribution_after=lambda p, w, q: norm(positive(p - q), p)
)


# -- wrong drafts and wrong q ---------------------------------------------------------------------


def reshaped(change):
    """Tell the rule another distribution than the one that drew the drafts."""
    return lambda case: {path: change(distribution) for path, distribution in case.q.items()}


hotter_q = reshaped(lambda distribution: np.sqrt(distribution) / np.sqrt(distribution).sum())
permuted_ids = reshaped(lambda distribution: np.roll(distribution, 1))
reversed_offsets = reshaped(lambda distribution: distribution[::-1].copy())
cut_on_one_side = reshaped(lambda distribution: without(distribution, int(np.argmin(distribution))))
q_forced_to_one = reshaped(lambda distribution: np.ones_like(distribution))


def full_softmax(case):
    rng = np.random.default_rng(1)
    other = {path: np.exp(rng.standard_normal(case.vocab_size)) for path in case.q}
    return {
        path: norm(distribution + 0.3 * other[path] * (distribution == 0), distribution)
        for path, distribution in case.q.items()
    }


def argmax_drafts(case):
    yield 1.0, top_drafts(dataclasses.replace(case, kind=POINT))


def resorted_siblings(case):
    """Siblings of the root by q instead of by draw."""
    assert case.shape == (-1, -1)
    for weight, tokens in all_drafts(case):
        yield weight, sorted(tokens, key=lambda x: -case.q[()][x])


# -- checks ---------------------------------------------------------------------------------------


def accepts_its_closed_form(mutant):
    """A verifier that is unbiased but slow shows in what it accepts."""
    case = make_case("chain", IID, "chain-1", "random", 3)
    alpha = np.minimum(case.p[()], case.q[()]).sum()
    return abs(enumerate_case(case, **mutant(case)).accepted - alpha) < 1e-12


def rejects_probability_zero(test):
    """u = 0 and p = 0: about once in 16.8 million draws, a certainty in production."""
    return not test(torch.tensor(0.0), torch.tensor(0.0), torch.tensor(0.3))


def strict(u, p, q):
    tree = chain_tree(torch.tensor([[1]]), torch.ones(1, 1).bool(), IID, QRows(_rows(q)))
    noise = FixedNoise(torch.full((1, 2), float(u)), torch.zeros(1, 2), torch.zeros(1, 2, 2))
    return bool(run_rule("chain", tree, _rows(p).log(), noise).num_accepted_B[0])


def _rows(x):
    return torch.tensor([[[1 - float(x), float(x)], [0.5, 0.5]]])


def lax(u, p, q):
    return bool(u <= p / q)


def greedy_follows_the_argmax(rule):
    one = random_round(np.random.default_rng(0), POINT, True, num_rows=200)
    verdict = rule(one.tree, one.scores_BTV)
    return [int(n) for n in verdict.next_token_B] == [t for _, t in scalar_round("greedy", one)]


def right_greedy(tree, scores_BTV):
    return run_rule("greedy", tree, scores_BTV, RoundNoise([0], [0], [0]))


def greedy_row_off_by_one(tree, scores_BTV):
    choice_BT = best_token(scores_BTV)
    hit_BN = (tree.token_BN == choice_BT[:, 1:]) & tree.valid_BN
    accepted_B = hit_BN.cumprod(1).sum(1)
    next_B = choice_BT.gather(1, accepted_B[:, None])[:, 0]
    return chain_verdict(accepted_B, next_B, tree.depth)


def greedy_ignores_padding(tree, scores_BTV):
    whole = dataclasses.replace(tree, valid_BN=torch.ones_like(tree.valid_BN))
    return right_greedy(whole, scores_BTV)


def seed_gives_one_text(position_of):
    """The draw after a path must not depend on where its node stands in the tree."""
    noise = RoundNoise([3], [0], [17])
    parent_BN = torch.tensor([[-1, -1, 0]])
    token_BN = torch.tensor([[1, 2, 3]])
    tree = DraftTree(token_BN, parent_BN, torch.tensor([[0, 1, 0]]), token_BN > 0, POINT, 2)
    in_tree = noise.target_BTV(position_of(tree), 9)[0, [1, 2, 3]]
    later = RoundNoise([3], [8], [18]).target_BTV(torch.tensor([[0, 1]]), 9)[0, [0, 0, 1]]
    return torch.equal(in_tree, later)


def by_depth(tree):
    return tree.depth_BT()


def by_fed_index(tree):
    return torch.arange(tree.num_nodes + 1)[None]


def penalties_see_the_draft(score):
    """The row after a drafted token counts that token."""
    tree = chain_tree(torch.tensor([[2, 4]]), torch.ones(1, 2).bool(), POINT)
    view = RoundView((0,), torch.tensor([0]), torch.tensor([1]), torch.tensor([0]), ([1],))
    logits_BTV = torch.randn(1, 3, 6, generator=torch.Generator().manual_seed(0))
    expected = RepetitionPenaltyLogitsProcessor(1.8)(
        torch.tensor([[1, 2, 4]]), logits_BTV[:, 2].clone()
    )
    batch = SamplingBatch([Sampling(temperature=1.0, repetition_penalty=1.8)], 6)
    return torch.equal(score(batch, logits_BTV, tree, view)[:, 2], expected)


def along_the_path(batch, logits_BTV, tree, view):
    return batch.scores(logits_BTV, tree, view)


def of_the_prefix(batch, logits_BTV, tree, view):
    none = empty_tree(1, torch.device("cpu"))
    rows = [batch.scores(row, none, view) for row in logits_BTV.split(1, dim=1)]
    return torch.cat(rows, dim=1)


CHAIN, BLOCK = is_exact("chain", IID, "chain-2"), is_exact("block", IID, "chain-3")
TRIMMED = is_exact("chain", IID, "chain-2", "trimmed")
RECURSIVE, TWICE = is_exact("recursive", WOR, "three"), is_exact("multi-round", IID, "three")
TRAVERSAL, TRAVERSAL_IID = (
    is_exact("traversal", WOR, "two-two-left"),
    is_exact("traversal", IID, "two-two-left"),
)
ONE_HOT = is_exact("one-hot", POINT, "three")


MUTANTS = {
    "residual replaced by p": Mutant(CHAIN, as_rule(residual_is_p)),
    "residual q - p": Mutant(CHAIN, as_rule(residual_turned_around)),
    "ratio without q": Mutant(CHAIN, as_rule(ratio_without_q)),
    "drafts always accepted": Mutant(CHAIN, as_rule(always_accepts)),
    "drafts never accepted": Mutant(accepts_its_closed_form, as_rule(never_accepts)),
    "p row off by one": Mutant(CHAIN, as_rule(row_off_by_one)),
    "bonus from the wrong row": Mutant(CHAIN, as_rule(bonus_of_the_wrong_row)),
    "bonus from the residual": Mutant(CHAIN, as_rule(bonus_minus_q)),
    "low-confidence draft withdrawn": Mutant(CHAIN, as_rule(withdraws_unlikely_drafts)),
    "wrong temperature on q": Mutant(CHAIN, as_q(hotter_q)),
    "wrong temperature on q, block": Mutant(BLOCK, as_q(hotter_q)),
    "full softmax for a trimmed draft": Mutant(TRIMMED, as_q(full_softmax)),
    "offsets read as ids": Mutant(TRIMMED, as_q(permuted_ids)),
    "offsets with the wrong sign": Mutant(CHAIN, as_q(reversed_offsets)),
    "top-k on one side only": Mutant(CHAIN, as_q(cut_on_one_side)),
    "q forced to one": Mutant(CHAIN, as_q(q_forced_to_one)),
    "argmax draft with soft q": Mutant(CHAIN, as_drafts(argmax_drafts)),
    "top-k siblings with soft q": Mutant(RECURSIVE, as_drafts(argmax_drafts)),
    "siblings sorted again": Mutant(
        is_exact("recursive", WOR, "two"), as_drafts(resorted_siblings)
    ),
    "block stops at the first failure": Mutant(BLOCK, as_rule(block_stops_at_first_failure)),
    "block without the look-ahead row": Mutant(BLOCK, as_rule(block_without_look_ahead)),
    "block residual without weight": Mutant(BLOCK, as_rule(block_residual_without_weight)),
    "residual not scaled to one": Mutant(RECURSIVE, as_rule(residual_not_scaled)),
    "sibling residual missing": Mutant(RECURSIVE, as_rule(residual_kept)),
    "drawn token stays in q": Mutant(RECURSIVE, as_rule(drawn_token_stays_in_q)),
    "i.i.d. siblings treated as distinct": Mutant(TWICE, as_rule(iid_treated_as_distinct)),
    "one uniform for all siblings": Mutant(TWICE, as_rule(shared_uniform)),
    "i.i.d. duplicates dropped": Mutant(TWICE, as_rule(duplicates_dropped)),
    "one-hot without residual": Mutant(ONE_HOT, as_rule(one_hot_without_residual)),
    "one-hot not scaled": Mutant(ONE_HOT, as_rule(one_hot_not_renormalised)),
    "traversal with stale parents": Mutant(TRAVERSAL, as_rule(stale_parent)),
    "traversal without updating q": Mutant(TRAVERSAL, as_rule(traversal_without_q_update)),
    "traversal zeroing i.i.d. q": Mutant(TRAVERSAL_IID, as_rule(traversal_zeroing_iid)),
    "traversal residual without weight": Mutant(TRAVERSAL, as_rule(traversal_without_weight)),
    "u <= p/q": Mutant(rejects_probability_zero, lax, strict),
    "greedy row off by one": Mutant(greedy_follows_the_argmax, greedy_row_off_by_one, right_greedy),
    "padding accepted": Mutant(greedy_follows_the_argmax, greedy_ignores_padding, right_greedy),
    "noise by fed index": Mutant(seed_gives_one_text, by_fed_index, by_depth),
    "penalties without drafts": Mutant(penalties_see_the_draft, of_the_prefix, along_the_path),
}


ALL = MUTANTS | sibling_mutants.MUTANTS


@pytest.mark.parametrize("name", ALL)
def test_the_right_code_passes_the_check_that_kills_the_mutant(name):
    mutant = ALL[name]
    assert mutant.check(mutant.right)


@pytest.mark.parametrize("name", ALL)
def test_the_mutant_is_killed(name):
    mutant = ALL[name]
    assert not mutant.check(mutant.wrong)


def test_the_exchangeable_parts_are_right_when_nothing_is_exchanged():
    assert CHAIN(as_rule(walk_chain(right_ratio, right_residual)))
    assert BLOCK(as_rule(walk_block(right_threshold)))
    assert RECURSIVE(as_rule(walk_siblings(right_r, without)))
    assert TWICE(as_rule(walk_siblings(right_r, lambda s, token: s)))
    assert TRAVERSAL(as_rule(walk_tree(without)))
    for check, rule in sibling_mutants.RIGHT:
        assert check(as_rule(rule))


def test_many_bugs_are_seeded_and_every_name_is_its_own():
    assert len(ALL) == len(MUTANTS) + len(sibling_mutants.MUTANTS) >= 60
