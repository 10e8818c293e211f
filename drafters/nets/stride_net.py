"""StrideNet: the module of a semi-autoregressive drafter, a recurrence and one decoder layer.

A row is x_t = fc(cat(e_{t+1}, f_t)) + LSTM(cat(e_{t+1}, f_t)). The layer's queries come in blocks
of `stride` rows that all see up to the block's end (a causal mask relaxed inside blocks); row r of
one predicts the feature at r + stride. Letters: B rows, T tokens, D width, M memory, E head width,
P phases.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specctl.drafters.nets.blocks import DecoderLayer, LayerShape, attend
from specctl.drafters.nets.lstm import TextLstm
from specctl.drafters.nets.trunk import TrunkNet


class StrideNet(TrunkNet):
    """EAGLE's `fc` and `layers` (one), and the LSTM."""

    def __init__(self, shape: LayerShape, stride: int, lstm_layers: int) -> None:
        super().__init__(shape)
        width = shape.hidden_size
        self.stride = stride
        self.lstm = TextLstm(2 * width, width, lstm_layers)

    @property
    def memory_width(self) -> int:
        return self.lstm.memory_width

    def over(self, embedding_BSD: Tensor, state_BSD: Tensor, document_BS: Tensor) -> Tensor:
        """[B, S, D]: the rows of a packed batch."""
        both_BSI = torch.cat([embedding_BSD, state_BSD], dim=-1)
        out_BSD: Tensor = self.fc(both_BSI) + self.lstm.over(both_BSI, document_BS)
        return out_BSD

    def onward(
        self, embedding_BTD: Tensor, state_BTD: Tensor, memory_BM: Tensor, counts: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """[B, T, D]: further rows, and the memory behind the first `counts` of them."""
        both_BTI = torch.cat([embedding_BTD, state_BTD], dim=-1)
        out_BTD, memory_BM = self.lstm.onward(both_BTI, memory_BM, counts)
        return self.fc(both_BTI) + out_BTD, memory_BM

    @property
    def _layer(self) -> DecoderLayer:
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        return layer

    def key_value(self, x_BTD: Tensor, turn_BT2E: Tensor) -> tuple[Tensor, Tensor]:
        layer = self._layer
        pair: tuple[Tensor, Tensor] = layer.self_attn.key_value(
            layer.input_layernorm(x_BTD), turn_BT2E
        )
        return pair

    def look(
        self,
        x_BTD: Tensor,
        turn_BT2E: Tensor,
        seen: Sequence[tuple[Tensor, Tensor]],
        mask: Tensor | None,
        phase_BT: Tensor | None = None,
    ) -> Tensor:
        """[B, T, D]: rows through the layer, against keys and values of their phase."""
        layer = self._layer
        query = layer.self_attn.query(layer.input_layernorm(x_BTD), turn_BT2E)
        attended = pick([attend(query, *pair, mask) for pair in seen], phase_BT)
        out_BTD: Tensor = layer.finish(x_BTD + layer.self_attn.o_proj(attended))
        return out_BTD


def pick(versions: Sequence[Tensor], phase_BT: Tensor | None) -> Tensor:
    """Of several versions of rows, each row's own; one version serves all."""
    chosen = versions[0]
    for phase, version in enumerate(versions[1:], start=1):
        assert phase_BT is not None, "several versions, but no phases"
        chosen = torch.where((phase_BT == phase)[:, :, None], version, chosen)
    return chosen
