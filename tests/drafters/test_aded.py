"""ADED: the fading model, the makers of trees, and what adapting brings."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from statistics import mean, stdev
from typing import Any

import pytest
import torch

from specctl.core.drafter import Budget, Space
from specctl.core.errors import RecipeError
from specctl.drafters.retrieval.best_first import Guess, best_first
from specctl.drafters.retrieval.store import NgramStore
from specctl.drafters.retrieval.trie import Trie
from specctl.drafters.states.ngram_distributions import learn, learn_text
from specctl.drafters.training_free.aded import Aded, AdedOptions, Puct, most_visited
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target

Path = tuple[int, ...]
LAW = {0: (0.6, 0.3), 1: (0.9, 0.05), 2: (0.2, 0.2)}  # chances of tokens 1 and 2 behind each token


def guesses(path: Path) -> Iterable[Guess[Path]]:
    for token, chance in enumerate(LAW[path[-1] if path else 0], start=1):
        yield Guess(token, chance, (*path, token))


def value(trie: Trie) -> float:
    return sum(trie.estimates)


def all_paths(depth: int) -> list[Path]:
    level: list[Path] = [()]
    found: list[Path] = []
    for _ in range(depth):
        level = [(*path, token) for path in level for token in (1, 2)]
        found += level
    return found


def chance_of(path: Path) -> float:
    product = 1.0
    for before, token in zip((0, *path), path, strict=False):
        product *= LAW[before][token - 1]
    return product


def test_best_first_is_the_best_of_all_trees_of_its_size() -> None:
    trie = best_first(guesses, (), Budget(4, 3))
    connected = [
        tree
        for tree in combinations(all_paths(3), 4)
        if all(len(path) == 1 or path[:-1] in tree for path in tree)
    ]
    assert len(connected) > 20
    assert value(trie) == pytest.approx(max(sum(map(chance_of, tree)) for tree in connected))


def test_many_walks_find_nearly_the_best_tree_and_few_do_not() -> None:
    budget = Budget(12, 5)
    best = value(best_first(guesses, (), budget))
    many, few = (value(most_visited(guesses, (), budget, Puct(n))) for n in (600, 12))
    assert 0.95 * best < many <= best + 1e-9
    assert few < many


def test_the_papers_tree_search_is_the_default(
    make_target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, asked = make_target(num_layers=2), list[str]()
    for name, maker in (("most_visited", most_visited), ("best_first", best_first)):

        def spy(*given: Any, name: str = name, maker: Any = maker) -> Trie:
            asked.append(name)
            return maker(*given)

        monkeypatch.setattr(f"specctl.drafters.training_free.aded.{name}", spy)
    for options in (AdedOptions(), AdedOptions(maker="best-first")):
        state = Aded(options, target.spec).open(
            Space(1, 64, 16, torch.device("cpu"), torch.float32)
        )
        state.start(0, [3, 1, 4, 1, 5, 3, 1], {})
        assert len(state.draft_row(0, [3, 1, 5, 3, 1], Budget(4, 3)).tokens) > 0
    assert asked == ["most_visited", "best_first"]


def test_visited_nodes_form_a_tree_with_path_probabilities() -> None:
    trie = most_visited(guesses, (), Budget(6, 4), Puct(100))
    paths: list[Path] = []
    for node, parent in enumerate(trie.parents):
        assert parent < node
        paths.append((*(paths[parent] if parent >= 0 else ()), trie.tokens[node]))
        assert trie.estimates[node] == pytest.approx(chance_of(paths[-1]))
    assert len(set(paths)) == len(paths) == 6


def test_a_model_moves_towards_what_the_target_thinks_and_forgets_the_rest() -> None:
    store = NgramStore()
    learn(store, (5,), (1, 2), (0.8, 0.1), keep=0.5)
    learn(store, (5,), (2, 3), (0.6, 0.4), keep=0.5)
    weights = {found.ids[0]: found.weight for found in store.get((5,))}
    assert weights == pytest.approx({1: 0.4, 2: 0.35, 3: 0.2})


def test_a_text_is_read_as_certain_and_its_newest_word_counts_most() -> None:
    store = NgramStore()
    learn_text(store, [4, 5, 6, 4, 5, 7], range(2, 0, -1), keep=0.5)
    assert [(f.ids[0], f.weight) for f in store.get((4, 5))] == [(7, 0.5), (6, 0.5)]
    assert [f.ids[0] for f in store.get((5,))] == [7, 6]


def taus(
    target: Target, nodes: int = 8, temperature: float = 0.0, **options: Any
) -> list[tuple[int, int]]:
    """Tokens and rounds of twelve prompts, four at a time."""
    drafter = Aded(AdedOptions(**options), target.spec)
    policy = make_policy({"policy": "direct", "length": 6, "nodes": nodes})
    engine = Engine(target, drafter, policy, num_slots=4)
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 48, (6,), generator=draw).tolist() for _ in range(12)]
    sampling = Sampling(temperature=temperature, seed=0, max_new_tokens=48, ignore_eos=True)
    done = engine.run([Request(tuple(prompt), sampling) for prompt in prompts])
    return [(c.stats.tokens, c.stats.rounds) for c in done]


def tau(target: Target, nodes: int = 8, **options: Any) -> float:
    tokens, rounds = zip(*taus(target, nodes, **options), strict=True)
    return sum(tokens) / sum(rounds)


@pytest.mark.proof
def test_an_adaptive_tree_beats_a_fixed_one_of_as_many_nodes(make_target: Any) -> None:
    targets = [make_target(num_layers=2, vocab=48, seed=seed) for seed in (0, 1)]
    adaptive, fixed = (
        sum(tau(target, 12, maker=maker, scope="process") for target in targets)
        for maker in ("best-first", "ranks")
    )
    assert adaptive > 1.02 * fixed


@pytest.mark.proof
def test_an_adaptive_tree_beats_a_fixed_one_when_sampling(make_target: Any) -> None:
    apart = []
    for target in (make_target(num_layers=2, vocab=48, seed=seed) for seed in (0, 1)):
        adaptive, fixed = (
            [t / r for t, r in taus(target, 12, 1.0, maker=name, scope="process")]
            for name in ("best-first", "ranks")
        )
        apart += [a - b for a, b in zip(adaptive, fixed, strict=True)]
    assert mean(apart) > 2 * stdev(apart) / len(apart) ** 0.5


def test_a_model_that_adapts_beats_one_that_only_read_the_prompt(make_target: Any) -> None:
    target = make_target(num_layers=2, vocab=48)
    assert tau(target) > tau(target, keep=1.0) + 0.1


def test_a_request_profits_from_earlier_ones_of_its_kind_if_they_are_shared(
    make_target: Any,
) -> None:
    target = make_target(num_layers=2, vocab=48)
    request = Request((3, 1, 4, 1, 5), Sampling(max_new_tokens=48, ignore_eos=True))
    first, second = [], []
    for scope in ("process", "request"):
        policy = make_policy({"policy": "direct", "length": 6, "nodes": 12})
        engine = Engine(target, Aded(AdedOptions(scope=scope), target.spec), policy)
        rounds = [done.stats.rounds for done in engine.run([request, request])]
        first.append(rounds[0])
        second.append(rounds[1])
    assert second[0] < 0.9 * first[0]
    assert second[1] == first[1] == first[0]


def test_unknown_makers_and_scopes_are_refused(make_target: Any) -> None:
    with pytest.raises(RecipeError, match="maker"):
        AdedOptions(maker="mtcs")
    with pytest.raises(RecipeError, match="scope"):
        Aded(AdedOptions(scope="disk"), make_target(num_layers=2).spec)
