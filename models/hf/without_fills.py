"""Modules of shapes alone, on the meta device, without their random initialisation.

PyTorch works out even there, in Python, what `normal_` would give: about a fifth of the time in
which a small target is loaded or a package is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

FILLS = frozenset(
    (
        Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_,
        nn.init.kaiming_uniform_, nn.init.kaiming_normal_, nn.init.xavier_uniform_,
        nn.init.xavier_normal_,
    )
)  # fmt: skip


class _Unfilled(TorchFunctionMode):
    """Leaves a tensor without storage as it is where it would be filled at random."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func in FILLS:
            tensor = args[0] if args else given.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **given)


@contextmanager
def without_fills() -> Iterator[None]:
    """Whatever is made within has a shape and no storage, as in `torch.device("meta")`."""
    with torch.device("meta"), _Unfilled():
        yield
