"""PromptTree: trees of candidates and prompt tokens, as large as pays on this device.

Parallel prompt decoding (arXiv 2405.18628, section 3.3) chooses how many rows its rounds feed from
the latency of the target's forward. `profile[d][r]` is the chance that the guess of rank r, d + 1
tokens behind the root, is right (what the drafter's own option `chances` says, which shapes the
trees); `plan_trees` says how many tokens a round of n rows yields in the long run. With measured
costs n becomes argmax tokens(n) / t(n). No drafter runs, so that a round costs its rows alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from specctl.drafters.states.prompt_tree import plan_trees, typical_chances
from specctl.runtime.measure.cost_table import TreeCosts
from specctl.runtime.policies.base import PolicyEntry
from specctl.runtime.policies.direct import Direct
from specctl.runtime.policies.hardware_tree import check_profile


@dataclass(frozen=True, slots=True)
class PromptTree(Direct):
    """At most `nodes` candidates and prompt tokens together, `length` levels of candidates."""

    length: int = 3
    nodes: int = 24
    profile: tuple[tuple[float, ...], ...] = typical_chances(3)

    def __post_init__(self) -> None:
        object.__setattr__(self, "profile", check_profile(self.profile)[: self.length])

    def fitted(self, costs: TreeCosts) -> Self:
        """The number of rows with most expected tokens per second, within this one's; two at least,
        as a prompt token alone is never verified."""

        def rate(nodes: int) -> float:
            return costs.rate(plan_trees(self.profile, nodes).tokens, nodes, 0)

        return replace(self, nodes=max(range(min(2, self.nodes), self.nodes + 1), key=rate))


POLICY = PolicyEntry(
    "prompt-tree",
    "candidates and prompt tokens (PPD), size by measured cost",
    "https://arxiv.org/abs/2405.18628",
    PromptTree,
    is_tree=False,
)
