"""A target whose logits are no numbers is never decoded from, and its error says why."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from specctl.core.errors import BannedError, Exit, NumbersError
from specctl.models.not_finite import is_bad
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.peaks import Peaks
from specctl.runtime.engine.request import Request
from specctl.runtime.generate import generate
from specctl.runtime.pearl import Pearl
from specctl.runtime.policies import make_policy
from specctl.runtime.proof.reference_checks import dense_logits
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.runtime.verify.walk import root_verdict
from specctl.server.engine_thread.service import GenerateRequest
from specctl_testing.runtime.failing import FailingDrafter
from specctl_testing.runtime.service_requests import collect, served

CHAIN, TREE = {"policy": "chain", "length": 3}, {"policy": "static-tree", "branch": (2, 2)}
WEIGHTS = {
    "model.embed_tokens.weight": "the embedding",
    "model.layers.1.self_attn.o_proj.weight": "the attention of decoder layer 1",
    "model.layers.1.mlp.down_proj.weight": "the MLP of decoder layer 1",
    "model.norm.weight": "the final norm",
    "lm_head.weight": "the LM head",
}


def damaged(
    make_model, weight="model.layers.1.mlp.down_proj.weight", kind="llama", value=torch.nan
):
    model = make_model(kind, num_layers=2)
    with torch.no_grad():
        model.get_parameter(weight).view(-1)[0] = value
        if weight == "model.embed_tokens.weight":
            model.get_parameter(weight)[:] = value
    return model


@pytest.fixture(scope="module")
def bad(make_model):
    return Target.from_model(damaged(make_model))


@pytest.fixture(scope="module")
def good(make_target):
    return make_target(num_layers=2)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("serve", [None, CHAIN, TREE])
def test_no_token_is_drawn_from_logits_that_are_no_numbers(bad, serve, temperature):
    drafter = None if serve is None else FailingDrafter(bad, "never")
    policy = None if serve is None else make_policy(serve)
    sampling = Sampling(temperature, max_new_tokens=4)
    with pytest.raises(NumbersError, match="are not numbers"):
        generate(bad, [(3, 1, 4)], drafter=drafter, policy=policy, sampling=sampling)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(logit_bias={3: 1.0})])
def test_drafting_in_parallel_looks_as_well(bad, sampling):
    pearl = Pearl(bad, FailingDrafter(bad, "never"), make_policy(CHAIN))
    with pytest.raises(NumbersError):
        pearl.run([Request((3, 1, 4), replace(sampling, max_new_tokens=4))])


@pytest.mark.parametrize("weight", WEIGHTS)
def test_the_error_names_the_part_the_weight_and_the_way_out(make_model, weight):
    target = Target.from_model(damaged(make_model, weight))
    with pytest.raises(NumbersError) as caught:
        generate(target, [(3, 1, 4)], sampling=Sampling(max_new_tokens=4))
    assert f"{WEIGHTS[weight]} (llama" in caught.value.found
    assert f"{weight} (" in caught.value.found
    assert "float32" in caught.value.found
    assert "damaged" in caught.value.do
    assert caught.value.exit is Exit.INTEGRITY


def test_an_overflow_in_half_precision_offers_a_wider_dtype(make_model):
    model = make_model("llama", num_layers=2)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1e5)
    generate(Target.from_model(model), [(3, 1, 4)], sampling=Sampling(max_new_tokens=4))
    target = Target.from_model(model.half())
    with pytest.raises(NumbersError) as caught:
        generate(target, [(3, 1, 4)], sampling=Sampling(max_new_tokens=4))
    assert "--dtype float32" in caught.value.do
    assert caught.value.exit is Exit.INCOMPATIBLE


def test_a_damaged_model_that_transformers_runs_is_damaged_not_unfit(make_model):
    model = damaged(make_model, "gpt_neox.layers.1.mlp.dense_4h_to_h.weight", "gpt_neox")
    with pytest.raises(NumbersError, match=r"layers\.1\.mlp\.dense_4h_to_h \(Linear\)"):
        Target.from_model(model)


def test_masked_ids_are_no_damage_and_a_row_without_any_is():
    row = torch.tensor([1.0, -torch.inf, 0.5])
    bad = [[torch.nan, 0.0, 1.0], [torch.inf, 0.0, 1.0], [-torch.inf] * 3]
    assert is_bad(torch.stack([row, *map(torch.tensor, bad)])).tolist() == [False, True, True, True]


def test_the_peaks_reach_the_host_as_they_are_from_an_accelerator(good, monkeypatch):
    """There they travel as the bits of the numbers, beside the tokens."""
    logits = torch.tensor([[[1.5, -2.0]], [[torch.nan, 0.0]], [[-torch.inf, -torch.inf]]])
    peaks = Peaks.of(logits, logits, good_tree(3))
    packed, verdict = torch.tensor([[7], [8], [9]]), root_verdict(torch.tensor([7, 8, 9]))
    here = peaks.read_with(packed, verdict)
    monkeypatch.setattr("specctl.runtime.engine.peaks.is_on_host", lambda tensor: False)
    there = peaks.read_with(packed, verdict)
    assert there.packed == here.packed == [[7], [8], [9]]
    assert [there.is_bad(row, 1) for row in range(3)] == [False, True, True]
    assert [here.is_bad(row, 1) for row in range(3)] == [False, True, True]


def good_tree(num_rows):
    from specctl.core.tree import empty_tree

    return empty_tree(num_rows, torch.device("cpu"))


def test_whole_sequences_are_looked_at_too(bad):
    with pytest.raises(NumbersError):
        dense_logits(bad, [[3, 1, 4]])


# -- one row of several ----------------------------------------------------------------------------


def token_that_breaks(make_model):
    """A target that is whole but for one token, which no text holds by itself."""
    model = make_model("llama", num_layers=2)
    with torch.no_grad():
        model.model.embed_tokens.weight[90] = torch.nan
        model.lm_head.weight[90] = 0.0
    return Target.from_model(model)


def test_the_other_rows_go_on_where_they_were(make_model):
    target = token_that_breaks(make_model)
    alone = generate(target, [(3, 1, 4)], sampling=Sampling(max_new_tokens=9)).outputs[0]
    engine = Engine(target, num_slots=2)
    engine.open(32)
    engine.submit(0, Request((5, 90, 2), Sampling(max_new_tokens=9)))
    engine.submit(1, Request((3, 1, 4), Sampling(max_new_tokens=9)))
    with pytest.raises(NumbersError) as caught:
        engine.step()
    assert caught.value.rows == (0,)
    done, engine_rows = [], []
    engine.submit(2, Request((3, 1, 4), Sampling(max_new_tokens=9)))  # takes the slot that broke
    while engine.is_busy:
        for emission in engine.step():
            engine_rows.append(emission.row.index)
            if emission.finished:
                done.append(emission.row.completion().tokens)
    assert done == [alone.token_ids] * 2
    assert set(engine_rows) == {1, 2}


def test_the_server_refuses_that_request_says_so_and_serves_on(make_model, caplog):
    target = token_that_breaks(make_model)
    sampling = Sampling(max_new_tokens=5)

    async def run():
        async with served(target, max_batch=2) as service:
            for _ in range(4):  # more often than rounds may fail
                ticket = await service.submit(GenerateRequest((5, 90, 2), sampling))
                with pytest.raises(NumbersError):
                    async for _ in ticket:
                        pass
            answer = await collect(service, GenerateRequest((3, 1, 4), sampling))
            return answer, service.status().state, dict(service.counters.requests)

    answer, state, counted = asyncio.run(run())
    assert sum(len(piece.tokens) for piece in answer) == 5
    assert state == "ready"
    assert counted == {"error": 4, "length": 1}
    assert "are not numbers" in caplog.text


# -- everything banned -----------------------------------------------------------------------------

EVERYTHING = range(96)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "ban",
    [
        {"logit_bias": dict.fromkeys(EVERYTHING, -float("inf"))},
        {"bad_words": tuple((token,) for token in EVERYTHING)},
        {"bad_words": tuple((4, token) for token in EVERYTHING)},
    ],
)
def test_a_vocabulary_that_is_banned_whole_is_an_error(good, ban, temperature):
    with pytest.raises(BannedError, match="no token may come next"):
        generate(good, [(3, 1, 4)], sampling=Sampling(temperature, max_new_tokens=4, **ban))


def test_a_node_behind_which_all_is_banned_harms_no_other_test(good):
    """Under block verification its row of NaN would reach the threshold in front of it."""
    ban = tuple((7, token) for token in EVERYTHING)
    sampling = Sampling(1.0, max_new_tokens=6, bad_words=ban, seed=3)
    drafter = FailingDrafter(good, "never")
    for seed in range(20):
        try:
            done = generate(
                good,
                [(3, 1, 4)],
                drafter=drafter,
                policy=make_policy(CHAIN),
                rule="block",
                sampling=replace(sampling, seed=seed),
            )
        except BannedError:
            continue
        assert 7 not in done.outputs[0].token_ids[:-1]
