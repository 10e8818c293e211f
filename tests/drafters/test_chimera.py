"""Chimera: what trigrams and the context are worth, and how a text begins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.batch import TrainBatch
from specctl.core.errors import RecipeError
from specctl.drafters.features.chimera import ChimeraOptions
from specctl.drafters.losses.align import aim
from specctl_testing.drafters.cross_cases import check_no_depth_sees_a_feature_behind_its_anchor
from specctl_testing.drafters.head_cases import fit, make_heads


def test_no_depth_sees_a_feature_behind_its_anchor(make_target: Any, make_batch: Any) -> None:
    target = make_target(num_layers=2, vocab=24)
    drafter = make_heads(target, "chimera", num_heads=3)
    check_no_depth_sees_a_feature_behind_its_anchor(drafter, make_batch(target, drafter))


def losses(drafter: Any, batches: list[TrainBatch], steps: int) -> float:
    """On the second batch, after so many steps on the first."""
    fit(drafter, batches[0], steps)
    with torch.no_grad():
        out = drafter.loss(batches[1])
    return float(out.sum / out.count)


@pytest.mark.proof
def test_without_trigrams_it_learns_less_in_the_same_steps(
    make_target: Any, make_batch: Any
) -> None:
    target = make_target(num_layers=2, vocab=24)
    final = []
    for trigrams in (True, False):
        drafter = make_heads(target, "chimera", num_heads=3, trigrams=trigrams)
        batch = make_batch(target, drafter, rows=4, seq_len=24)
        final.append(losses(drafter, [batch, batch], 40))
    assert final[0] < 0.9 * final[1], final


def test_the_first_output_alone_is_pulled_towards_the_next_state(
    make_target: Any, make_batch: Any
) -> None:
    """The mean squared distance to f_{t+1}, row t having read token t + 1."""
    target = make_target(num_layers=2, vocab=24)
    drafter, plain = (
        make_heads(target, "chimera", num_heads=2, anchors=99, hidden_weight=w) for w in (3.0, 0.0)
    )
    batch = make_batch(target, drafter)
    with torch.no_grad():
        out, without = drafter.loss(batch), plain.loss(batch)
        said_BSD = next(drafter.unroll(batch, drafter.anchors(batch)))[..., 32:]
    rows = aim(batch, 2)
    wanted_QD = batch.taps[2].flatten(0, 1)[rows.row_Q + 1]
    distance = (said_BSD.flatten(0, 1)[rows.row_Q] - wanted_QD).square().mean()
    added = (out.sum - without.sum) / rows.row_Q.numel()
    assert float(added) == pytest.approx(3.0 * float(distance), rel=1e-3)
    assert "hidden" in out.metrics
    assert "hidden/1" not in out.metrics


def said_at_the_start(rows: int, seed: int, size: int = 24, width: int = 32) -> TrainBatch:
    """Random text; the target's distribution follows from what it thought of the very first
    token."""
    generator = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(0, size, (rows, 12), generator=generator)
    topic_B = torch.randint(0, 4, (rows,), generator=generator)
    feature_BSD = 0.1 * torch.randn(rows, 12, width, generator=generator)
    feature_BSD[:, 0, :4] += 10.0 * torch.eye(4)[topic_B]
    teacher_BSV = 4.0 * torch.eye(size)[topic_B][:, None].expand(-1, 12, -1)
    position_BS = torch.arange(12).expand(rows, -1)
    everything = torch.ones_like(ids_BS, dtype=torch.bool)
    taps = {2: feature_BSD}
    return TrainBatch(ids_BS, everything, ids_BS * 0, position_BS, taps, teacher_BSV)


@pytest.mark.proof
def test_without_the_context_it_forgets_what_was_said_at_the_start(make_target: Any) -> None:
    target = make_target(num_layers=2, vocab=24)
    batches = [said_at_the_start(32, seed) for seed in (0, 1)]
    sighted, blind = (
        losses(make_heads(target, "chimera", num_heads=3, context=context), batches, 60)
        for context in (True, False)
    )
    assert sighted < 0.5 * blind, (sighted, blind)


@torch.no_grad()
def test_a_text_that_begins_repeats_its_first_token(make_target: Any, make_batch: Any) -> None:
    target = make_target(num_layers=2, vocab=24)
    drafter = make_heads(target, "chimera", num_heads=2)
    batch = make_batch(target, drafter)
    second = int((batch.document_BS[0] == 1).nonzero()[0, 0])  # a document that begins inside
    at_B1 = torch.full((len(batch.ids_BS), 1), second)
    a, b = batch.ids_BS[:, second], batch.ids_BS[:, second + 1]
    expected = drafter.encode(torch.stack([a, a, b], dim=-1))
    torch.testing.assert_close(drafter.slot_of(0, batch, at_B1)[:, 0], expected)


def test_sizes_out_of_range_are_refused() -> None:
    for name in ("num_heads", "anchors"):
        with pytest.raises(RecipeError, match="too small"):
            ChimeraOptions(**{name: 0})
