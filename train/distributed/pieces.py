"""Tensors of which every process keeps a piece (DTensors), and whole ones: there and back."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def is_piece(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This process' own part, sharing memory with it; a whole tensor is its own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, on every process; every process must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def with_piece(part: Tensor, like: Tensor) -> Tensor:
    """The tensor of the layout of `like` of which this process' piece is `part`, not copied."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )


def piece_of(whole: Tensor, like: Tensor) -> DTensor:
    """This process' piece of a tensor that every process holds whole, cut like `like`."""
    assert isinstance(like, DTensor)
    placed = whole.to(device=like.device, dtype=like.dtype)
    return distribute_tensor(placed, like.device_mesh, like.placements, src_data_rank=None)


def like_parameter(value: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor in the layout of a parameter; as it is if it has another shape (a count)."""
    if not is_piece(parameter) or value.shape != parameter.shape:
        return value
    return piece_of(value, parameter)


def gathered(named: Mapping[str, Tensor], everywhere: bool = False) -> dict[str, Tensor]:
    """The tensors whole, on the CPU if they were pieces. Every process must call this; the first
    one gets all, the others only what was whole before (or all of it, `everywhere`).

    One tensor at a time, so that no device ever holds more than one of them whole.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in named.items():
        if not isinstance(tensor, DTensor):
            found[name] = tensor
            continue
        whole = tensor.full_tensor()
        if everywhere or tensor.device_mesh.get_rank() == 0:
            found[name] = whole.cpu()
    return found
