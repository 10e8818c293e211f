"""Flat DFly folders of AngelSpec (architecture Qwen3DFlyModel; in its first spelling
DSparkDraftModel with `model_arch: dfly`) and DFlare folders of AngelSlim (QwenDFlareDraftModel) and
AngelSpec (DFlashDraftModel with `model_arch: dflare`). AngelSpec's settings stand at the top,
AngelSlim's inside `dflash_config`; both count layers.

Which token a slot predicts stands in no published folder. The rule of the family is that slots are
filled in: so the released checkpoints were trained (AngelSpec's recipes for
Qwen3-8B-DFly-Block8: eight slots, of which the first is the root and seven are drafted). AngelSpec
can train the other layout by now, without a word in config.json, so a note says what was taken. A
folder that says the other layout is refused, and so is one without the switch of the correction,
without which readers disagree on whether there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from specctl.export.imports import Imported, Importer
from specctl.export.imports.blocks import refuse_variants
from specctl.export.imports.flat import (
    LAYERED,
    FlatRules,
    imported,
    kind_of,
    number_of,
    reading_of,
    settings_of,
    taps_of,
)
from specctl.export.imports.heads import ELSEWHERE, OTHER_TARGET, REPAIR, refused
from specctl.export.imports.published import Published
from specctl.export.readers.angelslim import ENGINES, FLARE, FLY, READERS
from specctl.runtime.target.target import Target

INNER = "hidden_correction_intermediate_size"
NEVER = dict.fromkeys(("causal", "is_causal", "causal_head"), (None, False))
COMMON: dict[str, tuple[Any, ...]] = {
    **NEVER,
    "projector_type": (None,),
    "fusion_type": (None, "concat_fc"),
    "enable_confidence_head": (None, False),
    "confidence_head_with_markov": (None, False),
    "markov_rank": (None, 0),
    "dspark_bonus_anchor": (None, True),
}
SWITCHES: dict[str, dict[str, tuple[Any, ...]]] = {
    "dfly": {
        "model_arch": (None, "dfly", "dflash"),  # the last is what AngelSpec's class has for none
        "enable_hidden_correction": (True,),
        "hidden_correction_type": (None, "swiglu"),
        "hidden_correction_pos_adaptive": (None, False),
    },
    "dflare": {"model_arch": (None, "dflare"), "enable_hidden_correction": (None, False)},
}
FILLED = (
    "config.json does not say which token a slot predicts: the slots are filled in, as those of "
    "the released checkpoints; tau near 1 would mean that they were trained to the next token"
)


def knows(config: Mapping[str, Any], names: Set[str]) -> bool:
    return kind_of(config) in LAYERED


def read(published: Published, target: Target) -> Imported:
    body, family = published.config, str(kind_of(published.config))
    settings = settings_of(body)
    refuse_variants(settings, **COMMON, **SWITCHES[family])
    size, taps = number_of(settings, "block_size", 2), taps_of(settings)
    _check_target(settings, family, len(taps), target)
    own = {}
    if family == "dfly":
        own["inner"] = None if settings.get(INNER) is None else number_of(settings, INNER)
    reading = reading_of({**body, "model_type": "qwen3"}, family, size - 1, own)
    if reading.window is not None:
        found = f"layer_types: {reading.config.layer_types}"
        raise refused("blocks of this family see the whole text", found, "no window", ELSEWHERE)
    rules = FlatRules(FLY if family == "dfly" else FLARE, READERS[family], ENGINES[family])
    says = any(settings.get(key) is not None for key in ("sample_from_anchor", "shift_label"))
    return imported(published, target, reading, rules, () if says else (FILLED,))


def _check_target(settings: Mapping[str, Any], family: str, taps: int, target: Target) -> None:
    """What AngelSpec writes of the target, and the base of the positions, for which it has another
    default than the targets."""
    layers = target.spec.num_layers
    found = settings.get("target_num_hidden_layers")
    if found not in (None, layers):
        shown = f"target_num_hidden_layers: {found}"
        raise refused("the head was made for another target", shown, str(layers), OTHER_TARGET)
    found = settings.get("num_target_layers")  # AngelSlim's number is the target's, as z-lab's
    wanted = (None, taps) if family == "dfly" else (None, taps, layers)
    if found not in wanted:
        shown = f"num_target_layers: {found}"
        raise refused("config.json does not say how many layers are read", shown, taps, REPAIR)
    inside = (settings.get("rope_parameters") or {}).get("rope_theta")
    bases = {base for base in (settings.get("rope_theta"), inside) if base is not None}
    if len(bases) != 1:
        shown = f"rope_theta: {', '.join(map(str, bases)) or None}"
        raise refused("config.json says no single base of the positions", shown, "one", REPAIR)


IMPORTER = Importer(
    "flat-angelslim",
    "architectures Qwen3DFlyModel, QwenDFlareDraftModel; model_arch dfly, dflare",
    knows,
    read,
)
