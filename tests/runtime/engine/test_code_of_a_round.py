"""How much code a round executes: what somebody who wants to follow one has to read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specctl.drafters import families
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl_testing.runtime.executed import executed

TREE = {"policy": "dynamic-tree", "length": 4, "nodes": 12, "beam": 4}
# Files, functions, lines at most, with the compiled step (178 functions, 816 lines; 93 and 391) or
# without it: a ratchet that only goes down. Wanted are 22 files of a drafted round, 12 and 350
# lines of a plain one.
MOST = {"eagle3": (41, 202, 873), "plain": (31, 116, 442)}


def round_of(target: Any, name: str) -> Callable[[], object]:
    """A round in the middle of a sampled text, with everything that the first ones make done."""
    drafter = policy = None
    if name != "plain":
        torch.manual_seed(1)
        family = families()[name]
        drafter = family.build(family.options(), target.spec, None).to(target.device, target.dtype)
        policy = make_policy(TREE)
    engine = Engine(target, drafter, policy, "auto", 1)
    engine.open(96)
    engine.submit(0, Request((3, 1, 4, 1, 5), Sampling(0.8, seed=1, max_new_tokens=60)))
    for _ in range(6):
        engine.step()
    return engine.step


@pytest.mark.parametrize("name", sorted(MOST))
def test_a_round_executes_no_more_code_than_it_did(name: str, make_target: Any) -> None:
    found = executed(round_of(make_target(num_layers=3), name))
    counts = found.counts()
    assert all(a <= b for a, b in zip(counts, MOST[name], strict=True)), (
        f"{counts} of at most {MOST[name]}: {sorted(found.files)}"
    )


def test_the_tracer_counts_what_runs_and_nothing_else() -> None:
    sampling = Sampling(0.8, seed=1)
    nothing = executed(lambda: sorted([2, 1]))
    assert nothing.counts() == (0, 0, 0)
    once = executed(lambda: make_policy(TREE))
    again = executed(lambda: [make_policy(TREE), make_policy(TREE)])
    assert once.counts() == again.counts()
    assert any(file.endswith("policies/__init__.py") for file in once.files)
    assert executed(lambda: sampling.temperature).counts() == (0, 0, 0)
