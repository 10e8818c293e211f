"""How SGLang 0.5.23 reads a flat EAGLE checkpoint (models/llama_eagle3.py, models/llama_eagle.py,
speculative/eagle_worker_v2.py): config.json by transformers' Llama class; unknown tensor names are
dropped without a word; the embedding always comes from the target.

EAGLE-3 captures hidden states in the target's own order before the layers named by the *nested*
list plus one, joins them by `fc` only where they are not already as wide as the drafter, keeps the
un-normed state as residual, and gives every head row the target id `row + d2t[row]`.
EAGLE-1 has a bias on `fc`, no norm before its first layer, no LM head; a token map given on the
command line cuts the target's head.
Letters: T rows, D width, A taps, S steps, K draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specctl.export.engines import gate
from specctl.export.readers.plain import (
    Attention,
    Parameters,
    mlp_shapes,
    read_config,
    read_tensors,
    rms_norm,
    swiglu,
)
from specctl.export.readers.probe import Probe, scattered

RENAMED = {
    "midlayer": "layers.0",
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
}


def captured(config: Any, num_layers: int) -> list[int]:
    """hidden_states indices that the target hands out, in the order in which it meets them."""
    nested = getattr(config, "eagle_config", None)
    try:
        wanted = {value + 1 for value in nested["eagle_aux_hidden_state_layer_ids"]}
    except (TypeError, KeyError):  # as the engine: whatever fails means the default
        wanted = {2, num_layers // 2, num_layers - 3}
    return [index for index in range(num_layers) if index in wanted]


class SglangEagle3:
    """LlamaForCausalLMEagle3."""

    def __init__(self, folder: Path) -> None:
        self.config = config = read_config(folder)
        if config.architectures != ["LlamaForCausalLMEagle3"]:
            raise gate(f"architectures {config.architectures}", "LlamaForCausalLMEagle3")
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
        self.params.check(spared=["model.embed_tokens.weight"])

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        config = self.config
        width, rows = config.hidden_size, getattr(config, "draft_vocab_size", None)
        if rows is None:
            raise gate("no draft_vocab_size", "the number of head rows")
        taken = getattr(config, "target_hidden_size", width) * self.num_taps
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (config.vocab_size, width),
            "model.fc.weight": (width, taken),
            "model.norm.weight": (width,),
            "lm_head.weight": (rows, width),
        }
        if getattr(config, "bias", False):
            shapes["model.fc.bias"] = (width,)
        if self.has_fc_norm:
            for tap in range(self.num_taps):
                shapes[f"model.fc_norm.{tap}.weight"] = (taken // self.num_taps,)
        for layer in range(config.num_hidden_layers):
            own = f"model.layers.{layer}"
            shapes |= Attention.shapes(f"{own}.self_attn", config, width * (2 if layer == 0 else 1))
            shapes |= mlp_shapes(f"{own}.mlp", config)
            for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
                shapes[f"{own}.{norm}.weight"] = (width,)
        return shapes

    def _load(self, name: str, tensor: Tensor) -> None:
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        if "d2t" in name:
            self.hot_K = tensor + torch.arange(len(tensor))
        elif "t2d" not in name:
            self.params.load(name if name in self.params else f"model.{name}", tensor)

    def __call__(self, probe: Probe) -> Tensor:
        """[S, V]."""
        seen = [self._attention(layer) for layer in range(self.config.num_hidden_layers)]
        taps = [probe.states[i] for i in captured(self.config, len(probe.states) - 1)]
        ids_T, position_T = torch.tensor(probe.tokens[1:]), torch.arange(len(probe.tokens) - 1)
        state_TD = self._joined(torch.cat(taps, dim=-1))
        rows: list[Tensor] = []
        for token in (None, *probe.chain):
            if token is not None:
                ids_T, position_T = torch.tensor([token]), position_T[-1:] + 1
            spoken_TD, state_TD = self._layers(probe.embedding_VD[ids_T], state_TD, position_T, seen)
            rows.append(spoken_TD[-1] @ self.params["lm_head.weight"].T)
            state_TD = state_TD[-1:]
        ids_K = torch.arange(len(rows[0])) if self.hot_K is None else self.hot_K
        return scattered(torch.stack(rows), ids_K, len(probe.head_VD))

    def _attention(self, layer: int) -> Attention:
        return Attention(self.params, f"model.layers.{layer}.self_attn", self.config)

    def _joined(self, taken_TI: Tensor) -> Tensor:
        params, eps = self.params, self.config.rms_norm_eps
        if taken_TI.shape[-1] == self.config.hidden_size:
            return taken_TI  # the engine takes them for states of the drafter itself
        if self.has_fc_norm:
            parts = enumerate(taken_TI.chunk(self.num_taps, dim=-1))
            normed = [rms_norm(x, params[f"model.fc_norm.{i}.weight"], eps) for i, x in parts]
            taken_TI = torch.cat(normed, dim=-1)
        if taken_TI.shape[-1] != params["model.fc.weight"].shape[1]:
            raise gate(
                f"{taken_TI.shape[-1]} features captured",
                f"the {params['model.fc.weight'].shape[1]} that fc reads",
            )
        joined_TD = taken_TI @ params["model.fc.weight"].T
        return joined_TD + params["model.fc.bias"] if "model.fc.bias" in params else joined_TD

    def _layers(
        self, embed_TD: Tensor, state_TD: Tensor, position_T: Tensor, seen: list[Attention]
    ) -> tuple[Tensor, Tensor]:
        """What the LM head reads, and what is fed back."""
        params, eps = self.params, self.config.rms_norm_eps
        residual_TD = state_TD
        for layer, attention in enumerate(seen):
            own = f"model.layers.{layer}"
            x_TI = rms_norm(residual_TD, params[f"{own}.hidden_norm.weight"], eps)
            if layer == 0:
                embed_TD = rms_norm(embed_TD, params[f"{own}.input_layernorm.weight"], eps)
                x_TI = torch.cat([embed_TD, x_TI], dim=-1)
            attention.see(x_TI, position_T)
            residual_TD = residual_TD + attention(x_TI, position_T, is_causal=True)
            normed_TD = rms_norm(residual_TD, params[f"{own}.post_attention_layernorm.weight"], eps)
            residual_TD = residual_TD + swiglu(params, f"{own}.mlp", normed_TD)
        normed_TD = rms_norm(residual_TD, params["model.norm.weight"], eps)
        is_normed = getattr(self.config, "norm_output", False)
        return normed_TD, normed_TD if is_normed else residual_TD


class SglangEagle:
    """LlamaForCausalLMEagle, with the ids of a token map [K] if the command gives one."""

    def __init__(self, folder: Path, map_K: Tensor | None = None) -> None:
        self.config, self.map_K = read_config(folder), map_K
        if self.config.architectures != ["LlamaForCausalLMEagle"]:
            raise gate(f"architectures {self.config.architectures}", "LlamaForCausalLMEagle")
        self.params = Parameters(self._shapes())
        for name, tensor in read_tensors(folder).items():
            if "lm_head" not in name and name not in ("d2t", "t2d"):
                self.params.load(f"model.{name}", tensor)
        self.params.check(spared=["model.embed_tokens.weight"])

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        config = self.config
        width = config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (config.vocab_size, width),
            "model.fc.weight": (width, 2 * width),
            "model.fc.bias": (width,),
        }
        for layer in range(config.num_hidden_layers):
            own = f"model.layers.{layer}"
            shapes |= Attention.shapes(f"{own}.self_attn", config, width)
            shapes |= mlp_shapes(f"{own}.mlp", config)
            shapes[f"{own}.post_attention_layernorm.weight"] = (width,)
            if layer > 0:
                shapes[f"{own}.input_layernorm.weight"] = (width,)
        return shapes

    def __call__(self, probe: Probe) -> Tensor:
        """[S, V]."""
        layers = range(self.config.num_hidden_layers)
        seen = [Attention(self.params, f"model.layers.{i}.self_attn", self.config) for i in layers]
        ids_T, position_T = torch.tensor(probe.tokens[1:]), torch.arange(len(probe.tokens) - 1)
        state_TD, rows = probe.states[-1], list[Tensor]()
        size = len(probe.head_VD)
        ids_K = torch.arange(size) if self.map_K is None else self.map_K
        for token in (None, *probe.chain):
            if token is not None:
                ids_T, position_T = torch.tensor([token]), position_T[-1:] + 1
            state_TD = self._layers(probe.embedding_VD[ids_T], state_TD, position_T, seen)[-1:]
            rows.append(state_TD[0] @ probe.head_VD[ids_K].T)
        return scattered(torch.stack(rows), ids_K, size)

    def _layers(
        self, embed_TD: Tensor, state_TD: Tensor, position_T: Tensor, seen: list[Attention]
    ) -> Tensor:
        params, eps = self.params, self.config.rms_norm_eps
        both = torch.cat([embed_TD, state_TD], dim=-1)
        x_TD = both @ params["model.fc.weight"].T + params["model.fc.bias"]
        for layer, attention in enumerate(seen):
            own, read_TD = f"model.layers.{layer}", x_TD
            if layer > 0:
                read_TD = rms_norm(x_TD, params[f"{own}.input_layernorm.weight"], eps)
            attention.see(read_TD, position_T)
            x_TD = x_TD + attention(read_TD, position_T, is_causal=True)
            normed_TD = rms_norm(x_TD, params[f"{own}.post_attention_layernorm.weight"], eps)
            x_TD = x_TD + swiglu(params, f"{own}.mlp", normed_TD)
        return x_TD
