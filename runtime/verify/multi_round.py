"""Multi-round speculative sampling over i.i.d. siblings, from the root down.

The rule of SpecInfer (Miao et al., arXiv 2305.09781, Algorithm 2): after a miss, r := norm([r -
q]+), and q stays, because the next sibling was drawn from the same distribution. Duplicates must be
kept: a repeated token is tested again with its own uniform. Letters as in `walk`.
Letters: B rows, K draft vocabulary, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from specctl.core.tree import DraftTree
from specctl.runtime.sampling.noise import Noise
from specctl.runtime.verify import scalar_siblings
from specctl.runtime.verify.siblings import Missed, residual, walk_down
from specctl.runtime.verify.walk import IID, Rule, Verdict


def multi_round(tree: DraftTree, scores_BTV: Tensor, noise: Noise) -> Verdict:
    """Test siblings in draw order, each against what the earlier ones left of p, all with q."""
    return walk_down(tree, scores_BTV, noise, _same_q)


def _same_q(missed: Missed) -> tuple[Tensor, Tensor]:
    return residual(missed), missed.s_BK


RULE = Rule(
    "multi-round",
    "i.i.d. siblings in turn (SpecInfer)",
    "https://arxiv.org/abs/2305.09781",
    multi_round,
    scalar_siblings.multi_round,
    IID,
)
