"""QuantSpec (arXiv 2502.10424): the target drafts with 4-bit weights and a 4-bit KV cache.

The draft is the whole target, the matrices of its layers rounded to 4 bits in groups of inputs.
With `kv_bits` 4, as in the paper, it has a cache of two 4-bit planes of which drafting reads the
upper one (`states/plane_kv.py`: keys by channel, values by token, the newest tokens in full). Known
tokens are rounded from the keys and values that the target itself has of them.

By default the cache is not rounded (`kv_bits` 16): chains are then drafted in the target's own
cache, which nothing is copied from, and on a CPU by the compiled step, which reads weights of 4
bits in groups of 64 directly. Every drafted token costs a read of a quarter or an eighth of the
target's weights. In texts so long that the cache is as large as the weights, the planes pay.

Differences from the paper. There the target reads both planes of the very cache, so that the text
is that of a target with an 8-bit cache. Here the target keeps its cache as it is, and the text is
its own; the draft's planes are a second copy, of a quarter of the size or less, and the lower plane
is kept only if the draft is to read it, too (`kv_bits` 8). Scales are one a token for values,
whatever the head's width.

Beside the compiled step, weights of bfloat16 on a CPU are read by PyTorch's 4-bit product; others
are written out for every product, as the planes are for every attention.
Letters: E head width, J key/value heads, L positions, Z slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from specctl.core.drafter import Family, Outcome, Space
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Borrowed, LanguageModel
from specctl.drafters.frames.self_drafter import SelfDrafter
from specctl.drafters.option_checks import Options, Within, check_options
from specctl.drafters.states.borrowed_state import BorrowedState
from specctl.drafters.states.plane_kv import PlaneKV
from specctl.models.llama.fast_llama import FastLlama
from specctl.models.native.library import has_bfloat16_tiles, no_int8

FULL = 16  # bits that say: as it is
LARGE = 64e6  # bytes of weights that no cache of a CPU holds


def pays_rounded(lm: LanguageModel) -> bool:
    """Whether drafting with weights of 4 bits is cheaper than reading the target's own: on a CPU
    whose compiled step reads both, those of float32, or of bfloat16 where rounds of it are cheap,
    and too many for a cache."""
    if not isinstance(lm, FastLlama) or lm.device.type != "cpu":
        return False
    if lm.dtype != torch.float32 and not (lm.dtype == torch.bfloat16 and has_bfloat16_tiles()):
        return False
    if lm.bits is not None or lm.int4 is not None or no_int8() is not None or not lm.steps:
        return False
    return lm.module.native() is not None and (lm.token_bytes or 0) >= LARGE


@dataclass(frozen=True, slots=True)
class QuantSpecOptions(Options):
    """Bits of the draft's weights (4, or 16: as they are), in groups of `weight_group` inputs, and
    of its KV cache (4, 8, or 16: as it is). A key's scale is of `kv_group` tokens, and `recent`
    times as many of the newest stay in full."""

    weight_bits: int = 4
    weight_group: int = 64
    kv_bits: int = FULL
    kv_group: Annotated[int, Within(4, 4096)] = 64
    recent: Annotated[int, Within(0, 16)] = 2

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        check_options(self, self.weight_bits in (4, FULL), ("weight_bits",), "4 or 16")
        check_options(self, self.kv_bits in (4, 8, FULL), ("kv_bits",), "4, 8 or 16")
        is_power = self.weight_group in (16, 32, 64, 128, 256)
        check_options(self, is_power, ("weight_group",), "16, 32, 64, 128 or 256")


class QuantSpec(SelfDrafter):
    """Every layer runs; the rounded weights are made when first served, and are no part of a
    package."""

    family = "quantspec"
    options: QuantSpecOptions
    _rounded: LanguageModel | None = None

    @property
    def attention(self) -> tuple[int, ...]:
        return tuple(range(self.spec.num_layers))

    @property
    def copied(self) -> tuple[int, ...]:
        return self.attention if self.options.kv_bits == FULL else ()

    def bind(self, borrowed: Borrowed) -> None:
        super().bind(borrowed)
        self._rounded = None

    def rounded(self) -> LanguageModel:
        """What reads drafted tokens."""
        if self.options.weight_bits == FULL:
            return self.lm
        if self._rounded is None:
            is_plain = self.options.kv_bits == FULL
            self._rounded = self.lm.in_int4(self.options.weight_group, is_plain)
        return self._rounded

    def open(self, space: Space) -> QuantSpecState:
        return QuantSpecState(self, space)


class QuantSpecState(BorrowedState):
    """Known tokens move into the planes as the buffer fills."""

    def __init__(self, drafter: QuantSpec, space: Space) -> None:
        self.options, self._runner = drafter.options, drafter.rounded()
        super().__init__(drafter.lm, drafter.attention, space)
        self._every = SubLayers.span(0, drafter.spec.num_layers)

    def _new_kv(self, space: Space, max_len: int) -> SlotKV:
        options, lm = self.options, self.lm
        if options.kv_bits == FULL:
            return super()._new_kv(space, max_len)
        room = max(options.kv_group, space.max_nodes + 3) + 1
        has_lower = options.kv_bits == 8
        return PlaneKV(
            lm.kv_layers,
            space.num_slots,
            max_len,
            lm.dtype,
            lm.device,
            options.kv_group,
            options.recent,
            has_lower,
            room,
        )

    @property
    def runner(self) -> LanguageModel:
        return self._runner

    def parts_of(self, slot: int, first: int) -> SubLayers:
        return self._every

    def _write_text(self, slot: int, taps: Mapping[int, Tensor], first: int, last: int) -> None:
        if not isinstance(self.kv, PlaneKV):
            super()._write_text(slot, taps, first, last)
            return
        if first == 0:
            self.kv.forget(slot)
        for at in range(first, last, self.options.kv_group):
            until = min(at + self.options.kv_group, last)
            part = {tap: value[at - first : until - first] for tap, value in taps.items()}
            super()._write_text(slot, part, at, until)
            self.kv.settle(slot, until)

    @torch.no_grad()
    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        if isinstance(self.kv, PlaneKV):
            for slot in outcome.view.slots:
                self.kv.settle(slot, self.num_known[slot])

    def kv_bytes(self) -> int:
        """What the draft's cache takes."""
        if isinstance(self.kv, PlaneKV):
            return self.kv.num_bytes
        return sum(part.nbytes for part in (*self.kv.key_ZJLE, *self.kv.value_ZJLE))


FAMILY = Family(
    name="quantspec",
    summary=(
        "No second model and no training: the target drafts with 4-bit weights, and with a 4-bit "
        "KV cache if asked to (kv_bits 4). Nearly all is accepted, whatever the text. Pays on a "
        "CPU with a compiler and AVX2, where the compiled step reads the 4 bits; elsewhere a "
        "drafted token costs what the target costs."
    ),
    paper="https://arxiv.org/abs/2502.10424",
    options=QuantSpecOptions,
    build=QuantSpec,
    trainable=False,
    policies=("chain", "dynamic-tree"),
    reads_stored=True,
    borrows_layers=True,
)
