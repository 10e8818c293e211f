"""UNO's factors as peft's tensors, and back: a rename. peft names a linear layer as transformers
does, behind a prefix of its own; A is [rank, inputs] and B [outputs, rank] in both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from specctl.core.forward.row_additions import MLP

_OURS = re.compile(r"layers\.(\d+)\.(\w+)\.(down|up)")
_THEIRS = re.compile(
    r"base_model\.model\.model\.layers\.(\d+)\.(self_attn|mlp)\.(\w+)\.lora_(A|B)\.weight"
)


def published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Under peft's names."""
    found = {}
    for ours, tensor in tensors.items():
        match = _OURS.fullmatch(ours)
        assert match is not None, f"{ours} is no factor"
        layer, name, part = match.groups()
        module = f"model.layers.{layer}.{'mlp' if name in MLP else 'self_attn'}.{name}"
        found[f"base_model.model.{module}.lora_{'A' if part == 'down' else 'B'}.weight"] = tensor
    return found


def own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Under our names; what is no factor of such a linear layer keeps its own."""
    found = {}
    for theirs, tensor in tensors.items():
        match = _THEIRS.fullmatch(theirs)
        if match is None or (match[2] == "mlp") != (match[3] in MLP):
            found[theirs] = tensor
        else:
            found[f"layers.{match[1]}.{match[3]}.{'down' if match[4] == 'A' else 'up'}"] = tensor
    return found
