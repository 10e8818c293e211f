"""Verification rules: which drafted tokens a round keeps. One file per rule, one table.

A rule is a pure function (tree, scores, noise) -> Verdict; p = softmax(scores). The table says for
which trees a rule is lossless; anything else is refused when an engine is configured, because the
commonest losslessness bug is a rule applied to drafts that were not drawn the way it assumes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from specctl.drafters.parts.tree import DraftTree, NodeKind
from specctl.recipes.errors import RecipeError, nearest
from specctl.runtime.noise import Noise
from specctl.runtime.verify.block import block
from specctl.runtime.verify.chain import chain
from specctl.runtime.verify.greedy import greedy
from specctl.runtime.verify.one_hot import one_hot
from specctl.runtime.verify.recursive import recursive
from specctl.runtime.verify.target_only import target_only
from specctl.runtime.verify.traversal import traversal
from specctl.runtime.verify.walk import Verdict

__all__ = [
    "RULES",
    "Rule",
    "Verdict",
    "check_legal",
    "default_rule",
    "legal",
    "legal_rules",
    "run_rule",
]

_ANY = frozenset(NodeKind)
_SAMPLED = frozenset({NodeKind.IID, NodeKind.WITHOUT_REPLACEMENT})


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule and the trees for which it is lossless."""

    name: str
    summary: str
    kinds: frozenset[NodeKind]
    chains_only: bool
    run: Callable[[DraftTree, Tensor, Noise], Verdict]


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("greedy", "follow the argmax (temperature 0)", _ANY, False, greedy),
        Rule("target-only", "the target draws, drafts follow", _ANY, False, target_only),
        Rule("one-hot", "test candidates one by one", frozenset({NodeKind.POINT}), False, one_hot),
        Rule("chain", "token-level speculative sampling", _SAMPLED, True, chain),
        Rule("block", "block verification", _SAMPLED, True, block),
        Rule("recursive", "recursive rejection over siblings", _SAMPLED, False, recursive),
        Rule("traversal", "traversal verification", _SAMPLED, False, traversal),
    )
}


def legal(rule: str, kind: NodeKind, is_chain: bool) -> bool:
    """Whether that rule is lossless for trees of that kind and shape."""
    entry = RULES[rule]
    return kind in entry.kinds and (is_chain or not entry.chains_only)


def legal_rules(kind: NodeKind, is_chain: bool) -> list[str]:
    return [name for name in RULES if legal(name, kind, is_chain)]


def check_legal(rule: str, kind: NodeKind, is_chain: bool) -> None:
    """Raise RecipeError unless the rule is known and lossless for such trees."""
    allowed = legal_rules(kind, is_chain)
    if rule not in RULES:
        raise RecipeError(
            f"unknown verification rule {rule!r}",
            found=rule,
            expected="auto or one of " + ", ".join(RULES),
            do=f"write rule: {nearest(rule, RULES)}",
        )
    if rule not in allowed:
        shape = "chains" if is_chain else "trees"
        raise RecipeError(
            f"verification rule {rule!r} is not lossless for {shape} of kind {kind.value!r}",
            found=rule,
            expected="one of " + ", ".join(allowed),
            do=f"write rule: auto (here {default_rule(kind, is_chain)})",
        )


def default_rule(kind: NodeKind, is_chain: bool) -> str:
    """The rule of `auto` when sampling; with every row greedy the engine takes "greedy"."""
    if kind is NodeKind.POINT:
        return "target-only"
    return "block" if is_chain else "traversal"


def run_rule(name: str, tree: DraftTree, scores_BTV: Tensor, noise: Noise) -> Verdict:
    """Apply a legal rule; an empty tree fits every rule."""
    if tree.num_nodes:
        check_legal(name, tree.kind, tree.is_chain)
    return RULES[name].run(tree, scores_BTV, noise)
