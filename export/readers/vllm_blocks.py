"""What vLLM 0.33.0 makes of a folder in the speculators format, for `dflash`, `dflash2`, `dspark`.

Mirrors, by behaviour, `transformers_utils/configs/speculators/algos.py` (which keys reach the draft
model, and what a missing one means), `models/qwen3_dflash.py` and `models/qwen3_dspark.py` (names,
the forward pass; an unknown tensor stops the loader, a missing one does not), `qwen3_dflash2.py`
(convolutions and selector), `spec_decode/dflash` and `spec_decode/dspark` (which rows stand in a
block, which of them speak). A sliding window counts the row itself.
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
from specctl.export.readers.block_heads import (
    VANILLA,
    confidences,
    selected,
    selector_shapes,
    spark_bias,
    spark_shapes,
)
from specctl.export.readers.block_layers import (
    ConvSizes,
    RowMask,
    block_shapes,
    through_block,
)
from specctl.export.readers.layers import LayerSizes
from specctl.export.readers.loading import Parameters, read_tensors
from specctl.export.readers.trial import Trial, over_targets

ENGINE = "vLLM 0.33"
KINDS = ("dflash", "dflash2", "dspark")
OF_DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
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
    if kind not in KINDS or "speculators_config" not in body:
        raise gate(f"speculators_model_type {kind!r}", f"one of {KINDS}, with speculators_config")
    if not aux or "mask_token_id" not in body:
        raise gate("no layers or no mask", "aux_hidden_state_layer_ids and mask_token_id")
    draft: dict[str, Any] = dict(body["transformer_layer_config"])
    draft |= {"eagle_aux_hidden_state_layer_ids": aux, "kind": kind}
    draft |= {"sample_from_anchor": body.get("sample_from_anchor", False)}
    draft |= {"draft_vocab_size": body.get("draft_vocab_size")}
    if kind != "dspark":
        draft["dflash_config"] = {
            "mask_token_id": body["mask_token_id"],
            "target_layer_ids": [v - 1 for v in aux],
            "causal": not body.get("sliding_window_non_causal", True),
        }
        if draft["sample_from_anchor"]:
            raise gate(f"sample_from_anchor in {kind}", "slots behind the anchor that speak")
        missing = [key for key in OF_DFLASH2 if kind == "dflash2" and not body.get(key)]
        if missing:
            raise gate(f"no {missing[0]}", ", ".join(OF_DFLASH2))
        draft["dflash_config"] |= {key: body[key] for key in OF_DFLASH2 if kind == "dflash2"}
    else:
        draft |= {key: body[key] for key in FORWARDED if body.get(key) is not None}
    methods = body["speculators_config"]["proposal_methods"]
    return draft | {"length": methods[0]["speculative_tokens"]}


class VllmBlocks:
    """The draft model beside a target with these embeddings and this head [V, D]; `config` in place
    of the one that vLLM derives."""

    heads: tuple[str, ...] = (VANILLA,)  # of DSpark, which vLLM computes

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
        if self.rows != self.size and self.config["kind"] == "dflash2":
            raise gate(f"a vocabulary of {self.rows}", f"all {self.size}, which the selector needs")
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
        nested = config.get("dflash_config", {})
        conv = None
        if config["kind"] == "dflash2":
            conv = ConvSizes(nested["conv_kernel_size"], nested["conv_group_size"])
        shapes = block_shapes(self.sizes, config["num_hidden_layers"], taps, conv)
        if has_head or self.rows != self.size:
            shapes["lm_head.weight"] = [self.rows, width]
        if config["kind"] == "dflash2":
            shapes |= selector_shapes(self.sizes, nested["selector_rank"], config["vocab_size"])
        return shapes | self._spark_shapes() if self.is_spark else shapes

    def _spark_shapes(self) -> dict[str, list[int]]:
        config = self.config
        head = config.get("markov_head_type", VANILLA)
        if head not in self.heads:
            raise gate(f"markov_head_type {head}", ", ".join(self.heads))
        rank, sure_of = config["markov_rank"], None
        if config.get("enable_confidence_head", False):
            sure_of = rank if config.get("confidence_head_with_markov", False) else 0
        return spark_shapes(self.sizes, rank, config["vocab_size"], self.rows, sure_of, head)

    # -- what is computed -----------------------------------------------------------------------

    def block(self, trial: Trial) -> Tensor:
        """[T, D]: the normed states of all rows, that of the root first."""
        config = self.config
        taps = sorted(set(config["eagle_aux_hidden_state_layer_ids"]))
        nested = config.get("dflash_config", {})
        mask_id = nested.get("mask_token_id", config.get("mask_token_id"))
        masks = config["length"] - (1 if config["sample_from_anchor"] else 0)
        x_TD = self.embedding_VD[torch.tensor([trial.ids[-1], *[mask_id] * masks])]
        seen = [self._mask(layer) for layer in range(config["num_hidden_layers"])]
        taken_SI = torch.cat([trial.states[k] for k in taps], dim=-1)
        return through_block(self.params, self.sizes, taken_SI, x_TD, seen)

    def spoken(self, trial: Trial) -> Tensor:
        """[N + 1, D]: the normed states that the LM head reads, of the rows that speak."""
        out_TD = self.block(trial)
        return out_TD if self.config["sample_from_anchor"] else out_TD[1:]

    def _mask(self, layer: int) -> RowMask:
        config = self.config
        kinds: list[str] = config.get("layer_types") or []
        slides, window = bool(kinds) and kinds[layer] == "sliding_attention", None
        if slides:
            window = config.get("sliding_window")
            if window is None:
                raise gate("sliding_attention without sliding_window", "a number of rows")
        if config.get("is_causal") is not None:
            return RowMask(bool(config["is_causal"]), window)
        if "causal" in config.get("dflash_config", {}):
            return RowMask(bool(config["dflash_config"]["causal"]), window)
        return RowMask(slides, window)

    def drafted_logits(self, trial: Trial) -> Tensor:
        """[N + 1, V], -inf for ids without a row."""
        state_ND = self.spoken(trial)
        said_NK = self.base(state_ND)
        if self.is_spark:
            said_NK = said_NK + spark_bias(self.params, trial, state_ND)
        if self.config["kind"] == "dflash2":
            count = int(self.config["dflash_config"]["selector_top_k"])
            said_NK = selected(self.params, trial, state_ND, said_NK, count)
        return self.whole(said_NK)

    def base(self, state_ND: Tensor) -> Tensor:
        """[N, K]: the logits of these states, uncorrected."""
        return F.linear(state_ND, self.params.get("lm_head.weight", self.shared_VD))

    def whole(self, said_NK: Tensor) -> Tensor:
        """[N, V]: by target id, -inf for those without a row."""
        ids_K = None if self.d2t_K is None else torch.arange(self.rows) + self.d2t_K
        return over_targets(said_NK, ids_K, self.size)

    def confidences(self, trial: Trial) -> Tensor | None:
        """[N + 1]: how likely each place is to be accepted, if the folder has such a head."""
        return confidences(self.params, trial, self.spoken(trial))
