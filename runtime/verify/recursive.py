"""Recursive rejection over siblings drawn without replacement, from the root down.

The rule of RSD (Jeon et al., arXiv 2402.14160): after a miss of x, r := norm([r - s]+), s(x) := 0,
s := norm(s). The j-th draw of Gumbel top-k has distribution q restricted to what earlier draws
left, which is s, so every test is speculative sampling of r by s. Once s is used up, further
siblings are not draws from anything and are rejected. Letters as in `walk`.
Letters: B rows, K draft vocabulary, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from specctl.core.tree import DraftTree
from specctl.runtime.sampling.noise import Noise
from specctl.runtime.verify import scalar_siblings
from specctl.runtime.verify.siblings import Missed, residual, scaled, walk_down
from specctl.runtime.verify.walk import DISTINCT, Rule, Verdict


def recursive(tree: DraftTree, scores_BTV: Tensor, noise: Noise) -> Verdict:
    """Test siblings in draw order, each against what the earlier ones left of p and of q."""
    return walk_down(tree, scores_BTV, noise, _without_the_missed)


def _without_the_missed(missed: Missed) -> tuple[Tensor, Tensor]:
    return residual(missed), scaled(missed.rest_BK)


RULE = Rule(
    "recursive",
    "distinct siblings in turn (RSD)",
    "https://arxiv.org/abs/2402.14160",
    recursive,
    scalar_siblings.recursive,
    DISTINCT,
)
