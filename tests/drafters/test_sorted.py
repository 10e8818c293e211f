"""Sorted drafts: exits share one model, skipped layers are filled in exactly, the distribution is
honest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specctl.core.drafter import Outcome, Space
from specctl.core.errors import RecipeError
from specctl.core.forward.masks import tree_mask
from specctl.drafters.lm.sorted_lm import ExitState, SortedLm, SortedOptions, default_exits
from specctl.drafters.states.tree_layout import TreeLayout
from specctl.models.llama.fast_llama import FastLlama
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl_testing.drafters.parallel_runs import copying_target, decode

PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [7], [20, 2, 20])
POLICIES: list[dict[str, Any]] = [
    {"policy": "chain", "length": 4},
    {"policy": "static-tree", "branch": (2, 2, 1)},
    {"policy": "dynamic-tree", "length": 3, "beam": 2, "nodes": 5},
]


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    found: Target = make_target(num_layers=3, vocab=24)
    return found


@pytest.fixture(scope="module")
def drafter(target: Target, train_a_little: Any) -> SortedLm:
    torch.manual_seed(5)
    made = SortedLm(SortedOptions(layers=4, exits=(1, 2, 4), threshold=0.5), target.spec)
    train_a_little(target, made, 40, 1e-2)
    made.module.eval()
    return made


def sure(drafter: SortedLm, threshold: float, only: int | None = None) -> SortedLm:
    """The same weights under another rule for leaving."""
    options = replace(drafter.options, threshold=threshold, only=only)
    return SortedLm(options, drafter.spec, drafter.vocab, drafter.lm)


class Watch(ExitState):
    """Checks after every round that filled entries hold what a full forward writes."""

    checked: list[int] = []  # noqa: RUF012
    depths: set[int] = set()  # noqa: RUF012

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        for slot, tokens in zip(outcome.view.slots, outcome.view.tokens, strict=True):
            self.compare(slot, list(tokens))

    def compare(self, slot: int, tokens: list[int]) -> None:
        count = min(self.num_known[slot], len(tokens))
        kv, at_1 = self.lm.new_kv(1, count), torch.zeros(1, dtype=torch.long)
        kv.begin((0,), at_1, at_1, count, count, 0)
        masks = self.lm.chain_masks(at_1, count, count)
        self.lm.forward(torch.tensor([tokens[:count]]), torch.arange(count)[None], masks, kv)
        for part, layers in enumerate(self.parts):
            filled = min(self.filled[part][slot], count)
            self.depths.add(self.num_known[slot] - self.filled[part][slot] if part else 0)
            for layer in layers:
                for ours, full in (
                    (self.kv.key_ZJLE[layer], kv.key_ZJLE[layer]),
                    (self.kv.value_ZJLE[layer], kv.value_ZJLE[layer]),
                ):
                    torch.testing.assert_close(ours[slot, :, :filled], full[0, :, :filled])
                self.checked.append(filled)


@pytest.mark.parametrize("serve", POLICIES, ids=[p["policy"] for p in POLICIES])
@pytest.mark.parametrize("slots", [1, 3])
def test_keys_and_values_filled_in_late_are_those_of_a_full_forward(
    target: Target, drafter: SortedLm, serve: dict[str, Any], slots: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    Watch.checked, Watch.depths = [], set()
    watched = sure(drafter, 0.35)
    monkeypatch.setattr(watched, "open", lambda space: Watch(watched, space))
    engine = Engine(target, watched, make_policy(serve), num_slots=slots)
    sampling = Sampling(temperature=0.9, max_new_tokens=24, ignore_eos=True, seed=3)
    engine.run([Request(tuple(prompt), sampling) for prompt in PROMPTS])
    assert max(Watch.checked) > 20
    assert max(Watch.depths) > 3, "no part was ever left behind"


def distributions(drafter: SortedLm, drive: Any, target: Target, text: list[int]) -> torch.Tensor:
    found: torch.Tensor = drive(target, drafter).chain_logits(text, 4)
    return found


def test_each_token_speaks_the_distribution_of_the_first_exit_that_is_sure(
    target: Target, drafter: SortedLm, drive: Any
) -> None:
    """Exits of a fixed depth are the oracle; low, middle and high thresholds pick among them."""
    text = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
    fixed = [distributions(sure(drafter, 0.0, only), drive, target, text) for only in range(3)]
    torch.testing.assert_close(distributions(sure(drafter, 0.0), drive, target, text), fixed[0])
    torch.testing.assert_close(distributions(sure(drafter, 1.0), drive, target, text), fixed[2])
    chances = torch.stack([distribution.softmax(-1).amax(-1) for distribution in fixed])
    ordered, half = chances.flatten().sort().values, chances.numel() // 2
    threshold = float(ordered[half - 1 : half + 1].mean())  # between two, never at one
    mixed, used = distributions(sure(drafter, threshold), drive, target, text), set()
    for row, distribution in enumerate(mixed):
        is_sure = (chances[:2, row] >= threshold).nonzero()
        exit_at = int(is_sure[0]) if len(is_sure) else 2
        torch.testing.assert_close(distribution, fixed[exit_at][row])
        used.add(exit_at)
    assert used == {0, 1, 2}


def test_an_exit_of_a_fixed_depth_is_the_draft_model_cut_there(
    target: Target, drafter: SortedLm, drive: Any
) -> None:
    text = [3, 1, 4, 1, 5, 9]
    shallow = SortedLm(SortedOptions(layers=2, exits=(2,)), target.spec)
    mine = drafter.tensors()
    shallow.load_tensors({name: mine[name] for name in shallow.tensors()})
    expected = distributions(shallow, drive, target, text)
    torch.testing.assert_close(distributions(sure(drafter, 0.5, 1), drive, target, text), expected)


def test_the_loss_is_the_sum_over_exits(target: Target, drafter: SortedLm, make_batch: Any) -> None:
    batch, parts = make_batch(target, drafter), []
    for layers in drafter.exits:
        cut = SortedLm(SortedOptions(layers=layers, exits=(layers,)), target.spec)
        cut.load_tensors({name: drafter.tensors()[name] for name in cut.tensors()})
        parts.append(cut.loss(batch))
    whole = drafter.loss(batch)
    torch.testing.assert_close(whole.sum, torch.stack([part.sum for part in parts]).sum())
    assert float(whole.count) == sum(float(part.count) for part in parts)
    for layers, part in zip((1, 2), parts, strict=False):
        assert whole.metrics[f"top1_at_{layers}"] == part.metrics["top1"]
    assert whole.metrics["top1"] == parts[-1].metrics["top1"]


def test_without_a_teacher_one_draft_serves_two_targets(
    target: Target, drafter: SortedLm, make_target: Any
) -> None:
    assert not drafter.needs().teacher
    other = make_target(num_layers=2, vocab=24, seed=4)
    sampling = Sampling(max_new_tokens=12, ignore_eos=True)
    requests = [Request(tuple(prompt), sampling) for prompt in PROMPTS]
    for served in (target, other):
        plain = Engine(served).run(requests)
        fast = Engine(served, drafter, make_policy(POLICIES[0]), num_slots=2).run(requests)
        assert [c.tokens for c in fast] == [c.tokens for c in plain]


@pytest.mark.parametrize(
    "options",
    [
        {"layers": 4, "exits": (1, 2)},
        {"layers": 4, "exits": (2, 1, 4)},
        {"layers": 4, "exits": (0, 4)},
        {"layers": 4, "exits": (2, 4), "only": 2},
        {"threshold": 1.5},
        {"head_groups": 2},
    ],
)
def test_exits_that_do_not_fit_are_refused(target: Target, options: dict[str, Any]) -> None:
    with pytest.raises(RecipeError):
        SortedLm(SortedOptions(**options), target.spec)


def test_default_exits_are_those_of_the_paper_where_they_are_distinct() -> None:
    assert default_exits(12) == (6, 9, 12)
    assert default_exits(2) == (1, 2)
    assert default_exits(1) == (1,)


def test_what_entries_see_is_what_the_tree_mask_says(round_view: Any, target: Target) -> None:
    """Two rows of different lengths, a branching round: known tokens causally, nodes by path."""
    view = round_view({0: [1, 2, 3], 1: [4, 5, 6, 7, 8]})
    kv = target.new_kv(2, 16)
    growth = TreeLayout(view, kv, [3, 5], view.kept_len_B + 1)
    growth.place(torch.tensor([[-1, -1], [-1, -1]]))
    growth.place(torch.tensor([[0, 1], [1, 1]]))
    entry_BW = growth.kept_B[:, None] + torch.arange(-1, 4)
    ancestors = torch.eye(5, dtype=torch.bool).repeat(2, 1, 1)
    ancestors[:, :, 0] = True
    ancestors[0, 3, 1] = ancestors[0, 4, 2] = ancestors[1, 3, 2] = ancestors[1, 4, 2] = True
    expected = tree_mask(growth.kept_B - 1, ancestors, 9)
    assert torch.equal(growth.sees(entry_BW, 9), expected)
    depth = torch.tensor([0, 1, 1, 2, 2])
    assert torch.equal(growth.position(entry_BW), (growth.kept_B - 1)[:, None] + depth)


def test_a_row_that_missed_much_catches_up_alone(
    target: Target, drafter: SortedLm, round_view: Any
) -> None:
    """Longer than LONG, beside a short row; the distribution is that of the deepest exit."""
    text = [(7 * i) % 24 for i in range(50)]
    deep = sure(drafter, 0.0, only=2)
    space = Space(2, 64, 4, target.device, target.dtype)
    alone, both = deep.open(space), deep.open(space)
    alone.start(1, text, {})
    expected = alone.root(round_view({1: text}))[0]
    both.start(0, [5, 6], {})
    both.start(1, text, {})
    torch.testing.assert_close(both.root(round_view({0: [5, 6], 1: text}))[1], expected)


def test_leaving_where_it_is_sure_is_worth_more_than_any_fixed_exit(make_model: Any) -> None:
    """Behind 8 of 24 words the first layer knows the next one, behind the others the last alone.
    A token costs .1 for all layers, where a forward pass of the target costs 1."""
    target = copying_target(make_model, period=5, counting=8)
    assert isinstance(target.lm, FastLlama)
    prompts = [[0, 9, 1, 20, 3], [4, 5, 15, 2, 12], [6, 18, 10, 7, 21]]
    worth = {}
    for only in (None, 0, 1):
        options = SortedOptions(layers=3, exits=(1, 3), threshold=0.6, only=only)
        drafter, layers = SortedLm(options, target.spec, None, target.lm.for_drafting()), [0]
        own = drafter.lm.through

        def counted(*given: Any, own: Any = own, layers: list[int] = layers) -> Any:
            layers[0] += len(given[-1])
            return own(*given)

        drafter.lm.through = counted  # type: ignore[method-assign]
        ran = decode(target, drafter, prompts, policy="chain", length=5, tokens=48)
        rounds = sum(each.stats.rounds for each in ran.completions)
        worth[only] = 3 * 48 / (rounds + 0.1 * layers[0] / 3)
    assert worth[None] > 1.05 * max(worth[0], worth[1]), worth
