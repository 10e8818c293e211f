"""Rounds of a few rows in models of transformers: whose products go to oneDNN, and what is left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specctl.core.language_model import Feed, RunMasks
from specctl.models.hf import few_rows
from specctl.models.hf.few_rows import few_row_products
from specctl.models.kernels import can_pack, packed_linear

WEIGHT = torch.randn(800, 640, generator=torch.Generator().manual_seed(0))
KV: Any = object()


def feed_of(rows: int) -> Feed:
    ids = torch.zeros(1, rows, dtype=torch.long)
    return Feed(ids, ids, RunMasks(torch.zeros(1), rows, rows, ()))


@pytest.fixture
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what oneDNN was given."""
    seen: list[tuple[int, ...]] = []

    def spied(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return packed_linear(x, *rest)

    monkeypatch.setattr(few_rows, "packed_linear", spied)
    return seen


@pytest.mark.skipif(not can_pack(WEIGHT), reason="oneDNN multiplies no float32 matrices here")
@pytest.mark.parametrize("rows", [4, 8, 32])
def test_a_round_multiplies_by_onednn_and_says_the_same(
    by_onednn: list[tuple[int, ...]], rows: int
) -> None:
    layer = torch.nn.Linear(640, 800).requires_grad_(False)
    wide = torch.randn(rows, 1, 2 * 640).transpose(0, 1)
    for x in (
        torch.randn(1, rows, 640),
        wide[..., ::2],
    ):  # the second one does not lie in one piece
        wanted, alone = layer(x), F.linear(x, WEIGHT)
        with torch.no_grad(), few_row_products(feed_of(rows), KV):
            assert torch.allclose(layer(x), wanted, atol=1e-4)
            assert torch.allclose(F.linear(x, WEIGHT), alone, atol=1e-3)
    assert by_onednn == [(1, rows, 640)] * 4


def test_all_else_is_left_to_torch(by_onednn: list[tuple[int, ...]]) -> None:
    x, small = torch.randn(1, 8, 640), torch.randn(64, 640)
    with few_row_products(feed_of(8), KV):  # gradients are wanted
        F.linear(x, WEIGHT)
    with torch.no_grad():
        for rows, kv in ((1, KV), (3, KV), (33, KV), (8, None)):
            with few_row_products(feed_of(rows), kv):
                F.linear(x, WEIGHT)
        with few_row_products(feed_of(8), KV):
            F.linear(x, small)
            F.linear(x.double(), WEIGHT.double())
            F.linear(x[:, :1], WEIGHT)
            F.linear(x.to("meta"), WEIGHT.to("meta"))
            F.linear(x, WEIGHT.t().contiguous().t())
    assert by_onednn == []
