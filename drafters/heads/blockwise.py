"""Blockwise parallel decoding (Stern et al. 2018, arXiv 1811.03115) and its rescoring.

One feed-forward layer turns f_t, the target's last state, into k states, each added to f_t and read
by the target's own frozen LM head (section 6): state i predicts token t + 2 + i. A draft is every
head's best token, one block. Since heads do not see each other's choices, blocks repeat tokens;
`rescore` lets a small model of text choose among each head's best tokens (arXiv 2404.09221; see
`nets/rescore.py`). The paper's merged step, verifying and predicting in one pass, is how every
drafter runs here: the target's states come out of the verification.

Two small models rescore. `NgramCounts` is an n-gram model with stupid backoff (Brants et al. 2007,
equation 5): the relative frequency of the longest context that has been seen to go on so, times
BACKOFF for every token that had to be dropped. Counts lie in tables of fixed size, addressed by a
hash of the n-gram, so that the model is as large after a billion tokens as after none; where two
n-grams meet, both count. `NgramNet` is a feed-forward language model (Bengio et al. 2003) trained
on the same text.
Letters: B rows, C candidates, D hidden width, K draft vocabulary, O output width, P path, R flat
rows, S sequence, W window, X any axes, Y carry (k D).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import Family
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.frames.parallel_heads import MAX_RANK, ParallelHeads, first_ranks
from specctl.drafters.losses.align import aim, shifted
from specctl.drafters.losses.head_losses import LossOptions, head_loss, joined
from specctl.drafters.nets.options import HeadOptions
from specctl.drafters.nets.rescore import NONE, Rescoring
from specctl.drafters.option_checks import Count, OneOf, Within
from specctl.drafters.states.template import as_paths

RESCORERS = ("none", "ngram", "neural")


@dataclass(frozen=True, slots=True)
class BlockwiseOptions(HeadOptions):
    """`num_heads` heads from one layer of `hidden` units per head (None: the target's width).
    `one_head`: each batch trains one head, drawn at random (section 6: less memory, the same mean).
    `tree`: rank paths to propose, None = the block. `rescore`: "none", "ngram" (counts) or "neural"
    (a small network), both of order `order`, learned from the training text; they choose among the
    `rescore_top` best tokens of a head with weight `rescore_weight`."""

    loss: str = "ce"
    hidden: int | None = None
    one_head: bool = False
    tree: tuple[tuple[int, ...], ...] | None = None
    rescore: Annotated[str, OneOf(RESCORERS)] = "none"
    rescore_top: Count = 8
    rescore_weight: float = 0.6
    order: Annotated[int, Within(2)] = 4
    rescore_width: Count = 64

    def __post_init__(self) -> None:
        HeadOptions.__post_init__(self)
        if self.tree is not None:
            paths = as_paths(self.tree, self.num_heads, MAX_RANK, "drafter.options.tree")
            object.__setattr__(self, "tree", paths)


class BlockwiseNet(nn.Module):
    """d -> ReLU(k h) -> k d; the second layer starts at zero, so that fresh heads are the base."""

    def __init__(self, options: BlockwiseOptions, spec: ModelSpec, rows: int) -> None:
        super().__init__()
        width, k = spec.hidden_size, options.num_heads
        inner = k * (options.hidden or width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, k * width)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)
        self.rescorer: NgramCounts | NgramNet | None = None
        if options.rescore == "ngram":
            self.rescorer = NgramCounts(options.order, spec.vocab_size)
        elif options.rescore == "neural":
            width = options.rescore_width
            self.rescorer = NgramNet(options.order, spec.vocab_size, rows, width)

    def forward(self, state_XD: Tensor) -> Tensor:
        """[X, Y]: all k states, side by side."""
        added_XPD = self.down(F.relu(self.up(state_XD))).unflatten(-1, (-1, state_XD.shape[-1]))
        return torch.flatten(added_XPD + state_XD[..., None, :], -2)


class Blockwise(ParallelHeads):
    """The carry holds all k states."""

    family = "blockwise"
    splits_rows = True
    one_call = True
    module: BlockwiseNet

    def __init__(
        self, options: BlockwiseOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        super().__init__(options, spec, vocab)
        # A rescorer learns from whole rows; one random head must be the same head everywhere.
        self.splits_rows = self.module.rescorer is None and not options.one_head
        self.tree = options.tree if options.tree is not None else first_ranks(options.num_heads)

    def make_net(self, rows: int) -> BlockwiseNet:
        return BlockwiseNet(self.options, self.spec, rows)

    def vocab_layers(self) -> list[nn.Linear]:
        return [self.module.rescorer.out] if isinstance(self.module.rescorer, NgramNet) else []

    def begin(self, state_XD: Tensor) -> Tensor:
        carry_XY: Tensor = self.module(state_XD)
        return carry_XY

    def ready(self, depth: int, carry_XY: Tensor) -> Tensor:
        return torch.chunk(carry_XY, self.options.num_heads, dim=-1)[depth]

    @property
    def rescoring(self) -> Rescoring | None:
        rescorer, options = self.module.rescorer, self.options
        if rescorer is None:
            return None
        return Rescoring(rescorer, options.rescore_top, options.rescore_weight, self.vocab)

    def heads_now(self) -> Collection[int]:
        if not self.options.one_head:
            return super().heads_now()
        return (int(torch.randint(self.options.num_heads, ())),)

    def loss(self, batch: TrainBatch) -> LossOut:
        """The heads' loss, and the rescorer's own, whose weights no head shares."""
        out, rescorer = super().loss(batch), self.module.rescorer
        learned = None if rescorer is None else rescorer.loss(batch, self.vocab)
        return out if learned is None else joined(out, learned)


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
        key_BS = torch.zeros_like(batch.ids_BS)
        inside_BS = batch.document_BS >= 0
        for n in range(self.order):
            key_BS = _mixed(key_BS, shifted(batch.ids_BS, n))
            inside_BS = inside_BS & (shifted(batch.document_BS, n, NONE) == batch.document_BS)
            slot_R = self._slot(key_BS[inside_BS])
            self.count_OT[n] += torch.bincount(slot_R, minlength=self.slots).int()
        return None

    def score(self, context_XW: Tensor, ids_XC: Tensor, rows_XC: Tensor) -> Tensor:
        zero_X1, count_OT = torch.zeros_like(ids_XC[..., :1]), self.count_OT.float()
        single_XC = count_OT[0][self._slot(_mixed(zero_X1, ids_XC))]
        r_XC = (single_XC + 1.0) / (count_OT[0].sum() + self.vocab_size)
        for n in range(1, self.order):
            key_X1, is_known_X1 = zero_X1, torch.ones_like(zero_X1, dtype=torch.bool)
            for token_X1 in torch.split(context_XW[..., self.reach - n :], 1, dim=-1):
                key_X1 = _mixed(key_X1, token_X1)
                is_known_X1 = is_known_X1 & (token_X1 != NONE)
            before_X1 = count_OT[n - 1][self._slot(key_X1)]
            seen_XC = count_OT[n][self._slot(_mixed(key_X1, ids_XC))].minimum(before_X1)
            is_seen_XC = is_known_X1 & (seen_XC > 0)
            r_XC = torch.where(is_seen_XC, seen_XC / before_X1.clamp(min=1.0), BACKOFF * r_XC)
        return r_XC.log()

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

    def state(self, context_XW: Tensor) -> Tensor:
        at_XW = torch.where(context_XW == NONE, self.emb.num_embeddings - 1, context_XW)
        return F.silu(self.hidden(self.emb(at_XW).flatten(-2)))

    def loss(self, batch: TrainBatch, vocab: VocabMap | None) -> LossOut:
        """Cross-entropy of the text, the next token from those before it in the document."""
        back = [_earlier(batch, n) for n in reversed(range(self.reach))]
        state_RO = self.state(torch.stack(back, dim=-1)).flatten(0, 1)
        out = head_loss(state_RO, self.out, aim(batch, 1), vocab, LossOptions("ce"))
        return LossOut(out.sum, out.count)

    def score(self, context_XW: Tensor, ids_XC: Tensor, rows_XC: Tensor) -> Tensor:
        logr_XK: Tensor = self.out(self.state(context_XW)).float().log_softmax(-1)
        return logr_XK.gather(-1, rows_XC)


def _earlier(batch: TrainBatch, count: int) -> Tensor:
    """[B, S]: the token `count` positions before, NONE where its document had not begun."""
    S = batch.ids_BS.shape[1]
    ids_BS, document_BS = (
        F.pad(rows_BS[:, : max(S - count, 0)], (min(count, S), 0), value=NONE)
        for rows_BS in (batch.ids_BS, batch.document_BS)
    )
    return torch.where(document_BS == batch.document_BS, ids_BS, NONE)


FAMILY = Family(
    name="blockwise",
    summary=(
        "One small layer makes several states of the target's last one, and the target's own LM "
        "head reads them all: a block of guesses in one pass. The smallest parallel heads there "
        "are, since no head has a vocabulary of its own. With rescoring a tiny model of text mends "
        "what heads that cannot see each other disagree about."
    ),
    paper="https://arxiv.org/abs/1811.03115",
    options=BlockwiseOptions,
    build=Blockwise,
    trainable=True,
    policies=(
        "direct",
        "chain",
        "dynamic-tree",
        "static-tree",
        "marginal-tree",
        "merged-beams",
    ),
)
