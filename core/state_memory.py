"""How many bytes one row takes in a drafter's memory, measured on small states of it.

A state of S slots and L positions holds tensors of c(L) + S (a + b L) bytes: what all rows share (a
head laid out for serving, a table of rotations), what every row has, and what every position of it
has. Four small states tell a and b exactly where that is the form, c(L) falls out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from specctl.core.drafter import Space

SHORT, LONG = 64, 128  # positions of the small states
PLAIN = (str, bytes, int, float, type(None), torch.device, torch.dtype)


def slot_bytes(opened: Callable[[Space], object], space: Space, drafter: object) -> int:
    """Bytes of tensors that one slot of a state of that space takes. What the drafter itself holds
    is nobody's row."""

    def held(num_slots: int, max_len: int) -> int:
        small = replace(space, num_slots=num_slots, max_len=max_len, identity=None)
        return tensor_bytes(opened(small), drafter)

    short, long = (held(2, length) - held(1, length) for length in (SHORT, LONG))
    return max(0, short + (long - short) * (space.max_len - SHORT) // (LONG - SHORT))


def tensor_bytes(root: object, without: object = None) -> int:
    """Bytes of all tensors that can be reached from an object, each storage once; modules, and
    whatever is reached through `without` alone, are left out."""
    storages: dict[int, int] = {}
    seen, todo = {id(without)}, [root]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, (*PLAIN, type, nn.Module)):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            if one.layout is torch.strided:
                storage = one.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            continue
        todo.extend(_parts(one))
    return sum(storages.values())


def _parts(one: object) -> Iterator[object]:
    """What an object holds: the entries of a container, the fields of anything else."""
    if isinstance(one, Mapping):
        yield from one.values()
    elif isinstance(one, (list, tuple, Set)):
        if not all(isinstance(first, PLAIN) for first in list(one)[:1]):  # not through whole texts
            yield from one
    else:
        yield from getattr(one, "__dict__", {}).values()
        for kind in type(one).__mro__:
            names = kind.__dict__.get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                if hasattr(one, name):
                    yield getattr(one, name)
