"""Blocks of slots: what a draft costs."""

from __future__ import annotations

from typing import Any

import torch

from specctl.core.drafter import Budget, Space
from specctl.runtime.target.target import Target
from specctl_testing.drafters.head_cases import make_heads


def passes(target: Target, name: str, length: int, drive: Any, round_view: Any) -> int:
    """Passes through the layers for one draft of that length."""
    drafter: Any = make_heads(target, name, num_heads=length)
    state = drafter.open(Space(1, 64, 16, torch.device("cpu"), torch.float32))
    text = [3, 1, 4, 1, 5, 9, 2]
    drive(target, drafter).start(state, 0, text)
    seen: list[int] = []
    handle = drafter.net.layers[0].register_forward_hook(lambda *_: seen.append(1))
    tree = state.propose(round_view({0: text}), Budget(length, length))
    handle.remove()
    assert tree.depth == length
    return len(seen)
