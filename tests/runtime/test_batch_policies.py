"""Batch policies against a simulated server whose costs and acceptance are known."""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from pairs import disturbed
from scipy.stats import chisquare

from specctl.drafters import family
from specctl.drafters.parts.base import Outcome, RoundSeconds, RoundView
from specctl.drafters.parts.tree import NodeKind, QRows, chain_tree, empty_tree
from specctl.drafters.small_lm import SmallLm
from specctl.recipes.errors import RecipeError
from specctl.runtime.cost import measure_batch_costs
from specctl.runtime.engine import Engine
from specctl.runtime.noise import RoundNoise
from specctl.runtime.policies import make_policy
from specctl.runtime.policies.batch import Batching, RowView, make_batching
from specctl.runtime.policies.batch.costs import BatchCosts
from specctl.runtime.policies.batch.fixed import Bass, Fixed
from specctl.runtime.policies.batch.goodput import Goodput
from specctl.runtime.policies.batch.history import History
from specctl.runtime.policies.batch.table import BySize
from specctl.runtime.policies.batch.tetris import Tetris, shares
from specctl.runtime.policies.length import CostTable
from specctl.runtime.sampling import Sampling
from specctl.runtime.session import Request
from specctl.runtime.stats import expected_tau
from specctl.runtime.verify import run_rule

LONGEST = 8
SIZES = (1, 2, 4, 8, 16, 32, 64)
NONE_B = torch.zeros(0, dtype=torch.long)
VIEW = RoundView((), NONE_B, NONE_B, NONE_B, ())
DIRECT = {"policy": "direct", "length": 3}
TREE = empty_tree(0, torch.device("cpu"))


def outcome_of(accepted, finished=None):
    finished = finished or (None,) * len(accepted)
    emitted = tuple((0,) * (n + 1) for n in accepted)
    return Outcome(VIEW, TREE, NONE_B, tuple(accepted), NONE_B, emitted, tuple(finished))


def seconds_of(rows, length, step=0.4):
    """A device that reads weights for 8 or computes for 0.25 a token, and drafts for `step`."""
    return max(8.0, 0.25 * rows * (length + 1)) + 1.0 + step * length


def costs_of(batches, lengths=tuple(range(LONGEST + 1)), seconds=seconds_of):
    tables = {}
    for rows in batches:
        verify = {k: seconds(rows, k) for k in lengths}
        tables[rows] = CostTable(dict.fromkeys(lengths, 0.0), verify, "cpu", "float32", rows)
    return BatchCosts(tables)


@pytest.mark.parametrize("users", SIZES)
@pytest.mark.parametrize(
    "make",
    [
        lambda: Goodput(costs_of(SIZES), LONGEST),
        lambda: BySize({1: 4, 8: 0}),
        lambda: Tetris(32),
        lambda: Bass(),
        lambda: Fixed(0),
        lambda: Fixed(3),
    ],
)
def test_whether_rows_would_draft_is_told_without_changing_anything(make, users):
    asked, silent = make(), make()
    rows = [RowView(index, 40) for index in range(users)]
    told = [asked.would_draft(rows) for _ in range(40)]
    assert asked.lengths(rows) == silent.lengths(rows), "forty questions left no trace"
    assert told == [any(silent.lengths(rows))] * 40


def test_rows_that_have_missed_much_are_not_expected_to_draft():
    goodput = Goodput(costs_of(SIZES), LONGEST)
    found = [goodput.would_draft([RowView(0, 40, True, missed)]) for missed in (0, 10, 100_000)]
    assert found == [True, True, False]


@dataclass
class Load:
    """`users` rows of known acceptance, each replaced by a new one when it has emitted its text."""

    users: int
    alphas: tuple[float, ...]
    text: int = 80
    seed: int = 0

    def run(self, batching, rounds, told=None):
        """(tokens per second, lengths of every round). Rounds are said to take a second each, or
        `told` times what they take."""
        rng = np.random.default_rng(self.seed)
        live, emitted, clock, named, asked = [], 0, 0.0, 0, []
        for _ in range(rounds):
            while len(live) < self.users:
                live.append([named, self.alphas[named % len(self.alphas)], self.text])
                named += 1
            lengths = batching.lengths([RowView(i, left - 1) for i, _, left in live])
            tries = rng.random((len(live), LONGEST)) < np.array([[a] for _, a, _ in live])
            runs = np.cumprod(tries, axis=1).sum(1)
            accepted = np.minimum(runs, lengths).tolist()
            spent = seconds_of(len(live), max(lengths))
            clock += spent
            emitted += sum(accepted) + len(live)
            for row, n in zip(live, accepted, strict=True):
                row[2] -= n + 1
            finished = ["length" if left <= 0 else None for _, _, left in live]
            spent = 1.0 if told is None else told * spent
            batching.observe(outcome_of(accepted, finished), RoundSeconds(0.0, spent, 0.0))
            live = [row for row in live if row[2] > 0]
            asked.append(lengths)
        return emitted / clock, asked


LOADS = [
    Load(users, alphas)
    for users in (1, 4, 16, 40)
    for alphas in ((0.9,), (0.5,), (0.15,), (0.95, 0.3))
]


@pytest.mark.parametrize("load", LOADS, ids=lambda load: f"{load.users}-{load.alphas}")
def test_goodput_is_as_good_as_the_best_fixed_length_under_every_load(load):
    rounds = max(500, 2500 // load.users)  # few rows are noisy
    best = max(load.run(Fixed(k), rounds)[0] for k in range(LONGEST + 1))
    found, _ = load.run(Goodput(costs_of(SIZES), LONGEST), rounds)
    assert found >= 0.98 * best


def test_goodput_drafts_less_the_more_rows_there_are_and_ends_at_none():
    means = []
    for users in (1, 8, 16, 64):
        _, asked = Load(users, (0.6,)).run(Goodput(costs_of(SIZES), LONGEST), rounds=400)
        means.append(np.mean([max(lengths) for lengths in asked[100:]]))
    assert means == sorted(means, reverse=True)
    assert means[0] > 2
    assert means[-1] < 0.05


def test_speculation_comes_back_when_acceptance_does():
    goodput = Goodput(costs_of(SIZES), LONGEST, probe_last=32)
    _, asked = Load(24, (0.05,), text=10_000).run(goodput, rounds=400)
    assert np.mean([max(lengths) == 0 for lengths in asked[100:]]) > 0.9
    _, asked = Load(24, (0.9,), text=10_000).run(goodput, rounds=600)
    assert np.mean([max(lengths) > 0 for lengths in asked[400:]]) > 0.95


def test_a_falling_load_is_noticed_at_once():
    goodput = Goodput(costs_of(SIZES), LONGEST)
    Load(64, (0.8,), text=10_000).run(goodput, rounds=50)
    assert max(goodput.lengths([RowView(i, 100) for i in range(64)])) == 0
    assert max(goodput.lengths([RowView(i, 100) for i in range(2)])) > 2


def test_what_a_drafter_must_read_first_is_weighed_against_what_it_will_bring():
    costs, few = costs_of(SIZES), [RowView(i, 100) for i in range(2)]

    def depth(missed, seconds_each, room=100):
        goodput = Goodput(costs, LONGEST)
        goodput.lengths([RowView(9, 100, missed=10)])
        goodput.observe(outcome_of([1]), RoundSeconds(0.0, 1.0, 0.0, wake=10 * seconds_each))
        return max(goodput.lengths([RowView(i, room, missed=missed) for i in range(2)]))

    awake = max(Goodput(costs, LONGEST).lengths(few))
    assert depth(500, 1e-6) == awake > 0
    assert depth(500, 1.0) == 0
    assert depth(500, 0.05) > depth(500, 0.05, room=1), "it is paid for in the rounds that are left"


def test_a_probe_wakes_those_who_have_missed_least():
    goodput = Goodput(costs_of(SIZES), LONGEST, probe_first=4)
    rows = [RowView(i, 100, missed=10 * i + 1) for i in range(64)]
    asked = [goodput.lengths(rows) for _ in range(4)]
    assert [sum(lengths) for lengths in asked[:3]] == [0, 0, 0]
    awake = sum(asked[3])
    assert 4 <= awake < 16
    assert asked[3] == (1,) * awake + (0,) * (64 - awake)


def test_a_policy_says_what_goodput_it_expected_and_what_came():
    """On the device that its table was measured on, with the acceptance that it has learned."""
    goodput = Goodput(costs_of(SIZES), LONGEST)
    assert goodput.to_json()["goodput"] is None
    rate, _ = Load(8, (0.7,)).run(goodput, rounds=600, told=1.0)
    assert goodput.to_json()["goodput"]["predicted"] == pytest.approx(rate, rel=0.05)
    assert goodput.to_json()["time_ratio"] == pytest.approx(1.0)


@pytest.mark.parametrize("slower", [0.5, 1.5, 4.0])
def test_a_device_that_others_use_is_slower_than_its_table_and_that_is_learned(slower):
    goodput = Goodput(costs_of(SIZES), LONGEST)
    rate, asked = Load(8, (0.7,)).run(goodput, rounds=600, told=slower)
    found = goodput.to_json()["goodput"]
    assert found["predicted"] == pytest.approx(rate / slower, rel=0.05)
    assert found["measured_over_predicted"] == pytest.approx(1.0, rel=0.05)
    assert goodput.to_json()["time_ratio"] == pytest.approx(slower)
    same = Load(8, (0.7,)).run(Goodput(costs_of(SIZES), LONGEST), rounds=600, told=1.0)[1]
    assert asked == same, "what slows every round alike changes no length"


def test_rows_draft_no_deeper_than_is_of_use_to_them():
    goodput = Goodput(costs_of(SIZES), LONGEST)
    Load(2, (0.95, 0.1), text=10_000).run(goodput, rounds=200)
    good, bad = goodput.lengths([RowView(0, 100), RowView(1, 100)])
    assert good > 4
    assert bad <= 2
    lengths = goodput.lengths([RowView(0, 1), RowView(1, 100, speculates=False)])
    assert lengths == (1, 0)


def test_predicted_times_are_those_of_a_linear_device():
    def linear(rows, length):
        return 3.0 + 0.2 * rows + 0.5 * length + 0.05 * rows * length

    costs = costs_of((1, 4, 16, 64), (0, 2, 8), linear)
    for rows, length in product((1, 2, 8, 16, 40, 100), range(11)):
        assert costs.seconds(rows, length) == pytest.approx(linear(rows, length))


@pytest.mark.parametrize("name", ["small-lm", "prompt-lookup"])
def test_a_pair_is_measured_at_every_size_up_to_the_most_rows(make_target, name):
    target = make_target(num_layers=2)
    if name == "small-lm":
        drafter, policy = SmallLm.from_lm(target.lm, target.spec), make_policy({"length": 3})
    else:
        one = family(name)
        drafter, policy = one.build(one.options(), target.spec, None), make_policy(DIRECT)
    costs = measure_batch_costs(target, drafter, policy, 3, rounds=8)
    assert sorted(costs.tables) == [1, 2, 3]
    assert all({0, 1, 2, 3} == set(table.verify) for table in costs.tables.values())
    assert all(0 < costs.seconds(rows, k) < 60 for rows in (1, 2, 3, 5) for k in range(4))


def test_the_report_says_how_far_measured_times_are_from_predicted_ones():
    goodput = Goodput(costs_of((1, 4)), LONGEST)
    for _ in range(200):
        rows = [RowView(0, 100), RowView(1, 100)]
        length = max(goodput.lengths(rows))
        spent = 1.25 * seconds_of(2, length)
        goodput.observe(outcome_of((1, 1)), RoundSeconds(0.25 * spent, 0.75 * spent, 0.0))
    assert goodput.to_json()["time_ratio"] == pytest.approx(1.25, abs=0.01)


# -- tetris -------------------------------------------------------------------------------------


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


# -- tables, common lengths, and what they have in common ---------------------------------------


def test_bass_rises_after_a_whole_draft_and_falls_faster_and_faster():
    bass, rows = Bass(most=32), [RowView(0, 100), RowView(1, 100)]
    seen = []
    for share in (1.0, 1.0, 0.0, 0.0, 0.0, 1.0):
        length = bass.lengths(rows)[0]
        seen.append(length)
        bass.observe(outcome_of((0, int(share * length))), RoundSeconds(0.0, 1.0, 0.0))
    assert seen == [7, 9, 11, 9, 7, 5]
    assert bass.length == 7


def test_bass_never_falls_below_what_the_best_row_accepted():
    bass, rows = Bass(), [RowView(0, 100), RowView(1, 100)]
    bass.lengths(rows)
    bass.observe(outcome_of((6, 0)), RoundSeconds(0.0, 1.0, 0.0))
    assert bass.length == 6


def test_a_table_is_read_by_batch_size():
    table = BySize({1: 6, 8: 3, 32: 0})
    found = [max(table.lengths([RowView(i, 100) for i in range(n)])) for n in (1, 7, 8, 31, 32, 64)]
    assert found == [6, 6, 3, 3, 0, 0]


def test_a_measured_table_holds_the_best_length_of_each_size():
    found = BySize.measured(costs_of(SIZES), 0.7, LONGEST).table
    for rows, length in found.items():
        rates = [expected_tau(0.7, k) / seconds_of(rows, k) for k in range(LONGEST + 1)]
        assert length == int(np.argmax(rates))
    assert found[1] > found[64] == 0


def test_a_new_row_is_taken_for_one_like_the_others_and_a_gone_one_is_forgotten():
    history, rows = History(first=0.5), [RowView(0, 9), RowView(1, 9)]
    assert history.alpha(7) == pytest.approx(0.5)
    for _ in range(200):
        history.ask(rows, (4, 4))
        history.observe(outcome_of((4, 3)))
    assert history.alpha(0) > 0.97 > history.alpha(1) > 0.7
    assert history.alpha(1) < history.alpha(2) < history.alpha(0)
    history.ask([RowView(1, 9)], (4,))
    history.observe(outcome_of((0,)))
    assert history.alpha(0) == pytest.approx(history.alpha(2))


def test_a_cut_round_and_a_silent_one_are_told_apart():
    history, rows = History(), [RowView(0, 9)]
    before = history.alpha(0)
    history.ask(rows, (4,))
    history.observe(outcome_of((0,), ("eos",)))
    assert history.alpha(0) == before
    history.ask(rows, (4,))
    history.observe(outcome_of((0,)))
    assert history.alpha(0) < before


@pytest.mark.parametrize("name", ["fixed", "goodput", "tetris", "table", "bass"])
def test_every_policy_keeps_to_room_and_depth_and_reports_itself(name):
    batching = make_batching(name, 5, costs_of((1, 4, 16)))
    assert isinstance(batching, Batching)
    for _ in range(40):
        rows = [RowView(0, 0), RowView(1, 2), RowView(2, 50), RowView(3, 50, speculates=False)]
        lengths = batching.lengths(rows)
        assert lengths[0] == lengths[3] == 0
        assert 0 <= lengths[1] <= 2
        assert 0 <= lengths[2] <= 5
        batching.observe(outcome_of(lengths), RoundSeconds(0.1, 1.0, 0.0))
    assert batching.lengths([]) == ()
    assert batching.to_json()["batching"] == name


def test_settings_that_would_be_ignored_are_refused():
    with pytest.raises(RecipeError, match="no capacity"):
        make_batching("fixed", 5, capacity=3)
    with pytest.raises(RecipeError, match="goodput"):
        make_batching("godput", 5)
    with pytest.raises(RecipeError, match="measured costs"):
        make_batching("goodput", 5)
    with pytest.raises(RecipeError, match="batch sizes"):
        make_batching("table", 5, table={0: 3})
    assert make_batching("table", 5, table={1: 9}).to_json()["table"] == {1: 5}


@pytest.mark.parametrize("name", ["goodput", "tetris", "table", "bass"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_batch_policy_changes_a_text(make_target, name, temperature):
    """Rows join and leave, and lengths differ; a seeded text is that of plain decoding."""
    target = make_target(num_layers=2)
    drafter, policy = disturbed(make_target, target, num_layers=2), make_policy({"length": 5})
    requests = [
        Request((3 + i, 1, 4), Sampling(temperature, seed=i, max_new_tokens=9 + 5 * i))
        for i in range(6)
    ]
    batching = make_batching(name, 5, costs_of((1, 2, 4)))
    engine = Engine(target, drafter, policy, "target-only", num_slots=3, batching=batching)
    found = engine.run(requests)
    assert sum(one.stats.accepted for one in found) > 0
    plain = Engine(target, rule="target-only", num_slots=3).run(requests)
    assert [one.tokens for one in found] == [one.tokens for one in plain]


def test_tetris_never_verifies_more_than_its_capacity(make_target):
    target = make_target(num_layers=2)
    drafter, policy = disturbed(make_target, target, num_layers=2), make_policy({"length": 5})
    engine = Engine(target, drafter, policy, num_slots=4, batching=Tetris(capacity=7, longest=5))
    found = engine.run([Request((3 + i, 1, 4), Sampling(max_new_tokens=30)) for i in range(4)])
    stats = [one.stats for one in found]  # all rows begin together
    drafted, rounds = sum(one.drafted for one in stats), max(one.rounds for one in stats)
    assert 3 * rounds < drafted <= 7 * rounds
