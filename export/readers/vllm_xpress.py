"""How vLLM 0.33 reads a flat XPress checkpoint (models/qwen3_xpress.py,
spec_decode/xpress/speculator.py): DFlash's stack and a refiner `xpress_head.*`, whose mixing matrix
is stored as it was trained; every slot reads the token before it, that of the root the root itself,
since the token before it is at hand nowhere.

vLLM scores the likeliest 512 tokens of each place (`xpress_topc`) in six rounds over the whole
block; here all tokens are scored, each place behind the tokens that are drafted before it, which is
what the rounds end at.
Letters: D hidden width, N nodes, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from specctl.export.layouts.engines import gate
from specctl.export.readers.block_heads import VLLM, refined, refiner_shapes
from specctl.export.readers.block_layers import RowMask
from specctl.export.readers.sglang_blocks import SglangBlocks
from specctl.export.readers.trial import Trial

ENGINE = "vLLM 0.33"
XPRESS = "Qwen3XPressModel"
SIZES = ("xpress_rank", "xpress_mlp_hidden", "xpress_block_size")


class VllmXPress(SglangBlocks):
    """The draft model beside a target with these embeddings and this head; what vLLM and SGLang
    share of the stack is read as SGLang reads it."""

    def __init__(self, folder: Path, embedding_VD: Tensor, head_VD: Tensor, layers: int) -> None:
        super().__init__(folder, XPRESS, embedding_VD, head_VD, layers)

    def _mask(self, layer: int) -> RowMask:
        """`is_causal`, else `causal` of `dflash_config`, else by the kind of layer."""
        mask = super()._mask(layer)
        said = getattr(self.config, "is_causal", None)
        said = self.nested.get("causal") if said is None else said
        return mask if said is None else RowMask(bool(said), mask.window)

    def _shapes(self) -> dict[str, list[int]]:
        missing = [key for key in SIZES if getattr(self.config, key, None) is None]
        if missing:
            raise gate(f"no {missing[0]}", "the sizes of the refiner: " + ", ".join(SIZES))
        rank, inner, slots = (int(getattr(self.config, key)) for key in SIZES)
        if slots != self._either("block_size", 16):
            raise gate(f"xpress_block_size {slots}", "as many rows as block_size")
        size = self.config.vocab_size
        own = refiner_shapes(VLLM, self.sizes.width, rank, inner, slots, size, size)
        return super()._shapes() | own

    def drafted_logits(self, trial: Trial) -> Tensor:
        """[N + 1, V]."""
        state_TD, root = self.block(trial), trial.ids[-1]
        added_TV = refined(self.params, VLLM, state_TD, [root, root, *trial.drafted])
        return F.linear(state_TD[1:], self.head_VD) + added_TV[1:]
