"""DFlash2 (z-lab's successor of arXiv 2602.06036): slots that see each other's states, and a
selector that sees the token before.

Two additions to DFlash, both of which begin as nothing. Around attention and MLP of every layer a
convolution mixes each slot with those just before it (`nets/slot_conv.py`). And of the C likeliest
tokens of slot k, a selector scores b behind a, the token drafted before it, by

    S_k(a -> b) = U_k(b) + <A[a] * W h_k, B[b]>

with A and B one row of r numbers per token. Drafts are drawn from softmax(S / T) over these C
tokens; any other is left to the verification. Slots are filled in as DFlash's: slot 0 is the root.
The loss is DFlash's on U plus cross-entropy of S on the text, behind the true token before; there a
true token that is none of the C takes the last one's place.
Letters: B rows, C candidates, D hidden width, K draft vocabulary, M new nodes, O output width (the
rank), P path, Q picked rows, R flat rows, S sequence, X any axes, Y carry.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor, nn

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import Family
from specctl.core.spec import ModelSpec
from specctl.drafters.attention.recompute import run
from specctl.drafters.blocks.corrected_blocks import CorrectedBlocks
from specctl.drafters.blocks.dflash import STD, DFlashOptions, InjectedNet
from specctl.drafters.corrections.correction import Correction, FilledBlock, at_depth
from specctl.drafters.corrections.selector import (
    BestTokens,
    choice_loss,
    choice_metrics,
    forced_in,
    spread,
)
from specctl.drafters.corrections.slot_conv import convolve
from specctl.drafters.frames.head_drafter import HeadLearned
from specctl.drafters.losses.align import shifted
from specctl.drafters.losses.head_losses import fitting_chunk, joined
from specctl.drafters.option_checks import Count, CountOrZero, Within

MOST_ROWS = 2**24  # numbers of gathered LM-head rows that a loss keeps; more are gathered again


@dataclass(frozen=True, slots=True)
class DFlash2Options(DFlashOptions):
    """DFlash's options. `conv_taps` slots are mixed (0: no convolution), with one set of weights
    for `conv_group` channels; `candidates` tokens of each slot are chosen from by a selector of
    `rank` (0: no selector). `base_weight` and `choice_weight` weigh the block's own loss and the
    selector's."""

    conv_taps: CountOrZero = 2
    conv_group: Count = 16
    candidates: CountOrZero = 16
    rank: Count = 64
    base_weight: Annotated[float, Within(0, 100)] = 1.0
    choice_weight: Annotated[float, Within(0, 100)] = 1.0


class TokenSelector(nn.Module):
    """A (`predecessor`), B (`successor`, a row per id of the draft vocabulary) and W (`hidden`)."""

    def __init__(self, spec: ModelSpec, rank: int, rows: int) -> None:
        super().__init__()
        self.predecessor = nn.Embedding(spec.vocab_size, rank)
        self.successor = nn.Linear(rank, rows, bias=False)
        self.hidden = nn.Linear(spec.hidden_size, rank, bias=False)
        nn.init.normal_(self.predecessor.weight, std=STD)
        nn.init.normal_(self.successor.weight, std=STD)
        nn.init.zeros_(self.hidden.weight)

    def scores(
        self, base_XMC: Tensor, rows_XMC: Tensor, before_XMO: Tensor, hidden_XMO: Tensor
    ) -> Tensor:
        """[X, M, C]: S of the candidates, of U there, of A and of W h."""
        factor_XMO = before_XMO * hidden_XMO
        own_XMC = (self.successor.weight[rows_XMC] @ factor_XMO[..., None])[..., 0]
        return base_XMC + own_XMC.to(base_XMC)


class Flash2Net(InjectedNet):
    """DFlash's module with the convolutions and the selector."""

    def __init__(self, spec: ModelSpec, num_taps: int, options: DFlash2Options, rows: int) -> None:
        super().__init__(spec, num_taps, options)
        num_slots = options.num_heads + DFlash2.first_slot
        convolve(self.net, options.conv_taps, options.conv_group, num_slots)
        if options.candidates:
            self.selector = TokenSelector(spec, options.rank, rows)


@dataclass(frozen=True, slots=True)
class Choices:
    """Of every slot the candidates and W h."""

    slots: BestTokens
    hidden_XPO: Tensor
    num_rows: int


class TokenSelection(Correction):
    """The carry is A of the newest token."""

    first_order = True

    def __init__(self, net: TokenSelector, count: int) -> None:
        self.net, self.count = net, count

    def start(self, block: FilledBlock) -> tuple[Choices, Tensor]:
        hidden_XPO: Tensor = self.net.hidden(block.states_XPD)
        slots = BestTokens.of(block.base, self.count)
        return Choices(slots, hidden_XPO, block.base.shape[-1]), hidden_XPO[:, :1] * 0

    def read(self, shared: Choices, depth_XM: Tensor, carry_XMY: Tensor, ids_XM: Tensor) -> Tensor:
        before_XMO: Tensor = self.net.predecessor(ids_XM)
        return before_XMO.to(carry_XMY)

    def scores(self, shared: Choices, depth_XM: Tensor, carry_XMY: Tensor) -> Tensor:
        rows_XMC = at_depth(shared.slots.rows, depth_XM)
        base_XMC = at_depth(shared.slots.values, depth_XM)
        hidden_XMO = at_depth(shared.hidden_XPO, depth_XM)
        chosen_XMC = self.net.scores(base_XMC, rows_XMC, carry_XMY, hidden_XMO)
        return spread(chosen_XMC, rows_XMC, shared.num_rows)


class Uncorrected(Correction):
    """U itself: a DFlash2 whose selector is off."""

    first_order = True

    def start(self, block: FilledBlock) -> tuple[FilledBlock, Tensor]:
        return block, block.states_XPD[:, :1, :0]

    def read(
        self, shared: FilledBlock, depth_XM: Tensor, carry_XMY: Tensor, ids_XM: Tensor
    ) -> Tensor:
        return carry_XMY

    def scores(self, shared: FilledBlock, depth_XM: Tensor, carry_XMY: Tensor) -> Tensor:
        return at_depth(shared.base, depth_XM)


class DFlash2(CorrectedBlocks):
    """Slot 0 is the root, as DFlash's."""

    family = "dflash2"
    module: Flash2Net
    first_slot = 1

    def make_net(self, rows: int) -> Flash2Net:
        return Flash2Net(self.spec, len(self.own_taps), self.options, rows)

    def vocab_layers(self) -> list[nn.Linear]:
        return [self.module.selector.successor] if self.options.candidates else []

    @property
    def correction(self) -> Correction:
        if not self.options.candidates:
            return Uncorrected()
        return TokenSelection(self.module.selector, self.options.candidates)

    def beside(self, out: LossOut, learned: HeadLearned, batch: TrainBatch) -> LossOut:
        """With the selector's loss, over the rows whose token the draft vocabulary has."""
        if not self.options.candidates:
            return out
        rows = learned.rows
        label_Q = rows.label_Q if self.vocab is None else self.vocab.to_draft()[rows.label_Q]
        read_BS = batch.own(shifted(batch.ids_BS, 1 + learned.index))
        state_QD, before_Q = learned.ready_RO[rows.row_Q], read_BS.flatten()[rows.row_Q]
        loss_Q, scores_QC, rows_QC = self._choices(state_QD, before_Q, label_Q.clamp(min=0))
        weight_Q = (label_Q >= 0).to(loss_Q)
        weight_Q = weight_Q if rows.weight_Q is None else weight_Q * rows.weight_Q
        number, choice = weight_Q.sum(), (loss_Q * weight_Q).sum()
        given = learned, self.vocab, self.options.temperature
        figures = choice_metrics(scores_QC, rows_QC, *given)
        term = LossOut(choice, number, {"choice": (choice.detach(), number), **figures})
        out = replace(out, sum=self.options.base_weight * out.sum)
        return joined(out, term, self.options.choice_weight)

    def _choices(
        self, state_QD: Tensor, before_Q: Tensor, label_Q: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[Q]: cross-entropy over the candidates with the true token among them, slice by slice;
        [Q, C]: scores and draft rows of those that would be drafted."""
        weight_KD, selector = self.base_head(), self.module.selector
        count = min(self.options.candidates, len(weight_KD))

        def one(state_QD: Tensor, before_Q: Tensor, label_Q: Tensor) -> tuple[Tensor, ...]:
            with torch.no_grad():
                logits_QK = state_QD @ weight_KD.T.to(state_QD)
                best_QC = logits_QK.topk(count, dim=-1).indices
                rows_QC = forced_in(best_QC, label_Q)
            made = selector.predecessor(before_Q), selector.hidden(state_QD)

            def scored(rows_QC: Tensor) -> Tensor:
                base_QC = (weight_KD[rows_QC].to(state_QD) @ state_QD[..., None])[..., 0]
                return selector.scores(base_QC, rows_QC, *made)

            scores_QC = scored(rows_QC)
            with torch.no_grad():  # the last alone may be another
                own_QC = torch.cat([scores_QC[:, :-1], scored(best_QC[:, -1:])], dim=-1)
            return choice_loss(scores_QC, rows_QC, label_Q), own_QC, best_QC

        size = self.options.chunk or fitting_chunk(len(weight_KD), state_QD.device)
        again = len(state_QD) * count * state_QD.shape[-1] > MOST_ROWS
        given = zip(*(torch.split(x, size) for x in (state_QD, before_Q, label_Q)), strict=True)
        made = [run(again, one, *each) for each in given]
        loss_Q, scores_QC, rows_QC = (torch.cat(each) for each in zip(*made, strict=True))
        return loss_Q, scores_QC, rows_QC


FAMILY = Family(
    name="dflash2",
    summary=(
        "DFlash's block of masked places with a convolution over the places inside its layers, and "
        "a selector that chooses among the likeliest tokens of each place in the light of the one "
        "before. Costs one pass of the layers, and a product of a few rows per token."
    ),
    paper="https://huggingface.co/z-lab/Qwen3.8-27B-DFlash2",
    options=DFlash2Options,
    build=DFlash2,
    trainable=True,
    policies=("chain", "dynamic-tree", "static-tree"),
)
