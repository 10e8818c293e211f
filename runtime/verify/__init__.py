"""Verification rules: which drafted tokens a round keeps. One file per rule, one table.

A rule is a pure function (tree, scores, noise) -> Verdict; p = softmax(scores). The table gives for
which trees a rule is lossless; anything else is refused when an engine is configured, because the
commonest losslessness bug is a rule applied to drafts that were not drawn the way it assumes.
Letters: B rows, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from specctl.core.errors import RecipeError, unknown
from specctl.core.tree import DraftTree, NodeKind
from specctl.runtime.sampling.noise import Noise
from specctl.runtime.verify.block import block
from specctl.runtime.verify.chain import chain
from specctl.runtime.verify.greedy import greedy
from specctl.runtime.verify.multi_path import multi_path
from specctl.runtime.verify.multi_round import multi_round
from specctl.runtime.verify.one_hot import one_hot
from specctl.runtime.verify.recursive import recursive
from specctl.runtime.verify.sequoia import sequoia
from specctl.runtime.verify.spectr import spectr
from specctl.runtime.verify.target_only import target_only
from specctl.runtime.verify.top_plus_one import top_plus_one
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
_IID = frozenset({NodeKind.IID, NodeKind.PATHS})
_DISTINCT = frozenset({NodeKind.WITHOUT_REPLACEMENT, NodeKind.REFILLED})
_SAMPLED = _IID | _DISTINCT
_OWN = {NodeKind.REFILLED: "sequoia", NodeKind.TOP_PLUS_ONE: "top-plus-one"}


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule and the trees for which it is lossless."""

    name: str
    summary: str
    kinds: frozenset[NodeKind]
    run: Callable[[DraftTree, Tensor, Noise], Verdict]
    paper: str = ""
    chains_only: bool = False


_LEVIATHAN = "https://arxiv.org/abs/2211.17192"
_SPECINFER = "https://arxiv.org/abs/2305.09781"
_ALL = (
    Rule("greedy", "follow the argmax (temperature 0)", _ANY, greedy, _LEVIATHAN),
    Rule("target-only", "the target draws, drafts follow", _ANY, target_only, _SPECINFER),
    Rule(
        "one-hot",
        "test candidates one by one",
        frozenset({NodeKind.POINT}),
        one_hot,
        "https://arxiv.org/abs/2406.16858",
    ),
    Rule("chain", "token-level speculative sampling", _SAMPLED, chain, _LEVIATHAN, True),
    Rule(
        "block",
        "block verification, the best for one chain",
        _SAMPLED,
        block,
        "https://arxiv.org/abs/2403.10444",
        True,
    ),
    Rule("multi-round", "i.i.d. siblings in turn (SpecInfer)", _IID, multi_round, _SPECINFER),
    Rule(
        "spectr",
        "i.i.d. siblings by k-sequential selection",
        _IID,
        spectr,
        "https://arxiv.org/abs/2310.15141",
    ),
    Rule(
        "recursive",
        "distinct siblings in turn (RSD)",
        _DISTINCT,
        recursive,
        "https://arxiv.org/abs/2402.14160",
    ),
    Rule(
        "sequoia",
        "distinct siblings in turn, uniform once q is used up",
        frozenset({NodeKind.REFILLED}),
        sequoia,
        "https://arxiv.org/abs/2402.12374",
    ),
    Rule(
        "top-plus-one",
        "q's top tokens and one sample, one test a node",
        frozenset({NodeKind.TOP_PLUS_ONE}),
        top_plus_one,
        "https://arxiv.org/abs/2502.18779",
    ),
    Rule(
        "traversal",
        "block verification of a tree, from the leaves up",
        _SAMPLED,
        traversal,
        "https://arxiv.org/abs/2505.12398",
    ),
    Rule(
        "multi-path",
        "block verification of the best of whole paths",
        frozenset({NodeKind.PATHS}),
        multi_path,
        "https://arxiv.org/abs/2602.16961",
    ),
)
RULES: dict[str, Rule] = {rule.name: rule for rule in _ALL}


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
        known = ("auto", *RULES)
        raise unknown("verification rule", rule, known, "serve.rule", "specctl recipes rules")
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
    if kind in _OWN:
        return _OWN[kind]
    return "block" if is_chain else "traversal"


def run_rule(name: str, tree: DraftTree, scores_BTV: Tensor, noise: Noise) -> Verdict:
    """Apply a legal rule; an empty tree fits every rule."""
    if tree.num_nodes:
        check_legal(name, tree.kind, tree.is_chain)
    return RULES[name].run(tree, scores_BTV, noise)
