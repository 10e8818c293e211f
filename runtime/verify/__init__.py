"""Verification rules: which drafted tokens a round keeps. One file per rule.

A rule is a pure function (tree, scores, noise) -> Verdict; p = softmax(scores). Its entry says for
which trees it is lossless; anything else is refused when an engine is configured, because the
commonest losslessness bug is a rule applied to drafts that were not drawn the way it assumes.
Letters: B rows, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from specctl.core.errors import RecipeError, unknown
from specctl.core.plugins import Plugins, plugins
from specctl.core.tree import DraftTree, NodeKind
from specctl.runtime.sampling.noise import Noise
from specctl.runtime.verify.walk import Rule, Verdict

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

_OWN = {NodeKind.REFILLED: "sequoia", NodeKind.TOP_PLUS_ONE: "top-plus-one"}
RULES: Plugins[Rule] = plugins(__name__, "RULE")


def legal(rule: str, kind: NodeKind, is_chain: bool) -> bool:
    """Whether that rule is lossless for trees of that kind and shape."""
    entry = RULES[rule]
    return kind in entry.kinds and (is_chain or not entry.chains_only)


@lru_cache
def legal_rules(kind: NodeKind, is_chain: bool) -> tuple[str, ...]:
    return tuple(name for name in RULES.working() if legal(name, kind, is_chain))


def check_legal(rule: str, kind: NodeKind, is_chain: bool) -> None:
    """Raise RecipeError unless the rule is known and lossless for such trees."""
    if rule not in RULES:
        known = ("auto", *RULES)
        raise unknown("verification rule", rule, known, "serve.rule", "specctl recipes rules")
    if not legal(rule, kind, is_chain):
        shape = "chains" if is_chain else "trees"
        raise RecipeError(
            f"verification rule {rule!r} is not lossless for {shape} of kind {kind.value!r}",
            found=rule,
            expected="one of " + ", ".join(legal_rules(kind, is_chain)),
            do=f"write rule: auto (here {default_rule(kind, is_chain)})",
        )


def default_rule(kind: NodeKind, is_chain: bool) -> str:
    """The rule of `auto` when sampling; with every row greedy the engine takes "greedy"."""
    if kind is NodeKind.POINT:
        return "target-only"
    if kind in _OWN:
        return _OWN[kind]
    return "block" if is_chain else "traversal"


def run_rule(name: str, tree: DraftTree, scores_BTV: Tensor, noise: Noise) -> Verdict:
    """Apply a legal rule; an empty tree fits every rule."""
    if tree.num_nodes:
        check_legal(name, tree.kind, tree.is_chain)
    return RULES[name].run(tree, scores_BTV, noise)
