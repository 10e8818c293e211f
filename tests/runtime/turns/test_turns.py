"""Models that write in turns: against their definitions, their exact ends, one text throughout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from specctl import load_target
from specctl.api.arguments.targets import in_memory
from specctl.cli.options.target_choice import AnsweringChoice, WritingChoice
from specctl.core.errors import IncompatibleError, NumbersError, RecipeError, SpecctlError
from specctl.drafters.lm.small_lm import SmallLm
from specctl.drafters.training_free.prompt_lookup import PromptLookup, PromptLookupOptions
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request, Row
from specctl.runtime.generate import Generated, generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.noise import RoundNoise
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.mixed import in_turns, load_mixed, mixed
from specctl.runtime.target.variants.mixture import parse
from specctl.runtime.turns import reward_budget
from specctl.runtime.turns.entropy import EntropyGate
from specctl.runtime.turns.reward import Judge, seed_of
from specctl.runtime.turns.reward_budget import GAIN, ShareThreshold
from specctl_testing.hybrids import tiny_hybrid
from specctl_testing.models import build_model

VOCAB, LENGTH = 6, 24
PROMPTS = ([3, 1, 4, 1, 5], [2, 2], [5, 3, 5, 0, 1, 4, 1, 3, 2, 3, 1, 4])
GREEDY = Sampling(max_new_tokens=LENGTH)
DRAWN = Sampling(temperature=1.0, max_new_tokens=LENGTH, seed=11)
CHAIN = {"policy": "chain", "length": 4}


def target_of(seed: int, model_type: str = "llama", **fields: object) -> Target:
    return Target.from_model(build_model(model_type, 1, vocab=VOCAB, seed=seed, **fields))


@pytest.fixture(scope="module")
def models() -> tuple[Target, Target, Target]:
    """The target, the model beside it (with a window), and a judge."""
    return target_of(0), target_of(1, model_type="mistral"), target_of(2)


@pytest.fixture(scope="module")
def tiny() -> Target:
    return load_target("tiny")


def turned(word: str, target: Target, *beside: Target) -> Target:
    return in_turns(target, beside, parse(f"{word}={','.join('m' for _ in beside)}"))


def log_probs(target: Target, ids: Sequence[int]) -> torch.Tensor:
    """[V] behind these tokens, by a forward without a cache."""
    ids_1S = torch.tensor([list(ids)])
    masks = target.lm.document_masks(torch.zeros_like(ids_1S))
    out = target.lm.dense(ids_1S, torch.arange(len(ids))[None], masks)
    assert out.logits_BTV is not None
    return out.logits_BTV[0, -1].float().log_softmax(-1)


def chosen(scores_V: torch.Tensor, text: Sequence[int], sampling: Sampling, seed: int) -> int:
    """The token that plain decoding draws behind this text."""
    if sampling.temperature == 0:
        return int(scores_V.argmax())
    noise = RoundNoise([seed], [0], [len(text) - 1])
    return int(noise.target_draw_BT(scores_V[None, None], None))


def tokens(made: Generated) -> list[list[int]]:
    return [list(output.token_ids) for output in made.outputs]


# -- entropy ---------------------------------------------------------------------------------------


def writers(bits: Sequence[float], threshold: float, window: int, dwell: int) -> list[bool]:
    """Whether the large model writes each token and the one behind the last, by the definition."""
    large, since = [True], 0
    for at in range(len(bits)):
        since += 1
        recent = bits[max(0, at + 1 - window) : at + 1]
        wanted = sum(recent) / len(recent) > threshold
        changes = wanted != large[-1] and since >= dwell
        since = 0 if changes else since
        large.append(wanted if changes else large[-1])
    return large


def test_the_gate_changes_models_as_the_paper_says() -> None:
    rng, changes = np.random.default_rng(0), 0
    for threshold, window, dwell in ((1.0, 1, 1), (1.0, 5, 1), (1.5, 3, 4), (-1.0, 2, 1)):
        bits = rng.exponential(1.2, 60).tolist()
        gate, found = EntropyGate(threshold, window, dwell), [True]
        for one in bits:
            was = gate.is_large
            assert gate.changes(one) == (gate.is_large != was)
            found.append(gate.is_large)
            changes += gate.is_large != was
        assert found == writers(bits, threshold, window, dwell)
    assert changes > 40


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_each_token_is_of_the_model_that_the_entropy_before_it_named(
    models: tuple[Target, Target, Target], sampling: Sampling
) -> None:
    """Greedily also where the large model's turns are drafted: a change in mid-draft cuts it."""
    large, small, _ = models
    wanted, by_large = [], 0
    for index, prompt in enumerate(PROMPTS):
        text, bits = list(prompt), list[float]()
        for _ in range(LENGTH):
            is_large = writers(bits, 1.3, 3, 2)[-1]
            logp_V = log_probs(large if is_large else small, text)
            text.append(chosen(logp_V, text, sampling, sampling.seed + index))
            bits.append(-float((logp_V.exp() * logp_V).sum()) / math.log(2))
            by_large += is_large
        wanted.append(text[len(prompt) :])
    whole = turned("entropy:1.3:3:2", large, small)
    made = generate(whole, PROMPTS, sampling=sampling)
    assert tokens(made) == wanted
    assert made.stats.turns is not None
    assert made.stats.turns.target_tokens == by_large
    assert 0.1 < made.stats.turns.share < 0.9
    assert made.stats.turns.turns > 9
    assert made.stats.verification == "approximate:entropy:1.3:3:2"
    if sampling is GREEDY:
        drafter = SmallLm.from_lm(large.lm, large.spec)  # what it drafts is always accepted
        drafted = generate(
            whole, PROMPTS, drafter=drafter, policy=make_policy(CHAIN), sampling=sampling
        )
        assert tokens(drafted) == wanted
        assert drafted.stats.accepted > 5
        assert drafted.stats.verification == "approximate:entropy:1.3:3:2"


def test_the_idle_model_reads_only_what_it_missed(models: tuple[Target, Target, Target]) -> None:
    """Positions that both have read: every one once, and the last of a turn again by whoever goes
    on with it."""
    large, small, _ = models
    read, made = [], []
    for one in (large, small):
        engine_lm = Counted(one)
        made.append(replace(one, lm=engine_lm))
        read.append(engine_lm)
    result = generate(turned("entropy:1.3:3:2", *made), [PROMPTS[2]], sampling=GREEDY)
    turns = result.stats.turns
    assert turns is not None
    for one in read:
        assert one.positions <= len(PROMPTS[2]) + LENGTH + turns.turns


class Counted:
    """A model that counts the tokens it is fed."""

    def __init__(self, target: Target) -> None:
        self.lm, self.positions = target.lm, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lm, name)

    def run(self, feed: Any, kv: Any) -> Any:
        self.positions += feed.ids_BT.numel()
        return self.lm.run(feed, kv)


# -- reward ----------------------------------------------------------------------------------------


def test_a_judge_scores_a_step_by_its_mean_probability(
    models: tuple[Target, Target, Target],
) -> None:
    """Also behind a text that goes another way than the last one that it read."""
    judge = Judge(models[1])
    judge.open(40)
    for text, step in (
        ([1, 2, 3, 4, 5, 0, 1, 2], [3, 3, 1]),
        ([1, 2, 3, 4, 5, 0, 1, 2], [4, 0]),
        ([1, 2, 3, 4, 5, 0, 1, 2, 4, 0], [5]),
        ([1, 2, 2], [4, 4, 4, 4]),
        ([2], [4, 1]),
    ):
        logp = [float(log_probs(models[1], text + step[:i])[x]) for i, x in enumerate(step)]
        assert judge.score(text, step) == pytest.approx(math.exp(sum(logp) / len(logp)), rel=1e-4)


def test_a_judge_without_numbers_judges_nothing() -> None:
    """NaN is not below delta, so every step would stay."""
    model = build_model("llama", 1, vocab=VOCAB, seed=2)
    model.get_output_embeddings().weight.data[3] = torch.nan
    judge = Judge(Target.from_model(model))
    judge.open(9)
    with pytest.raises(NumbersError, match="not numbers"):
        judge.score([1, 2], [4, 0])


def delta_of(scores: Sequence[float], dropped: Sequence[bool], share: float) -> float:
    """The threshold behind these scores of a text, by the definition."""
    level = share + GAIN * (share * len(scores) - sum(dropped))
    if not 0 < level < 1:
        return 2.0 * (level >= 1)
    return float(np.quantile([0.0, *scores, 1.0], level))


@pytest.mark.parametrize("word", ["reward:0.1:3", "reward-budget:0.9:3:0.3:0.2"])
def test_greedy_steps_stay_where_their_score_reaches_delta(
    models: tuple[Target, Target, Target], word: str
) -> None:
    large, small, judge = models
    wanted, by_target, deltas = [], list[bool](), list[float]()
    for prompt in PROMPTS:
        text, scores, first = list(prompt), list[float](), len(by_target)
        while len(text) < len(prompt) + LENGTH:
            steps = []
            for one in (small, large):
                step = list[int]()
                for _ in range(min(3, len(prompt) + LENGTH - len(text))):
                    step.append(int(log_probs(one, text + step).argmax()))
                steps.append(step)
            logp = [float(log_probs(judge, text + steps[0][:i])[x]) for i, x in enumerate(steps[0])]
            deltas.append(0.1 if "budget" not in word else delta_of(scores, by_target[first:], 0.4))
            scores.append(math.exp(sum(logp) / len(logp)))
            by_target.append(scores[-1] < deltas[-1])
            text += steps[by_target[-1]]
        wanted.append(text[len(prompt) :])
    made = generate(turned(word, large, small, judge), PROMPTS, sampling=GREEDY)
    assert tokens(made) == wanted
    turns = made.stats.turns
    assert turns is not None
    assert [turns.turns, turns.by_target] == [len(by_target), sum(by_target)]
    assert 0 < turns.by_target < turns.turns
    assert turns.dropped == turns.target_tokens
    if turns.spending is None:
        return
    assert turns.spending.thresholds == pytest.approx(deltas, rel=1e-4)
    assert turns.to_json()["budget"]["spent"] == pytest.approx(0.5 + turns.share, abs=1e-4)
    assert "spent" in str(made.stats)


def test_whatever_the_scores_the_share_of_dropped_steps_keeps_to_what_is_paid() -> None:
    """Also where they are chosen against it; the dropped steps are the worst ones."""
    rng = np.random.default_rng(3)
    drawn = rng.beta(20, 2, 400).tolist()
    for share in (0.0, 0.15, 0.5, 0.85):
        for scores in (drawn, sorted(drawn), sorted(drawn)[::-1], [1.0] * 400, [0.0] * 400, "kept"):
            used = list[float]()
            threshold, dropped = ShareThreshold(share, used), list[bool]()
            for at in range(400):
                score = min(1.0, threshold.delta) if scores == "kept" else scores[at]
                dropped.append(threshold.drops(score))
                assert abs(share * len(dropped) - sum(dropped)) <= 1 + 1 / GAIN
            assert len(used) == 400
            if scores is drawn and share:
                worst = [one for one, is_dropped in zip(drawn, dropped, strict=True) if is_dropped]
                best = np.mean(sorted(drawn)[: len(worst)])  # by who had known them all
                assert np.mean(worst) < (best + np.mean(drawn)) / 2


def test_costs_are_measured_said_and_given_again(
    models: tuple[Target, Target, Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = {one.fingerprint: cost for one, cost in zip(models, (0.1, 0.03, 0.02), strict=True)}
    assert len(costs) == 3
    monkeypatch.setattr(reward_budget, "written", lambda one, room: costs[one.fingerprint])
    monkeypatch.setattr(reward_budget, "read", lambda one, step: costs[one.fingerprint] / 10)
    made = generate(turned("reward-budget:0.9:3", *models), PROMPTS, sampling=DRAWN)
    assert made.stats.turns is not None
    spending = made.stats.turns.spending
    assert spending is not None
    assert (spending.small, spending.judge) == (0.3, 0.12)  # the judge's reading, and the target's
    assert spending.share == pytest.approx(0.48)
    assert spending.again == "reward-budget:0.9:3:0.3:0.12"
    monkeypatch.undo()
    again = generate(turned(spending.again, *models), PROMPTS, sampling=DRAWN)
    assert tokens(again) == tokens(made)
    assert again.stats.turns == made.stats.turns


def test_a_budget_below_the_costs_is_refused_with_one_that_can_be_had(
    models: tuple[Target, Target, Target],
) -> None:
    with pytest.raises(RecipeError, match="below what writing") as error:
        generate(turned("reward-budget:0.49:3:0.3:0.201", *models), PROMPTS, sampling=GREEDY)
    assert error.value.expected == "0.501 to 1"
    word = str(error.value.do).removeprefix("write --mix ")
    assert word == "reward-budget:0.51:3:0.3:0.201=m,m"
    generate(turned(word.partition("=")[0], *models), PROMPTS[:1], sampling=GREEDY)
    with pytest.raises(RecipeError, match="the target alone is cheaper"):  # these are of one size
        generate(turned("reward-budget:0.2", *models), PROMPTS, sampling=GREEDY)


def test_a_drawn_step_follows_the_law_of_both_models(
    models: tuple[Target, Target, Target],
) -> None:
    """P(x) = q(x) [r(x) >= delta] + P_q(r < delta) p(x), for steps of one token."""
    sampling = Sampling(temperature=4.0, max_new_tokens=1, seed=5)
    logp_V, logq_V, logr_V = (log_probs(one, PROMPTS[0]) for one in models)
    p_V, q_V, r_V = (logp_V / 4).softmax(-1), (logq_V / 4).softmax(-1), logr_V.exp()
    delta = round(float(r_V.sort().values[3]) * 0.999, 6)  # half of the tokens reach it
    law_V = torch.where(r_V >= delta, q_V, 0.0) + q_V[r_V < delta].sum() * p_V
    assert float(law_V.sum()) == pytest.approx(1)
    budgets = f"reward-budget:{0.5 + delta}:1:0.3:0.2"  # in front of a first score delta is q
    for whole in (turned(f"reward:{delta}:1", *models), turned(budgets, *models)):
        made = generate(whole, [PROMPTS[0]] * 600, sampling=sampling)
        count_V = torch.bincount(torch.tensor(tokens(made))[:, 0], minlength=VOCAB)
        assert float((count_V / 600 - law_V).abs().sum() / 2) < 0.05  # about .03 by chance alone
    for alone_V in (p_V, q_V):
        assert float((law_V - alone_V).abs().sum() / 2) > 0.08


def test_a_draft_behind_a_dropped_one_has_random_numbers_of_its_own() -> None:
    rows = [Row.of(0, 0, Request((1, 2, 3), DRAWN, written=n)) for n in (0, 1, 2)]
    assert len({DRAWN.seed, *map(seed_of, rows)}) == 4


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_the_exact_end_of_each_knob_is_the_target_alone(
    models: tuple[Target, Target, Target], sampling: Sampling
) -> None:
    large, small, _ = models
    plain = tokens(generate(large, PROMPTS, sampling=sampling))
    for word in ("entropy:-1:2:1", "reward:1.01:5", "reward:2:1", "reward-budget:1"):
        made = generate(turned(word, large, small), PROMPTS, sampling=sampling)
        assert tokens(made) == plain
        assert made.stats.turns is not None
        assert made.stats.turns.share == 1
    other = generate(small, PROMPTS, sampling=sampling)
    assert tokens(other) != plain
    for word in ("reward:0:5", "reward-budget:0.5:5:0.3:0.2"):
        loose = generate(turned(word, large, small), PROMPTS, sampling=sampling)
        if sampling is GREEDY:
            assert tokens(loose) == tokens(other)
        assert loose.stats.turns is not None
        assert loose.stats.turns.share == 0


# -- one text --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new_tokens=33),
        Sampling(temperature=0.9, seed=3, max_new_tokens=40, top_p=0.9),
        Sampling(max_new_tokens=60, stop=("self",)),
        Sampling(max_new_tokens=60, stop=("f,",)),
        Sampling(max_new_tokens=40, repetition_penalty=1.3, presence_penalty=0.4),
    ],
    ids=["limit", "drawn", "stop", "stop-of-two-tokens", "penalty"],
)
def test_one_model_in_all_roles_writes_its_own_text(tiny: Target, sampling: Sampling) -> None:
    """Limits, stops and penalties count the whole text, however many turns it took."""
    prompts = ["class Tree:\n    def add("]
    plain = generate(tiny, prompts, sampling=sampling)
    words = ["entropy:0.7:1:1", "reward:1.5:4"]
    if sampling.temperature == 0:  # drawn steps that stay have random numbers of their own
        words.append("reward-budget:0.9:4:0.2:0.1")
    for word in words:
        made = generate(turned(word, tiny, tiny), prompts, sampling=sampling)
        assert made.outputs == plain.outputs
        assert made.stats.turns is not None
        assert made.stats.turns.turns > 2
    if sampling.temperature == 0:
        drafted = generate(
            turned("entropy:0.7:1:1", tiny, tiny),
            prompts,
            drafter=PromptLookup(PromptLookupOptions(), tiny.spec),
            policy=make_policy({"policy": "direct"}),
            sampling=sampling,
        )
        assert drafted.outputs == plain.outputs


def test_a_step_ends_at_a_blank_line(tiny: Target) -> None:
    made = generate(
        turned("reward:0", tiny, tiny), ["def main("], sampling=Sampling(max_new_tokens=90)
    )
    ids, steps, began = made.outputs[0].token_ids, 0, 0
    for end in range(1, len(ids) + 1):
        head, blank, _ = tiny.decode(ids[began:end]).lstrip().partition("\n\n")
        if (head and blank) or end == len(ids):
            steps, began = steps + 1, end
    assert steps > 2
    assert made.stats.turns is not None
    assert made.stats.turns.turns == steps


def test_a_relaxed_rule_of_the_target_s_turns_is_named(
    models: tuple[Target, Target, Target],
) -> None:
    drafter = SmallLm.from_lm(models[1].lm, models[1].spec)
    whole = turned("entropy:-1", *models[:2])
    policy = make_policy(CHAIN)
    made = generate(whole, PROMPTS, drafter=drafter, policy=policy, rule="fly", sampling=GREEDY)
    assert made.stats.verification == "approximate of entropy:-1:5:10:fly:0.3:6"


def test_what_was_written_before_is_no_prompt() -> None:
    row = Row.of(0, 0, Request((1, 2, 3, 4, 5), Sampling(max_new_tokens=4), written=3))
    assert (row.prompt_len, row.num_new, row.room, row.num_rounds) == (2, 3, 1, 3)


def test_the_smallest_context_ends_the_text(models: tuple[Target, Target, Target]) -> None:
    short = target_of(3, max_position_embeddings=16)
    for word in ("entropy:-1", "entropy:100:1:1", "reward:2:5", "reward:0:50"):
        made = generate(turned(word, models[0], short), [PROMPTS[0]], sampling=GREEDY)
        assert made.outputs[0].finish_reason == "context"
        assert len(made.outputs[0].token_ids) == 16 - len(PROMPTS[0])
    with pytest.raises(SpecctlError, match="every model that writes"):
        generate(turned("entropy", models[0], short), [[1] * 16], sampling=GREEDY)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word",
    ["entropy:1:2.5=tiny", "entropy:1:0=tiny", "entropy=tiny,tiny", "reward=tiny,tiny,tiny",
     "reward:0.7=tiny,", "reward:3=tiny", "reward-budget:1.1=tiny", "reward-budget:0.5:0=tiny"],
)  # fmt: skip
def test_what_names_no_turns_is_refused(word: str) -> None:
    with pytest.raises(RecipeError) as error:
        parse(word)
    assert "--mix" in str(error.value.do)


def test_names_are_known_before_a_model_is_read_and_each_is_read_once(
    monkeypatch: pytest.MonkeyPatch, tiny: Target
) -> None:
    read = list[str]()

    def load(name: str, **how: Any) -> Target:
        read.append(name)
        return replace(tiny, name=name)

    monkeypatch.setattr("specctl.runtime.target.variants.mixed.load_target", load)
    with pytest.raises(SpecctlError, match="unknown model of a mixture"):
        load_mixed("reward=tiny,no-such-judge", "tiny")
    assert read == []
    made = load_mixed("reward=a/small,tiny", "tiny")
    assert [one.name for one in made.beside] == ["a/small", "tiny"]
    assert read == ["tiny", "a/small"]
    load_mixed("reward=tiny,tiny", "tiny", revision="0" * 40)
    assert read[2:] == ["tiny", "tiny"]  # the revision is the target's


def test_turns_are_refused_where_one_model_decodes(models: tuple[Target, Target, Target]) -> None:
    whole = turned("entropy", *models[:2])
    with pytest.raises(IncompatibleError, match="in turns"):
        Engine(whole)
    with pytest.raises(IncompatibleError, match="in turns"):  # before anything is read
        AnsweringChoice("no-such-model", mix="reward=tiny")._mix()
    for one in (whole, mixed(*models[:2], parse("average=m"))):
        with pytest.raises(IncompatibleError, match="for a target alone"):
            in_memory(one)
    assert WritingChoice("tiny", mix="reward=tiny")._mix() == "reward=tiny"
    drafter = SmallLm.from_lm(models[1].lm, models[1].spec)
    with pytest.raises(SpecctlError, match="beside the target"):
        generate(whole, PROMPTS, drafter=drafter, policy=make_policy(CHAIN), parallel=True)
    recurrent = Target.from_model(tiny_hybrid("qwen3_next"))
    with pytest.raises(IncompatibleError, match="attention alone"):
        turned("entropy", recurrent, recurrent)
