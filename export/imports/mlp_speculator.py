"""MLP speculators in IBM's layout, read as vLLM up to 0.9 reads them: the prefix `speculator.` or
none, `inner_dim` 0 for the target's width, tied weights at index 0 (of projections, at 0 and 1).
Files that repeat a tied weight under every index are taken where the copies are equal.
Letters: D hidden width, N nodes, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from specctl.drafters.heads.mlp_speculator import MlpOptions, MlpSpeculator
from specctl.export.formats import ExportSource
from specctl.export.imports import Imported, Importer
from specctl.export.imports.heads import (
    OTHER_TARGET,
    REPAIR,
    check_value,
    count_of,
    filled,
    refused,
)
from specctl.export.imports.published import Published
from specctl.export.readers.mlp_speculator import VllmMlp
from specctl.export.readers.trial import Trial, compare, drafted_logits, twin
from specctl.runtime.target.target import Target

PREFIX, KIND = "speculator.", "mlp_speculator"


def knows(config: Mapping[str, Any], names: Set[str]) -> bool:
    return config.get("model_type") == KIND


def read(published: Published, target: Target) -> Imported:
    config, spec = SimpleNamespace(**published.config), target.spec
    why = f"the head was made for another target than {target.name}"
    check_value(config, "emb_dim", spec.hidden_size, why, OTHER_TARGET)
    check_value(config, "vocab_size", spec.vocab_size, why, OTHER_TARGET)
    num_heads, inner = count_of(config, "n_predict"), getattr(config, "inner_dim", 0)
    options = MlpOptions(
        num_heads=num_heads,
        inner=count_of(config, "inner_dim") if inner else None,
        tie=_switch(config, "tie_weights"),
        scale_input=_switch(config, "scale_input"),
    )
    weights = _by_index(published.tensors, options.tie)
    drafter = filled(lambda: MlpSpeculator(options, spec), weights)

    def prove(source: ExportSource) -> None:
        trial = Trial.of(source, num_heads - 1)
        state_D = trial.states[spec.num_layers][-1]
        fields = {"architectures": ["MLPSpeculatorPreTrainedModel"]}
        with published.staged(weights, **fields) as folder:
            theirs_NV = VllmMlp(folder).logits(state_D, (trial.ids[-1], *trial.drafted))
        compare(VllmMlp.name, theirs_NV, drafted_logits(twin(source, drafter), trial))

    return Imported(drafter, VllmMlp.name, prove, num_heads)


def _switch(config: Any, key: str) -> bool:
    found = getattr(config, key, False)
    if not isinstance(found, bool):
        what = "a switch of config.json is none"
        raise refused(what, f"{key}: {found}", "true or false", REPAIR, f"config.json:{key}")
    return found


def _by_index(tensors: Mapping[str, Tensor], is_tied: bool) -> dict[str, Tensor]:
    """Without the prefix; copies of a tied weight are one."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix(PREFIX)
        part, _, rest = plain.partition(".")
        index, _, leaf = rest.partition(".")
        if is_tied and index.isdecimal():
            plain = f"{part}.{min(int(index), 1 if part == 'proj' else 0)}.{leaf}"
        if plain in found and not torch.equal(found[plain], tensor):
            what = "config.json says that heads share their weights, and they differ"
            raise refused(what, f"tie_weights, two {plain}", "copies that are equal", REPAIR)
        found[plain] = tensor
    return found


IMPORTER = Importer("mlp-speculator", "model_type mlp_speculator, IBM's heads", knows, read)
