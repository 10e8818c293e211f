"""Vocabulary trimming of real drafters: what is counted, what is cut, what is told, and the
distribution."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from specctl.core.drafter import Drafter, RoundView, Space, StepState
from specctl.core.errors import SpecctlError
from specctl.core.forward.masks import document_mask
from specctl.core.language_model import Masks
from specctl.core.vocab import VocabMap
from specctl.drafters import family
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import HeldoutPrompt
from specctl.train.data.records.records import Sample
from specctl.train.vocab.candidates import Material, TrimSettings
from specctl.train.vocab.chains import write_answers
from specctl.train.vocab.measure import HeadCost, MeasuredDrafter, PromptRun, moved_bytes
from specctl.train.vocab.selectors import Evidence, selector, selectors
from specctl.train.vocab.selectors.drafted import draft_tokens
from specctl.train.vocab.selectors.vocab_trim import target_tokens
from specctl.train.vocab.trim import Trimmed, trim
from specctl_testing.train.vocab_cases import COST, counts


def make_drafter(target: Target, name: str = "small-lm", seed: int = 1) -> Drafter:
    torch.manual_seed(seed)
    found = family(name)
    drafter = found.build(found.options(), target.spec, None)
    drafter.bind(target.borrowed())
    return drafter


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


PROMPTS = [HeldoutPrompt((3, 1, 4, 1 + i), "", "ab"[i % 2]) for i in range(4)]
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

    def measure(drafter: Drafter, policy: Any) -> MeasuredDrafter:
        size = 96 if drafter.vocab is None else drafter.vocab.size
        taus[size] = 2.0 if size in (max(taus, default=0), 96) else 1.99
        return MeasuredDrafter(taus[size], 0.6, 100.0)

    done = trimmed(target, "auto", measure=measure, min_coverage=0.3)
    report, drafter = done.report, done.drafter
    best = max(report.trials, key=lambda t: COST.speedup(taus[t.predicted.size], t.predicted.size))
    assert report.size == best.predicted.size == (drafter.vocab.size if drafter.vocab else 96)
    assert len(report.trials) >= 3
    assert report.pays


def test_the_drafter_comes_back_whole_when_no_size_pays(target: Target) -> None:
    def measure(drafter: Drafter, policy: Any) -> MeasuredDrafter:
        return MeasuredDrafter(2.0 if drafter.vocab is None else 1.0, 0.5, 1.0)

    done = trimmed(target, "auto", measure=measure, min_coverage=0.3)
    assert done.drafter.vocab is None
    assert not done.report.pays
    assert "no smaller head pays" in done.report.lines()[0]
    assert COST.speedup(2.0, 96) < 1.0
    assert "without this drafter is faster" in done.report.warnings(0.3)[-1]


def test_a_trim_that_leaves_hardly_any_word_is_warned_about(target: Target) -> None:
    """By what it measures, and by the coverage that --size auto keeps."""

    def measure(drafter: Drafter, policy: Any) -> MeasuredDrafter:
        return MeasuredDrafter(2.9 if drafter.vocab is None else 1.2, 0.5, 100.0)

    report = trimmed(target, 8, measure=measure).report
    slower, uncovered = report.warnings(0.95)[:2]
    assert "the whole drafter is faster here" in slower
    assert "tau 2.90 -> 1.20" in slower
    assert uncovered.startswith(f"8 ids are {report.coverage:.1%} of what the target writes")
    enough = trimmed(target, 90, measure=lambda *_: MeasuredDrafter(2.9, 0.9, 100.0)).report
    assert enough.coverage > 0.95
    assert not enough.warnings(0.95)


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

    def measure(drafter: Drafter, policy: Any) -> MeasuredDrafter:
        rounds = {"a": 4 if drafter.vocab is None else 10, "b": 4}
        return MeasuredDrafter.of(
            [PromptRun(p.domain, rounds[p.domain], 10, 5, 8, 1.0) for p in PROMPTS]
        )

    report = trimmed(target, 48, measure=measure).report
    everything, worst, other = report.domains
    assert (everything.domain, everything.slower) == ("all", 0.5)
    assert (worst.domain, worst.slower, worst.gain < 1.0) == ("a", 1.0, True)
    assert (other.domain, other.slower, other.gain > 1.0) == ("b", 0.0, True)
    assert worst.after.tau == 1.0
    assert worst.before.speedup == pytest.approx(COST.speedup(2.5, 96))
    assert worst.after.mbsu == pytest.approx(1.0 / (1 + 3 * report.after.moved.byte_ratio))
    assert any("a is slower than before" in line for line in report.warnings(0.3))
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


# -- the distribution
# ----------------------------------------------------------------------------------


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
def test_sampling_with_a_trimmed_drafter_keeps_the_distribution_of_the_target(
    make_target: Callable[..., Target], rule: str
) -> None:
    """Chi-square of 1,600 sampled pairs over a vocabulary of 7 against the exact distribution."""
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
    expected = count * pair_distribution(small_target, prompt, 0.9)
    keep = expected > 5
    rest = (float(seen[~keep].sum()), float(expected[~keep].sum()))
    observed = [*seen[keep].tolist(), rest[0]] if rest[1] > 1 else seen[keep].tolist()
    wanted = [*expected[keep].tolist(), rest[1]] if rest[1] > 1 else expected[keep].tolist()
    scale = sum(observed) / sum(wanted)
    assert chisquare(observed, [w * scale for w in wanted]).pvalue > 1e-4
    accepted = sum(sum(c.stats.accepted_at) for c in completions)
    assert accepted > 0, "no draft was ever accepted, so nothing was tested"


def pair_distribution(target: Target, prompt: tuple[int, ...], temperature: float) -> torch.Tensor:
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
