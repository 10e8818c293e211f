"""Reflective verification: both readings against dense forwards, the exact end, its refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from specctl.core.errors import IncompatibleError, RecipeError
from specctl.drafters.lm.small_lm import SmallLm
from specctl.runtime.engine import reflection
from specctl.runtime.engine.engine import Engine
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.mixed import mixed
from specctl.runtime.target.variants.mixture import parse
from specctl.runtime.verify.relaxed import relaxation
from specctl_testing.hybrids import tiny_hybrid
from specctl_testing.models import build_model

VOCAB, LENGTH, DRAFTED = 6, 22, 4
PROMPTS = ([3, 1, 4, 1, 5], [2, 2], [5, 3, 5, 0, 1, 4, 1, 3, 2, 3, 1, 4])
BETWEEN = (4, 0, 2)
PROMPT_IDS = reflection.prompt_ids
GREEDY = Sampling(max_new_tokens=LENGTH)
CHAIN = {"policy": "chain", "length": DRAFTED}


@pytest.fixture(autouse=True)
def between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflection, "prompt_ids", lambda target: BETWEEN)


@pytest.fixture(scope="module")
def pair() -> tuple[Target, SmallLm]:
    target, other = (
        Target.from_model(build_model(kind, 1, vocab=VOCAB, seed=seed))
        for seed, kind in enumerate(("mistral", "llama"))
    )
    return target, SmallLm.from_lm(other.lm, other.spec)


def logits(lm: Any, ids: Sequence[int]) -> torch.Tensor:
    """[T, V], by a forward without a cache."""
    ids_1S = torch.tensor([list(ids)])
    out = lm.dense(
        ids_1S, torch.arange(len(ids))[None], lm.document_masks(torch.zeros_like(ids_1S))
    )
    return out.logits_BTV[0].float()


def simulated(pair: tuple[Target, SmallLm], prompt: Sequence[int], weight: float) -> list[int]:
    """Greedy rounds by the definition."""
    (target, drafter), text = pair, list(prompt)
    lm, end = target.lm, len(prompt) + LENGTH
    while len(text) < end:
        draft = list[int]()
        for _ in range(min(DRAFTED, end - len(text) - 1)):
            draft.append(int(logits(drafter.lm, text + draft)[-1].argmax()))
        once = logits(lm, text + draft)[len(text) - 1 :]
        choices = once
        if draft:
            again = logits(lm, [*text, *draft, *BETWEEN, *draft])[-len(draft) - 1 :]
            choices = (1 - weight) * once + weight * again
        for at, choice in enumerate(choices.argmax(-1).tolist()):
            text.append(choice)
            if at == len(draft) or choice != draft[at]:
                break
    return text[len(prompt) : end]


def written(pair: tuple[Target, SmallLm], rule: str, sampling: Sampling, batch: int) -> Any:
    policy = make_policy(CHAIN)
    return generate(
        pair[0], PROMPTS, drafter=pair[1], policy=policy, rule=rule, sampling=sampling, batch=batch
    )


@pytest.mark.parametrize("batch", [1, 3])
def test_both_readings_choose(pair: tuple[Target, SmallLm], batch: int) -> None:
    """Also at the end of a text, where rows of a batch draft unequally."""
    made = written(pair, "reflect:0.6", GREEDY, batch)
    wanted = [simulated(pair, prompt, 0.6) for prompt in PROMPTS]
    assert [list(output.token_ids) for output in made.outputs] == wanted
    assert wanted != [simulated(pair, prompt, 0.0) for prompt in PROMPTS]
    assert made.stats.verification == "approximate:reflect:0.6"


@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(temperature=1.0, max_new_tokens=LENGTH, seed=3)]
)
def test_without_weight_it_is_the_lossless_rule(
    pair: tuple[Target, SmallLm], sampling: Sampling
) -> None:
    """And what the second reading leaves in the cache is no part of the text."""
    plain = generate(pair[0], PROMPTS, sampling=sampling)
    for rule in ("reflect:0", "reflect:1e-9"):
        for batch in (1, 3):
            made = written(pair, rule, sampling, batch)
            assert [o.token_ids for o in made.outputs] == [o.token_ids for o in plain.outputs]
            assert made.stats.accepted > 0


@pytest.mark.parametrize("rule", ["reflect:0.3", "reflect:1"])
def test_ids_that_a_reading_masks_are_no_numbers_of_the_other(
    pair: tuple[Target, SmallLm], rule: str
) -> None:
    """Of both readings together: -inf less -inf is none. The law masks all but the best id."""
    target = mixed(pair[0], pair[0], parse("contrast:0:1=m"))
    how: dict[str, Any] = {"drafter": pair[1], "policy": make_policy(CHAIN), "sampling": GREEDY}
    made = generate(target, PROMPTS, rule=rule, **how)
    assert made.stats.accepted > 0
    assert made.stats.verification == f"approximate of contrast:0:1:{rule}"


def test_a_tokenizer_that_lacks_the_prompt(pair: tuple[Target, SmallLm]) -> None:
    """Ids beyond the embedding are left out; what the tokenizer refuses is said in words."""
    of = Tokenizer(WordLevel({"Is": 1, "right": 8, "?": 9, "once": 2}, unk_token="Is"))
    of.pre_tokenizer = Whitespace()
    target = replace(pair[0], tokenizer=PreTrainedTokenizerFast(tokenizer_object=of))
    ids = PROMPT_IDS(target)
    assert 2 in ids
    assert set(ids) == {1, 2}
    of.model = WordLevel({"a": 1})
    target = replace(pair[0], tokenizer=PreTrainedTokenizerFast(tokenizer_object=of))
    with pytest.raises(IncompatibleError, match="tokenizer of target"):
        PROMPT_IDS(target)


def test_where_the_context_is_full_a_draft_is_read_once() -> None:
    target = Target.from_model(build_model(num_layers=1, vocab=VOCAB, max_position_embeddings=16))
    drafter = SmallLm.from_lm(target.lm, target.spec)
    how: dict[str, Any] = {"drafter": drafter, "policy": make_policy(CHAIN), "sampling": GREEDY}
    made = [generate(target, [[1] * 8], rule=rule, **how) for rule in ("reflect:1", "auto")]
    assert made[0].outputs == made[1].outputs
    assert made[0].outputs[0].finish_reason == "context"


def test_what_cannot_be_read_again_is_refused(pair: tuple[Target, SmallLm]) -> None:
    recurrent = Target.from_model(tiny_hybrid("qwen3_next"))
    with pytest.raises(IncompatibleError, match="rolled back"):
        Engine(recurrent, pair[1], make_policy(CHAIN), "reflect")
    with pytest.raises(RecipeError, match="chains only"):
        Engine(*pair, make_policy({"policy": "opt-tree", "nodes": 7}), "reflect")
    with pytest.raises(RecipeError) as error:
        relaxation("reflect:1.5")
    assert "0 to 1" in str(error.value.expected)
