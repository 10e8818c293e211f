"""Draft vocabularies by count and formula: which ids are kept, and which size is chosen."""

from __future__ import annotations

import sys

import pytest
import torch

from specctl.core.errors import SpecctlError
from specctl.core.vocab import VocabMap
from specctl.runtime.measure.stats import expected_tau
from specctl.runtime.target.target import Target
from specctl.train.planning.data_facts import USUAL_TEXTS, expected_ids
from specctl.train.vocab.candidates import (
    Predictions,
    Scored,
    SearchSpace,
    TrimChoice,
    predict_from_coverage,
    search_tpe,
)
from specctl.train.vocab.coverage import (
    always_kept,
    count_tokens,
    coverage_curve,
    fewest,
    ranking,
    seen_ranking,
    vocab_map,
)
from specctl.train.vocab.measure import HeadCost, fit_cost
from specctl.train.vocab.report import kendall
from specctl_testing.train.vocab_cases import COST, counts


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- what is kept -----------------------------------------------------------------------------


def test_a_few_texts_let_expect_as_many_ids_as_a_run_keeps() -> None:
    """Of a vocabulary of 20,000 whose words are as frequent as words are (Zipf)."""
    weights = 1.0 / torch.arange(1, 20_001, dtype=torch.float64)
    texts = torch.multinomial(weights, USUAL_TEXTS * 200, True, generator=seeded(0)).view(-1, 200)
    ranked, heldout = count_tokens(((text, "text") for text in texts), 20_000)
    kept = fewest(seen_ranking(ranked, ()), heldout, (), 0.95)
    prompts = [text[:10].tolist() for text in texts[16:]]
    for few in (texts[:32].tolist(), texts[:200].tolist(), [*prompts, *texts[:16].tolist()]):
        expected = expected_ids(few, 20_000, (), 0.95, usual=texts.numel())
        assert 0.7 * kept < expected < 1.5 * kept


def test_no_id_is_kept_that_was_never_counted() -> None:
    few = counts(0, 5, 0, 5, 9, 0)
    assert seen_ranking(few, always=(5,)).tolist() == [5, 4, 1, 3]
    assert fewest(seen_ranking(few, (5,)), counts(9, 1, 9, 0, 0, 0), (5,), 0.95) == 4


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


def score(choice: TrimChoice) -> Scored:
    """Best at size 24, length 3, equal weights; less coverage the smaller."""
    ratio = choice.weights.get("a", 1.0) / choice.weights.get("b", 1.0)
    away = abs(choice.size - 24) / 24 + abs(choice.length - 3) + 0.1 * abs(ratio - 1.0)
    return Scored(choice, choice.size / 96, 2.0 / (1.0 + away))


def test_tpe_never_ends_worse_than_the_exhaustive_choice_and_is_reproducible() -> None:
    first = [TrimChoice(20, 4), TrimChoice(96, 4)]
    runs = [
        search_tpe(score, SPACE, min_coverage=0.0, trials=25, seed=3, first=first) for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert len(runs[0]) == 25
    assert runs[0][0].speedup > score(first[0]).speedup
    assert {s.choice.size for s in runs[0]} >= {20, 96}


def test_tpe_prefers_what_covers_enough() -> None:
    found = search_tpe(score, SPACE, min_coverage=0.5, trials=15, first=[TrimChoice(24, 3)])
    assert found[0].coverage >= 0.5
    assert score(TrimChoice(24, 3)).speedup > found[0].speedup


def test_search_without_optuna_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SpecctlError) as caught:
        search_tpe(score, SPACE, min_coverage=0.0, trials=1)
    assert "specctl-toolkit[tune]" in caught.value.do
