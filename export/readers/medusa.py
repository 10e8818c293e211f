"""Reference readers of Medusa folders.

`VllmMedusa`: vLLM 0.32 (transformers_utils/configs/medusa.py, models/medusa.py). Every config key
with "num" and "heads" is the number of heads, with "num" and "layers" of layers; biases exist only
with `medusa_fc_bias`; FasterDecoding's numbered names are translated; `token_map` holds ids and is
read only when `truncated_vocab_size` is smaller than the vocabulary; unknown names are dropped; own
heads have one row per target token.
`TgiMedusa`: text-generation-inference 2 and 3 (layers/speculative.py, layers/medusa.py). A folder
that names `architectures` gets no Medusa at all; numbered names from medusa_lm_head.safetensors,
`medusa_num_layers` blocks with biases, then an LM head; what else is in the file is not looked at.
Letters: D hidden width, P path (one per head), V target vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from specctl.export.layouts.engines import gate
from specctl.export.package.files import read_json
from specctl.export.readers.loading import Parameters, read_tensors

_DEFAULTS = {"hidden_size": 4096, "vocab_size": 32001, "num_heads": 5, "num_hidden_layers": 1}


def _blocks(params: Parameters, names: list[str], state_D: Tensor) -> Tensor:
    for name in names:
        bias = params.get(f"{name}.bias")
        state_D = state_D + F.silu(F.linear(state_D, params[f"{name}.weight"], bias))
    return state_D


class VllmMedusa:
    """vLLM 0.32."""

    name = "vLLM 0.32"

    def __init__(self, folder: Path) -> None:
        config = _folded(read_json(folder / "config.json"))
        if config.get("model_type") != "medusa":
            raise gate(f"model_type {config.get('model_type')}", "medusa")
        self.num_heads, self.num_layers = config["num_heads"], config["num_hidden_layers"]
        self.vocab_size, width = config["vocab_size"], config["hidden_size"]
        small = config.get("truncated_vocab_size")
        self.spoken = self.vocab_size if small is None else small
        self.is_shared = bool(config.get("original_lm_head", False))
        self.scale = float(config.get("logit_scale", 1.0))
        heads = {"lm_head.weight": (self.spoken, width)} if self.is_shared else {}
        for i in range(self.num_heads):
            if not self.is_shared:
                heads[f"lm_heads.{i}.weight"] = (self.vocab_size, width)
        shapes: dict[str, tuple[int, ...]] = dict(heads)
        for name in self._block_names():
            shapes[f"{name}.weight"] = (width, width)
            if config.get("medusa_fc_bias", False):
                shapes[f"{name}.bias"] = (width,)
        self.params = Parameters(shapes)
        self.token_map: Tensor | None = None
        self._load(folder)

    def _block_names(self, heads: range | None = None) -> list[str]:
        heads = range(self.num_heads) if heads is None else heads
        return [f"blocks.{i}.layers.{j}" for i in heads for j in range(self.num_layers)]

    def _load(self, folder: Path) -> None:
        for name, tensor in read_tensors(folder).items():
            name = _translated(name.replace("medusa_heads.", ""))
            if name == "token_map":
                if self.spoken < self.vocab_size:
                    self.token_map = tensor.long()
                continue
            if self.is_shared and name == "lm_heads.0.weight":
                name = "lm_head.weight"
            self.params.load(name, tensor)
        self.params.check()
        if (self.spoken == self.vocab_size) != (self.token_map is None):
            raise gate("token_map and truncated_vocab_size do not go together", "both or none")

    def logits(self, state_D: Tensor) -> Tensor:
        """[P, V] float64; the first choice of each head is what is drafted."""
        rows = []
        for i in range(self.num_heads):
            ready_D = _blocks(self.params, self._block_names(range(i, i + 1)), state_D)
            name = "lm_head.weight" if self.is_shared else f"lm_heads.{i}.weight"
            row = self.scale * (self.params[name] @ ready_D)[: self.spoken]
            if self.token_map is not None:
                whole_V = row.new_full((self.vocab_size,), -torch.inf)
                whole_V[self.token_map] = row
                row = whole_V
            rows.append(row)
        return torch.stack(rows)


def _folded(config: dict[str, Any]) -> dict[str, Any]:
    for key in list(config):
        if "num" in key and "heads" in key:
            config["num_heads"] = config.pop(key)
        elif "num" in key and "layers" in key:
            config["num_hidden_layers"] = config.pop(key)
    return {**_DEFAULTS, **config}


def _translated(name: str) -> str:
    head, _, rest = name.partition(".")
    part, _, leaf = rest.partition(".")
    if not (head.isdigit() and part.isdigit() and leaf):
        return name
    if "linear" in leaf.split("."):
        return f"blocks.{head}.layers.{part}.{leaf.split('linear.')[-1]}"
    return f"lm_heads.{head}.{leaf}"


class TgiMedusa:
    """text-generation-inference."""

    name = "text-generation-inference"

    def __init__(self, folder: Path) -> None:
        config = read_json(folder / "config.json")
        if "architectures" in config:
            raise gate("architectures in config.json", "none, or the heads are not even looked for")
        for key in ("medusa_num_heads", "medusa_num_layers", "base_model_name_or_path"):
            if key not in config:
                raise gate(f"no {key}", "a key that the engine demands")
        self.num_heads = int(config["medusa_num_heads"])
        self.num_layers = int(config["medusa_num_layers"])
        self.tensors = load_file(folder / "medusa_lm_head.safetensors")

    def _tensor(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise gate(f"no tensor {name}", "a tensor that the engine demands")
        tensor: Tensor = self.tensors[name]
        return tensor.double()

    def logits(self, state_D: Tensor) -> Tensor:
        """[P, V] float64."""
        rows = []
        for i in range(self.num_heads):
            ready_D = state_D
            for j in range(self.num_layers):
                weight = self._tensor(f"{i}.{j}.linear.weight")
                bias = self._tensor(f"{i}.{j}.linear.bias")
                ready_D = ready_D + F.silu(weight @ ready_D + bias)
            rows.append(self._tensor(f"{i}.{self.num_layers}.weight") @ ready_D)
        return torch.stack(rows)
