"""FLy (arXiv 2511.22972): a missed token stands where the target is unsure and soon agrees again.

Node i of a chain of K, which the target did not choose, stands if

    H(top three probabilities, normalised) / log 3 >= threshold     (the entropy gate)
    nodes i + 1 .. i + W are the target's own choices               (the deferred window)

with W = min(window, K - 1), so that the window lies in the draft; the choices in it are made behind
the text with the missed token. A threshold above 1 lets nothing stand. Approximate.
Letters: B rows, C candidates, N nodes, V target vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specctl.core.tree import DraftTree
from specctl.runtime.verify.relaxed.base import Knob, RelaxedRule

TOP = 3


def stands(tree: DraftTree, hit_BN: Tensor, scores_BNV: Tensor, values: Sequence[float]) -> Tensor:
    """[B, N]: behind which the window is clean, where the gate is open."""
    threshold, window = values
    num_nodes = hit_BN.shape[1]
    count_B1 = tree.valid_BN.sum(1, keepdim=True)
    window_B1 = (count_B1 - 1).clamp(max=int(window))
    last_BN = torch.arange(num_nodes, device=hit_BN.device) + window_B1
    missed_BN = (~hit_BN).cumsum(1)
    clean_BN = missed_BN.gather(1, last_BN.clamp(0, num_nodes - 1)) == missed_BN
    is_whole_BN = (last_BN < count_B1) & (window_B1 > 0)
    return is_whole_BN & clean_BN & (top_entropy(scores_BNV) >= threshold)


def top_entropy(scores_BNV: Tensor) -> Tensor:
    """[B, N]: entropy of the three best tokens' probabilities among themselves, over log 3."""
    top_BNC = scores_BNV.topk(min(TOP, scores_BNV.shape[-1])).values.softmax(-1)
    return -torch.xlogy(top_BNC, top_BNC).sum(-1) / math.log(TOP)


RELAXED = RelaxedRule(
    "fly",
    "a missed token stands where the target's entropy is high and it agrees with what follows",
    "https://arxiv.org/abs/2511.22972",
    stands,
    (Knob("threshold", 0.3), Knob("window", 6, is_count=True)),
    chains_only=True,
)
