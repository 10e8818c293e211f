"""DraftTree: what a drafter proposes for one round, and everything derived from its shape.

The root is the last emitted token; it is fed to the target in front of the nodes, so *fed index* =
node index + 1 and fed index 0 is the root.
Letters: B rows, D hidden width, K draft vocabulary (support of q), M new nodes (probes), N nodes, T
fed tokens (N + 1), V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specctl.core.forward.exit_states import ExitStates


class NodeKind(StrEnum):
    """How the children of a node were chosen; decides which verification rules are legal."""

    POINT = "point"  # any deterministic function of the past (argmax, top-k, retrieval)
    IID = "iid"  # sampled from q, duplicates kept, as many as was settled before the first
    PATHS = "iid-paths"  # whole paths from the root, each sampled alone: IID, forks only there
    WITHOUT_REPLACEMENT = "without-replacement"  # sampled from q, draw order kept
    REFILLED = "refilled"  # the same, and uniformly over what is left once q is used up
    TOP_PLUS_ONE = "top-plus-one"  # rank 0 sampled from q without the others, which are its top

    @property
    def is_distinct(self) -> bool:
        """Siblings were drawn one after another from what the earlier ones left of q."""
        return self in (NodeKind.WITHOUT_REPLACEMENT, NodeKind.REFILLED)


@dataclass(frozen=True, slots=True)
class QRows:
    """The distributions the children were drawn from: row t is the distribution used at fed index
    t.

    `prob_BTK` is float32 and sums to one on rows that drew children; rows of leaves are ignored
    (all zero is allowed). `ids_K` names the target ids of the support; None = the full vocabulary.
    """

    prob_BTK: Tensor
    ids_K: Tensor | None = None

    def dense(self, vocab_size: int) -> Tensor:
        """[B, T, V]: the distribution scattered to target ids, zero outside its support."""
        if self.ids_K is None:
            return self.prob_BTK
        B, T, _ = self.prob_BTK.shape
        out_BTV = self.prob_BTK.new_zeros(B, T, vocab_size)
        return out_BTV.index_copy_(2, self.ids_K, self.prob_BTK)


@dataclass(frozen=True, slots=True)
class DraftTree:
    """B padded token trees. Parents stand before their children; siblings are never re-sorted.

    token_BN     target ids
    parent_BN    node index, -1 = the root
    rank_BN      draw order among siblings
    valid_BN     False = padding
    kind         one kind for the whole tree
    q            distributions of sampled kinds, None for POINT
    estimate_BN  a policy's guess of path acceptance; verification never reads it
    expanded_BN  expansion index of each node in its StepState (-1 = a leaf never expanded);
                 None = node i was expansion i, as far as expansions went
    depth        static bound on the depth
    is_chain     node i's parent is node i - 1, always
    num_probes   so many of the last columns are probes: fed for what the target predicts after
                 them, and padding to everyone else; they hang on the root, on each other or on
                 nodes, down to `probe_depth`; where such a node is padding, they mean nothing
    probe_BMD    what is fed at the probes in front of the first layer, instead of the embeddings
                 of their tokens (None: those)
    forced_BN    nodes taken without the target, one below a parent at most; only from
                 drafters that call themselves approximate
    exits        of a chain: what drafting has computed of the target's own lower layers
    """

    token_BN: Tensor
    parent_BN: Tensor
    rank_BN: Tensor
    valid_BN: Tensor
    kind: NodeKind
    depth: int
    is_chain: bool = False
    q: QRows | None = None
    estimate_BN: Tensor | None = None
    expanded_BN: Tensor | None = None
    num_probes: int = 0
    probe_depth: int = 0
    probe_BMD: Tensor | None = None
    forced_BN: Tensor | None = None
    exits: ExitStates | None = None

    @property
    def num_nodes(self) -> int:
        return self.token_BN.shape[1]

    def fed_token_BT(self, root_B: Tensor) -> Tensor:
        """Root and nodes in the order in which the target is fed."""
        if self.num_nodes == 0:
            return root_B[:, None]
        return torch.cat([root_B[:, None], self.token_BN], dim=1)

    def position_BT(self, kept_len_B: Tensor) -> Tensor:
        """Positions of root and nodes: kept length + depth."""
        if self.num_nodes == 0:
            return kept_len_B[:, None]
        return kept_len_B[:, None] + self.depth_BT()

    def fed_parent_BT(self) -> Tensor:
        """Fed index of each fed token's parent; the root is its own parent."""
        root_B1 = self.parent_BN.new_zeros(self.parent_BN.shape[0], 1)
        return torch.cat([root_B1, self.parent_BN + 1], dim=1)

    def fed_valid_BT(self) -> Tensor:
        root_B1 = torch.ones_like(self.valid_BN[:, :1]) if self.num_nodes else _true(self.valid_BN)
        return torch.cat([root_B1, self.valid_BN], dim=1)

    def ancestor_BTT(self) -> Tensor:
        """Bool: fed token j is fed token i or an ancestor of it. Closure by repeated squaring."""
        B, T = self.parent_BN.shape[0], self.num_nodes + 1
        device = self.parent_BN.device
        if self.is_chain:
            return torch.ones(T, T, dtype=torch.bool, device=device).tril().expand(B, T, T)
        step_BTT = torch.zeros(B, T, T, device=device)
        step_BTT.scatter_(2, self.fed_parent_BT()[:, :, None], 1.0)
        step_BTT = step_BTT + torch.eye(T, device=device)
        reach = 1
        while reach < max(self.depth, self.probe_depth, 1):
            step_BTT = (step_BTT @ step_BTT).clamp(max=1.0)
            reach *= 2
        return step_BTT > 0

    def depth_BT(self) -> Tensor:
        """Distance from the root of each fed token (root = 0)."""
        if self.is_chain:
            B, T = self.parent_BN.shape[0], self.num_nodes + 1
            return torch.arange(T, device=self.parent_BN.device).expand(B, T)
        return self.ancestor_BTT().sum(-1) - 1

    def path_to(self, row: int, fed: int) -> list[int]:
        """Tokens of the nodes of a row from below the root to that fed index, read on the host."""
        parents, tokens = self.parent_BN[row].tolist(), self.token_BN[row].tolist()
        path, at = list[int](), fed - 1
        while at >= 0:
            path.append(tokens[at])
            at = parents[at]
        return path[::-1]

    def within(self, length_B: Tensor) -> DraftTree:
        """The tree without the nodes that lie deeper than their row's own length."""
        depth_BN = self.depth_BT()[:, 1:]
        return replace(self, valid_BN=self.valid_BN & (depth_BN <= length_B[:, None]))

    def of_rows(self, at_B: Tensor) -> DraftTree:
        """The tree whose row b is this one's row at_B[b]; what drafting computed is left behind."""
        rows: dict[str, Any] = {
            name: None if (value := getattr(self, name)) is None else value[at_B]
            for name in _BY_ROW
        }
        q = None if self.q is None else QRows(self.q.prob_BTK[at_B], self.q.ids_K)
        return replace(self, q=q, exits=None, **rows)


_BY_ROW = (
    "token_BN",
    "parent_BN",
    "rank_BN",
    "valid_BN",
    "estimate_BN",
    "expanded_BN",
    "forced_BN",
    "probe_BMD",
)


def _true(like_BN: Tensor) -> Tensor:
    return torch.ones(like_BN.shape[0], 1, dtype=torch.bool, device=like_BN.device)


@lru_cache(maxsize=64)
def empty_tree(num_rows: int, device: torch.device) -> DraftTree:
    """Nothing drafted: a plain decoding step through the same round."""
    none_BN = torch.zeros(num_rows, 0, dtype=torch.long, device=device)
    return DraftTree(none_BN, none_BN, none_BN, none_BN.bool(), NodeKind.POINT, 0, is_chain=True)


def fitted(tree: DraftTree) -> DraftTree:
    """The tree without the columns that no row fills and no probe hangs on. It reads the tree on
    the host, so only trees on the CPU are fitted: there reading costs nothing and a padded node
    costs a forward."""
    if tree.num_nodes == 0 or tree.token_BN.device.type != "cpu":
        return tree
    used_N = tree.valid_BN.any(0)
    if tree.num_probes:
        first = tree.num_nodes - tree.num_probes
        used_N |= tree.ancestor_BTT()[:, first + 1 :, 1:].flatten(0, 1).any(0)
    if bool(used_N.all()):
        return tree
    keep_N = used_N.nonzero()[:, 0]
    if keep_N.numel() == 0:
        return empty_tree(len(tree.valid_BN), tree.token_BN.device)
    new_N = used_N.cumsum(0) - 1
    parent_BN = tree.parent_BN[:, keep_N]
    expanded_BN, fed_T = keep_N.expand_as(parent_BN), torch.cat([keep_N.new_zeros(1), keep_N + 1])
    depth_BN = tree.depth_BT()[:, 1:].masked_fill(~tree.valid_BN, 0)

    def kept(rows_BN: Tensor | None) -> Tensor | None:
        return None if rows_BN is None else rows_BN[:, keep_N]

    return replace(
        tree,
        token_BN=tree.token_BN[:, keep_N],
        parent_BN=torch.where(parent_BN >= 0, new_N[parent_BN], parent_BN),
        rank_BN=tree.rank_BN[:, keep_N],
        valid_BN=tree.valid_BN[:, keep_N],
        depth=int(depth_BN.max()),
        q=None if tree.q is None else QRows(tree.q.prob_BTK[:, fed_T], tree.q.ids_K),
        estimate_BN=kept(tree.estimate_BN),
        expanded_BN=expanded_BN if tree.expanded_BN is None else kept(tree.expanded_BN),
        forced_BN=kept(tree.forced_BN),
    )


@lru_cache(maxsize=1024)
def chain_parent(step: int, num_rows: int, device: torch.device) -> Tensor:
    """[B, 1]: the parent of token number `step` of a chain (expansion index, -1 for the root). One
    tensor for all chains: who is given this very one knows without looking that a chain goes on."""
    with torch.inference_mode(False):
        return torch.full((num_rows, 1), step - 1, dtype=torch.long, device=device)


def chain_tree(
    token_BN: Tensor, valid_BN: Tensor, kind: NodeKind, q: QRows | None = None
) -> DraftTree:
    """A chain per row; `valid_BN` must be a prefix of each row (shorter rows are padded)."""
    N = token_BN.shape[1]
    parent_BN = torch.arange(-1, N - 1, device=token_BN.device).expand_as(token_BN)
    return DraftTree(
        token_BN, parent_BN, torch.zeros_like(token_BN), valid_BN, kind, N, is_chain=True, q=q
    )
