"""The rules once more, as scalar recursions against a `Chooser`: the reference of the fast rules.

Written from the papers' recursions, sharing no code with the vectorised rules. With a
`ReplayChooser` (enumerate.py) they are summed over every coin; with a `NoiseChooser` they must
decide exactly as the fast rules do under the same noise.

Words: all of a `Drafted` tree is indexed by fed index (0 = the root).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specctl.drafters.parts.tree import NodeKind

Law = NDArray[np.float64]


class Chooser(Protocol):
    """Where a scalar rule gets its randomness: keyed by the fed index it is asked at."""

    def flip(self, fed: int, probability: float) -> bool: ...

    def pick(self, fed: int, law: Law) -> int: ...


@dataclass(frozen=True, slots=True)
class Drafted:
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
ScalarRule = Callable[[Drafted, Chooser], Ended]


def positive(law: Law) -> Law:
    return np.maximum(law, 0.0)


def norm(law: Law, fallback: Law) -> Law:
    mass = law.sum()
    return law / mass if mass > 0 else fallback


def _ratio(p: float, q: float) -> float:
    return min(1.0, p / q) if q > 0 else 0.0


def point(token: int, size: int) -> Law:
    law = np.zeros(size)
    law[token] = 1.0
    return law


def greedy(tree: Drafted, chooser: Chooser) -> Ended:
    """Follow the argmax."""
    del chooser
    return _follow(tree, lambda at: int(np.argmax(tree.p[at])))


def target_only(tree: Drafted, chooser: Chooser) -> Ended:
    """Follow the target's own draws."""
    return _follow(tree, lambda at: chooser.pick(at, tree.p[at]))


def _follow(tree: Drafted, choose: Callable[[int], int]) -> Ended:
    at = 0
    while True:
        token = choose(at)
        hits = [c for c in tree.children[at] if tree.token[c] == token]
        if not hits:
            return at, point(token, len(tree.p[at]))
        at = hits[0]


def one_hot(tree: Drafted, chooser: Chooser) -> Ended:
    """Candidates one by one; a missed candidate leaves the law."""
    at, law = 0, tree.p[0]
    while True:
        for child in tree.children[at]:
            if chooser.flip(child, float(law[tree.token[child]] / max(law.sum(), 1e-300))):
                at, law = child, tree.p[child]
                break
            law = law.copy()
            law[tree.token[child]] = 0.0
        else:
            return at, norm(law, tree.p[at])


def chain(tree: Drafted, chooser: Chooser) -> Ended:
    """Token-level speculative sampling."""
    assert tree.q is not None
    at = 0
    while tree.children[at]:
        child = tree.children[at][0]
        token = tree.token[child]
        if not chooser.flip(child, _ratio(tree.p[at][token], tree.q[at][token])):
            return at, norm(positive(tree.p[at] - tree.q[at]), tree.p[at])
        at = child
    return at, tree.p[at]


def block(tree: Drafted, chooser: Chooser) -> Ended:
    """Block verification, from the definition of h."""
    assert tree.q is not None
    p, q, last = tree.p, tree.q, len(tree.token) - 1
    weight, ended = 1.0, (0, norm(positive(p[0] - q[0]), p[0]) if last else p[0])
    for i in range(1, last + 1):
        q_x = q[i - 1][tree.token[i]]
        weight = min(1.0, weight * p[i - 1][tree.token[i]] / q_x) if q_x > 0 else 0.0
        excess = positive(weight * p[i] - q[i])
        whole = excess.sum() + (1.0 - weight)
        passes = weight if i == last else (excess.sum() / whole if whole > 0 else 0.0)
        if chooser.flip(i, float(passes)):
            ended = (i, p[i] if i == last else norm(excess, p[i]))
    return ended


def recursive(tree: Drafted, chooser: Chooser) -> Ended:
    """Recursive rejection: without replacement, or over i.i.d. siblings."""
    assert tree.q is not None
    at, r, s = 0, tree.p[0], tree.q[0]
    while True:
        for child in tree.children[at]:
            token = tree.token[child]
            if chooser.flip(child, _ratio(r[token], s[token])):
                at, r, s = child, tree.p[child], tree.q[child]
                break
            r = norm(positive(r - s), np.zeros_like(r))
            if tree.kind is NodeKind.WITHOUT_REPLACEMENT:
                s = without(s, token)
        else:
            return at, norm(r, tree.p[at])


def without(law: Law, token: int) -> Law:
    """The law after `token` was drawn from it and not put back."""
    law = law.copy()
    law[token] = 0.0
    return norm(law, law)


def traversal(tree: Drafted, chooser: Chooser) -> Ended:
    """Traversal verification, in its recursive form."""
    assert tree.q is not None
    weight = {0: 1.0}
    p, q = list(tree.p), list(tree.q)

    def visit(at: int) -> Ended | None:
        for child in tree.children[at]:
            token = tree.token[child]
            q_x = q[at][token]
            weight[child] = min(1.0, weight[at] * p[at][token] / q_x) if q_x > 0 else 0.0
            found = visit(child)
            if found is not None:
                return found
            excess = positive(weight[at] * p[at] - q[at])
            mass, whole = excess.sum(), excess.sum() + (1.0 - weight[at])
            p[at] = norm(excess, p[at])
            weight[at] = mass / whole if whole > 0 else 0.0
            if tree.kind is NodeKind.WITHOUT_REPLACEMENT:
                q[at] = without(q[at], token)
        return (at, p[at]) if at == 0 or chooser.flip(at, weight[at]) else None

    found = visit(0)
    assert found is not None
    return found


SCALAR_RULES: dict[str, ScalarRule] = {
    "greedy": greedy,
    "target-only": target_only,
    "one-hot": one_hot,
    "chain": chain,
    "block": block,
    "recursive": recursive,
    "traversal": traversal,
}


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
