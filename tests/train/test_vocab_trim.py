"""Vocabulary trimming: what is kept, which size is chosen, and that nothing changes but speed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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
from specctl.train.coverage import (
    HeadCost,
    TokenCounts,
    always_kept,
    choose_size,
    count_tokens,
    coverage_curve,
    fit_cost,
    ranking,
    vocab_map,
)
from specctl.train.heldout import Prompt
from specctl.train.trim_measure import moved_bytes
from specctl.train.vocab_trim import Measured, TrimReport, draft_tokens, target_tokens, trim


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


def curve_of(num_ids: int) -> torch.Tensor:
    return (1.0 / torch.arange(1, num_ids + 1).double()).cumsum(0) / (
        1.0 / torch.arange(1, num_ids + 1).double()
    ).sum()


def test_the_chosen_size_beats_every_other_by_the_formula() -> None:
    curve = curve_of(96)
    best = choose_size(curve, 0.8, 4, COST, min_coverage=0.0)[0]
    by_hand = [
        expected_tau(0.8 * float(curve[k - 1]), 4) / (1.2 + 4 * (0.02 + 0.2 * k / 96))
        for k in range(1, 97)
    ]
    assert best.size == 1 + max(range(96), key=by_hand.__getitem__)
    assert best.speedup == pytest.approx(max(by_hand))
    assert 1 < best.size < 96


def test_the_least_coverage_is_respected() -> None:
    free = choose_size(curve_of(96), 0.8, 4, COST, min_coverage=0.0)[0]
    bound = choose_size(curve_of(96), 0.8, 4, COST, min_coverage=0.95)[0]
    assert free.coverage < 0.95 <= bound.coverage


def test_a_free_head_keeps_every_id_and_a_dear_one_few() -> None:
    free = HeadCost(1.0, 1.2, 0.02, 0.0, 4, 96)
    dear = HeadCost(1.0, 1.2, 0.02, 5.0, 4, 96)
    sizes = [
        choose_size(curve_of(96), 0.8, 4, cost, min_coverage=0.0)[0].size for cost in (free, dear)
    ]
    assert sizes[0] == 96
    assert sizes[1] < 16


def test_the_cost_fit_finds_body_and_head() -> None:
    rounds = [(k, 4 * (0.003 + 0.01 * k / 96)) for k in (8, 32, 96)]
    fitted = fit_cost(0.02, 0.03, rounds, 4, 96)
    assert (fitted.body, fitted.head) == (pytest.approx(0.003), pytest.approx(0.01))
    noisy = fit_cost(0.02, 0.03, [(8, 0.05), (96, 0.04)], 4, 96)
    assert (noisy.head, noisy.body > 0) == (0.0, True)


# -- trimming ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(make_target: Callable[..., Target]) -> Target:
    return make_target(num_layers=2, vocab=96, eos_token_id=95)


PROMPTS = [Prompt((3, 1, 4, 1 + i), "", "ab"[i % 2]) for i in range(4)]
HALF = counts(a=[96 - i for i in range(96)], b=[2 * (i < 48) for i in range(96)])


def trimmed(target: Target, size: Any, **more: Any) -> tuple[Drafter, TrimReport]:
    policy = make_policy({"policy": "chain", "length": 3})
    given = {"cost": COST, "new_tokens": 8, **more}
    return trim(
        make_drafter(target), size, target=target, counts=HALF, heldout=HALF, policy=policy,
        prompts=PROMPTS, **given,
    )  # fmt: skip


def test_trimming_to_a_size_keeps_the_frequent_ids_and_the_end(target: Target) -> None:
    drafter, report = trimmed(target, 48)
    assert drafter.vocab is not None
    assert drafter.vocab.ids_K.tolist() == [*range(47), 95]
    assert report.digest == drafter.vocab.digest()
    assert report.coverage_by_domain["b"] == pytest.approx(47 / 48)
    assert report.byte_ratio < report.byte_ratio_before


def test_auto_takes_the_size_with_the_best_measured_tau_and_cost(target: Target) -> None:
    taus = {}

    def measure(drafter: Drafter) -> Measured:
        size = 96 if drafter.vocab is None else drafter.vocab.size
        taus[size] = 2.0 if size in (max(taus, default=0), 96) else 1.99
        return Measured(taus[size], 0.6, 100.0)

    drafter, report = trimmed(target, "auto", measure=measure, min_coverage=0.3)
    best = max(report.trials, key=lambda t: COST.speedup(taus[t.predicted.size], t.predicted.size))
    assert report.size == best.predicted.size == (drafter.vocab.size if drafter.vocab else 96)
    assert len(report.trials) >= 3
    assert report.pays


def test_the_drafter_comes_back_whole_when_no_size_pays(target: Target) -> None:
    def measure(drafter: Drafter) -> Measured:
        return Measured(2.0 if drafter.vocab is None else 1.0, 0.5, 1.0)

    drafter, report = trimmed(target, "auto", measure=measure, min_coverage=0.3)
    assert drafter.vocab is None
    assert not report.pays
    assert "no smaller head pays" in report.lines()[0]
    assert COST.speedup(2.0, 96) < 1.0
    assert "without this drafter is faster" in report.lines()[-1]


def test_the_report_is_json_with_formulas_and_measured_figures(
    target: Target, tmp_path: Path
) -> None:
    report = trimmed(target, 48)[1]
    body = json.loads(json.dumps(report.to_json()))
    assert body["mbsu"]["after"] == pytest.approx(
        report.after.tau / (1 + 3 * report.byte_ratio), rel=1e-6
    )
    assert body["trials"][0]["measured"]["tau"] == round(report.after.tau, 4) >= 1.0
    assert "tau / (1 + g c)" in body["mbsu"]["formula"]
    pytest.importorskip("matplotlib")
    assert report.save_png(tmp_path / "curve.png").stat().st_size > 1000


def test_the_curve_is_drawn_with_and_without_plotext(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = trimmed(target, 48)[1]
    bars = report.bars()
    chosen = next(line for line in bars.splitlines() if line.endswith("<"))
    assert chosen.split()[0] == "48"
    monkeypatch.setitem(sys.modules, "plotext", None)
    assert report.plot() == bars
    monkeypatch.delitem(sys.modules, "plotext")
    pytest.importorskip("plotext")
    assert "coverage" in report.plot()


def test_costs_are_measured_when_none_are_given(target: Target) -> None:
    report = trimmed(target, 48, cost=None)[1]
    assert len(report.cost.measured) == 3
    assert report.cost.plain > 0
    assert report.cost.head >= 0


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
    policy = make_policy({"policy": "chain", "length": 3})
    small = make_drafter(target).trimmed(VocabMap(torch.arange(0, 96, 2), 96))
    drafted = list(draft_tokens(target, small, policy, PROMPTS, new_tokens=6))
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


@pytest.mark.parametrize("rule", ["block", "chain", "target-only"])
def test_sampling_with_a_trimmed_drafter_keeps_the_law_of_the_target(
    make_target: Callable[..., Target], rule: str
) -> None:
    """Chi-square of 2,400 sampled pairs over a vocabulary of 7 against the exact law."""
    stats = pytest.importorskip("scipy.stats")
    small_target = make_target(num_layers=2, vocab=7, seed=4)
    drafter = make_drafter(small_target).trimmed(VocabMap(torch.tensor([0, 2, 5]), 7))
    prompt, count = (1, 2, 3), 2400
    requests = [
        Request(prompt, Sampling(temperature=0.9, seed=i, max_new_tokens=3)) for i in range(count)
    ]
    policy = make_policy({"policy": "chain", "length": 2})
    engine = Engine(small_target, drafter, policy, rule, num_slots=1200)
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
    assert stats.chisquare(observed, [w * scale for w in wanted]).pvalue > 1e-4
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
