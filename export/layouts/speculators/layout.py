"""What the families of the speculators format share: config.json around their own keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from specctl.export.formats import ExportSource
from specctl.export.layouts.engines import dtype_fields, special_ids

VERSION = "0.9.0"  # of the speculators package whose keys are written


@dataclass(frozen=True, slots=True)
class SpeculatorsFolder:
    """One export: `kind` is the speculators_model_type, `length` how many tokens are drafted,
    `layer` the transformer_layer_config, `own` the keys of the family at the top level."""

    kind: str
    architecture: str
    length: int
    layer: Mapping[str, Any]
    own: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class SpeculatorsLayout:
    """How one family is written and checked. `method` is vLLM's word for it, and `how` what a
    command that names the target must say besides."""

    write: Callable[[ExportSource], SpeculatorsFolder]
    check: Callable[[ExportSource, Path], None]
    method: str
    length: Callable[[ExportSource], int]
    how: Mapping[str, Any] = field(default_factory=dict)


def config_of(written: SpeculatorsFolder, source: ExportSource) -> dict[str, Any]:
    """config.json. vLLM builds the draft model's config from `layer` and the keys that it forwards
    for this kind, the number of drafted tokens from the first proposal method, and the target's
    place from the verifier, which must name a repository (null: the command names the target)."""
    manifest = source.manifest
    vocabulary = manifest.vocabulary
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": written.length,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [written.architecture],
        "speculators_model_type": written.kind,
        "speculators_version": VERSION,
        "draft_vocab_size": vocabulary.draft_size,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        **dtype_fields(source),
        **written.own,
        "transformer_layer_config": {**written.layer, **special_ids(source)},
        "speculators_config": {
            "algorithm": written.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": manifest.target.repo,
                "architectures": [_architecture(manifest.model_spec.model_type)],
            },
        },
    }


def _architecture(model_type: str) -> str:
    """The causal language model of that type in transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, model_type))
