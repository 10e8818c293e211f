"""How SGLang 0.5.23 reads a flat EAGLE checkpoint (models/llama_eagle3.py, models/llama_eagle.py,
speculative/eagle_worker_v2.py): config.json by transformers' Llama class; unknown tensor names are
dropped without a word; the embedding always comes from the target.

EAGLE-3 captures hidden states in the target's own order before the layers named by the *nested*
list plus one, joins them by `fc` only where they are not already as wide as the drafter, keeps the
un-normed state as residual, and gives every head row the target id `row + d2t[row]`.
EAGLE-1 has a bias on `fc`, no norm before its first layer, no LM head; a token map given on the
command line cuts the target's head.
Letters: D hidden width, I input width, K draft vocabulary, N nodes, T fed tokens, V target
vocabulary.
"""

from __future__ import annotations

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

ENGINE = "SGLang 0.5.23"
RENAMED = {
    "midlayer": "layers.0",
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
}

Shapes = dict[str, list[int]]


def captured(config: Any, num_layers: int) -> list[int]:
    """hidden_states indices that the target hands out, in the order in which it meets them."""
    try:
        nested = config.eagle_config["eagle_aux_hidden_state_layer_ids"]
        wanted = {value + 1 for value in nested}
    except (AttributeError, TypeError, KeyError):  # as the engine: whatever fails is the default
        wanted = {2, num_layers // 2, num_layers - 3}
    return [index for index in range(num_layers) if index in wanted]


class SglangEagle3:
    """LlamaForCausalLMEagle3 beside a target with these embeddings [V, D]."""

    def __init__(self, folder: Path, embedding_VD: Tensor) -> None:
        self.config = config = read_config(folder, "LlamaForCausalLMEagle3")
        refuse_bias(config)
        self.sizes, self.embedding_VD = sizes_of(config), embedding_VD
        nested = getattr(config, "eagle_config", None) or {}
        listed = nested.get("eagle_aux_hidden_state_layer_ids")
        number = getattr(config, "num_aux_hidden_states", None)
        self.num_taps = number if number is not None else len(listed) if listed else 3
        self.has_fc_norm = bool(
            getattr(config, "fc_norm", None) or getattr(config, "use_aux_norm", False)
        )
        self.hot_K: Tensor | None = None
        self.params = Parameters(self._shapes())
        for name, tensor in read_tensors(folder).items():
            self._load(name, tensor)
        self.params.check()

    def _shapes(self) -> Shapes:
        config, sizes = self.config, self.sizes
        rows = getattr(config, "draft_vocab_size", None)
        if rows is None or config.tie_word_embeddings:
            raise gate("no LM head of its own", "draft_vocab_size and no tied embedding")
        taken = getattr(config, "target_hidden_size", sizes.width)
        shapes = {"model.fc.weight": [sizes.width, taken * self.num_taps]}
        shapes |= {"model.norm.weight": [sizes.width], "lm_head.weight": [rows, sizes.width]}
        for tap in range(self.num_taps if self.has_fc_norm else 0):
            shapes[f"model.fc_norm.{tap}.weight"] = [taken]
        for layer in range(config.num_hidden_layers):
            own = f"model.layers.{layer}"
            shapes |= layer_shapes(own, sizes, sizes.width * (1 if layer else 2), qk_norm=False)
            for norm in ("input_layernorm", "hidden_norm"):
                shapes[f"{own}.{norm}.weight"] = [sizes.width]
        return shapes

    def _load(self, name: str, tensor: Tensor) -> None:
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        if "d2t" in name:
            self.hot_K = tensor + torch.arange(len(tensor))
        elif "t2d" not in name and name != "embed_tokens.weight":
            self.params.load(name if name in self.params else f"model.{name}", tensor)

    @torch.no_grad()
    def drafted_logits(self, trial: Trial) -> Tensor:
        """[N + 1, V]."""
        taps = [trial.states[k] for k in captured(self.config, len(trial.states) - 1)]
        if not taps:
            raise gate("no hidden state captured", "the taps of the drafter")
        said_NK = chained(self._step, trial, self._joined(torch.cat(taps, dim=-1)))
        return over_targets(said_NK, self.hot_K, len(self.embedding_VD))

    def _joined(self, taken_TI: Tensor) -> Tensor:
        """What stands beside a token. Features as wide as the drafter pass for its own states."""
        params, eps = self.params, self.sizes.eps
        if taken_TI.shape[-1] == self.sizes.width:
            return taken_TI
        if self.has_fc_norm:
            parts = enumerate(taken_TI.chunk(self.num_taps, dim=-1))
            normed = [rms_norm(x, params[f"model.fc_norm.{i}.weight"], eps) for i, x in parts]
            taken_TI = torch.cat(normed, dim=-1)
        weight = params["model.fc.weight"]
        if taken_TI.shape[-1] != weight.shape[1]:
            raise gate(f"{taken_TI.shape[-1]} features captured", f"{weight.shape[1]} read by fc")
        return F.linear(taken_TI, weight)

    def _step(self, ids_T: Tensor, state_TD: Tensor) -> tuple[Tensor, Tensor]:
        params, eps = self.params, self.sizes.eps
        embed_TD = self.embedding_VD[ids_T]
        for layer in range(self.config.num_hidden_layers):
            own = f"model.layers.{layer}"
            x_TI = rms_norm(state_TD, params[f"{own}.hidden_norm.weight"], eps)
            if layer == 0:
                embed_TD = rms_norm(embed_TD, params[f"{own}.input_layernorm.weight"], eps)
                x_TI = torch.cat([embed_TD, x_TI], dim=-1)
            attended_TD = attention(params, f"{own}.self_attn", x_TI, self.sizes)
            state_TD = onward(params, own, state_TD, attended_TD, eps)
        normed_TD = rms_norm(state_TD, params["model.norm.weight"], eps)
        is_normed = getattr(self.config, "norm_output", False)
        logits_TK = F.linear(normed_TD, params["lm_head.weight"])
        return logits_TK, normed_TD if is_normed else state_TD


class SglangEagle:
    """LlamaForCausalLMEagle beside a target with this embedding and this head [V, D]; `map_K` are
    the ids of the token map on the command line."""

    def __init__(
        self, folder: Path, embedding_VD: Tensor, head_VD: Tensor, map_K: Tensor | None
    ) -> None:
        self.config = read_config(folder, "LlamaForCausalLMEagle")
        refuse_bias(self.config)
        self.sizes, self.embedding_VD, self.map_K = sizes_of(self.config), embedding_VD, map_K
        self.head_KD = head_VD if map_K is None else head_VD[map_K]
        self.params = Parameters(self._shapes())
        for name, tensor in read_tensors(folder).items():
            if "lm_head" not in name and name not in ("d2t", "t2d", "embed_tokens.weight"):
                self.params.load(f"model.{name}", tensor)
        self.params.check()

    def _shapes(self) -> Shapes:
        width = self.sizes.width
        shapes = {"model.fc.weight": [width, 2 * width], "model.fc.bias": [width]}
        for layer in range(self.config.num_hidden_layers):
            own = f"model.layers.{layer}"
            shapes |= layer_shapes(own, self.sizes, width, qk_norm=False)
            if layer > 0:
                shapes[f"{own}.input_layernorm.weight"] = [width]
        return shapes

    @torch.no_grad()
    def drafted_logits(self, trial: Trial) -> Tensor:
        """[N + 1, V]."""
        last = max(trial.states)  # what the target's LM head reads
        said_NK = chained(self._step, trial, trial.states[last])
        return over_targets(said_NK, self.map_K, len(self.embedding_VD))

    def _step(self, ids_T: Tensor, state_TD: Tensor) -> tuple[Tensor, Tensor]:
        params = self.params
        both_TI = torch.cat([self.embedding_VD[ids_T], state_TD], dim=-1)
        x_TD = F.linear(both_TI, params["model.fc.weight"], params["model.fc.bias"])
        for layer in range(self.config.num_hidden_layers):
            own, read_TD = f"model.layers.{layer}", x_TD
            if layer > 0:
                norm_D = params[f"{own}.input_layernorm.weight"]
                read_TD = rms_norm(x_TD, norm_D, self.sizes.eps)
            attended_TD = attention(params, f"{own}.self_attn", read_TD, self.sizes)
            x_TD = onward(params, own, x_TD, attended_TD, self.sizes.eps)
        return F.linear(x_TD, self.head_KD), x_TD
