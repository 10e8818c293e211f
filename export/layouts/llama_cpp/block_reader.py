"""Reference reader of a DFlash, DFlash2 or DSpark file: what llama.cpp (b11549) computes from it
beside a target, in float64 (src/models/dflash.cpp, common/speculative.cpp).

Inputs of layers of the target in the order of the file's list; keys and values of the joined
features stand in front of a block of the newest token and masks, whose rows see each other. With
`markov_w1` every place gets a bias by the token before it, the anchor speaks (unless the file says
otherwise), and a confidence head reads state and that token. With `selector_hidden` (DFlash2) the
layers have convolutions and a selector chooses; the model's width must hold its scores. `d2t` are
absolute ids. Layers of a pattern see the newest `sliding_window` rows, themselves counted.
Letters: D hidden width, K draft vocabulary, N nodes, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.export.layouts.engines import gate
from specctl.export.layouts.llama_cpp.reader import GgufReader
from specctl.export.readers.block_heads import (
    BEHIND,
    HIDDEN,
    NEXT,
    SURE,
    SURE_BIAS,
    W1,
    W2,
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
    "attn_conv_proj": "attention_conv.kernel_projection",
    "ffn_conv_proj": "mlp_conv.kernel_projection",
}
CONV = {"attn_conv_base": "attention_conv.base_kernel", "ffn_conv_base": "mlp_conv.base_kernel"}
SPARK = {W1: "markov_w1.weight", W2: "markov_w2.weight"}
SELECTOR = {
    BEHIND: "selector_predecessor.weight",
    NEXT: "selector_successor.weight",
    HIDDEN: "selector_hidden.weight",
}
OF_DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
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
        self.selector = self._selector()
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

    def _selector(self) -> dict[str, int] | None:
        """The sizes of DFlash2's parts, where the file has them."""
        if SELECTOR[HIDDEN] not in self._tensors:
            return None
        sizes = {key: int(self._own(key, 0)) for key in OF_DFLASH2}
        missing = [key for key, value in sizes.items() if value <= 0]
        if missing:
            raise gate(f"no dflash.{missing[0]}", ", ".join(OF_DFLASH2))
        needed = sizes["selector_top_k"] * (sizes["selector_top_k"] + 1)
        if self.width < needed:
            raise gate(f"a width of {self.width}", f"{needed}, which holds the selector's scores")
        return sizes

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
        back = {theirs: ours for ours, theirs in (NAMES | CONV).items()}
        found, chosen = {}, self.selector
        conv = None
        if chosen is not None:
            conv = ConvSizes(chosen["conv_kernel_size"], chosen["conv_group_size"])
        shapes = block_shapes(self.sizes, self.num_layers, len(self.taps), conv)
        for name, shape in shapes.items():
            stem = name.removesuffix(".weight")
            layer, _, part = stem.removeprefix("layers.").partition(".")
            own = f"blk.{layer}.{back[part]}" if stem.startswith("layers.") else back[stem]
            found[name] = self._tensor(own + name.removeprefix(stem), *shape)
        if chosen is not None:
            own_shapes = selector_shapes(self.sizes, chosen["selector_rank"], size)
            for name, shape in own_shapes.items():
                found[name] = self._tensor(SELECTOR[name], *shape)
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
        x_TD = self.embedding_VD[torch.tensor(ids)]
        out_TD = through_block(self.params, self.sizes, taken, x_TD, self._masks())
        return out_TD if self.speaks else out_TD[1:]

    def _masks(self) -> list[RowMask]:
        """One per layer."""
        causal, window = bool(self._own("attention.causal", False)), self._window()
        slides = [True] * self.num_layers
        if window is not None:
            slides = [bool(x) for x in self._own("attention.sliding_window_pattern")]
        if len(slides) != self.num_layers:
            raise gate(f"a pattern of {len(slides)} layers", f"one of {self.num_layers}")
        return [RowMask(causal, window if one else None) for one in slides]

    def _window(self) -> int | None:
        return int(self._own("attention.sliding_window", 0)) or None

    @torch.no_grad()
    def drafted_logits(self, trial: Trial) -> Tensor:
        """[N + 1, V]."""
        state_ND = self.spoken(trial)
        said_NK = F.linear(state_ND, self.head_KD)
        if self.is_spark:
            said_NK = said_NK + spark_bias(self.params, trial, state_ND)
        if self.selector is not None:
            count = self.selector["selector_top_k"]
            said_NK = selected(self.params, trial, state_ND, said_NK, count)
        return over_targets(said_NK, self.ids_K, len(self.embedding_VD))

    @torch.no_grad()
    def confidences(self, trial: Trial) -> Tensor | None:
        """[N + 1]: how likely each place is to be accepted, if the file has a head for it."""
        return confidences(self.params, trial, self.spoken(trial))
