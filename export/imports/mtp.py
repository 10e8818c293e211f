"""The modules for multi-token prediction in a checkpoint (DeepSeek-V3, GLM-4.5, Qwen3-Next,
Qwen3.5, MiMo-7B, MiMo-V2): `specctl import CHECKPOINT --target CHECKPOINT`. Of the folder only
the modules are read.
Letters: N nodes, V target vocabulary.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from specctl.core.drafter import Drafter
from specctl.drafters.features.mtp import Mtp, MtpOptions
from specctl.export.formats import ExportSource
from specctl.export.imports import Imported, Importer
from specctl.export.imports.published import Published
from specctl.export.readers.mtp import ENGINE, MtpReader, fed_back
from specctl.export.readers.trial import Trial, compare, drafted_logits, twin
from specctl.models.weights.mtp_layout import KINDS, MIMO_7B, NEXTN
from specctl.runtime.target.mtp_checkpoint import drafter_of, read_layout
from specctl.runtime.target.target import Target

FC = re.compile(
    r"^(mtp\.fc|model\.(mtp\.)?layers\.\d+\.eh_proj|model\.mtp_layers\.\d+\.input_proj)\.weight$"
)
LENGTH = 3


def knows(config: Mapping[str, Any], names: Set[str]) -> bool:
    inner = config.get("text_config")
    kinds = [each.get("model_type") for each in (config, inner) if isinstance(each, dict)]
    return any(kind in KINDS for kind in kinds) and any(FC.search(name) for name in names)


def read(published: Published, target: Target) -> Imported:
    config, layout = read_layout(published.folder)
    tensors = {name: published.tensors[name] for name in layout.of(published.tensors)}
    drafter = drafter_of(config, layout, tensors, target)

    def prove(source: ExportSource) -> None:
        trial = Trial.of(source, fed_back(layout.num))
        before_norm = drafter.options.before_norm
        reader = MtpReader(config, layout, tensors, source, before_norm)
        theirs_NV = reader.drafted_logits(trial)
        compare(ENGINE, theirs_NV, drafted_logits(twin(source, drafter), trial))

    kind, readings = config.get_text_config(decoder=True).model_type, dict[str, Drafter]()
    unnormed = replace(drafter.options, norm_output=False)
    behind = replace(drafter.options, before_norm=False)
    if kind in NEXTN:
        readings["as vLLM feeds it back: without the norm"] = _with(drafter, unnormed)
    if kind in MIMO_7B:
        readings |= {
            "as SGLang reads the target: behind its last norm": _with(drafter, behind),
            "as ExLlamaV3 feeds it back: without the norm": _with(drafter, unnormed),
        }
    return Imported(drafter, ENGINE, prove, max(LENGTH, layout.num), readings=readings)


def _with(drafter: Mtp, options: MtpOptions) -> Mtp:
    """The same weights, used otherwise."""
    other = copy.copy(drafter)
    other.module = copy.deepcopy(drafter.module)
    other.options = other.module.options = options
    return other


IMPORTER = Importer("mtp", "the module for multi-token prediction of a checkpoint", knows, read)
