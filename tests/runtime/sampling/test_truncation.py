"""Truncation: what the compiled function keeps is what sorting keeps, and the definition of it."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specctl.core.language_model import Truncation
from specctl.models.native.library import library
from specctl.runtime.sampling.truncation import Truncations

ROWS = [
    Truncation(),
    Truncation(top_k=1),
    Truncation(top_k=20),
    Truncation(top_k=400),
    Truncation(top_p=0.3),
    Truncation(top_p=0.95),
    Truncation(top_p=0.9999),
    Truncation(min_p=0.05),
    Truncation(min_p=1.0),
    Truncation(top_k=50, top_p=0.7),
    Truncation(top_k=40, top_p=0.95, min_p=0.1),
    Truncation(top_k=10**9, top_p=1e-6),
]
needs_compiler = pytest.mark.skipif(library().functions is None, reason=library().missing)


def cut(rows: list[Truncation], scores_BXV: Tensor) -> Tensor:
    return Truncations(rows, torch.device("cpu")).apply_(scores_BXV.clone())


def by_sorting(rows: list[Truncation], scores_BXV: Tensor) -> Tensor:
    return Truncations(rows, torch.device("cpu"))._by_sorting(scores_BXV.clone())


def kept(row: Truncation, scores_V: Tensor) -> list[int]:
    """By the definition, token by token in float64."""
    order = scores_V.double().argsort(descending=True, stable=True).tolist()
    if 0 < row.top_k < len(order):
        edge = scores_V[order[row.top_k - 1]]
        order = [v for v in order if scores_V[v] >= edge]
    if row.top_p < 1:
        chance, before, nucleus = scores_V[order].double().softmax(0), 0.0, []
        for v, own in zip(order, chance.tolist(), strict=True):
            if before < row.top_p:
                nucleus.append(v)
            before += own
        order = nucleus
    best = scores_V[order[0]]
    return [v for v in order if not row.min_p or scores_V[v] - best >= math.log(row.min_p)]


@pytest.mark.parametrize("spread", [0.3, 2.0, 9.0])
@pytest.mark.parametrize("vocab_size", [7, 64, 1500])
@pytest.mark.parametrize("way", [cut, by_sorting])
def test_what_is_kept_is_what_the_definition_keeps(
    way: Callable[[list[Truncation], Tensor], Tensor], vocab_size: int, spread: float
) -> None:
    torch.manual_seed(vocab_size)
    scores_BXV = spread * torch.randn(len(ROWS), 3, vocab_size)
    scores_BXV[:, 1, ::3] = -torch.inf
    out_BXV = way(ROWS, scores_BXV)
    for row, own_XV, cut_XV in zip(ROWS, scores_BXV, out_BXV, strict=True):
        for own_V, cut_V in zip(own_XV, cut_XV, strict=True):
            among = torch.isfinite(cut_V)
            assert torch.equal(cut_V[among], own_V[among])
            expected = torch.zeros_like(among)
            expected[kept(row, own_V)] = True
            wrong = among != expected & torch.isfinite(own_V)
            # where float32 sums end may be a token further at most
            assert wrong.sum() <= (row.top_p > 0.999), row


@needs_compiler
def test_ties_at_the_edge_are_kept() -> None:
    scores_11V = torch.tensor([1.0, 3.0, 1.0, 1.0, 0.0, 2.0]).repeat(40)[None, None]
    for row in (Truncation(top_k=100), Truncation(top_p=0.8)):
        among = torch.isfinite(cut([row], scores_11V))
        assert torch.equal(among, scores_11V >= 1.0)
        assert torch.equal(among, torch.isfinite(by_sorting([row], scores_11V)))


@needs_compiler
@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_scores_that_are_no_numbers_stay_to_be_seen(odd: float) -> None:
    scores_11V = torch.arange(50.0)[None, None].clone()
    scores_11V[..., 7] = odd
    found = cut([Truncation(5, 0.9, 0.1)], scores_11V)
    assert torch.equal(found.nan_to_num(-1.0), scores_11V.nan_to_num(-1.0))
    nothing = torch.full((1, 2, 50), -torch.inf)
    assert torch.equal(cut([Truncation(5, 0.9, 0.1)], nothing), nothing)


def test_rows_that_cut_nothing_are_not_asked() -> None:
    assert Truncations.of([Truncation(), Truncation()], torch.device("cpu")) is None
    assert Truncations.of([Truncation(), Truncation(top_k=3)], torch.device("cpu")) is not None
