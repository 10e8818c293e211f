"""Forced nodes: text that an approximate drafter puts in, whatever the target's distribution.

The target counts as if it were sure of every forced token, so any rule takes them and goes on
verifying behind them, exactly, given that text. Letters as in `walk`.
Letters: B rows, N nodes, R flat rows, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.core.tree import DraftTree


def with_forced(scores_BTV: Tensor, tree: DraftTree) -> Tensor:
    """The scores, a point mass on the forced child wherever there is one."""
    if tree.forced_BN is None:
        return scores_BTV
    scores_BTV = scores_BTV.clone()
    row_B1 = torch.arange(len(scores_BTV), device=scores_BTV.device)[:, None]
    row_BN = row_B1.expand_as(tree.parent_BN)
    forced_BN = tree.forced_BN & tree.valid_BN
    row_R, fed_R = row_BN[forced_BN], tree.parent_BN[forced_BN] + 1
    scores_BTV[row_R, fed_R] = -torch.inf
    scores_BTV[row_R, fed_R, tree.token_BN[forced_BN]] = 0.0
    return scores_BTV
