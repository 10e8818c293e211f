"""StrideNet: the module of a semi-autoregressive drafter, a recurrence and one decoder layer.

A row is x_t = fc(cat(e_{t+1}, f_t)) + LSTM(cat(e_{t+1}, f_t)). The layer's queries come in blocks
of `stride` rows that all see up to the block's end (a causal mask relaxed inside blocks); row r of
one predicts the feature at r + stride. `TextLstm` reads a whole packed batch at once while
training, and goes on from a remembered state while drafting.
Letters: B rows, D hidden width, E head width, I input width, R flat rows, S sequence, T fed tokens,
Y carry.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from specctl.core.forward.only_shapes import has_only_shapes
from specctl.drafters.attention.seen import Seen, fullest
from specctl.drafters.nets.blocks import DecoderLayer, LayerShape, attending
from specctl.drafters.nets.trunk import TrunkNet


class TextLstm(nn.LSTM):
    """torch's LSTM with the batch first, for documents and for tokens one by one. `drop` is the
    share of what one layer hands to the next that is dropped where gradients are wanted."""

    def __init__(self, input_width: int, width: int, num_layers: int, drop: float = 0.0) -> None:
        super().__init__(input_width, width, num_layers, batch_first=True)
        self.drop = drop

    @property
    def memory_width(self) -> int:
        return 2 * self.num_layers * self.hidden_size

    def over(self, x_BSI: Tensor, document_BS: Tensor) -> Tensor:
        """[B, S, D]: every document of a packed batch read from its own beginning."""
        is_start_BS = torch.ones_like(document_BS, dtype=torch.bool)
        is_start_BS[:, 1:] = document_BS[:, 1:] != document_BS[:, :-1]
        start_R = is_start_BS.flatten().nonzero()[:, 0]
        lengths = torch.diff(start_R, append=start_R.new_tensor([document_BS.numel()])).tolist()
        if has_only_shapes():
            lengths = [stop - start for start, stop in pairwise(fullest(*document_BS.shape))]
        texts = torch.split(x_BSI.flatten(0, 1), lengths)
        learns = self.training and torch.is_grad_enabled()
        self.dropout = self.drop if learns and self.num_layers > 1 else 0.0
        out_RTD, _ = self(pad_sequence(list(texts), batch_first=True))
        self.dropout = 0.0
        rows = [row_TD[:length] for row_TD, length in zip(out_RTD, lengths, strict=True)]
        return torch.cat(rows).view(*document_BS.shape, -1)

    def onward(
        self, x_BTI: Tensor, memory_BY: Tensor, counts: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """[B, T, D] and the memory after the first counts[b] tokens of each row."""
        if min(counts) == x_BTI.shape[1]:
            out_BTD, states = self(x_BTI, self._states(memory_BY))
            return out_BTD, self._memory(states)
        outs, count_B1 = [], torch.tensor(counts, device=x_BTI.device)[:, None]
        for step in range(x_BTI.shape[1]):
            out_B1D, states = self(x_BTI[:, step : step + 1], self._states(memory_BY))
            outs.append(out_B1D)
            memory_BY = torch.where(step < count_B1, self._memory(states), memory_BY)
        return torch.cat(outs, dim=1), memory_BY

    def _states(self, memory_BY: Tensor) -> tuple[Tensor, Tensor]:
        halves = memory_BY.view(-1, 2, self.num_layers, self.hidden_size).permute(1, 2, 0, 3)
        return halves[0].contiguous(), halves[1].contiguous()

    def _memory(self, states: tuple[Tensor, Tensor]) -> Tensor:
        return torch.stack(states).permute(2, 0, 1, 3).flatten(1)


class StrideNet(TrunkNet):
    """EAGLE's `fc` and `layers` (one), and the LSTM."""

    def __init__(self, shape: LayerShape, stride: int, lstm_layers: int, drop: float = 0.0) -> None:
        super().__init__(shape)
        width = shape.hidden_size
        self.stride = stride
        self.lstm = TextLstm(2 * width, width, lstm_layers, drop)

    @property
    def memory_width(self) -> int:
        return self.lstm.memory_width

    def over(self, embedding_BSD: Tensor, state_BSD: Tensor, document_BS: Tensor) -> Tensor:
        """[B, S, D]: the rows of a packed batch."""
        both_BSI = torch.cat([embedding_BSD, state_BSD], dim=-1)
        out_BSD: Tensor = self.fc(both_BSI) + self.lstm.over(both_BSI, document_BS)
        return out_BSD

    def onward(
        self, embedding_BTD: Tensor, state_BTD: Tensor, memory_BY: Tensor, counts: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """[B, T, D]: further rows, and the memory behind the first `counts` of them."""
        both_BTI = torch.cat([embedding_BTD, state_BTD], dim=-1)
        out_BTD, memory_BY = self.lstm.onward(both_BTI, memory_BY, counts)
        return self.fc(both_BTI) + out_BTD, memory_BY

    @property
    def _layer(self) -> DecoderLayer:
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        return layer

    def key_value(self, x_BTD: Tensor, rope_BT2E: Tensor) -> tuple[Tensor, Tensor]:
        layer = self._layer
        pair: tuple[Tensor, Tensor] = layer.self_attn.key_value(
            layer.input_layernorm(x_BTD), rope_BT2E
        )
        return pair

    def look(
        self,
        x_BTD: Tensor,
        rope_BT2E: Tensor,
        seen: Sequence[tuple[Tensor, Tensor]],
        mask: Tensor | Seen | None,
        phase_BT: Tensor | None = None,
    ) -> Tensor:
        """[B, T, D]: rows through the layer, against keys and values of their phase."""
        layer = self._layer
        query = layer.self_attn.query(layer.input_layernorm(x_BTD), rope_BT2E)
        attended = pick([attending(mask)(query, *pair) for pair in seen], phase_BT)
        out_BTD: Tensor = layer.finish(x_BTD + layer.self_attn.o_proj(attended))
        return out_BTD


def pick(versions: Sequence[Tensor], phase_BT: Tensor | None) -> Tensor:
    """Of several versions of rows, each row's own; one version serves all."""
    chosen = versions[0]
    for phase, version in enumerate(versions[1:], start=1):
        assert phase_BT is not None, "several versions, but no phases"
        chosen = torch.where((phase_BT == phase)[:, :, None], version, chosen)
    return chosen
