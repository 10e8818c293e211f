"""The modules for multi-token prediction in a checkpoint (DeepSeek-V3, GLM-4.5, Qwen3-Next,
Qwen3.5, MiMo-V2): `specctl import CHECKPOINT --target CHECKPOINT`. Of the folder only the
modules are read.
Letters: N nodes, V target vocabulary.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from specctl.export.formats import ExportSource
from specctl.export.imports import Imported, Importer
from specctl.export.imports.published import Published
from specctl.export.readers.mtp import ENGINE, MtpReader, fed_back
from specctl.export.readers.trial import Trial, compare, drafted_logits, twin
from specctl.models.mtp_layout import KINDS, NEXTN
from specctl.runtime.target.mtp_checkpoint import drafter_of, read_layout
from specctl.runtime.target.target import Target

FC = re.compile(r"^(mtp\.fc|model\.(mtp\.)?layers\.\d+\.eh_proj)\.weight$")
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
        theirs_NV = MtpReader(config, layout, tensors, source).drafted_logits(trial)
        compare(ENGINE, theirs_NV, drafted_logits(twin(source, drafter), trial))

    readings = {}
    if config.get_text_config(decoder=True).model_type in NEXTN:
        other = copy.copy(drafter)
        other.module = copy.deepcopy(drafter.module)
        other.options = other.module.options = replace(drafter.options, norm_output=False)
        readings["as vLLM feeds it back: without the norm"] = other
    return Imported(drafter, ENGINE, prove, max(LENGTH, layout.num), readings=readings)


IMPORTER = Importer("mtp", "the module for multi-token prediction of a checkpoint", knows, read)
