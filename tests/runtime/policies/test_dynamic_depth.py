"""Dynamic depth decoding where it is known to pay: some tokens begin a long run that the drafter
knows, behind the others it knows nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies.base import Policy
from specctl.runtime.policies.ddd import DynamicDepth
from specctl.runtime.policies.dynamic_tree import DynamicTree
from specctl.runtime.sampling.sampling import Sampling
from specctl_testing.runtime.markov import MarkovDrafter, Pair, runs_and_open

RUN, OPEN = 8, 4  # tokens that follow each other, and tokens behind which anything may come
PRICE, DEEPEST, TOKENS = 0.1, 10, 96  # a drafted level costs .1 of a forward pass of the target


def worth(pair: Pair, policy: Policy) -> Tensor:
    """[R]: tokens a unit of cost of every request, asked alone."""
    found = []
    for seed in range(6):
        drafter = MarkovDrafter(pair.q_VV)
        sampling = Sampling(1.0, seed=seed, max_new_tokens=TOKENS, ignore_eos=True)
        (done,) = Engine(pair.target, drafter, policy).run([Request((seed % RUN,), sampling)])
        found.append(TOKENS / (done.stats.rounds + PRICE * drafter.state.calls))
    return torch.tensor(found)


@pytest.mark.proof
def test_a_depth_that_follows_confidence_is_worth_more_than_any_fixed_one() -> None:
    pair, tree = runs_and_open(RUN, OPEN), {"nodes": 20, "beam": 4}
    fixed = [worth(pair, DynamicTree(depth, **tree)) for depth in range(1, DEEPEST + 1)]
    best_R = max(fixed, key=lambda worth_R: float(worth_R.mean()))
    apart_R = worth(pair, DynamicDepth(DEEPEST, **tree, threshold=0.25)) - best_R
    assert float(apart_R.mean()) > 4 * float(apart_R.std()) / len(apart_R) ** 0.5
