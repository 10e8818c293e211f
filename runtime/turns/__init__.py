"""Turns: a text that the target and a smaller model write in turns. Approximate by design.

A mixture (runtime/target/variants/mixture.py) has one distribution for every token, against which
drafts are verified. Here whole stretches are another model's: `entropy` lets the models take turns
by how unsure the one is that writes, `reward` lets the smaller one write steps that a third model
judges, `reward-budget` drops as many of these as a text may cost. Each model has an engine of its
own, and reads what the others wrote when it is its turn. The target's turns may be drafted, which
changes nothing of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from specctl.core.drafter import Drafter
from specctl.runtime.engine.engine import Engine
from specctl.runtime.policies.base import Policy
from specctl.runtime.policies.length import LengthChooser
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.mixed import apart
from specctl.runtime.turns.base import Turns
from specctl.runtime.turns.entropy import EntropyTurns
from specctl.runtime.turns.reward import RewardTurns
from specctl.runtime.turns.reward_budget import BudgetTurns

KINDS: Mapping[str, type[Turns]] = {
    "entropy": EntropyTurns,
    "reward": RewardTurns,
    "reward-budget": BudgetTurns,
}

__all__ = ["KINDS", "Turns", "make_turns"]


def make_turns(
    target: Target,
    drafter: Drafter | None,
    policy: Policy | None,
    rule: str,
    chooser: LengthChooser | None = None,
) -> Turns:
    """What writes for a target with others beside it; the drafter is of the target's turns."""
    mixture = target.mixture
    assert mixture is not None, f"{target.name} writes alone"
    own, others = apart(target)
    return KINDS[mixture.law](Engine(own, drafter, policy, rule, chooser=chooser), others, mixture)
