"""Drafting with the target's own layers: all of them are the target, useless ones are found out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.errors import RecipeError
from specctl.drafters import family
from specctl.drafters.self_speculation.layer_skip import LayerSkip
from specctl.drafters.self_speculation.skip_layers import (
    SkipLayers,
    SkipLayersOptions,
    search,
    worth,
)
from specctl.drafters.self_speculation.swift import LayerSearch, Swift, SwiftOptions, SwiftState
from specctl.drafters.states.borrowed_state import FixedState, shadow_logits
from specctl.runtime.target.target import Target
from specctl.train.datastore import teach
from specctl_testing.drafters.parallel_runs import decode

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
IDLE = {"attention": (1, 4), "mlp": (2, 4)}


@pytest.fixture(scope="module")
def idle_target(make_model: Any) -> Target:
    """Six layers, of which two attentions and two MLPs put out nothing."""
    model = make_model("llama", num_layers=6)
    with torch.no_grad():
        for layer in IDLE["attention"]:
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
        for layer in IDLE["mlp"]:
            model.model.layers[layer].mlp.down_proj.weight.zero_()
    return Target.from_model(model)


def without(target: Target, attention: tuple[int, ...], mlp: tuple[int, ...]) -> SkipLayers:
    options = SkipLayersOptions(skip_attention=attention, skip_mlp=mlp)
    drafter = SkipLayers(options, target.spec, None)
    drafter.bind(target.borrowed())
    return drafter


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_with_nothing_left_out_it_is_the_target(make_target: Any, drive: Any, kind: str) -> None:
    """Also behind drafted tokens, and where another layer is left out it is not."""
    target = make_target(kind)
    ids_1S = torch.tensor([TEXT])
    masks = target.lm.document_masks(torch.zeros_like(ids_1S))
    with torch.no_grad():
        out = target.lm.dense(ids_1S, torch.arange(len(TEXT))[None], masks)
    assert out.logits_BTV is not None
    drafted_TV = drive(target, without(target, (), ())).chain_logits(TEXT, 6)
    torch.testing.assert_close(drafted_TV, out.logits_BTV[0, 5:], rtol=1e-4, atol=1e-4)
    fewer_TV = drive(target, without(target, (), (1,))).chain_logits(TEXT, 6)
    assert not torch.allclose(fewer_TV, drafted_TV, atol=0.1)


def test_sliding_windows_hold_for_drafts(make_target: Any) -> None:
    """Two rows of different length, drafted by the whole: every token is accepted."""
    target = make_target("gemma2")
    ran = decode(target, without(target, (), ()), slots=2, policy="chain", length=4, tokens=20)
    assert ran.tau == 5


def test_an_exit_reads_the_state_of_its_layer(make_target: Any, drive: Any, features: Any) -> None:
    target = make_target()
    drafter = LayerSkip(family("layer-skip").options(layers=2), target.spec, None)
    drafter.bind(target.borrowed())
    state_TD = features(target, TEXT, (2,))[2]
    wanted_TV = target.lm.lm_head(state_TD)  # type: ignore[attr-defined]
    drafted_TV = drive(target, drafter).chain_logits(TEXT, 6)
    torch.testing.assert_close(drafted_TV, wanted_TV[5:], rtol=1e-4, atol=1e-4)


def test_a_draft_starts_from_the_targets_own_context(idle_target: Target, drive: Any) -> None:
    """The first token of a draft is what the parallel pass says there; were known tokens read with
    layers left out, their keys would differ."""
    drafter = without(idle_target, (2,), (3,))
    state = drive(idle_target, drafter).open()
    drive(idle_target, drafter).start(state, 0, TEXT)
    first_V = drive(idle_target, drafter).chain_logits(TEXT, len(TEXT))[0]
    assert isinstance(state, FixedState)
    ids_1W = torch.tensor([TEXT[-3:]])
    said_1WV = shadow_logits(
        idle_target.lm, state.kv, (0,), ids_1W, len(TEXT) - 3, len(TEXT) - 1, drafter.parts
    )
    torch.testing.assert_close(said_1WV[0, -1], first_V, rtol=1e-4, atol=1e-4)


def test_the_search_leaves_out_what_does_nothing(idle_target: Target) -> None:
    ids_BS = torch.randint(0, 96, (4, 24), generator=torch.Generator().manual_seed(3))
    found = search(idle_target.lm, ids_BS, trials=120)
    attention, mlp = found.parts.skipped(6)
    assert found.match > 0.99
    assert {*attention} == {*IDLE["attention"]}
    assert {*mlp} == {*IDLE["mlp"]}
    assert found.worth == pytest.approx(worth(found.match, 8 / 12))


def test_a_set_that_was_found_is_kept_in_the_package(idle_target: Target) -> None:
    drafter = SkipLayers(SkipLayersOptions(trials=8), idle_target.spec, None)
    with pytest.raises(RecipeError, match="long enough"):
        teach(drafter, idle_target, [TEXT])
    teach(drafter, idle_target, [TEXT * 12])
    twin = SkipLayers(drafter.options, idle_target.spec, None)
    assert twin.parts == drafter.parts
    assert twin.needs() == drafter.needs()
    assert drafter.options.skip_mlp is not None


def test_worth_counts_what_drafting_costs() -> None:
    assert worth(0.0, 0.1) == 1.0  # plain decoding
    assert worth(1.0, 0.5) == pytest.approx(13 / 7)
    assert worth(0.9, 1.0) == 1.0


def test_swift_finds_a_better_set_while_it_writes(idle_target: Target) -> None:
    """From every other layer to sets that leave out what does nothing; the scores never fall."""
    options = SwiftOptions(ratio=0.25, window=8, every=1, scope="process")
    drafter = Swift(options, idle_target.spec, None)
    ran = decode(idle_target, drafter, [(3, 1, 4)], tokens=220, policy="chain", length=3)
    search = drafter.registry.store(idle_target.identity, None)
    best = [max(score for _, score in search.tried[: i + 1]) for i in range(len(search.tried))]
    assert best[-1] > best[0]
    assert search.score == best[-1] >= 0.7
    assert isinstance(ran.state, SwiftState)
    plain = decode(idle_target, None, [(3, 1, 4)], tokens=220)
    assert ran.answers == plain.answers


def test_swift_asks_its_model_of_sets_more_often_right_than_chance() -> None:
    """A set's score falls by what it leaves out of the layers that matter."""
    searches = []
    for is_blind in (False, True):
        search = LayerSearch(SwiftOptions(ratio=0.5, enough=1.0), 8)
        while search.trials < 240:
            parts = search._parts(search._random()) if is_blind else search.proposal()
            attention, mlp = parts.skipped(8)
            lost = sum(layer < 4 for layer in (*attention, *mlp))
            search.learn(parts, 1.0 - 0.1 * lost)
        searches.append(search)
    assert searches[0].score >= searches[1].score


def test_layers_that_the_target_does_not_have_are_refused(make_target: Any) -> None:
    spec = make_target().spec
    for name, options in (
        ("skip-layers", {"skip_mlp": (9,)}),
        ("layer-skip", {"layers": 4}),
        ("kangaroo", {"layers": 0}),
    ):
        found = family(name)
        with pytest.raises(RecipeError, match="layers"):
            found.build(found.options(**options), spec, None)
