"""Cut a Llama smaller: whole layers, key/value groups and query heads, MLP neurons, channels.

Nothing is computed here that was not in the weights: rows and columns of the kept indices are
copied. Cutting what contributes nothing (zero columns of o_proj and down_proj, channels that are
always zero) therefore leaves the function as it was. RMSNorm(x) over d of D channels that hold the
share e of |x|^2 divides by sqrt(e |x|^2 / d) instead of sqrt(|x|^2 / D), so the norm's weight is
multiplied by sqrt(e D / d) (epsilon, far smaller than |x|^2 / D, is left alone).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specctl.models.llama.fast_llama import FastLlama
from specctl.models.llama.llama import LlamaModel, LlamaShape

_READERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_WRITERS = ("o_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Inside:
    """What stays inside one layer: query heads in the order of their groups, the key/value heads
    of those groups, neurons; all by number, None keeps all."""

    heads: tuple[int, ...] | None = None
    kv_heads: tuple[int, ...] | None = None
    neurons: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Keep:
    """What stays of a model. `inside` has an entry per *old* layer that is cut inside; `energy` is
    the share of |x|^2 that the kept channels hold in front of a norm, by the norm's name."""

    layers: tuple[int, ...]
    channels: tuple[int, ...] | None = None
    inside: Mapping[int, Inside] = field(default_factory=dict)
    energy: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sliced:
    """A smaller model: its shape and its tensors, copies under their new names."""

    shape: LlamaShape
    tensors: dict[str, Tensor]


def sliced(shape: LlamaShape, tensors: Mapping[str, Tensor], keep: Keep) -> Sliced:
    """The model that is left of `tensors`; layers are numbered anew."""
    renumbered = {
        f"model.layers.{old}.": f"model.layers.{new}." for new, old in enumerate(keep.layers)
    }
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix = ".".join(name.split(".")[:3]) + "."
        if prefix.startswith("model.layers."):
            if prefix not in renumbered:
                continue
            inside = keep.inside.get(int(prefix.split(".")[2]), Inside())
            small = _inner(name, tensor, inside, shape.head_dim)
            found[renumbered[prefix] + name.removeprefix(prefix)] = _outer(name, small, keep)
        else:
            found[name] = _outer(name, tensor, keep)
    return Sliced(_shape_of(shape, keep), {n: t.clone() for n, t in found.items()})


def with_layers(lm: FastLlama, layers: Sequence[int]) -> FastLlama:
    """The model with only these layers, over the very parameters of `lm`."""
    shape, rotary = replace(lm.module.shape, num_layers=len(layers)), lm.module.rotary
    with torch.device("meta"):
        small = LlamaModel(shape, rotary.inv_freq, rotary.scale)
    theirs = dict(lm.module.named_parameters())
    for name, _ in list(small.named_parameters()):
        owner, leaf = name.rsplit(".", 1)
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str(layers[int(parts[2])])
        setattr(small.get_submodule(owner), leaf, theirs[".".join(parts)])
    return FastLlama(small.eval(), replace(lm.spec, num_layers=len(layers)))


def _inner(name: str, tensor: Tensor, inside: Inside, head_dim: int) -> Tensor:
    """Rows or columns of the kept heads and neurons."""
    part = name.split(".")[-2]
    kept = {
        "q_proj": (inside.heads, head_dim, 0),
        "k_proj": (inside.kv_heads, head_dim, 0),
        "v_proj": (inside.kv_heads, head_dim, 0),
        "o_proj": (inside.heads, head_dim, 1),
        "gate_proj": (inside.neurons, 1, 0),
        "up_proj": (inside.neurons, 1, 0),
        "down_proj": (inside.neurons, 1, 1),
    }
    if part not in kept or (name.endswith(".bias") and part in _WRITERS):
        return tensor
    units, size, axis = kept[part]
    return tensor if units is None else _select(tensor, units, size, axis)


def _outer(name: str, tensor: Tensor, keep: Keep) -> Tensor:
    """Rows, columns or entries of the kept channels; norms are corrected for what is gone."""
    if keep.channels is None:
        return tensor
    part = name.split(".")[-2]
    if part in ("q_norm", "k_norm"):
        return tensor
    if part in _WRITERS:
        return _select(tensor, keep.channels, 1, 0)
    if part in _READERS:
        return tensor if name.endswith(".bias") else _select(tensor, keep.channels, 1, 1)
    grown = keep.energy.get(name, 1.0) * len(tensor) / len(keep.channels)
    return _select(tensor, keep.channels, 1, 0) * math.sqrt(grown)


def _select(tensor: Tensor, units: tuple[int, ...], size: int, axis: int) -> Tensor:
    """Slices of `size` rows (axis 0) or columns (axis 1), one per unit."""
    at = torch.tensor(units, device=tensor.device)[:, None] * size
    index = (at + torch.arange(size, device=tensor.device)).flatten()
    return tensor.index_select(axis, index)


def _shape_of(shape: LlamaShape, keep: Keep) -> LlamaShape:
    insides = [keep.inside.get(layer, Inside()) for layer in keep.layers]

    def count(name: str, whole: int) -> int:
        kept = [getattr(inside, name) for inside in insides]
        sizes = {whole if units is None else len(units) for units in kept}
        assert len(sizes) == 1, f"layers keep different numbers of {name}: {sorted(sizes)}"
        return sizes.pop()

    return replace(
        shape,
        num_layers=len(keep.layers),
        hidden_size=shape.hidden_size if keep.channels is None else len(keep.channels),
        num_heads=count("heads", shape.num_heads),
        num_kv_heads=count("kv_heads", shape.num_kv_heads),
        intermediate_size=count("neurons", shape.intermediate_size),
    )
