"""Training of stop rules: what is collected, and that it tells accepted from rejected tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.drafter import Drafter, Needs, Outcome, Space, StepState
from specctl.core.errors import RecipeError, SpecctlError
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies.chain import Chain
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.stops import trained_stops
from specctl.runtime.stops.learned import write_stop
from specctl.runtime.target.target import Target
from specctl.train.stop_rules import Collector, collect, fit, learned_rule, roc_area
from specctl_testing.drafters.head_cases import make_heads

SIZE = 12
PROMPTS = [[i % SIZE] for i in range(24)]


class Half(StepState):
    """Drafts the target's own distribution of the newest token after an even one, noise after an
    odd one."""

    def __init__(self, logits_VV: Tensor) -> None:
        self.logits_VV, self.newest_B = logits_VV, torch.empty(0)

    def start(self, slot: int, tokens: Any, taps: Any) -> None: ...

    def observe(self, outcome: Outcome) -> None: ...

    def root(self, view: Any) -> Tensor:
        self.newest_B = view.root_B
        return self.logits_VV[view.root_B]

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        self.newest_B = token_BM[:, 0]
        return self.logits_VV[token_BM]

    def hidden(self) -> Tensor:
        return torch.nn.functional.one_hot(self.newest_B, SIZE).float()


class HalfDrafter(Drafter):
    family = "small-lm"

    def __init__(self, logits_VV: Tensor) -> None:
        self.logits_VV = logits_VV

    def needs(self) -> Needs:
        return Needs()

    def open(self, space: Space) -> Half:
        return Half(self.logits_VV)


@pytest.fixture(scope="module")
def pair(make_target: Any) -> tuple[Target, HalfDrafter]:
    target = make_target(num_layers=1, vocab=SIZE)
    ids = torch.arange(SIZE)[:, None]
    masks = target.lm.document_masks(torch.zeros_like(ids))
    with torch.no_grad():
        logits_VV = target.lm.dense(ids, torch.zeros_like(ids), masks).logits_BTV[:, 0].clone()
    generator = torch.Generator().manual_seed(1)
    noise_VV = 3.0 * torch.randn(SIZE, SIZE, generator=generator)
    logits_VV[1::2] = noise_VV[1::2]
    return target, HalfDrafter(logits_VV)


@pytest.mark.parametrize("name", trained_stops())
def test_what_is_learned_beats_a_constant_and_scrambled_labels_do_not(
    pair: tuple[Target, HalfDrafter], name: str
) -> None:
    rule = learned_rule(name)
    found = collect(*pair, rule, PROMPTS, length=4, new_tokens=24)
    learned = fit(rule, found, steps=250)
    assert learned.loss < 0.97 * learned.constant
    if learned.auc is not None:
        assert learned.auc > 0.6
    order = torch.randperm(len(found.labels), generator=torch.Generator().manual_seed(0)).tolist()
    scrambled = Collector(rule, features=found.features, labels=[found.labels[i] for i in order])
    ablated = fit(rule, scrambled, steps=250)
    assert ablated.loss > learned.loss
    if learned.auc is not None and ablated.auc is not None:
        assert ablated.auc < learned.auc - 0.1


def test_a_learned_rule_accepts_more_of_what_it_drafts(
    pair: tuple[Target, HalfDrafter], tmp_path: Path
) -> None:
    target, drafter = pair
    rule = learned_rule("disco")
    learned = fit(rule, collect(target, drafter, rule, PROMPTS, length=4, new_tokens=24), steps=250)
    path = tmp_path / "disco.safetensors"
    write_stop(path, "disco", learned.net, {})
    shares = []
    for policy in (Chain(length=4), Chain(length=4, stop="disco", stop_file=str(path))):
        engine = Engine(target, drafter, policy, num_slots=8)
        sampling = Sampling(max_new_tokens=40, ignore_eos=True)
        made = engine.run([Request(tuple(prompt), sampling) for prompt in PROMPTS])
        drafted, accepted = (
            sum(getattr(c.stats, name) for c in made) for name in ("drafted", "accepted")
        )
        shares.append(accepted / drafted)
    assert shares[1] > 1.1 * shares[0]


def test_specdec_pp_is_taught_the_chance_of_the_token_before(
    pair: tuple[Target, HalfDrafter],
) -> None:
    """Its features are the state behind a token and the label is that token's own min(1, p / q),
    behind rejected tokens, too; greedily this is 0 or 1."""
    target, drafter = pair
    found = collect(target, drafter, learned_rule("specdec-pp"), PROMPTS[:4], 3, new_tokens=12)
    assert len(found.labels) == len(found.features)
    assert found.features[0].shape == (SIZE,)
    soft = [label for label in found.labels if 0.0 < label < 1.0]
    assert len(soft) > 0.1 * len(found.labels)
    assert {label for label in found.labels if label in (0.0, 1.0)} == {0.0, 1.0}


@torch.no_grad()
def test_chances_are_those_of_the_target_behind_the_drafted_tokens(
    pair: tuple[Target, HalfDrafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worked out anew for the sampled round behind the prompt: all tokens but the last two, which
    nothing reads before the draft ends."""
    target, drafter = pair
    rounds: list[tuple[Outcome, int]] = []
    note = Collector._note_chances

    def watched(self: Collector, outcome: Outcome) -> None:
        rounds.append((outcome, len(self.labels)))
        note(self, outcome)

    monkeypatch.setattr(Collector, "_note_chances", watched)
    found = collect(target, drafter, learned_rule("specdec-pp"), [[3]], 5, new_tokens=9, batch=1)
    outcome, first = [pair for pair in rounds if int(pair[0].view.kept_len_B[0]) == 0][1]
    drafted = outcome.tree.token_BN[0].tolist()
    text = torch.tensor([[3, *drafted]])
    masks = target.lm.document_masks(torch.zeros_like(text))
    logits_TV = target.lm.dense(text, torch.arange(6)[None], masks).logits_BTV[0]
    for at, token in enumerate(drafted[:3]):
        p = float((logits_TV[at] / 0.8).softmax(-1)[token])
        q = float((drafter.logits_VV[text[0, at]] / 0.8).softmax(-1)[token])
        assert found.labels[first + at] == pytest.approx(min(1.0, p / q), rel=1e-3)


def test_the_area_under_the_curve_is_a_chance() -> None:
    score, label = torch.tensor([3.0, 2.0, 1.0, 1.0]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    assert roc_area(score, label) == pytest.approx((1 + 1 + 0 + 0.5) / 4)


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(RecipeError, match="not a stop rule that is trained"):
        learned_rule("svip")
    with pytest.raises(SpecctlError, match="too few"):
        fit(learned_rule("disco"), Collector(learned_rule("disco")))


def test_a_predicted_length_errs_towards_drafting_too_much() -> None:
    """Where a state leaves two lengths open, equally often, asymmetric L1 settles on the longer."""
    rule = learned_rule("ada-eagle")
    labels = [1.0, 5.0] * 60
    found = Collector(rule, features=[torch.ones(SIZE)] * len(labels), labels=labels)
    learned = fit(rule, found, steps=120)
    with torch.no_grad():
        assert float(learned.net(torch.ones(1, SIZE))) > 4.0


class Telling(Half):
    """Shows before its pass which token the round begins with."""

    def known(self, view: Any) -> Tensor:
        root_BV = torch.nn.functional.one_hot(view.root_B, SIZE).float()
        return torch.stack([root_BV, root_BV], dim=1)


def test_a_length_is_learned_from_what_is_known_before_the_first_pass(
    pair: tuple[Target, HalfDrafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths of none are among the labels: the drafter is noise behind odd tokens."""
    target, drafter = pair
    monkeypatch.setattr(drafter, "open", lambda space: Telling(drafter.logits_VV))
    rule = learned_rule("ada-eagle")
    found = collect(target, drafter, rule, PROMPTS, length=4, new_tokens=24)
    assert found.features[0].shape == (2 * SIZE,)
    assert 0.0 in found.labels
    learned = fit(rule, found, steps=150)
    assert learned.loss < 0.97 * learned.constant


def test_rounds_that_draft_nothing_keep_a_feature_drafter_in_step(
    make_target: Any, tmp_path: Path
) -> None:
    """Whoever drafts after rounds without a draft has still read every token: text and drafts are
    those of a drafter that is told to draft always."""
    target = make_target(num_layers=2, vocab=24)
    drafter = make_heads(target, "eagle")
    texts, accepted = [], []
    for bias in (None, 9.0, 0.2):
        policy = Chain(length=3)
        if bias is not None:
            torch.manual_seed(2)
            net = learned_rule("ada-eagle").new_net(2 * target.spec.hidden_size)
            with torch.no_grad():
                net[-1].weight.mul_(6.0)
                net[-1].bias.fill_(bias)
            path = tmp_path / f"{bias}.safetensors"
            write_stop(path, "ada-eagle", net, {})
            policy = Chain(length=3, stop="ada-eagle", stop_file=str(path))
        engine = Engine(target, drafter, policy, num_slots=2)
        sampling = Sampling(max_new_tokens=30, ignore_eos=True)
        found = engine.run([Request((3 + i, 1, 4), sampling) for i in range(3)])
        texts.append([one.tokens for one in found])
        accepted.append([(one.stats.drafted, one.stats.rounds) for one in found])
    assert texts[0] == texts[1] == texts[2]
    assert accepted[0] == accepted[1]
    assert 0 < sum(d for d, _ in accepted[2]) < sum(d for d, _ in accepted[0])
