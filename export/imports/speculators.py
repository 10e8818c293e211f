"""EAGLE-3 in the speculators format, read as vLLM reads it: a missing `norm_before_residual` is
true, the layer ids count hidden states, `d2t` holds offsets. (Other kinds of the format are read by
`speculators_blocks` and `p_eagle`.)
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from specctl.export.formats import ExportSource
from specctl.export.imports import Imported, Importer
from specctl.export.imports.eagle3 import FED_BACK, default_layers, drafter_of
from specctl.export.imports.heads import ELSEWHERE, JUMP, count_of, refused, with_head
from specctl.export.imports.layers import FULL, SLIDING
from specctl.export.imports.published import Published
from specctl.export.readers.trial import Trial, compare, drafted_logits, embedding_of, twin
from specctl.export.readers.vllm_eagle3 import ENGINE, VllmEagle3, draft_config
from specctl.runtime.target.target import Target

KIND, BLOCKS = "speculators_model_type", ("dflash", "dflash2", "dspark")
OTHER_KINDS = (*BLOCKS, "peagle", "xpress")


def knows(config: Mapping[str, Any], names: Set[str]) -> bool:
    is_ours = "speculators_config" in config or "speculators_model_type" in config
    is_head = JUMP not in config
    return is_ours and is_head and config.get("speculators_model_type") not in OTHER_KINDS


def read(published: Published, target: Target) -> Imported:
    body = published.config
    kind = body.get("speculators_model_type")
    if kind != "eagle3":
        what, where = "only some kinds of the speculators format are imported", KIND
        expected = ", ".join(("eagle3", *OTHER_KINDS))
        raise refused(what, f"{where}: {kind}", expected, ELSEWHERE, f"config.json:{where}")
    config = draft_config(body)
    taps = getattr(
        config, "eagle_aux_hidden_state_layer_ids", default_layers(target.spec.num_layers)
    )
    rows = getattr(config, "draft_vocab_size", None) or count_of(config, "vocab_size")
    head = with_head(published.tensors, rows, target)
    drafter = drafter_of(config, head.tensors, taps, target, (FULL, SLIDING))

    def prove(source: ExportSource) -> None:
        trial = Trial.of(source, FED_BACK)
        with published.staged(head.tensors) as folder:
            reader = VllmEagle3(folder, embedding_of(source))
            reader.check_window(drafter.options.window)
            theirs = reader.drafted_logits(trial)
        compare(ENGINE, theirs, drafted_logits(twin(source, drafter), trial))

    notes = other_verifier(body, target) + head.notes
    return Imported(drafter, ENGINE, prove, max(1, config.length), notes)


def other_verifier(body: Mapping[str, Any], target: Target) -> tuple[str, ...]:
    """The target that the folder names, where the one given has another name."""
    named = body["speculators_config"]["verifier"]["name_or_path"]
    if not isinstance(named, str) or named == target.name:
        return ()
    return (f"the folder names {ascii(named)[1:-1][:120]} as its target; given is {target.name}",)


IMPORTER = Importer("speculators", "speculators_model_type eagle3", knows, read)
