"""Mixtures: the laws, both caches kept alike, drafts verified against the law, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specctl.core.errors import IncompatibleError, RecipeError, SpecctlError
from specctl.core.language_model import Feed
from specctl.drafters.lm.small_lm import SmallLm
from specctl.models.mixed_lm import MixedKV, MixedLM
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.mixed import load_mixed, mixed
from specctl.runtime.target.variants.mixture import LAWS, Mixture, parse
from specctl_testing.hybrids import tiny_hybrid
from specctl_testing.models import build_model

VOCAB = 6
PROMPTS = ([3, 1, 4, 1, 5], [2, 2], [0], [5, 3, 5, 0, 1, 4, 1, 3, 2, 3, 1, 4])


def target_of(seed: int, model_type: str = "llama", **fields: object) -> Target:
    return Target.from_model(build_model(model_type, 2, vocab=VOCAB, seed=seed, **fields))


@pytest.fixture(scope="module")
def pair() -> tuple[Target, Target]:
    return target_of(0), target_of(1, model_type="mistral")  # a window of 6 beside none


def log_probs(target: Target, ids: list[int]) -> torch.Tensor:
    """[T, V], by a forward without a cache."""
    ids_1S = torch.tensor([ids])
    masks = target.lm.document_masks(torch.zeros_like(ids_1S))
    out = target.lm.dense(ids_1S, torch.arange(len(ids))[None], masks)
    assert out.logits_BTV is not None
    return out.logits_BTV[0].double().log_softmax(-1)


def expected(law: str, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The law of each mixture of these tests, written once more from probabilities."""
    if law == "contrast":
        scores = torch.where(p >= 0.2 * p.max(), p**1.5 / q**0.5, 0.0)
    elif law == "average":
        scores = 0.3 * p + 0.7 * q
    elif law == "product":
        scores = p**0.3 * q**0.7
    else:
        scores = p if -(q * q.log()).sum() > 1.2 else q
    return scores / scores.sum()


NUMBERS = {"contrast": (0.5, 0.2), "average": (0.3,), "product": (0.3,), "switch": (1.2,)}


@pytest.mark.parametrize("law", LAWS)
def test_every_law_is_that_of_its_paper(pair: tuple[Target, Target], law: str) -> None:
    whole = mixed(*pair, Mixture(law, NUMBERS[law], "beside"))
    for prompt in PROMPTS:
        p_TV, q_TV = (log_probs(one, prompt).exp() for one in pair)
        law_TV = torch.stack([expected(law, p, q) for p, q in zip(p_TV, q_TV, strict=True)])
        assert torch.allclose(log_probs(whole, prompt).exp(), law_TV, atol=1e-5)


def test_a_drafted_text_of_two_tokens_follows_the_law_of_both_models(
    pair: tuple[Target, Target],
) -> None:
    law = "contrast"
    whole = mixed(*pair, Mixture(law, NUMBERS[law], "beside"))
    prompt = [3, 1, 4, 1, 5, 2, 0, 3]
    sampling = Sampling(temperature=1.0, max_new_tokens=2, seed=7)
    made = generate(
        whole,
        [prompt] * 3000,
        drafter=SmallLm.from_lm(pair[1].lm, pair[1].spec),
        policy=make_policy({"policy": "chain", "length": 2}),
        sampling=sampling,
        batch=500,
    )
    count = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for output in made.outputs:
        count[tuple(output.token_ids)] += 1
    law_VV = torch.zeros_like(count)
    for first in range(VOCAB):
        p, q = (log_probs(one, [*prompt, first]).exp()[-2:] for one in pair)
        start = expected(law, p[0], q[0])
        law_VV[first] = start[first] * expected(law, p[1], q[1])
    assert float(law_VV.sum()) == pytest.approx(1)
    assert (count / count.sum() - law_VV).abs().sum() / 2 < 0.035  # about .02 by chance alone
    assert not ((count > 0) & (law_VV == 0)).any()


@pytest.mark.parametrize(
    "policy", [{"policy": "chain", "length": 4}, {"policy": "opt-tree", "nodes": 7}]
)
def test_chains_and_trees_in_batches_write_what_plain_decoding_writes(
    pair: tuple[Target, Target], policy: dict[str, object]
) -> None:
    whole = mixed(*pair, parse("contrast:0.8:0.05=beside"))
    sampling = Sampling(temperature=0.0, max_new_tokens=40)
    drafter = SmallLm.from_lm(pair[0].lm, pair[0].spec)
    plain = generate(whole, PROMPTS, sampling=sampling)
    alone = generate(pair[0], PROMPTS, sampling=sampling)
    for batch in (1, 3):
        made = generate(
            whole,
            PROMPTS,
            drafter=drafter,
            policy=make_policy(policy),
            sampling=sampling,
            batch=batch,
        )
        assert [o.token_ids for o in made.outputs] == [o.token_ids for o in plain.outputs]
        assert made.stats.accepted > 0
        assert made.stats.verification == "lossless of contrast:0.8:0.05:greedy"
    assert [o.token_ids for o in plain.outputs] != [o.token_ids for o in alone.outputs]


@pytest.mark.parametrize("law", LAWS)
def test_with_its_exact_numbers_a_law_is_the_targets_own(
    pair: tuple[Target, Target], law: str
) -> None:
    whole = mixed(*pair, Mixture(law, LAWS[law].exact, "beside"))
    for prompt in PROMPTS:
        assert torch.allclose(log_probs(whole, prompt), log_probs(pair[0], prompt), atol=1e-6)
    assert "alone" in str(whole.mixture and whole.mixture.warning("it"))


def test_only_the_second_model_may_forbid_nothing(pair: tuple[Target, Target]) -> None:
    """What q never says is contrasted without a number that is none."""
    log_p_TV = torch.tensor([[0.5, 0.5, 0.0]]).log()
    log_q_TV = torch.tensor([[1.0, 0.0, 0.0]]).log()
    for law, of in LAWS.items():
        scores_TV = of.scores(log_p_TV, log_q_TV, NUMBERS[law])
        assert scores_TV.softmax(-1).isfinite().all(), law
    whole_TV = LAWS["contrast"].scores(log_p_TV, log_q_TV, (0.0, 0.0))
    assert torch.equal(whole_TV, log_p_TV)


def test_extra_rows_are_the_first_models_own(pair: tuple[Target, Target]) -> None:
    """What stands in place of an embedding says nothing to the model beside."""
    whole = mixed(*pair, parse("average:0.5=it"))
    ids_1S, position_1S = torch.tensor([PROMPTS[0]]), torch.arange(5)[None]
    extra_12D = torch.randn(1, 2, pair[0].spec.hidden_size, generator=torch.manual_seed(0))
    found = []
    for target in (whole, pair[0]):
        masks = target.lm.document_masks(torch.zeros_like(ids_1S))
        feed = Feed(ids_1S, position_1S, masks, residual_BTD=extra_12D)
        out = target.lm.run(feed, None)
        assert out.logits_BTV is not None
        found.append(out.logits_BTV[0].log_softmax(-1))
    assert torch.allclose(found[0][-2:], found[1][-2:], atol=1e-6)
    assert torch.allclose(found[0][:3].double(), log_probs(whole, PROMPTS[0][:3]), atol=1e-5)


def test_the_memory_of_a_token_is_that_of_both_caches(pair: tuple[Target, Target]) -> None:
    whole = mixed(*pair, parse("average:0.5=it"))
    kv = whole.lm.new_kv(1, 10)
    assert isinstance(kv, MixedKV)
    stores = [*kv.key_ZJLE, *kv.value_ZJLE, *kv.beside.key_ZJLE, *kv.beside.value_ZJLE]
    assert 10 * whole.lm.kv_bytes == sum(store.nbytes for store in stores)


def test_texts_are_as_long_as_both_models_allow(pair: tuple[Target, Target]) -> None:
    short = target_of(2, max_position_embeddings=64)
    assert mixed(pair[0], short, parse("average=short")).spec.max_positions == 64


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("contrast", "contrast"),
        ("contrast=", "contrast="),
        ("mean=tiny", "mean=tiny"),
        ("contrast:x=tiny", "contrast:x"),
        ("contrast:nan=tiny", "contrast:nan"),
        ("contrast:0.5:2=tiny", "contrast:0.5:2"),
        ("average:0.5:1=tiny", "average:0.5:1"),
    ],
)
def test_what_is_no_mixture_is_refused_before_anything_is_read(word: str, found: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_mixed(word, "no-such-model")
    assert error.value.found == f"'{found}'"
    assert "--mix" in str(error.value.do)


@pytest.mark.parametrize(
    ("model", "what"),
    [("nope", "unknown model of a mixture"), ("./nope", "no such target folder")],
)
def test_an_unknown_model_is_one_of_the_mixture_not_the_target(model: str, what: str) -> None:
    with pytest.raises(SpecctlError, match=what) as error:
        load_mixed(f"average={model}", "no-such-target-either")
    assert (error.value.where, error.value.found) == ("--mix", f"'{model}'")


def test_two_models_of_other_tokens_or_with_recurrent_states_are_refused(
    pair: tuple[Target, Target],
) -> None:
    mixture = parse("average:0.5=beside")
    with pytest.raises(IncompatibleError, match="same tokens"):
        mixed(pair[0], replace(pair[1], tokenizer_fingerprint="another"), mixture)
    larger = Target.from_model(build_model(num_layers=1, vocab=VOCAB + 1))
    with pytest.raises(IncompatibleError, match="same tokens") as error:
        mixed(pair[0], larger, mixture)
    assert error.value.found == f"{VOCAB + 1} ids of random"
    recurrent = Target.from_model(tiny_hybrid("qwen3_next"))
    with pytest.raises(IncompatibleError, match="attention alone"):
        MixedLM(pair[0].lm, recurrent.lm, mixture.mixing())
    with pytest.raises(SpecctlError, match="mixture") as clash:
        load_mixed("average=tiny", "tiny", compile=True)
    assert clash.value.found == "--mix and target.compile"


def test_the_masks_of_each_model_are_its_own(pair: tuple[Target, Target]) -> None:
    """Of the union of both models' windows, a model is given those that it knows."""
    assert [mixed(*pair, parse("average=it")).lm.windows, pair[0].lm.windows] == [(6,), ()]
    whole = mixed(pair[1], pair[0], parse("switch:100=it"))  # the one without a window
    assert torch.allclose(log_probs(whole, PROMPTS[3]), log_probs(pair[0], PROMPTS[3]), atol=1e-6)
