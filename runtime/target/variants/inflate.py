"""Function-preserving inflation: a small Llama blown up to the size, and the cost, of a large one.

The large model computes the same function, so a drafter trained for the small target drafts for it
with the same acceptance, and speed can be measured at a realistic cost without a download. How:

- the residual is padded with zero channels; RMSNorm over H instead of h channels is corrected by
  weight * sqrt(h / H) and eps * h / H;
- whole groups of heads are appended whose o_proj columns are zero;
- MLP rows are appended whose down_proj columns are zero;
- layers are inserted whose o_proj and down_proj are zero: identities, spread between the real ones.

Everything else is random, not zero, because zeros can run faster. Only float rounding differs; a
width of h times a power of four keeps the norm weights exact in every dtype.
Letters: B rows, T fed tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.errors import IncompatibleError, SpecctlError, nearest
from specctl.core.forward.row_additions import RowAdditions, linear_sizes
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.kv_cache import KVShape, SlotKV
from specctl.core.language_model import (
    Borrowed,
    ChainRoot,
    Feed,
    LanguageModel,
    LmOut,
    WholeChain,
)
from specctl.models.llama.fast_llama import FastLlama, LlamaModel, LlamaShape
from specctl.runtime.target.placement.device import check_memory

ROUND = 32  # rows of an MLP come in multiples of this


@dataclass(frozen=True, slots=True)
class Size:
    """A nominal size: parameters, width and depth; the MLP takes up the rest."""

    parameters: int
    hidden: int
    layers: int


SIZES = {
    "100m": Size(100_000_000, 1024, 10),
    "300m": Size(300_000_000, 1024, 24),
    "1b": Size(1_000_000_000, 4096, 10),
    "8b": Size(8_000_000_000, 4096, 32),
}


class InflatedLM(FastLlama):
    """The large model, seen in the numbering and width of the small one: `spec`, taps, borrowed
    pieces and the layers that it lends are the base's, so every drafter of the base serves
    unchanged. `tap_map` gives the hidden_states index of the large model for each tap of the base.
    A layer of the base stands for the large layer that holds it and the identities behind that one,
    up to the next real layer; only the cache is of the large shape."""

    def __init__(self, module: LlamaModel, base: FastLlama, real_layers: tuple[int, ...]) -> None:
        super().__init__(module, base.spec)
        shape = module.shape
        self.real_layers = real_layers
        self.tap_map = dict(enumerate((*real_layers, shape.num_layers)))
        self._large_spec = replace(
            base.spec,
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            intermediate_size=shape.intermediate_size,
        )
        weight = module.head_weight
        borrowed = base.borrowed()
        self._borrowed = Borrowed(
            borrowed.embedding_VD.to(weight),
            borrowed.head_VD.to(weight),
            borrowed.embed_scale,
            lm=self,
        )

    @property
    def large(self) -> FastLlama:
        """The same model in its own numbering and width."""
        lm = FastLlama(self.module, self._large_spec)
        lm.bits, lm.int4, lm.steps = self.bits, self.int4, self.steps
        return lm

    def run(self, feed: Feed, kv: SlotKV | None) -> LmOut:
        given, parts = feed.residual_BTD, feed.parts
        large = replace(
            feed,
            taps=tuple(self.tap_map[k] for k in feed.taps),
            parts=parts and self._large_parts(parts),
            residual_BTD=None if given is None else self._widened(given),
            added=tuple(map(self._placed, feed.added)),
        )
        out = self.large.run(large, kv)
        width = self.spec.hidden_size
        found = {k: out.taps[self.tap_map[k]][..., :width].contiguous() for k in feed.taps}
        return LmOut(out.logits_BTV, found)

    def whole_chain(self, root: ChainRoot, length: int, kv: SlotKV) -> WholeChain | None:
        parts, width = tuple(map(self._large_parts, root.parts)), self.spec.hidden_size
        found = self.large.whole_chain(replace(root, parts=parts), length, kv)
        if found is None or found.residual_BND is None:
            return found
        return replace(found, residual_BND=found.residual_BND[..., :width])

    def next_token(self, slots: tuple[int, ...], kv: SlotKV) -> None:
        """None: forwards of a large model gain nothing by the short call."""

    def _large_parts(self, parts: SubLayers) -> SubLayers:
        return SubLayers(self._held(parts.attention), self._held(parts.mlp))

    def _held(self, layers: Iterable[int]) -> tuple[int, ...]:
        """The large layers that these of the base stand for."""
        return tuple(i for k in layers for i in range(self.tap_map[k], self.tap_map[k + 1]))

    def linear_at(self, layer: int, name: str) -> tuple[int, int] | None:
        found = super().linear_at(self.real_layers[layer], name)
        return None if found is None else linear_sizes(self.spec)[name]

    def _placed(self, added: RowAdditions) -> RowAdditions:
        """Onto the base's rows and columns, which are the first ones of the large matrices."""
        sizes = linear_sizes(self._large_spec)
        large = {
            (self.real_layers[layer], name): one.within(*sizes[name])
            for (layer, name), one in added.factors.items()
        }
        return replace(added, factors=large)

    def _widened(self, residual_BTD: Tensor) -> Tensor:
        """Zeros in the channels of the padding."""
        return F.pad(residual_BTD, (0, self._large_spec.hidden_size - residual_BTD.shape[-1]))

    def _saved(self, layers: int, num_rows: int) -> float:
        return self.large._saved(self.tap_map[layers], num_rows)

    def borrowed(self) -> Borrowed:
        return self._borrowed

    def key_value(
        self, state: Mapping[int, Tensor], position_BT: Tensor
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Of the base's layers: the base's heads, which are the first ones."""
        wide = {self.real_layers[k]: self._widened(x) for k, x in state.items()}
        found = self.large.key_value(wide, position_BT)
        return {k: self._own(found[self.real_layers[k]]) for k in state}

    def read_kv(self, layer: int, kv: SlotKV) -> tuple[Tensor, Tensor]:
        return self._own(kv.read(self.real_layers[layer]))

    def _own(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The base's heads of keys and values."""
        key, value = pair
        return key[:, : self.spec.num_kv_heads], value[:, : self.spec.num_kv_heads]

    @torch.no_grad()
    def write_kv(self, state: Mapping[int, Tensor], position_BT: Tensor, kv: SlotKV) -> None:
        """Of all large layers that those stand for. Identities read the residual in front of the
        real layer as well: what they make of it counts for nothing, and takes its time."""
        wide = {k: self._widened(x) for k, x in state.items()}
        all_layers = {i: x for k, x in wide.items() for i in self._held((k,))}
        self.large.write_kv(all_layers, position_BT, kv)

    @property
    def kv_layers(self) -> tuple[KVShape, ...]:
        return self.large.kv_layers

    def kv_shape(self, layer: int) -> KVShape:
        heads, width = self.spec.num_kv_heads, self.spec.head_dim
        return KVShape(heads, width, heads, width)

    def borrowed_kv(self, attention: tuple[int, ...], num_slots: int, max_len: int) -> SlotKV:
        return self.large.borrowed_kv(self._held(attention), num_slots, max_len)


def size_named(name: str) -> Size:
    """The size of that name."""
    if name not in SIZES:
        raise SpecctlError(
            f"unknown size {name!r}",
            where="--inflate",
            found=name,
            expected="one of " + ", ".join(SIZES),
            do=f"--inflate {nearest(name, SIZES, 1)}",
        )
    return SIZES[name]


class Inflatable(Protocol):
    """A target, as far as inflation looks at it."""

    @property
    def name(self) -> str: ...
    @property
    def lm(self) -> LanguageModel: ...
    @property
    def inflated(self) -> str | None: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...


T = TypeVar("T", bound=Inflatable)  # a dataclass


def inflatable(target: Inflatable, size: str, dtype: torch.dtype) -> FastLlama:
    """The target's model, if it can be inflated to that size here; an error otherwise."""
    need = size_named(size).parameters * dtype.itemsize
    base = target.lm
    if not isinstance(base, FastLlama) or isinstance(base, InflatedLM):
        raise IncompatibleError(
            f"target {target.name} cannot be inflated",
            found=base.spec.model_type if target.inflated is None else f"already {target.inflated}",
            expected="a Llama, Mistral, Qwen2 or Qwen3 as published",
            do="inflate the embedded target: --target tiny",
        )
    inflated_shape(base.module.shape, SIZES[size], size)
    check_memory(need, dtype, target.device, f"a target inflated to {size}")
    return base


def inflate(target: T, size: str, dtype: torch.dtype | None = None, seed: int = 0) -> T:
    """`target` at a nominal size of `SIZES`, same distribution, same fingerprint."""
    dtype = dtype or target.dtype
    base = inflatable(target, size, dtype)
    shape = inflated_shape(base.module.shape, SIZES[size], size)
    with torch.inference_mode(False):  # a forward asks weights whether they have changed
        lm = InflatedLM(*_inflate(base, shape, dtype, seed))
    return cast(T, replace(cast(Any, target), lm=lm, inflated=size))


def count_parameters(shape: LlamaShape) -> int:
    """Parameters of the projections, the embedding and the head."""
    heads = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    embedding = shape.vocab_size * shape.hidden_size * (1 if shape.tied else 2)
    per_layer = shape.hidden_size * (heads + 3 * shape.intermediate_size)
    return embedding + shape.num_layers * per_layer


def inflated_shape(base: LlamaShape, size: Size, name: str) -> LlamaShape:
    """The shape of nominal `size` that contains `base`."""
    group = base.num_heads // base.num_kv_heads
    kv_heads = max(base.num_kv_heads, size.hidden // base.head_dim // group)
    wide = replace(
        base,
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        intermediate_size=0,
        norm_eps=base.norm_eps * base.hidden_size / size.hidden,
        qk_norm_eps=base.qk_norm_eps or base.norm_eps,
    )
    rest = (size.parameters - count_parameters(wide)) / (3 * size.layers * size.hidden)
    rows = round(rest / ROUND) * ROUND
    fits = (
        base.num_layers <= size.layers
        and base.hidden_size <= size.hidden
        and base.intermediate_size <= rows
    )
    if not fits:
        raise IncompatibleError(
            f"the target does not fit into {name}",
            found=f"{base.num_layers} layers of width {base.hidden_size} and "
            f"{base.intermediate_size} MLP rows",
            expected=f"at most {size.layers}, {size.hidden} and {max(rows, 0)}",
            do="choose a larger size: " + ", ".join(SIZES),
        )
    return replace(wide, intermediate_size=rows)


@torch.no_grad()
def _inflate(
    base: FastLlama, shape: LlamaShape, dtype: torch.dtype, seed: int
) -> tuple[LlamaModel, FastLlama, tuple[int, ...]]:
    small, device = base.module, base.device
    with torch.device("meta"):
        large = LlamaModel(shape, small.rotary.inv_freq, small.rotary.scale)
    large = large.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in large.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
    _silence(large)
    count = small.shape.num_layers
    real = tuple(i * shape.num_layers // count for i in range(count))
    theirs = dict(small.named_parameters())
    ours = dict(large.named_parameters())
    scale = (small.shape.hidden_size / shape.hidden_size) ** 0.5
    for name, weight in theirs.items():
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str(real[int(parts[2])])
        is_norm = name.endswith(("layernorm.weight", "model.norm.weight"))
        _place(ours[".".join(parts)], weight.to(dtype=torch.float64) * (scale if is_norm else 1.0))
    return large, base, real


def _silence(large: LlamaModel) -> None:
    """Zero what could reach the padded channels or leave an inserted head, row or layer."""
    for name, parameter in large.named_parameters():
        if name.endswith(("o_proj.weight", "o_proj.bias", "down_proj.weight", "tokens.weight")):
            parameter.zero_()


def _place(into: Tensor, weight: Tensor) -> None:
    """Write `weight` into the leading corner of a larger tensor."""
    corner = into[tuple(slice(0, length) for length in weight.shape)]
    corner.copy_(weight)


def inflated_note(name: str, size: str) -> str:
    """What every report about an inflated target must say."""
    return (
        f"target {name} is inflated to the cost of {size} parameters: the same "
        "answers at a larger target's price, so speed is realistic and quality is not"
    )
