"""HASS: what unrolling and the weight on likely tokens do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specctl.drafters.features.coral import CoralOptions
from specctl.drafters.losses.align import aim
from specctl.drafters.losses.head_losses import LinearHead
from specctl.drafters.losses.step_losses import topk_loss
from specctl.drafters.losses.teacher import TeacherLogits
from specctl_testing.drafters.head_cases import fit, make_heads, nearly_markov


def deep_alpha(drafter: Any, batch: Any) -> list[float]:
    """Acceptance of three drafting steps, however many it was trained on."""
    steps = drafter.unroll(batch)
    assert len(steps) == 3
    metrics = drafter.loss(batch).metrics
    return [float(a / n) for a, n in (metrics[f"alpha{end}"] for end in ("", "/1", "/2"))]


@pytest.mark.proof
def test_unrolled_training_keeps_acceptance_from_fading_with_depth(
    make_model: Any, make_batch: Any
) -> None:
    target, found = nearly_markov(make_model), {}
    for steps in (1, 3):
        trained = make_heads(target, "hass", ttt_steps=steps, feature_weight=1.0, top_weight=0.0)
        fit(trained, make_batch(target, trained, rows=16, seq_len=40), 40)
        judged = make_heads(target, "hass", feature_weight=0.0)
        judged.load_tensors(trained.tensors())
        found[steps] = deep_alpha(judged, make_batch(target, judged, rows=16, seq_len=40, seed=1))
    fades = {steps: alphas[0] - alphas[2] for steps, alphas in found.items()}
    assert fades[3] < fades[1] - 0.02, found
    assert found[3][2] > found[1][2] + 0.05, found


def test_the_top_k_loss_is_the_sum_over_the_likeliest_tokens(
    make_target: Any, make_batch: Any
) -> None:
    target = make_target(num_layers=2, vocab=24)
    drafter = make_heads(target, "hass")
    batch = make_batch(target, drafter)
    rows, ready_RD = aim(batch, 2), torch.randn(4 * 24, 32)
    assert rows.teacher_RV is not None
    head = LinearHead(drafter.head_weight())
    out = topk_loss(ready_RD, head, rows, None, TeacherLogits(rows.teacher_RV), 3)
    p_NV = rows.teacher_RV[rows.teacher_row_Q].softmax(-1)
    log_q_NV = F.log_softmax(head(ready_RD[rows.row_Q]), -1)
    best_QC, at_QC = p_NV.topk(3)
    expected = -(best_QC * log_q_NV.gather(1, at_QC)).sum()
    torch.testing.assert_close(out.sum, expected)
    whole = topk_loss(ready_RD, head, rows, None, TeacherLogits(rows.teacher_RV), 99)
    torch.testing.assert_close(whole.sum, -(p_NV * log_q_NV).sum())


def test_the_losses_weigh_as_in_the_paper(make_target: Any, make_batch: Any) -> None:
    """SmoothL1 1, all tokens 0.1, the ten likeliest 1, on a scale where all tokens weigh 1; and
    CORAL's alignment a tenth of its features (our choice)."""
    target, found = make_target(num_layers=2, vocab=24), {}
    off = {"feature_weight": 0.0, "top_weight": 0.0}
    for name, left in (("all", set()), ("features", {"feature_weight"}), ("top", {"top_weight"})):
        fields = {key: value for key, value in off.items() if key not in left}
        drafter = make_heads(target, "hass", ttt_steps=1, **fields)
        out = drafter.loss(make_batch(target, drafter))
        found[name] = (float(out.sum / out.count), out.metrics)
    for name, metric in (("features", "feature"), ("top", "topk")):
        mean, metrics = found[name]
        term = float(metrics[metric][0] / metrics[metric][1])
        assert mean - found["all"][0] == pytest.approx(10.0 * term, rel=1e-3)
    assert CoralOptions().align_weight == 0.1 * CoralOptions().feature_weight
