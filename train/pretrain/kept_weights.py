"""Whether the weights of a kept state are those of the recipe's model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from specctl.core.errors import FileError


def check_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a state of another model, before a weight is changed."""
    wanted = {name: list(p.shape) for name, p in model.named_parameters()}
    found = {name: list(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise FileError(
                "the state is that of another model",
                where=name,
                found=str(found.get(name, "no such weights")),
                expected=str(wanted.get(name, "no such weights")),
                do="choose another --out, or begin anew there with --no-resume",
            )
