"""Inverse CDF verification: the target draws at uniforms that the drafter was shown.

The token of a position is the inverse CDF of the target's distribution at the uniform number of
that position; drafts are followed while they agree. Drafters that read the same numbers, as
K-Forcing does (arXiv 2606.10820; as a draft: PTP, arXiv 2512.21323), can say the very token that
the target will draw.

Exact for any drafts: what is emitted never looks at them. A uniform is keyed by seed and absolute
position, and one token is ever emitted at a position. Tokens before it depend on the uniforms
before it alone: drafts that saw this one were dropped, or equalled what those uniforms say. So it
is independent of the text in front of it, and the token has the target's distribution. As with
`target-only`, one seed gives one text. Letters as in `walk`.
Letters: B rows, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from specctl.core.inverse_cdf import inverse_cdf as inverted
from specctl.core.tree import DraftTree, NodeKind
from specctl.runtime.sampling.noise import Noise
from specctl.runtime.verify import scalar
from specctl.runtime.verify.greedy import follow
from specctl.runtime.verify.walk import Rule, Verdict


def inverse_cdf(tree: DraftTree, scores_BTV: Tensor, noise: Noise) -> Verdict:
    """Draw at the uniform of each fed token's next position and follow it."""
    uniform_BT = noise.position_BT(tree.depth_BT())
    return follow(tree, inverted(scores_BTV.softmax(-1), uniform_BT))


RULE = Rule(
    "inverse-cdf",
    "the target draws at uniforms that the drafter knew",
    "https://arxiv.org/abs/2606.10820",
    inverse_cdf,
    scalar.inverse_cdf,
    {NodeKind.POINT},
)
