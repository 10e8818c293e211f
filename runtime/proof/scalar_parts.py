"""What scalar rules are written with: laws, a drafted tree, and where coins come from.

Words: all of a `ScalarTree` tree is indexed by fed index (0 = the root).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specctl.core.tree import NodeKind

Law = NDArray[np.float64]


class Chooser(Protocol):
    """Where a scalar rule gets its randomness: keyed by the fed index it is asked at."""

    def flip(self, fed: int, probability: float) -> bool: ...

    def pick(self, fed: int, law: Law) -> int: ...


@dataclass(frozen=True, slots=True)
class ScalarTree:
    """One drafted tree with the laws at its fed tokens (index 0 = the root).

    `token`, `parent` (fed indices), `children` (fed indices in draw order, by fed index), `p` and
    `q` (None for deterministic candidates), all by fed index; token[0] is unused.
    """

    token: Sequence[int]
    parent: Sequence[int]
    children: Sequence[Sequence[int]]
    p: Sequence[Law]
    q: Sequence[Law] | None
    kind: NodeKind


# A rule ends at a fed index and leaves the law of the token after it.
Ended = tuple[int, Law]
ScalarRule = Callable[[ScalarTree, Chooser], Ended]


def positive(law: Law) -> Law:
    return np.maximum(law, 0.0)


def norm(law: Law, fallback: Law) -> Law:
    mass = law.sum()
    return law / mass if mass > 0 else fallback


def ratio(p: float, q: float) -> float:
    return min(1.0, p / q) if q > 0 else 0.0


def point(token: int, size: int) -> Law:
    law = np.zeros(size)
    law[token] = 1.0
    return law


def without(law: Law, token: int) -> Law:
    """The law after `token` was drawn from it and not put back."""
    law = law.copy()
    law[token] = 0.0
    return norm(law, law)


@dataclass(frozen=True, slots=True)
class NoiseChooser:
    """Decides by given numbers: uniforms by fed index, Gumbel noise by fed index and token."""

    uniform_T: Law
    gumbel_TV: Law

    def flip(self, fed: int, probability: float) -> bool:
        return bool(self.uniform_T[fed] < probability)

    def pick(self, fed: int, law: Law) -> int:
        return draw(law, self.gumbel_TV[fed])


def draw(law: Law, gumbel_V: Law) -> int:
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(law) + gumbel_V))
