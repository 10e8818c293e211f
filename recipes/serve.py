"""How a drafter drafts and is verified: the section `serve` of a recipe and of a package.

Policies, stop rules, controllers and verification rules by name, and which settings each policy
has. What they do stands in runtime/policies, runtime/controllers and runtime/verify.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from operator import mul
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, field_validator, model_validator

from specctl.recipes.section import Fraction, Section

T = TypeVar("T")
MOST_NODES, MOST_LEVELS = 1024, 64
UpTo64 = Annotated[int, Field(ge=1, le=MOST_LEVELS)]
UpTo1024 = Annotated[int, Field(ge=1, le=MOST_NODES)]
Levels = Annotated[tuple[T, ...], Field(max_length=MOST_LEVELS)]

PolicyName = Literal[
    "chain", "static-tree", "dynamic-tree", "merged-beams", "sequoia", "rsd", "dyspec", "opt-tree",
    "ddd", "cape", "mcsd", "top-plus-one", "paths", "hardware-tree", "propd", "fused", "direct",
    "switch",
]  # fmt: skip
StopName = Literal[
    "confidence", "confidence-head", "roc", "svip", "specdec-pp", "disco", "ada-eagle",
    "draft-verify", "heuristic", "thompson",
]  # fmt: skip
ControllerName = Literal["auto", "ucb", "exp3", "thompson", "hedge", "cascade"]
RuleName = Literal[
    "auto", "greedy", "target-only", "one-hot", "chain", "block", "multi-round", "spectr",
    "recursive", "sequoia", "top-plus-one", "traversal", "multi-path",
]  # fmt: skip


# Which settings of `serve` each policy has; any other that is set would be ignored.
POLICY_FIELDS: dict[PolicyName, tuple[str, ...]] = {
    "chain": ("length", "confidence", "stop", "threshold", "stop_file"),
    "static-tree": ("branch",),
    "dynamic-tree": ("length", "nodes", "beam"),
    "merged-beams": ("length", "beam"),
    "fused": ("length", "nodes", "beam"),
    "sequoia": ("length", "nodes", "acceptance"),
    "rsd": ("length", "beam"),
    "dyspec": ("length", "nodes", "beam", "threshold"),
    "opt-tree": ("length", "nodes", "beam", "threshold"),
    "ddd": ("length", "nodes", "beam", "threshold", "check"),
    "cape": ("length", "widths"),
    "mcsd": ("branch", "confidence"),
    "top-plus-one": ("branch",),
    "paths": ("length", "beam"),
    "hardware-tree": ("length", "nodes", "profile"),
    "propd": ("length", "nodes", "early_layer", "early_top", "refresh"),
    "direct": ("length", "nodes"),
    "switch": ("length", "nodes", "lengths", "controller"),
}
# length has a default and is never refused
_ALWAYS = {"policy", "length", "rule", "adaptive", "parallel"}


class ServePart(Section):
    """How the drafter drafts: kept in the package as its default."""

    policy: PolicyName = "chain"
    length: UpTo64 = Field(default=5, description="drafted tokens, or depth")
    nodes: UpTo1024 | None = Field(default=None, description="nodes of a tree")
    branch: Levels[UpTo64] | None = Field(
        default=None, description="trees of constant branching: children per node by level"
    )
    beam: UpTo64 | None = Field(default=None, description="nodes expanded per level")
    acceptance: Levels[Fraction] | None = Field(
        default=None, description="sequoia: chances that the 1st, 2nd, ... sibling is accepted"
    )
    profile: Levels[Annotated[tuple[Fraction, ...], Field(max_length=MOST_NODES)]] | None = Field(
        default=None, description="hardware-tree: chances of the draft's ranks, by depth"
    )
    widths: Levels[UpTo64] | None = Field(
        default=None, description="cape: tokens of a position, from unsure to sure"
    )
    early_layer: UpTo1024 | None = Field(
        default=None, description="propd: layers of the target that prune the tree; null: none"
    )
    early_top: UpTo1024 | None = Field(
        default=None, description="propd: best tokens there whose nodes survive"
    )
    refresh: Annotated[int, Field(ge=4, le=10**9)] | None = Field(
        default=None, description="propd: rounds between choices of the tree's size"
    )
    check: Levels[UpTo64] | None = Field(
        default=None, description="ddd: depths after which it may stop; null: all"
    )
    confidence: Fraction | None = Field(
        default=None, description="stop drafting below this probability"
    )
    stop: StopName | None = Field(
        default=None, description="chain: rule that ends drafting early (runtime/policies/stops)"
    )
    threshold: Annotated[float, Field(ge=0.0)] | None = Field(
        default=None, description="threshold of the stop rule or of the tree; null keeps its own"
    )
    stop_file: str | None = Field(
        default=None, description="weights of a trained stop rule, written by train-stop"
    )
    controller: ControllerName | None = Field(
        default=None, description="switch: how the drafter and length of a round are chosen"
    )
    lengths: Levels[UpTo64] | None = Field(
        default=None, description="switch: lengths of each drafter that are tried"
    )
    rule: RuleName = "auto"
    adaptive: bool = Field(
        default=False, description="choose the length from the measured cost table"
    )
    parallel: bool = Field(
        default=False, description="draft while the target verifies (PEARL); one prompt at a time"
    )

    @field_validator("branch")
    @classmethod
    def _has_an_end(cls, branch: tuple[int, ...] | None) -> tuple[int, ...] | None:
        nodes = sum(accumulate(branch or (), mul))
        if nodes > MOST_NODES:
            raise ValueError(f"a tree of {nodes:,} nodes; expected {MOST_NODES:,} at most")
        return branch

    @model_validator(mode="after")
    def _nothing_ignored(self) -> Self:
        for key in set(type(self).model_fields) - set(POLICY_FIELDS[self.policy]) - _ALWAYS:
            if getattr(self, key) is not None:
                raise ValueError(f"{key} is ignored by policy {self.policy}; remove it")
        return self


def check_serve(serve: Mapping[str, Any]) -> None:
    """Raise ValueError unless these are settings that a recipe could have, in their own types: JSON
    has no tuples, but else nothing is taken for what it is not ("5" or true for a count)."""
    ServePart.model_validate({name: _as_tuple(value) for name, value in serve.items()}, strict=True)


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
