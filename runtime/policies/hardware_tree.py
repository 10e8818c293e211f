"""HardwareTree: the sparse tree of best ranks, as large as pays on this device.

Medusa (arXiv 2401.10774, section 2.3.3) chooses a fixed sparse tree from accuracies, parallel
prompt decoding (arXiv 2405.18628, recipe ppd for its prompt tokens) its size, too:
`profile[d][r]` is the chance that the drafter's rank-r token d + 1 steps ahead is the right one, a
path is worth the product, and the best n paths make the tree of n nodes, expected to yield
R(n) = 1 + the sum of their worth. With measured costs n becomes argmax R(n) / t(n): a fast device
takes a larger tree than a slow one. Candidates are best tokens, so nodes are POINT.
Letters: B rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from specctl.core.errors import RecipeError
from specctl.core.tree import DraftTree
from specctl.drafters.states.template import Path, best_paths
from specctl.runtime.measure.cost_table import TreeCosts
from specctl.runtime.policies.base import GrowRequest, PointTree, PolicyEntry
from specctl.runtime.policies.shaped import grow_shape, shape_of

Profile = tuple[tuple[float, ...], ...]
TYPICAL = tuple(
    tuple(share * 0.9**level for share in (0.62, 0.13, 0.06, 0.035, 0.02)) for level in range(6)
)


def worth(profile: Profile, path: Path) -> float:
    """The chance that every token of the path is right."""
    return prod(profile[level][rank] for level, rank in enumerate(path))


def expected_tokens(profile: Profile, nodes: int) -> float:
    """R(n): tokens a round of the best tree of `nodes` nodes, the bonus included."""
    return 1.0 + sum(worth(profile, path) for path in best_paths(profile, nodes))


def check_profile(profile: Profile) -> Profile:
    """Chances by depth and rank, as tuples."""
    found = tuple(tuple(float(chance) for chance in level) for level in profile)
    if not found or any(not level or min(level) < 0 or sum(level) > 1 + 1e-6 for level in found):
        raise RecipeError(
            "a profile gives, for each depth, the chances of its ranks",
            where="serve.profile",
            found=str([list(level) for level in found]),
            expected="positive numbers that sum to at most 1 in each level, "
            "for example [[0.6, 0.2], [0.5, 0.1]]",
            do="measure it in a clone: python benchmarks/trees.py --calibrate --draft PACKAGE",
        )
    return found


@dataclass(frozen=True, slots=True)
class HardwareTree(PointTree):
    """The best `nodes` paths for that profile, no deeper than `length`."""

    length: int = 6
    nodes: int = 16
    profile: tuple[tuple[float, ...], ...] = TYPICAL

    def __post_init__(self) -> None:
        object.__setattr__(self, "profile", check_profile(self.profile)[: self.length])

    def grow(self, growth: GrowRequest) -> DraftTree:
        nodes, depth = min(self.nodes, growth.budget.nodes), min(self.length, growth.budget.depth)
        paths = best_paths(self.profile, nodes)
        shape = shape_of(paths, nodes, depth, growth.view.slot_B.device)
        return grow_shape(growth, shape, self.kind(growth.sampled))

    def fitted(self, costs: TreeCosts) -> HardwareTree:
        """The size with most expected tokens per second, within this one's."""

        def rate(nodes: int) -> float:
            depth = max(map(len, best_paths(self.profile, nodes)))
            return costs.rate(expected_tokens(self.profile, nodes), nodes, depth)

        return replace(self, nodes=max(range(1, self.nodes + 1), key=rate))


POLICY = PolicyEntry(
    "hardware-tree",
    "best ranks, size by measured cost",
    "https://arxiv.org/abs/2401.10774",
    HardwareTree,
)
