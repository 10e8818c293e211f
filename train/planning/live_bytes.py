"""Bytes of tensors that are alive while something runs, without the tensors: shapes only.

`traced()` runs PyTorch's operators on fake tensors (torch._subclasses.FakeTensorMode), which have a
shape, a dtype and a storage of a size, and no content. Every storage that an operator makes counts
from then until nothing refers to it any more, autograd's graph included, so the highest sum is what
an allocator would have to hold. What depends on content takes the largest answer: each place of a
mask is set, each choice of rows takes all of them; of how text is packed into rows, see
`Seen.text`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specctl.core.forward.only_shapes import only_shapes
from specctl.models.kernels import kept_scalar

aten = torch.ops.aten


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages: `now` bytes alive, `peak` the most since `begin`. One writer: itself."""

    def __init__(self, is_fake: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._is_fake = is_fake
        self._known: set[int] = set()

    def begin(self) -> int:
        """Forget the peak; returns the bytes that are alive."""
        self.peak = self.now
        return self.now

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out: Any
        if func is torch.ops.prim.device.default and self._is_fake:  # more than half of all calls
            return args[0].fake_device
        if self._is_fake and func is aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 1
        if self._is_fake and func is aten.nonzero.default:
            out = torch.stack(_all_places(args[0]), dim=-1)
        elif self._is_fake and func is aten.index.Tensor:
            out = func(args[0], _without_masks(args[1]))
        elif self._is_fake and func is aten.bincount.default:
            bins = (kwargs or {}).get("minlength", args[2] if len(args) > 2 else 0)
            out = args[0].new_empty(max(1, bins), dtype=torch.long)
        elif self._is_fake and func is aten.unique_consecutive.default:
            one = args[0].new_empty(1, dtype=torch.long)
            out = (args[0].new_empty(1), torch.zeros_like(args[0], dtype=torch.long), one)
        else:
            out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        return out

    def _note(self, tensor: Tensor) -> None:
        if tensor.device.type == "meta":  # of a model without storage
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _all_places(mask: Tensor) -> list[Tensor]:
    """What `nonzero` gives, by axis, of a mask that is set everywhere."""
    return [mask.new_empty(mask.numel(), dtype=torch.long) for _ in range(mask.dim())]


def _without_masks(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        found += _all_places(index) if index is not None and is_mask else [index]
    return found


@contextmanager
def traced() -> Iterator[LiveBytes]:
    """Everything inside runs on fake tensors and is counted."""
    live = LiveBytes()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with warnings.catch_warnings(), fake, only_shapes(), live:
        warnings.simplefilter("ignore")  # of speed, which is not that of the run
        try:
            yield live
        finally:
            kept_scalar.cache_clear()  # else what was made in here would meet real tensors later
