"""Drawing the tokens of a chain inside a recording: seeds, rounds and temperatures are its inputs.

Letters: B rows, K draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.core.gpu_kernels import has_triton
from specctl.core.language_model import ChainDraws

DRAFT = 4  # the stream of drafts


def can_draw(draws: ChainDraws) -> bool:
    """Whether every row draws by its temperature alone, and the kernel can be built."""
    return draws.truncations is None and min(draws.temperatures) > 0 and has_triton()


def draw_inputs(draws: ChainDraws, device: torch.device) -> tuple[Tensor, Tensor]:
    """Seeds and rounds int64 [2, B], temperatures [B, 1, 1]; the host does not wait for them."""
    counted_2B = torch.tensor([list(draws.seeds), list(draws.rounds)])
    temperature_B11 = torch.tensor(draws.temperatures)[:, None, None]
    return counted_2B.to(device, non_blocking=True), temperature_B11.to(device, non_blocking=True)


def drawn_row(
    logits_B1K: Tensor, index: int, code_K: Tensor, counted_2B: Tensor, temperature_B11: Tensor
) -> Tensor:
    """int64 [B, 1]: what `RoundNoise.draft_draw_BM` draws from float32 logits at that index."""
    from specctl.models import draw_kernel

    scores_B1K, inner = logits_B1K / temperature_B11, (index << 24) + 1
    seed_B, counter_B = counted_2B
    return draw_kernel.draw(scores_B1K, code_K, DRAFT, seed_B, counter_B, inner=inner)
