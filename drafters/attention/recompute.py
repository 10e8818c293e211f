"""A pass through a layer that is computed again in the backward pass, where keeping it would cost
gigabytes (arXiv 1604.06174). A third more of the drafter's own work for most of its memory; small
batches keep everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

MOST_SAVED = 4_000_000_000  # bytes that the passes of a loss may keep
BYTES = 32  # kept per token, pass and unit of hidden plus MLP width (measured, Llama-3.1-8B, bf16)


def is_large(num_tokens: int, num_passes: int, hidden_size: int, intermediate_size: int) -> bool:
    """Whether so many passes over so many tokens would keep more than that."""
    return num_tokens * num_passes * (hidden_size + intermediate_size) * BYTES > MOST_SAVED


def run(again: bool, function: Callable[..., Any], *args: Any) -> Any:
    """function(*args); `again`: keep nothing of it but `args`. No tensor with a gradient may reach
    it by another way than `args` and its parameters, and it draws no random numbers."""
    if not again or not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
