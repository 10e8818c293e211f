"""Probes: tokens fed beside a draft for what the target predicts after them, never to be accepted.

Letters: B rows, D hidden width, M new nodes (probes), N nodes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specctl.core.tree import DraftTree


def with_probes(
    tree: DraftTree,
    token_BM: Tensor,
    parent_M: Tensor,
    depth: int,
    embedded_BMD: Tensor | None = None,
) -> DraftTree:
    """The tree with M probes behind its nodes. `parent_M` (or one for each row, [B, M]) counts
    nodes of the tree first, then probes, -1 = the root; `depth` is that of the deepest probe.
    `embedded_BMD`: what is fed at them in front of the first layer, instead of their tokens."""
    assert tree.q is None, "probes join a deterministic tree"
    assert tree.num_probes == 0, "and they join it once"
    if token_BM.shape[1] == 0:
        return tree
    zero_BM, none_BM = torch.zeros_like(token_BM), torch.zeros_like(token_BM, dtype=torch.bool)

    def wider(rows_BN: Tensor | None, rest_BM: Tensor) -> Tensor | None:
        return None if rows_BN is None else torch.cat([rows_BN, rest_BM.to(rows_BN)], 1)

    return replace(
        tree,
        token_BN=torch.cat([tree.token_BN, token_BM], 1),
        parent_BN=torch.cat([tree.parent_BN, parent_M.expand_as(token_BM)], 1),
        rank_BN=torch.cat([tree.rank_BN, zero_BM], 1),
        valid_BN=torch.cat([tree.valid_BN, none_BM], 1),
        is_chain=False,
        estimate_BN=wider(tree.estimate_BN, zero_BM),
        expanded_BN=wider(tree.expanded_BN, zero_BM - 1),
        forced_BN=wider(tree.forced_BN, none_BM),
        num_probes=token_BM.shape[1],
        probe_depth=depth,
        probe_BMD=embedded_BMD,
    )
