"""How SGLang fills a model: by name, and what fits no name is dropped without a word.

So a wrong prefix leaves random weights and no message. Here what no tensor fills is NaN, and
`check` refuses both the gap and the tensor that went nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from specctl.export.layouts.engines import gate
from specctl.export.package.manifest import WEIGHTS
from specctl.export.readers.layers import LayerSizes


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of every safetensors file, as engines look for them."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    if not found:
        raise gate("no weights", WEIGHTS)
    return found


def read_config(folder: Path, architecture: str) -> Any:
    """config.json by transformers' own class, as SGLang reads it: a key that is missing has that
    class's default."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if config.architectures != [architecture]:
        raise gate(f"architectures {config.architectures}", architecture)
    return config


def refuse_bias(config: Any) -> None:
    """Of these keys SGLang's Llama makes biases on every attention, which no drafter of ours has
    and nothing would fill."""
    named = [key for key in ("attention_bias", "bias") if getattr(config, key, False)]
    if named:
        raise gate(f"{named[0]}: true", f"{named[0]}: false, or left out")


def sizes_of(config: Any) -> LayerSizes:
    """The sizes of a layer; `rope_parameters` is what transformers makes of either spelling."""
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "llama3"):
        raise gate(f"rope_type {kind}", "default or llama3: drafters scale no other positions")
    heads, width = config.num_attention_heads, config.hidden_size
    return LayerSizes(
        width,
        heads,
        config.num_key_value_heads,
        getattr(config, "head_dim", None) or width // heads,
        config.intermediate_size,
        config.rms_norm_eps,
        float(rope["rope_theta"]),
        rope if kind == "llama3" else None,
    )


class Parameters(Mapping[str, Tensor]):
    """An engine's parameters by name, float64."""

    def __init__(self, shapes: Mapping[str, Iterable[int]]) -> None:
        self._values = {
            name: torch.full(tuple(shape), torch.nan, dtype=torch.float64)
            for name, shape in shapes.items()
        }
        self._unfilled, self._dropped = set(shapes), list[str]()

    def __getitem__(self, name: str) -> Tensor:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def load(self, name: str, tensor: Tensor) -> None:
        """By name; a tensor of another shape is the one fault that stops such a loader."""
        if name not in self._values:
            self._dropped.append(name)
            return
        found, expected = tuple(tensor.shape), tuple(self._values[name].shape)
        if found != expected:
            raise gate(f"{name} {found}", f"{name} {expected}")
        self._values[name] = tensor.double()
        self._unfilled.discard(name)

    def check(self) -> None:
        """Refuse what the engine would not notice."""
        went = f"; {self._dropped[0]} goes nowhere" if self._dropped else ""
        if self._unfilled:
            first = f"{len(self._unfilled)} parameters get no tensor, {min(self._unfilled)} first"
            raise gate(first + went, "a tensor for every parameter of the engine's module")
        if went:
            raise gate(went.removeprefix("; "), "no tensor that the engine drops")
