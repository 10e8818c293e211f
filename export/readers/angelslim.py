"""How the checkpoints of AngelSlim are read: DFly's by AngelSpec (models/draft/dfly.py, at fa2c95d)
and by vLLM's open pull request 50246, DFlare's by AngelSlim (models/draft/qwen_dflare.py, at
3e3d4b8) and by vLLM's pull request 49023. Both are a DFlash stack that fills its slots in; behind
it every layer reads a mixture of the captured states, `layer_fusion_weights` [layers, taps].

- DFly: norm(context_proj(all) + mixture), and the states of the slots are corrected ahead of the LM
  head behind the token before each of them. Settings stand at the top of config.json.
- DFlare: norm(mixture), whose keys and values have projections of their own. Settings stand inside
  `dflash_config`.
Letters: D hidden width, I input width, N nodes, S sequence (the context), T fed tokens, V target
vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.export.layouts.engines import gate
from specctl.export.readers.block_layers import through_layers
from specctl.export.readers.layers import rms_norm
from specctl.export.readers.sglang_blocks import SglangBlocks
from specctl.export.readers.trial import Trial

FLY, FLARE = "Qwen3DFlyModel", "QwenDFlareDraftModel"
ENGINES = {"dfly": "AngelSpec", "dflare": "AngelSlim"}
FUSION, CORRECTION = "layer_fusion_weights", "hidden_correction"
STACK = {  # AngelSpec's names of what other engines name otherwise
    "context_proj.weight": "fc.weight",
    "context_norm.weight": "hidden_norm.weight",
    "final_norm.weight": "norm.weight",
}


class LayeredBlocks(SglangBlocks):
    """A block whose layers read features of their own; what is DFlash's is read as SGLang reads
    it."""

    def _shapes(self) -> dict[str, list[int]]:
        return super()._shapes() | {FUSION: [self.config.num_hidden_layers, len(self.layer_ids)]}

    def shared_rows(self, taken_SI: Tensor) -> Tensor:
        """[S, D]: what is added to every layer's mixture."""
        return taken_SI.new_zeros(len(taken_SI), self.sizes.width)

    def through(self, taken_SI: Tensor, x_TD: Tensor) -> Tensor:
        states = torch.unflatten(taken_SI, -1, (len(self.layer_ids), -1)).unbind(1)
        shared_SD, norm = self.shared_rows(taken_SI), self.params["hidden_norm.weight"]
        contexts = []
        for weights in self.params[FUSION].softmax(-1):
            mixed_SD = sum(w * state for w, state in zip(weights, states, strict=True))
            contexts.append(rms_norm(shared_SD + mixed_SD, norm, self.sizes.eps))
        return through_layers(self.params, self.sizes, contexts, x_TD, self.masks)


class AngelFly(LayeredBlocks):
    """DFly's draft model beside a target with these embeddings and this head."""

    def __init__(self, folder: Path, embedding_VD: Tensor, head_VD: Tensor, layers: int) -> None:
        super().__init__(folder, FLY, embedding_VD, head_VD, layers)

    def _shapes(self) -> dict[str, list[int]]:
        config, width = self.config, self.sizes.width
        if getattr(config, "enable_hidden_correction", None) is not True:
            raise gate("no enable_hidden_correction: true", "the block's correction, switched on")
        named = getattr(config, "num_target_layers", None)
        if named not in (None, len(self.layer_ids)):
            raise gate(f"num_target_layers {named}", f"the number of layers: {self.layer_ids}")
        inner = int(getattr(config, "hidden_correction_intermediate_size", None) or width)
        own = {
            "hidden_norm": [width],
            "embed_norm": [width],
            "gate_proj": [inner, 2 * width],
            "up_proj": [inner, 2 * width],
            "down_proj": [width, inner],
        }
        shapes = {f"{CORRECTION}.{name}.weight": shape for name, shape in own.items()}
        return super()._shapes() | shapes

    def _load(self, name: str, tensor: Tensor) -> None:
        super()._load(STACK.get(name, name), tensor)

    def shared_rows(self, taken_SI: Tensor) -> Tensor:
        return F.linear(taken_SI, self.params["fc.weight"])

    def drafted_logits(self, trial: Trial) -> Tensor:
        """[N + 1, V]."""
        state_ND, eps = self.spoken(trial), self.sizes.eps
        before_ND = self.embedding_VD[torch.tensor([trial.ids[-1], *trial.drafted])]
        part = {
            name: self.params[f"{CORRECTION}.{name}.weight"]
            for name in ("hidden_norm", "embed_norm", "gate_proj", "up_proj", "down_proj")
        }
        normed = rms_norm(state_ND, part["hidden_norm"], eps)
        seen = torch.cat([normed, rms_norm(before_ND, part["embed_norm"], eps)], dim=-1)
        inner = F.silu(F.linear(seen, part["gate_proj"])) * F.linear(seen, part["up_proj"])
        return F.linear(state_ND + F.linear(inner, part["down_proj"]), self.head_VD)


class AngelFlare(LayeredBlocks):
    """DFlare's draft model beside a target with these embeddings and this head."""

    def __init__(self, folder: Path, embedding_VD: Tensor, head_VD: Tensor, layers: int) -> None:
        super().__init__(folder, FLARE, embedding_VD, head_VD, layers)

    def _shapes(self) -> dict[str, list[int]]:
        shapes, sizes = super()._shapes(), self.sizes
        del shapes["fc.weight"]
        for layer in range(self.config.num_hidden_layers):
            for part in ("k", "v"):
                name = f"layers.{layer}.self_attn.{part}_proj_target.weight"
                shapes[name] = [sizes.kv_heads * sizes.head_dim, sizes.width]
        return shapes


READERS = {"dfly": AngelFly, "dflare": AngelFlare}
