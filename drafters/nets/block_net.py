"""BlockNet: decoder layers whose rows are blocks of slots behind the features of a text.

The features enter in one of two ways. Injected (DFlash): in every layer, keys and values of the
features themselves stand before those of the block, and the features stay as they are. Otherwise
(P-EAGLE) they are rows like the others, one causal text, which the layers change.
Letters: A anchors, B rows, D hidden width, E head width, J key/value heads, L positions, M new
nodes (of all blocks), S sequence, T fed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.kv_cache import SlotKV
from specctl.core.spec import ModelSpec
from specctl.drafters.attention.attention import attend_seen
from specctl.drafters.attention.recompute import run
from specctl.drafters.attention.seen import AttentionWindow, KeySet, Seen, SeenPart, seen_text
from specctl.drafters.nets.blocks import (
    Attending,
    DecoderLayer,
    Eagle3Attention,
    LayerShape,
    rotary,
)
from specctl.drafters.nets.prefix import PrefixNet


@dataclass(frozen=True, slots=True)
class Block:
    """Block rows of a packed batch, one block after the other in the order of their anchors:
    positions [B, M], what they see of the text (in `known`, runs that have no row in common) and of
    each other, and `order_BM`, which of the rows slot by slot each of them is."""

    position_BM: Tensor
    text: Seen | SeenPart
    known: tuple[Seen, ...]
    own: Seen
    order_BM: Tensor

    @classmethod
    def of(
        cls,
        batch: TrainBatch,
        anchor_BA: Tensor,
        counts: Sequence[int],
        is_causal: bool,
        window: AttentionWindow | None = None,
    ) -> Block:
        """Slot k of the first counts[k] anchors each; slots see features less than the window's
        size before them, and its first ones."""
        device = anchor_BA.device
        anchor_BM = torch.cat([anchor_BA[:, :count] for count in counts], dim=1)
        slot_M = torch.cat(
            [torch.full((count,), k, device=device) for k, count in enumerate(counts)]
        )
        order_BM = (anchor_BM * len(counts) + slot_M).argsort(dim=1)
        anchor_BM, slot_BM = anchor_BM.gather(1, order_BM), slot_M[order_BM]
        at_BM = torch.arange(len(slot_M), device=device).expand_as(order_BM)
        first_BM = torch.searchsorted(anchor_BM, anchor_BM)
        last_BM = at_BM if is_causal else torch.searchsorted(anchor_BM, anchor_BM, right=True) - 1
        position_BM = batch.position_BS.gather(1, anchor_BM) + 1 + slot_BM
        whole, own = Seen.text(batch.document_BS), Seen(first_BM, last_BM)
        text, every = whole if batch.part is None else seen_text(batch), whole.rows(anchor_BM)
        known: tuple[Seen, ...] = (every,)
        if window is not None and not window.holds(whole, len(counts)):
            # Slot k lies at anchor + 1 + k.
            known = window.runs(every.first_BT, every.last_BT, anchor_BM + 1 + slot_BM)
        return cls(position_BM, text, known, own, order_BM)

    def known_sets(self, key_BJLE: Tensor, value_BJLE: Tensor) -> list[KeySet]:
        """What the slots see of these keys and values of the text."""
        return [KeySet(key_BJLE, value_BJLE, each) for each in self.known]

    def ordered(self, slots_BMD: Tensor) -> Tensor:
        """[B, M, D]: rows that stand slot by slot, one block after the other."""
        return slots_BMD.gather(1, self.order_BM[:, :, None].expand_as(slots_BMD))

    def by_slot(self, blocks_BMD: Tensor) -> Tensor:
        """[B, M, D]: the reverse."""
        back_BM = self.order_BM.argsort(dim=1)
        return blocks_BMD.gather(1, back_BM[:, :, None].expand_as(blocks_BMD))


class BlockNet(PrefixNet):
    """`is_injected` says how the features enter."""

    def __init__(
        self,
        spec: ModelSpec,
        num_layers: int,
        *,
        is_injected: bool,
        qk_norm: bool = False,
        shape: LayerShape | None = None,
    ) -> None:
        super().__init__(spec, num_layers, shape)
        self.is_injected = is_injected
        if qk_norm:
            for layer in self.layers:
                layer.self_attn = Eagle3Attention(self.shape, spec.hidden_size, qk_norm=True)

    def take(self, x_BTD: Tensor, position_BT: Tensor, mask: Tensor, kv: SlotKV) -> Tensor:
        """Write features into the aimed cache; [B, T, D]: what the layers make of them."""
        if not self.is_injected:
            out_BTD: Tensor = self(x_BTD, position_BT, mask, kv)
            return out_BTD
        rope_BT2E = rotary(position_BT, self.shape.head_dim, self.shape.rope_theta)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            own_BTD = self.features_of(index, x_BTD)
            kv.update(index, *layer.self_attn.injected(own_BTD, rope_BT2E))
        return self.features_of(0, x_BTD)

    def features_of(self, index: int, x: Tensor) -> Tensor:
        """[..., D]: what layer `index` reads of injected features: its own, where those of all
        layers stand one after another."""
        width = self.shape.hidden_size
        return x if x.shape[-1] == width else x[..., index * width : (index + 1) * width]

    def spread(
        self, x_BSD: Tensor, z_BMD: Tensor, batch: TrainBatch, block: Block
    ) -> tuple[Tensor, Tensor]:
        """Features and block rows after all layers, while training: [B, S, D] and [B, M, D]."""
        S, z_BMD = x_BSD.shape[1], block.ordered(z_BMD)
        position_BS = batch.own(batch.position_BS)
        if self.is_injected:
            z_BMD = self._injected(x_BSD, z_BMD, position_BS, block)
            return x_BSD, block.by_slot(z_BMD)
        position_BT = torch.cat([position_BS, block.position_BM], dim=1)
        rope_BT2E = rotary(position_BT, self.shape.head_dim, self.shape.rope_theta)
        x_BTD = torch.cat([x_BSD, z_BMD], dim=1)
        out_BTD = self.through(x_BTD, rope_BT2E, lambda layer: _among(block, S))
        return out_BTD[:, :S], block.by_slot(out_BTD[:, S:])

    def _injected(self, x_BSD: Tensor, z_BMD: Tensor, position_BS: Tensor, block: Block) -> Tensor:
        shape = self.shape
        known_BS2E = rotary(position_BS, shape.head_dim, shape.rope_theta)
        rope_BM2E = rotary(block.position_BM, shape.head_dim, shape.rope_theta)

        def one(layer: DecoderLayer, x_BSD: Tensor, z_BMD: Tensor) -> Tensor:
            key, value = layer.self_attn.injected(x_BSD, known_BS2E)
            known = block.known_sets(block.text.gathered(key), block.text.gathered(value))
            out_BMD: Tensor = layer(z_BMD, rope_BM2E, _behind(known, block.own))
            return out_BMD

        again = self.is_large(z_BMD)
        for index, layer in enumerate(self.layers):
            z_BMD = run(again, one, layer, self.features_of(index, x_BSD), z_BMD)
        return z_BMD


def _behind(known: list[KeySet], own: Seen) -> Attending:
    """The block attends to keys and values of the features, and to its own."""

    def look(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_seen(query, [*known, KeySet(key, value, own)])

    return look


def _among(block: Block, num_known: int) -> Attending:
    """Rows of the text attend to each other, those of a block behind them to both."""

    def look(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        (true, drafted), (known_key, own_key), (known_value, own_value) = (
            torch.split(x, [num_known, x.shape[2] - num_known], dim=2) for x in (query, key, value)
        )
        pair = block.text.gathered(known_key), block.text.gathered(known_value)
        text = attend_seen(true, block.text.sets(*pair))
        sets = [*block.known_sets(*pair), KeySet(own_key, own_value, block.own)]
        return torch.cat([text, attend_seen(drafted, sets)], dim=1)

    return look
