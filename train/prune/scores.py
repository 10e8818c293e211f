"""What of a target matters: scores of layers, heads, neurons and channels on real text.

Depth. Block influence (ShortGPT, arXiv 2403.03853, eq. 1): 1 - E cos(h_in, h_out), also of a span
of layers; what a layer adds, relative to what it is given: E |h_out - h_in| / |h_in|; acceptance
drop: how much smaller alpha = E sum min(p, q) is without the layer.

Width (Minitron, arXiv 2407.14679, section 2.2): mean activations, forward passes only. Heads and
neurons are weighed by what leaves them, E |W_out a|, since a loud neuron that nobody reads is no
loss; channels by E |norm(x)|, summed over all norms.
Letters: B rows, S sequence, T tokens, D channels, H heads, E head width, N neurons.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.language_model import LanguageModel
from specctl.drafters.losses.align import ahead_mask
from specctl.models.kernels import rms_norm
from specctl.models.llama.fast_llama import FastLlama
from specctl.models.llama.llama import LayerWeights
from specctl.models.llama.slice import with_layers
from specctl.models.not_finite import check_logits, is_bad, not_numbers


@dataclass(frozen=True, slots=True)
class Scores:
    """`influence[l, m]` is 1 - E cos(h_l, h_m) between hidden_states l and m (upper triangle);
    `added` is per layer; heads, neurons per layer; `energy` is E x^2 per channel by norm name."""

    influence_LL: Tensor
    added_L: Tensor
    heads_LH: Tensor
    neurons_LN: Tensor
    channels_D: Tensor
    energy: Mapping[str, Tensor]


@dataclass(slots=True)
class _Sums:
    """Running sums over tokens. One writer: `_Watched`."""

    count: int = 0
    cosine_LL: Tensor = field(default_factory=lambda: torch.zeros(()))
    added_L: Tensor = field(default_factory=lambda: torch.zeros(()))
    heads: dict[int, Tensor] = field(default_factory=dict)
    neurons: dict[int, Tensor] = field(default_factory=dict)
    channels_D: Tensor = field(default_factory=lambda: torch.zeros(()))
    energy: dict[str, Tensor] = field(default_factory=dict)


class _Watched(FastLlama):
    """A FastLlama that sums up what flows through it at the tokens of `keep_BS`."""

    def __init__(self, lm: FastLlama) -> None:
        super().__init__(lm.module, lm.spec)
        self.sums = _Sums()
        self.keep_BS = torch.zeros(0, dtype=torch.bool)
        self.states: list[Tensor] = []
        self.after = torch.zeros(0)

    def _joined(self, x: Tensor, out: Tensor, layer: LayerWeights, index: int) -> Tensor:
        x_TD, out_TW = x[self.keep_BS], out[self.keep_BS].float()
        self.states.append(x_TD)
        self._normed(x_TD, f"model.layers.{index}.input_layernorm.weight")
        weight_DW = self._parameter(f"model.layers.{index}.self_attn.o_proj.weight")
        parts = zip(*(t.chunk(self.spec.num_heads, 1) for t in (out_TW, weight_DW)), strict=True)
        sizes = [F.linear(out_TE, own_DE).norm(dim=-1).sum() for out_TE, own_DE in parts]
        _add(self.sums.heads, index, torch.stack(sizes))
        return super()._joined(x, out, layer, index)

    def _neurons(self, x: Tensor, layer: LayerWeights) -> Tensor:
        out = super()._neurons(x, layer)
        index = len(self.states) - 1
        self._normed(x[self.keep_BS], f"model.layers.{index}.post_attention_layernorm.weight")
        weight_DN = self._parameter(f"model.layers.{index}.mlp.down_proj.weight")
        loud_N = out[self.keep_BS].float().abs().sum(0)
        _add(self.sums.neurons, index, loud_N * weight_DN.norm(dim=0))
        return out

    def _mlp(self, x: Tensor, layer: LayerWeights) -> Tensor:
        self.after = super()._mlp(x, layer)
        return self.after

    def _normed(self, x_TD: Tensor, name: str) -> None:
        """The input of a norm: energy of its channels, and how loud they are behind it."""
        x_TD = x_TD.float()
        normed_TD = rms_norm(x_TD, self._parameter(name), self.module.shape.norm_eps)
        self.sums.channels_D = self.sums.channels_D + normed_TD.abs().sum(0)
        _add(self.sums.energy, name, x_TD.square().sum(0))

    def _parameter(self, name: str) -> Tensor:
        return self.module.get_parameter(name).detach().float()

    def read(self, batch: TrainBatch) -> None:
        """One batch more."""
        self.keep_BS, self.states = batch.document_BS >= 0, []
        masks = self.document_masks(batch.document_BS)
        self.dense(batch.ids_BS, batch.position_BS, masks, logits=False)
        states = [*self.states, self.after[self.keep_BS]]
        self._normed(states[-1], "model.norm.weight")
        sums, states = self.sums, [h.float() for h in states]
        unit_LTD = torch.stack([F.normalize(h, dim=-1) for h in states])
        sums.cosine_LL = sums.cosine_LL + torch.einsum("ltd,mtd->lm", unit_LTD, unit_LTD)
        added = [
            ((after - before).norm(dim=-1) / before.norm(dim=-1)).sum()
            for before, after in pairwise(states)
        ]
        sums.added_L = sums.added_L + torch.stack(added)
        sums.count += int(self.keep_BS.sum())


def _add(sums: dict[Any, Tensor], key: Any, value: Tensor) -> None:
    sums[key] = sums[key] + value if key in sums else value


@torch.no_grad()
def measure_scores(lm: FastLlama, batches: Iterable[TrainBatch]) -> Scores:
    """Every score of the module's docstring but the acceptance drop, from one pass over text."""
    watched = _Watched(lm)
    for batch in batches:
        watched.read(batch)
    sums = watched.sums
    assert sums.count > 0, "scores need tokens"
    if not bool(sums.added_L.isfinite().all()):
        raise not_numbers(lm, lm.spec.model_type, batch.ids_BS[0].tolist())
    order = range(lm.module.shape.num_layers)
    return Scores(
        influence_LL=1.0 - sums.cosine_LL / sums.count,
        added_L=sums.added_L / sums.count,
        heads_LH=torch.stack([sums.heads[layer] for layer in order]) / sums.count,
        neurons_LN=torch.stack([sums.neurons[layer] for layer in order]) / sums.count,
        channels_D=sums.channels_D / sums.count,
        energy={name: total / sums.count for name, total in sums.energy.items()},
    )


@torch.no_grad()
def acceptance(draft: FastLlama, target: LanguageModel, batches: Sequence[TrainBatch]) -> float:
    """alpha = E sum min(p, q) over the tokens that are to be predicted, at temperature 1; both
    distributions over one vocabulary."""
    total, count = 0.0, 0
    for batch in batches:
        rows = ahead_mask(batch, 1)
        p_NV, q_NV = (_distribution(lm, batch, rows) for lm in (target, draft))
        total += float(torch.minimum(p_NV, q_NV).sum())
        count += int(rows.sum())
    return total / count


def _distribution(lm: LanguageModel, batch: TrainBatch, rows_BS: Tensor) -> Tensor:
    masks = lm.document_masks(batch.document_BS)
    logits_BSV = lm.dense(batch.ids_BS, batch.position_BS, masks).logits_BTV
    assert logits_BSV is not None
    logits_NV = logits_BSV[rows_BS].float()
    if bool(is_bad(logits_NV).any()):
        check_logits(lm, lm.spec.model_type, batch.ids_BS, logits_BSV)
    return logits_NV.softmax(-1)


def acceptance_drop(lm: FastLlama, batches: Sequence[TrainBatch], span: int = 1) -> Tensor:
    """For each first layer of a span: how much of alpha (1 for the model itself) is lost without
    the span. L - span + 1 forwards over the batches."""
    count, lost = lm.module.shape.num_layers, []
    for first in range(count - span + 1):
        rest = tuple(i for i in range(count) if not first <= i < first + span)
        lost.append(1.0 - acceptance(with_layers(lm, rest), lm, batches))
    return torch.tensor(lost)
