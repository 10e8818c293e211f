"""Chimera (arXiv 2402.15758): trigrams below, the target's states of the whole text above.

A drafted token enters as a trigram: the embeddings of the two tokens before it and its own, through
a residual block of that width and a projection. One decoder layer then lets it attend to the states
of the target up to the newest known one, t, and to the drafted tokens before it, nothing else of
the text. The LM head reads cat(f_t, output), twice as wide, both halves started from the target's
rows. Loss: distributions at every depth, and the distillation of hidden states: the distance of the
first output to the target's next state, f_{t+1} (mean squared error). Training reads the text's
tokens where the paper feeds its own argmax, so that a token is scored as while drafting.
Letters: A anchors, B rows, D hidden width, I input width, K draft vocabulary, M new nodes, O output
width (2 D), P path, Q picked rows, R flat rows, S sequence, T fed tokens, W window, X any axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor, nn

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import DraftState, Family, Space
from specctl.core.kv_cache import KVShape, SlotKV
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.frames.block_drafter import BlockDrafter
from specctl.drafters.frames.head_drafter import HeadLearned
from specctl.drafters.losses.head_losses import joined
from specctl.drafters.losses.teacher import wide
from specctl.drafters.nets.block_net import BlockNet
from specctl.drafters.nets.blocks import DecoderLayer, LayerShape, RmsNorm, attending, rotary
from specctl.drafters.nets.heads import ResBlock
from specctl.drafters.nets.options import ADDED, HeadOptions
from specctl.drafters.option_checks import Count, Within
from specctl.drafters.states.path_state import REACH, Nodes, PathState


@dataclass(frozen=True, slots=True)
class ChimeraOptions(HeadOptions):
    """Trained `num_heads` tokens deep behind `anchors` positions of each row. `trigrams`: False
    shows the layer only a token's own embedding; `context`: False hides the target's states from
    it (two ablations). `hidden_weight`: of the distillation of hidden states beside 1 of the
    distributions (the sum of both is the paper's; what each weighs in it is our choice)."""

    decay: float = 0.8
    anchors: Count = 64
    trigrams: bool = True
    context: bool = True
    hidden_weight: Annotated[float, Within(0, 1_000)] = field(default=1.0, metadata=ADDED)


class ChimeraNet(nn.Module):
    """The trigram encoder, the layer, the wide LM head."""

    def __init__(self, spec: ModelSpec, rows: int) -> None:
        super().__init__()
        width = spec.hidden_size
        self.trigram = nn.Sequential(
            ResBlock(REACH * width), nn.Linear(REACH * width, width, bias=False)
        )
        self.feature_norm = RmsNorm(width, spec.norm_eps)
        self.net = BlockNet(spec, 1, is_injected=True)
        self.norm = RmsNorm(width, spec.norm_eps)
        self.lm_head = nn.Linear(2 * width, rows, bias=False)


class Chimera(BlockDrafter):
    """A block whose slots are the drafted tokens themselves."""

    family = "chimera"
    splits_rows = True
    module: ChimeraNet
    is_causal = True

    def __init__(
        self, options: ChimeraOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        self.own_taps = (spec.num_layers,)
        super().__init__(options, spec, vocab)

    def make_net(self, rows: int) -> ChimeraNet:
        return ChimeraNet(self.spec, rows)

    @property
    def shape(self) -> LayerShape:
        return self.net.shape

    @property
    def stores(self) -> tuple[KVShape, ...]:
        return (self.shape.kv,)

    @property
    def num_features(self) -> int:
        return self.spec.hidden_size

    def own_heads(self) -> list[nn.Linear]:
        return [self.module.lm_head]

    def start_heads(self, rows_KD: Tensor) -> None:
        self.module.lm_head.weight.copy_(torch.cat([rows_KD, rows_KD], dim=1))

    def encode(self, path_X3: Tensor) -> Tensor:
        """[X, D]: three tokens in a row, the newest last."""
        three_X3D = self.embed(path_X3)
        if not self.options.trigrams:
            three_X3D = torch.cat(
                [torch.zeros_like(three_X3D[..., :-1, :]), three_X3D[..., -1:, :]], dim=-2
            )
        encoded_XD: Tensor = self.module.trigram(three_X3D.flatten(-2))
        return encoded_XD

    def read_of(self, feature_XD: Tensor) -> Tensor:
        """[X, D]: what the layer attends to of the target's states."""
        normed_XD: Tensor = self.module.feature_norm(feature_XD)
        return normed_XD if self.options.context else torch.zeros_like(normed_XD)

    def rows(self, state_BTD: Tensor, next_ids_BT: Tensor) -> Tensor:
        return self.read_of(state_BTD)

    # -- training -------------------------------------------------------------------------------

    def slot(self, index: int, token_X: Tensor) -> Tensor:
        raise AssertionError("a slot is a path of tokens: see slot_of and grown")

    def slot_of(self, index: int, batch: TrainBatch, anchor_BA: Tensor) -> Tensor:
        at_BA = (anchor_BA + 1 + index).clamp(max=batch.ids_BS.shape[1] - 1)
        depth_BA = batch.position_BS.gather(1, at_BA)
        path = [batch.ids_BS.gather(1, at_BA - depth_BA.clamp(max=k)) for k in (2, 1, 0)]
        return self.encode(torch.stack(path, dim=-1))

    def unroll(self, batch: TrainBatch, anchor_BA: Tensor | None = None) -> Iterator[Tensor]:
        feature_BSD = self.gathered(batch.own_taps())
        for out_BSD in super().unroll(batch, anchor_BA):
            yield torch.cat([feature_BSD, out_BSD.to(feature_BSD)], dim=-1)

    def beside(self, out: LossOut, learned: HeadLearned, batch: TrainBatch) -> LossOut:
        """The first output is pulled towards the state that the target has there."""
        if learned.index > 0 or self.options.hidden_weight == 0:
            return out
        state_RD, rows = batch.taps[self.spec.num_layers].flatten(0, 1), learned.rows
        said_QD = wide(learned.ready_RO[rows.row_Q, self.spec.hidden_size :])
        off_QD = said_QD - wide(state_RD.detach()[rows.teacher_row_Q])
        count = torch.full((), float(rows.row_Q.numel()), device=off_QD.device)
        loss = off_QD.square().mean(-1).sum()
        term = LossOut(loss, count, {"hidden": (loss.detach(), count)})
        return joined(out, term, self.options.hidden_weight)

    # -- serving --------------------------------------------------------------------------------

    def open(self, space: Space) -> DraftState:
        return PathState(self, space)

    def rope(self, position: Tensor) -> Tensor:
        return rotary(position, self.shape.head_dim, self.shape.rope_theta)

    @property
    def layer(self) -> DecoderLayer:
        layer = self.net.layers[0]
        assert isinstance(layer, DecoderLayer)
        return layer

    def gathered(self, taps: Mapping[int, Tensor]) -> Tensor:
        return taps[self.spec.num_layers].to(self.dtype)

    def stored(
        self, ids_BW: Tensor, features_BWI: Tensor, position_BW: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the target's states."""
        seen_BWD = self.read_of(features_BWI)
        return [self.layer.self_attn.key_value(seen_BWD, self.rope(position_BW))]

    def grown(self, nodes: Nodes, kv: SlotKV) -> Tensor:
        """[B, M, 2 D]: what the LM head reads behind nodes."""
        rope = self.rope(nodes.place.position_BM)
        x_BMD = self.layer(self.encode(nodes.path_BMP), rope, attending(nodes.place.mask, kv, 0))
        newest_BMD = nodes.newest_BI[:, None].expand_as(x_BMD)
        return torch.cat([newest_BMD, self.norm(x_BMD)], dim=-1)


FAMILY = Family(
    name="chimera",
    summary=(
        "Each drafted token enters with the two before it, and one layer lets it look at the "
        "target's states of the whole text; the LM head reads the newest of those states beside "
        "the result. What is near is cheap and what is far comes from the target, so a draft costs "
        "one small layer per token and needs nothing of its own fed back."
    ),
    paper="https://arxiv.org/abs/2402.15758",
    options=ChimeraOptions,
    build=Chimera,
    trainable=True,
    policies=("static-tree", "chain", "dynamic-tree"),
)
