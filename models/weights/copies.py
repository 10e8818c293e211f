"""Copies of weights in the layout that serving reads, made once and kept as long as the weights
live, so that opening one more engine on them costs nothing. They are made anew when a weight has
changed or lies elsewhere. What is made must not hold its owner, which would then never be freed.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

Owner = TypeVar("Owner", bound=Tensor | nn.Module)
Made = TypeVar("Made")
State = tuple[tuple[Any, ...], ...]


def state_of(owner: Tensor | nn.Module) -> State | None:
    """Equal as long as nobody has written to these weights or moved them; None where writing is not
    counted: of tensors made in inference mode."""
    tensors = [owner] if isinstance(owner, Tensor) else [*owner.parameters(), *owner.buffers()]
    if any(tensor.is_inference() for tensor in tensors):
        return None
    return tuple((t.data_ptr(), t._version, t.dtype, t.shape, t.stride()) for t in tensors)


def num_writes(module: nn.Module) -> int:
    """Changes whenever somebody writes to a parameter below `module`. Every row that joins looks,
    and `parameters()` would build the name of each."""
    total = 0
    for parameter in module._parameters.values():
        if parameter is not None:
            total += parameter._version
    for part in module._modules.values():
        if part is not None:
            total += num_writes(part)
    return total


class Copies(Generic[Owner, Made]):
    """What `make` makes of a tensor, or of the parameters and buffers of a module, by owner."""

    def __init__(self, make: Callable[[Owner], Made]) -> None:
        self.make = make
        self._made: MutableMapping[Owner, tuple[State, Made]] = WeakIdKeyDictionary()

    def of(self, owner: Owner) -> Made:
        state = state_of(owner)
        if state is None:
            return self.make(owner)
        found = self._made.get(owner)
        if found is None or found[0] != state:
            found = self._made[owner] = state, self.make(owner)
        return found[1]
