"""A target that a draft in a GGUF file can be written for, and writers that make a mistake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from specctl.runtime.target.target import Target
from specctl_testing.export.gguf_cases import byte_tokenizer
from specctl_testing.models import build_model

KEPT = (0, 1, 2, *range(3, 300, 3))
Tensors = dict[str, torch.Tensor]


def six_layers() -> Target:
    """Random, of six layers, with a tokenizer that llama.cpp knows."""
    model = build_model(num_layers=6, hidden=16, vocab=320, rope_theta=5000.0)
    return replace(
        Target.from_model(model),
        tokenizer=byte_tokenizer(),
        tokenizer_fingerprint="b" * 64,
        template_digest="c" * 64,
        eos_ids=(1, 2),
    )


def mistaken(
    patch: pytest.MonkeyPatch, writer: ModuleType, change: Callable[[Tensors], None]
) -> None:
    """From here on the writer's `tensors_of` gives what `change` has made of them."""
    right = writer.tensors_of

    def wrong(*given: Any) -> Tensors:
        tensors: Tensors = right(*given)
        change(tensors)
        return tensors

    patch.setattr(writer, "tensors_of", wrong)
