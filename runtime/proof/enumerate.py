"""Exact distributions of verification rules: no sampling, no statistics.

A scalar rule is replayed over every draft and every coin. The outcome is the exact joint
distribution of the next depth + 1 tokens, the round being completed by the target; lossless means
that it equals the target's joint distribution to rounding (float64, 1e-12). Rounds chain by
induction, because what a round sees depends on committed text only.

Words: a *path* is a tuple of tokens (the root is ()); a *shape* lists, per node in order, its
parent's number (-1 = the root); distributions are tables from paths to probability vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from specctl.core.tree import NodeKind
from specctl.runtime.verify import RULES
from specctl.runtime.verify.scalar_parts import (
    Distribution,
    Ended,
    ScalarRule,
    ScalarTree,
    drawn_from_numbers,
    point,
    without,
)
from specctl.runtime.verify.scalar_siblings import rest_or_uniform

Path = tuple[int, ...]
Distributions = Mapping[Path, Distribution]


@dataclass(slots=True)
class ReplayChooser:
    """Replays a prefix of choices, then takes the first branch; remembers the open branches."""

    script: list[int]
    probability: float = 1.0
    taken: list[int] = field(default_factory=list)
    open: list[list[int]] = field(default_factory=list)

    def flip(self, fed: int, probability: float) -> bool:
        return self._choose([1.0 - probability, probability]) == 1

    def pick(self, fed: int, distribution: Distribution) -> int:
        return self._choose(list(distribution))

    def invert(self, fed: int, distribution: Distribution) -> int:
        return self._choose(list(distribution))

    def _choose(self, weights: list[float]) -> int:
        live = [i for i, weight in enumerate(weights) if weight > 0]
        if len(self.taken) < len(self.script):
            choice = self.script[len(self.taken)]
        else:
            choice = live[0]
            self.open.extend([*self.taken, other] for other in live[1:])
        self.taken.append(choice)
        self.probability *= weights[choice]
        return choice


def outcomes(rule: ScalarRule, tree: ScalarTree) -> Iterator[tuple[float, Ended]]:
    """Every way the coins can fall, with its probability."""
    waiting: list[list[int]] = [[]]
    while waiting:
        chooser = ReplayChooser(waiting.pop())
        ended = rule(tree, chooser)
        yield chooser.probability, ended
        waiting.extend(chooser.open)


@dataclass(frozen=True, slots=True)
class Case:
    """One exact experiment. `shape[n]` is the parent of node n (-1 = root), siblings in draw order.
    `p` and `q` hold a distribution for every path up to the depth of the shape (q: below it; NaN or
    infinities where a drafter has broken down)."""

    name: str
    rule: str
    kind: NodeKind
    shape: tuple[int, ...]
    p: Distributions
    q: Distributions
    vocab_size: int

    @property
    def depth(self) -> int:
        return max((len(_line(self.shape, n)) for n in range(len(self.shape))), default=0)


@dataclass(frozen=True, slots=True)
class Exact:
    """What enumeration found: the worst absolute error of the joint distribution of depth + 1
    tokens, its total variation to the target, the expected number of accepted nodes, and how many
    (draft, coin) outcomes were added up."""

    error: float
    total_variation: float
    accepted: float
    num_outcomes: int


Drafts = Callable[[Case], Iterator[tuple[float, list[int]]]]
Read = Callable[[Sequence[int]], Sequence[Distribution]]


def enumerate_case(
    case: Case,
    rule: ScalarRule | None = None,
    drafts: Drafts | None = None,
    given_q: Distributions | None = None,
    read: Read | None = None,
) -> Exact:
    """The exact distribution of one round, completed by the target. The optional arguments put a
    wrong rule, a wrong way of drafting, or a wrong q given to the rule in the place of the right
    one; `read` is what a target under test says of a draft, at the root and at every node."""
    rule = rule or RULES[case.rule].reference
    given_q = case.q if given_q is None else given_q
    length = case.depth + 1
    tails = _tails(case.p, case.vocab_size, length)
    joint = np.zeros((case.vocab_size,) * length)
    accepted, count = 0.0, 0
    for weight, tokens in (drafts or all_drafts)(case):
        tree = drafted(case, tokens, given_q)
        if read is not None:
            tree = replace(tree, p=read(tokens))
        for chance, (at, distribution) in outcomes(rule, tree):
            path = tuple(tree.token[i] for i in _line_fed(tree.parent, at))
            following = tails[len(path) + 1]
            for token in np.flatnonzero(distribution).tolist():
                longer = (*path, token)
                joint[longer] += weight * chance * distribution[token] * following[longer]
            accepted += weight * chance * len(path)
            count += 1
    gap = np.abs(joint - tails[0][()])
    return Exact(float(gap.max()), float(gap.sum()) / 2, accepted, count)


def all_drafts(case: Case) -> Iterator[tuple[float, list[int]]]:
    """Every drafted tree of the case's kind, with its probability."""
    if case.kind is NodeKind.POINT:
        yield 1.0, top_drafts(case)
        return
    yield from _sampled(case, 0, [], 1.0)


def _sampled(
    case: Case, node: int, tokens: list[int], weight: float
) -> Iterator[tuple[float, list[int]]]:
    if node == len(case.shape):
        yield weight, list(tokens)
        return
    distribution = _distribution_of_draw(case, node, tokens)
    if (
        distribution.sum() == 0
    ):  # the support is used up: a deterministic filler, which no rule may accept
        distribution = point(0, case.vocab_size)
    for token in np.flatnonzero(distribution):
        yield from _sampled(
            case, node + 1, [*tokens, int(token)], weight * float(distribution[token])
        )


def _distribution_of_draw(case: Case, node: int, tokens: list[int]) -> Distribution:
    """The distribution of node's token after the tokens of the nodes before it."""
    parent = case.shape[node]
    distribution = case.q[tuple(tokens[i] for i in _line(case.shape, parent))]
    if not np.isfinite(distribution).all():  # what is drawn from no distribution is any token
        return np.full(case.vocab_size, 1.0 / case.vocab_size)
    siblings = [other for other, up in enumerate(case.shape) if up == parent]
    if case.kind is NodeKind.TOP_PLUS_ONE:
        fixed = fixed_siblings(distribution, len(siblings) - 1)
        if node != siblings[0]:
            return point(fixed[siblings.index(node) - 1], case.vocab_size)
        for token in fixed:
            distribution = without(distribution, token)
    elif case.kind.is_distinct:
        drawn = [tokens[other] for other in siblings if other < node]
        for i, token in enumerate(drawn, 1):
            refills = case.kind is NodeKind.REFILLED
            distribution = (
                rest_or_uniform(distribution, drawn[:i])
                if refills
                else without(distribution, token)
            )
    return distribution


def fixed_siblings(distribution: Distribution, count: int) -> list[int]:
    """The likeliest tokens, leaving out the last of the support if they would use it up."""
    order = np.argsort(-distribution, kind="stable")[: count + 1]
    spared = min(int((distribution[order] > 0).sum()), count + 1) - 1
    return [int(token) for i, token in enumerate(order) if i != spared]


def top_drafts(case: Case) -> list[int]:
    """Deterministic candidates: the j-th child holds the j-th likeliest token of q."""
    tokens: list[int] = []
    for node, parent in enumerate(case.shape):
        distribution = case.q[tuple(tokens[i] for i in _line(case.shape, parent))]
        rank = sum(case.shape[other] == parent for other in range(node))
        tokens.append(int(np.argsort(-distribution, kind="stable")[rank % case.vocab_size]))
    return tokens


def drafted(case: Case, tokens: Sequence[int], given_q: Distributions) -> ScalarTree:
    """The drafted tree, with the distributions along its paths."""
    parent = [0, *(p + 1 for p in case.shape)]
    token = [-1, *tokens]
    num_fed = len(token)
    paths = [tuple(token[i] for i in _line_fed(parent, fed)) for fed in range(num_fed)]
    children = [[c for c in range(1, num_fed) if parent[c] == fed] for fed in range(num_fed)]
    p = [case.p[path] for path in paths]
    q = None if case.kind is NodeKind.POINT else [given_q.get(path, p[0]) for path in paths]
    return drawn_from_numbers(ScalarTree(token, parent, children, p, q, case.kind))


def _line(shape: Sequence[int], node: int) -> list[int]:
    """Node numbers from the first below the root down to `node`."""
    line = []
    while node >= 0:
        line.append(node)
        node = shape[node]
    return line[::-1]


def _line_fed(parent: Sequence[int], fed: int) -> list[int]:
    line = []
    while fed > 0:
        line.append(fed)
        fed = parent[fed]
    return line[::-1]


def _tails(p: Distributions, size: int, length: int) -> list[dict[Path, NDArray[np.float64]]]:
    """tails[n][path of n tokens]: the target's joint distribution of the remaining length - n
    tokens."""
    tails: list[dict[Path, NDArray[np.float64]]] = [{} for _ in range(length + 1)]
    tails[length] = {path: np.ones(()) for path in product(range(size), repeat=length)}
    for n in range(length - 1, -1, -1):
        for path in product(range(size), repeat=n):
            rows = [p[path][x] * tails[n + 1][(*path, x)] for x in range(size)]
            tails[n][path] = np.stack(rows)
    return tails
