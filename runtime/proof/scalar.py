"""The rules once more, as scalar recursions against a `Chooser`: the reference of the fast rules.

Written from the papers' recursions, sharing no code with the vectorised rules. With a
`ReplayChooser` (enumerate.py) they are summed over every coin; with a `NoiseChooser` they must
decide exactly as the fast rules do under the same noise. A `ScalarTree` is indexed by fed index (0
= the root).
Letters: T fed tokens, V target vocabulary.
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
    """Where a scalar rule gets its randomness: keyed by the fed index it is asked at."""

    def flip(self, fed: int, probability: float) -> bool: ...

    def pick(self, fed: int, distribution: Distribution) -> int: ...


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


def draw(distribution: Distribution, gumbel_V: Distribution) -> int:
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(distribution) + gumbel_V))


def greedy(tree: ScalarTree, chooser: Chooser) -> Ended:
    """Follow the argmax."""
    del chooser
    return _follow(tree, lambda at: int(np.argmax(tree.p[at])))


def target_only(tree: ScalarTree, chooser: Chooser) -> Ended:
    """Follow the target's own draws."""
    return _follow(tree, lambda at: chooser.pick(at, tree.p[at]))


def _follow(tree: ScalarTree, choose: Callable[[int], int]) -> Ended:
    """A token may have been drafted twice: whatever hangs below either copy is walked."""
    alive = [0]
    while True:
        token = choose(alive[0])
        hits = [c for at in alive for c in tree.children[at] if tree.token[c] == token]
        if not hits:
            return alive[0], point(token, len(tree.p[0]))
        alive = hits


def one_hot(tree: ScalarTree, chooser: Chooser) -> Ended:
    """Candidates one by one; a missed candidate leaves the distribution."""
    at, distribution = 0, tree.p[0]
    while True:
        for child in tree.children[at]:
            if chooser.flip(
                child, float(distribution[tree.token[child]] / max(distribution.sum(), 1e-300))
            ):
                at, distribution = child, tree.p[child]
                break
            distribution = distribution.copy()
            distribution[tree.token[child]] = 0.0
        else:
            return at, norm(distribution, tree.p[at])


def chain(tree: ScalarTree, chooser: Chooser) -> Ended:
    """Token-level speculative sampling."""
    assert tree.q is not None
    at = 0
    while tree.children[at]:
        child = tree.children[at][0]
        token = tree.token[child]
        if not chooser.flip(child, ratio(tree.p[at][token], tree.q[at][token])):
            return at, norm(positive(tree.p[at] - tree.q[at]), tree.p[at])
        at = child
    return at, tree.p[at]


def block(tree: ScalarTree, chooser: Chooser) -> Ended:
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


def traversal(tree: ScalarTree, chooser: Chooser) -> Ended:
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
            if tree.kind.is_distinct:
                q[at] = without(q[at], token)
        return (at, p[at]) if at == 0 or chooser.flip(at, weight[at]) else None

    found = visit(0)
    assert found is not None
    return found


def multi_path(tree: ScalarTree, chooser: Chooser) -> Ended:
    """Block verification of the best of several whole paths, with that path's own distribution as
    q."""
    assert tree.q is not None
    num_paths = len(tree.children[0])
    line, alive, distributions, below, here = [0], list(tree.children[0]), [], 0.0, 1.0
    while alive:
        p, q = tree.p[line[-1]], tree.q[line[-1]]
        order = sorted(range(len(p)), key=lambda x: (p[x] / q[x] if q[x] > 0 else -1.0, x))
        edge = below + here * np.cumsum(q[order])
        low = edge - here * q[order]
        skewed = np.zeros_like(q)
        skewed[order] = edge**num_paths - low**num_paths
        distributions.append(skewed / max(skewed.sum(), 1e-300))
        best = max(alive, key=lambda fed: order.index(tree.token[fed]))
        same = [fed for fed in alive if tree.token[fed] == tree.token[best]]
        below, here = float(low[order.index(tree.token[best])]), here * q[tree.token[best]]
        alive = [child for fed in same for child in tree.children[fed]]
        line.append(best)
    chained = ScalarTree(
        [tree.token[fed] for fed in line],
        [max(i - 1, 0) for i in range(len(line))],
        [[i + 1] if i + 1 < len(line) else [] for i in range(len(line))],
        [tree.p[fed] for fed in line],
        [*distributions, tree.q[line[-1]]],
        tree.kind,
    )
    end, distribution = block(chained, chooser)
    return line[end], distribution


# The draft distribution for the next sibling, from the present one and the tokens tried so far.
NextDistribution = Callable[[Distribution, list[int]], Distribution]


def recursive(tree: ScalarTree, chooser: Chooser) -> Ended:
    """Recursive rejection over siblings drawn without replacement."""
    return rounds(tree, chooser, lambda s, tried: without(s, tried[-1]))


def multi_round(tree: ScalarTree, chooser: Chooser) -> Ended:
    """Rejection over i.i.d. siblings."""
    return rounds(tree, chooser, lambda s, tried: s)


def sequoia(tree: ScalarTree, chooser: Chooser) -> Ended:
    """Recursive rejection whose draft distribution turns uniform once it is used up."""
    return rounds(tree, chooser, rest_or_uniform)


def rest_or_uniform(distribution: Distribution, tried: list[int]) -> Distribution:
    """The distribution after a draw that is not put back; used up, uniform over what was not
    tried."""
    rest = without(distribution, tried[-1])
    if rest.sum() > 0:
        return rest
    untried = np.ones_like(distribution)
    untried[tried] = 0.0
    return norm(untried, untried)


def rounds(tree: ScalarTree, chooser: Chooser, next_distribution: NextDistribution) -> Ended:
    """Test siblings in draw order, each against what the earlier ones left of p and q."""
    assert tree.q is not None
    at, r, s, tried = 0, tree.p[0], tree.q[0], list[int]()
    while True:
        for child in tree.children[at]:
            token = tree.token[child]
            if chooser.flip(child, ratio(r[token], s[token])):
                at, r, s, tried = child, tree.p[child], tree.q[child], []
                break
            tried.append(token)
            r, s = norm(positive(r - s), np.zeros_like(r)), next_distribution(s, tried)
        else:
            return at, norm(r, tree.p[at])


def spectr(tree: ScalarTree, chooser: Chooser) -> Ended:
    """K-SEQ over i.i.d. siblings."""
    assert tree.q is not None
    at = 0
    while True:
        p, q, num = tree.p[at], tree.q[at], len(tree.children[at])
        rho = smallest_rho(p, q, num)
        for child in tree.children[at]:
            token = tree.token[child]
            if chooser.flip(child, ratio(p[token], rho * q[token])):
                at = child
                break
        else:
            taken = np.minimum(p / rho, q)
            beta = taken.sum()
            share = (1 - (1 - beta) ** num) / beta if beta > 0 else 0.0
            return at, norm(positive(p - taken * share), p)


def smallest_rho(p: Distribution, q: Distribution, num: int) -> float:
    """The root of 1 - (1 - beta(rho))^num = rho beta(rho) in [1, num], from above."""
    low, high = 1.0, float(max(num, 1))
    for _ in range(32):
        middle = (low + high) / 2
        beta = min(float(np.minimum(p / middle, q).sum()), 1.0)
        is_valid = 1 - (1 - beta) ** num <= middle * beta
        low, high = (low, middle) if is_valid else (middle, high)
    return high


def top_plus_one(tree: ScalarTree, chooser: Chooser) -> Ended:
    """The first sibling was sampled without the others, which are q's likeliest."""
    assert tree.q is not None
    at = 0
    while True:
        q = tree.q[at] if tree.children[at] else np.zeros_like(tree.p[at])
        for child in tree.children[at][1:]:
            q = without(q, tree.token[child])
        if tree.children[at]:
            first = tree.children[at][0]
            if chooser.flip(first, ratio(tree.p[at][tree.token[first]], q[tree.token[first]])):
                at = first
                continue
        token = chooser.pick(at, norm(positive(tree.p[at] - q), tree.p[at]))
        hits = [child for child in tree.children[at] if tree.token[child] == token]
        if not hits:
            return at, point(token, len(q))
        at = hits[0]


SCALAR_RULES: dict[str, ScalarRule] = {
    "greedy": greedy,
    "target-only": target_only,
    "one-hot": one_hot,
    "chain": chain,
    "block": block,
    "recursive": recursive,
    "multi-round": multi_round,
    "spectr": spectr,
    "sequoia": sequoia,
    "top-plus-one": top_plus_one,
    "traversal": traversal,
    "multi-path": multi_path,
}
