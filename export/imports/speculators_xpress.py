"""XPress in the speculators format, read as speculators itself computes it: vLLM 0.33 reads another
layout under other names, which the package is exported in (`--to vllm`). Layer ids count hidden
states; the root's slot reads the token before the root; which slots predict must be said.
Letters: N nodes, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from specctl.export.formats import ExportSource
from specctl.export.imports import Imported, Importer
from specctl.export.imports.blocks import BlockReading, drafter_of, refuse_variants, window_of
from specctl.export.imports.published import Published
from specctl.export.imports.speculators import KIND, other_verifier
from specctl.export.imports.speculators_blocks import qwen3_layers
from specctl.export.readers.speculators_blocks import ENGINE, SpeculatorsXPress, xpress_config
from specctl.export.readers.trial import (
    Trial,
    compare,
    drafted_logits,
    embedding_of,
    head_of,
    twin,
)
from specctl.runtime.target.target import Target

OTHER_NAMES = "vLLM does not read this layout of XPress: export the package with --to vllm"


def knows(config: Mapping[str, Any], names: Set[str]) -> bool:
    return config.get(KIND) == "xpress"


def read(published: Published, target: Target) -> Imported:
    body = published.config
    derived = xpress_config(body)
    refuse_variants(derived)
    config, length = qwen3_layers(derived), derived["length"]
    own = {
        "rank": derived["xpress_rank"],
        "mlp_ratio": derived["xpress_mlp_ratio"],
        "before_root": True,
    }
    reading = BlockReading(
        config,
        derived["eagle_aux_hidden_state_layer_ids"],
        body["mask_token_id"],
        length,
        "xpress",
        own,
        derived["dflash_config"]["causal"],
        window_of(config, {"causal": body.get("sliding_window_non_causal")}),
    )
    drafter = drafter_of(reading, published.tensors, target)

    def prove(source: ExportSource) -> None:
        trial = Trial.of(source, length - 1, without=body["mask_token_id"])
        rows = embedding_of(source), head_of(source)
        theirs = SpeculatorsXPress(published.folder, *rows, derived)
        ours_NV = drafted_logits(twin(source, drafter), trial)
        compare(ENGINE, theirs.drafted_logits(trial), ours_NV)

    notes = (*other_verifier(body, target), OTHER_NAMES)
    return Imported(drafter, ENGINE, prove, length, notes)


IMPORTER = Importer("speculators-xpress", "speculators_model_type xpress", knows, read)
