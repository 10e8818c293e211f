"""`train.compile`: what surrounds the attention of a drafter's layers, compiled for training.

Norms, rotations, activations and residual additions between the products of a layer are fused by
torch.compile; attention keeps its own kernels, the head its slices. While a drafter drafts (no
gradient) its layers run as they are, for shapes change from round to round. The first steps wait
for the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from specctl.core.errors import IncompatibleError, RecipeError
from specctl.drafters.nets.blocks import DecoderLayer, Eagle3Attention, Eagle3Layer

BACKEND = "inductor"
PARTS: dict[type[nn.Module], tuple[str, ...]] = {
    Eagle3Layer: ("mix", "finish"),
    Eagle3Attention: ("query", "key_value"),
    DecoderLayer: ("finish",),
}


def compile_layers(module: nn.Module | None, family: str, backend: str = BACKEND) -> int:
    """Compile the layers of a drafter in place; returns how many functions. Nothing is compiled
    before it is called."""
    count = 0
    for part in [] if module is None else module.modules():
        names = next((names for kind, names in PARTS.items() if isinstance(part, kind)), ())
        for name in names:
            setattr(part, name, _in_training(getattr(part, name), backend))
        count += len(names)
    if count == 0:
        raise RecipeError(
            f"{family} has no layers to compile",
            where="train.compile",
            found="train.compile: true",
            expected="a family with decoder layers of its own, such as eagle3 or dflash",
            do="--set train.compile=false",
        )
    return count


def _in_training(plain: Callable[..., Any], backend: str) -> Callable[..., Any]:
    compiled = torch.compile(plain, backend=backend)

    @wraps(plain)
    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args)
        try:
            return compiled(*args)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            raise IncompatibleError(
                "torch.compile does not work here",
                where="train.compile",
                found=str(error).strip().splitlines()[0][:300],
                expected="a C++ compiler (on a GPU: triton)",
                do="install one (apt-get install g++), or --set train.compile=false",
            ) from error

    return run
