"""An engine's own model files on a CPU, without its kernels.

`engine(root, real, parts)` lets the modules named in `real` be imported from an unpacked wheel;
whatever else they import is made up: layers come from `parts`, everything else is `Anything`. So
the engine's names, loaders and forward passes run as they are written, over plain torch layers.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Attributes(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Anything(metaclass=_Attributes):
    """Stands for what is imported and not used: can be called, subclassed, indexed, or'ed; as a
    decorator it changes nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        del kwargs
        return args[0] if len(args) == 1 and callable(args[0]) else Anything()

    def __getitem__(self, key: Any) -> Any:
        return Anything()

    def __class_getitem__(cls, key: Any) -> Any:
        return cls

    def __or__(self, other: Any) -> Any:
        return self

    def __bool__(self) -> bool:
        return False


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root: Path, real: set[str], parts: Mapping[str, Mapping[str, Any]]) -> None:
        self.root, self.real, self.parts = root, real, parts
        self.tops = {name.split(".")[0] for name in real}

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        del path, target
        if name.split(".")[0] in self.tops:
            if name in self.real:
                file = self.root / (name.replace(".", "/") + ".py")
                return importlib.util.spec_from_file_location(name, file)
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        given = self.parts.get(spec.name, {})
        module.__dict__.update(given)

        def made_up(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (Anything,), {})

        module.__getattr__ = made_up  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        del module


@contextmanager
def engine(
    root: Path, real: set[str], parts: Mapping[str, Mapping[str, Any]], absent: tuple[str, ...] = ()
) -> Iterator[None]:
    """`absent`: packages besides the engine that are made up as a whole."""
    finder = _Finder(root, real, parts)
    finder.tops |= set(absent)
    before = set(sys.modules)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.split(".")[0] in finder.tops:
                del sys.modules[name]


def copied(parameter: Tensor, loaded: Tensor) -> None:
    assert parameter.shape == loaded.shape, (parameter.shape, loaded.shape)
    parameter.data.copy_(loaded)


class Norm(nn.Module):
    """RMS norm, and the addition that engines fuse with it."""

    def __init__(self, width: int, eps: float = 1e-6, **kwargs: Any) -> None:
        del kwargs
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), torch.nan))
        self.variance_epsilon = eps

    def fuse_input_quant(self, *args: Any) -> None:
        del args

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        x = x if residual is None else x + residual
        out = F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)
        return out if residual is None else (out, x)


class Linear(nn.Module):
    """Any of the engines' linear layers; `sizes` are the output rows of its shards."""

    def __init__(self, width: int, sizes: Mapping[Any, int], bias: bool) -> None:
        super().__init__()
        self.sizes = dict(sizes)
        rows = sum(self.sizes.values())
        self.weight = nn.Parameter(torch.full((rows, width), torch.nan))
        self.weight.weight_loader = self._load  # type: ignore[attr-defined]
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.full((rows,), torch.nan))
            self.bias.weight_loader = self._load  # type: ignore[attr-defined]

    def _load(self, parameter: Tensor, loaded: Tensor, shard: Any = None) -> None:
        shard = getattr(loaded, "shard_id", None) if shard is None else shard  # as vLLM tells it
        if shard is None:
            return copied(parameter, loaded)
        start = 0
        for name, size in self.sizes.items():
            if name == shard:
                return copied(parameter[start : start + size], loaded)
            start += size
        raise KeyError(shard)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight, self.bias), None


class Qkv(Linear):
    def __init__(
        self, hidden_size: int, head_size: int, total_num_heads: int, total_num_kv_heads: int,
        bias: bool = True, **kwargs: Any,
    ) -> None:  # fmt: skip
        del kwargs
        kv = total_num_kv_heads * head_size
        super().__init__(hidden_size, {"q": total_num_heads * head_size, "k": kv, "v": kv}, bias)


class Merged(Linear):
    def __init__(self, width: int, sizes: list[int], bias: bool = True, **kwargs: Any) -> None:
        del kwargs
        super().__init__(width, dict(enumerate(sizes)), bias)


class Single(Linear):
    def __init__(self, width: int, rows: int, bias: bool = True, **kwargs: Any) -> None:
        del kwargs
        super().__init__(width, {0: rows}, bias)


class Rows(nn.Module):
    """An embedding or an LM head."""

    def __init__(self, rows: int, width: int, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        super().__init__()
        self.weight = nn.Parameter(torch.full((rows, width), torch.nan))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class SiluAndMul(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return F.silu(first) * second


class Rope(nn.Module):
    """Half-rotated ("neox") heads by position."""

    def __init__(self, head_dim: int, base: float) -> None:
        super().__init__()
        self.head_dim, self.base = head_dim, base

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self._turned(positions, query), self._turned(positions, key)

    def _turned(self, positions: Tensor, x: Tensor) -> Tensor:
        half = self.head_dim // 2
        heads = x.unflatten(-1, (-1, self.head_dim))  # type: ignore[no-untyped-call]
        rate = self.base ** (-torch.arange(half, dtype=x.dtype) / half)
        angle = (positions.to(x.dtype)[:, None] * rate)[:, None]
        first, second = heads[..., :half], heads[..., half:]
        cos, sin = angle.cos(), angle.sin()
        out = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return out.flatten(-2)


class Attention(nn.Module):
    """Rows read what `batch.seen[layer_id]` holds and each other; with a window (SGLang's, which
    leaves the row itself out) the rows before it in it, and those behind it."""

    def __init__(
        self, num_heads: int, head_dim: int, scaling: float, num_kv_heads: int, layer_id: int,
        attn_type: Any = "decoder", sliding_window_size: int = -1, **kwargs: Any,
    ) -> None:  # fmt: skip
        del num_heads, kwargs
        super().__init__()
        self.head_dim, self.scaling, self.groups = head_dim, scaling, num_kv_heads
        self.layer_id, self.is_causal = layer_id, attn_type != "encoder"
        self.window = sliding_window_size

    def forward(self, query: Tensor, key: Tensor, value: Tensor, batch: Any) -> Tensor:
        seen = batch.seen.setdefault(self.layer_id, [])
        seen.append((key, value))
        keys, values = (torch.cat(parts) for parts in zip(*seen, strict=True))
        q, k, v = (
            x.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)  # type: ignore[no-untyped-call]
            for x in (query, keys, values)
        )
        share = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)
        score = q @ k.transpose(1, 2) * self.scaling
        T, L = score.shape[1:]
        apart_TL = torch.arange(L - T, L)[:, None] - torch.arange(L)
        if self.is_causal:
            score = score.masked_fill(apart_TL < 0, -torch.inf)
        if self.window >= 0:
            score = score.masked_fill(apart_TL > self.window, -torch.inf)
        return (score.softmax(-1) @ v).transpose(0, 1).flatten(1)
