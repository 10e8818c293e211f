"""Parallel prompt decoding: what prompt tokens see, what is trained, and how trees are planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specctl.core.batch import TrainBatch
from specctl.core.errors import RecipeError
from specctl.core.language_model import Feed, LanguageModel
from specctl.drafters.states.prompt_tree import TreePlan, even_trees, plan_trees
from specctl.drafters.tokens.ppd import Ppd, PpdOptions
from specctl.models.hf.hf_lm import HfLM
from specctl.runtime.target.target import Target
from specctl_testing.drafters.parallel_runs import decode

CHANCES = ((0.5, 0.2), (0.4, 0.2), (0.3,))


def made(target: Target, **options: Any) -> Ppd:
    torch.manual_seed(0)
    drafter = Ppd(PpdOptions(**options), target.spec, None)
    drafter.bind(target.borrowed())
    return drafter


def said_behind(target: Target, drafter: Ppd, text: list[int], num_read: int) -> torch.Tensor:
    """[H, V]: the logits at the prompt tokens behind the first `num_read` tokens, one forward of
    text and prompt tokens without a cache, copy by copy, states averaged."""
    H, found = drafter.options.num_heads, []
    for tokens_HD in drafter.module().detach():
        ids = torch.tensor([[*text[:num_read], *[0] * H]])
        masks = target.lm.document_masks(torch.zeros_like(ids))
        feed = Feed(ids, torch.arange(ids.shape[1])[None], masks, (target.spec.num_layers,))
        out = target.lm.run(replace(feed, residual_BTD=tokens_HD[None]), None)
        found.append(out.taps[target.spec.num_layers][0, -H:])
    return torch.stack(found).mean(0) @ drafter.head_weight().T


@pytest.mark.parametrize("model", ["qwen3", "gpt_neox"])
@pytest.mark.parametrize(("copies", "behind"), [(1, None), (2, None), (2, 1)])
def test_guesses_are_what_prompt_tokens_behind_the_text_say(
    make_target: Any, model: str, copies: int, behind: int | None
) -> None:
    """In every round, batched and with rollbacks: the forward that verified a tree says the same
    at its prompt tokens as a plain forward of the text with those prompt tokens behind it."""
    target = make_target(model)
    chances = ((0.4, 0.2), (0.3,))
    drafter = made(target, num_heads=2, copies=copies, chances=chances, behind_each=behind)
    ran = decode(target, drafter, slots=2, tokens=12, length=2, nodes=14)
    assert ran.answers == decode(target, None, tokens=12).answers
    checked = 0
    for outcome in ran.outcomes:
        tree, view = outcome.tree, outcome.view
        for b, tokens in enumerate(view.tokens):
            at = int(view.kept_len_B[b])
            for node in range(tree.num_nodes - tree.num_probes):
                if tree.valid_BN[b, node] and tree.parent_BN[b, node] == -1:
                    best_HC = said_behind(target, drafter, list(tokens), at).topk(2).indices
                    assert tree.token_BN[b, node] == best_HC[0, tree.rank_BN[b, node]]
                    checked += 1
    assert checked > 10


def test_extra_rows_are_read_alike_by_every_forward(make_model: Any) -> None:
    """Our forward, its compiled step and transformers' module, with embeddings at the last rows."""
    model = make_model("qwen3")
    fast: LanguageModel = Target.from_model(model).lm
    ids, extra_12D = torch.tensor([[5, 3, 9, 0, 0]]), torch.randn(1, 2, fast.spec.hidden_size)
    taps, position = (0, fast.spec.num_layers), torch.arange(5)[None]

    def read(lm: LanguageModel, *, with_kv: bool) -> list[torch.Tensor]:
        masks = lm.chain_masks(torch.zeros(1, dtype=torch.long), 5, 5)
        kv = lm.new_kv(1, 8) if with_kv else None
        if kv is not None:
            kv.begin((0,), torch.tensor([0]), torch.tensor([0]), 5, 5, 0)
        out = lm.run(Feed(ids, position, masks, taps, residual_BTD=extra_12D), kv)
        assert torch.equal(out.taps[0][:, 3:], extra_12D)
        assert out.logits_BTV is not None
        return [out.logits_BTV, *out.taps.values()]

    with torch.no_grad():
        expected = read(fast, with_kv=False)
        others = [read(fast, with_kv=True), read(HfLM(model), with_kv=True)]
    for found in others:
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, atol=1e-4)


def test_training_scores_what_serving_reads(make_target: Any, capture_batch: Any) -> None:
    """With one token to predict, the loss is made of what prompt tokens behind the text say."""
    target, text = make_target("qwen3"), [3, 1, 4, 1, 5, 9, 2, 6]
    drafter = made(target, num_heads=2, copies=2, loss="ce", decay=0.5)
    ids = torch.tensor([text])
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[0, -1] = True
    batch = TrainBatch(ids, mask, torch.zeros_like(ids), torch.arange(len(text))[None])
    out = drafter.loss(capture_batch(target, drafter, batch))
    said = [said_behind(target, drafter, text, len(text) - 2 - i)[i] for i in range(2)]
    served = -sum(0.5**i * float(one.log_softmax(-1)[text[-1]]) for i, one in enumerate(said))
    assert float(out.sum.detach()) == pytest.approx(served, rel=1e-4)


def test_only_the_embeddings_learn_and_they_learn_to_look_ahead(
    make_target: Any, make_batch: Any, train_a_little: Any
) -> None:
    """The first guess beats embeddings as they begin, nothing else moves."""
    target = make_target(num_layers=2, vocab=24)
    drafter, ahead = made(target, num_heads=2, copies=2), list[float]()
    before = [weight.clone() for weight in target.lm.module.parameters()]
    assert {n: tuple(p.shape) for n, p in drafter.trainable().items()} == {"tokens": (4, 32)}
    for steps in (0, 60):
        if steps:
            train_a_little(target, drafter, steps)
        torch.manual_seed(1)
        metrics = drafter.loss(make_batch(target, drafter)).metrics
        ahead.append(float(metrics["alpha"][0] / metrics["alpha"][1]))
    assert ahead[1] > ahead[0] + 0.03
    after = target.lm.module.parameters()
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_loading_keeps_what_was_trained(make_target: Any) -> None:
    """Fresh ones begin as rows of the vocabulary; binding again changes nothing."""
    target = make_target()
    drafter = made(target)
    rows_VD, first_D = target.borrowed().embedding_VD, drafter.module()[0, 0].detach()
    assert bool((rows_VD - first_D).abs().amax(1).min() < 1e-5)
    other = Ppd(PpdOptions(), target.spec, None)
    stored = {name: weight + 1 for name, weight in drafter.tensors().items()}
    other.load_tensors(stored)
    other.bind(target.borrowed())
    assert torch.equal(other.module.tokens, stored["tokens"])


def test_the_plan_is_the_best_way_to_spend_the_rows() -> None:
    """Enough rows: all prompt tokens everywhere. Few: where the text is likely to go on. More are
    never worth less, and copies cost."""
    plan = plan_trees(CHANCES, 100)
    assert all(set(tree.prompts) == {3} for tree in plan.trees[:2])
    assert [max(map(len, tree.paths), default=0) for tree in plan.trees] == [0, 1, 2, 3]
    gains = [plan_trees(CHANCES, nodes).tokens for nodes in (1, 2, 4, 8, 16, 32)]
    assert gains == sorted(gains)
    assert gains[0] < gains[-1] < 1 + 0.7 + 0.7 * 0.6 + 0.7 * 0.6 * 0.3 + 1e-9
    for nodes in (4, 8, 16):
        plan = plan_trees(CHANCES, nodes)
        assert all(len(tree.paths) + sum(tree.prompts) <= nodes for tree in plan.trees)
        assert plan_trees(CHANCES, nodes, 2).tokens <= plan.tokens + 1e-9


@pytest.mark.parametrize("behind", [1, 2, 3])
def test_even_trees_spend_the_same_rows_and_a_plan_is_worth_more(behind: int) -> None:
    """The root and every candidate have as many prompt tokens; one candidate more has no room."""
    for nodes in (4, 8, 16):
        even, plan = even_trees(CHANCES, nodes, behind), plan_trees(CHANCES, nodes)
        assert all(set(tree.prompts) == {behind} for tree in even.trees)
        rows = [len(tree.paths) + sum(tree.prompts) for tree in even.trees]
        assert nodes - 1 - behind < max(rows) <= nodes
        assert even.tokens < plan.tokens - 0.02
    assert even_trees(CHANCES, 2, 3).trees[1].prompts == (2,)


@pytest.mark.parametrize(
    "plan", [plan_trees(CHANCES, 8), even_trees(CHANCES, 8, 1), even_trees(CHANCES, 8, 2)]
)
def test_the_long_run_is_what_the_plan_says(plan: TreePlan) -> None:
    """Rounds drawn by those chances."""
    torch.manual_seed(0)
    state, emitted, rounds = 0, 0, 20000
    draws = torch.rand(rounds, 3).tolist()
    for draw in draws:
        tree, path = plan.trees[state], ()
        for level, one in enumerate(draw):
            for rank, chance in enumerate(CHANCES[level]):
                if one < chance and (*path, rank) in tree.paths:
                    path = (*path, rank)
                    break
                one -= chance
            if len(path) == level:
                break
        emitted += 1 + len(path)
        state = tree.prompts[0 if not path else 1 + tree.paths.index(path)]
    assert emitted / rounds == pytest.approx(plan.tokens, abs=0.02)


def test_chances_of_another_number_of_prompt_tokens_are_refused() -> None:
    with pytest.raises(RecipeError, match="how often its ranks"):
        PpdOptions(num_heads=2, chances=((0.5,),))
