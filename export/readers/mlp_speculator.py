"""Reference readers of MLP speculator folders.

`VllmMlp`: vLLM 0.9.2, the last line of versions that serves them (models/mlp_speculator.py,
transformers_utils/configs/mlp_speculator.py): the prefix `speculator.` is cut, unknown names are
dropped, tied weights stand at index 0 but for the projections 0 and 1, `inner_dim` 0 means
`emb_dim`, `scale_input` norms the state without weights and divides it by sqrt(2).
`TgiMlp`: text-generation-inference 2 and 3 (layers/mlp.py): the prefix is demanded, `inner_dim`
is taken as it stands, there is no `scale_input`, and both terms are scaled where vLLM scales one.
Letters: D hidden width, N nodes, V target vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.export.layouts.engines import gate
from specctl.export.package.files import read_json
from specctl.export.readers.loading import Parameters, read_tensors

EPS = 1e-6


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


class VllmMlp:
    """vLLM 0.9.2."""

    name = "vLLM 0.9"

    def __init__(self, folder: Path) -> None:
        config = read_json(folder / "config.json")
        if config.get("model_type") != "mlp_speculator":
            raise gate(f"model_type {config.get('model_type')}", "mlp_speculator")
        if config.get("architectures") != ["MLPSpeculatorPreTrainedModel"]:
            raise gate(f"{config.get('architectures')}", "MLPSpeculatorPreTrainedModel")
        self.num_heads = int(config.get("n_predict", 3))
        if len(config.get("top_k_tokens_per_head", (5, 4, 3))) != self.num_heads:
            raise gate("top_k_tokens_per_head of another length", "one number per head")
        width, size = int(config.get("emb_dim", 4096)), int(config.get("vocab_size", 32000))
        self.inner = int(config.get("inner_dim", 0)) or width
        self.is_tied = bool(config.get("tie_weights", False))
        self.is_scaled = bool(config.get("scale_input", False))
        if self.is_tied and self.num_heads < 2:
            raise gate("one head with tie_weights", "untied weights")
        self.params = Parameters(self._shapes(width, size))
        for name, tensor in read_tensors(folder).items():
            self.params.load(name.replace("speculator.", ""), tensor)
        self.params.check()

    def _shapes(self, width: int, size: int) -> dict[str, tuple[int, ...]]:
        count, inner = 1 if self.is_tied else self.num_heads, self.inner
        shapes: dict[str, tuple[int, ...]] = {}
        for i in range(count):
            shapes[f"emb.{i}.weight"] = shapes[f"head.{i}.weight"] = (size, inner)
            shapes[f"ln.{i}.weight"] = shapes[f"ln.{i}.bias"] = (inner,)
        for i in range(2 if self.is_tied else self.num_heads):
            shapes[f"proj.{i}.weight"] = (inner, inner if i else width)
        return shapes

    def logits(self, state_D: Tensor, tokens: Sequence[int]) -> Tensor:
        """[N, V]: after each of the tokens, the first of which the target has emitted."""
        keeps = 0.5 ** (0.5 / self.num_heads)
        alpha = math.sqrt((1 - keeps**2) * self.inner / 2) / keeps
        state = _unit(state_D) / math.sqrt(2) if self.is_scaled else state_D
        rows = []
        for i, token in enumerate(tokens):
            at, which = (0, min(i, 1)) if self.is_tied else (i, i)
            state = self.params[f"proj.{which}.weight"] @ state
            state = state + alpha * self.params[f"emb.{at}.weight"][token]
            normed = self.params[f"ln.{at}.weight"] * _unit(state) + self.params[f"ln.{at}.bias"]
            state = F.gelu(normed)
            rows.append(self.params[f"head.{at}.weight"] @ state)
        return torch.stack(rows)


class TgiMlp:
    """text-generation-inference."""

    name = "text-generation-inference"

    def __init__(self, folder: Path) -> None:
        config = read_json(folder / "config.json")
        for key in ("architectures", "base_model_name_or_path", "n_predict", "inner_dim"):
            if key not in config:
                raise gate(f"no {key}", "a key that the engine demands")
        if config["architectures"][0] != "MLPSpeculatorPreTrainedModel":
            raise gate(f"{config['architectures']}", "MLPSpeculatorPreTrainedModel")
        self.num_heads, self.inner = int(config["n_predict"]), int(config["inner_dim"])
        self.is_tied = bool(config.get("tie_weights", False))
        self.tensors = read_tensors(folder)

    def _tensor(self, name: str) -> Tensor:
        if f"speculator.{name}" not in self.tensors:
            raise gate(f"no tensor speculator.{name}", "a tensor that the engine demands")
        return self.tensors[f"speculator.{name}"].double()

    def logits(self, state_D: Tensor, tokens: Sequence[int]) -> Tensor:
        """[N, V]; the engine takes their softmax, and of it the first choice."""
        keeps = 0.5 ** (0.5 / self.num_heads)
        gains = math.sqrt(1 - keeps**2) * math.sqrt(self.inner / 2)
        state, rows = state_D, []
        for i, token in enumerate(tokens):
            at, which = (0, min(i, 1)) if self.is_tied else (i, i)
            state = keeps * (self._tensor(f"proj.{which}.weight") @ state)
            state = state + gains * self._tensor(f"emb.{at}.weight")[token]
            normed = self._tensor(f"ln.{at}.weight") * _unit(state)
            state = F.gelu(normed + self._tensor(f"ln.{at}.bias"))
            rows.append(self._tensor(f"head.{at}.weight") @ state)
        return torch.stack(rows)
