"""Stop rules: none of them changes the distribution of the text, each does what its paper says, and
a rule that looked at the token it withdraws would be caught."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.drafter import Budget, Outcome, RoundSeconds, RoundView, Space, StepState
from specctl.core.errors import FileError, RecipeError
from specctl.core.tree import NodeKind, chain_tree
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions
from specctl.runtime.policies import make_policy
from specctl.runtime.policies.base import GrowRequest, fresh
from specctl.runtime.policies.chain import Chain
from specctl.runtime.sampling.noise import RoundNoise
from specctl.runtime.sampling.sampling import Sampling, SamplingBatch
from specctl.runtime.stops import STOPS, DraftStep, LearnedStop, StopRule, make_stop, trained_stops
from specctl.runtime.stops.beta_mixture import BetaMixture, fitted
from specctl.runtime.stops.confidence import RocThreshold, best_threshold
from specctl.runtime.stops.draft_verify import DraftVerify
from specctl.runtime.stops.learned import write_stop
from specctl.runtime.stops.schedule import Heuristic
from specctl.runtime.stops.thompson import Thompson
from specctl.runtime.verify import run_rule

NO_TIME = RoundSeconds(0.0, 0.0, 0.0)
SIZE, ROWS = 4, 16_000


class Table(StepState):
    """A drafter whose distribution after each token is a row of a table; its states name that
    token."""

    def __init__(self, logits_VV: Tensor, root: int = 0) -> None:
        self.logits_VV, self.root_token, self.newest_B = logits_VV, root, torch.empty(0)

    def start(self, slot: int, tokens: Any, taps: Any) -> None: ...

    def observe(self, outcome: Outcome) -> None: ...

    def root(self, view: RoundView) -> Tensor:
        self.newest_B = view.root_B
        return self.logits_VV[view.root_B]

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        self.newest_B = token_BM[:, 0]
        return self.logits_VV[token_BM]

    def hidden(self) -> Tensor:
        return torch.nn.functional.one_hot(self.newest_B, len(self.logits_VV)).float()

    def confidence(self) -> Tensor:
        return self.logits_VV[self.newest_B].softmax(-1).amax(-1)


def distributions(seed: int) -> Tensor:
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed)) * 1.5


def growth_of(
    state: StepState, rows: int, temperature: float, length: int, turn: int = 0
) -> GrowRequest:
    zeros_B = torch.zeros(rows, dtype=torch.long)
    texts = ((0,),) * rows
    view = RoundView(tuple(range(rows)), torch.arange(rows), zeros_B, zeros_B, texts)
    sampling = SamplingBatch([Sampling(temperature)] * rows, SIZE, torch.device("cpu"))
    noise = RoundNoise(list(range(rows)), [turn] * rows, [0] * rows)
    return GrowRequest(state, view, Budget(length, length), sampling, noise)


def with_weights(name: str, threshold: float | None, tmp_path: Path, width: int) -> Chain:
    """A chain of three under that rule; trained rules get random weights."""
    file = None
    if name in trained_stops():
        torch.manual_seed(3)
        kind: Any = STOPS[name]
        net = kind.new_net(8 if name == "disco" else width)
        file = str(tmp_path / f"{name}.safetensors")
        write_stop(Path(file), name, net, {})
    has = "threshold" in STOPS[name].__dataclass_fields__
    return Chain(length=3, stop=name, threshold=threshold if has else None, stop_file=file)


# Thresholds under which these rules neither always stop nor never do, on the table of seed 2.
THRESHOLDS = {
    "confidence": 0.7, "roc": 0.4, "svip": 0.32, "specdec-pp": 0.55, "disco": 0.5,
    "ada-eagle": 1.6, "draft-verify": 0.4, "heuristic": 0.0, "thompson": 0.0,
    "confidence-head": 0.5, "beta-mixture": 0.4,
}  # fmt: skip
COMMON = ("heuristic", "ada-eagle")  # these decide from the common past of all rows


def first_two(policy: Any, target_VV: Tensor, draft_VV: Tensor) -> tuple[Tensor, float, list[int]]:
    """Joint distribution of the first two tokens over many rounds, tokens accepted, lengths
    drafted. A round that emitted one token only is completed by the target."""
    growth = growth_of(Table(draft_VV), ROWS, 1.0, 3)
    tree = policy.grow(growth)
    fed_BT = tree.fed_token_BT(growth.view.root_B)
    verdict = run_rule("chain", tree, target_VV[fed_BT], growth.noise)
    first_B = torch.where(verdict.num_accepted_B > 0, tree.token_BN[:, 0], verdict.next_token_B)
    drafted_B = tree.token_BN[:, 1] if tree.num_nodes > 1 else verdict.next_token_B
    second_B = torch.where(verdict.num_accepted_B > 1, drafted_B, verdict.next_token_B)
    free_B = torch.multinomial(
        target_VV.softmax(-1)[first_B], 1, generator=torch.Generator().manual_seed(9)
    )[:, 0]
    second_B = torch.where(verdict.num_accepted_B > 0, second_B, free_B)
    joint = torch.zeros(SIZE * SIZE).index_add_(0, first_B * SIZE + second_B, torch.ones(ROWS))
    lengths = tree.valid_BN.sum(1)
    accepted = float(verdict.num_accepted_B.float().mean())
    return joint.view(SIZE, SIZE) / ROWS, accepted, sorted(set(lengths.tolist()))


def distance(found: Tensor, target_VV: Tensor) -> float:
    distribution = target_VV.softmax(-1)
    return float((found - distribution[0][:, None] * distribution).abs().sum() / 2)


@pytest.mark.parametrize("name", STOPS)
def test_no_stop_rule_changes_the_distribution(name: str, tmp_path: Path) -> None:
    policy = with_weights(name, THRESHOLDS.get(name), tmp_path, SIZE)
    found, accepted, lengths = first_two(policy, distributions(1), distributions(2))
    assert distance(found, distributions(1)) < 0.02, "the distribution of the text has moved"
    assert accepted > 0.3
    if name in THRESHOLDS and name not in COMMON:
        assert len(lengths) > 1, "the rule decided nothing"


@dataclass(frozen=True, slots=True)
class Withdrawing(Chain):
    """The forbidden rule: takes back the token that it finds unlikely."""

    def grow(self, growth: GrowRequest) -> Any:
        tree = Chain.grow(self, growth)
        assert tree.q is not None
        own_BN = tree.q.prob_BTK[:, :-1].gather(2, tree.token_BN[:, :, None])[:, :, 0]
        keep_BN = (own_BN >= 0.4).cummin(1).values if tree.num_nodes else tree.valid_BN
        return chain_tree(tree.token_BN, tree.valid_BN & keep_BN, NodeKind.IID, tree.q)


def test_a_rule_that_withdraws_its_token_would_be_caught() -> None:
    found, _, _ = first_two(Withdrawing(length=3), distributions(1), distributions(2))
    assert distance(found, distributions(1)) > 0.05


@dataclass(frozen=True)
class Shifted:
    """The same noise, but for the third draw of the round."""

    noise: RoundNoise
    shift: float

    def draft_draw_BM(self, scores_BMK: Tensor, index: int) -> Tensor:
        if index == 2:
            scores_BMK = scores_BMK + self.shift * torch.arange(scores_BMK.shape[-1])
        return self.noise.draft_draw_BM(scores_BMK, index)

    def chain_draws(self, *given: Any) -> Any:
        return self.noise.chain_draws(*given)


@pytest.mark.parametrize("name", STOPS)
def test_the_token_that_is_prevented_cannot_be_seen(name: str, tmp_path: Path) -> None:
    """Other noise for the third draw moves no decision about whether it happens."""
    lengths = []
    for third in (0.0, 50.0):
        policy = with_weights(name, THRESHOLDS.get(name), tmp_path, SIZE)
        growth = growth_of(Table(distributions(2)), 400, 1.0, 3)
        shifted = Shifted(growth.noise, third)
        lengths.append(policy.grow(replace(growth, noise=shifted)).valid_BN.sum(1))  # type: ignore[arg-type]
    assert torch.equal(*lengths)


def outcome_of(drafted: list[int], accepted: list[int], ended: list[bool] | None = None) -> Outcome:
    B, N = len(drafted), max(drafted)
    token_BN = torch.zeros(B, N, dtype=torch.long)
    valid_BN = torch.arange(N) < torch.tensor(drafted)[:, None]
    tree = chain_tree(token_BN, valid_BN, NodeKind.POINT)
    zeros_B = torch.zeros(B, dtype=torch.long)
    view = RoundView(tuple(range(B)), zeros_B, zeros_B, zeros_B, ((0,),) * B)
    finished = tuple("eos" if end else None for end in ended or [False] * B)
    return Outcome(view, tree, zeros_B[:, None], tuple(accepted), zeros_B, ((0,),) * B, finished)


def step_of(logits: list[float], row: int, index: int = 0) -> DraftStep:
    return DraftStep(index, torch.tensor([logits]), torch.tensor([row]), Table(distributions(1)))


def test_svip_stops_at_six_tenths_of_a_nat() -> None:
    rule = make_stop("svip")
    for entropy, wanted in ((0.55, False), (0.65, True)):
        low, high = 0.0, 0.5  # two tokens: find p with that entropy
        for _ in range(60):
            p = (low + high) / 2
            found = -(p * math.log(p) + (1 - p) * math.log(1 - p))
            low, high = (p, high) if found < entropy else (low, p)
        step = step_of([math.log(p), math.log(1 - p), -99.0, -99.0], 1)
        assert bool(rule.stops(step)) is wanted  # type: ignore[arg-type]


def test_the_heuristic_schedule_walks_as_published() -> None:
    rule = Heuristic(start=5)
    asked = []
    for accepted in (5, 7, 3, 0, 0):
        asked.append(rule.length(20))
        rule.observe(outcome_of([asked[-1]], [accepted]), NO_TIME)
    assert asked == [5, 7, 9, 8, 7]
    assert Heuristic(start=5).length(2) == 2
    ended = Heuristic(start=5)
    ended.length(20)
    ended.observe(outcome_of([5], [0], [True]), NO_TIME)
    assert ended.length(20) == 5, "the end of a text is no rejection"


def test_draft_and_verify_settles_where_nine_in_ten_are_accepted() -> None:
    """A token is accepted as often as it is probable: th must rise until only sure ones follow."""
    rule, torch_coins = DraftVerify(threshold=0.2), torch.Generator().manual_seed(0)
    for _ in range(1500):
        rule.length(8)
        drafted, hits = 0, 0
        is_alive = True
        for chance in torch.rand(8, generator=torch_coins).tolist():
            drafted += 1
            if is_alive and float(torch.rand((), generator=torch_coins)) < max(chance, 0.5):
                hits += 1
            else:
                is_alive = False
            if chance < rule.threshold:
                break
        rule.observe(outcome_of([drafted], [hits]), NO_TIME)
    assert rule.threshold > 0.4
    before = rule.threshold
    rule.length(8)
    rule.observe(outcome_of([8], [8]), NO_TIME)
    assert rule.threshold == before, "a draft that hit its ceiling says nothing"


def test_the_roc_threshold_parts_accepted_from_rejected() -> None:
    pairs = [(0.9, True), (0.8, True), (0.7, True), (0.3, False), (0.2, False), (0.1, False)]
    assert best_threshold(pairs, 3.0) == pytest.approx(0.7)
    assert best_threshold([*pairs, (0.25, True)], 3.0) == pytest.approx(0.25), "a miss costs more"
    assert best_threshold([*pairs, (0.25, True)], 0.5) == pytest.approx(0.7)


def test_the_roc_rule_learns_from_tested_tokens_only() -> None:
    rule = RocThreshold()
    for index in range(3):
        rule.stops(step_of([2.0, 0.0, 0.0, 0.0], 0, index))
    rule.observe(outcome_of([3], [1]), NO_TIME)
    assert [is_match for _, is_match in rule.pairs] == [True, False]


def test_thompson_adapts_within_twenty_rounds_of_a_change() -> None:
    def mean_length(rule: Thompson, share: float, rounds: int) -> float:
        coins, lengths = torch.Generator().manual_seed(4), []
        for _ in range(rounds):
            drafted = 1
            while drafted < 12 and not bool(rule.stops(step_of([0.0] * 4, 0, drafted))):
                drafted += 1
            hits = 0
            while hits < drafted and float(torch.rand((), generator=coins)) < share:
                hits += 1
            rule.observe(outcome_of([drafted], [hits]), NO_TIME)
            lengths.append(drafted)
        return sum(lengths[-20:]) / 20

    rule = Thompson(memory=0.9, calibrated=0.0)
    easy, hard = mean_length(rule, 0.95, 60), mean_length(rule, 0.1, 40)
    assert easy > 4
    assert hard < 2


def test_ada_eagle_drafts_what_it_predicts(tmp_path: Path) -> None:
    rule: Any = make_stop("ada-eagle", 0.0)
    net = rule.new_net(SIZE)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
        net[-1].bias.fill_(2.0)
    write_stop(tmp_path / "x.safetensors", "ada-eagle", net, {})
    file = str(tmp_path / "x.safetensors")
    policy = Chain(length=6, stop="ada-eagle", threshold=0.0, stop_file=file)
    tree = policy.grow(growth_of(Table(distributions(1)), 3, 0.0, 6))
    assert tree.valid_BN.sum(1).tolist() == [2, 2, 2]


class KnownTable(Table):
    """The same, with something to read before the first pass, which it counts."""

    passes = 0

    def root(self, view: RoundView) -> Tensor:
        self.passes += 1
        return super().root(view)

    def known(self, view: RoundView) -> Tensor:
        embedding_B1V = torch.nn.functional.one_hot(view.slot_B[:, None] % SIZE, SIZE).float()
        return torch.cat([embedding_B1V, 2 * embedding_B1V], dim=1)


def test_ada_eagle_decides_before_a_pass_and_may_draft_nothing() -> None:
    """It reads embedding and state of the root, each of its own scale, and wants 0, 2, 4, 1."""
    policy, reads = Chain(length=6, stop="ada-eagle"), list[Tensor]()

    def said(features_BF: Tensor) -> Tensor:
        reads.append(features_BF)
        slots = features_BF[:, :SIZE].argmax(-1)
        return torch.tensor([-0.6, 2.2, 3.9, 1.0])[slots][:, None]

    class Net(torch.nn.Linear):
        def forward(self, features_BF: Tensor) -> Tensor:
            return said(features_BF)

    rule: Any = policy.stopper
    rule.net = Net(2 * SIZE, 1)
    state = KnownTable(distributions(1))
    for temperature in (0.0, 1.0):
        tree = policy.grow(growth_of(state, 4, temperature, 6))
        assert tree.valid_BN.sum(1).tolist() == [0, 2, 4, 1]
    torch.testing.assert_close(reads[0][:, :SIZE], reads[0][:, SIZE:], atol=1e-4, rtol=1e-4)
    assert state.passes == 2
    empty = policy.grow(growth_of(state, 1, 0.0, 6))  # slot 0 wants nothing
    assert empty.num_nodes == 0
    assert state.passes == 2, "nobody drafts, so the drafter is not asked"


def test_specdec_pp_multiplies_the_chances_of_tokens_already_read() -> None:
    rule: Any = make_stop("specdec-pp", 0.5)
    seen: list[int] = []

    def half(features_BF: Tensor) -> Tensor:
        seen.append(int(features_BF[0].argmax()))
        return torch.zeros(len(features_BF), 1)

    rule.output_B = lambda step: half(rule.features(step))[:, 0]
    state = Table(distributions(1))
    view = growth_of(state, 1, 0.0, 4).view
    logits = state.root(view)
    stops = []
    for index, token in enumerate((3, 1, 2)):
        stops.append(bool(rule.stops(DraftStep(index, logits, torch.tensor([token]), state))))
        logits = state.expand(torch.tensor([[token]]), torch.tensor([[index - 1]]))[:, 0]
    assert seen == [3, 1], "the newest token has not been read yet"
    assert stops == [False, False, True], "1 - 0.5 is not above 0.5, 1 - 0.25 is"


def test_learned_rules_refuse_what_does_not_fit(tmp_path: Path) -> None:
    growth = growth_of(Table(distributions(1)), 1, 0.0, 3)
    with pytest.raises(RecipeError, match="no weights") as refused:
        Chain(length=3, stop="disco").grow(growth)
    assert "--stop-rule disco" in refused.value.do  # the flag of train-stop
    path = tmp_path / "other.safetensors"
    kind: Any = STOPS["disco"]
    write_stop(path, "disco", kind.new_net(8), {})
    with pytest.raises(RecipeError, match="another stop rule"):
        Chain(length=3, stop="specdec-pp", stop_file=str(path))
    path.write_bytes(b"no tensors")
    with pytest.raises(FileError, match="cannot be read"):
        Chain(length=3, stop="disco", stop_file=str(path))
    with pytest.raises(RecipeError, match="has no threshold"):
        make_stop("heuristic", 0.3)
    with pytest.raises(RecipeError, match="two stop rules"):
        Chain(confidence=0.3, stop="svip")
    with pytest.raises(RecipeError, match="no rule"):
        Chain(threshold=0.3)


def test_a_policy_begins_every_engine_without_memory() -> None:
    policy = make_policy({"policy": "chain", "length": 20, "stop": "heuristic"})
    assert isinstance(policy, Chain)
    assert isinstance(policy.stopper, Heuristic)
    policy.stopper.length(20)
    policy.observe(outcome_of([5], [5]), NO_TIME)
    again = fresh(policy)
    assert isinstance(again, Chain)
    assert isinstance(again.stopper, StopRule)
    assert (policy.stopper.length(20), again.stopper.length(20)) == (7, 5)


def test_the_draft_model_shows_the_states_its_logits_came_from(make_target: Any) -> None:
    target = make_target(num_layers=2, vocab=24)
    torch.manual_seed(0)
    drafter = SmallLm(SmallLmOptions(layers=1, width=16, tied=False), target.spec)
    state = drafter.open(Space(2, 32, 8, torch.device("cpu"), torch.float32))
    texts = ([3, 1, 4, 1, 5], [9, 2])
    for slot, text in enumerate(texts):
        state.start(slot, text, {})
    state.num_cached[1] = 0  # one row catches up two tokens, the other one
    view = RoundView(
        (0, 1),
        torch.tensor([0, 1]),
        torch.tensor([5, 2]),
        torch.tensor([4, 1]),
        tuple(tuple(text) for text in texts),
    )
    head = drafter.module.head_weight  # type: ignore[union-attr]
    with torch.no_grad():
        logits_BK = state.root(view)
        torch.testing.assert_close(state.hidden() @ head.T, logits_BK)
        logits_BK = state.expand(torch.tensor([[7], [8]]), torch.tensor([[-1], [-1]]))[:, 0]
        torch.testing.assert_close(state.hidden() @ head.T, logits_BK)


def test_every_learned_rule_is_one() -> None:
    assert [isinstance(make_stop(name), LearnedStop) for name in trained_stops()] == [True] * 3


def test_the_mixture_finds_where_two_betas_cross() -> None:
    """Beta(6, 2) of accepted and Beta(2, 6) of rejected tokens, equally many, cross at one half."""
    coins = random.Random(0)
    pairs = [(coins.betavariate(6, 2), True) for _ in range(2000)]
    pairs += [(coins.betavariate(2, 6), False) for _ in range(2000)]
    assert fitted(pairs, 0.5) == pytest.approx(0.5, abs=0.03)
    strict = fitted(pairs, 0.9)
    assert strict == pytest.approx(9**0.25 / (1 + 9**0.25), abs=0.04)  # (x / (1 - x))^4 = 9
    rare = [pair for i, pair in enumerate(pairs) if not pair[1] or i % 10 == 0]
    assert fitted(rare, 0.5) > 0.55  # the rarer agreement is, the surer a token must be
    assert fitted(pairs[:2000], 0.5) is None


def test_the_mixture_learns_from_tested_tokens_alone() -> None:
    """Rejected at the second token: the third says nothing."""
    rule = BetaMixture(threshold=0.0)
    rule.length(3)
    state = Table(torch.zeros(SIZE, SIZE))
    for index in range(3):
        rule.stops(DraftStep(index, torch.zeros(1, SIZE), torch.zeros(1, dtype=torch.long), state))
    rule.observe(outcome_of([3], [1]), NO_TIME)
    assert rule.pairs == [(0.25, True), (0.25, False)]


# -- toys: what a rule is worth, where its idea must show ------------------------------------------

PRICE = 0.3  # forward passes of the target that a drafted token costs


def sure_where_right(coins: random.Random, turn: int) -> tuple[bool, float]:
    """Whether a drafted token is right, and its probability, which tells."""
    is_right = coins.random() < 2 / 3
    return is_right, coins.betavariate(6, 2) if is_right else coins.betavariate(2, 6)


def now_easy_now_hard(coins: random.Random, turn: int) -> tuple[bool, float]:
    """A hundred rounds of text that is drafted well, a hundred of text that is not; probabilities
    say nothing."""
    return coins.random() < (0.95 if turn // 100 % 2 == 0 else 0.1), 0.5


def tokens_for_cost(ends: StopRule | int, draw: Any, seed: int, rounds: int = 400) -> float:
    """Tokens per forward pass of the target with drafts that a rule ends, or of one length."""
    coins, tokens, cost = random.Random(seed), 0, 0.0
    for turn in range(rounds):
        most = ends if isinstance(ends, int) else ends.length(8)
        drafted = hits = 0
        is_over = most == 0
        while not is_over:
            is_right, chance = draw(coins, turn)
            hits += is_right and hits == drafted
            drafted += 1
            is_over = drafted == most
            if not is_over and not isinstance(ends, int):
                logit = math.log(3 * chance / (1 - chance))  # beside three others
                step = step_of([logit, 0.0, 0.0, 0.0], 0, drafted - 1)
                is_over = bool(ends.stops(step))  # type: ignore[arg-type]
        if not isinstance(ends, int):
            ends.observe(outcome_of([drafted], [hits]), NO_TIME)
        tokens += 1 + hits
        cost += 1 + PRICE * drafted
    return tokens / cost


def best_length(draw: Any, seed: int) -> float:
    return max(tokens_for_cost(length, draw, seed) for length in range(9))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("rule", "draw"), [(BetaMixture, sure_where_right), (Thompson, now_easy_now_hard)]
)
def test_a_rule_that_learns_is_worth_more_than_any_length(rule: Any, draw: Any, seed: int) -> None:
    assert tokens_for_cost(rule(), draw, seed) > 1.05 * best_length(draw, seed)


def test_a_threshold_is_worth_less_than_a_length_where_probabilities_say_nothing() -> None:
    """So that it is what the threshold reads that is worth something."""
    rule = tokens_for_cost(BetaMixture(), now_easy_now_hard, 0)
    assert rule < best_length(now_easy_now_hard, 0)
