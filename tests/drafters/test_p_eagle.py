"""P-EAGLE: one pass a draft, thinned-out depths, EAGLE's alignment."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.errors import RecipeError
from specctl.drafters.features.p_eagle import PEagleOptions
from specctl_testing.drafters.block_cases import passes
from specctl_testing.drafters.head_cases import make_heads


def test_a_draft_is_one_pass_behind_the_true_rows(
    make_target: Any, drive: Any, round_view: Any
) -> None:
    assert passes(make_target(num_layers=2, vocab=24), "p-eagle", 6, drive, round_view) == 1


def test_rows_grow_with_the_sum_of_the_shares_and_not_with_the_depth(
    make_target: Any, make_batch: Any
) -> None:
    target = make_target(num_layers=2, vocab=24)
    drafter = make_heads(target, "p-eagle", num_heads=8, keep=0.5, keep_least=0.25)
    assert drafter.counts(128) == [64, 32, 32, 32, 32, 32, 32]
    assert drafter.counts(10) == [10] * 7  # a short text is never thinned out
    fed: list[int] = []
    handle = drafter.net.layers[0].register_forward_hook(
        lambda module, given, out: fed.append(given[0].shape[1])
    )
    batch = make_batch(target, drafter, rows=1, seq_len=160)
    drafter.loss(batch)
    handle.remove()
    assert fed == [160 + 64 + 6 * 32]


def test_a_draft_at_depth_d_has_all_depths_before_it(make_target: Any, make_batch: Any) -> None:
    target = make_target(num_layers=2, vocab=24)
    drafter = make_heads(target, "p-eagle", num_heads=4, keep=0.5, keep_least=0.1, anchors=40)
    batch = make_batch(target, drafter, rows=2, seq_len=80)
    anchor_BA = drafter.anchors(batch)
    stands = [set(drafter.aimed(i, batch, anchor_BA).row_Q.tolist()) for i in range(4)]
    assert stands[1] < stands[0]
    assert stands[2] < stands[1]
    assert stands[3] <= stands[2]


@torch.no_grad()
def test_fresh_weights_pass_the_highest_tap_through(make_target: Any, make_batch: Any) -> None:
    target = make_target(num_layers=2, vocab=24)
    drafter = make_heads(target, "p-eagle", num_heads=2)
    batch = make_batch(target, drafter)
    first_BSD = next(iter(drafter.unroll(batch)))
    top_BSD = batch.taps[drafter.own_taps[-1]]
    alike = torch.nn.functional.cosine_similarity(first_BSD, top_BSD, dim=-1)
    assert float(alike.mean()) > 0.9


def test_sizes_out_of_range_are_refused() -> None:
    for options in ({"num_heads": 1}, {"layers": 0}, {"anchors": 0}):
        with pytest.raises(RecipeError, match="too small"):
            PEagleOptions(**options)
