"""What scalar rules are written with: distributions, a drafted tree, and where coins come from.

All of a `ScalarTree` is indexed by fed index (0 = the root). Letters: T fed tokens, V target
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specctl.core.tree import NodeKind

Distribution = NDArray[np.float64]


class Chooser(Protocol):
    """Where a scalar rule gets its randomness: keyed by the fed index."""

    def flip(self, fed: int, probability: float) -> bool: ...

    def pick(self, fed: int, distribution: Distribution) -> int: ...

    def invert(self, fed: int, distribution: Distribution) -> int: ...


@dataclass(frozen=True, slots=True)
class ScalarTree:
    """One drafted tree with the distributions at its fed tokens (index 0 = the root).

    `token`, `parent` (fed indices), `children` (fed indices in draw order, by fed index), `p` and
    `q` (None for deterministic candidates), all by fed index; token[0] is unused.
    """

    token: Sequence[int]
    parent: Sequence[int]
    children: Sequence[Sequence[int]]
    p: Sequence[Distribution]
    q: Sequence[Distribution] | None
    kind: NodeKind


def drawn_from_numbers(tree: ScalarTree) -> ScalarTree:
    """The tree without what was drawn from NaN or infinities: behind such a q there is no draft."""
    if tree.q is None:
        return tree
    bad = [fed for fed, q in enumerate(tree.q) if not np.isfinite(q).all()]
    if not bad:
        return tree
    end = len(tree.token)
    if all(tree.parent[fed] == fed - 1 for fed in range(1, end)):  # a chain ends with its list
        end = min(end, bad[0] + 1)
    kept = range(end)
    return ScalarTree(
        tree.token[:end],
        tree.parent[:end],
        [[] if fed in bad else [c for c in tree.children[fed] if c < end] for fed in kept],
        tree.p[:end],
        [np.zeros_like(tree.q[fed]) if fed in bad else tree.q[fed] for fed in kept],
        tree.kind,
    )


# A rule ends at a fed index and leaves the distribution of the token after it.
Ended = tuple[int, Distribution]
ScalarRule = Callable[[ScalarTree, Chooser], Ended]


def positive(distribution: Distribution) -> Distribution:
    return np.maximum(distribution, 0.0)


def norm(distribution: Distribution, fallback: Distribution) -> Distribution:
    mass = distribution.sum()
    return distribution / mass if mass > 0 else fallback


def ratio(p: float, q: float) -> float:
    return min(1.0, p / q) if q > 0 else 0.0


def point(token: int, size: int) -> Distribution:
    distribution = np.zeros(size)
    distribution[token] = 1.0
    return distribution


def without(distribution: Distribution, token: int) -> Distribution:
    """The distribution after `token` was drawn from it and not put back."""
    distribution = distribution.copy()
    distribution[token] = 0.0
    return norm(distribution, distribution)


@dataclass(frozen=True, slots=True)
class NoiseChooser:
    """Decides by given numbers: uniforms by fed index, Gumbel noise by fed index and token."""

    uniform_T: Distribution
    gumbel_TV: Distribution

    def flip(self, fed: int, probability: float) -> bool:
        return bool(self.uniform_T[fed] < probability)

    def pick(self, fed: int, distribution: Distribution) -> int:
        return draw(distribution, self.gumbel_TV[fed])

    def invert(self, fed: int, distribution: Distribution) -> int:
        cdf = np.cumsum(distribution)
        return int(np.argmax(cdf > self.uniform_T[fed] * cdf[-1]))


def draw(distribution: Distribution, gumbel_V: Distribution) -> int:
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(distribution) + gumbel_V))
