"""Reflective verification (arXiv 2505.18629): the target reads its draft again before it judges.

Behind the draft the same pass reads a short prompt and the draft once more, and the logits that
verify are those of both readings,

    z = (1 - weight) z_draft + weight z_again

The second reading (engine/reflection.py) has the whole draft in sight, so what verifies is no
distribution behind the text alone. What stands is the choice by z; weight 0 is the lossless rule,
and nothing is read twice. Whether more of a draft stands depends on how well the target says it
again behind the prompt. Approximate.
Letters: B rows, N nodes, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specctl.core.tree import DraftTree
from specctl.runtime.verify.relaxed.base import Knob, RelaxedRule


def stands(tree: DraftTree, hit_BN: Tensor, scores_BNV: Tensor, values: Sequence[float]) -> Tensor:
    """[B, N]: no node that the fused logits did not choose."""
    return torch.zeros_like(hit_BN)


RELAXED = RelaxedRule(
    "reflect",
    "the target reads the draft again behind a prompt, and both readings choose",
    "https://arxiv.org/abs/2505.18629",
    stands,
    (Knob("weight", 0.3, most=1.0),),
    chains_only=True,
    reads_again=True,
)
