"""What vLLM 0.33.0 makes of a folder in the speculators format, for `dflash` and `dspark`.

Mirrors, by behaviour, `transformers_utils/configs/speculators/algos.py` (which keys reach the draft
model, and what a missing one means), `models/qwen3_dflash.py` and `models/qwen3_dspark.py` (names,
the forward pass; an unknown tensor stops the loader, a missing one does not), `spec_decode/dflash`
and `spec_decode/dspark` (which rows stand in a block, which of them speak).
An embedding in the folder is kept where it differs from the target's; without an LM head the
target's is shared; d2t that is missing counts as zeros.
Letters: D hidden width, I input width, K draft vocabulary, N nodes, S sequence (the context), T fed
tokens, V target vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.export.layouts.engines import gate
from specctl.export.readers.block_layers import (
    W2,
    before,
    block_shapes,
    confidences,
    spark_shapes,
    through_block,
)
from specctl.export.readers.layers import LayerSizes
from specctl.export.readers.loading import Parameters, read_tensors
from specctl.export.readers.trial import Trial, over_targets

ENGINE = "vLLM 0.33"
FORWARDED = (
    "mask_token_id",
    "markov_rank",
    "markov_head_type",
    "block_size",
    "enable_confidence_head",
    "confidence_head_with_markov",
)


def block_config(body: Mapping[str, Any]) -> dict[str, Any]:
    """The draft model's config that vLLM derives from config.json."""
    kind, aux = body.get("speculators_model_type"), body.get("aux_hidden_state_layer_ids")
    if kind not in ("dflash", "dspark") or "speculators_config" not in body:
        raise gate(f"speculators_model_type {kind!r}", "dflash or dspark, with speculators_config")
    if not aux or "mask_token_id" not in body:
        raise gate("no layers or no mask", "aux_hidden_state_layer_ids and mask_token_id")
    draft: dict[str, Any] = dict(body["transformer_layer_config"])
    draft |= {"eagle_aux_hidden_state_layer_ids": aux, "kind": kind}
    draft |= {"sample_from_anchor": body.get("sample_from_anchor", False)}
    draft |= {"draft_vocab_size": body.get("draft_vocab_size")}
    if kind == "dflash":
        draft["dflash_config"] = {
            "mask_token_id": body["mask_token_id"],
            "target_layer_ids": [v - 1 for v in aux],
            "causal": not body.get("sliding_window_non_causal", True),
        }
        if draft["sample_from_anchor"]:
            raise gate("sample_from_anchor in dflash", "slots behind the anchor that speak")
    else:
        draft |= {key: body[key] for key in FORWARDED if body.get(key) is not None}
    methods = body["speculators_config"]["proposal_methods"]
    return draft | {"length": methods[0]["speculative_tokens"]}


class VllmBlocks:
    """The draft model beside a target with these embeddings and this head [V, D]; `config` in place
    of the one that vLLM derives."""

    def __init__(
        self,
        folder: Path,
        embedding_VD: Tensor,
        head_VD: Tensor,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        body = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.config, self.shared_VD = config or block_config(body), head_VD
        self.is_spark = self.config["kind"] == "dspark"
        self.sizes, self.size = self._sizes(), len(embedding_VD)
        self.rows = self.config["draft_vocab_size"] or self.config["vocab_size"]
        given = read_tensors(folder)
        self.d2t_K = given.pop("d2t", None)
        given.pop("t2d", None)
        self.embedding_VD = embedding_VD
        if "embed_tokens.weight" in given:
            self.embedding_VD = given.pop("embed_tokens.weight").double()
        self.params = Parameters(self._shapes("lm_head.weight" in given))
        for name, tensor in given.items():
            self.params.load(name, tensor)
        self.params.check()
        if self.rows != self.size and self.d2t_K is None:
            if self.is_spark:
                raise gate("no d2t", "the table of a reduced vocabulary")
            self.d2t_K = torch.zeros(self.rows, dtype=torch.long)

    def _sizes(self) -> LayerSizes:
        config = self.config
        rope, heads = config.get("rope_parameters") or {}, config["num_attention_heads"]
        if rope.get("rope_type", "default") != "default":
            raise gate(f"rope_type {rope['rope_type']}", "default: drafters scale no positions")
        return LayerSizes(
            config["hidden_size"],
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or config["hidden_size"] // heads,
            config["intermediate_size"],
            config["rms_norm_eps"],
            float(rope.get("rope_theta", 1_000_000)),
        )

    def _shapes(self, has_head: bool) -> dict[str, list[int]]:
        config, width = self.config, self.sizes.width
        taps = len(config["eagle_aux_hidden_state_layer_ids"])
        shapes = block_shapes(self.sizes, config["num_hidden_layers"], taps)
        if has_head or self.rows != self.size:
            shapes["lm_head.weight"] = [self.rows, width]
        if not self.is_spark:
            return shapes
        if config.get("markov_head_type", "vanilla") != "vanilla":
            raise gate(f"markov_head_type {config['markov_head_type']}", "vanilla")
        rank, sure_of = config["markov_rank"], None
        if config.get("enable_confidence_head", False):
            sure_of = rank if config.get("confidence_head_with_markov", False) else 0
        return shapes | spark_shapes(self.sizes, rank, config["vocab_size"], self.rows, sure_of)

    # -- what is computed -----------------------------------------------------------------------

    def spoken(self, trial: Trial) -> Tensor:
        """[N + 1, D]: the normed states that the LM head reads, of the rows that speak."""
        config = self.config
        taps = sorted(set(config["eagle_aux_hidden_state_layer_ids"]))
        nested = config.get("dflash_config", {})
        mask_id = nested.get("mask_token_id", config.get("mask_token_id"))
        masks = config["length"] - (1 if config["sample_from_anchor"] else 0)
        x_TD = self.embedding_VD[torch.tensor([trial.ids[-1], *[mask_id] * masks])]
        causal = [self._is_causal(layer) for layer in range(config["num_hidden_layers"])]
        taken_SI = torch.cat([trial.states[k] for k in taps], dim=-1)
        out_TD = through_block(self.params, self.sizes, taken_SI, x_TD, causal)
        return out_TD if config["sample_from_anchor"] else out_TD[1:]

    def _is_causal(self, layer: int) -> bool:
        config = self.config
        if config.get("is_causal") is not None:
            return bool(config["is_causal"])
        if "causal" in config.get("dflash_config", {}):
            return bool(config["dflash_config"]["causal"])
        kinds: list[str] = config.get("layer_types") or []
        return bool(kinds) and kinds[layer] == "sliding_attention"

    def drafted_logits(self, trial: Trial) -> Tensor:
        """[N + 1, V], -inf for ids without a row."""
        said_NK = F.linear(self.spoken(trial), self.params.get("lm_head.weight", self.shared_VD))
        if self.is_spark:
            said_NK = said_NK + F.linear(before(self.params, trial), self.params[W2])
        ids_K = None if self.d2t_K is None else torch.arange(self.rows) + self.d2t_K
        return over_targets(said_NK, ids_K, self.size)

    def confidences(self, trial: Trial) -> Tensor | None:
        """[N + 1]: how likely each place is to be accepted, if the folder has such a head."""
        return confidences(self.params, trial, self.spoken(trial))
