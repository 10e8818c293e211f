"""The exact experiments of the proof: rules x tree shapes x families of (p, q).

`specctl verify` enumerates `proof_cases("quick")`, at its full level and in `make test`
`proof_cases("slice")`, and benchmarks/proof_enumeration.py `proof_cases("full")`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import product

import numpy as np

from specctl.core.tree import NodeKind
from specctl.runtime.proof.enumerate import Case, Distributions, Path
from specctl.runtime.verify import RULES, legal
from specctl.runtime.verify.scalar_parts import Distribution, norm, point

Family = Callable[[np.random.Generator, int], tuple[Distribution, Distribution]]
Shape = tuple[int, ...]

CHAINS: dict[str, Shape] = {"chain-1": (-1,), "chain-2": (-1, 0), "chain-3": (-1, 0, 1)}
TREES: dict[str, Shape] = {
    "two": (-1, -1),
    "three": (-1, -1, -1),
    "stem-two": (-1, 0, 0),
    "two-uneven": (-1, -1, 0),
    "two-late": (-1, -1, 1),
    "two-two-left": (-1, -1, 0, 0),
    "comb": (-1, 0, -1, 2),
    "deep": (-1, 0, 1, -1),
    "two-paths": (-1, -1, 0, 1),
}
BIG_TREES: dict[str, Shape] = {
    "two-by-two": (-1, -1, 0, 0, 1, 1),
    "deep-fork": (-1, -1, 0, 0, 2),
    "three-paths": (-1, -1, -1, 0, 1, 2),
}


def _soft(rng: np.random.Generator, size: int, spread: float = 1.5) -> Distribution:
    distribution = np.exp(spread * rng.standard_normal(size))
    return np.asarray(distribution / distribution.sum())


def _only(distribution: Distribution, keep: list[int]) -> Distribution:
    """The distribution restricted to the kept ids and scaled up."""
    cut = np.zeros_like(distribution)
    cut[keep] = distribution[keep]
    return norm(cut, distribution)


def _hard(distribution: Distribution) -> Distribution:
    return point(int(np.argmax(distribution)), len(distribution))


def _random_subset(rng: np.random.Generator, size: int) -> list[int]:
    return list(rng.permutation(size)[: max(1, size - 1)])


FAMILIES: dict[str, Family] = {
    "random": lambda rng, size: (_soft(rng, size), _soft(rng, size)),
    "peaked": lambda rng, size: (_soft(rng, size, 8.0), _soft(rng, size, 8.0)),
    "equal": lambda rng, size: (distribution := _soft(rng, size), distribution),
    "nearly-equal": lambda rng, size: (
        distribution := _soft(rng, size),
        norm(distribution * (1 + 1e-7 * rng.standard_normal(size)), distribution),
    ),
    "zeros-in-p": lambda rng, size: (
        _only(_soft(rng, size), _random_subset(rng, size)),
        _soft(rng, size),
    ),
    "zeros-in-q": lambda rng, size: (
        _soft(rng, size),
        _only(_soft(rng, size), _random_subset(rng, size)),
    ),
    "trimmed": lambda rng, size: (_soft(rng, size), _only(_soft(rng, size), [0, size - 1])),
    "disjoint": lambda rng, size: (
        _only(_soft(rng, size), list(range(size // 2))),
        _only(_soft(rng, size), list(range(size // 2, size))),
    ),
    "greedy-p": lambda rng, size: (_hard(_soft(rng, size)), _soft(rng, size)),
    "greedy-q": lambda rng, size: (_soft(rng, size), _hard(_soft(rng, size))),
    "greedy-both": lambda rng, size: (_hard(_soft(rng, size)), _hard(_soft(rng, size))),
}


@lru_cache(maxsize=256)  # rules and kinds of tree are tried on the same tables
def random_distributions(
    family: str, size: int, depth: int, seed: int, context_free: bool = False
) -> tuple[Distributions, Distributions]:
    """Tables of p and q for every path of up to `depth` tokens; they are shared, and nobody writes
    to them."""
    rng = np.random.default_rng(seed)
    p: dict[Path, Distribution] = {}
    q: dict[Path, Distribution] = {}
    for length in range(depth + 1):
        for path in product(range(size), repeat=length):
            if context_free and path:
                p[path], q[path] = p[()], q[()]
            else:
                p[path], q[path] = FAMILIES[family](rng, size)
    return p, q


def depth_of(shape: Shape) -> int:
    depth: list[int] = []
    for parent in shape:
        depth.append(1 if parent < 0 else depth[parent] + 1)
    return max(depth, default=0)


def is_chain(shape: Shape) -> bool:
    return all(parent == node - 1 for node, parent in enumerate(shape))


def most_siblings(shape: Shape) -> int:
    return max(shape.count(parent) for parent in shape)


def drawable(kind: NodeKind, shape: Shape, size: int) -> bool:
    """Whether trees of that shape can be drawn that way from `size` tokens."""
    if kind is NodeKind.TOP_PLUS_ONE:
        return most_siblings(shape) <= size
    if kind is NodeKind.PATHS:
        inner = shape[shape.count(-1) :]
        ends = len(shape) // shape.count(-1)
        return (inner == tuple(range(len(inner))) and depth_of(shape) == ends) or is_chain(shape)
    return True


def make_case(
    rule: str, kind: NodeKind, shape_name: str, family: str, size: int, seed: int = 0
) -> Case:
    """One experiment with reproducible distributions."""
    shape = {**CHAINS, **TREES, **BIG_TREES}[shape_name]
    name = f"{rule}/{kind.value}/{shape_name}/{family}/V={size}"
    number = seed + 1_000 * size + 7 * sorted(FAMILIES).index(family) + 100_000 * len(shape)
    p, q = random_distributions(family, size, depth_of(shape), number)
    if rule == "greedy":
        p = {path: _hard(distribution) for path, distribution in p.items()}
    return Case(name, rule, kind, shape, p, q, size)


_PLANS: dict[str, list[tuple[str, int]]] = {
    "quick": [(name, 3) for name in ("chain-2", "two", "three", "two-uneven", "two-paths")],
    "slice": [
        *((name, size) for name in CHAINS for size in (2, 3)),
        ("chain-1", 4),
        *((name, 3) for name in TREES),
    ],
    "full": [
        *((name, size) for name in (*CHAINS, *TREES) for size in (2, 3, 4)),
        *((name, 3) for name in BIG_TREES),
    ],
}
# Below "full" a rule made for one kind of tree is enumerated there only, not on kinds it also fits.
_OWN_RULE = {NodeKind.PATHS: "multi-path", NodeKind.REFILLED: "sequoia"}


def proof_cases(level: str) -> Iterator[Case]:
    """Every legal combination of a level: "quick" (about a second), "slice" (some seconds), "full"
    (minutes)."""
    return (make_case(*one) for one in planned_cases(level))


def planned_cases(level: str) -> Iterator[tuple[str, NodeKind, str, str, int]]:
    """The same by rule, kind of tree, names of shape and family, and size of the vocabulary."""
    full = level == "full"
    shapes = {**CHAINS, **TREES, **BIG_TREES}
    rules = RULES.working()
    for rule, kind, (shape, size), family in product(rules, NodeKind, _PLANS[level], FAMILIES):
        greedy_like = rule == "greedy" and (kind is not NodeKind.POINT or family != "random")
        fillers = kind is not NodeKind.POINT and rule == "target-only" and not full
        repeats = not full and rule != _OWN_RULE.get(kind, rule)
        if greedy_like or fillers or repeats or not legal(rule, kind, is_chain(shapes[shape])):
            continue
        if drawable(kind, shapes[shape], size):
            yield rule, kind, shape, family, size
