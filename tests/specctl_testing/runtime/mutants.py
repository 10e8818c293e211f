"""What seeded bugs are written with: a mutant, and enumeration as the check that kills it."""

import dataclasses
from collections.abc import Callable
from typing import Any

from specctl.runtime.proof.cases import make_case
from specctl.runtime.proof.enumerate import enumerate_case


def ratio(p, q):
    return min(1.0, p / q) if q > 0 else 0.0


def is_exact(rule, kind, shape, family="random"):
    """Enumeration against the target's joint distribution, over three random pairs."""

    def check(mutant):
        cases = [make_case(rule, kind, shape, family, 3, seed) for seed in range(3)]
        return all(enumerate_case(case, **mutant(case)).error <= 1e-12 for case in cases)

    return check


def as_rule(rule):
    return lambda case: {"rule": rule}


def as_q(change):
    return lambda case: {"given_q": change(case)}


def as_drafts(drafts):
    return lambda case: {"drafts": drafts}


def nothing(case):
    return {}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A check, the right thing it passes on, and the wrong one it must fail on."""

    check: Callable[[Any], bool]
    wrong: Any
    right: Any = nothing
