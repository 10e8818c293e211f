"""What the kinds of flat checkpoints share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from specctl.drafters.nets.blocks import LayerShape
from specctl.export.formats import ExportSource
from specctl.export.layouts.engines import (
    dimensions,
    draft_length,
    dtype_fields,
    rope_fields,
    sglang_command,
    special_ids,
)


@dataclass(frozen=True, slots=True)
class FlatFolder:
    """One export: config.json, and the tensors beside it."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def _chain(source: ExportSource, folder: str, algorithm: str) -> tuple[str, ...]:
    return (sglang_command(algorithm, draft_length(source), folder),)


def _no_notes(source: ExportSource) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Flat:
    """How one kind is written and checked. `algorithm` is SGLang's word for it; `serve(source,
    folder, algorithm)` and `notes(source)` are those of a format."""

    algorithm: str
    write: Callable[[ExportSource], FlatFolder]
    check: Callable[[ExportSource, Path], None]
    serve: Callable[[ExportSource, str, str], tuple[str, ...]] = _chain
    notes: Callable[[ExportSource], tuple[str, ...]] = _no_notes


def llama_config(
    architecture: str, source: ExportSource, shape: LayerShape, num_layers: int
) -> dict[str, Any]:
    """config.json of a drafter made of Llama layers."""
    return {
        "architectures": [architecture],
        "model_type": "llama",
        **dimensions(shape, source, num_layers),
        **rope_fields(shape, source),
        **special_ids(source),
        **dtype_fields(source),
    }
