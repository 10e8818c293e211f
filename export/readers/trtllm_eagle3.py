"""How TensorRT-LLM reads a flat EAGLE-3 checkpoint (tensorrt_llm/_torch/models/
modeling_speculative.py, Eagle3ForCausalLM): `layers.0` becomes `midlayer`, names without `lm_head`
in them get the prefix `model.`, tensors that no module needs are left aside without a word. The
embedding is the target's; so is the LM head where the folder has none.

The list of layers whose outputs are captured comes from the settings, never from the folder; fewer
than two of them leave no `fc`. `fc_norm` and `norm_output` stand at the top of config.json (the
latter as `return_hidden_post_norm` inside `eagle_config`, too); the un-normed state is the
residual. `d2t` is there only where the two vocabularies differ in size.
Letters: D hidden width, I input width, K draft vocabulary, N nodes, T fed tokens, V target
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.export.layouts.engines import gate
from specctl.export.readers.layers import attention, layer_shapes, onward, rms_norm
from specctl.export.readers.loading import (
    Parameters,
    read_config,
    read_tensors,
    refuse_bias,
    sizes_of,
)
from specctl.export.readers.trial import Trial, chained, over_targets

ENGINE, LAYER = "TensorRT-LLM", "model.midlayer"


class TrtllmEagle3:
    """Eagle3ForCausalLM beside a target with this embedding and this head [V, D]; `layers` are the
    `eagle3_layers_to_capture` of its settings."""

    def __init__(
        self, folder: Path, embedding_VD: Tensor, head_VD: Tensor, layers: Sequence[int]
    ) -> None:
        self.config = config = read_config(folder, "LlamaForCausalLMEagle3")
        refuse_bias(config)
        self.sizes, self.embedding_VD = sizes_of(config), embedding_VD
        self.layers, self.nested = sorted(set(layers)), getattr(config, "eagle_config", None) or {}
        odd = [key for key in ("eh_proj_before_attn", "norm_before_fc") if self.nested.get(key)]
        if odd or config.num_hidden_layers != 1:
            raise gate(", ".join(odd) or "several layers", "one layer behind fc")
        size = config.vocab_size
        rows = getattr(config, "draft_vocab_size", None) or size
        tensors = read_tensors(folder)
        own_head = any("lm_head" in name for name in tensors)
        self.params = Parameters(self._shapes(rows, own_head))
        maps = Parameters({"model.d2t": [rows]} if rows != size else {})
        for name, tensor in tensors.items():
            self._load(name, tensor, maps)
        self.params.check()
        maps.check()
        self.head_KD = self.params["lm_head.weight"] if own_head else head_VD
        self.ids_K = maps["model.d2t"].long() + torch.arange(rows) if len(maps) else None

    def _shapes(self, rows: int, own_head: bool) -> dict[str, list[int]]:
        width, number = self.sizes.width, len(self.layers)
        taken = getattr(self.config, "target_hidden_size", width)
        shapes = layer_shapes(LAYER, self.sizes, 2 * width, qk_norm=False)
        shapes |= {f"{LAYER}.{n}.weight": [width] for n in ("input_layernorm", "hidden_norm")}
        shapes |= {"model.norm.weight": [width]}
        if number > 1:
            shapes["model.fc.weight"] = [width, taken * number]
        for tap in range(number if getattr(self.config, "fc_norm", False) else 0):
            shapes[f"model.fc_norm.{tap}.weight"] = [taken]
        return shapes | ({"lm_head.weight": [rows, width]} if own_head else {})

    def _load(self, name: str, tensor: Tensor, maps: Parameters) -> None:
        if name == "t2d":  # read by nothing, and needed by nothing
            return
        if name.startswith("layers.0."):
            name = f"midlayer.{name.removeprefix('layers.0.')}"
        name = name if "lm_head" in name else f"model.{name}"
        (maps if name in maps else self.params).load(name, tensor)

    @torch.no_grad()
    def drafted_logits(self, trial: Trial) -> Tensor:
        """[N + 1, V]."""
        last = len(trial.states) - 2
        if any(not 0 <= layer <= last for layer in self.layers):
            raise gate(f"layers {self.layers}", f"layers 0 to {last}")
        taken = torch.cat([trial.states[layer + 1] for layer in self.layers], dim=-1)
        said_NK = chained(self._step, trial, self._joined(taken))
        return over_targets(said_NK, self.ids_K, len(self.embedding_VD))

    def _joined(self, taken_TI: Tensor) -> Tensor:
        """What stands beside a token; features as wide as the drafter skip `fc`."""
        params, eps = self.params, self.sizes.eps
        if taken_TI.shape[-1] == self.sizes.width:
            return taken_TI
        if getattr(self.config, "fc_norm", False):
            parts = enumerate(taken_TI.chunk(len(self.layers), dim=-1))
            normed = [rms_norm(x, params[f"model.fc_norm.{i}.weight"], eps) for i, x in parts]
            taken_TI = torch.cat(normed, dim=-1)
        return F.linear(taken_TI, params["model.fc.weight"])

    def _step(self, ids_T: Tensor, state_TD: Tensor) -> tuple[Tensor, Tensor]:
        params, eps = self.params, self.sizes.eps
        embed_TD = rms_norm(
            self.embedding_VD[ids_T], params[f"{LAYER}.input_layernorm.weight"], eps
        )
        x_TD = rms_norm(state_TD, params[f"{LAYER}.hidden_norm.weight"], eps)
        x_TI = torch.cat([embed_TD, x_TD], dim=-1)
        attended_TD = attention(params, f"{LAYER}.self_attn", x_TI, self.sizes)
        state_TD = onward(params, LAYER, state_TD, attended_TD, eps)
        normed_TD = rms_norm(state_TD, params["model.norm.weight"], eps)
        is_normed = self.is_normed_fed_back()
        return F.linear(normed_TD, self.head_KD), normed_TD if is_normed else state_TD

    def is_normed_fed_back(self) -> bool:
        said: Any = self.nested.get("return_hidden_post_norm", False)
        return bool(said or getattr(self.config, "norm_output", False))
