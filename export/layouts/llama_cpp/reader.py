"""Reference reader of a GGUF file: what llama.cpp (b11549) computes from it, in float64.

Mirrors src/llama-model.cpp and src/models/{llama,qwen3}.cpp: defaults of missing keys, the
graph by `general.architecture` (llama and eagle3 rotate neighbours, others halves), an absent
`output` read from the embedding, `rope_freqs` as divisors, but for qwen3; a tensor that the graph
does not read, or lacks, stops the load. It shares nothing with the writer.

EAGLE-3 (src/models/eagle3.cpp): exactly three inputs of layers of the target, in ascending order,
through `fc`; neighbours rotated; `d2t` as absolute ids; the un-normed state fed back.
Letters: D hidden width, E head width, H query heads, I input width, K draft vocabulary, N nodes, S
sequence, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.export.layouts.engines import gate
from specctl.export.layouts.llama_cpp import library
from specctl.export.layouts.llama_cpp.tokens import GgufTokens
from specctl.export.readers.trial import Trial, chained, over_targets

# Of the attention; None: where there is a bias.
_IS_BIASED = {"llama": None, "qwen3": False, "eagle3": False, "dflash": False}
_HALVES = ("qwen3", "dflash")  # graphs that rotate halves, not neighbours
_REQUIRED = object()


class GgufReader:
    """An opened file. `logits(ids_S)` and `tokens` are what llama.cpp makes of it."""

    def __init__(self, path: Path) -> None:
        gguf = library()
        file = gguf.GGUFReader(path)
        self._fields = {name: field.contents() for name, field in file.fields.items()}
        self._tensors: dict[str, Tensor] = {}
        for entry in file.tensors:
            if entry.tensor_type.name == "I64":
                self._tensors[entry.name] = torch.from_numpy(entry.data.copy())
                continue
            array = gguf.dequantize(entry.data, entry.tensor_type)
            if array.ndim == 1 and entry.tensor_type.name != "F32":
                raise gate(f"{entry.name} of {entry.tensor_type.name}", "vectors of F32")
            self._tensors[entry.name] = torch.from_numpy(array.copy()).double()
        self.arch = str(self._get("general.architecture"))
        if self.arch not in _IS_BIASED:
            raise gate(f"architecture {self.arch}", ", ".join(_IS_BIASED))
        self._used: set[str] = set()
        self._sizes()
        self.tokens = self._vocabulary()

    def _get(self, key: str, default: Any = _REQUIRED) -> Any:
        found = self._fields.get(key, default)
        if found is _REQUIRED:
            raise gate(f"no {key}", "a key that llama.cpp demands")
        return found

    def _own(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._get(f"{self.arch}.{key}", default)

    def _sizes(self) -> None:
        self.context = int(self._own("context_length"))
        self.width = int(self._own("embedding_length"))
        self.num_layers = int(self._own("block_count"))
        self.num_neurons = int(self._own("feed_forward_length"))
        self.num_heads = int(self._own("attention.head_count"))
        self.num_kv_heads = int(self._own("attention.head_count_kv", self.num_heads))
        self.head_dim = int(self._own("attention.key_length", self.width // self.num_heads))
        self.eps = float(self._own("attention.layer_norm_rms_epsilon"))
        turned = int(self._own("rope.dimension_count", self.head_dim))
        values = int(self._own("attention.value_length", self.width // self.num_heads))
        if not turned == values == self.head_dim:
            raise gate(f"widths {turned}, {values}, {self.head_dim}", "one width for all of a head")
        self.inv_freq = self._frequencies()

    def _frequencies(self) -> Tensor:
        base = float(self._own("rope.freq_base", 10000.0))
        kind = str(self._own("rope.scaling.type", "linear"))
        factor = float(self._own("rope.scaling.factor", 0.0))
        if kind not in ("none", "linear"):
            raise gate(f"rope.scaling.type {kind}", "none or linear")
        half = torch.arange(self.head_dim // 2, dtype=torch.float64)
        inv_freq = base ** (-2 * half / self.head_dim)
        if kind == "linear" and factor:
            inv_freq = inv_freq / factor
        if self.arch not in _HALVES and "rope_freqs.weight" in self._tensors:
            inv_freq = inv_freq / self._tensor("rope_freqs.weight", self.head_dim // 2)
        return inv_freq

    def _vocabulary(self) -> GgufTokens:
        kind = str(self._get("tokenizer.ggml.model"))
        if kind not in ("gpt2", "llama"):
            raise gate(f"tokenizer model {kind}", "gpt2 or llama")
        tokens = self._get("tokenizer.ggml.tokens")
        if self._own("vocab_size", len(tokens)) != len(tokens):
            raise gate(f"{len(tokens)} tokens", f"{self._own('vocab_size')} tokens")
        return GgufTokens(
            kind=kind,
            pre=str(self._get("tokenizer.ggml.pre", "default")),
            tokens=tokens,
            merges=self._get("tokenizer.ggml.merges", []),
            scores=self._get("tokenizer.ggml.scores", []),
            space_prefix=bool(self._get("tokenizer.ggml.add_space_prefix", kind == "llama")),
        )

    def special_id(self, name: str) -> int | None:
        """`bos`, `eos` or `mask`."""
        found = self._get(f"tokenizer.ggml.{name}_token_id", None)
        return None if found is None else int(found)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        found = self._tensors.get(name)
        if found is None or tuple(found.shape) != shape:
            size = "missing" if found is None else str(tuple(found.shape))
            raise gate(f"{name} is {size}", f"{name} of {shape}")
        self._used.add(name)
        return found

    def _linear(self, x: Tensor, name: str, rows: int, is_biased: bool | None = False) -> Tensor:
        weight, bias = self._tensor(f"{name}.weight", rows, x.shape[-1]), None
        if is_biased or (is_biased is None and f"{name}.bias" in self._tensors):
            bias = self._tensor(f"{name}.bias", rows)
        return F.linear(x, weight, bias)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._tensor(f"{name}.weight", x.shape[-1])
        return x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt() * weight

    def _rotated(self, x_SHE: Tensor) -> Tensor:
        at_S = torch.arange(x_SHE.shape[0], dtype=torch.float64)
        angle = (at_S[:, None] * self.inv_freq)[:, None]
        cos, sin = angle.cos(), angle.sin()
        if self.arch not in _HALVES:
            a, b = x_SHE[..., 0::2], x_SHE[..., 1::2]
            return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
        a, b = x_SHE.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

    def _attention(self, x: Tensor, own: str) -> Tensor:
        heads, kv, width = self.num_heads, self.num_kv_heads, self.head_dim
        has_bias, length = _IS_BIASED[self.arch], x.shape[0]
        query = self._linear(x, f"{own}.attn_q", heads * width, has_bias).view(length, heads, width)
        key = self._linear(x, f"{own}.attn_k", kv * width, has_bias).view(length, kv, width)
        value = self._linear(x, f"{own}.attn_v", kv * width, has_bias).view(length, kv, width)
        if self.arch == "qwen3":
            query = self._norm(query, f"{own}.attn_q_norm")
            key = self._norm(key, f"{own}.attn_k_norm")
        query, key = self._rotated(query), self._rotated(key)
        key, value = (t.repeat_interleave(heads // kv, dim=1) for t in (key, value))
        score_HSS = torch.einsum("shd,thd->hst", query, key) / math.sqrt(width)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        share_HSS = score_HSS.masked_fill(future, -torch.inf).softmax(-1)
        mixed = torch.einsum("hst,thd->shd", share_HSS, value).flatten(1)
        return self._linear(mixed, f"{own}.attn_output", self.width, has_bias)

    def _mlp(self, x: Tensor, own: str) -> Tensor:
        gated = F.silu(self._linear(x, f"{own}.ffn_gate", self.num_neurons))
        inner = gated * self._linear(x, f"{own}.ffn_up", self.num_neurons)
        return self._linear(inner, f"{own}.ffn_down", self.width)

    def logits(self, ids_S: Tensor) -> Tensor:
        """[S, V]."""
        size = len(self.tokens.tokens)
        embedding_VD = self._tensor("token_embd.weight", size, self.width)
        x = embedding_VD[ids_S]
        for layer in range(self.num_layers):
            own = f"blk.{layer}"
            x = x + self._attention(self._norm(x, f"{own}.attn_norm"), own)
            x = x + self._mlp(self._norm(x, f"{own}.ffn_norm"), own)
        x = self._norm(x, "output_norm")
        if "output.weight" in self._tensors:
            embedding_VD = self._tensor("output.weight", size, self.width)
        unread = sorted(set(self._tensors) - self._used)
        if unread:
            raise gate(f"{unread[0]}, which the {self.arch} graph does not read", "no such tensor")
        return x @ embedding_VD.T


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
        x = x + self._mlp(self._norm(x, "blk.0.ffn_norm"), "blk.0")
        rows = self._tensors["d2t"].shape[0] if "d2t" in self._tensors else len(self.embedding_VD)
        return self._linear(self._norm(x, "output_norm"), "output", rows), x
