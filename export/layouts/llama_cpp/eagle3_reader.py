"""Reference reader of an EAGLE-3 GGUF file: what llama.cpp's graph `eagle3` computes from it, in
float64 (src/models/eagle3.cpp): exactly three inputs of layers of the target, in ascending order,
through `fc`; neighbours rotated; `d2t` as absolute ids; the un-normed state fed back.
Letters: D hidden width, I input width, K draft vocabulary, N nodes, T fed tokens, V target
vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.export.layouts.engines import gate
from specctl.export.layouts.llama_cpp.reader import GgufReader
from specctl.export.readers.trial import Trial, chained, over_targets

NUM_LAYERS = 3


class GgufEagle3(GgufReader):
    """An opened file beside a target with these embeddings [V, D]."""

    def __init__(self, path: Path, embedding_VD: Tensor) -> None:
        super().__init__(path)
        self.embedding_VD = embedding_VD
        if self.arch != "eagle3":
            raise gate(f"architecture {self.arch}", "eagle3")
        self.taps = [int(layer) for layer in self._own("target_layers")]
        if len(self.taps) != NUM_LAYERS:
            raise gate(f"{len(self.taps)} target layers", f"exactly {NUM_LAYERS}")
        if int(self._own("target_hidden_size")) != embedding_VD.shape[1]:
            raise gate(f"target_hidden_size {self._own('target_hidden_size')}", "the target's")
        self.keeps_normed = bool(self._own("norm_before_residual", False))
        if self._own("norm_before_fc", False):
            raise gate("norm_before_fc", "features as the target computes them")

    @torch.no_grad()
    def drafted_logits(self, trial: Trial) -> Tensor:
        """[N + 1, V]."""
        outside = [tap for tap in self.taps if not 0 <= tap < len(trial.states) - 1]
        if outside:
            raise gate(f"target layer {outside[0]}", "an input of one of the target's layers")
        taken_TI = torch.cat([trial.states[tap] for tap in self.taps], dim=-1)
        joined_TD = self._linear(taken_TI, "fc", self.width)
        d2t_K = self._tensors.get("d2t")
        said_NK = chained(self._step, trial, joined_TD)
        self._used.add("d2t")
        unread = sorted(set(self._tensors) - self._used)
        if unread:
            raise gate(f"{unread[0]}, which the eagle3 graph does not read", "no such tensor")
        ids_K = None if d2t_K is None else d2t_K.long()
        return over_targets(said_NK, ids_K, len(self.embedding_VD))

    def _step(self, ids_T: Tensor, state_TD: Tensor) -> tuple[Tensor, Tensor]:
        token_TD = self._norm(self.embedding_VD[ids_T], "blk.0.attn_norm")
        normed_TD = self._norm(state_TD, "blk.0.attn_norm_2")
        both_TI = torch.cat([token_TD, normed_TD], dim=-1)
        kept_TD = normed_TD if self.keeps_normed else state_TD
        x = kept_TD + self._attention(both_TI, "blk.0")
        flat = self._norm(x, "blk.0.ffn_norm")
        gated = F.silu(self._linear(flat, "blk.0.ffn_gate", self.num_neurons))
        inner = gated * self._linear(flat, "blk.0.ffn_up", self.num_neurons)
        x = x + self._linear(inner, "blk.0.ffn_down", self.width)
        rows = self._tensors["d2t"].shape[0] if "d2t" in self._tensors else len(self.embedding_VD)
        return self._linear(self._norm(x, "output_norm"), "output", rows), x
