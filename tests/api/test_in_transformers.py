"""A drafter inside `generate` of transformers: the loop of transformers, token for token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

import specctl
from specctl.api.in_transformers import FOLDER
from specctl.core.errors import IncompatibleError, RecipeError, SpecctlError
from specctl_testing.models import build_model

PAD = 0
PROMPTS = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6], [PAD, PAD, PAD, 9, 9, 4, 9, 9]])
MASK = torch.tensor([[1] * 8, [0, 0, 0, 1, 1, 1, 1, 1]])
BATCH = {"input_ids": PROMPTS, "attention_mask": MASK, "pad_token_id": PAD}


class Odd(LogitsProcessor):  # type: ignore[misc]
    """A processor of somebody's own: no even id behind an even one."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[(input_ids[:, -1] % 2 == 0), ::2] = -torch.inf
        return scores


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 20},
        {"logits_processor": LogitsProcessorList([Odd()])},
        {"eos_token_id": [*range(1, 96, 9)]},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"begin_suppress_tokens": [*range(60)], "forced_eos_token_id": 2},
        {"exponential_decay_length_penalty": (3, 1.9), "eos_token_id": [*range(1, 96, 5)]},
        {"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.5)])},
    ],
    ids=[
        "plain",
        "penalty",
        "ngrams",
        "own",
        "ends",
        "penalty and ngrams",
        "places",
        "lengths",
        "temperature",
    ],
)
def test_greedy_answers_are_those_of_its_own_loop(model: Any, given: dict[str, Any]) -> None:
    given = {**BATCH, "max_new_tokens": 24, "do_sample": False, **given}
    drafted = specctl.custom_generate("prompt-lookup", length=4)
    expected = model.generate(**given)
    assert torch.equal(model.generate(**given, custom_generate=drafted), expected)
    assert drafted.stats is not None
    assert drafted.stats.tokens > 0


def test_samples_follow_the_law_that_was_prepared(model: Any) -> None:
    settings = {"temperature": 0.7, "top_k": 6, "top_p": 0.9, "repetition_penalty": 1.4}
    torch.manual_seed(0)
    count, prompt = 600, PROMPTS[:1]
    drafted = specctl.custom_generate("prompt-lookup", length=2, adaptive=False)
    given: dict[str, Any] = {"do_sample": True, "max_new_tokens": 1, "pad_token_id": PAD}
    found = model.generate(
        prompt, custom_generate=drafted, num_return_sequences=count, **given, **settings
    )
    scores = model.generate(
        prompt, output_scores=True, return_dict_in_generate=True, **given, **settings
    ).scores[0]
    law = scores[0].softmax(-1)
    share = torch.bincount(found[:, -1], minlength=len(law)) / count
    assert not share[law == 0].any()
    assert (share - law).abs().sum() / 2 < 0.06  # TV of 600 draws of six: .03 on average


def test_a_seed_of_torch_gives_a_text_again(model: Any) -> None:
    drafted = specctl.custom_generate("prompt-lookup", length=2, adaptive=False)
    made = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        made.append(
            model.generate(**BATCH, do_sample=True, max_new_tokens=12, custom_generate=drafted)
        )
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


def test_the_folder_streams_stops_and_drafts() -> None:
    """What transformers takes by a path; in a text where a stop string comes."""
    model = AutoModelForCausalLM.from_pretrained("recipes/tiny", dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained("recipes/tiny")
    inputs = tokenizer("import os\n", return_tensors="pt")
    streamed: list[int] = []

    class Kept:
        def put(self, value: Tensor) -> None:
            streamed.extend(value.flatten().tolist())

        def end(self) -> None:
            streamed.append(-1)

    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    stop = tokenizer.decode(plain[0, -6:-4])
    given: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "stop_strings": [stop]}
    expected = model.generate(**inputs, **given, tokenizer=tokenizer)
    found = model.generate(
        **inputs,
        **given,
        custom_generate=FOLDER,
        draft="prompt-lookup",
        length=3,
        streamer=Kept(),
        trust_remote_code=True,
    )
    assert torch.equal(found, expected)
    assert found.shape[1] < plain.shape[1]
    assert streamed == [*found[0].tolist(), -1]
    with pytest.raises(SpecctlError, match="no drafter"):
        model.generate(**inputs, custom_generate=FOLDER, trust_remote_code=True)


def test_a_model_that_learns_is_read_as_it_is_and_stays_trainable() -> None:
    model = build_model().train()
    drafted = specctl.custom_generate("prompt-lookup", length=3)
    given: dict[str, Any] = {**BATCH, "max_new_tokens": 12, "do_sample": False}
    before = model.generate(**given, custom_generate=drafted)
    with torch.no_grad():
        for weight in model.parameters():
            weight.data.mul_(torch.linspace(0.5, 1.5, weight.shape[-1]))
    expected = model.generate(**given)
    assert torch.equal(model.generate(**given, custom_generate=drafted), expected)
    assert not torch.equal(before, expected)
    assert model.training
    assert all(weight.requires_grad for weight in model.parameters())
    twice = model.double()
    found = twice.generate(**given, custom_generate=drafted)
    assert torch.equal(found, twice.generate(**given))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"num_beams": 2}, "beam_search"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"max_time": 3.0}, "MaxTimeCriteria"),
        ({"do_sample": True, "typical_p": 0.9}, "TypicalLogitsWarper"),
        ({"attention_mask": MASK.flip(1)}, "padding on the right"),
        ({"position_ids": torch.arange(8).expand(2, 8) + 3}, "position_ids"),
        ({"prompt_lookup_num_tokens": 3}, "assisted"),
        ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidance"),
        ({"encoder_repetition_penalty": 1.5}, "EncoderRepetitionPenalty"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [3 + row]}, "PrefixConstrained"),
        (
            {
                "do_sample": True,
                "top_p": 0.9,
                "logits_processor": LogitsProcessorList([TopKLogitsWarper(3), TopKLogitsWarper(2)]),
            },
            "TopKLogitsWarper twice",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_followed_is_refused_by_name(
    model: Any, given: dict[str, Any], named: str
) -> None:
    with pytest.raises(IncompatibleError) as error:
        model.generate(
            **{**BATCH, "max_new_tokens": 4, **given},
            custom_generate=specctl.custom_generate("prompt-lookup"),
        )
    assert named in str(error.value.found)


def test_a_setting_of_generate_given_to_the_drafter() -> None:
    with pytest.raises(RecipeError, match="temperature"):
        specctl.custom_generate("prompt-lookup", temperature=0.5)
