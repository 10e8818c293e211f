"""Tree policies: how a stepwise drafter is grown into a tree. One file per policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specctl.recipes.errors import RecipeError, nearest
from specctl.runtime.policies.base import Growth, Policy
from specctl.runtime.policies.chain import Chain
from specctl.runtime.policies.direct import Direct
from specctl.runtime.policies.dynamic_tree import DynamicTree
from specctl.runtime.policies.static_tree import StaticTree
from specctl.runtime.policies.switch import Switch

POLICIES: Mapping[str, type[Any]] = {
    "chain": Chain,
    "static-tree": StaticTree,
    "dynamic-tree": DynamicTree,
    "direct": Direct,
    "switch": Switch,
}


def make_policy(serve: Mapping[str, Any]) -> Policy:
    """The policy of a recipe's `serve` section: `policy` names it, the other keys are its fields.

    Keys set to None are left at the policy's default; keys that the policy does not have (`rule`,
    `adaptive` and fields of other policies) are the engine's business or raise there.
    """
    name = serve.get("policy", "chain")
    if name not in POLICIES:
        raise RecipeError(
            f"unknown tree policy {name!r}",
            where="serve.policy",
            expected="one of " + ", ".join(POLICIES),
            do=f"write policy: {nearest(name, POLICIES, 1)}",
        )
    kind = POLICIES[name]
    fields = set(kind.__dataclass_fields__)
    given = {k: v for k, v in serve.items() if v is not None and k in fields}
    policy: Policy = kind(**given)
    return policy


__all__ = ["POLICIES", "Growth", "Policy", "make_policy"]
