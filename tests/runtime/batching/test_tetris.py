"""TETRIS: the best shares of a budget; from earlier rounds alone where text is sampled."""

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from scipy.stats import chisquare

from specctl.core.drafter import RoundSeconds
from specctl.core.tree import NodeKind, QRows, chain_tree
from specctl.runtime.batching import Batching, RowView
from specctl.runtime.batching.fixed import Fixed
from specctl.runtime.batching.tetris import Tetris, shares
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.measure.stats import expected_tau
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.noise import RoundNoise
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.verify import run_rule
from specctl_testing.runtime.loads import LONGEST, Load, outcome_of
from specctl_testing.runtime.pairs import disturbed


def expected(alphas, lengths):
    return sum(expected_tau(a, k) - 1 for a, k in zip(alphas, lengths, strict=True))


@pytest.mark.parametrize("capacity", [0, 1, 3, 5, 12])
def test_the_heap_finds_the_best_shares(capacity):
    alphas, rooms = (0.9, 0.5, 0.7), (4, 3, 1)
    every = product(*(range(room + 1) for room in rooms))
    best = max(expected(alphas, ks) for ks in every if sum(ks) <= capacity)
    found = shares(alphas, rooms, capacity)
    assert sum(found) <= capacity
    assert expected(alphas, found) == pytest.approx(best)


def test_tetris_wastes_fewer_verified_tokens_than_equal_shares():
    load, wasted = Load(8, (0.9, 0.8, 0.3, 0.1), text=10_000), []
    for batching in (Tetris(capacity=24, longest=LONGEST), Fixed(3)):
        counted = Counting(batching)
        load.run(counted, rounds=600)
        assert max(counted.asked) <= 24
        wasted.append(1 - counted.accepted / sum(counted.asked))
    assert wasted[0] < 0.8 * wasted[1]


@dataclass
class Counting:
    """Counts what was asked for and what of it was accepted."""

    inner: Batching
    accepted: int = 0

    def __post_init__(self):
        self.asked = []

    def would_draft(self, rows):
        return self.inner.would_draft(rows)

    def lengths(self, rows):
        found = self.inner.lengths(rows)
        self.asked.append(sum(found))
        return found

    def observe(self, outcome, seconds):
        self.accepted += sum(outcome.num_accepted)
        self.inner.observe(outcome, seconds)


P = torch.tensor([0.45, 0.30, 0.15, 0.10])
Q = torch.tensor([0.15, 0.50, 0.10, 0.25])


def first_tokens(is_kept_BN, token_BN, seed, rows):
    """What each row emits first when its draft is verified by the rule for chains."""
    q = QRows(torch.stack([Q, torch.zeros(4)]).expand(len(token_BN), 2, 4))
    tree = chain_tree(token_BN, is_kept_BN, NodeKind.IID, q)
    noise = RoundNoise([seed] * len(token_BN), rows, [0] * len(token_BN))
    scores_BTV = P.log().expand(len(token_BN), 2, 4)
    verdict = run_rule("chain", tree, scores_BTV, noise)
    return torch.where(verdict.num_accepted_B > 0, token_BN[:, 0], verdict.next_token_B)


def is_unbiased(first_B):
    counts = torch.bincount(first_B, minlength=4).double().numpy()
    return chisquare(counts, P.double().numpy() * counts.sum()).pvalue


def test_a_budget_by_drawn_tokens_is_biased_and_by_earlier_rounds_is_not():
    """Two rows, one drafted token to verify between them, as a budget of one would have it."""
    pairs = 60_000
    generator = torch.Generator().manual_seed(0)
    token = torch.multinomial(Q, 2 * pairs, replacement=True, generator=generator).view(pairs, 2)
    score = Q[token]  # the probability with which each was drafted
    anticipating = torch.nn.functional.one_hot(score.argmax(1), 2).bool().view(-1, 1)
    tetris = Tetris(capacity=1, longest=1)
    kept = []
    rows = [RowView(0, 100), RowView(1, 100)]
    for _ in range(200):
        lengths = tetris.lengths(rows)
        kept.append(lengths)
        tetris.observe(
            outcome_of([k * int(torch.rand((), generator=generator) < 0.6) for k in lengths]),
            RoundSeconds(0.0, 1.0, 0.0),
        )
    legal = torch.tensor(kept * (pairs // 200)).bool().view(-1, 1)
    assert 0 < legal.view(-1, 2)[:, 0].float().mean() < 1
    drafted, at = token.view(-1, 1), list(range(2 * pairs))
    assert is_unbiased(first_tokens(anticipating, drafted, 1, at)) < 1e-12
    assert is_unbiased(first_tokens(legal, drafted, 1, at)) > 1e-3


def test_tetris_never_verifies_more_than_its_capacity(make_target):
    target = make_target(num_layers=2)
    drafter, policy = disturbed(make_target, target, num_layers=2), make_policy({"length": 5})
    engine = Engine(target, drafter, policy, num_slots=4, batching=Tetris(capacity=7, longest=5))
    found = engine.run([Request((3 + i, 1, 4), Sampling(max_new_tokens=30)) for i in range(4)])
    stats = [one.stats for one in found]  # all rows begin together
    drafted, rounds = sum(one.drafted for one in stats), max(one.rounds for one in stats)
    assert 3 * rounds < drafted <= 7 * rounds


def greedy_rows(count):
    return [RowView(index, 100, greedy=True) for index in range(count)]


def test_of_drafts_that_were_not_drawn_the_likeliest_tokens_are_verified():
    """Whole prefixes, over all rows; chances that tie go to the tokens in front."""
    tetris = Tetris(capacity=4, longest=3)
    assert tetris.lengths(greedy_rows(3)) == (3, 3, 3)
    chance_BN = torch.tensor([[0.9, 0.8, 0.1], [0.5, 0.5, 0.5], [0.2, 0.1, 0.1]])
    token_BN, valid_BN = torch.arange(9).view(3, 3), torch.ones(3, 3, dtype=torch.bool)
    tree = replace(chain_tree(token_BN, valid_BN, NodeKind.POINT), estimate_BN=chance_BN)
    assert tetris.chosen(tree).valid_BN.tolist() == [[True, True], [True, True], [False, False]]
    unknown = tetris.chosen(replace(tree, estimate_BN=None))  # all rows alike, by earlier rounds
    assert unknown.valid_BN.sum(1).tolist() == [2, 1, 1]


def test_drawn_drafts_are_left_as_they_are():
    tetris = Tetris(capacity=1, longest=1)
    q = QRows(torch.stack([Q, torch.zeros(4)]).expand(2, 2, 4))
    drawn = chain_tree(torch.tensor([[0], [1]]), torch.ones(2, 1).bool(), NodeKind.IID, q)
    tetris.lengths(greedy_rows(2))
    assert tetris.chosen(drawn) is drawn
    tetris.lengths([RowView(0, 9), RowView(1, 9, greedy=True)])
    point = replace(drawn, kind=NodeKind.POINT, q=None)
    assert tetris.chosen(point) is point


class ByRounds(Tetris):
    """Blind to the draft, as where text is sampled."""

    def lengths(self, rows):
        return super().lengths([replace(row, greedy=False) for row in rows])


def test_a_choice_by_each_tokens_probability_wastes_fewer_of_the_same_budget(make_target):
    target = make_target(num_layers=2)
    requests = [Request((3 + i, 1, 4), Sampling(max_new_tokens=40)) for i in range(4)]
    answers, shares_accepted = [], []
    for kind in (ByRounds, Tetris):
        drafter, policy = disturbed(make_target, target, num_layers=2), make_policy({"length": 5})
        engine = Engine(target, drafter, policy, num_slots=4, batching=kind(capacity=6, longest=5))
        found = engine.run(requests)
        answers.append([one.tokens for one in found])
        drafted = sum(one.stats.drafted for one in found)
        shares_accepted.append(sum(one.stats.accepted for one in found) / drafted)
    assert answers[0] == answers[1]
    assert shares_accepted[1] > shares_accepted[0] + 0.05, shares_accepted
