"""Attention of many queries in pieces: the numbers of attention in one, of fewer scores. T queries,
L positions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specctl.models.kernels import PIECE, additive_mask, attend, mask_of_forward

T, HEADS, WIDTH = 2 * PIECE + 7, 4, 8


def causal(L: int = T, window: int | None = None) -> Tensor:
    query, key = torch.arange(L - T, L)[:, None], torch.arange(L)
    seen = key <= query
    return (seen if window is None else seen & (key > query - window))[None, None]


def documents() -> Tensor:
    number = torch.stack([torch.arange(T) // 90, (torch.arange(T) + 31) // 150])
    return causal() & (number[:, None, :, None] == number[:, None, None, :])


MASKS = {
    "causal": causal(),
    "behind kept tokens": causal(T + 50),
    "windowed": causal(window=40),
    "documents": documents(),
    "backwards": causal().flip(2, 3),
    "scattered": (torch.rand(2, 1, T, T, generator=torch.Generator().manual_seed(0)) < 0.01)
    | torch.eye(T, dtype=torch.bool),
}


@pytest.mark.parametrize("name", MASKS)
def test_pieces_give_the_same_numbers_and_gradients(name: str) -> None:
    mask = MASKS[name]
    B, L = mask.shape[0], mask.shape[-1]
    generator = torch.Generator().manual_seed(1)
    sizes = ((B, HEADS, T, WIDTH), (B, 2, L, WIDTH), (B, 2, L, WIDTH))
    given = [torch.randn(size, generator=generator, requires_grad=True) for size in sizes]
    pieces = mask_of_forward(mask, HEADS // 2, torch.float32)
    assert isinstance(pieces, list)
    in_pieces = attend(*given, pieces)
    at_once = attend(*given, additive_mask(mask, HEADS // 2, torch.float32))
    torch.testing.assert_close(in_pieces, at_once)
    weight = torch.randn(at_once.shape, generator=generator)
    for one, other in zip(
        torch.autograd.grad((in_pieces * weight).sum(), given),
        torch.autograd.grad((at_once * weight).sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)


def test_scores_that_nobody_sees_are_left_out() -> None:
    pieces = mask_of_forward(causal(), 1, torch.float32)
    assert isinstance(pieces, list)
    assert [(p.keys.start, p.keys.stop) for p in pieces] == [(0, p.queries.stop) for p in pieces]
    windowed = mask_of_forward(causal(window=40), 1, torch.float32)
    assert isinstance(windowed, list)
    assert windowed[-1].keys.start == windowed[-1].queries.start - 39


def test_a_piece_that_sees_nothing() -> None:
    mask = causal().clone()
    mask[:, :, :PIECE] = False
    pieces = mask_of_forward(mask, 1, torch.float32)
    assert isinstance(pieces, list)
    query, key = torch.randn(1, 1, T, WIDTH), torch.randn(1, 1, T, WIDTH)
    out = attend(query, key, key, pieces)
    whole = attend(query, key, key, additive_mask(mask, 1, torch.float32))
    torch.testing.assert_close(out, whole, equal_nan=True)


def test_few_queries_are_one_piece() -> None:
    mask = causal()[:, :, -PIECE:]
    assert isinstance(mask_of_forward(mask, 2, torch.float32), Tensor)
