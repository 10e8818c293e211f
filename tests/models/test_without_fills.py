"""Modules without storage are made without random numbers; what has storage is filled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from specctl.models.hf.without_fills import without_fills

BUILDERS = [
    lambda: nn.Linear(3, 4),
    lambda: nn.MultiheadAttention(4, 2),
    lambda: nn.GRUCell(3, 4),
    lambda: nn.init.normal_(tensor=torch.empty(2, 3)),
]


class Drawn(TorchDispatchMode):
    """Which operators that draw random numbers were dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in ("normal", "uniform")):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("build", BUILDERS)
def test_shapes_are_those_of_the_meta_device_and_nothing_fills_them(
    build: Callable[[], nn.Module | Tensor],
) -> None:
    with Drawn() as drawn, torch.device("meta"):
        wanted = build()
    assert drawn.names != []
    with Drawn() as drawn, without_fills():
        found = build()
    assert drawn.names == []
    for a, b in zip(tensors(found), tensors(wanted), strict=True):
        assert (a.shape, a.dtype, a.is_meta) == (b.shape, b.dtype, True)


def tensors(made: nn.Module | Tensor) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else list(made.state_dict().values())


def test_what_has_storage_is_filled_within() -> None:
    with without_fills(), torch.device("cpu"):
        torch.manual_seed(3)
        found = nn.Linear(3, 4).weight
    torch.manual_seed(3)
    assert torch.equal(found, nn.Linear(3, 4).weight)
