"""A trimmed LM head over the whole vocabulary, where an engine has no table of kept ids.

Heads on a target's state have no spare channel in which a cut row could be pushed down
(`specctl.export.layouts.widen` needs one). But the mean of the kept rows has, for every state, the
mean of the kept logits, and a mean never exceeds the largest: with that row at every cut id no cut
token is ever a head's first choice. Engines draft the first choices of such heads and nothing else,
so they draft what the trimmed drafter drafts.
Letters: D hidden width, K draft vocabulary, R flat rows, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.core.vocab import VocabMap
from specctl.export.layouts.engines import gate


def whole_head(head_KD: Tensor, vocab: VocabMap | None) -> Tensor:
    """[V, D]: the head's rows at the kept ids, their mean at the others."""
    if vocab is None:
        return head_KD
    mean_D = head_KD.double().mean(0).to(head_KD.dtype)
    head_VD = mean_D.repeat(vocab.target_size, 1)
    head_VD[vocab.ids_K.cpu()] = head_KD
    return head_VD


def without_cut(logits_RV: Tensor, vocab: VocabMap | None) -> Tensor:
    """The logits with -inf at the cut ids, once it is seen that none of them is a first choice."""
    if vocab is None:
        return logits_RV
    cut_V = ~vocab.t2d().cpu()
    best_R = logits_RV.argmax(-1)
    if bool(cut_V[best_R].any()):
        raise gate("a cut token is a first choice", "kept tokens only")
    return logits_RV.masked_fill(cut_V, -torch.inf)
