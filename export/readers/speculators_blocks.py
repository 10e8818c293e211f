"""What speculators 0.9 itself makes of blocks of its format that vLLM 0.33 does not read: DSpark's
gated and rnn heads, and XPress (models/dspark, models/xpress).

XPress' slots read the token before them, that of the root the token before the root, or the root
where it is the first. Layers without a window are not causal. The readout may speak of a part of
the vocabulary.
Letters: D hidden width, K draft vocabulary, N nodes, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from specctl.export.layouts.engines import gate
from specctl.export.readers.block_heads import (
    GATED,
    RNN,
    SPECULATORS,
    VANILLA,
    refined,
    refiner_shapes,
)
from specctl.export.readers.sglang_blocks import SLIDING
from specctl.export.readers.trial import Trial
from specctl.export.readers.vllm_blocks import VllmBlocks

ENGINE = "speculators 0.9"
LEAST = {"xpress_rank": 1, "xpress_mlp_ratio": 1, "block_size": 2}
SIZES = tuple(LEAST)
MOST = 2**16


class SpeculatorsSpark(VllmBlocks):
    """DSpark with any head."""

    heads = (VANILLA, GATED, RNN)


def xpress_config(body: Mapping[str, Any]) -> dict[str, Any]:
    """The draft model's config, of the keys that `SpeculatorsXPress` reads."""
    aux = body.get("aux_hidden_state_layer_ids")
    if not aux or "mask_token_id" not in body:
        raise gate("no layers or no mask", "aux_hidden_state_layer_ids and mask_token_id")
    for key in SIZES:
        if type(size := body.get(key)) is not int or not 1 <= size <= MOST or size < LEAST[key]:
            raise gate(f"{key}: {size!r}", f"a whole number from {LEAST[key]} to {MOST}")
    layers = body.get("transformer_layer_config")
    if not isinstance(layers, Mapping):
        raise gate("no transformer_layer_config", "the sizes of the layers")
    if body.get("sample_from_anchor") is not False:
        found = f"sample_from_anchor: {body.get('sample_from_anchor')}"
        raise gate(found, "false: slots behind the anchor that predict themselves")
    slides = SLIDING in (layers.get("layer_types") or ())
    is_causal = layers.get("is_causal") is True
    is_causal |= slides and body.get("sliding_window_non_causal") is False
    return {
        **layers,
        **{key: body[key] for key in SIZES},
        "kind": "xpress",
        "eagle_aux_hidden_state_layer_ids": aux,
        "dflash_config": {"mask_token_id": body["mask_token_id"], "causal": is_causal},
        "draft_vocab_size": body.get("draft_vocab_size"),
        "sample_from_anchor": False,
        "length": body["block_size"] - 1,
    }


class SpeculatorsXPress(VllmBlocks):
    """A folder with an `xpress_config`."""

    def _shapes(self, has_head: bool) -> dict[str, list[int]]:
        rank, ratio, slots = (int(self.config[key]) for key in SIZES)
        sizes = (rank, rank * ratio, slots, self.config["vocab_size"], self.rows)
        own = refiner_shapes(SPECULATORS, self.sizes.width, *sizes)
        return super()._shapes(has_head) | own

    def drafted_logits(self, trial: Trial) -> Tensor:
        """[N + 1, V], -inf for ids without a row."""
        state_TD = self.block(trial)
        read = [trial.ids[-2:][0], trial.ids[-1], *trial.drafted]
        added_TK = refined(self.params, SPECULATORS, state_TD, read)
        return self.whole(self.base(state_TD[1:]) + added_TK[1:])
