"""Muon: its step beside PyTorch's, and its singular values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specctl.train.step.muon import ITERATIONS, WIDE, Muon, orthogonal


def test_updates_are_those_of_pytorch_but_for_the_rounding_of_bfloat16() -> None:
    torch.manual_seed(0)
    for shape, momentum in (((24, 8), 0.95), ((8, 24), 0.95), ((16, 16), 0.8)):
        ours = nn.Parameter(torch.randn(shape))
        theirs = nn.Parameter(ours.detach().clone())
        how: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2, "momentum": momentum}
        pair = (
            Muon([ours], **how),
            torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **how),
        )
        for _ in range(3):
            ours.grad = torch.randn(shape)
            theirs.grad = ours.grad.clone()
            start = ours.detach().clone()
            for each in pair:
                each.step()
        moved = float((ours - start).detach().norm())
        assert float((ours - theirs).detach().norm()) < 0.05 * moved
        assert pair[0].state[ours].keys() == pair[1].state[theirs].keys()
        torch.testing.assert_close(
            pair[0].state[ours]["momentum_buffer"], pair[1].state[theirs]["momentum_buffer"]
        )


def test_directions_stay_and_singular_values_become_alike() -> None:
    torch.manual_seed(1)
    gradient = torch.randn(40, 12, dtype=torch.float64) @ torch.diag(
        torch.logspace(-1, 1, 12, dtype=torch.float64)
    )
    left, _, right = torch.linalg.svd(gradient, full_matrices=False)
    found = left.T @ orthogonal(gradient) @ right.T
    values = found.diagonal()
    assert found.dtype == torch.float64
    assert float((found - torch.diag(values)).abs().max()) < 1e-12
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3


def test_several_iterations_at_once_keep_small_singular_values() -> None:
    """Of a wide matrix, beside float64; all five at once are 40 times as far off."""
    assert sum(WIDE) == ITERATIONS
    torch.manual_seed(2)
    left = torch.linalg.qr(torch.randn(96, 96)).Q
    right = torch.linalg.qr(torch.randn(240, 96)).Q
    wide = left @ torch.diag(torch.logspace(0, -4, 96)) @ right.T
    for matrix in (wide, wide.T):
        wanted = orthogonal(matrix.double())
        assert float((orthogonal(matrix) - wanted).norm() / wanted.norm()) < 1.5e-5
