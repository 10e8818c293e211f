"""Drawing the tokens of a chain inside a recording: seeds, rounds, temperatures and truncations
are its inputs.

Letters: B rows, K draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Self

import torch
from torch import Tensor

from specctl.core.device.gpu_kernels import has_triton
from specctl.core.language_model import ChainDraws
from specctl.core.truncation import min_p_, top_k_, top_p_

DRAFT = 4  # the stream of drafts


class RecordedDraws(NamedTuple):
    """What is fixed in a recording: the codes of the choices, and which truncations there are.
    `largest`: bounds top-k, 0 where no row has one."""

    code_K: Tensor
    largest: int
    has_top_p: bool
    has_min_p: bool

    @classmethod
    def of(cls, draws: ChainDraws, num_choices: int) -> Self | None:
        """None where a row is greedy, or the kernel cannot be built."""
        if min(draws.temperatures) <= 0 or not has_triton():
            return None
        rows = draws.truncations or ()
        largest = max((row.top_k for row in rows), default=0)
        return cls(
            draws.codes(num_choices),
            1 << (largest - 1).bit_length() if largest else 0,
            any(row.top_p < 1 for row in rows),
            any(row.min_p > 0 for row in rows),
        )

    @property
    def name(self) -> str:
        return f"top-k {self.largest}, top-p {self.has_top_p}, min-p {self.has_min_p}"

    def inputs(self, draws: ChainDraws, device: torch.device) -> tuple[Tensor, ...]:
        """Seeds and rounds int64 [2, B], temperatures and truncations [B, 1, 1]; the host does not
        wait for them."""
        columns: list[list[float] | list[int]] = [list(draws.temperatures)]
        rows = draws.truncations or ()
        if self.largest:
            columns.append([row.top_k for row in rows])
        if self.has_top_p:
            columns.append([row.top_p for row in rows])
        if self.has_min_p:
            columns.append([row.min_p for row in rows])
        made = [torch.tensor([list(draws.seeds), list(draws.rounds)])]
        made += [torch.tensor(column)[:, None, None] for column in columns]
        return tuple(each.to(device, non_blocking=True) for each in made)

    def drawn(
        self, logits_B1K: Tensor, index: int, given: Iterator[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """int64 [B, 1], what `RoundNoise.draft_draw_BM` draws at that index, and the distribution
        [B, 1, K] of which; `given` are the inputs."""
        from specctl.models.triton import draw_kernel

        seed_B, counter_B = next(given)
        scores_B1K = logits_B1K / next(given)
        if self.largest:
            top_k_(scores_B1K, next(given), self.largest)
        if self.has_top_p:
            top_p_(scores_B1K, next(given))
        if self.has_min_p:
            min_p_(scores_B1K, next(given))
        inner = (index << 24) + 1
        counted = self.code_K, DRAFT, seed_B, counter_B
        row_B1 = draw_kernel.draw(scores_B1K, *counted, inner=inner)
        return row_B1, scores_B1K.softmax(-1)
