"""Reference reader of a DFlash or DSpark file: what llama.cpp (b11549) computes from it beside a
target, in float64 (src/models/dflash.cpp, common/speculative.cpp).

Inputs of layers of the target in the order of the file's list; keys and values of the joined
features stand in front of a block of the newest token and masks, whose rows see each other. With
`markov_w1` every place gets a bias by the token before it, the anchor speaks (unless the file says
otherwise), and a confidence head reads state and that token. `d2t` are absolute ids.
Letters: D hidden width, K draft vocabulary, N nodes, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.export.layouts.engines import gate
from specctl.export.layouts.llama_cpp.reader import GgufReader
from specctl.export.readers.block_layers import (
    SURE,
    SURE_BIAS,
    W1,
    W2,
    before,
    block_shapes,
    confidences,
    spark_shapes,
    through_block,
)
from specctl.export.readers.layers import LayerSizes
from specctl.export.readers.trial import Trial, over_targets

NAMES = {  # of the graph -> as the shared equations call them
    "fc": "fc",
    "enc.output_norm": "hidden_norm",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SPARK = {W1: "markov_w1.weight", W2: "markov_w2.weight"}
SURELY = {SURE: "conf_proj.weight", SURE_BIAS: "conf_proj.bias"}


class GgufBlocks(GgufReader):
    """An opened file beside a target with these embeddings and this head [V, D]."""

    def __init__(self, path: Path, embedding_VD: Tensor, head_VD: Tensor) -> None:
        super().__init__(path)
        if self.arch != "dflash":
            raise gate(f"architecture {self.arch}", "dflash")
        size = len(self.tokens.tokens)
        self.taps = [int(layer) for layer in self._own("target_layers")]
        self.is_spark = SPARK[W1] in self._tensors
        self.speaks = self.is_spark and bool(self._own("sample_from_anchor", True))
        self.block = int(self._own("block_size", 16))
        mask_id = self.special_id("mask")
        if mask_id is None or not 0 <= mask_id < size:
            raise gate(f"mask token {mask_id}", "a token of the target")
        self.mask_id = mask_id
        d2t_K = self._tensors.get("d2t")
        self.ids_K = None if d2t_K is None else d2t_K.long()
        self._used.add("d2t")
        rows = size if self.ids_K is None else len(self.ids_K)
        self.embedding_VD = self._optional("token_embd.weight", embedding_VD, size)
        self.head_KD = self._optional("output.weight", head_VD, rows)
        if len(self.head_KD) != rows:
            raise gate("no LM head for a reduced vocabulary", f"output.weight of {rows} rows")
        self.params = self._params(size, rows)
        unread = sorted(set(self._tensors) - self._used)
        if unread:
            raise gate(f"{unread[0]}, which the dflash graph does not read", "no such tensor")

    def _optional(self, name: str, borrowed: Tensor, rows: int) -> Tensor:
        return self._tensor(name, rows, self.width) if name in self._tensors else borrowed

    @property
    def sizes(self) -> LayerSizes:
        base = float(self._own("rope.freq_base", 10000.0))
        return LayerSizes(
            self.width,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.num_neurons,
            self.eps,
            base,
        )

    def _params(self, size: int, rows: int) -> dict[str, Tensor]:
        back = {theirs: ours for ours, theirs in NAMES.items()}
        found = {}
        for name, shape in block_shapes(self.sizes, self.num_layers, len(self.taps)).items():
            stem = name.removesuffix(".weight")
            layer, _, part = stem.removeprefix("layers.").partition(".")
            own = f"blk.{layer}.{back[part]}" if stem.startswith("layers.") else back[stem]
            found[name] = self._tensor(f"{own}.weight", *shape)
        if self.is_spark:
            rank = self._tensors[SPARK[W1]].shape[1]
            given = SPARK | (SURELY if SURELY[SURE] in self._tensors else {})
            for name, shape in spark_shapes(self.sizes, rank, size, rows, rank).items():
                if name in given:
                    found[name] = self._tensor(given[name], *shape)
        return found

    @torch.no_grad()
    def spoken(self, trial: Trial) -> Tensor:
        """[N + 1, D]: the normed states of the rows that speak."""
        outside = [tap for tap in self.taps if not 0 <= tap < len(trial.states) - 1]
        if outside:
            raise gate(f"target layer {outside[0]}", "an input of one of the target's layers")
        ids = [trial.ids[-1], *[self.mask_id] * (self.block - 1)]
        taken = torch.cat([trial.states[tap] for tap in self.taps], dim=-1)
        causal = [bool(self._own("attention.causal", False))] * self.num_layers
        x_TD = self.embedding_VD[torch.tensor(ids)]
        out_TD = through_block(self.params, self.sizes, taken, x_TD, causal)
        return out_TD if self.speaks else out_TD[1:]

    @torch.no_grad()
    def drafted_logits(self, trial: Trial) -> Tensor:
        """[N + 1, V]."""
        said_NK = F.linear(self.spoken(trial), self.head_KD)
        if self.is_spark:
            said_NK = said_NK + F.linear(before(self.params, trial), self.params[W2])
        return over_targets(said_NK, self.ids_K, len(self.embedding_VD))

    @torch.no_grad()
    def confidences(self, trial: Trial) -> Tensor | None:
        """[N + 1]: how likely each place is to be accepted, if the file has a head for it."""
        return confidences(self.params, trial, self.spoken(trial))
