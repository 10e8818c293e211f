"""DReSD: meaning instead of words, the approximate index against the exact one, the store."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specctl.core.drafter import Budget, Space
from specctl.core.errors import IntegrityError, RecipeError, ResourceError
from specctl.drafters.training_free.dresd import DenseIndex, Dresd, DresdOptions, Projection
from specctl.drafters.training_free.rest import Rest, RestOptions
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.datastore import teach
from specctl_testing.drafters.following import CPU, accepted

SAME, OTHER = 4, 5  # kinds of context: words 10 to 19 mean the one, 20 to 29 the other
ROOT = 3


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    found: Target = make_target(num_layers=2, vocab=96)
    return found


def state_of(word: int, seed: int, width: int) -> Tensor:
    """Synonyms have similar states."""
    kind = torch.randn(width, generator=torch.Generator().manual_seed(word // 10))
    return kind + 0.4 * torch.randn(width, generator=torch.Generator().manual_seed(1000 + seed))


def told(word: int, follows: Sequence[int], seed: int, width: int) -> tuple[list[int], Tensor]:
    """A text: a word, the root, what follows; and the states of its places."""
    ids = [word, ROOT, *follows]
    return ids, torch.stack([state_of(token, seed + i, width) for i, token in enumerate(ids)])


def dresd_of(target: Target, **options: Any) -> Dresd:
    return Dresd(
        DresdOptions(**{"index": "exact", "own": False, "dims": 16, **options}), target.spec
    )


def filled(target: Target, **options: Any) -> Dresd:
    drafter, width = dresd_of(target, **options), target.spec.hidden_size
    texts = [told(10 + i, [50, 51, 52], 10 * i, width) for i in range(4)]
    texts += [told(20 + i, [60, 61, 62], 500 + 10 * i, width) for i in range(8)]
    taps = [{target.spec.num_layers: states} for _, states in texts]
    drafter.learn([ids for ids, _ in texts], taps)
    return drafter


def test_it_finds_a_context_in_other_words_which_exact_matching_misses(
    target: Target, round_view: Any
) -> None:
    drafter, budget = filled(target, neighbours=4), Budget(3, 3)
    text = [77, 17, ROOT]  # a word of the first kind that no text of the store holds
    state = drafter.open(Space(1, 16, 8, CPU, torch.float32))
    states = torch.stack([state_of(token, 900 + token, target.spec.hidden_size) for token in text])
    state.start(0, text, {target.spec.num_layers: states[:-1]})
    dense = state.propose(round_view({0: text}), budget)
    assert accepted(dense, 0, [50, 51, 52]) == 3
    for least, found in ((2, 0), (1, 0)):  # two words never stood there; one means mostly the other
        exact = Rest(RestOptions(min_match=least, own=False), target.spec)
        ids = drafter.corpus_R.tolist()
        exact.learn([ids])
        view = round_view({0: text})
        place = exact.open(Space(1, 16, 8, CPU, torch.float32))
        place.start(0, text, {})
        assert accepted(place.propose(view, budget), 0, [50, 51, 52]) == found


def test_neighbours_whose_next_token_differs_are_left_out(target: Target, round_view: Any) -> None:
    drafter = filled(target)
    state = drafter.open(Space(1, 16, 8, CPU, torch.float32))
    text = [17, 9]  # 9 never follows in the store
    state.start(0, text, {target.spec.num_layers: state_of(17, 1, target.spec.hidden_size)[None]})
    assert state.propose(round_view({0: text}), Budget(8, 4)).num_nodes == 0


def test_projection_gives_unit_vectors_and_keeps_the_strongest_directions() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_NC = torch.randn(400, 3, generator=generator)
    mix_CD = torch.randn(3, 20, generator=generator)
    state_RD = 5.0 + hidden_NC @ mix_CD + 0.01 * torch.randn(400, 20, generator=generator)
    made = Projection.fit(state_RD, 3)
    key_RO = made(state_RD)
    torch.testing.assert_close(key_RO.norm(dim=-1), torch.ones(400))
    scaled_RD = (state_RD - state_RD.mean(0)) / state_RD.std(0, correction=0)
    whole_NN = torch.nn.functional.normalize(scaled_RD, dim=-1)
    assert float((key_RO @ key_RO.T - whole_NN @ whole_NN.T).abs().max()) < 0.05


def test_the_approximate_index_finds_nearly_all_that_the_exact_one_does() -> None:
    generator = torch.Generator().manual_seed(1)
    key_RO = torch.nn.functional.normalize(torch.randn(3000, 16, generator=generator), dim=-1)
    places = np.arange(3000) * 2
    exact, graph = DenseIndex(key_RO, places, "exact"), DenseIndex(key_RO, places, "hnsw")
    again = DenseIndex(key_RO, places, "hnsw")
    hits = 0
    for query_O in torch.nn.functional.normalize(torch.randn(60, 16, generator=generator), dim=-1):
        found = graph.nearest(query_O, 10)
        assert found == again.nearest(query_O, 10), "equal stores made unequal graphs"
        hits += len(set(found) & set(exact.nearest(query_O, 10)))
    assert hits > 0.9 * 600


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "usearch.index", None)
    with pytest.raises(ResourceError, match=r"specctl-toolkit\[dense\]"):
        DenseIndex(torch.eye(4), np.arange(4), "hnsw")


def test_the_rows_own_states_tell_two_uses_of_a_word_apart(target: Target, round_view: Any) -> None:
    width, rng = target.spec.hidden_size, random.Random(0)
    text = [11, ROOT, 50, 51, 21, ROOT, 60, 61, 22, ROOT, 60, 61, rng.randrange(70, 90), 12, ROOT]
    states = torch.stack([state_of(token, i, width) for i, token in enumerate(text)])
    state = dresd_of(target, own=True).open(Space(1, 32, 8, CPU, torch.float32))
    state.start(0, text, {target.spec.num_layers: states[:-1]})
    tree = state.propose(round_view({0: text}), Budget(2, 2))
    assert accepted(tree, 0, [50, 51]) == 2


def test_a_store_round_trips_and_one_of_another_shape_is_refused(target: Target) -> None:
    drafter = filled(target)
    again = dresd_of(target)
    again.load_tensors(drafter.tensors())
    assert again.index is not None
    assert drafter.index is not None
    query_O = drafter.index.key_RO[5]
    assert again.index.nearest(query_O, 4) == drafter.index.nearest(query_O, 4)
    whole = drafter.tensors()
    cut = {**whole, "keys": whole["keys"][:-1]}
    for broken in (cut, {"corpus": whole["corpus"]}):
        with pytest.raises(IntegrityError, match="dense store"):
            dresd_of(target).load_tensors(broken)


def test_options_that_retrieve_nothing_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"index.*one of hnsw"):
        DresdOptions(index="annoy")


def test_taught_what_the_target_writes_it_drafts_that(target: Target) -> None:
    sampling = Sampling(max_new_tokens=24, ignore_eos=True)
    prompt = [3, 14, 15, 9, 26, 5]
    written = generate(target, [prompt], sampling=sampling).outputs[0].token_ids
    unread, read = dresd_of(target), dresd_of(target)
    teach(read, target, [[*prompt, *written]])
    policy = make_policy({"policy": "direct", "length": 5, "nodes": 5})
    drafted = [
        generate(target, [prompt], drafter=one, sampling=sampling, policy=policy)
        for one in (unread, read)
    ]
    assert [tuple(made.outputs[0].token_ids) for made in drafted] == [tuple(written)] * 2
    assert drafted[0].stats.accepted == 0
    assert drafted[1].stats.accepted >= 12
