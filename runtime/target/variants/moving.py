"""A target whose weights somebody else trains: the policy of reinforcement learning, in memory.

The optimizer writes into the policy's parameters, and what we decode and read with must be these
weights and no older ones. So the target is a copy of the modules whose parameters lie in the very
memory of the policy's. It needs no gradient and is in evaluation mode, which the policy, that
learns, must not be.

Serving keeps packed copies of weights, and makes them anew when PyTorch has counted a write
(`models/weights/copies.py`, `LlamaModel.weights`). Some writes are not counted: those of fused
optimizers, which transformers' Trainer uses by default, and those through `.data`. So every call of
`now` counts one itself. The counters are the copy's own: autograd checks the policy's between its
forward and its backward pass.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from specctl.core.errors import IncompatibleError
from specctl.models.llama.fast_llama import FastLlama
from specctl.runtime.target.target import Target


class MovingTarget:
    """A target over the weights of `model`, a causal model of transformers (or of peft) on one
    device, whole. It holds the model, and no second copy of its weights."""

    def __init__(self, model: Any, tokenizer: Any = None, name: str = "policy") -> None:
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        _check_whole(inner)
        self._inner = inner
        self._theirs = list(inner.parameters())
        self._mine = [nn.Parameter(weight.data, requires_grad=False) for weight in self._theirs]
        pairs = zip(self._theirs, self._mine, strict=True)
        memo: dict[int, Any] = {id(theirs): mine for theirs, mine in pairs}
        memo |= {id(buffer): buffer for buffer in inner.buffers()}
        self._copy = copy.deepcopy(inner, memo)
        self._target = Target.from_model(self._copy, tokenizer, name)

    @property
    def is_fast(self) -> bool:
        """Whether our own forward reads it; else transformers' forward does."""
        return isinstance(self._target.lm, FastLlama)

    @property
    def is_as_made(self) -> bool:
        """Whether the model has the parameters that it had then, whatever their values."""
        weights = list(self._inner.parameters())
        is_same = len(weights) == len(self._theirs) and all(map(_is, weights, self._theirs))
        return is_same and all(map(_alike, self._theirs, self._mine))

    def now(self) -> Target:
        """The target with the weights of this moment, to be used until they move. Raises
        IncompatibleError where the model has other parameters than in the beginning."""
        if not self.is_as_made:
            raise IncompatibleError(
                "the policy has other parameters than when its drafter was put beside it",
                found="parameters that were added, replaced, sharded, cast or moved",
                expected="the same parameters, with other values",
                do="add adapters and move the policy first, then call specctl.follow_policy",
            )
        for theirs, mine in zip(self._theirs, self._mine, strict=True):
            if mine.data_ptr() != theirs.data_ptr():
                mine.data = theirs.data
        torch.autograd.graph.increment_version(self._mine)
        if isinstance(self._target.lm, FastLlama):
            self._target.lm.recorded = None  # graphs of a GPU read where the weights lay
        return self._target


def _is(one: object, other: object) -> bool:
    return one is other


def _alike(theirs: nn.Parameter, mine: nn.Parameter) -> bool:
    return (theirs.shape, theirs.dtype, theirs.device) == (mine.shape, mine.dtype, mine.device)


def _check_whole(model: nn.Module) -> None:
    """Refuse weights that are not all here: sharded, spread, or without content."""
    kinds = {type(weight) for weight in model.parameters()}
    devices = {weight.device for weight in model.parameters()}
    is_here = all(weight.numel() and not weight.is_meta for weight in model.parameters())
    if kinds == {nn.Parameter} and len(devices) == 1 and is_here:
        return
    raise IncompatibleError(
        "the model's weights are not all in this process",
        found=", ".join(sorted({k.__name__ for k in kinds} | {str(d) for d in devices})),
        expected="whole parameters on one device",
        do="load it without sharding (FSDP, ZeRO-3, device_map, weights in few bits)",
    )
