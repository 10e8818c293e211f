"""How SGLang 0.5.23 reads a flat DFlash or DSpark checkpoint (speculative/dflash_utils.py,
speculative/dspark_components/dspark_config.py, models/dflash.py, models/dspark.py): config.json by
transformers' Qwen3 class; most settings inside `dflash_config` or, failing that, at the top, those
of convolutions inside it only, those of DSpark's heads at the top only; unknown tensor names are
dropped without a word. Embedding (of the mask, too) and LM head are the target's, all of its ids
can be drafted. A layer with a window is causal unless `is_causal` says otherwise; the window counts
the row itself.
Letters: D hidden width, I input width, N nodes, S sequence (the context), T fed tokens, V target
vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.export.layouts.engines import gate
from specctl.export.readers.block_heads import confidences, spark_bias, spark_shapes
from specctl.export.readers.block_layers import (
    ConvSizes,
    RowMask,
    block_shapes,
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
FULL, SLIDING = "full_attention", "sliding_attention"
CONV_KEYS = ("conv_kernel_size", "conv_group_size")
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
        self.masks = [self._mask(layer) for layer in range(config.num_hidden_layers)]
        self.layer_ids = self._layer_ids(layers)
        self.params = Parameters(self._shapes())
        for name, tensor in read_tensors(folder).items():
            self._load(name, tensor)
        self.params.check()

    def _either(self, key: str, default: Any = None) -> Any:
        return self.nested.get(key, getattr(self.config, key, default))

    def _mask(self, layer: int) -> RowMask:
        """What rows of a layer see."""
        kind = (getattr(self.config, "layer_types", None) or [FULL] * (layer + 1))[layer]
        if kind not in (FULL, SLIDING):
            raise gate(f"layer_types {self.config.layer_types}", f"{FULL} or {SLIDING}")
        is_causal, window = getattr(self.config, "is_causal", None), None
        if kind == SLIDING:
            window = getattr(self.config, "sliding_window", None)
            if window is None:
                raise gate(f"{SLIDING} without sliding_window", "a number of rows")
        return RowMask(bool(kind == SLIDING if is_causal is None else is_causal), window)

    def _conv(self) -> ConvSizes | None:
        taps, group = (int(self.nested.get(key, 0)) for key in CONV_KEYS)
        if bool(taps) != bool(group):
            raise gate(f"conv_kernel_size {taps}, conv_group_size {group}", "both, or neither")
        return ConvSizes(taps, group) if taps else None

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
        num_taps = len(self.layer_ids)
        shapes = block_shapes(self.sizes, config.num_hidden_layers, num_taps, self._conv())
        if not self.is_spark:
            return shapes
        rank = int(getattr(config, "markov_rank", 0))
        if rank <= 0:
            raise gate("no markov head", "markov_rank and markov_head_type at the top level")
        sure_of = rank if getattr(config, "confidence_head_with_markov", rank > 0) else 0
        kind, size = str(getattr(config, "markov_head_type", "vanilla")), config.vocab_size
        return shapes | spark_shapes(self.sizes, rank, size, size, sure_of, kind)

    def _load(self, name: str, tensor: Tensor) -> None:
        plain = name.removeprefix("model.")
        if self.is_spark and plain.startswith(SKIPPED):
            return
        if self.is_spark and plain.startswith(("markov_head.", "confidence_head.")):
            plain = name  # these are looked for under their whole names
        else:
            plain = RENAMED.get(plain, plain)
        self.params.load(plain, tensor)

    def taken(self, trial: Trial) -> Tensor:
        """[S, I]: the captured states, in the order of the layers."""
        wanted = {value + 1 for value in self.layer_ids}
        taken = [trial.states[k] for k in range(len(trial.states) - 1) if k in wanted]
        if len(taken) != len(self.layer_ids):
            raise gate(f"{len(taken)} hidden states captured", f"{len(self.layer_ids)} read by fc")
        return torch.cat(taken, dim=-1)

    def block(self, trial: Trial) -> Tensor:
        """[T, D]: the normed states of all rows, that of the root first."""
        mask_id, size = self._either("mask_token_id"), self._either("block_size", 16)
        if mask_id is None or not 0 <= mask_id < len(self.embedding_VD):
            raise gate(f"mask_token_id {mask_id}", "a token of the target")
        if self.is_spark and not getattr(self.config, "sample_from_anchor", True):
            raise gate("sample_from_anchor: false", "an anchor that speaks")
        x_TD = self.embedding_VD[torch.tensor([trial.ids[-1], *[mask_id] * (size - 1)])]
        return self.through(self.taken(trial), x_TD)

    def through(self, taken_SI: Tensor, x_TD: Tensor) -> Tensor:
        """[T, D]: the normed states of these rows behind the captured states."""
        return through_block(self.params, self.sizes, taken_SI, x_TD, self.masks)

    def spoken(self, trial: Trial) -> Tensor:
        """[N + 1, D]: the normed states of the rows that speak."""
        out_TD = self.block(trial)
        return out_TD if self.anchor_speaks else out_TD[1:]

    def walked(self, trial: Trial) -> Trial:
        """The trial with tokens that the draft model could draft: any, for most."""
        return trial

    @property
    def anchor_speaks(self) -> bool:
        """Whether the root's row predicts."""
        return self.is_spark

    def drafted_logits(self, trial: Trial) -> Tensor:
        """[N + 1, V]."""
        state_ND = self.spoken(trial)
        said_NV = F.linear(state_ND, self.head_VD)
        return said_NV + spark_bias(self.params, trial, state_ND) if self.is_spark else said_NV

    def confidences(self, trial: Trial) -> Tensor | None:
        """[N + 1]: how likely each place is to be accepted."""
        return confidences(self.params, trial, self.spoken(trial))
