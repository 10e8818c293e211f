"""DFlash: one pass a draft, injected features, blocks that do not see each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from block_cases import passes
from head_cases import make_heads

from specctl.drafters.dflash import DFlashOptions
from specctl.recipes.errors import RecipeError


@pytest.mark.parametrize("length", [2, 7])
def test_a_draft_of_any_length_is_one_pass(
    make_target: Any, drive: Any, round_view: Any, length: int
) -> None:
    assert passes(make_target(num_layers=2, vocab=24), "dflash", length, drive, round_view) == 1


@torch.no_grad()
def test_a_slot_sees_the_slots_behind_it_and_no_other_block(
    make_target: Any, make_batch: Any
) -> None:
    target = make_target(num_layers=2, vocab=24)
    drafter = make_heads(target, "dflash", num_heads=3)
    batch = make_batch(target, drafter)
    every = torch.arange(batch.ids_BS.shape[1]).expand_as(batch.ids_BS)
    one = [x[:, 5] for x in drafter.unroll(batch, every[:, 5:6])]
    for alone, among in zip(one, drafter.unroll(batch, every), strict=True):
        torch.testing.assert_close(alone, among[:, 5])
    fewer = make_heads(target, "dflash", num_heads=2)
    fewer.load_tensors(drafter.tensors())  # the last slot of three is gone
    shorter = next(iter(fewer.unroll(batch, every)))
    assert not torch.allclose(shorter[:, 5], one[0])


@torch.no_grad()
def test_features_behind_the_anchor_are_invisible(make_target: Any, make_batch: Any) -> None:
    target = make_target(num_layers=2, vocab=24)
    drafter = make_heads(target, "dflash", num_heads=3)
    batch = make_batch(target, drafter)
    later = {tap: x.clone() for tap, x in batch.taps.items()}
    for x in later.values():
        x[:, 5:] += 1.0  # row 4 is the anchor's
    for old, new in zip(
        drafter.unroll(batch), drafter.unroll(replace(batch, taps=later)), strict=True
    ):
        torch.testing.assert_close(old[:, :5], new[:, :5])
        assert not torch.allclose(old[:, 5], new[:, 5])


def test_only_anchors_are_trained(make_target: Any, make_batch: Any) -> None:
    target = make_target(num_layers=2, vocab=24)
    drafter = make_heads(target, "dflash", num_heads=2, anchors=3, decay=1.0)
    out = drafter.loss(make_batch(target, drafter, rows=4, seq_len=24))
    assert 4 * 3 < float(out.count) <= 2 * 4 * 3


def test_sizes_out_of_range_are_refused() -> None:
    for name in ("num_heads", "layers", "anchors"):
        with pytest.raises(RecipeError, match="too small"):
            DFlashOptions(**{name: 0})
