"""The rules once more, as scalar recursions against a `Chooser`: the reference of the fast rules.

Written from the papers' recursions, sharing no code with the vectorised rules. With a
`ReplayChooser` (proof/enumerate.py) they are summed over every coin; with a `NoiseChooser` they
must decide exactly as the fast rules do under the same noise. Rules that test several siblings from
the root down are in scalar_siblings.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specctl.runtime.verify.scalar_parts import (
    Chooser,
    Ended,
    ScalarTree,
    norm,
    point,
    positive,
    ratio,
    without,
)


def greedy(tree: ScalarTree, chooser: Chooser) -> Ended:
    """Follow the argmax."""
    return _follow(tree, lambda at: int(np.argmax(tree.p[at])))


def target_only(tree: ScalarTree, chooser: Chooser) -> Ended:
    """Follow the target's own draws."""
    return _follow(tree, lambda at: chooser.pick(at, tree.p[at]))


def inverse_cdf(tree: ScalarTree, chooser: Chooser) -> Ended:
    """Follow the target's own draws, each at one uniform."""
    return _follow(tree, lambda at: chooser.invert(at, tree.p[at]))


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
