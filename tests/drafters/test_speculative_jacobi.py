"""Speculative Jacobi decoding of images: what stands in places that nothing is known of."""

from __future__ import annotations

from typing import Any

import pytest

from specctl.core.errors import RecipeError
from specctl.drafters import family
from specctl.drafters.windows.speculative_jacobi import FILLS
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.proof.exact_distribution import ExactDistribution
from specctl.runtime.sampling.sampling import Sampling
from specctl_testing.drafters.parallel_runs import decode

FAMILY = family("speculative-jacobi")
COLUMNS = 5
PROMPTS = ((3, 1, 4, 1, 5), (2, 6, 2, 6))


@pytest.mark.parametrize("fill", FILLS)
def test_texts_follow_the_target_whatever_stands_first(make_target: Any, fill: str) -> None:
    target, prompt = make_target(num_layers=2, vocab=4), [1, 2, 3]
    drafter = FAMILY.build(FAMILY.options(fill=fill, columns=2), target.spec, None)
    engine = Engine(target, drafter, make_policy({"policy": "chain", "length": 3}), num_slots=256)
    sampling = Sampling(temperature=1.5, max_new_tokens=4, ignore_eos=True)
    requests = [
        Request(tuple(prompt), Sampling(1.5, seed=seed, max_new_tokens=4, ignore_eos=True))
        for seed in range(1024)
    ]
    ended = engine.run(requests)
    exact = ExactDistribution.of(target, prompt, sampling)
    assert exact.test([tuple(done.tokens) for done in ended]).p_value > 1e-3
    assert sum(done.stats.rounds for done in ended) < 0.95 * 4 * len(ended)


@pytest.mark.parametrize(
    ("fill", "temperature"), [("above", 0), ("above-token", 1.0), ("above", 1)]
)
def test_the_row_above_is_repeated(make_target: Any, fill: str, temperature: float) -> None:
    """Greedily the likeliest token there is the one that was written."""
    target = make_target(vocab=8)
    drafter = FAMILY.build(FAMILY.options(fill=fill, columns=COLUMNS), target.spec, None)
    ran = decode(
        target,
        drafter,
        PROMPTS,
        tokens=80,
        policy="chain",
        length=5,
        slots=2,
        temperature=temperature,
    )
    known, same, count = dict[int, int](), 0, 0
    for outcome in ran.outcomes:
        for row, slot in enumerate(outcome.view.slots):
            text, fed = outcome.view.tokens[row], int(outcome.tree.valid_BN[row].sum())
            end = int(outcome.view.kept_len_B[row]) + 1  # of the text as it was then
            for depth in range(known.get(slot, 0), min(fed, COLUMNS)):
                above = end + depth - COLUMNS
                if above >= len(PROMPTS[slot]):
                    count += 1
                    same += int(outcome.tree.token_BN[row, depth]) == text[above]
            known[slot] = fed - outcome.num_accepted[row]
    assert count > 10
    assert same < count if (fill, temperature) == ("above", 1) else same == count


def test_rows_above_need_to_know_how_long_a_row_is() -> None:
    with pytest.raises(RecipeError, match="the tokens in a row of the image"):
        FAMILY.options(fill="above")
