"""LanguageModel: one decoder-only LM behind one small interface, whatever its architecture.

Both the target and an independent small-LM drafter are a LanguageModel. Two implementations:
`lean.LeanLM` (Llama-shaped architectures, our own forward, fast) and `hf_lm.HfLM` (any
transformers causal LM; the oracle of the first). Letters: B rows, T fed tokens, S sequence,
D width, V vocabulary, L key positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from specctl.drafters.parts.base import Borrowed
from specctl.drafters.parts.slots import SlotKV
from specctl.drafters.parts.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LmOut:
    """logits_BTV (None when not asked for) and taps: hidden_states index -> [B, T, D]."""

    logits_BTV: Tensor | None
    taps: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Masks:
    """Attention masks of one forward, [B, 1, T, L] bool: full, and one per sliding window size."""

    full: Tensor
    windows: Mapping[int, Tensor] = field(default_factory=dict)


class LanguageModel(ABC):
    """A decoder-only LM without per-request state; caches are handed in."""

    spec: ModelSpec
    module: nn.Module
    windows: tuple[int, ...] = ()  # sliding-window sizes for which `forward` needs a mask

    @abstractmethod
    def forward(
        self,
        ids_BT: Tensor,
        position_BT: Tensor,
        masks: Masks,
        kv: SlotKV,
        taps: tuple[int, ...] = (),
        logits: bool = True,
    ) -> LmOut:
        """One forward of fed tokens against `kv`, which has been aimed with `kv.begin`."""

    @abstractmethod
    def dense(
        self,
        ids_BS: Tensor,
        position_BS: Tensor,
        masks: Masks,
        taps: tuple[int, ...] = (),
        logits: bool = True,
    ) -> LmOut:
        """One forward of whole sequences without a cache (training, capture, prefill oracle)."""

    @abstractmethod
    def borrowed(self) -> Borrowed:
        """The embedding and LM head, detached views of the model's own storage."""

    def new_kv(self, num_slots: int, max_len: int) -> SlotKV:
        spec, weight = self.spec, next(self.module.parameters())
        return SlotKV(
            spec.num_layers,
            num_slots,
            spec.num_kv_heads,
            max_len,
            spec.head_dim,
            weight.dtype,
            weight.device,
        )

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype
