"""How a drafter drafts and is verified: the section `serve` of a recipe and of a package.

Policies, stop rules, controllers and verification rules are known by the entries that their modules
declare, and a policy's settings by the fields of its class. What is set here of the most usual ones
is their range and what they are for; a policy may bring others of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    create_model,
    field_validator,
    model_serializer,
    model_validator,
)

from specctl.core.errors import RecipeError
from specctl.core.plugins import declared
from specctl.recipes.section import Fraction, NameOf, Section

T = TypeVar("T")
MOST_NODES, MOST_LEVELS = 1024, 64
IN_PARALLEL = "drafting in parallel is lossless: it relaxes nothing"
UpTo64 = Annotated[int, Field(ge=1, le=MOST_LEVELS)]
UpTo1024 = Annotated[int, Field(ge=1, le=MOST_NODES)]
Levels = Annotated[tuple[T, ...], Field(max_length=MOST_LEVELS)]

PolicyName = Annotated[str, NameOf("specctl.runtime.policies", "POLICY")]
StopName = Annotated[str, NameOf("specctl.runtime.stops", "STOP")]
ControllerName = Annotated[str, NameOf("specctl.runtime.controllers", "CONTROLLER")]
_RELAXED = declared("specctl.runtime.verify.relaxed", "RELAXED")
_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
RuleName = (
    Annotated[str, NameOf("specctl.runtime.verify", "RULE", ("auto",))]
    | Annotated[str, Field(pattern=rf"^(?:{'|'.join(_RELAXED)})(?::{_NUMBER}){{0,2}}$")]
)

_PLAIN = {kind.__name__: kind for kind in (bool, float, int, str, tuple)}


def _settings(fields: dict[str, str]) -> dict[str, Any]:
    """The fields of a policy's class that a recipe can write down, with their types."""
    plain = {*_PLAIN, "None"}
    found = {name: kind for name, kind in fields.items() if set(re.findall(r"\w+", kind)) <= plain}
    return {name: eval(kind, dict(_PLAIN)) for name, kind in found.items()}


_SETTINGS = {
    name: _settings(policy.fields())
    for name, policy in declared("specctl.runtime.policies", "POLICY").items()
}
# Which settings of `serve` each policy has; any other that is set would be ignored.
POLICY_FIELDS = {name: tuple(settings) for name, settings in _SETTINGS.items()}
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
        default=None,
        description="hardware-tree, prompt-tree: chances of the draft's ranks, by depth",
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

    @model_validator(mode="after")
    def _relaxes_nothing_in_parallel(self) -> Self:
        if self.parallel and is_relaxed(self.rule):
            raise ValueError(f"{IN_PARALLEL}: parallel beside rule {self.rule}; remove one of them")
        return self

    @model_serializer(mode="wrap")
    def _own_if_set(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A policy's own settings are written where they are set: a recipe without them is the one
        that it was before that policy came, and has its digest."""
        return {k: v for k, v in dump(self).items() if v is not None or k not in _OWN}


_OWN: dict[str, Any] = {
    setting: (kind | None, Field(default=None, description=f"{name}: a setting of its own"))
    for name, settings in _SETTINGS.items()
    for setting, kind in settings.items()
    if setting not in ServePart.model_fields
}
if not TYPE_CHECKING:
    about = {"__module__": __name__, "__doc__": ServePart.__doc__}
    ServePart = create_model("ServePart", __base__=ServePart, **about, **_OWN)


def is_relaxed(rule: object) -> bool:
    """Whether a rule of that name is approximate (runtime/verify/relaxed)."""
    return str(rule).partition(":")[0] in _RELAXED


def check_in_parallel(parallel: object, rule: object) -> None:
    """Drafting in parallel knows no relaxed rule."""
    if parallel and is_relaxed(rule):
        raise RecipeError(
            IN_PARALLEL,
            where="--rule",
            found=f"rule {rule}, drafting in parallel",
            expected="rule auto",
            do="--set serve.parallel=false, or leave the rule out",
        )


def check_serve(serve: Mapping[str, Any]) -> None:
    """Raise ValueError unless these are settings that a recipe could have, in their own types: JSON
    has no tuples, but else nothing is taken for what it is not ("5" or true for a count)."""
    ServePart.model_validate({name: _as_tuple(value) for name, value in serve.items()}, strict=True)


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
