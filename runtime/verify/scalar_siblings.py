"""The scalar rules that test several siblings of a node, from the root down."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specctl.runtime.verify.scalar_parts import (
    Chooser,
    Distribution,
    Ended,
    ScalarTree,
    norm,
    point,
    positive,
    ratio,
    without,
)

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
