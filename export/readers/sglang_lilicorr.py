"""How SGLang 0.5.23 reads a flat LiLiCorr checkpoint (models/lilicorr.py,
speculative/lilicorr_utils.py): DFlash's stack, with convolutions or without, and the lattice, whose
sizes stand inside `dflash_config` and have no defaults. vLLM 0.33 computes the same
(models/qwen3_lilicorr.py). Candidates are those of all of the target's tokens.
Letters: C candidates, D hidden width, N nodes, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from specctl.export.readers.block_layers import context_rows
from specctl.export.readers.lattice import LatticeReader, LatticeSizes
from specctl.export.readers.sglang_blocks import SglangBlocks
from specctl.export.readers.trial import Trial

LILICORR = "LiLiCorrDraftModel"


class SglangLattice(SglangBlocks):
    """The draft model beside a target with these embeddings and this head."""

    def __init__(self, folder: Path, embedding_VD: Tensor, head_VD: Tensor, layers: int) -> None:
        super().__init__(folder, LILICORR, embedding_VD, head_VD, layers)

    @property
    def lattice(self) -> LatticeSizes:
        """What `dflash_config` says."""
        slots = int(self._either("block_size", 16)) - 1
        return LatticeSizes.of(self.nested, self.sizes.width, slots, self.sizes.eps)

    def _shapes(self) -> dict[str, list[int]]:
        return super()._shapes() | self.lattice.shapes()

    def walked(self, trial: Trial) -> Trial:
        """Behind each place one of its candidates, of another rank every time."""
        said_NV, count = F.linear(self.spoken(trial), self.head_VD), self.lattice.count
        best_NC = said_NV.topk(count).indices
        ids = [int(best_NC[place, place % count]) for place in range(len(trial.drafted))]
        return replace(trial, drafted=tuple(ids))

    def drafted_logits(self, trial: Trial) -> Tensor:
        """[N + 1, V], of a trial that has been `walked`."""
        state_ND = self.spoken(trial)
        return LatticeReader(self.params, self.lattice).links(
            [trial.ids[-1], *trial.drafted],
            F.linear(state_ND, self.head_VD),
            state_ND,
            self.embedding_VD,
            context_rows(self.params, self.sizes, self.taken(trial))[-1],
        )
