"""A tokenizer with tokens added behind those of the model, such as Gemma 3's image marker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import specctl.recipes
from specctl.core.errors import SpecctlError
from specctl.runtime.generate import generate
from specctl.runtime.sampling.grammar import GrammarSpec, compile_grammar
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target, load_target
from specctl.train.data.prepare import encode_document
from specctl.train.data.prompts.answers import AnswerPlan
from specctl.train.data.prompts.prompts import cut_prompts
from specctl.train.data.records.records import Sample, sample_of
from specctl.train.data.sources.defects import Defects

MARK = "<image_soft_token>"


@pytest.fixture(scope="module")
def target(make_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("surplus")
    make_model(num_layers=2, vocab=6144, eos_token_id=1).save_pretrained(folder)
    tiny = Path(specctl.recipes.__path__[0]) / "tiny"
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.add_special_tokens({"additional_special_tokens": [MARK]})
    tokenizer.save_pretrained(folder)
    return load_target(str(folder), device="cpu")


def test_it_is_a_target_like_any_other(target: Target) -> None:
    assert target.encode(MARK)[-1] == target.spec.vocab_size
    made = generate(target, ["def main("], sampling=Sampling(max_new_tokens=4))
    assert len(made.outputs[0].token_ids) == 4


def test_a_grammar_knows_only_what_the_model_can_say(target: Target) -> None:
    grammar = compile_grammar(GrammarSpec("regex", "[ab]{3}"), target)
    made = generate(target, ["x = "], sampling=Sampling(max_new_tokens=8, grammar=grammar))
    assert set(made.outputs[0].text) <= set("ab")
    assert len(made.outputs[0].text) == 3


def test_a_text_that_spells_such_a_token_is_refused_or_left_out(target: Target) -> None:
    with pytest.raises(SpecctlError, match="outside the target's vocabulary"):
        generate(target, [f"see {MARK}"], sampling=Sampling(max_new_tokens=4))
    with pytest.raises(ValueError, match="which the target lacks"):
        encode_document(target, Sample("x:1", "", text=f"see {MARK} there"))
    defects = Defects()
    samples = [Sample("x:1", "", text=MARK * 4), sample_of({"prompt": f"what is {MARK}?"}, "x:2")]
    assert not cut_prompts(target, samples, AnswerPlan(2, 8, 4, 0.8, 0.5, 0), defects)
    assert sum(defects.counts.values()) == 2
