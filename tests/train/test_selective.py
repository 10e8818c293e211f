"""Selective distillation: which tokens are kept, in every family, and the reference's own stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.batch import Select, TrainBatch
from specctl.core.drafter import Drafter
from specctl.core.errors import IncompatibleError, RecipeError
from specctl.core.vocab import VocabMap
from specctl.drafters import family
from specctl.recipes.load import load_recipe
from specctl.runtime.target.target import Target
from specctl.train.features.capture import capture
from specctl.train.step.selective import Selection, chosen, reference_part
from specctl.train.stop import Interrupted
from specctl_testing.train import small_runs as runs

OPTIONS = {
    "small-lm": {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "head_dim": 8},
    "medusa": {"num_heads": 2},
    "eagle3": {"ttt_steps": 2},
}


def made(name: str, target: Target, seed: int, vocab: VocabMap | None = None) -> Drafter:
    entry = family(name)
    torch.manual_seed(seed)
    drafter = entry.build(entry.options(**OPTIONS[name]), target.spec, vocab)
    if drafter.needs().borrow:
        drafter.bind(target.borrowed())
    with torch.no_grad():
        for parameter in drafter.trainable().values():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return drafter


def tokens(target: Target, drafter: Drafter) -> TrainBatch:
    torch.manual_seed(2)
    ids = torch.randint(0, target.spec.vocab_size, (2, 30))
    batch = TrainBatch(
        ids, torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids),
        torch.arange(30).expand(2, 30),
    )  # fmt: skip
    return capture(target, batch, drafter.needs())


def test_the_share_with_the_highest_or_lowest_gaps_is_chosen() -> None:
    gap = torch.tensor([0.3, -1.0, 2.0, 0.1, -0.2, 0.0, 5.0, 0.2, 0.4, -3.0])
    assert chosen(gap, 0.4, True).nonzero()[:, 0].tolist() == [0, 2, 6, 8]
    assert chosen(gap, 0.4, False).nonzero()[:, 0].tolist() == [1, 4, 5, 9]
    assert chosen(gap, 1.0, True).all()
    assert not chosen(gap[:1], 0.4, True).any()
    assert chosen(gap[:0], 0.4, True).shape == (0,)
    assert chosen(gap, 0.4, True).tolist() == (gap >= gap.quantile(0.6)).tolist()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("is_trimmed", [False, True])
def test_each_loss_of_a_family_learns_the_tokens_it_is_furthest_behind_on(
    make_target: Callable[..., Target], name: str, is_trimmed: bool
) -> None:
    target = make_target(num_layers=4)
    vocab = VocabMap(torch.arange(0, 96, 2), 96) if is_trimmed else None
    drafter, reference = (made(name, target, seed, vocab) for seed in (0, 1))
    batch = tokens(target, drafter)
    kl: dict[str, list[Tensor]] = {"drafter": [], "reference": []}
    for word, model in (("drafter", drafter), ("reference", reference)):

        def note(kl_N: Tensor, into: list[Tensor] = kl[word]) -> Tensor:
            into.append(kl_N)
            return torch.ones_like(kl_N, dtype=torch.bool)

        whole = model.loss(replace(batch, select=note))
    assert len(kl["drafter"]) == {"small-lm": 1}.get(name, 2)
    selected = Selection("highest", 0.4, 0, reference)(batch, [0, 1])
    assert selected.select is not None
    out = drafter.loss(replace(selected))
    want = [
        q[(q - r) >= (q - r).topk(round(0.4 * len(q))).values[-1]]
        for q, r in zip(kl["drafter"], kl["reference"], strict=True)
    ]
    plain = drafter.loss(batch)
    decay = {"eagle3": 0.8, "medusa": 0.8}.get(name, 1.0)
    expected = sum(decay**i * part.sum() for i, part in enumerate(want))
    torch.testing.assert_close(out.sum.detach(), torch.as_tensor(expected), rtol=1e-4, atol=1e-4)
    assert float(out.metrics["selected"][0]) == len(want[0])
    torch.testing.assert_close(out.metrics["alpha"], plain.metrics["alpha"])
    assert float(whole.count) > float(out.count) > 0
    assert all(p.grad is None for p in reference.trainable().values())


def test_the_lowest_gaps_are_the_others_and_random_ones_repeat_for_the_same_rows(
    make_target: Callable[..., Target],
) -> None:
    target = make_target(num_layers=2)
    drafter, reference = made("small-lm", target, 0), made("small-lm", target, 1)
    batch = tokens(target, drafter)
    losses = {
        (rule, rows): float(
            drafter.loss(Selection(rule, 0.5, 3, reference)(batch, rows)).sum.detach()
        )
        for rule in ("highest", "lowest", "random")
        for rows in ((0, 1), (2, 3))
    }
    whole = float(drafter.loss(batch).sum.detach())
    both = losses["highest", (0, 1)] + losses["lowest", (0, 1)]
    assert both == pytest.approx(whole, rel=1e-4)
    assert losses["random", (0, 1)] != pytest.approx(losses["random", (2, 3)], rel=1e-4)
    again = drafter.loss(Selection("random", 0.5, 3, None)(batch, (0, 1))).sum.detach()
    assert float(again) == losses["random", (0, 1)]


def test_the_reference_is_the_same_recipe_with_every_token_learned() -> None:
    sets = ["train.select=highest", "train.reference_steps=7", "vocab.size=null"]
    recipe = load_recipe("distill", sets=sets)
    stage = reference_part(recipe.train)
    assert stage is not None
    changed = {"select": "none", "steps": 7, "reference_steps": None}
    assert stage == recipe.train.model_copy(update=changed)
    for quiet in (["train.select=random"], ["train.select=highest", "train.reference=x"], []):
        assert reference_part(load_recipe("distill", sets=quiet).train) is None
    with pytest.raises(RecipeError, match="reference_steps is ignored"):
        load_recipe("distill", sets=["train.reference_steps=7"])


def test_a_run_stopped_in_the_reference_or_behind_it_resumes_bit_for_bit(tmp_path: Path) -> None:
    target, text = runs.random_target(seed=0), runs.words(tmp_path)
    recipe = runs.small_recipe(
        "distill", text, train__select="highest", train__steps=5, train__reference_steps=4,
        vocab__size=40, data__new_tokens=8,
    )  # fmt: skip
    whole = runs.run(recipe, tmp_path / "whole", target)
    assert any(line.startswith("first the reference: 4 steps") for line in whole.said)
    for at in (3, 4):  # in the reference; then in the third step behind it
        with pytest.raises(Interrupted), runs.stopped_before(target, step=at):
            runs.run(recipe, tmp_path / "cut", target)
        names = sorted(p.name for p in (tmp_path / "cut" / "reference").iterdir())
        assert "checkpoints" in names
    again = runs.run(recipe, tmp_path / "cut", target)
    assert "continuing from step 3" in again.said
    assert again.digest == whole.digest


def test_a_reference_of_another_vocabulary_is_refused(
    tmp_path: Path, make_target: Callable[..., Target]
) -> None:
    target, text = runs.random_target(seed=0), runs.words(tmp_path)
    sets = {"train__select": "highest", "train__reference": "elsewhere", "data__new_tokens": 8}
    recipe = runs.small_recipe("distill", text, **sets)
    vocab = VocabMap(torch.arange(50), target.spec.vocab_size)
    with pytest.raises(IncompatibleError) as caught:
        runs.run(
            recipe, tmp_path / "out", target, load=lambda name, t: made("small-lm", t, 0, vocab)
        )
    assert caught.value.where == "train.reference"
    assert "50 ids" in caught.value.found


def test_a_reference_that_is_named_is_loaded_and_none_is_trained(tmp_path: Path) -> None:
    target, text = runs.random_target(seed=0), runs.words(tmp_path)
    sets = {"train__select": "highest", "train__reference": "elsewhere", "data__new_tokens": 8}
    recipe = runs.small_recipe("distill", text, **sets, train__steps=2)
    asked: list[str] = []

    def load(name: str, of: Target) -> Drafter:
        asked.append(name)
        return made("small-lm", of, 0)

    ran = runs.run(recipe, tmp_path / "out", target, load=load)
    assert ran.result.steps == 2
    assert asked == ["elsewhere"]
    assert not (tmp_path / "out" / "reference").exists()


def test_a_loss_that_never_asks_the_target_cannot_select(tmp_path: Path) -> None:
    target, text = runs.random_target(seed=0), runs.words(tmp_path)
    sets = {"train__select": "random", "drafter__options__loss": "ce", "data__new_tokens": 8}
    with pytest.raises(RecipeError) as caught:
        runs.run(runs.small_recipe("distill", text, **sets), tmp_path / "out", target)
    assert caught.value.where == "train.select"


# -- a draft that is short of steps --------------------------------------------------------------

WIDTH, RATES, SEEDS = 32, (0.06, 0.1, 0.2), 4


@dataclass(frozen=True)
class Tokens:
    """What a linear draft sees of each token, and the target's distribution there."""

    seen_NF: Tensor
    target_NV: Tensor
    select: Select | None = None


class Linear:
    """A draft of one matrix; the sum of KL over its tokens, or over the selected ones."""

    def __init__(self) -> None:
        self.matrix_FV = torch.zeros(WIDTH, WIDTH, requires_grad=True)

    def logp_NV(self, tokens: Tokens) -> Tensor:
        return (tokens.seen_NF @ self.matrix_FV).log_softmax(-1)

    def loss(self, tokens: Tokens) -> Tensor:
        kl_N = (tokens.target_NV * (tokens.target_NV.log() - self.logp_NV(tokens))).sum(-1)
        return (kl_N if tokens.select is None else kl_N[tokens.select(kl_N.detach())]).sum()

    @torch.no_grad()
    def alpha(self, tokens: Tokens) -> float:
        return float(torch.minimum(tokens.target_NV, self.logp_NV(tokens).exp()).sum(-1).mean())


class Language:
    """Of ten tokens six follow from what the draft sees; the others could be any."""

    def __init__(self, seed: int) -> None:
        self.source = torch.Generator().manual_seed(seed)
        self.law_FV = torch.randn(WIDTH, WIDTH, generator=self.source) * 6 / WIDTH**0.5

    def tokens(self, count: int) -> Tokens:
        seen_NF = torch.randn(count, WIDTH, generator=self.source)
        any_N = torch.randint(WIDTH, (count,), generator=self.source)
        any_NV = F.one_hot(any_N, WIDTH) * 0.96 + 0.04 / WIDTH
        follows_N1 = torch.rand(count, 1, generator=self.source) < 0.6
        return Tokens(seen_NF, torch.where(follows_N1, (seen_NF @ self.law_FV).softmax(-1), any_NV))


def learned(batches: list[Tokens], rate: float, selection: Selection | None = None) -> Linear:
    draft = Linear()
    optimizer = torch.optim.Adam([draft.matrix_FV])
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / len(batches))
        if selection is not None:
            batch = selection(batch, [step])  # type: ignore[arg-type, assignment]
        optimizer.zero_grad()
        draft.loss(batch).backward()
        optimizer.step()
    return draft


def alphas(seed: int) -> dict[str, float]:
    """Acceptance on unseen tokens after 60 steps of 8 tokens, by which of these are learned; at the
    best learning rate of each."""
    language = Language(seed)
    reference = learned([language.tokens(8) for _ in range(800)], 0.1)
    batches, unseen = [language.tokens(8) for _ in range(60)], language.tokens(4000)

    def alpha(rule: str, rate: float) -> float:
        if rule == "all":
            return learned(batches, rate).alpha(unseen)
        chooses = Selection(rule, 0.6, seed, reference)  # type: ignore[arg-type]
        return learned(batches, rate, chooses).alpha(unseen)

    rules = ("highest", "lowest", "random", "all")
    return {rule: max(alpha(rule, rate) for rate in RATES) for rule in rules}


@pytest.mark.proof
def test_short_of_steps_a_draft_learns_more_from_selected_tokens_than_from_all() -> None:
    """AdaSPEC's claim, and its ablations: the lowest gaps, and any."""
    found = [alphas(seed) for seed in range(SEEDS)]
    for other, least in (("all", 0.01), ("random", 0.03), ("lowest", 0.05)):
        gains = [each["highest"] - each[other] for each in found]
        assert mean(gains) - 2 * stdev(gains) / SEEDS**0.5 > least, (other, gains)
