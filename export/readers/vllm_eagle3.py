"""What vLLM 0.33.0 makes of a folder in the speculators format, for `eagle3` and `peagle`.

Mirrors, by behaviour, transformers_utils/configs/speculators/{base,algos}.py (which keys reach the
draft model, and what a missing one means), models/llama_eagle3.py and models/qwen3_eagle3.py (names
and shapes, the forward pass, `d2t` as offsets), models/llama.py (hidden states are handed out in
the order of the layers) and v1/spec_decode/llm_base_proposer.py (what is fed back; the masked rows
of parallel drafting). vLLM refuses names that it does not know; a parameter that it does not find
it leaves as it was made, without a word: both are faults here.
Letters: D hidden width, I input width, K draft vocabulary, N nodes, T fed tokens, V target
vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.export.layouts.engines import gate
from specctl.export.readers.layers import attention, layer_shapes, onward, rms_norm
from specctl.export.readers.loading import Parameters, read_tensors, sizes_of
from specctl.export.readers.trial import Trial, chained, over_targets

ENGINE = "vLLM 0.33"
FORWARDED = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")
SWITCHES = {  # key -> what a missing one means; no other key of the top level arrives
    "eagle3": {
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
    },
    "peagle": {"norm_before_residual": False, "norm_before_fc": False},
}
EMBEDDING, MASK = "embed_tokens.weight", "mask_hidden"

Derive = Callable[[Mapping[str, Any]], Any]


def draft_config(config: Mapping[str, Any]) -> Any:
    """The draft model's config as vLLM derives it from config.json, by attributes. `kind` is the
    speculators_model_type, `length` the number of drafted tokens."""
    kind = config.get("speculators_model_type")
    if kind not in SWITCHES:
        raise gate(f"speculators_model_type {kind!r}", " or ".join(SWITCHES))
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict) or layer.get("model_type", "llama") not in ("llama", "qwen3"):
        raise gate("no llama or qwen3 layer", "a transformer_layer_config of one of them")
    heads = layer.get("num_attention_heads")
    plain = {"model_type": "llama", "num_key_value_heads": heads, "fc_norm": False}
    draft = {**plain, "norm_output": False, **layer, "kind": kind, "length": _length(config)}
    draft |= {key: config[key] for key in FORWARDED if config.get(key)}
    draft |= {key: config.get(key, default) for key, default in SWITCHES[kind].items()}
    if kind == "peagle":
        if "mask_token_id" not in config:
            raise gate("no mask_token_id", "the token whose embedding a masked row has")
        draft["pard_token"] = config["mask_token_id"]
    scaled = layer.get("rope_parameters") or layer.get("rope_scaling") or {}  # new or old spelling
    rope = {"rope_theta": 10000.0, **scaled}
    draft["rope_parameters"] = rope | {k: layer[k] for k in ("rope_theta",) if layer.get(k)}
    return SimpleNamespace(**draft)


def flat_config(body: Mapping[str, Any]) -> Any:
    """The same of a flat checkpoint, which vLLM reads by transformers' Llama class; switches that
    are missing are off, and of the layer ids only those at the top level count."""
    from transformers import LlamaConfig

    if body.get("architectures") != ["LlamaForCausalLMEagle3"] or body.get("model_type") != "llama":
        raise gate(f"architectures {body.get('architectures')}", "LlamaForCausalLMEagle3 of llama")
    config: Any = LlamaConfig(**body)
    nested = getattr(config, "eagle_config", None) or {}
    config.kind, config.length = "eagle3", None
    for key in SWITCHES["eagle3"]:
        setattr(config, key, getattr(config, key, False))
    config.norm_before_fc = nested.get("norm_before_fc", config.norm_before_fc)
    return config


def _length(config: Mapping[str, Any]) -> int:
    """By the first proposal method; the verifier's name must have a place, too."""
    try:
        body = config["speculators_config"]
        _ = body["verifier"]["name_or_path"]
        return int(body["proposal_methods"][0]["speculative_tokens"])
    except (KeyError, IndexError, TypeError) as error:
        raise gate(
            f"speculators_config without {error}", "a first proposal method and a verifier"
        ) from error


class VllmEagle3:
    """Eagle3LlamaForCausalLM or Eagle3Qwen3ForCausalLM, and the proposer that drives it beside a
    target with these embeddings [V, D]. `derive` makes the draft model's config of config.json."""

    def __init__(self, folder: Path, embedding_VD: Tensor, derive: Derive = draft_config) -> None:
        text = (folder / "config.json").read_text(encoding="utf-8")
        self.config = config = derive(json.loads(text))
        self.sizes, self.embedding_VD = sizes_of(config), embedding_VD
        self.is_qwen, self.is_parallel = config.model_type == "qwen3", config.kind == "peagle"
        self.rows = getattr(config, "draft_vocab_size", None) or config.vocab_size
        self.num_features = self._num_features()
        self.ids_K: Tensor | None = None
        tensors = read_tensors(folder)
        self.params = Parameters(self._shapes() | self._unused(tensors))
        for name, tensor in tensors.items():
            self._load(name, tensor)
        self.params.check()
        if self.ids_K is None and self.rows != len(embedding_VD):
            raise gate("no d2t, which vLLM takes for zeros", f"d2t of {self.rows} rows")

    def _num_features(self) -> int:
        """Hidden states that `fc` reads. The llama class does not look at the top-level list."""
        nested = getattr(self.config, "eagle_config", None) or {}
        ids = nested.get("eagle_aux_hidden_state_layer_ids")
        if self.is_qwen:
            ids = getattr(self.config, "eagle_aux_hidden_state_layer_ids", None) or ids
        number = getattr(self.config, "num_aux_hidden_states", None)
        return number if number is not None else len(ids) if ids else 3

    def _shapes(self) -> dict[str, list[int]]:
        config, width = self.config, self.sizes.width
        tapped = getattr(config, "target_hidden_size", width)
        taken = tapped * self.num_features
        shapes = {"fc.weight": [width, taken], "norm.weight": [width]}
        shapes |= {"lm_head.weight": [self.rows, width], "layers.0.hidden_norm.weight": [width]}
        for layer in range(config.num_hidden_layers):
            own = f"layers.{layer}"
            shapes |= layer_shapes(own, self.sizes, width * (1 if layer else 2), self.is_qwen)
            shapes[f"{own}.input_layernorm.weight"] = [width]
        if config.norm_before_fc:
            shapes["input_norm.weight"] = [taken]
        if config.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": [tapped] for i in range(self.num_features)}
        return shapes | ({MASK: [taken]} if self.is_parallel else {})

    def _unused(self, tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """What may be there: an embedding, and norms that later layers have and never use."""
        width, count = self.sizes.width, self.config.num_hidden_layers
        shapes = {f"layers.{i}.hidden_norm.weight": [width] for i in range(1, count)}
        shapes[EMBEDDING] = [self.config.vocab_size, width]
        return {name: shape for name, shape in shapes.items() if name in tensors}

    def _load(self, name: str, tensor: Tensor) -> None:
        """By name, without the prefix that vLLM itself puts in front."""
        if "t2d" in name:
            return
        if "d2t" in name and self.rows != len(self.embedding_VD):
            self.ids_K = torch.arange(self.rows) + tensor
            return
        name = name.replace("midlayer.", "layers.0.")
        self.params.load(name, tensor.view(-1) if name == MASK else tensor)

    # -- drafting -------------------------------------------------------------------------------

    @torch.no_grad()
    def drafted_logits(self, trial: Trial) -> Tensor:
        """[N + 1, V]: after the newest known token and after each drafted one."""
        state_TD = self._combined(self._captured(trial))
        said_NK = (
            self._at_once(trial, state_TD)
            if self.is_parallel
            else chained(self._step, trial, state_TD)
        )
        return over_targets(said_NK, self.ids_K, len(self.embedding_VD))

    def _captured(self, trial: Trial) -> Tensor:
        """[T, I]: the target's hidden states, in the order in which it meets them."""
        N = len(trial.states) - 1
        named = getattr(self.config, "eagle_aux_hidden_state_layer_ids", (2, N // 2, N - 3))
        taken = [trial.states[index] for index in range(N) if index in named]
        if len(taken) != self.num_features:
            raise gate(f"{len(taken)} hidden states captured", f"{self.num_features} read by fc")
        return torch.cat(taken, dim=-1)

    def _combined(self, taken_TI: Tensor) -> Tensor:
        params, eps = self.params, self.sizes.eps
        if self.config.norm_before_fc:
            taken_TI = rms_norm(taken_TI, params["input_norm.weight"], eps)
        if self.config.fc_norm:
            parts = enumerate(taken_TI.chunk(self.num_features, dim=-1))
            normed = [rms_norm(x, params[f"fc_norm.{i}.weight"], eps) for i, x in parts]
            taken_TI = torch.cat(normed, dim=-1)
        return F.linear(taken_TI, params["fc.weight"])

    def _at_once(self, trial: Trial, state_TD: Tensor) -> Tensor:
        """[N + 1, K]: the newest true row, and a masked row behind it for each further token."""
        num_masks = len(trial.drafted)
        masked_1D = self._combined(self.params[MASK][None])
        state_TD = torch.cat([state_TD, masked_1D.expand(num_masks, -1)])
        ids = [*trial.ids[1:], *[self.config.pard_token] * num_masks]
        return self._step(torch.tensor(ids), state_TD)[0][-1 - num_masks :]

    def check_window(self, window: int | None) -> None:
        """GateError for another window than that of the drafter: a trial's text is shorter than
        most, so its logits would not show it."""
        if (found := self.window(0)) != window:
            raise gate(f"{ENGINE} reads a window of {found}", f"the drafter's own, {window}")

    def window(self, layer: int) -> int | None:
        """Layers of the draft model count from 0, whatever number they have behind the target's."""
        kinds: list[str] = getattr(self.config, "layer_types", None) or []
        is_sliding = bool(kinds) and kinds[layer] == "sliding_attention"
        return getattr(self.config, "sliding_window", None) if is_sliding else None

    def _step(self, ids_T: Tensor, state_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Logits after every row, and what is fed back."""
        params, sizes = self.params, self.sizes
        embed_TD = params.get(EMBEDDING, self.embedding_VD)[ids_T]
        for layer in range(self.config.num_hidden_layers):
            own = f"layers.{layer}"
            first_D = params[f"{own}.input_layernorm.weight"]
            if layer == 0:
                normed_TD = rms_norm(state_TD, params[f"{own}.hidden_norm.weight"], sizes.eps)
                state_TD = normed_TD if self.config.norm_before_residual else state_TD
                x_TI = torch.cat([rms_norm(embed_TD, first_D, sizes.eps), normed_TD], dim=-1)
            else:
                x_TI = rms_norm(state_TD, first_D, sizes.eps)
            window = self.window(layer)
            attended_TD = attention(params, f"{own}.self_attn", x_TI, sizes, window=window)
            state_TD = onward(params, own, state_TD, attended_TD, sizes.eps)
        read_TD = rms_norm(state_TD, params["norm.weight"], sizes.eps)
        said_TK = F.linear(read_TD, params["lm_head.weight"])
        return said_TK, read_TD if self.config.norm_output else state_TD
