"""Vocabulary trimming: what is kept, which size is chosen, and that nothing changes but speed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from specctl.drafters import family
from specctl.drafters.parts.base import Drafter, RoundView, Space, StepState
from specctl.drafters.parts.lm import Masks
from specctl.drafters.parts.masks import document_mask
from specctl.drafters.parts.vocab import VocabMap
from specctl.recipes.errors import SpecctlError
from specctl.runtime.engine import Engine
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling import Sampling
from specctl.runtime.session import Request
from specctl.runtime.stats import expected_tau
from specctl.runtime.target import Target
from specctl.train.data.heldout import Prompt
from specctl.train.data.sources import Sample
from specctl.train.vocab.chains import write_answers
from specctl.train.vocab.counting import draft_tokens, target_tokens
from specctl.train.vocab.coverage import (
    TokenCounts,
    always_kept,
    count_tokens,
    coverage_curve,
    ranking,
    vocab_map,
)
from specctl.train.vocab.head_cost import HeadCost, fit_cost
from specctl.train.vocab.measure import Measured, PromptRun, moved_bytes
from specctl.train.vocab.predict import Predictions, predict_from_coverage
from specctl.train.vocab.report import kendall
from specctl.train.vocab.search import Choice, Scored, SearchSpace, search_tpe
from specctl.train.vocab.selectors import Evidence, selector, selectors
from specctl.train.vocab.trim import Material, Trimmed, TrimSettings, trim


def counts(*number: int, **domains: list[int]) -> TokenCounts:
    by_domain = domains or {"d": list(number)}
    return TokenCounts({name: torch.tensor(n) for name, n in by_domain.items()})


def make_drafter(target: Target, name: str = "small-lm", seed: int = 1) -> Drafter:
    torch.manual_seed(seed)
    found = family(name)
    drafter = found.build(found.options(), target.spec, None)
    drafter.bind(target.borrowed())
    return drafter


COST = HeadCost(plain=1.0, verify=1.2, body=0.02, head=0.2, calls=4, vocab_size=96)


# -- what is kept -----------------------------------------------------------------------------


def test_ids_rank_by_count_then_by_id_and_special_tokens_come_first() -> None:
    rank = ranking(counts(0, 5, 0, 5, 9, 0), always=(5,))
    assert rank.tolist() == [5, 4, 1, 3, 0, 2]


def test_a_map_is_topped_up_with_the_smallest_unseen_ids() -> None:
    rank = ranking(counts(0, 0, 7, 0, 0, 3), always=())
    assert vocab_map(rank, 4, (), 6).ids_K.tolist() == [0, 1, 2, 5]


def test_a_map_too_small_for_the_special_tokens_is_refused() -> None:
    rank = ranking(counts(1, 1, 1, 1), always=(0, 3))
    with pytest.raises(SpecctlError, match="cannot be kept"):
        vocab_map(rank, 1, (0, 3), 4)


def test_ids_already_cut_are_never_ranked() -> None:
    allowed = VocabMap(torch.tensor([0, 2, 3]), 5)
    assert ranking(counts(0, 9, 1, 2, 9), (), allowed).tolist() == [3, 2, 0]


def test_end_begin_padding_and_chat_markers_are_always_kept(chat_target: Target) -> None:
    assert always_kept(chat_target) == (0, 1, 2, 3, 4, 5)


def test_weights_of_domains_turn_the_ranking() -> None:
    two = counts(a=[0, 8, 2, 0], b=[0, 0, 10, 90])
    assert ranking(two, ()).tolist() == [3, 2, 1, 0]
    assert ranking(two, (), weights={"a": 10.0, "b": 0.1}).tolist() == [1, 2, 3, 0]


def test_coverage_is_the_share_of_counted_tokens_kept() -> None:
    curve = coverage_curve(ranking(counts(1, 0, 6, 3), ()), counts(2, 2, 4, 2))
    assert curve.tolist() == pytest.approx([0.4, 0.6, 0.8, 1.0])


def test_ranking_and_coverage_use_different_documents() -> None:
    documents = [([0], "d")] * 4 + [([1], "d")]
    ranked, heldout = count_tokens(documents, 3)
    assert ranked.total_V.tolist() == [4, 0, 0]
    assert heldout.total_V.tolist() == [0, 1, 0]


def test_counting_ids_of_another_tokenizer_is_an_error() -> None:
    with pytest.raises(SpecctlError, match="outside the target's vocabulary"):
        count_tokens([([3], "d")], 3)


# -- which size -------------------------------------------------------------------------------


def predicted(cost: HeadCost, num_ids: int = 96, alpha: float = 0.8) -> Predictions:
    curve = (1.0 / torch.arange(1, num_ids + 1).double()).cumsum(0)
    return predict_from_coverage(range(1, num_ids + 1), curve / curve[-1], alpha, 4, cost)


def test_the_chosen_size_beats_every_other_by_the_formula() -> None:
    found = predicted(COST)
    best = found.ranked(0.0)[0]
    by_hand = [
        expected_tau(0.8 * float(found.coverage_N[k - 1]), 4) / (1.2 + 4 * (0.02 + 0.2 * k / 96))
        for k in range(1, 97)
    ]
    assert best.size == 1 + max(range(96), key=by_hand.__getitem__)
    assert best.speedup == pytest.approx(max(by_hand))
    assert 1 < best.size < 96


def test_the_least_coverage_is_respected_and_the_whole_vocabulary_always_a_candidate() -> None:
    free, bound = (predicted(COST).ranked(least)[0] for least in (0.0, 0.95))
    assert free.coverage < 0.95 <= bound.coverage
    assert [p.size for p in predicted(COST).ranked(2.0)] == [96]


def test_a_free_head_keeps_every_id_and_a_dear_one_few() -> None:
    free = HeadCost(1.0, 1.2, 0.02, 0.0, 4, 96)
    dear = HeadCost(1.0, 1.2, 0.02, 5.0, 4, 96)
    sizes = [predicted(cost).ranked(0.0)[0].size for cost in (free, dear)]
    assert sizes[0] == 96
    assert sizes[1] < 16


def test_the_cost_fit_finds_body_and_head() -> None:
    rounds = [(k, 4 * (0.003 + 0.01 * k / 96)) for k in (8, 32, 96)]
    fitted = fit_cost(0.02, 0.03, rounds, 4, 96)
    assert (fitted.body, fitted.head) == (pytest.approx(0.003), pytest.approx(0.01))
    noisy = fit_cost(0.02, 0.03, [(8, 0.05), (96, 0.04)], 4, 96)
    assert (noisy.head, noisy.body > 0) == (0.0, True)


def test_a_draft_length_has_its_own_cost() -> None:
    cost = HeadCost(1.0, 1.4, 0.1, 0.2, 4, 96, verify_at={2: 1.1, 4: 1.4})
    assert cost.at_length(2).round_seconds(96) == pytest.approx(1.1 + 2 * 0.3)
    assert cost.at_length(4) == cost


def test_kendall_counts_pairs_in_order() -> None:
    assert kendall([(1, 10), (2, 20), (3, 30)]) == 1.0
    assert kendall([(1, 30), (2, 20), (3, 10)]) == -1.0
    assert kendall([(1, 10), (2, 30), (3, 20)]) == pytest.approx(1 / 3)
    assert kendall([(1, 1)]) is None


# -- several knobs ----------------------------------------------------------------------------

SPACE = SearchSpace(least=2, most=96, length=4, domains=("a", "b"))


def score(choice: Choice) -> Scored:
    """Best at size 24, length 3, equal weights; less coverage the smaller."""
    ratio = choice.weights.get("a", 1.0) / choice.weights.get("b", 1.0)
    away = abs(choice.size - 24) / 24 + abs(choice.length - 3) + 0.1 * abs(ratio - 1.0)
    return Scored(choice, choice.size / 96, 2.0 / (1.0 + away))


def test_tpe_never_ends_worse_than_the_exhaustive_choice_and_is_reproducible() -> None:
    first = [Choice(20, 4), Choice(96, 4)]
    runs = [
        search_tpe(score, SPACE, min_coverage=0.0, trials=25, seed=3, first=first) for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert len(runs[0]) == 25
    assert runs[0][0].speedup > score(first[0]).speedup
    assert {s.choice.size for s in runs[0]} >= {20, 96}


def test_tpe_prefers_what_covers_enough() -> None:
    found = search_tpe(score, SPACE, min_coverage=0.5, trials=15, first=[Choice(24, 3)])
    assert found[0].coverage >= 0.5
    assert score(Choice(24, 3)).speedup > found[0].speedup


def test_search_without_optuna_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SpecctlError) as caught:
        search_tpe(score, SPACE, min_coverage=0.0, trials=1)
    assert "specctl[tune]" in caught.value.do


# -- what is counted --------------------------------------------------------------------------


def test_selectors_are_found_and_describe_themselves() -> None:
    assert {"vocab-trim", "fr-spec", "drafted", "accepted"} <= {*selectors()}
    for name, found in selectors().items():
        assert found.name == name
        assert found.paper.startswith("https://")
    with pytest.raises(SpecctlError, match="unknown vocabulary selector"):
        selector("frspec")


def test_fr_spec_counts_raw_text_and_vocab_trim_what_the_target_writes(
    chat_target: Target,
) -> None:
    text = [Sample("x", "code", text="def f1(x):\n    return x")]
    evidence = Evidence(chat_target, PROMPTS[:1], samples=lambda: text)
    ((ids, domain),) = selector("fr-spec").count(evidence)
    assert domain == "code"
    assert chat_target.decode(torch.as_tensor(ids).tolist()).startswith("def f1(x)")
    ((written, _),) = selector("vocab-trim").count(evidence)
    assert list(written) == list(next(iter(target_tokens(chat_target, PROMPTS[:1])))[0])


def test_accepted_drafts_are_some_of_the_drafts(target: Target) -> None:
    drafter = make_drafter(target)
    policy = make_policy({"policy": "chain", "length": 3})
    evidence = Evidence(target, PROMPTS[:1], drafter=drafter, policy=policy)
    drafted, accepted = (
        sum(len(ids) for ids, _ in selector(name).count(evidence))
        for name in ("drafted", "accepted")
    )
    by_stats = sum(
        sum(done.stats.accepted_at)
        for i, prompt in enumerate(PROMPTS[:1])
        for done in Engine(target, drafter, policy).run(
            [Request(prompt.ids, Sampling(0.8 * (i % 2), seed=i, max_new_tokens=128))]
        )
    )
    assert by_stats <= accepted <= by_stats + 3  # an end inside a draft is cut
    assert accepted < drafted


# -- trimming ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(make_target: Callable[..., Target]) -> Target:
    return make_target(num_layers=2, vocab=96, eos_token_id=95)


PROMPTS = [Prompt((3, 1, 4, 1 + i), "", "ab"[i % 2]) for i in range(4)]
HALF = counts(a=[96 - i for i in range(96)], b=[2 * (i < 48) for i in range(96)])
CHAIN = make_policy({"policy": "chain", "length": 3})


def trimmed(
    target: Target, size: Any, *, measure: Any = None, cost: Any = COST, **settings: Any
) -> Trimmed:
    answers = write_answers(target, PROMPTS[2:], 8)
    material = Material("vocab-trim", HALF, HALF, answers, PROMPTS)
    given = TrimSettings(size, new_tokens=8, **settings)
    return trim(make_drafter(target), CHAIN, target, material, given, measure=measure, cost=cost)


def test_trimming_to_a_size_keeps_the_frequent_ids_and_the_end(target: Target) -> None:
    done = trimmed(target, 48)
    report = done.report
    assert done.drafter.vocab is not None
    assert done.drafter.vocab.ids_K.tolist() == [*range(47), 95]
    assert report.digest == done.drafter.vocab.digest()
    assert report.coverage_by_domain["b"] == pytest.approx(47 / 48)
    assert report.after.moved.byte_ratio < report.before.moved.byte_ratio


def test_auto_takes_the_size_with_the_best_measured_tau_and_cost(target: Target) -> None:
    taus: dict[int, float] = {}

    def measure(drafter: Drafter, policy: Any) -> Measured:
        size = 96 if drafter.vocab is None else drafter.vocab.size
        taus[size] = 2.0 if size in (max(taus, default=0), 96) else 1.99
        return Measured(taus[size], 0.6, 100.0)

    done = trimmed(target, "auto", measure=measure, min_coverage=0.3)
    report, drafter = done.report, done.drafter
    best = max(report.trials, key=lambda t: COST.speedup(taus[t.predicted.size], t.predicted.size))
    assert report.size == best.predicted.size == (drafter.vocab.size if drafter.vocab else 96)
    assert len(report.trials) >= 3
    assert report.pays


def test_the_drafter_comes_back_whole_when_no_size_pays(target: Target) -> None:
    def measure(drafter: Drafter, policy: Any) -> Measured:
        return Measured(2.0 if drafter.vocab is None else 1.0, 0.5, 1.0)

    done = trimmed(target, "auto", measure=measure, min_coverage=0.3)
    assert done.drafter.vocab is None
    assert not done.report.pays
    assert "no smaller head pays" in done.report.lines()[0]
    assert COST.speedup(2.0, 96) < 1.0
    assert "without this drafter is faster" in done.report.lines()[-1]


def test_a_searched_draft_length_comes_back_as_policy_and_in_the_figures(target: Target) -> None:
    cost = HeadCost(1.0, 1.2, 0.3, 0.2, 3, 96, verify_at={1: 1.01, 2: 1.1, 3: 1.2})
    done = trimmed(target, "auto", cost=cost, min_coverage=0.0, search="tpe", trials=12)
    report = done.report
    assert done.policy.depth == report.choice.length == report.after.moved.calls
    assert done.policy.depth < 3, "an untrained drafter should draft less"
    assert report.search == "tpe"
    assert {t.choice.length for t in report.trials} >= {done.policy.depth, 3}
    assert f"drafting {done.policy.depth}" in report.lines()[0]


def test_trees_are_not_searched_with_tpe(target: Target) -> None:
    material = Material("x", HALF, HALF, write_answers(target, PROMPTS, 8), PROMPTS)
    tree = make_policy({"policy": "dynamic-tree", "length": 2, "nodes": 4, "beam": 2})
    settings = TrimSettings(new_tokens=8, search="tpe")
    with pytest.raises(SpecctlError, match="tpe"):
        trim(make_drafter(target), tree, target, material, settings, cost=COST)


def test_a_tree_is_predicted_in_proportion_to_its_chain(target: Target) -> None:
    material = Material("x", HALF, HALF, write_answers(target, PROMPTS, 8), PROMPTS)
    tree = make_policy({"policy": "dynamic-tree", "length": 2, "nodes": 4, "beam": 2})
    settings = TrimSettings("auto", min_coverage=0.3, new_tokens=8)
    report = trim(make_drafter(target), tree, target, material, settings, cost=COST).report
    whole = next(t for t in report.trials if t.predicted.size == 96)
    assert whole.predicted.tau == pytest.approx(whole.measured.tau)
    assert "scaled" in report.predictor


# -- the report -------------------------------------------------------------------------------


def test_the_report_is_json_with_formulas_and_measured_figures(
    target: Target, tmp_path: Path
) -> None:
    report = trimmed(target, 48).report
    body = json.loads(json.dumps(report.to_json(), allow_nan=False))
    after = report.after
    assert body["mbsu"]["after"] == pytest.approx(
        after.measured.tau / (1 + 3 * after.moved.byte_ratio), rel=1e-6
    )
    assert body["trials"][0]["measured"]["tau"] == round(after.measured.tau, 4) >= 1.0
    assert "tau / (1 + g c)" in body["mbsu"]["formula"]
    assert body["domains"][0]["domain"] == "all"
    assert report.save_png(tmp_path / "curve.png").stat().st_size > 1000


def test_a_domain_that_lost_is_shown_first_and_warned_about(target: Target) -> None:
    """Domain b keeps its tau, domain a falls from 2.5 to 1: its prompts are slower and said so."""

    def measure(drafter: Drafter, policy: Any) -> Measured:
        rounds = {"a": 4 if drafter.vocab is None else 10, "b": 4}
        return Measured.of([PromptRun(p.domain, rounds[p.domain], 10, 5, 8, 1.0) for p in PROMPTS])

    report = trimmed(target, 48, measure=measure).report
    everything, worst, other = report.domains
    assert (everything.domain, everything.slower) == ("all", 0.5)
    assert (worst.domain, worst.slower, worst.gain < 1.0) == ("a", 1.0, True)
    assert (other.domain, other.slower, other.gain > 1.0) == ("b", 0.0, True)
    assert worst.after.tau == 1.0
    assert worst.before.speedup == pytest.approx(COST.speedup(2.5, 96))
    assert worst.after.mbsu == pytest.approx(1.0 / (1 + 3 * report.after.moved.byte_ratio))
    assert any("a is slower than before" in line for line in report.lines())
    table = report.domain_table()
    assert [line.split()[0] for line in table[1:]] == ["all", "a", "b"]
    assert "100%" in table[2]


def test_the_curve_is_drawn_with_and_without_plotext(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = trimmed(target, 48).report
    bars = report.bars()
    chosen = next(line for line in bars.splitlines() if line.endswith("<"))
    assert chosen.split()[0] == "48"
    monkeypatch.setitem(sys.modules, "plotext", None)
    assert report.plot() == bars
    monkeypatch.delitem(sys.modules, "plotext")
    assert "coverage" in report.plot()


def test_costs_are_measured_when_none_are_given(target: Target) -> None:
    cost = trimmed(target, 48, cost=None).report.after.cost
    assert len(cost.measured) == 3
    assert cost.plain > 0
    assert cost.head >= 0


@pytest.mark.parametrize("name", ["small-lm", "eagle3", "medusa"])
def test_a_smaller_head_moves_exactly_the_bytes_of_the_cut_rows_less(
    target: Target, name: str
) -> None:
    drafter = make_drafter(target, name)
    small = drafter.trimmed(VocabMap(torch.arange(0, 96, 4), 96))
    head_width = target.spec.hidden_size
    if name == "small-lm":
        head_width = next(t.shape[1] for t in small.tensors().values() if t.shape[0] == 24)
    if name == "medusa":
        head_width *= drafter.options.num_heads
    cut = moved_bytes(drafter, target) - moved_bytes(small, target)
    assert cut == (96 - 24) * head_width * 4


def test_tokens_of_target_and_drafter_are_counted_by_domain(target: Target) -> None:
    written = list(target_tokens(target, PROMPTS, new_tokens=5))
    assert [domain for _, domain in written] == ["a", "b", "a", "b"]
    small = make_drafter(target).trimmed(VocabMap(torch.arange(0, 96, 2), 96))
    drafted = list(draft_tokens(target, small, CHAIN, PROMPTS, new_tokens=6))
    assert len(drafted) == 4
    assert all(int(ids.max()) < 96 and bool((ids % 2 == 0).all()) for ids, _ in drafted)


# -- the law ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["small-lm", "eagle3"])
def test_a_trimmed_drafter_draws_the_softmax_over_its_kept_rows(target: Target, name: str) -> None:
    full = make_drafter(target, name)
    kept = VocabMap(torch.tensor([1, 5, 17, 40, 95]), 96)
    logits = [root_logits(target, drafter) for drafter in (full, full.trimmed(kept))]
    expected = logits[0].softmax(-1)[:, kept.ids_K]
    expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(logits[1].softmax(-1), expected)


def root_logits(target: Target, drafter: Drafter) -> torch.Tensor:
    tokens = [3, 1, 4, 1, 5]
    state = drafter.open(Space(1, 64, 8, target.device, target.dtype))
    assert isinstance(state, StepState)
    taps = {tap: torch.ones(4, target.spec.hidden_size) for tap in drafter.needs().taps}
    state.start(0, tokens, taps)
    zero = torch.zeros(1, dtype=torch.long)
    with torch.inference_mode():
        return state.root(RoundView((0,), zero, zero + 5, zero + 4, (tokens,))).clone()


@pytest.mark.parametrize("rule", ["block", "target-only"])
def test_sampling_with_a_trimmed_drafter_keeps_the_law_of_the_target(
    make_target: Callable[..., Target], rule: str
) -> None:
    """Chi-square of 1,600 sampled pairs over a vocabulary of 7 against the exact law."""
    small_target = make_target(num_layers=2, vocab=7, seed=4)
    drafter = make_drafter(small_target).trimmed(VocabMap(torch.tensor([0, 2, 5]), 7))
    prompt, count = (1, 2, 3), 1600
    requests = [
        Request(prompt, Sampling(temperature=0.9, seed=i, max_new_tokens=3)) for i in range(count)
    ]
    policy = make_policy({"policy": "chain", "length": 2})
    engine = Engine(small_target, drafter, policy, rule, num_slots=800)
    completions = engine.run(requests)
    seen = torch.zeros(7, 7)
    for completion in completions:
        seen[completion.tokens[0], completion.tokens[1]] += 1
    expected = count * pair_law(small_target, prompt, 0.9)
    keep = expected > 5
    rest = (float(seen[~keep].sum()), float(expected[~keep].sum()))
    observed = [*seen[keep].tolist(), rest[0]] if rest[1] > 1 else seen[keep].tolist()
    wanted = [*expected[keep].tolist(), rest[1]] if rest[1] > 1 else expected[keep].tolist()
    scale = sum(observed) / sum(wanted)
    assert chisquare(observed, [w * scale for w in wanted]).pvalue > 1e-4
    accepted = sum(sum(c.stats.accepted_at) for c in completions)
    assert accepted > 0, "no draft was ever accepted, so nothing was tested"


def pair_law(target: Target, prompt: tuple[int, ...], temperature: float) -> torch.Tensor:
    """[V, V]: exact probability of the first two tokens."""
    V = target.spec.vocab_size
    ids_VS = torch.tensor([[*prompt, token] for token in range(V)])
    position_VS = torch.arange(ids_VS.shape[1]).expand_as(ids_VS)
    masks = Masks(document_mask(torch.zeros_like(ids_VS)))
    with torch.no_grad():
        logits = target.lm.dense(ids_VS, position_VS, masks).logits_BTV
    assert logits is not None
    logits = logits.double() / temperature
    first, second = logits[0, -2].softmax(-1), logits[:, -1].softmax(-1)
    return (first[:, None] * second).float()
