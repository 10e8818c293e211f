"""Early pruning: a target drops drafted nodes half-way through its layers (arXiv 2402.13485).

The lower layers read the whole tree; their state at a parent already ranks its children, read by an
early head that was trained for that layer (family propd, as in the paper), else through the
target's own final norm and LM head. A child that is not among the `top` best falls with everything
below it, and the upper layers read the survivors alone. What is dropped follows from the text and
from candidates that are a function of the text, so for POINT nodes nothing changes but what is
proposed.
Letters: B rows, D hidden width, K draft vocabulary, M new nodes (survivors), N nodes, T fed tokens,
V target vocabulary, X any axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.drafter import Drafter
from specctl.core.errors import IncompatibleError, RecipeError
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Feed, LanguageModel, LmOut
from specctl.core.tree import DraftTree, NodeKind
from specctl.core.vocab import VocabMap
from specctl.models.compiled import CompiledLM
from specctl.models.kernels import rms_norm
from specctl.models.llama.fast_llama import FastLlama
from specctl.runtime.policies.base import Policy, Pruning


@runtime_checkable
class EarlyReader(Protocol):
    """A drafter with a head that was trained on the residual behind `early_layer` layers; its ids
    are those of `vocab` (None: the target's)."""

    early_layer: int
    vocab: VocabMap | None

    def early_logits(self, residual_XD: Tensor) -> Tensor:
        """[X, K]: logits of the next token."""


def pruning_of(
    lm: LanguageModel, policy: Policy, drafter: Drafter | None = None
) -> EarlyPruning | None:
    """The early pruning that a policy asks for, None if it asks for none."""
    if not isinstance(policy, Pruning) or policy.early_layer is None:
        return None
    assert policy.kind(sampled=True) is NodeKind.POINT, "dropping a sample by its value is biased"
    pruning = EarlyPruning.of(lm, policy.early_layer, policy.early_top)
    if policy.early_shared or not isinstance(drafter, EarlyReader):
        return pruning
    if drafter.early_layer != policy.early_layer:
        raise RecipeError(
            "the drafter's early head was trained behind another layer",
            where="serve.early_layer",
            found=str(policy.early_layer),
            expected=str(drafter.early_layer),
            do=f"--set serve.early_layer={drafter.early_layer}, or read that layer through the "
            "target's LM head: --set serve.early_shared=true",
        )
    column_V = None if drafter.vocab is None else drafter.vocab.to_draft().clamp(min=0)
    return replace(pruning, reader=drafter, column_V=column_V)


@dataclass(frozen=True, slots=True)
class EarlyPruning:
    """A forward that stops at `layer` to drop children outside the `top` best there, by the
    `reader`'s head (None: the target's). `column_V`: which of its logits is each token's (None:
    the token's own; a token that the drafter lacks is not drafted)."""

    lm: FastLlama
    layer: int
    top: int
    reader: EarlyReader | None = None
    column_V: Tensor | None = None

    @classmethod
    def of(cls, lm: LanguageModel, layer: int, top: int) -> EarlyPruning:
        """Refuses targets that cannot be stopped between layers. Rounds that are recorded whole are
        read layer by layer as well."""
        lm = lm.lm if isinstance(lm, CompiledLM) else lm
        if type(lm) is not FastLlama:
            raise IncompatibleError(
                "this target cannot be read layer by layer",
                found=type(lm).__name__,
                expected="a Llama-shaped target that is not inflated",
                do="leave serve.early_layer out: the tree is then verified whole",
            )
        if not 0 < layer < lm.spec.num_layers:
            raise RecipeError(
                "early pruning needs layers below and above it",
                where="serve.early_layer",
                found=str(layer),
                expected=f"1 to {lm.spec.num_layers - 1}",
                do=f"--set serve.early_layer={max(1, lm.spec.num_layers // 2)}",
            )
        return cls(lm, layer, top)

    def forward(self, feed: Feed, tree: DraftTree, kv: SlotKV) -> tuple[DraftTree, LmOut]:
        """The tree without its fallen nodes, and logits and taps at all that survived (zeros at
        fallen nodes, which nothing reads)."""
        if not tree.num_nodes:
            return tree, self.lm.run(feed, kv)
        lm, last = self.lm, self.lm.spec.num_layers
        window = lm.module.shape.window
        mask = feed.masks.full if window is None else feed.masks.windows[window]
        x_BTD = F.embedding(feed.ids_BT, lm.module.model.embed_tokens.weight)
        taps: dict[int, Tensor] = {}
        lower = _LayerRange(lm, feed.position_BT, mask, kv, feed.taps)
        x_BTD = lower.layers(x_BTD, 0, self.layer, taps)
        alive_BT = self._survivors(*self._ranked(x_BTD, tree), tree)
        at_BM = (~alive_BT).to(torch.int8).argsort(dim=1, stable=True)
        at_BM = at_BM[:, : int(alive_BT.sum(1).max())]
        rows_B1 = torch.arange(len(at_BM), device=at_BM.device)[:, None]
        upper = _LayerRange(
            lm,
            feed.position_BT[rows_B1, at_BM],
            mask[rows_B1, 0, at_BM][:, None],
            kv.aimed(kv.aim, kv.aim.start_B1 + at_BM),
            feed.taps,
        )
        found: dict[int, Tensor] = {}
        x_BMD = upper.layers(x_BTD[rows_B1, at_BM], self.layer, last, found)
        if last in feed.taps:
            shape = lm.module.shape
            found[last] = rms_norm(x_BMD, lm.module.model.norm.weight, shape.norm_eps)
        width = feed.ids_BT.shape[1]
        taps |= {tap: _spread(value, at_BM, width) for tap, value in found.items()}
        logits_BTV = _spread(lm.lm_head(x_BMD), at_BM, width)
        return replace(tree, valid_BN=alive_BT[:, 1:]), LmOut(logits_BTV, taps)

    def _ranked(self, x_BTD: Tensor, tree: DraftTree) -> tuple[Tensor, Tensor]:
        """[B, T, K] early logits, and [B, N]: which of their columns is each node's token."""
        token_BN = tree.token_BN.clamp(min=0)
        if self.reader is None:
            return self.lm.lm_head(x_BTD), token_BN
        columns = token_BN if self.column_V is None else self.column_V.to(token_BN.device)[token_BN]
        return self.reader.early_logits(x_BTD), columns

    def _survivors(self, early_BTK: Tensor, column_BN: Tensor, tree: DraftTree) -> Tensor:
        """[B, T]: the root, and nodes that with all their ancestors rank high at their parents."""
        worst_BT = early_BTK.topk(min(self.top, early_BTK.shape[-1]), dim=-1).values[:, :, -1]
        parent_BN = tree.parent_BN + 1
        flat_BN = parent_BN * early_BTK.shape[-1] + column_BN
        ranks_BN = early_BTK.flatten(1).gather(1, flat_BN) >= worst_BT.gather(1, parent_BN)
        fell_BT = F.pad(~(ranks_BN & tree.valid_BN), (1, 0))
        return ~(tree.ancestor_BTT() & fell_BT[:, None]).any(-1)


@dataclass(frozen=True, slots=True)
class _LayerRange:
    """Fed tokens at their positions, against an aimed cache."""

    lm: FastLlama
    position_BT: Tensor
    mask: Tensor
    kv: SlotKV
    taps: Sequence[int]

    def layers(self, x: Tensor, first: int, last: int, found: dict[int, Tensor]) -> Tensor:
        """The residual after layers first .. last - 1; taps in front of them are `found`."""
        cuts = sorted({first, last, *(tap for tap in self.taps if first < tap < last)})
        for at, until in pairwise(cuts):
            if at in self.taps:
                found[at] = x
            x = self.lm.through(x, self.position_BT, self.mask, self.kv, range(at, until))
        return x


def _spread(value_BMX: Tensor, at_BM: Tensor, width: int) -> Tensor:
    """Rows put back where they were fed, zeros elsewhere."""
    B, _, X = value_BMX.shape
    out_BTX = value_BMX.new_zeros(B, width, X)
    return out_BTX.scatter_(1, at_BM[:, :, None].expand(-1, -1, X), value_BMX)
