"""Bytes that a drafter's loss keeps for its backward pass, at real sizes and without their memory:
weights, features and all that is computed of them are fake, ids and masks are real."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specctl.core.batch import TrainBatch
from specctl.core.kv_cache import KVShape
from specctl.core.language_model import Borrowed
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters import family
from specctl.drafters.nets.options import read_options

HALF = torch.bfloat16
# Llama-3.1-8B
LLAMA_8B = ModelSpec("llama", 32, 4096, 128_256, 32, 8, 128, 14_336, 1e-5, 500_000.0, 131_072)


class Mixed(TorchDispatchMode):
    """What is computed of real tensors alone is real; the rest has shapes and no values."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if func is torch.ops.aten.index.Tensor:
            args = (args[0], _numbered(args[1]))
        with self.fake:
            return func(*args, **kwargs)


def _numbered(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Bool masks as the numbers of what they pick."""
    found = list[Tensor | None]()
    for index in indices:
        is_mask = index is not None and index.dtype == torch.bool
        found += list(index.nonzero().unbind(1)) if is_mask and index is not None else [index]
    return found


class ShapesOfACache:
    """Keys and values of the target, without values."""

    dtype = HALF

    def __init__(self, spec: ModelSpec) -> None:
        heads, width = spec.num_kv_heads, spec.head_dim
        self.kv_layers = (KVShape(heads, width, heads, width),) * spec.num_layers

    def check_lending(self) -> None:
        return

    def kv_shape(self, layer: int) -> KVShape:
        return self.kv_layers[layer]

    def key_value(
        self, state: Mapping[int, Tensor], position_BT: Tensor
    ) -> dict[int, tuple[Tensor, Tensor]]:
        B, T = position_BT.shape
        shape, found = self.kv_layers[0], dict[int, tuple[Tensor, Tensor]]()
        for layer, x in state.items():
            key, value = (x.new_empty(B, shape.key_heads, T, shape.key_width) for _ in "kv")
            found[layer] = (key, value)
        return found


class Kept:
    """A tensor for as long as autograd keeps it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def back(self) -> Tensor:
        return self.tensor


def saved_bytes(
    name: str,
    options: dict[str, Any],
    seq_len: int,
    spec: ModelSpec = LLAMA_8B,
    draft_vocab: int = 32_000,
) -> int:
    """Of one row, one document of that many tokens, in bfloat16 under autocast: all that autograd
    keeps between forward and backward but parameters, the target's weights and its features."""
    mode, found = Mixed(), family(name)
    vocab = VocabMap(torch.arange(draft_vocab), spec.vocab_size)
    with mode.fake:
        drafter = found.build(read_options(found.options, options), spec, vocab)
        table, head = (torch.empty(spec.vocab_size, spec.hidden_size, dtype=HALF) for _ in "io")
        shape = 1, seq_len, spec.hidden_size
        taps = {tap: torch.empty(shape, dtype=HALF) for tap in drafter.needs().taps}
        logits = torch.empty(1, seq_len, spec.vocab_size, dtype=HALF)
    at = torch.arange(seq_len)[None]
    everywhere = torch.ones_like(at, dtype=torch.bool)
    batch = TrainBatch(at % spec.vocab_size, everywhere, at * 0, at, taps, logits)
    assert drafter.module is not None
    given = {*drafter.module.parameters(), table, head, logits, *taps.values()}
    storages = {_storage(tensor) for tensor in given}
    kept = WeakSet[Kept]()

    def keep(tensor: Tensor) -> Kept:
        held = Kept(tensor)
        if isinstance(tensor, FakeTensor) and _storage(tensor) not in storages:
            kept.add(held)
        return held

    with mode:
        drafter.bind(Borrowed(table, head, lm=cast(Any, ShapesOfACache(spec))))
        with torch.autocast("cpu", HALF), saved_tensors_hooks(keep, Kept.back):
            out = drafter.loss(batch)
    assert out.sum.requires_grad
    found = {_storage(held.tensor): held.tensor for held in kept}
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
