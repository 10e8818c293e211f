"""What reference readers share: parameters as an engine's loader fills them, and the arithmetic of
a decoder layer in float64, written as plainly as it can be.

Letters: T rows, L rows seen, H query heads, K key/value heads, E width of a head, D width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from specctl.export.engines import gate
from specctl.export.manifest import WEIGHTS

Shapes = Mapping[str, tuple[int, ...]]


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of every safetensors file, as engines read them."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    if not found:
        raise gate("no weights", WEIGHTS)
    return found


def read_config(folder: Path) -> Any:
    """config.json by transformers' own class, as SGLang and vLLM read it: a key that is missing has
    that class's default."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True)


class Parameters:
    """An engine's parameters by name. What no tensor fills is NaN, as an engine leaves memory as it
    was; what fits no parameter is remembered in `dropped`."""

    def __init__(self, shapes: Shapes) -> None:
        self._values = {
            name: torch.full(shape, torch.nan, dtype=torch.float64)
            for name, shape in shapes.items()
        }
        self._unfilled, self.dropped = set(shapes), list[str]()

    def __getitem__(self, name: str) -> Tensor:
        return self._values[name]

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def load(self, name: str, tensor: Tensor) -> None:
        """As most loaders do: by name, of exactly that shape."""
        if name not in self._values:
            self.dropped.append(name)
            return
        if tensor.shape != self._values[name].shape:
            found, expected = tuple(tensor.shape), tuple(self._values[name].shape)
            raise gate(f"{name} {found}", f"{name} {expected}")
        self._values[name] = tensor.double()
        self._unfilled.discard(name)

    def check(self, spared: Iterable[str] = ()) -> None:
        """Refuse a folder that left parameters unfilled, or whose tensors went nowhere; `spared`
        may be left, as the engine takes them from the target."""
        unfilled = sorted(self._unfilled - set(spared))
        if unfilled:
            raise gate(
                f"{len(unfilled)} parameters get no tensor, {unfilled[0]} first"
                + (f"; {self.dropped[0]} goes nowhere" if self.dropped else ""),
                "a tensor for every parameter of the engine's module",
            )
        if self.dropped:
            raise gate(f"{self.dropped[0]} goes nowhere", "no tensor that the engine drops")


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return weight_D * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def swiglu(params: Parameters, prefix: str, x_TD: Tensor) -> Tensor:
    gate_TI = F.silu(x_TD @ params[f"{prefix}.gate_proj.weight"].T)
    hidden_TI = gate_TI * (x_TD @ params[f"{prefix}.up_proj.weight"].T)
    return hidden_TI @ params[f"{prefix}.down_proj.weight"].T


def mlp_shapes(prefix: str, config: Any) -> dict[str, tuple[int, ...]]:
    width, inner = config.hidden_size, config.intermediate_size
    return {
        f"{prefix}.gate_proj.weight": (inner, width),
        f"{prefix}.up_proj.weight": (inner, width),
        f"{prefix}.down_proj.weight": (width, inner),
    }


@dataclass(slots=True)
class Attention:
    """One attention with what it has seen. One writer: the reader that feeds it. `norm_eps`: the
    heads of queries and keys are normed (Qwen3)."""

    params: Parameters
    prefix: str
    config: Any
    norm_eps: float | None = None
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    @staticmethod
    def shapes(prefix: str, config: Any, input_width: int, qk_norm: bool = False) -> dict[str, Any]:
        E, width = config.head_dim, config.hidden_size
        H, K = config.num_attention_heads, config.num_key_value_heads
        found: dict[str, Any] = {
            f"{prefix}.q_proj.weight": (H * E, input_width),
            f"{prefix}.k_proj.weight": (K * E, input_width),
            f"{prefix}.v_proj.weight": (K * E, input_width),
            f"{prefix}.o_proj.weight": (width, H * E),
        }
        if qk_norm:
            found |= {f"{prefix}.q_norm.weight": (E,), f"{prefix}.k_norm.weight": (E,)}
        return found

    def see(self, x_TI: Tensor, position_T: Tensor) -> None:
        """Keep keys and values of these rows."""
        self.keys.append(self._heads("k", x_TI, position_T))
        value_TKE = self._projected("v", x_TI)
        self.values.append(self._projected("v", x_TI))

    def forget(self, rows: int) -> None:
        """The last call of `see` again gone."""
        assert self.keys[-1].shape[0] == rows
        del self.keys[-1], self.values[-1]

    def __call__(self, x_TI: Tensor, position_T: Tensor, is_causal: bool) -> Tensor:
        """[T, D]: these rows, already seen, read all that was seen: up to themselves if causal."""
        query_THE = self._heads("q", x_TI, position_T)
        key_LKE, value_LKE = torch.cat(self.keys), torch.cat(self.values)
        group = query_THE.shape[1] // key_LKE.shape[1]
        key_LHE = key_LKE.repeat_interleave(group, dim=1)
        value_LHE = value_LKE.repeat_interleave(group, dim=1)
        score_HTL = torch.einsum("the,lhe->htl", query_THE, key_LHE) / query_THE.shape[-1] ** 0.5
        if is_causal:
            T, L = score_HTL.shape[1:]
            later_TL = torch.arange(L) > torch.arange(L - T, L)[:, None]
            score_HTL = score_HTL.masked_fill(later_TL, -torch.inf)
        mixed_THE = torch.einsum("htl,lhe->the", score_HTL.softmax(-1), value_LHE)
        return mixed_THE.flatten(1) @ self.params[f"{self.prefix}.o_proj.weight"].T

    def _projected(self, which: str, x_TI: Tensor) -> Tensor:
        out = x_TI @ self.params[f"{self.prefix}.{which}_proj.weight"].T
        return out.unflatten(-1, (-1, self.config.head_dim))

    def _heads(self, which: str, x_TI: Tensor, position_T: Tensor) -> Tensor:
        head_THE = self._projected(which, x_TI)
        if self.norm_eps is not None:
            weight_E = self.params[f"{self.prefix}.{which}_norm.weight"]
            head_THE = rms_norm(head_THE, weight_E, self.norm_eps)
        return rotated(head_THE, position_T, rope_theta(self.config))


def rope_theta(config: Any) -> float:
    """The base of a plain rope by transformers' field; a scaled one no reader here computes."""
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default":
        raise gate(f"rope of type {rope['rope_type']}", "the drafter's own plain rope")
    return float(rope["rope_theta"])


def rotated(x_THE: Tensor, position_T: Tensor, theta: float) -> Tensor:
    """Halves of a head rotated against each other, by transformers' convention."""
    half = x_THE.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle_T1E = (position_T[:, None] * frequency)[:, None]
    first, second = x_THE[..., :half], x_THE[..., half:]
    cos, sin = angle_T1E.cos(), angle_T1E.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
