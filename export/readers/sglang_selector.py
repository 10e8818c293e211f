"""How SGLang 0.5.23 reads a flat DFlash2 checkpoint (models/dflash.py): DFlash's stack with
convolutions, and a selector among the likeliest tokens of each row. vLLM 0.33 computes the same
(models/qwen3_dflash2.py). Sizes stand inside `dflash_config` and have no defaults.
Letters: D hidden width, N nodes, V target vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from specctl.export.layouts.engines import gate
from specctl.export.readers.block_heads import selected, selector_shapes
from specctl.export.readers.sglang_blocks import CONV_KEYS, SglangBlocks
from specctl.export.readers.trial import Trial

DFLASH2 = "DFlash2DraftModel"
SELECTOR_KEYS = ("selector_rank", "selector_top_k")


class SglangSelector(SglangBlocks):
    """The draft model beside a target with these embeddings and this head."""

    def __init__(self, folder: Path, embedding_VD: Tensor, head_VD: Tensor, layers: int) -> None:
        super().__init__(folder, DFLASH2, embedding_VD, head_VD, layers)

    def _shapes(self) -> dict[str, list[int]]:
        missing = [key for key in (*CONV_KEYS, *SELECTOR_KEYS) if not self.nested.get(key)]
        if missing:  # vLLM finds none, SGLang builds the stack without the part
            raise gate(f"no {missing[0]} in dflash_config", "sizes of convolutions and selector")
        size = self.config.vocab_size
        own = selector_shapes(self.sizes, int(self.nested["selector_rank"]), size)
        return super()._shapes() | own

    def drafted_logits(self, trial: Trial) -> Tensor:
        """[N + 1, V]."""
        state_ND = self.spoken(trial)
        said_NV = F.linear(state_ND, self.head_VD)
        count = int(self.nested["selector_top_k"])
        return selected(self.params, trial, state_ND, said_NV, count)
