"""A draft model that reads the useful parts of a long prompt: which parts, and what it drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.drafter import RoundView, Space
from specctl.core.errors import RecipeError
from specctl.drafters.lm.rasd import RasdOptions
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions
from specctl.drafters.states.lm_state import LmState
from specctl.drafters.states.short_context import PARTS, bm25, shortened
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target

SIZE = 64
LONG = [(7 * at + at // 5) % 90 + 3 for at in range(200)]
SHORT = LONG[:40]


def drafter_of(target: Target, size: int | None = SIZE) -> SmallLm:
    drafter = SmallLm.from_lm(target.lm, target.spec)
    drafter.options = SmallLmOptions(context=size)
    return drafter


def view(target: Target, tokens: list[int]) -> RoundView:
    last = torch.tensor([len(tokens) - 1])
    return RoundView((0,), torch.tensor([0]), torch.tensor(tokens[-1:]), last, (tokens,))


def test_the_piece_that_answers_the_question_is_kept_in_its_order() -> None:
    piece = SIZE // PARTS
    noise = [5 + at % 3 for at in range(piece)]
    needle = [100 + at for at in range(piece)]
    text = [1] * piece + noise * 9 + needle + noise * 9 + [100, 103, 107, 2] * (piece // 2)
    found = shortened(text, SIZE)
    assert len(found) == SIZE
    assert found[:piece] == [1] * piece
    assert found[-2 * piece :] == text[-2 * piece :]
    at = found.index(100)
    assert found[at : at + piece] == needle
    kept = iter(text)
    assert all(token in kept for token in found)  # a subsequence of the text
    assert shortened(text[:SIZE], SIZE) == text[:SIZE]


def test_a_token_of_every_piece_weighs_less_than_one_of_a_single_piece() -> None:
    """idf = ln(1 + (N - n + .5) / (n + .5)), times tf (k1 + 1) / (tf + k1), by hand."""
    score = bm25({1, 2}, [[1, 3], [1, 2], [1, 1]])
    common, rare = torch.tensor([0.5 / 3.5, 2.5 / 1.5]).log1p().tolist()
    assert score == pytest.approx([common, common + rare, common * 2 * 2.2 / 3.2])


def test_the_draft_reads_the_shortened_prompt_and_all_that_follows(make_target: Any) -> None:
    """Round by round its logits are those of a state that was given the short text."""
    target = make_target()
    space = Space(1, 512, 8, torch.device("cpu"), torch.float32)
    drafter = drafter_of(target)
    short, plain = drafter.open(space), drafter.open_whole(space)
    assert isinstance(plain, LmState)
    kept = shortened(LONG, SIZE)
    short.start(0, LONG, {})
    plain.start(0, kept, {})
    for more in ([], [8, 11], [8, 11, 9, 4, 60]):
        text = kept + more
        found = short.root(view(target, LONG + more))
        assert torch.equal(found, plain.root(view(target, text)))
        child, parent = torch.tensor([[12]]), torch.tensor([[-1]])
        assert torch.equal(short.expand(child, parent), plain.expand(child, parent))
        assert torch.equal(short.hidden(), plain.hidden())
    short.end(0)
    short.start(0, SHORT, {})  # of another row, which is read whole
    plain.start(0, SHORT, {})
    assert torch.equal(short.root(view(target, SHORT)), plain.root(view(target, SHORT)))


@pytest.mark.parametrize(
    "serve",
    [
        {"policy": "chain", "length": 4},
        {"policy": "static-tree", "branch": (2, 2, 1)},
    ],
)
def test_texts_are_those_of_the_whole_prompt(make_target: Any, serve: dict[str, Any]) -> None:
    """In ragged batches. A target that drafts for itself is accepted in full where it reads the
    whole prompt, and not where it reads a part."""
    target = make_target()
    policy, prompts = make_policy(serve), (LONG, SHORT, LONG[:150])
    sampling = Sampling(max_new_tokens=6 * (policy.depth + 1), ignore_eos=True)

    def run(drafter: SmallLm | None, prompts: tuple[list[int], ...]) -> Any:
        grown = None if drafter is None else policy
        found = generate(
            target, prompts, drafter=drafter, sampling=sampling, policy=grown, batch=len(prompts)
        )
        return [one.token_ids for one in found.outputs], found.stats.rounds

    assert run(drafter_of(target), prompts)[0] == run(None, prompts)[0]
    assert run(drafter_of(target), (SHORT,))[1] == 6
    assert run(drafter_of(target, None), (LONG,))[1] == 6
    assert run(drafter_of(target), (LONG,))[1] > 6


def test_what_would_read_prompts_whole_is_refused() -> None:
    with pytest.raises(RecipeError, match="reads every prompt whole"):
        RasdOptions(context=SIZE)
    with pytest.raises(RecipeError):
        SmallLmOptions(context=8)
