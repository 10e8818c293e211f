"""Tree policies: how a stepwise drafter is grown into a tree. One file per policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specctl.core.drafter import Family
from specctl.core.errors import unknown
from specctl.runtime.policies.base import GrowRequest, Policy
from specctl.runtime.policies.cape import Caterpillar
from specctl.runtime.policies.chain import Chain
from specctl.runtime.policies.ddd import DynamicDepth
from specctl.runtime.policies.direct import Direct
from specctl.runtime.policies.dynamic_tree import DynamicTree
from specctl.runtime.policies.dyspec import DySpec
from specctl.runtime.policies.fused import Fused
from specctl.runtime.policies.hardware_tree import HardwareTree
from specctl.runtime.policies.mcsd import Candidates
from specctl.runtime.policies.merged_beams import MergedBeams
from specctl.runtime.policies.opt_tree import OptTree
from specctl.runtime.policies.paths import Paths
from specctl.runtime.policies.propd import Progressive
from specctl.runtime.policies.rsd import StochasticBeam
from specctl.runtime.policies.sequoia import Sequoia
from specctl.runtime.policies.static_tree import StaticTree
from specctl.runtime.policies.switch import Switch
from specctl.runtime.policies.top_plus_one import TopPlusOne

POLICIES: Mapping[str, type[Any]] = {
    "chain": Chain,
    "static-tree": StaticTree,
    "dynamic-tree": DynamicTree,
    "merged-beams": MergedBeams,
    "sequoia": Sequoia,
    "rsd": StochasticBeam,
    "dyspec": DySpec,
    "opt-tree": OptTree,
    "ddd": DynamicDepth,
    "cape": Caterpillar,
    "mcsd": Candidates,
    "top-plus-one": TopPlusOne,
    "paths": Paths,
    "hardware-tree": HardwareTree,
    "propd": Progressive,
    "fused": Fused,
    "direct": Direct,
    "switch": Switch,
}
TREES = tuple(name for name in POLICIES if name not in ("chain", "fused", "direct", "switch"))


def policies_of(family: Family) -> tuple[str, ...]:
    """The policies that may grow a family: its own first, and every tree policy if any is."""
    branches = not set(family.policies).isdisjoint(TREES)
    more = [name for name in POLICIES if name in TREES and name not in family.policies]
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
