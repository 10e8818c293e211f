"""Packages beside a target whose embedding was padded otherwise than the one they were made for."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specctl.core.errors import IncompatibleError
from specctl.drafters import families
from specctl.export.package.folder import load_drafter
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl_testing.export.family_drafters import made
from specctl_testing.models import build_model

BEFORE, TEXTS = 48, 40  # rows of the base, ids of its tokenizer
# One of each kind: heads, tables over all ids, language models, memories, the target itself.
KINDS = (
    "eagle3", "medusa", "dspark", "mlp-speculator", "small-lm", "sorted", "token-recycling",
    "swift",
)  # fmt: skip


class Tokens(SimpleNamespace):
    """A tokenizer of `TEXTS` ids."""

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(TEXTS)}

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


def target_of(rows: int, change: Any = None, base: Any = None) -> Target:
    """The base with so many rows of embedding and head."""
    model = copy.deepcopy(base)
    if rows != BEFORE:
        torch.manual_seed(3)
        model.resize_token_embeddings(rows, mean_resizing=False)
    if change is not None:
        change(model)
    found = Target.from_model(model, name="some/target")
    tokens = Tokens(eos_token_id=None)
    return replace(found, tokenizer=tokens, tokenizer_fingerprint="b" * 64, eos_ids=(2,))


@pytest.fixture(scope="module")
def base() -> Any:
    return build_model(num_layers=4, hidden=16, vocab=BEFORE)


def packaged(name: str, base: Any, save: Any) -> Any:
    target = target_of(BEFORE, base=base)
    drafter = made(name, target)
    policy = families()[name].policies[0]
    return save(drafter, of=target, serve={"policy": policy, "length": 3})


def texts(target: Target, drafter: Any = None, policy: Any = None, heat: float = 0.0) -> Any:
    sampling = Sampling(max_new_tokens=6, temperature=heat, seed=1)
    prompts = [[1, 5, 9, 5, 9, 5], [7, 7, 3]]
    more = {} if drafter is None else {"drafter": drafter, "policy": policy}
    return [done.token_ids for done in generate(target, prompts, sampling=sampling, **more).outputs]


@pytest.mark.parametrize("name", KINDS)
def test_a_package_takes_its_target_padded_otherwise(name: str, base: Any, save: Any) -> None:
    folder = packaged(name, base, save)
    policy = make_policy({"policy": families()[name].policies[0], "length": 3})
    for rows, allow in ((64, ()), (44, ("target",))):
        target = target_of(rows, base=base)
        drafter = load_drafter(folder, target, allow=allow)
        assert drafter.spec.vocab_size == rows
        if drafter.needs().borrow:
            drafter.bind(target.borrowed())
        drafted = texts(target, drafter, policy)
        if drafter.lossless:
            assert drafted == texts(target)
        assert texts(target, drafter, policy, heat=1.0)


def test_padding_alone_is_no_difference_where_head_and_embedding_are_one(save: Any) -> None:
    tied = build_model(num_layers=4, hidden=16, vocab=BEFORE)
    tied.config.tie_word_embeddings = True
    tied.tie_weights()
    folder = packaged("medusa", tied, save)
    assert load_drafter(folder, target_of(64, base=tied)).vocab.size == BEFORE


def test_padding_alone_is_no_difference_and_other_weights_are(base: Any, save: Any) -> None:
    folder = packaged("medusa", base, save)
    assert load_drafter(folder, target_of(64, base=base)).vocab.size == BEFORE

    def tune(model: Any) -> None:
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(1.01)

    tuned = target_of(64, tune, base)
    with pytest.raises(IncompatibleError, match="target of target and drafter") as caught:
        load_drafter(folder, tuned)
    assert "--allow target" in caught.value.do
    assert load_drafter(folder, tuned, allow=("target",)).spec.vocab_size == 64


def test_rows_that_texts_use_are_no_padding(base: Any, save: Any) -> None:
    folder = packaged("medusa", base, save)
    cut = target_of(TEXTS - 8, base=base)
    with pytest.raises(IncompatibleError, match="vocab_size of target and drafter") as caught:
        load_drafter(folder, cut)
    assert "--allow padding" in caught.value.do
    drafter = load_drafter(folder, cut, allow=("target", "padding"))
    drafter.bind(cut.borrowed())
    policy = make_policy({"policy": "chain", "length": 3})
    assert texts(cut, drafter, policy) == texts(cut)


def test_the_target_s_own_padding_may_be_generated(base: Any, save: Any) -> None:
    """Verification reads every row of the target: what no drafter can say is drawn all the same."""

    def loud(model: Any) -> None:
        with torch.no_grad():
            model.get_output_embeddings().weight[60] = 3.0

    target = target_of(64, loud, base)
    drafter = load_drafter(packaged("medusa", base, save), target, allow=("target",))
    drafter.bind(target.borrowed())
    policy = make_policy({"policy": "chain", "length": 3})
    drafted = texts(target, drafter, policy)
    assert drafted == texts(target)
