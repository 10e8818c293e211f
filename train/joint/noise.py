"""Make Some Noise (arXiv 2406.17404, section 3.1): learn to predict behind wrong tokens.

Of the input, spans of `span` tokens inside the predicted text are replaced by random tokens of what
stands before them ("ahead noise"); what is to be predicted stays. The model then says more of the
tokens behind a wrong guess, which is what Jacobi decoding feeds it. The paper noises one span of
every answer, this one span of every `every` tokens. No attention mask changes.
Letters: B rows, S sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.recipes.low_rank import NoisePart


def noised(batch: TrainBatch, part: NoisePart) -> Tensor:
    """[B, S]: the input ids with noise, from torch's default generator. The first token of a
    document, and tokens that are not to be predicted, stay."""
    ids_BS, position_BS = batch.ids_BS, batch.position_BS
    (B, S), device = ids_BS.shape, ids_BS.device
    at_S = torch.arange(S, device=device)
    starts = -(-S // part.every)
    first_BW = torch.randint(0, part.every - part.span + 1, (B, starts), device=device)
    first_BS = first_BW.repeat_interleave(part.every, 1)[:, :S]
    inside_BS = at_S % part.every - first_BS
    is_noise_BS = (inside_BS >= 0) & (inside_BS < part.span)
    before_BS = (position_BS - inside_BS).clamp(min=0)  # tokens of the document before the span
    is_noise_BS &= batch.loss_mask_BS & (batch.document_BS >= 0) & (before_BS > 0)
    return torch.where(is_noise_BS, earlier_tokens(batch, before_BS), ids_BS)


def earlier_tokens(batch: TrainBatch, before_BS: Tensor) -> Tensor:
    """[B, S]: at every place one of the first `before_BS` tokens of its document, by chance."""
    ids_BS = batch.ids_BS
    (B, S), device = ids_BS.shape, ids_BS.device
    chosen_BS = (torch.rand(B, S, device=device) * before_BS).long().clamp(max=S - 1)
    start_BS = torch.arange(S, device=device) - batch.position_BS
    from_BS = start_BS + torch.minimum(chosen_BS, (before_BS - 1).clamp(min=0))
    return ids_BS.gather(1, from_BS.clamp(0, S - 1))
