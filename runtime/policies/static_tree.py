"""StaticTree: the same shape every round; level d gives each node branch[d] children.

Greedy and target-only rows take the top-k (POINT). Sampled rows take Gumbel top-k, which draws
without replacement in score order, and hand q on (RSD-C, constant branching; Jeon et al. 2024,
arXiv 2402.14160).
Letters: B rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

from specctl.core.errors import RecipeError
from specctl.core.tree import DraftTree, NodeKind
from specctl.drafters.states.template import Path
from specctl.runtime.policies.base import GrowRequest, PolicyEntry
from specctl.runtime.policies.shaped import grow_shape, shape_of


def check_branch(branch: tuple[int, ...]) -> tuple[int, ...]:
    """Branching factors as a tuple of positive integers."""
    found = tuple(int(b) for b in branch)
    if not found or min(found) < 1:
        raise RecipeError(
            "a tree of constant branching needs positive branching factors",
            where="serve.branch",
            found=str(found),
            expected="for example [3, 2, 1, 1]",
            do="--set serve.branch=[3,2,1,1]",
        )
    return found


@cache
def full_paths(branch: tuple[int, ...]) -> tuple[Path, ...]:
    """Every rank path of the tree, level by level."""
    depths = range(1, len(branch) + 1)
    return tuple(path for d in depths for path in product(*(range(b) for b in branch[:d])))


def grow_whole_levels(growth: GrowRequest, branch: tuple[int, ...], kind: NodeKind) -> DraftTree:
    """The tree of that branching, as many of its levels as the budget holds whole."""
    depth = min(growth.budget.depth, len(branch))
    while len(full_paths(branch[:depth])) > growth.budget.nodes:
        depth -= 1
    nodes, device = len(full_paths(branch[:depth])), growth.view.slot_B.device
    return grow_shape(growth, shape_of(full_paths(branch), nodes, depth, device), kind)


@dataclass(frozen=True, slots=True)
class BranchTree:
    """Branching factors by level, the root's first: (3, 2, 1) has 3 + 6 + 6 nodes."""

    branch: tuple[int, ...] = (3, 2, 1, 1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "branch", check_branch(self.branch))

    @property
    def nodes(self) -> int:
        return len(full_paths(self.branch))

    @property
    def depth(self) -> int:
        return len(self.branch)

    @property
    def is_chain(self) -> bool:
        return max(self.branch) == 1


@dataclass(frozen=True, slots=True)
class StaticTree(BranchTree):
    """The best children, or children drawn without replacement; a last level may be cut."""

    def kind(self, sampled: bool) -> NodeKind:
        return NodeKind.WITHOUT_REPLACEMENT if sampled else NodeKind.POINT

    def grow(self, growth: GrowRequest) -> DraftTree:
        budget = growth.budget
        device = growth.view.slot_B.device
        shape = shape_of(full_paths(self.branch), budget.nodes, budget.depth, device)
        return grow_shape(growth, shape, self.kind(growth.sampled))


POLICY = PolicyEntry(
    "static-tree", "constant branching (RSD-C)", "https://arxiv.org/abs/2402.14160", StaticTree
)
