"""A jump as economize 0.3.2 exports it for vLLM: the block `economize_jump` of config.json, and the
drafter's own tensors under `jump.`.

Layer k of that package is the state behind k layers, which is our tap k; its additions count
layers from one. The shared layers, the norm, the embedding and the LM head are the target's and not
stored. Both of its layouts (`EconomizeJumpEagle3`, and the one of speculators around it) hold the
block at the top. The rename is proved bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specctl.core.forward.row_additions import ATTENTION, MLP
from specctl.drafters.self_speculation.jump import Jump, JumpOptions, JumpPath
from specctl.export.formats import ExportSource
from specctl.export.imports import Imported, Importer
from specctl.export.imports.heads import (
    ELSEWHERE,
    JUMP,
    OTHER_TARGET,
    REPAIR,
    filled,
    refused,
)
from specctl.export.imports.published import Published
from specctl.export.package.tensors import compare_tensors
from specctl.runtime.target.target import Target

LENGTH = 4  # as its exporter writes for speculators
VERSION = 1
HORIZON = 16  # of its training, which a folder does not say
# What we do not compute, by the value that leaves it out.
FIXED: dict[str, object] = {
    "extra_source_layers": [],
    "mixer": None,
    "predictor_depth": 1,
    "use_state": True,
    "use_token": True,
    "token_residual": True,
}
_OURS = re.compile(r"layers\.(\d+)\.(\w+)\.(down|up)")
_THEIRS = re.compile(r"jump\.lora\.layers\.(\d+)\.(\w+)\.lora_(A|B)")


def knows(config: Mapping[str, Any], names: Set[str]) -> bool:
    return JUMP in config


@dataclass(frozen=True, slots=True)
class JumpNames:
    """Names of a jump whose layers begin at `first`."""

    first: int

    def published(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Under economize's names."""
        found = {}
        for ours, tensor in tensors.items():
            match = _OURS.fullmatch(ours)
            name = ours.replace("predictor.gain", "predictor.out_gain")
            if match is not None:
                layer, side = self.first + int(match[1]) + 1, "A" if match[3] == "down" else "B"
                name = f"lora.layers.{layer}.{match[2]}.lora_{side}"
            found[f"jump.{name}"] = tensor
        return found

    def own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Under ours; what is none of a jump's keeps its own."""
        found = {}
        for theirs, tensor in tensors.items():
            match = _THEIRS.fullmatch(theirs)
            name = theirs.removeprefix("jump.").replace("predictor.out_gain", "predictor.gain")
            if match is not None:
                layer, side = int(match[1]) - self.first - 1, "down" if match[3] == "A" else "up"
                name = f"layers.{layer}.{match[2]}.{side}"
            found[name] = tensor
        return found


def read(published: Published, target: Target) -> Imported:
    options = _options(published.config[JUMP], target)
    names = JumpNames(JumpPath.of(options, target.spec).first)
    own = names.own(published.tensors)
    if len(own) < len(published.tensors):
        raise refused("two tensors have one meaning", "names with jump. and without", "one", REPAIR)
    drafter = filled(lambda: Jump(options, target.spec), own)
    drafter.bind(target.borrowed())

    def prove(source: ExportSource) -> None:
        compare_tensors(dict(published.tensors), names.published(drafter.tensors()))

    return Imported(drafter, "economize", prove, LENGTH)


def _options(block: Any, target: Target) -> JumpOptions:
    """What the block says, as far as our jump computes it."""
    if not isinstance(block, Mapping) or not isinstance(block.get("jump_config"), Mapping):
        raise _said("the block has no settings", "jump_config", None, "a mapping", REPAIR)
    spec, said = target.spec, block["jump_config"]
    for key, expected, do in (
        ("format_version", VERSION, ELSEWHERE),
        ("num_layers", spec.num_layers, OTHER_TARGET),
        ("hidden_size", spec.hidden_size, OTHER_TARGET),
    ):
        if block.get(key) != expected:
            what = "the jump is of another version, or of another target"
            raise _said(what, key, block.get(key), expected, do)
    for key, left_out in FIXED.items():
        found = said.get(key, left_out)
        if found != left_out or isinstance(found, bool) != isinstance(left_out, bool):
            raise _said("a jump of a kind that we do not compute", key, found, left_out, ELSEWHERE)
    predictor, adaptation = said.get("predictor", "mlp"), said.get("adaptation", "frozen")
    if predictor not in ("mlp", "linear"):
        what = "a predictor that we do not compute"
        raise _said(what, "predictor", predictor, "mlp or linear", ELSEWHERE)
    if adaptation not in ("frozen", "lora"):
        what = "layers of the drafter's own, which we do not run"
        raise _said(what, "adaptation", adaptation, "frozen or lora", ELSEWHERE)
    rank = int(said.get("lora_rank", 16)) if adaptation == "lora" else None
    given = said.get("lora_alpha")
    alpha = float(2 * (rank or 16) if given is None else given)
    first, source = said["target_layer"], said["source_layer"]
    last = spec.num_layers if said.get("exit_layer") is None else said["exit_layer"]
    if not 1 <= first <= source < spec.num_layers:
        what, there = "a jump between layers where ours does not go", f"{first}, {source}"
        wanted = f"1 <= target_layer <= source_layer < {spec.num_layers}"
        raise refused(what, there, wanted, ELSEWHERE, f"config.json:{JUMP}")
    return JumpOptions(
        num_heads=HORIZON,
        first=first,
        source=source,
        last=last,
        predictor=predictor,
        width=float(said.get("predictor_width", 2.0)),
        rank=rank,
        alpha=alpha,
        targets=ATTENTION + MLP,
    )


def _said(what: str, key: str, found: object, expected: object, do: str) -> Exception:
    return refused(what, f"{key}: {found}", f"{key}: {expected}", do, f"config.json:{JUMP}")


IMPORTER = Importer("economize-jump", "a block economize_jump, economize's jump", knows, read)
