"""What the rules share: the verdict, paths through a tree, distributions of drafts, the last draw.

On an accelerator every function is free of host synchronisation: no `.item()`,
no data-dependent shape.
Letters: B rows, K draft vocabulary (support of q), N nodes, P path, T fed tokens (N + 1), V target
vocabulary, X any axes.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from functools import lru_cache, wraps

import numpy as np
import torch
from torch import Tensor

from specctl.core.tree import DraftTree, NodeKind, QRows
from specctl.runtime.sampling.noise import Noise
from specctl.runtime.verify.scalar_parts import ScalarRule

ANY = frozenset(NodeKind)
IID = frozenset({NodeKind.IID, NodeKind.PATHS})
DISTINCT = frozenset({NodeKind.WITHOUT_REPLACEMENT, NodeKind.REFILLED})
SAMPLED = IID | DISTINCT


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which nodes a round accepted, and the token it adds after them.

    path_BP         fed indices, the root (0) first, then accepted nodes, -1 padded; P = depth + 1
    num_accepted_B  accepted nodes, the root not counted next_token_B    correction or bonus token,
    drawn by the target's distribution after the last node
    """

    path_BP: Tensor
    num_accepted_B: Tensor
    next_token_B: Tensor


@dataclass(frozen=True, slots=True)
class Rule:
    """A verification rule, the scalar one that it must decide like, and the trees for which it is
    lossless. Whatever `run` is, it never sees what was drawn from no distribution."""

    name: str
    summary: str
    paper: str
    run: Callable[[DraftTree, Tensor, Noise], Verdict]
    reference: ScalarRule
    kinds: Set[NodeKind]
    chains_only: bool = False

    def __post_init__(self) -> None:
        run = self.run

        @wraps(run)
        def on_numbers(tree: DraftTree, scores_BTV: Tensor, noise: Noise) -> Verdict:
            return run(drawn_from_numbers(tree), scores_BTV, noise)

        object.__setattr__(self, "run", on_numbers)


def drawn_from_numbers(tree: DraftTree) -> DraftTree:
    """The tree without the nodes that were drawn from NaN or infinities, and all below them: behind
    such a distribution there is no draft. It follows from the tokens in front of it alone, never
    from those drawn from it, so that cutting there favours no token."""
    if tree.q is None or not tree.num_nodes:
        return tree
    prob_BTK = tree.q.prob_BTK
    is_bad_BT = ~(prob_BTK.sum(-1).abs() < torch.inf)
    if prob_BTK.device.type == "cpu" and not bool(is_bad_BT.any()):
        return tree
    if tree.is_chain:
        is_cut_BN = is_bad_BT[:, :-1].cummax(1).values
    else:
        above_BTT = tree.ancestor_BTT() & ~torch.eye(
            tree.num_nodes + 1, dtype=torch.bool, device=prob_BTK.device
        )
        is_cut_BN = (above_BTT & is_bad_BT[:, None]).any(-1)[:, 1:]
    q = QRows(prob_BTK.masked_fill(is_bad_BT[:, :, None], 0.0), tree.q.ids_K)
    return replace(tree, valid_BN=tree.valid_BN & ~is_cut_BN, q=q)


def chain_verdict(num_accepted_B: Tensor, next_token_B: Tensor, depth: int) -> Verdict:
    """The verdict of a chain, whose fed index j has depth j."""
    fed_P = torch.arange(depth + 1, device=num_accepted_B.device)
    path_BP = torch.where(fed_P <= num_accepted_B[:, None], fed_P, -1)
    return Verdict(path_BP, num_accepted_B, next_token_B)


def root_verdict(next_token_B: Tensor) -> Verdict:
    """The verdict of a round that drafted nothing."""
    return Verdict(*_root_only(len(next_token_B), next_token_B.device), next_token_B)


@lru_cache(maxsize=64)
def _root_only(num_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    path_B1 = torch.zeros(num_rows, 1, dtype=torch.long, device=device)
    return path_B1, path_B1[:, 0]


def tree_verdict(
    tree: DraftTree, ancestor_BTT: Tensor, node_B: Tensor, next_token_B: Tensor
) -> Verdict:
    """The verdict whose accepted path ends at fed index `node_B`."""
    B, T, _ = ancestor_BTT.shape
    own_BT = row(ancestor_BTT, node_B)
    depth_BT = torch.where(own_BT, ancestor_BTT.sum(-1) - 1, tree.depth + 1)
    path_BP = node_B.new_full((B, tree.depth + 2), -1)
    fed_BT = torch.arange(T, device=node_B.device).expand(B, T)
    path_BP = path_BP.scatter_(1, depth_BT, fed_BT)[:, : tree.depth + 1]
    return Verdict(path_BP, own_BT.sum(1) - 1, next_token_B)


def deepest_ok(ok_BT: Tensor, ancestor_BTT: Tensor) -> Tensor:
    """Fed index of the deepest token that, like all its ancestors, is ok; the first among equals.
    The root must be ok."""
    reached_BT = ~(ancestor_BTT & ~ok_BT[:, None]).any(-1)
    return torch.where(reached_BT, ancestor_BTT.sum(-1), 0).argmax(-1)


def earlier_sibling(tree: DraftTree) -> Tensor:
    """Bool [B, T, T]: fed token m is an earlier drawn sibling of fed token n (order: rank, then
    index). False wherever padding or the root is involved."""
    parent_BT = torch.cat(
        [tree.parent_BN.new_full((len(tree.parent_BN), 1), -2), tree.parent_BN], 1
    )
    same_BTT = parent_BT[:, :, None] == parent_BT[:, None]
    key_BT = draw_key(tree)
    valid_BT = tree.fed_valid_BT()
    before_BTT = key_BT[:, None] < key_BT[:, :, None]
    return same_BTT & before_BTT & valid_BT[:, None] & valid_BT[:, :, None]


def draw_key(tree: DraftTree) -> Tensor:
    """[B, T]: a number that orders siblings by their draw; unique in a row."""
    T = tree.num_nodes + 1
    rank_BT = torch.nn.functional.pad(tree.rank_BN, (1, 0))
    return rank_BT * T + torch.arange(T, device=rank_BT.device)


def children_of(tree: DraftTree, at_B: Tensor) -> tuple[Tensor, Tensor]:
    """[B, N] twice: whether a node is a child of fed index at_B[b], and what orders siblings by
    their draw."""
    child_BN = tree.valid_BN & (tree.parent_BN + 1 == at_B[:, None])
    return child_BN, draw_key(tree)[:, 1:]


def row(rows_BTX: Tensor, at_B: Tensor) -> Tensor:
    """[B, X]: row at_B[b] of each batch entry; a fresh tensor."""
    return rows_BTX[torch.arange(rows_BTX.shape[0], device=at_B.device), at_B]


def at_token(rows_BNX: Tensor, column_BN: Tensor) -> Tensor:
    """[B, N]: entry column_BN[b, n] of row n."""
    return rows_BNX.gather(2, column_BN[:, :, None])[:, :, 0]


@dataclass(frozen=True, slots=True)
class DraftDistribution:
    """The distributions q of a sampled tree, on their own support (never scattered to the
    vocabulary).

    prob_BTK   row t: the distribution the children of fed index t were drawn from
    ids_K      target ids of the support, None = the vocabulary
    column_BN  where node n's token stands in the support
    on_BN      whether it is there at all
    """

    prob_BTK: Tensor
    ids_K: Tensor | None
    column_BN: Tensor
    on_BN: Tensor

    @classmethod
    def of(cls, tree: DraftTree, p_BTV: Tensor) -> DraftDistribution:
        assert tree.q is not None, "a sampled tree carries the distributions it was drawn from"
        prob_BTK, ids_K = tree.q.prob_BTK.to(p_BTV.dtype), tree.q.ids_K
        token_BN = tree.token_BN.clamp(min=0)
        if ids_K is None:
            return cls(prob_BTK, None, token_BN, torch.ones_like(tree.valid_BN))
        column_V = ids_K.new_full((p_BTV.shape[-1],), -1)
        column_V.scatter_(0, ids_K, torch.arange(len(ids_K), device=ids_K.device))
        column_BN = column_V[token_BN]
        return cls(prob_BTK, ids_K, column_BN.clamp(min=0), column_BN >= 0)

    def of_token(self, parent_BN: Tensor | None = None) -> Tensor:
        """[B, N]: q of each node's token under its parent's row (None: a chain)."""
        rows_BNK = self.prob_BTK[:, :-1]
        if parent_BN is not None:
            flat_BN = parent_BN[:, :, None] * self.prob_BTK.shape[2] + self.column_BN[:, :, None]
            q_BN = self.prob_BTK.flatten(1).gather(1, flat_BN[:, :, 0])
        else:
            q_BN = at_token(rows_BNK, self.column_BN)
        return q_BN if self.ids_K is None else q_BN * self.on_BN

    def on_support(self, distribution_BV: Tensor) -> Tensor:
        """[B, K]: a distribution of the target vocabulary at the ids of the support of q."""
        return (
            distribution_BV
            if self.ids_K is None
            else distribution_BV.gather(1, self.ids_K.expand(len(distribution_BV), -1))
        )

    def minus(self, distribution_BV: Tensor, q_BK: Tensor) -> Tensor:
        """[distribution - q]+ over the target vocabulary."""
        if self.ids_K is None:
            return (distribution_BV - q_BK).clamp_(min=0)
        ids_BK = self.ids_K.expand_as(q_BK)
        return distribution_BV.scatter_add(1, ids_BK, -q_BK).clamp_(min=0)


def draw(distribution_BV: Tensor, fallback_BV: Tensor, noise: Noise) -> Tensor:
    """[B]: a token by `distribution` (need not sum to one), or by `fallback` where the distribution
    has no mass."""
    some_B1 = distribution_BV.sum(-1, keepdim=True) > 0
    distribution_BV = torch.where(some_B1, distribution_BV, fallback_BV)
    return noise.final_draw_B(log_distribution(distribution_BV))


def log_distribution(distribution: Tensor) -> Tensor:
    """log, -inf at zero."""
    if distribution.device.type == "cpu":  # torch's log on the CPU takes 30 times longer on zeros
        with np.errstate(divide="ignore"):
            return torch.from_numpy(np.log(distribution.numpy()))
    return distribution.log()
