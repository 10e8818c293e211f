"""How SGLang 0.5.23 reads a flat DFlash or DSpark checkpoint (speculative/dflash_utils.py,
speculative/dspark_components/dspark_config.py, models/dflash.py, models/dspark.py): config.json by
transformers' Qwen3 class; most settings inside `dflash_config` or, failing that, at the top, those
of DSpark's heads at the top only; unknown tensor names are dropped without a word. Embedding (of
the mask, too) and LM head are the target's, all of its ids can be drafted.
Letters: D hidden width, N nodes, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

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
from specctl.export.readers.loading import (
    Parameters,
    read_config,
    read_tensors,
    refuse_bias,
    sizes_of,
)
from specctl.export.readers.trial import Trial

ENGINE = "SGLang 0.5.23"
DFLASH, DSPARK = "DFlashDraftModel", "Qwen3DSparkModel"
SKIPPED = ("lm_head.", "rotary_emb.", "embed_tokens.")  # by DSpark's loader
RENAMED = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


class SglangBlocks:
    """The draft model of that architecture beside a target with these embeddings and this head
    [V, D] and so many layers."""

    def __init__(
        self, folder: Path, architecture: str, embedding_VD: Tensor, head_VD: Tensor, layers: int
    ) -> None:
        self.config = config = read_config(folder, architecture)
        refuse_bias(config)
        self.sizes, self.is_spark = sizes_of(config), architecture == DSPARK
        self.embedding_VD, self.head_VD = embedding_VD, head_VD
        self.nested: dict[str, Any] = getattr(config, "dflash_config", None) or {}
        if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
            raise gate(f"layer_types {config.layer_types}", "full_attention in every layer")
        self.layer_ids = self._layer_ids(layers)
        self.params = Parameters(self._shapes())
        for name, tensor in read_tensors(folder).items():
            self._load(name, tensor)
        self.params.check()

    def _either(self, key: str, default: Any = None) -> Any:
        return self.nested.get(key, getattr(self.config, key, default))

    def _layer_ids(self, layers: int) -> list[int]:
        """Layers of the target whose outputs are captured; none named: evenly spread ones."""
        ids, number = self._either("target_layer_ids"), self.config.num_hidden_layers
        if ids is None and number == 1:
            ids = [layers // 2]
        elif ids is None:
            last = layers - 3
            ids = [round(1 + i * (last - 1) / (number - 1)) for i in range(number)]
        if not ids or any(not 0 <= value < layers for value in ids):
            raise gate(f"target_layer_ids {ids}", f"layers 0 to {layers - 1}")
        return [int(value) for value in ids]

    def _shapes(self) -> dict[str, list[int]]:
        config = self.config
        shapes = block_shapes(self.sizes, config.num_hidden_layers, len(self.layer_ids))
        if not self.is_spark:
            return shapes
        rank = int(getattr(config, "markov_rank", 0))
        if rank <= 0 or str(getattr(config, "markov_head_type", "vanilla")) != "vanilla":
            raise gate(
                "no vanilla markov head", "markov_rank and markov_head_type at the top level"
            )
        sure_of = rank if getattr(config, "confidence_head_with_markov", rank > 0) else 0
        size = config.vocab_size
        return shapes | spark_shapes(self.sizes, rank, size, size, sure_of)

    def _load(self, name: str, tensor: Tensor) -> None:
        plain = name.removeprefix("model.")
        if self.is_spark and plain.startswith(SKIPPED):
            return
        if self.is_spark and plain.startswith(("markov_head.", "confidence_head.")):
            plain = name  # these are looked for under their whole names
        else:
            plain = RENAMED.get(plain, plain)
        self.params.load(plain, tensor)

    def spoken(self, trial: Trial) -> Tensor:
        """[N + 1, D]: the normed states of the rows that speak."""
        mask_id, size = self._either("mask_token_id"), self._either("block_size", 16)
        if mask_id is None or not 0 <= mask_id < len(self.embedding_VD):
            raise gate(f"mask_token_id {mask_id}", "a token of the target")
        if self.is_spark and not getattr(self.config, "sample_from_anchor", True):
            raise gate("sample_from_anchor: false", "an anchor that speaks")
        x_TD = self.embedding_VD[torch.tensor([trial.ids[-1], *[mask_id] * (size - 1)])]
        wanted = {value + 1 for value in self.layer_ids}
        taken = [trial.states[k] for k in range(len(trial.states) - 1) if k in wanted]
        if len(taken) != len(self.layer_ids):
            raise gate(f"{len(taken)} hidden states captured", f"{len(self.layer_ids)} read by fc")
        causal = [bool(getattr(self.config, "is_causal", None))] * self.config.num_hidden_layers
        out_TD = through_block(self.params, self.sizes, torch.cat(taken, dim=-1), x_TD, causal)
        return out_TD if self.anchor_speaks else out_TD[1:]

    @property
    def anchor_speaks(self) -> bool:
        """Whether the root's row predicts."""
        return self.is_spark

    def drafted_logits(self, trial: Trial) -> Tensor:
        """[N + 1, V]."""
        said_NV = F.linear(self.spoken(trial), self.head_VD)
        if not self.is_spark:
            return said_NV
        return said_NV + F.linear(before(self.params, trial), self.params[W2])

    def confidences(self, trial: Trial) -> Tensor | None:
        """[N + 1]: how likely each place is to be accepted."""
        return confidences(self.params, trial, self.spoken(trial))
