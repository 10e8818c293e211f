"""Tree policies: how a stepwise drafter is grown into a tree. One file per policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specctl.core.drafter import Family
from specctl.core.errors import unknown
from specctl.core.plugins import Plugins, declared, plugins
from specctl.runtime.policies.base import GrowRequest, Policy

POLICIES: Plugins[type[Any]] = plugins(__name__, "POLICY", lambda entry: entry.make)
TREES = tuple(
    name
    for name, entry in declared(__name__, "POLICY").items()
    if not entry.problem and entry.values.get("is_tree", True)
)


def policies_of(family: Family) -> tuple[str, ...]:
    """The policies that may grow a family: its own first, and every tree policy if any is."""
    branches = not set(family.policies).isdisjoint(TREES)
    more = [name for name in TREES if name not in family.policies]
    return (*family.policies, *more) if branches else family.policies


def make_policy(serve: Mapping[str, Any]) -> Policy:
    """The policy of a recipe's `serve` section: `policy` names it, the other keys are its fields.

    Keys set to None are left at the policy's default; keys that the policy does not have (`rule`,
    `adaptive` and fields of other policies) are the engine's business or raise there.
    """
    name = serve.get("policy", "chain")
    if name not in POLICIES:
        listed = "specctl recipes schema --field serve"
        raise unknown("tree policy", name, POLICIES, "serve.policy", listed)
    kind = POLICIES[name]
    fields = set(kind.__dataclass_fields__)
    given = {k: v for k, v in serve.items() if v is not None and k in fields}
    policy: Policy = kind(**given)
    return policy


__all__ = ["POLICIES", "TREES", "GrowRequest", "Policy", "make_policy", "policies_of"]
