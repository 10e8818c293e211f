"""A transformers module whose weights are spread: its layers over devices, by the hooks of
accelerate, which bring an offloaded layer to its device for the while of its forward; or every
matrix over the processes of a tensor parallel group, as DTensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from specctl.core.errors import IncompatibleError


def is_piece(tensor: Tensor) -> bool:
    """Whether this process holds a part of it only (a DTensor, whose import costs a second)."""
    return hasattr(tensor, "full_tensor")


def is_parallel(model: nn.Module) -> bool:
    """Whether matrices are spread over processes."""
    return any(is_piece(parameter) for parameter in model.parameters())


def is_placed(model: nn.Module) -> bool:
    """Whether layers are spread over devices, host memory or files."""
    places = set(map(str, getattr(model, "hf_device_map", {}).values()))
    return len(places) > 1 or "disk" in places


def is_spread(model: nn.Module) -> bool:
    return is_placed(model) or is_parallel(model)


def layer_path(model: Any, num_layers: int) -> str:
    """The name of the list of a module's layers, e.g. model.layers."""
    for name, part in model.named_modules():
        if isinstance(part, nn.ModuleList) and len(part) == num_layers:
            return str(name)
    raise IncompatibleError(
        f"the layers of {type(model).__name__} cannot be found",
        expected=f"a list of {num_layers} layers",
        do="load it on one device, without a device map",
    )


def layer_devices(model: Any, num_layers: int) -> tuple[torch.device, ...]:
    """Where each layer computes, and so where its keys and values are; empty for a module on one
    device. A layer kept in host memory or in files computes where the embedding is."""
    if not is_placed(model):
        return ()
    places: Mapping[str, Any] = model.hf_device_map
    main = model.get_input_embeddings().weight.device
    path, found = layer_path(model, num_layers), []
    for index in range(num_layers):
        place = place_of(f"{path}.{index}", places)
        is_kept = place in (None, "disk") or torch.device(place).type == "cpu"
        found.append(main if is_kept else torch.device(place))
    return tuple(found)


def place_of(name: str, places: Mapping[str, Any]) -> Any:
    """Where a device map sends a module: by its own name, else by that of what it is part of."""
    while name not in places:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return places[name]


def whole_weight(model: nn.Module, name: str) -> Tensor:
    """A parameter in one piece, wherever it is. Of pieces, every process must call this."""
    owner_name, _, leaf = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    parameter: Any = getattr(owner, leaf)
    if is_piece(parameter):
        whole: Tensor = parameter.detach().full_tensor()
        return whole
    if not parameter.is_meta:
        found: Tensor = parameter.detach()
        is_plain = type(found) in (Tensor, nn.Parameter) or not hasattr(found, "__tensor_flatten__")
        return found if is_plain else found.dequantize()  # a library's own kind of tensor
    hook: Any = getattr(owner, "_hf_hook", None)
    for each in getattr(hook, "hooks", (hook,)):
        kept = getattr(each, "weights_map", None)
        if kept is not None:
            offloaded: Tensor = kept[leaf]
            return offloaded.detach()
    raise IncompatibleError(
        f"a weight of {type(model).__name__} is not in memory",
        found=f"{name} without storage",
        expected="a module with its weights, or with the hooks that bring them",
        do="load the target with specctl.load_target",
    )
