"""Which rule verifies: checked when an engine is configured, chosen for each round, and the mark
that every result carries."""

from __future__ import annotations

from collections.abc import Mapping

from specctl.core.drafter import Drafter
from specctl.core.errors import RecipeError
from specctl.core.tree import DraftTree
from specctl.runtime.policies.base import Policy
from specctl.runtime.policies.direct import Direct
from specctl.runtime.target.target import Target
from specctl.runtime.verify import check_legal, default_rule
from specctl.runtime.verify.relaxed import relaxation


def native(rule: str) -> str:
    """The rule that a relaxed one keeps all drafts of; any other rule itself."""
    relaxed = relaxation(rule)
    return rule if relaxed is None else relaxed.rule.native


def check_rule(rule: str, drafter: Drafter | None, policy: Policy) -> None:
    """Refuse an illegal pair of rule and node kind before anything is drafted."""
    if rule in ("auto", "greedy") or drafter is None:
        return
    if (relaxed := relaxation(rule)) is not None:
        proposes = isinstance(getattr(policy, "policy", policy), Direct)  # a proof wraps policies
        if relaxed.rule.chains_only and not (policy.is_chain or proposes):
            raise RecipeError(
                f"rule {relaxed.rule.name} relaxes chains only",
                where="serve.rule",
                found=f"policy {type(policy).__name__}, which grows trees",
                expected="policy chain, or direct (trees among its drafts are not relaxed)",
                do="--set serve.policy=chain, or rule typical",
            )
        if relaxed.rule.judges is not None:
            check_legal(relaxed.rule.native, policy.kind(sampled=True), policy.is_chain)
        return
    check_legal(rule, policy.kind(sampled=rule != "target-only"), policy.is_chain)


def sampling_rule(rule: str, drafter: Drafter | None, policy: Policy) -> str:
    """The rule that verifies what this policy drafts for sampled rows; plain decoding draws as
    target-only does."""
    if drafter is None:
        return "target-only"
    rule = native(rule)
    if rule not in ("auto", "greedy"):
        return rule
    return default_rule(policy.kind(sampled=True), policy.is_chain)


def rule_for(rule: str, tree: DraftTree, all_greedy: bool, usual: str) -> str:
    """The rule of a round under the configured one. Where nobody drafts it is the `usual` one of
    the policy, so that a row without a draft is drawn alike beside rows that have one."""
    if all_greedy:
        return "greedy"
    if tree.num_nodes == 0:
        return usual
    return default_rule(tree.kind, tree.is_chain) if rule in ("auto", "greedy") else rule


def verification_of(
    rule: str, drafter: Drafter | None, policy: Policy, sampled: bool, target: Target
) -> Mapping[str, str]:
    """Class and rule of what an engine with this configuration emits. Of a mixture the class names
    the law that it holds for; what models write in turns, or behind a part of the prompt, is
    approximate, whatever drafts, and names what makes the target's words approximate as well."""
    relaxed = None if drafter is None else relaxation(rule)
    is_lossless = drafter is None or (drafter.lossless and relaxed is None)
    lossless = "lossless" if is_lossless else "approximate"
    if target.mixture is not None and target.mixture.is_approximate and is_lossless:
        return {"class": "approximate", "rule": target.mixture.law_text}
    if target.mixture is not None:
        lossless += f" of {target.mixture.law_text}"
    if drafter is None:
        name = "plain"
    elif relaxed is not None:
        name = str(relaxed)
    else:
        name = sampling_rule(rule, drafter, policy) if sampled else "greedy"
    return {"class": lossless, "rule": name}
