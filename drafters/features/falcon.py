"""Falcon (arXiv 2412.12639): several tokens per pass of the drafter, from a recurrence and a layer.

Semi-autoregressive drafting: the last k rows of the text, (token t + 1, f_t) each, are a block that
looks at everything up to its end; its j-th row predicts the feature k rows ahead and so, through
the target's LM head, the token j + 1 behind the newest. The next block reads the k drafted tokens
and features: a tree k levels deep per pass. In place of EAGLE's fc stands an LSTM over the text.
Loss: EAGLE's (SmoothL1 on features, KL at the given temperature) in the light of coupled sequential
glancing (`Glance`): rows at the beginning of some blocks read the token and the feature that they
are to predict, so that the rows behind learn what follows from it; what was shown is not scored.
Our own choices: the fc stays beside the LSTM, so that fresh rows are features; every grouping into
blocks is trained at once, where the paper fixes one; the paper's draws from the target's
distribution, whose mean is the KL, are left out; wrong is what differs from the text.

A drafter that predicts several tokens at once guesses each without the others. Glancing (GLAT,
arXiv 2008.07905, sec. 3.1) teaches it how they hang together: the first pass, without gradient,
counts the wrong tokens; the second one finds the truth in the place of some inputs, `share` times
as many as were wrong, and learns the rest. The share falls while training goes on, and so does the
count. Coupled sequential glancing (Falcon, arXiv 2412.12639) shows tokens and features together,
always from the beginning of a block on.

`StrideState` serves it. The last `stride` rows of a text, true or drafted, are a block: they look
at everything up to its end and predict the next `stride` tokens, each row one. A node at a depth
that is a multiple of the stride ends a block; only there the layer runs. Nodes between take what
their block predicted, whichever tokens were taken from it. As the layer is the only one, keys and
values of a row follow from the row alone, so every node leaves its own once, whatever block it ends
up in.
Letters: B rows, D hidden width, E head width, K draft vocabulary, L positions, M new nodes, O
output width (stride x D), R flat rows, S sequence, T fed tokens, W window (the stride), X any axes,
Y carry, Z slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Family, Outcome, Space
from specctl.drafters.attention.recompute import is_large, run
from specctl.drafters.attention.seen import Seen
from specctl.drafters.frames.feature_drafter import FeatureDrafter, Unrolled
from specctl.drafters.frames.strided_options import StridedOptions
from specctl.drafters.losses.align import ahead_mask, shifted
from specctl.drafters.nets.blocks import LayerShape
from specctl.drafters.nets.options import ADDED
from specctl.drafters.nets.routed import read_head
from specctl.drafters.nets.stride_net import StrideNet, pick
from specctl.drafters.option_checks import Count, Within
from specctl.drafters.states.feature_state import FeatureState
from specctl.drafters.states.tree_layout import Fed, Place

AT_ONCE = 256  # rows of logits alive while the first pass is judged


@dataclass(frozen=True, slots=True)
class FalconOptions(StridedOptions):
    """`stride` tokens per pass, an LSTM of `lstm_layers`, between which `dropout` of
    what is handed on is dropped while training. `glance` times as many blocks as tokens
    were wrong are shown a part of the answer, falling to `glance_last` at the end (0: none)."""

    temperature: float = 0.95
    stride: Annotated[int, Within(2)] = 2
    lstm_layers: Count = 2
    glance: float = 0.45
    glance_last: float = 0.1
    dropout: Annotated[float, Within(0, 0.99)] = field(default=0.1, metadata=ADDED)


class Falcon(FeatureDrafter):
    """The passes over a batch; the frame does the rest."""

    family = "falcon"
    module: StrideNet
    options: FalconOptions

    def make_net(self, shape: LayerShape) -> StrideNet:
        options = self.options
        return StrideNet(shape, options.stride, options.lstm_layers, options.dropout)

    def open(self, space: Space) -> StrideState:
        return StrideState(self, space)

    def unroll(self, batch: TrainBatch) -> list[Unrolled]:
        """At the end of every block, by row of the block. Without gradients nothing is shown: the
        loss is then that of what drafting sees."""
        state_BSD, glance = self.noisy(batch), None
        if self.options.glance > 0 and torch.is_grad_enabled():
            with torch.no_grad():
                glance = self._glance(batch, state_BSD)
        return self._pass(batch, state_BSD, glance)

    def _glance(self, batch: TrainBatch, state_BSD: Tensor) -> Glance:
        options = self.options
        share = options.glance_last + (options.glance - options.glance_last) * (1 - batch.progress)
        is_end_BS = ahead_mask(batch, 1 + options.stride)
        is_end_BS &= batch.position_BS >= options.stride - 1
        wrong_BS = torch.zeros_like(batch.ids_BS)
        for step, unrolled in enumerate(self._pass(batch, state_BSD, None)):
            row_BS = first_choice(unrolled.ready_BSD, self.head_weight(), is_end_BS)
            said_BS = row_BS if self.vocab is None else self.vocab.ids_K[row_BS]
            wrong_BS += said_BS != shifted(batch.ids_BS, 2 + step)
        return choose(wrong_BS, is_end_BS, options.stride, share)

    def _pass(self, batch: TrainBatch, state_BSD: Tensor, glance: Glance | None) -> list[Unrolled]:
        net, position_BS, stride = self.module, batch.position_BS, self.options.stride
        phase_BS = position_BS % stride
        next_BS = shifted(batch.ids_BS, 1)
        versions = [(next_BS, state_BSD)]
        if glance is not None:  # a grouping into blocks each, with answers in its own blocks only
            shown = [glance.rows(phase_BS == phase) for phase in range(stride)]
            later_BS, later_BSD = shifted(next_BS, stride), ahead(state_BSD, stride)
            versions = [
                (
                    torch.where(here_BS, later_BS, next_BS),
                    torch.where(here_BS[:, :, None], later_BSD, state_BSD),
                )
                for here_BS in shown
            ]
        ids, states = (torch.cat(parts) for parts in zip(*versions, strict=True))
        document = batch.document_BS.repeat(len(versions), 1)
        rows = net.over(self.embed(ids), states, document).chunk(len(versions))
        rope = net.rope(position_BS)
        seen = [net.key_value(x_BSD, rope) for x_BSD in rows]
        mask, steps = Seen.text(batch.document_BS), []
        flat = [part for pair in seen for part in pair]
        width, inner = net.shape.hidden_size, net.shape.intermediate_size
        again = is_large(batch.ids_BS.numel(), stride, width, inner)

        def look(x_BSD: Tensor, at: Tensor, *parts: Tensor) -> Tensor:
            pairs = list(zip(parts[::2], parts[1::2], strict=True))
            return net.look(x_BSD, at, pairs, mask, phase_BS)

        for index in range(stride):
            back = stride - 1 - index
            x_BSD = pick([behind(x_BSD, position_BS, back) for x_BSD in rows], phase_BS)
            at = net.rope((position_BS - back).clamp(min=0))
            out_BSD = run(again, look, x_BSD, at, *flat)
            known_BS = None if glance is None else glance.shows(index)
            steps.append(Unrolled(out_BSD, out_BSD, known_BS))
        return steps


def first_choice(ready_BSD: Tensor, head_KD: Tensor, wanted_BS: Tensor) -> Tensor:
    """[B, S]: the draft row of largest logit where it is wanted, a few rows at a time; else 0."""
    best_BS = torch.zeros_like(wanted_BS, dtype=torch.long)
    parts = [(x_RD @ head_KD.t()).argmax(-1) for x_RD in torch.split(ready_BSD[wanted_BS], AT_ONCE)]
    best_BS[wanted_BS] = torch.cat(parts)
    return best_BS


@dataclass(frozen=True, slots=True)
class Glance:
    """At the last row of each block: how many of its rows are shown what they are to predict."""

    shown_BS: Tensor
    stride: int

    def shows(self, index: int) -> Tensor:
        """Bool [B, S], at the last rows of blocks: row `index` of the block is shown."""
        return self.shown_BS > index

    def rows(self, is_end_BS: Tensor) -> Tensor:
        """Bool [B, S]: the rows to be replaced in the blocks that end there."""
        shown_BS = torch.zeros_like(is_end_BS)
        for index in range(self.stride - 1):
            here_BS = (self.shows(index) & is_end_BS).long()
            shown_BS |= shifted(here_BS, self.stride - 1 - index) > 0
        return shown_BS


def choose(wrong_BS: Tensor, is_end_BS: Tensor, stride: int, share: float) -> Glance:
    """Random blocks, `share` times as many as there are wrong tokens (counted at the last rows of
    blocks); of each, one to all rows but the last are shown."""
    num_B1 = (share * (wrong_BS * is_end_BS).sum(1, keepdim=True)).long()
    chance_BS = torch.rand(is_end_BS.shape, device=is_end_BS.device) + is_end_BS
    place_BS = chance_BS.argsort(1, descending=True).argsort(1)
    length_BS = torch.randint(1, stride, is_end_BS.shape, device=is_end_BS.device)
    return Glance(length_BS * (is_end_BS & (place_BS < num_B1)), stride)


def ahead(state_BSD: Tensor, steps: int) -> Tensor:
    """[B, S, D]: entry t holds the state at t + steps, zero where the row has ended."""
    return F.pad(state_BSD[:, steps:], (0, 0, 0, min(steps, state_BSD.shape[1])))


def behind(state_BSD: Tensor, position_BS: Tensor, steps: int) -> Tensor:
    """[B, S, D]: entry t holds the state at t - steps, zero before its document began."""
    if steps == 0:
        return state_BSD
    back_BSD = F.pad(state_BSD, (0, 0, steps, 0))[:, : state_BSD.shape[1]]
    return back_BSD * (position_BS >= steps)[:, :, None]


class StrideState(FeatureState):
    """Memory of one engine: per slot the recurrence behind the newest true row and the last
    `stride` rows; of the nodes of a round the same, what their block predicts, and their depth."""

    def __init__(self, drafter: Falcon, space: Space) -> None:
        self.drafter, self.net = drafter, drafter.module
        net, like = self.net, self.net.fc.weight
        width = net.shape.hidden_size
        self.memory_ZY = like.new_zeros(space.num_slots, net.memory_width)
        self.tail_ZO = like.new_zeros(space.num_slots, net.stride * width)
        self._memories: list[Tensor] = []
        self._tails: list[Tensor] = []
        self._blocks: list[Tensor] = []
        self._depths: list[Tensor] = []
        super().__init__(drafter, net.shape, 1, space)

    def fuse_weights(self) -> None:
        self._head = self.drafter.served_head()

    def features(self, taps: Mapping[int, Tensor]) -> Tensor:
        return taps[self.drafter.tap].to(self.dtype)

    # -- true rows ------------------------------------------------------------------------------

    def forget(self, slot: int) -> None:
        super().forget(slot)
        self._clear(slot)

    def observe(self, outcome: Outcome) -> None:
        unread = [slot for slot in outcome.view.slots if self.num_rows[slot] == 0]
        super().observe(outcome)
        for slot in unread:  # a row without features is no part of the text
            self._clear(slot)

    def _clear(self, slot: int) -> None:
        self.memory_ZY[slot] = 0.0
        self.tail_ZO[slot] = 0.0

    @torch.no_grad()
    def fill(self, fed: Fed) -> None:
        slot_B = self.kv.aim.slot_B1[:, 0]
        embedding_BTD = self.drafter.embed(fed.ids_BT)
        x_BTD, memory_BY = self.net.onward(
            embedding_BTD, fed.state_BTD, self.memory_ZY[slot_B], fed.counts
        )
        self._write(x_BTD, fed.rope_BT2E)
        D = x_BTD.shape[-1]
        rows_BXD = torch.cat([self.tail_ZO[slot_B].view(len(slot_B), -1, D), x_BTD], dim=1)
        at_W = torch.arange(self.net.stride, device=x_BTD.device)
        at_BW = torch.tensor(fed.counts, device=x_BTD.device)[:, None] + at_W
        tail_BWD = rows_BXD.gather(1, at_BW[:, :, None].expand(-1, -1, D))
        self.memory_ZY[slot_B], self.tail_ZO[slot_B] = memory_BY, tail_BWD.flatten(1)

    @torch.no_grad()
    def newest(self, fed: Fed, kept_B: Tensor) -> Tensor:
        self.fill(fed)
        slot_B = self.kv.aim.slot_B1[:, 0]
        tail_B1O = self.tail_ZO[slot_B][:, None]
        mask = None
        if min(fed.counts) < max(fed.counts) or int(kept_B.min()) < int(kept_B.max()):
            at_L = torch.arange(self.kv.aim.span, device=kept_B.device)
            mask = (at_L < kept_B[:, None])[:, None, None]
        self._memories, self._tails = [self.memory_ZY[slot_B][:, None]], [tail_B1O]
        self._depths = [torch.zeros_like(kept_B[:, None])]
        self._blocks = [self._block(tail_B1O, kept_B[:, None] - 1, mask)]
        return self._head_logits(self._blocks[0], self._depths[0])

    # -- nodes ----------------------------------------------------------------------------------

    @torch.no_grad()
    def nodes(self, token_BM: Tensor, parent_BM: Tensor, place: Place) -> Tensor:
        memory_BMY, tail_BMO, block_BMO = (
            self.of_parents(stored, parent_BM, place)
            for stored in (self._memories, self._tails, self._blocks)
        )
        depth_BM = torch.cat(self._depths, dim=1).gather(1, parent_BM + 1) + 1
        embedding_BMD = self.drafter.embed(token_BM)
        state_BMD = self._taken(block_BMO, depth_BM - 1)
        B, M, D = state_BMD.shape
        x_R1D, memory_RY = self.net.onward(
            embedding_BMD.view(B * M, 1, D),
            state_BMD.view(B * M, 1, D),
            memory_BMY.flatten(0, 1),
            (1,) * (B * M),
        )
        x_BMD = x_R1D.view(B, M, D)
        self._write(x_BMD, self._rope_L2E[place.position_BM])
        tail_BMO = torch.cat([tail_BMO[..., D:], x_BMD], dim=-1)
        is_end_BM1 = (depth_BM % self.net.stride == 0)[:, :, None]
        if bool(is_end_BM1.any()):
            new_BMO = self._block(tail_BMO, place.position_BM, place.mask)
            block_BMO = torch.where(is_end_BM1, new_BMO, block_BMO)
        self._memories.append(memory_RY.view(B, M, -1))
        self._tails.append(tail_BMO)
        self._blocks.append(block_BMO)
        self._depths.append(depth_BM)
        return self._head_logits(block_BMO, depth_BM)

    def _write(self, x_BTD: Tensor, rope_BT2E: Tensor) -> None:
        self.kv.update(0, *self.net.key_value(x_BTD, rope_BT2E))

    def _block(self, tail_BMO: Tensor, position_BM: Tensor, mask: Tensor | None) -> Tensor:
        """[B, M, O]: what blocks that end there predict, one state per row."""
        B, M, _ = tail_BMO.shape
        W, D = self.net.stride, self.shape.hidden_size
        back_W = torch.arange(1 - W, 1, device=position_BM.device)
        position_BR = (position_BM[:, :, None] + back_W).clamp(min=0).view(B, M * W)
        if mask is not None:
            mask = mask.repeat_interleave(W, dim=2)
        x_BRD = tail_BMO.view(B, M * W, D)
        rope_BR2E = self._rope_L2E[position_BR]
        return self.net.look(x_BRD, rope_BR2E, [self.kv.read(0)], mask).view(B, M, W * D)

    def _taken(self, block_BMO: Tensor, depth_BM: Tensor) -> Tensor:
        """[B, M, D]: the state of that depth in each block."""
        block_BMWD = block_BMO.view(*depth_BM.shape, self.net.stride, -1)
        at_BM11 = (depth_BM % self.net.stride)[:, :, None, None]
        return block_BMWD.gather(2, at_BM11.expand(-1, -1, 1, block_BMWD.shape[-1]))[:, :, 0]

    def _head_logits(self, block_BMO: Tensor, depth_BM: Tensor) -> Tensor:
        self._states.append(self._taken(block_BMO, depth_BM))
        return read_head(self._states[-1], self._head)


FAMILY = Family(
    name="falcon",
    summary=(
        "Predicts several tokens per pass of a recurrence and one decoder layer, each guessed "
        "without the others of its block, and goes on from all of them together: half the passes "
        "of EAGLE for drafts of the same depth. Glancing in training teaches the later tokens of "
        "a block what follows from the earlier ones. Take it where passes of the drafter are "
        "dear."
    ),
    paper="https://arxiv.org/abs/2412.12639",
    options=FalconOptions,
    build=Falcon,
    trainable=True,
    policies=("dynamic-tree", "chain", "static-tree"),
)
