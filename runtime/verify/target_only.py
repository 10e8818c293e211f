"""Target-only verification: the target draws at every node, drafts are followed while they agree.

Lossless for any drafts whatever, since the distribution of what is emitted never looks at them
(SpecInfer's "naive sampling"). The noise is keyed by absolute position, so one seed gives one text
with every drafter, tree and batch (Daliri, Musco and Suresh, arXiv 2408.07978). Letters as in
`walk`.
Letters: B rows, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from specctl.core.tree import DraftTree
from specctl.runtime.sampling.noise import Noise
from specctl.runtime.verify import scalar
from specctl.runtime.verify.greedy import follow
from specctl.runtime.verify.walk import ANY, Rule, Verdict


def target_only(tree: DraftTree, scores_BTV: Tensor, noise: Noise) -> Verdict:
    """Draw argmax(scores + Gumbel noise) after every fed token and follow it."""
    depth_BT = None if tree.is_chain else tree.depth_BT()
    return follow(tree, noise.target_draw_BT(scores_BTV, depth_BT))


RULE = Rule(
    "target-only",
    "the target draws, drafts follow",
    "https://arxiv.org/abs/2305.09781",
    target_only,
    scalar.target_only,
    ANY,
)
