"""BlockNet: decoder layers whose rows are blocks of slots behind the features of a text.

The features enter in one of two ways. Injected (DFlash): in every layer, keys and values of the
features themselves stand before those of the block, and the features stay as they are. Otherwise
(P-EAGLE) they are rows like the others, one causal text, which the layers change.
Letters: A anchors, B rows, D hidden width, E head width, M new nodes (of all blocks), S sequence, T
fed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.kv_cache import SlotKV
from specctl.core.masks import document_mask
from specctl.core.spec import ModelSpec
from specctl.drafters.nets.blocks import Attending, DecoderLayer, Eagle3Attention, attend, rotary
from specctl.drafters.nets.prefix import PrefixNet


@dataclass(frozen=True, slots=True)
class Block:
    """Block rows of a packed batch, slot by slot: positions [B, M], and masks [B, 1, M, S] over
    the features and [B, 1, M, M] over each other."""

    position_BM: Tensor
    known_mask: Tensor
    own_mask: Tensor

    @classmethod
    def of(
        cls, batch: TrainBatch, anchor_BA: Tensor, counts: Sequence[int], is_causal: bool
    ) -> Block:
        """Slot k of the first counts[k] anchors each."""
        device = anchor_BA.device
        anchor_BM = torch.cat([anchor_BA[:, :count] for count in counts], dim=1)
        slot_M = torch.cat(
            [torch.full((count,), k, device=device) for k, count in enumerate(counts)]
        )
        position_BM = batch.position_BS.gather(1, anchor_BM) + 1 + slot_M
        rows_BM1 = anchor_BM[:, None, :, None]
        visible = document_mask(batch.document_BS)
        known_mask = visible.gather(2, rows_BM1.expand(-1, -1, -1, visible.shape[-1]))
        own_BMM = anchor_BM[:, :, None] == anchor_BM[:, None]
        if is_causal:
            own_BMM = own_BMM & (slot_M[:, None] >= slot_M)
        return cls(position_BM, known_mask, own_BMM[:, None])


class BlockNet(PrefixNet):
    """`is_injected` says how the features enter."""

    def __init__(
        self, spec: ModelSpec, num_layers: int, *, is_injected: bool, qk_norm: bool = False
    ) -> None:
        super().__init__(spec, num_layers)
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
            kv.update(index, *layer.self_attn.key_value(x_BTD, rope_BT2E))
        return x_BTD

    def spread(
        self, x_BSD: Tensor, z_BMD: Tensor, batch: TrainBatch, block: Block
    ) -> tuple[Tensor, Tensor]:
        """Features and block rows after all layers, while training: [B, S, D] and [B, M, D]."""
        S, M = x_BSD.shape[1], z_BMD.shape[1]
        mask = torch.cat([block.known_mask, block.own_mask], dim=-1)
        if self.is_injected:
            return x_BSD, self._injected(x_BSD, z_BMD, batch.position_BS, block.position_BM, mask)
        above = document_mask(batch.document_BS)
        above = torch.cat([above, above.new_zeros(*above.shape[:3], M)], dim=-1)
        position_BT = torch.cat([batch.position_BS, block.position_BM], dim=1)
        out_BTD: Tensor = self(
            torch.cat([x_BSD, z_BMD], dim=1), position_BT, torch.cat([above, mask], dim=2)
        )
        return out_BTD[:, :S], out_BTD[:, S:]

    def _injected(
        self, x_BSD: Tensor, z_BMD: Tensor, at_BS: Tensor, at_BM: Tensor, mask: Tensor
    ) -> Tensor:
        shape = self.shape
        known_BS2E = rotary(at_BS, shape.head_dim, shape.rope_theta)
        rope_BM2E = rotary(at_BM, shape.head_dim, shape.rope_theta)
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            known = layer.self_attn.key_value(x_BSD, known_BS2E)
            z_BMD = layer(z_BMD, rope_BM2E, _behind(*known, mask))
        return z_BMD


def _behind(known_key: Tensor, known_value: Tensor, mask: Tensor) -> Attending:
    """The block attends to keys and values of the features, then to its own."""

    def look(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = torch.cat([known_key, key], dim=2), torch.cat([known_value, value], dim=2)
        return attend(query, key, value, mask)

    return look
