"""The independent draft model: shapes, catch-up, keeping what was accepted, foreign models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specctl.core.errors import RecipeError
from specctl.core.vocab import VocabMap
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions, draft_shape
from specctl.models.llama.fast_llama import FastLlama
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target

GREEDY = Sampling(max_new_tokens=20, ignore_eos=True)
PROMPTS = ([3, 1, 4, 1, 5], [7], [9, 2, 6])


def test_default_shape_is_an_eighth_as_deep_and_half_as_wide(make_target: Any) -> None:
    spec = make_target().spec
    big = replace(
        spec,
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=128256,
    )
    shape = draft_shape(SmallLmOptions(), big, None)
    assert (shape.num_layers, shape.hidden_size, shape.num_heads) == (4, 2048, 16)
    assert (shape.num_kv_heads, shape.intermediate_size, shape.tied) == (8, 7168, True)


def test_a_trimmed_vocabulary_unties_the_head_and_keeps_the_embedding_whole(
    make_target: Any,
) -> None:
    target = make_target()
    vocab = VocabMap(torch.tensor([1, 5, 7]), target.spec.vocab_size)
    for drafter in (
        SmallLm(SmallLmOptions(), target.spec, vocab),
        SmallLm(SmallLmOptions(), target.spec).trimmed(vocab),
    ):
        tensors = drafter.tensors()
        assert tensors["model.embed_tokens.weight"].shape[0] == target.spec.vocab_size
        assert tensors["lm_head.weight"].shape[0] == 3


def test_heads_that_do_not_divide_are_refused(make_target: Any) -> None:
    options = SmallLmOptions(heads=4, kv_heads=3)
    with pytest.raises(RecipeError, match="multiple of kv_heads"):
        SmallLm(options, make_target().spec)


@pytest.mark.parametrize(
    "serve",
    [
        {"policy": "chain", "length": 4},
        {"policy": "static-tree", "branch": (2, 2, 1, 1)},
        {"policy": "dynamic-tree", "length": 2, "beam": 4, "nodes": 20},  # keeps every candidate
    ],
)
def test_the_target_as_its_own_draft_is_always_accepted(
    make_target: Any, serve: dict[str, Any]
) -> None:
    target = make_target()
    drafter, policy = SmallLm.from_lm(target.lm, target.spec), make_policy(serve)
    sampling = replace(GREEDY, max_new_tokens=4 * (policy.depth + 1))
    for batch in (1, 3):
        out = generate(
            target, PROMPTS, drafter=drafter, sampling=sampling, policy=policy, batch=batch
        )
        assert out.stats.rounds == 3 * 4
        assert out.stats.accepted == 3 * 4 * policy.depth


def test_the_target_as_its_own_draft_is_accepted_when_sampling(make_target: Any) -> None:
    target = make_target()
    drafter = SmallLm.from_lm(target.lm, target.spec)
    sampling = Sampling(temperature=0.8, max_new_tokens=20, ignore_eos=True)
    policy = make_policy({"policy": "chain", "length": 4})
    out = generate(target, PROMPTS, drafter=drafter, sampling=sampling, policy=policy, batch=3)
    assert out.stats.accepted == out.stats.rounds * 4


@pytest.mark.parametrize("model_type", ["gpt_neox", "mistral", "gemma2"])
def test_a_foreign_model_drafts_exactly_what_it_would_say(
    make_target: Any, model_type: str
) -> None:
    """Sliding windows and other architectures, in trees and ragged batches: a draft model equal to
    the target must be accepted in full."""
    target = make_target(model_type)
    drafter = SmallLm.from_lm(target.lm, target.spec)
    for policy in (
        {"policy": "chain", "length": 3},
        {"policy": "static-tree", "branch": (2, 1, 1)},
    ):
        out = generate(
            target,
            PROMPTS,
            drafter=drafter,
            sampling=GREEDY,
            policy=make_policy(policy),
            batch=3,
        )
        assert out.stats.accepted == out.stats.rounds * 3


@pytest.mark.parametrize("size", [80, 112])
def test_a_draft_vocabulary_padded_otherwise_is_accepted(make_target: Any, size: int) -> None:
    target: Target = make_target(vocab=96)
    other: Target = make_target(vocab=size, seed=3)
    drafter = SmallLm.from_lm(other.lm, target.spec)
    plain = generate(target, PROMPTS, sampling=GREEDY)
    drafted = generate(target, PROMPTS, drafter=drafter, sampling=GREEDY, batch=3)
    for a, b in zip(plain.outputs, drafted.outputs, strict=True):
        assert a.token_ids == b.token_ids


def test_distillation_raises_alpha_above_that_of_fresh_weights(
    make_target: Any, make_batch: Any, train_a_little: Any
) -> None:
    target = make_target()
    for loss in ("kl", "lk_hybrid", "jsd"):
        torch.manual_seed(0)
        drafter = SmallLm(SmallLmOptions(loss=loss), target.spec)
        batch = make_batch(target, drafter)

        def alpha(drafter: SmallLm = drafter, batch: Any = batch) -> float:
            total, count = drafter.loss(batch).metrics["alpha"]
            return float(total / count)

        before = alpha()
        train_a_little(target, drafter, 40, 1e-2)
        assert alpha() > before + 0.1


def test_training_a_foreign_model_uses_the_same_loss(make_target: Any, make_batch: Any) -> None:
    target = make_target()
    lean = SmallLm(SmallLmOptions(), target.spec)
    batch = make_batch(target, lean)
    foreign = SmallLm.from_lm(target.lm, target.spec)
    out = foreign.loss(batch)
    assert float(out.sum) == pytest.approx(0.0, abs=1e-3)  # the target drafts like the target
    assert float(out.count) == float(lean.loss(batch).count)
    assert isinstance(lean.lm, FastLlama)
