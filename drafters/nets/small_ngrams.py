"""Two small models of text that look a few tokens back: counts, and a little network.

`NgramCounts` is an n-gram model with stupid backoff (Brants et al. 2007, equation 5): the relative
frequency of the longest context that has been seen to go on so, times BACKOFF for every token that
had to be dropped. Counts lie in tables of fixed size, addressed by a hash of the n-gram, so that
the model is as large after a billion tokens as after none; where two n-grams meet, both count.
`NgramNet` is a feed-forward language model (Bengio et al. 2003) trained on the same text.
Letters: X leading axes, N context tokens, J candidates, B rows, S sequence, O order, T slots of a
table, E width of a state, G n-grams, K draft vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.vocab import VocabMap
from specctl.drafters.losses.align import aim, shifted
from specctl.drafters.losses.head_losses import LossOptions, head_loss
from specctl.drafters.nets.rescore import NONE

BACKOFF = 0.4
FACTOR = 0x5851F42D4C957F2D  # of the multiplicative hash, 64 bits and odd


class NgramCounts(nn.Module):
    """Counts of n-grams up to `order`; `slots` must be a power of two."""

    count_OT: Tensor

    def __init__(self, order: int, vocab_size: int, slots: int = 2**18) -> None:
        super().__init__()
        assert slots & (slots - 1) == 0, f"{slots} slots are no power of two"
        self.order, self.vocab_size, self.slots = order, vocab_size, slots
        self.register_buffer("count_OT", torch.zeros(order, slots, dtype=torch.int32))

    @property
    def reach(self) -> int:
        return self.order - 1

    @torch.no_grad()
    def loss(self, batch: TrainBatch, vocab: VocabMap | None) -> LossOut | None:
        """Nothing to descend: count every n-gram that lies inside one document."""
        del vocab
        key_BS = torch.zeros_like(batch.ids_BS)
        inside_BS = batch.document_BS >= 0
        for n in range(self.order):
            key_BS = _mixed(key_BS, shifted(batch.ids_BS, n))
            inside_BS = inside_BS & (shifted(batch.document_BS, n, NONE) == batch.document_BS)
            slot_G = self._slot(key_BS[inside_BS])
            self.count_OT[n] += torch.bincount(slot_G, minlength=self.slots).int()
        return None

    def score(self, context_XN: Tensor, ids_XJ: Tensor, rows_XJ: Tensor) -> Tensor:
        del rows_XJ
        zero_X1, count_OT = torch.zeros_like(ids_XJ[..., :1]), self.count_OT.float()
        single_XJ = count_OT[0][self._slot(_mixed(zero_X1, ids_XJ))]
        r_XJ = (single_XJ + 1.0) / (count_OT[0].sum() + self.vocab_size)
        for n in range(1, self.order):
            key_X1, is_known_X1 = zero_X1, torch.ones_like(zero_X1, dtype=torch.bool)
            for token_X1 in torch.split(context_XN[..., self.reach - n :], 1, dim=-1):
                key_X1 = _mixed(key_X1, token_X1)
                is_known_X1 = is_known_X1 & (token_X1 != NONE)
            before_X1 = count_OT[n - 1][self._slot(key_X1)]
            seen_XJ = count_OT[n][self._slot(_mixed(key_X1, ids_XJ))].minimum(before_X1)
            is_seen_XJ = is_known_X1 & (seen_XJ > 0)
            r_XJ = torch.where(is_seen_XJ, seen_XJ / before_X1.clamp(min=1.0), BACKOFF * r_XJ)
        return r_XJ.log()

    def _slot(self, key: Tensor) -> Tensor:
        """The high bits, which every bit of the n-gram has reached."""
        return (key >> 24) & (self.slots - 1)


def _mixed(key: Tensor, ids: Tensor) -> Tensor:
    """The key of an n-gram one token longer (64-bit arithmetic that wraps around)."""
    return (key + ids + 1) * FACTOR


class NgramNet(nn.Module):
    """log r from the embeddings of the last `reach` tokens through one hidden layer."""

    def __init__(self, order: int, vocab_size: int, rows: int, width: int) -> None:
        super().__init__()
        self.reach = order - 1
        self.emb = nn.Embedding(vocab_size + 1, width)  # the last row: before the first token
        self.hidden = nn.Linear(self.reach * width, 2 * width)
        self.out = nn.Linear(2 * width, rows, bias=False)
        nn.init.normal_(self.out.weight, std=width**-0.5)

    def state(self, context_XN: Tensor) -> Tensor:
        at_XN = torch.where(context_XN == NONE, self.emb.num_embeddings - 1, context_XN)
        return F.silu(self.hidden(self.emb(at_XN).flatten(-2)))

    def loss(self, batch: TrainBatch, vocab: VocabMap | None) -> LossOut:
        """Cross-entropy of the text, the next token from those before it in the document."""
        back = [_earlier(batch, n) for n in reversed(range(self.reach))]
        state_RE = self.state(torch.stack(back, dim=-1)).flatten(0, 1)
        out = head_loss(state_RE, self.out, aim(batch, 1), vocab, LossOptions("ce"))
        return LossOut(out.sum, out.count)

    def score(self, context_XN: Tensor, ids_XJ: Tensor, rows_XJ: Tensor) -> Tensor:
        del ids_XJ
        logr_XK: Tensor = self.out(self.state(context_XN)).float().log_softmax(-1)
        return logr_XK.gather(-1, rows_XJ)


def _earlier(batch: TrainBatch, count: int) -> Tensor:
    """[B, S]: the token `count` positions before, NONE where its document had not begun."""
    S = batch.ids_BS.shape[1]
    ids_BS, document_BS = (
        F.pad(rows_BS[:, : max(S - count, 0)], (min(count, S), 0), value=NONE)
        for rows_BS in (batch.ids_BS, batch.document_BS)
    )
    return torch.where(document_BS == batch.document_BS, ids_BS, NONE)
