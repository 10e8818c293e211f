"""RASD: what fusion and pruning gain where the truth is known, and the draft model's memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.drafter import Budget, DraftState, RoundView, Space
from specctl.core.errors import RecipeError
from specctl.core.tree import DraftTree
from specctl.drafters.lm.rasd import Rasd, RasdOptions, RasdState, _RasdRound
from specctl.drafters.retrieval.trie import Trie, counted, pack
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies.fused import Fused, fuse
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl_testing.runtime.states import opened_states

V = 12
CPU = torch.device("cpu")
Distribution = Callable[[Sequence[int]], list[float]]


def chain_distribution(seed: int, sharpness: float) -> Tensor:
    """[V, V, V]: an order-2 Markov target."""
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(V, V, V, generator=generator)).softmax(-1)


def write(distribution_VVV: Tensor, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    text = [0, 1]
    while len(text) < length:
        text.append(
            int(torch.multinomial(distribution_VVV[text[-2], text[-1]], 1, generator=generator))
        )
    return text


def model_trie(distribution: Distribution, text: Sequence[int], nodes: int, depth: int) -> Trie:
    """Best-first tree of a model's distribution; estimates are its path probabilities."""
    trie, paths = Trie(), {-1: list(text)}
    frontier = [(-1, 1.0)]
    while frontier and len(trie) < 4 * nodes:
        at, chance = max(frontier, key=lambda entry: entry[1])
        frontier.remove((at, chance))
        if at >= 0 and trie.depths[at] >= depth:
            continue
        for token, probability in enumerate(distribution(paths[at])):
            node = trie.add(at, token, chance * probability)
            paths[node] = [*paths[at], token]
            frontier.append((node, chance * probability))
    return trie


def expected_accepted(
    tree: DraftTree, row: int, distribution_VVV: Tensor, text: Sequence[int]
) -> float:
    """Exact: the sum over nodes of the target's probability of their path."""
    total, at = 0.0, {-1: (1.0, list(text))}
    for node in range(tree.num_nodes):
        if bool(tree.valid_BN[row, node]):
            chance, known = at[int(tree.parent_BN[row, node])]
            token = int(tree.token_BN[row, node])
            chance *= float(distribution_VVV[known[-2], known[-1], token])
            at[node] = (chance, [*known, token])
            total += chance
    return total


def retrieved(store: Sequence[int], text: Sequence[int], length: int, span: int) -> Trie:
    """Counts of what followed the last `length` tokens in the store."""
    tail = list(text[len(text) - length :])
    ends = [i + length for i in range(len(store) - length) if list(store[i : i + length]) == tail]
    return counted([store[end : end + span] for end in ends])


def test_fusion_expects_more_than_either_source_at_equal_nodes() -> None:
    """The model knows every token's habits but not their context; the store knows the context, but
    only where it has seen it."""
    distribution_VVV = chain_distribution(0, 3.0)
    store = write(distribution_VVV, 500, 1)
    blurred_VV = distribution_VVV.mean(0)

    def model(text: Sequence[int]) -> list[float]:
        row: list[float] = blurred_VV[text[-1]].tolist()
        return row

    budget, text = Budget(8, 3), write(distribution_VVV, 80, 2)
    gains = {"model": 0.0, "store": 0.0, "fused": 0.0}
    for end in range(10, 80):
        own = pack([model_trie(model, text[:end], 8, 3)], budget, CPU)
        found = pack([retrieved(store, text[:end], 2, 3)], budget, CPU)
        fused = fuse([own, found], budget).tree
        assert fused.num_nodes <= 8
        for name, tree in (("model", own), ("store", found), ("fused", fused)):
            gains[name] += expected_accepted(tree, 0, distribution_VVV, text[:end])
    assert gains["fused"] > 1.05 * max(gains["model"], gains["store"])


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    found: Target = make_target(num_layers=2, vocab=24)
    return found


def rasd_of(target: Target, **options: Any) -> Rasd:
    torch.manual_seed(0)
    return Rasd(RasdOptions(**options), target.spec)


def test_what_the_model_rules_out_is_cut_and_the_room_goes_to_better_nodes(target: Target) -> None:
    """Half of the store is of another kind. The model's likeliest tokens tell the two apart."""
    distribution_VVV, other_VVV = chain_distribution(3, 3.0), chain_distribution(4, 3.0)
    store = [
        t
        for i in range(6)
        for distribution in (distribution_VVV, other_VVV)
        for t in write(distribution, 120, 20 + i)
    ]
    blurred_VV = distribution_VVV.mean(0)
    likely = [set(row) for row in blurred_VV.topk(6).indices.tolist()]
    state = rasd_of(target, keep=6).open(Space(1, 64, 8, CPU, torch.float32))
    budget, text = Budget(5, 3), write(distribution_VVV, 80, 5)
    whole = pruned = 0.0
    for end in range(10, 80):
        trie = retrieved(store, text[:end], 1, 3)
        known = [likely[text[end - 1]], *likely]
        child = {(entry, token): 1 + token for entry in range(V + 1) for token in range(V)}
        state._seen = _RasdRound([known], [child])
        kept = trie.part(state._plausible(trie, 0))
        assert len(kept) <= len(trie)
        tree, less = pack([trie], budget, CPU), pack([kept], budget, CPU)
        assert less.num_nodes <= tree.num_nodes
        whole += expected_accepted(tree, 0, distribution_VVV, text[:end])
        pruned += expected_accepted(less, 0, distribution_VVV, text[:end])
    assert pruned > 1.05 * whole


def repeating(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(24) for _ in range(12)] * 3


def serve(
    target: Target, drafter: Rasd, prompts: Sequence[Sequence[int]], rounds: int
) -> tuple[Engine, DraftState]:
    """An engine after some rounds with policy fused, and its drafter's state; all rows go on."""
    states = opened_states(drafter)
    engine = Engine(target, drafter, Fused(length=4, nodes=10, beam=2), num_slots=len(prompts))
    sampling = Sampling(max_new_tokens=60, ignore_eos=True)
    engine.open(len(prompts[0]) + 60)
    for index, prompt in enumerate(prompts):
        engine.submit(index, Request(tuple(prompt), sampling))
    for _ in range(rounds):
        engine.step()
    return engine, states[0]


@pytest.mark.parametrize("first", [False, True])
def test_the_models_memory_is_true_after_retrieved_nodes_were_accepted(
    target: Target, drive: Any, first: bool
) -> None:
    drafter = rasd_of(target, keep=None, first=first)
    engine, state = serve(target, drafter, [repeating(1), repeating(2)], 9)
    round = engine.scheduler.next_round()
    assert isinstance(state, RasdState)
    assert round is not None
    assert any(row.stats.accepted for row in engine.rows), "nothing retrieved was accepted"
    with torch.inference_mode():
        logits_BK = state.root(round.view)
    for row, tokens in enumerate(round.view.tokens):
        fresh_K = drive(target, drafter).chain_logits(list(tokens), len(tokens))[0]
        torch.testing.assert_close(logits_BK[row], fresh_K, atol=1e-4, rtol=1e-4)


def test_where_retrieval_answers_for_all_rows_the_model_rests(target: Target) -> None:
    class Counting(RasdState):
        roots = 0

        def root(self, view: RoundView) -> Tensor:
            type(self).roots += 1
            return super().root(view)

    class Drafter(Rasd):
        def open(self, space: Space) -> RasdState:
            return Counting(self, space)

    torch.manual_seed(0)
    for first in (False, True):
        Counting.roots = 0
        serve(target, Drafter(RasdOptions(first=first), target.spec), [repeating(3)], 8)
        assert (Counting.roots < 8) == first


def test_a_drafter_that_does_not_retrieve_is_refused(target: Target, make_model: Any) -> None:
    from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions

    drafter = SmallLm(SmallLmOptions(), target.spec)
    with pytest.raises(RecipeError, match="retrieves"):
        Engine(target, drafter, Fused()).run([Request((1, 2), Sampling(max_new_tokens=4))])


def test_a_store_is_loaded_with_the_weights(target: Target) -> None:
    drafter = rasd_of(target)
    drafter.learn([[1, 2, 3, 4], [5, 6]])
    again = rasd_of(target)
    again.load_tensors(drafter.tensors())
    assert again.source.corpus_R.tolist() == [1, 2, 3, 4, -1, 5, 6, -1]
    with pytest.raises(RuntimeError, match="Missing"):
        again.load_tensors({"corpus": drafter.tensors()["corpus"]})
