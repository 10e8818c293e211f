"""Cutting a drafter out of its target: scores, slices, and what must not change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.errors import RecipeError
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions, options_of
from specctl.models.llama.fast_llama import FastLlama, LlamaModel
from specctl.models.llama.slice import Keep, sliced, with_layers
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.prune.cut import Wanted, choose, fitted
from specctl.train.prune.scores import acceptance, acceptance_drop, measure_scores

KINDS = ("llama", "mistral", "qwen2", "qwen3")
BIASED = {"qwen2": "normal"}
PROMPTS = ([3, 1, 4, 1, 5], [7], [9, 2, 6])


def text(seed: int = 0, rows: int = 3, length: int = 20) -> TrainBatch:
    """Random ids; the last tokens only pad."""
    ids_BS = torch.randint(96, (rows, length), generator=torch.Generator().manual_seed(seed))
    document_BS = torch.zeros_like(ids_BS)
    document_BS[:, -3:] = -1
    position_BS = torch.arange(length).expand_as(ids_BS)
    return TrainBatch(ids_BS, document_BS >= 0, document_BS, position_BS)


def logits(lm: FastLlama, batch: TrainBatch) -> Tensor:
    masks = lm.document_masks(batch.document_BS)
    with torch.no_grad():
        out = lm.dense(batch.ids_BS, batch.position_BS, masks).logits_BTV
    assert out is not None
    return out[batch.document_BS >= 0]


def silence(module: Any, *layers: int) -> None:
    """Make blocks identities."""
    with torch.no_grad():
        for layer in layers:
            module.model.layers[layer].self_attn.o_proj.weight.zero_()
            module.model.layers[layer].mlp.down_proj.weight.zero_()


def cut(lm: FastLlama, keep: Keep) -> FastLlama:
    small = sliced(lm.module.shape, lm.module.state_dict(), keep)
    module = LlamaModel(small.shape, lm.module.rotary.inv_freq, lm.module.rotary.scale).eval()
    module.load_state_dict(small.tensors)
    return FastLlama(module, replace(lm.spec, num_layers=small.shape.num_layers))


@pytest.fixture
def make_lm(make_target: Any) -> Callable[..., FastLlama]:
    """A random target's model, with biases where its kind has them."""

    def make(model_type: str = "llama", **fields: Any) -> FastLlama:
        target: Target = make_target(model_type, rms_norm_eps=1e-12, **fields)
        assert type(target.lm) is FastLlama
        with torch.no_grad():
            for name, weight in target.lm.module.named_parameters():
                if name.endswith("bias"):
                    weight.normal_()
        return target.lm

    return make


@pytest.mark.parametrize("importance", ["bi", "alpha", "activation"])
def test_a_block_that_does_nothing_goes_first(make_lm: Any, importance: Any) -> None:
    lm = make_lm()
    silence(lm.module, 2)
    keep = choose(lm, Wanted(layers=3, importance=importance), [text()])
    assert keep.layers == (0, 1, 3)
    assert torch.equal(logits(cut(lm, keep), text()), logits(lm, text()))


@pytest.mark.parametrize("importance", ["bi", "alpha", "activation"])
def test_a_span_that_does_nothing_goes_as_a_whole(make_lm: Any, importance: Any) -> None:
    lm = make_lm(num_layers=5)
    silence(lm.module, 1, 2)
    wanted = Wanted(layers=3, importance=importance, contiguous=True)
    assert choose(lm, wanted, [text()]).layers == (0, 3, 4)


def test_scores_say_what_they_are_defined_to_say(make_lm: Any) -> None:
    lm = make_lm()
    silence(lm.module, 1)
    scores = measure_scores(lm, [text(0), text(1)])
    assert float(scores.influence_LL[1, 2]) == pytest.approx(0.0, abs=1e-6)
    assert float(scores.added_L[1]) == 0.0
    assert scores.influence_LL.diagonal(1)[[0, 2, 3]].min() > 0.01
    batch, states = text(0), []
    masks = lm.document_masks(batch.document_BS)
    with torch.no_grad():
        out = lm.dense(batch.ids_BS, batch.position_BS, masks, taps=(0, 1))
    states = [out.taps[k][batch.document_BS >= 0] for k in (0, 1)]
    cosine = torch.nn.functional.cosine_similarity(*states, dim=-1).mean()
    once = measure_scores(lm, [batch])
    assert float(once.influence_LL[0, 1]) == pytest.approx(1 - float(cosine), abs=1e-5)
    energy_D = once.energy["model.layers.0.input_layernorm.weight"]
    assert torch.allclose(energy_D, states[0].square().mean(0), atol=1e-5)


def test_acceptance_of_a_model_with_itself_is_one_and_falls_with_every_layer(make_lm: Any) -> None:
    lm, batches = make_lm(), [text(0), text(1)]
    assert acceptance(lm, lm, batches) == pytest.approx(1.0, abs=1e-6)
    drop_L = acceptance_drop(lm, batches)
    assert drop_L.shape == (4,)
    assert float(drop_L.min()) > 0.05
    again = 1.0 - acceptance(with_layers(lm, (0, 1, 3)), lm, batches)
    assert float(drop_L[2]) == pytest.approx(again)


@pytest.mark.parametrize(("heads", "groups"), [(2, 1), (2, 2), (3, 1), (4, 2)])
@pytest.mark.parametrize("model_type", KINDS)
def test_heads_nobody_listens_to_can_be_cut(
    make_lm: Any, model_type: str, heads: int, groups: int
) -> None:
    """Whole key/value groups or heads evenly within them; which ones differs by layer."""
    lm = make_lm(model_type, num_layers=2, hidden=48, num_attention_heads=6, head_dim=8)
    stays = [{0: (0, 1, 2), 1: (3, 4, 5)}[layer] for layer in (0, 1)]
    if groups == 2:
        stays = [(1, 2, 3, 4)[: heads // 2] + (3, 5, 4)[: heads // 2] for _ in (0, 1)]
    heads_of = [sorted(s[:heads]) for s in stays]
    with torch.no_grad():
        for layer, kept in zip(lm.module.model.layers, heads_of, strict=True):
            for head in set(range(6)) - set(kept):
                layer.self_attn.o_proj.weight[:, 8 * head : 8 * head + 8] = 0
    keep = choose(lm, Wanted(heads=heads, kv_heads=groups), [text()])
    assert [sorted(keep.inside[layer].heads or ()) for layer in (0, 1)] == heads_of
    small = cut(lm, keep)
    assert (small.module.shape.num_heads, small.module.shape.num_kv_heads) == (heads, groups)
    assert torch.allclose(logits(small, text()), logits(lm, text()), atol=2e-5)


@pytest.mark.parametrize("model_type", KINDS)
def test_silent_neurons_and_empty_channels_can_be_cut(make_lm: Any, model_type: str) -> None:
    lm = make_lm(model_type, num_layers=2)
    channels, neurons = torch.arange(0, 32, 3), torch.arange(1, 64, 2)
    with torch.no_grad():
        lm.module.model.embed_tokens.weight[:, channels] = 0
        for layer in lm.module.model.layers:
            layer.mlp.down_proj.weight[:, neurons] = 0
            layer.mlp.down_proj.weight[channels] = 0
            layer.self_attn.o_proj.weight[channels] = 0
    keep = choose(lm, Wanted(channels=32 - len(channels), neurons=32), [text()])
    assert not set(keep.channels or ()) & set(channels.tolist())
    assert keep.inside[0].neurons == tuple(range(0, 64, 2))
    assert min(keep.energy.values()) > 1 - 1e-5
    assert torch.allclose(logits(cut(lm, keep), text()), logits(lm, text()), atol=2e-5)


def test_a_norm_keeps_its_loudness_when_living_channels_go(make_lm: Any) -> None:
    """The correction sqrt(e D / d): behind the first norm, kept channels are as loud as before."""
    lm = make_lm(num_layers=1)
    small = cut(lm, choose(lm, Wanted(channels=12), [text()]))
    kept = choose(lm, Wanted(channels=12), [text()]).channels
    name = "model.layers.0.input_layernorm.weight"

    def loud(model: FastLlama, columns: Any) -> float:
        state = model.module.model.embed_tokens.weight[text().ids_BS[:, :-3].flatten()]
        weight = model.module.get_parameter(name)
        normed = torch.nn.functional.rms_norm(state, weight.shape, weight, 1e-12)
        return float(normed[:, columns].square().mean().detach())

    assert loud(small, slice(None)) == pytest.approx(loud(lm, list(kept or ())), rel=0.1)


@pytest.mark.parametrize("model_type", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_pruning_nothing_gives_the_target_bit_for_bit(
    make_target: Any, model_type: str, tied: bool
) -> None:
    target: Target = make_target(model_type, num_layers=3, tie_word_embeddings=tied)
    drafter = as_drafter(target, Wanted())
    assert torch.equal(logits(drafter.lm, text()), logits(target.lm, text()))
    assert acceptance(drafter.lm, target.lm, [text()]) == pytest.approx(1.0, abs=1e-6)
    policy = make_policy({"policy": "chain", "length": 4})
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature, max_new_tokens=20, ignore_eos=True)
        made = generate(target, PROMPTS, drafter=drafter, sampling=sampling, policy=policy, batch=3)
        assert made.stats.alpha == 1.0
        assert made.stats.accepted == made.stats.rounds * 4


def as_drafter(target: Target, wanted: Wanted) -> SmallLm:
    """What specctl builds from a cut: options that say the shape, and its tensors."""
    assert type(target.lm) is FastLlama
    shape = target.lm.module.shape
    keep = choose(target.lm, wanted, [text()])
    small = sliced(shape, target.lm.module.state_dict(), keep)
    drafter = SmallLm(SmallLmOptions(**options_of(small.shape, target.spec)), target.spec)
    drafter.load_tensors(fitted(drafter, small.tensors, None))
    drafter.module.eval()
    return drafter


def test_scaled_rotary_positions_survive(make_target: Any) -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    target: Target = make_target(num_layers=2, rope_parameters=rope)
    drafter = as_drafter(target, Wanted())
    assert torch.equal(logits(drafter.lm, text(length=60)), logits(target.lm, text(length=60)))


@pytest.mark.parametrize(
    ("wanted", "option"),
    [
        (Wanted(heads=3, kv_heads=2), "heads"),
        (Wanted(heads=4, kv_heads=1), "heads"),
        (Wanted(channels=33), "width"),
        (Wanted(neurons=65), "intermediate"),
        (Wanted(layers=5), "layers"),
        (Wanted(from_layers=(0, 4)), "from_layers"),
    ],
)
def test_more_than_the_target_has_is_refused(make_lm: Any, wanted: Wanted, option: str) -> None:
    with pytest.raises(RecipeError, match=rf"drafter\.options\.{option}\b"):
        choose(make_lm(), wanted, [text()])
