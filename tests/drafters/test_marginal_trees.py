"""Trees from the marginals of real drafters: the same text, the right scores, more accepted."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.drafter import Budget, Space
from specctl.core.errors import RecipeError
from specctl.core.tree import DraftTree
from specctl.drafters import families, family
from specctl.recipes.load import load_recipe
from specctl.runtime.policies import policies_of
from specctl.runtime.policies.base import GrowRequest
from specctl.runtime.policies.marginal_tree import MarginalTree
from specctl.runtime.sampling.noise import RoundNoise
from specctl.runtime.sampling.sampling import Sampling, SamplingBatch
from specctl.runtime.target.target import Target
from specctl.train.assemble import served_family
from specctl_testing.drafters.head_cases import make_heads, nearly_markov
from specctl_testing.drafters.parallel_runs import decode

SIZE, TEXT = 12, [3, 1, 4, 1, 5, 9, 2, 6]
PROMPTS = (TEXT, [7], [11, 2, 11, 2], [5, 5])
DRAFTERS: dict[str, dict[str, Any]] = {
    "dflash": {"layers": 2},
    "p-eagle": {"layers": 1},
    "medusa": {},
    "blockwise": {"rescore": "ngram"},
    "dspark": {"layers": 2},
}


@pytest.fixture(scope="module")
def target(make_model: Any) -> Target:
    return nearly_markov(make_model, vocab=SIZE)


@pytest.fixture(scope="module")
def make(target: Target, train_a_little: Any) -> Any:
    """A drafter of three tokens that knows a little."""

    def made(name: str, **options: Any) -> Any:
        given = {"num_heads": 3, **DRAFTERS[name], **options}
        drafter = make_heads(target, name, **given)
        train_a_little(target, drafter, 20)
        return drafter

    return made


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_text_is_the_targets_and_more_of_the_tree_is_accepted(
    target: Target, make: Any, name: str
) -> None:
    drafter = make(name)
    alone = decode(target, None, PROMPTS, tokens=24, slots=3)
    tree = decode(
        target, drafter, PROMPTS, tokens=24, slots=3, length=3, nodes=24, policy="marginal-tree"
    )
    chain = decode(target, drafter, PROMPTS, tokens=24, slots=3, length=3, policy="chain")
    assert tree.answers == alone.answers == chain.answers
    assert tree.tau > chain.tau > 1


def grown(
    target: Target, drafter: Any, drive: Any, round_view: Any, policy: MarginalTree
) -> DraftTree:
    """The tree of the first round behind TEXT."""
    state = drafter.open(Space(1, 64, 64, torch.device("cpu"), torch.float32))
    drive(target, drafter).start(state, 0, TEXT)
    sampling = SamplingBatch([Sampling()], SIZE)
    noise = RoundNoise([0], [0], [0])
    view = round_view({0: TEXT})
    return policy.grow(GrowRequest(state, view, Budget(64, 64), sampling, noise))


def chances(target: Target, drafter: Any, drive: Any, path: tuple[int, ...]) -> Tensor:
    """[V, ...]: log-chances of every place along that path, drafted token by token."""
    found: Tensor = drive(target, drafter).chain_logits([*TEXT, *path], len(TEXT))
    return found.log_softmax(-1)


@pytest.mark.parametrize("name", ["dflash", pytest.param("dspark", marks=pytest.mark.proof)])
def test_the_nodes_are_the_likeliest_prefixes_of_all(
    target: Target, make: Any, drive: Any, round_view: Any, name: str
) -> None:
    """Every prefix of up to three tokens, scored as the drafter scores it token by token: by the
    marginals of a block, or behind the token before where a correction reads that."""
    drafter, nodes = make(name), 20
    tree = grown(target, drafter, drive, round_view, MarginalTree(3, nodes))
    worth: dict[tuple[int, ...], float] = {}
    for path in product(range(SIZE), repeat=2):
        log_TV = chances(target, drafter, drive, path)
        first, second = float(log_TV[0, path[0]]), float(log_TV[1, path[1]])
        worth[path[:1]], worth[path] = first, first + second
        worth |= {(*path, token): first + second + float(log_TV[2, token]) for token in range(SIZE)}
    best = sorted(worth.items(), key=lambda item: -item[1])[:nodes]
    assert tree.estimate_BN is not None
    found = {
        tuple(tree.path_to(0, node + 1)): float(tree.estimate_BN[0, node].log())
        for node in range(nodes)
    }
    assert found == pytest.approx(dict(best), abs=1e-4)


def test_a_tree_is_one_pass_of_the_block_and_no_deeper_than_it(
    target: Target, make: Any, drive: Any, round_view: Any
) -> None:
    drafter = make("dflash")
    seen: list[int] = []
    handle = drafter.net.layers[0].register_forward_hook(lambda *_: seen.append(1))
    tree = grown(target, drafter, drive, round_view, MarginalTree(16, 40))
    handle.remove()
    assert (len(seen), tree.depth) == (1, 3)


def test_drafters_that_read_their_own_tokens_refuse_it_by_name() -> None:
    grows = {name for name, found in families().items() if "marginal-tree" in policies_of(found)}
    assert set(DRAFTERS) <= grows
    assert grows.isdisjoint({"eagle3", "eagle", "small-lm", "hydra", "recurrent", "prompt-lookup"})
    for name in ("eagle3", "distill", "hydra"):
        recipe = load_recipe(name)
        serve = recipe.serve.model_copy(update={"policy": "marginal-tree"})
        with pytest.raises(RecipeError, match="cannot be grown by policy marginal-tree"):
            served_family(recipe.drafter, recipe.train.joint, serve)
    assert family("dflash").policies[0] == "direct"
