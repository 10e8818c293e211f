"""What a checkpoint holds besides weights: optimizer state by parameter name, random generators.

Everything becomes tensors and JSON scalars; nothing is pickled.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specctl.core.errors import IntegrityError
from specctl.train.distributed.pieces import gathered, like_parameter

Optimizers = Mapping[str, torch.optim.Optimizer]


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The generators of python, numpy, torch and, on an accelerator, this process' device."""
    version, words, gauss = random.getstate()
    assert version == 3, f"python random state version {version}"
    name, key, position, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    assert name == "MT19937", f"numpy global generator {name}"
    state = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([math.nan if gauss is None else gauss], dtype=torch.float64),
        "numpy_key": torch.from_numpy(np.asarray(key).astype(np.int64)),
        "numpy_place": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Put the generators back to a `random_state`."""
    gauss = float(state["python_gauss"])
    random.setstate((3, tuple(state["python"].tolist()), None if math.isnan(gauss) else gauss))
    position, has_gauss = state["numpy_place"].tolist()
    key = state["numpy_key"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, position, has_gauss, float(state["numpy_gauss"])))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:  # not where the run was one of a CPU
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def untouched_random_state(device: torch.device) -> Iterator[None]:
    """Whatever the block draws, the generators stand afterwards where they stood before."""
    state = random_state(device)
    try:
        yield
    finally:
        set_random_state(state, device)


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed the three generators; ranks draw different numbers."""
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def optimizer_state(
    optimizers: Optimizers, trainable: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and JSON scalars of the optimizers, each named optimizer/parameter/key; of sharded
    parameters the tensors are whole, on the first rank (all ranks must call this)."""
    name_of = {parameter: name for name, parameter in trainable.items()}
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for kind, optimizer in optimizers.items():
        for parameter in _parameters(optimizer):
            for key, value in optimizer.state.get(parameter, {}).items():
                into = tensors if isinstance(value, Tensor) else scalars
                into[f"{kind}/{name_of[parameter]}/{key}"] = value
    return gathered(tensors), scalars


def load_optimizer_state(
    optimizers: Optimizers,
    trainable: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, Any],
) -> None:
    """Restore what `optimizer_state` gave; a state for an unknown parameter is an error."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for full_name, value in (*tensors.items(), *scalars.items()):
        kind, rest = full_name.split("/", 1)
        name, key = rest.rsplit("/", 1)
        found.setdefault(kind, {}).setdefault(name, {})[key] = value
    unknown = {kind for kind in found if kind not in optimizers}
    unknown |= {name for kind in found for name in found[kind] if name not in trainable}
    if unknown:
        raise IntegrityError(
            "the checkpoint holds optimizer state for something that is not trained",
            found=", ".join(sorted(unknown)),
            expected=", ".join(optimizers),
            do="resume with the recipe the run was started with",
        )
    name_of = {parameter: name for name, parameter in trainable.items()}
    for kind, optimizer in optimizers.items():
        names = [name_of[parameter] for parameter in _parameters(optimizer)]
        states = found.get(kind, {})
        whole = optimizer.state_dict()
        whole["state"] = {
            i: {key: _placed(value, trainable[name]) for key, value in states[name].items()}
            for i, name in enumerate(names)
            if name in states
        }
        optimizer.load_state_dict(whole)


def _placed(value: Any, parameter: Tensor) -> Any:
    """A saved value in the layout of its parameter."""
    return like_parameter(value, parameter) if isinstance(value, Tensor) else value
