"""An LSTM over texts: all of a packed batch at once while training, onward from a remembered state
while drafting.

Letters: B rows, S sequence, T tokens, I input width, D width, M memory (both states of all layers).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence


class TextLstm(nn.LSTM):
    """torch's LSTM with the batch first, for documents and for tokens one by one."""

    def __init__(self, input_width: int, width: int, num_layers: int) -> None:
        super().__init__(input_width, width, num_layers, batch_first=True)

    @property
    def memory_width(self) -> int:
        return 2 * self.num_layers * self.hidden_size

    def over(self, x_BSI: Tensor, document_BS: Tensor) -> Tensor:
        """[B, S, D]: every document of a packed batch read from its own beginning."""
        is_start_BS = torch.ones_like(document_BS, dtype=torch.bool)
        is_start_BS[:, 1:] = document_BS[:, 1:] != document_BS[:, :-1]
        start_N = is_start_BS.flatten().nonzero()[:, 0]
        lengths = torch.diff(start_N, append=start_N.new_tensor([document_BS.numel()])).tolist()
        texts = torch.split(x_BSI.flatten(0, 1), lengths)
        out_NTD, _ = self(pad_sequence(list(texts), batch_first=True))
        rows = [row_TD[:length] for row_TD, length in zip(out_NTD, lengths, strict=True)]
        return torch.cat(rows).view(*document_BS.shape, -1)

    def onward(
        self, x_BTI: Tensor, memory_BM: Tensor, counts: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """[B, T, D] and the memory after the first counts[b] tokens of each row."""
        if min(counts) == x_BTI.shape[1]:
            out_BTD, states = self(x_BTI, self._states(memory_BM))
            return out_BTD, self._memory(states)
        outs, count_B1 = [], torch.tensor(counts, device=x_BTI.device)[:, None]
        for step in range(x_BTI.shape[1]):
            out_B1D, states = self(x_BTI[:, step : step + 1], self._states(memory_BM))
            outs.append(out_B1D)
            memory_BM = torch.where(step < count_B1, self._memory(states), memory_BM)
        return torch.cat(outs, dim=1), memory_BM

    def _states(self, memory_BM: Tensor) -> tuple[Tensor, Tensor]:
        halves = memory_BM.view(-1, 2, self.num_layers, self.hidden_size).permute(1, 2, 0, 3)
        return halves[0].contiguous(), halves[1].contiguous()

    def _memory(self, states: tuple[Tensor, Tensor]) -> Tensor:
        return torch.stack(states).permute(2, 0, 1, 3).flatten(1)
