"""Inverse CDF verification: exact for drafts that have seen the very numbers it draws at."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from specctl.core.inverse_cdf import inverse_cdf
from specctl.core.tree import NodeKind, chain_tree
from specctl.runtime.proof.compare import FixedNoise
from specctl.runtime.sampling.noise import RoundNoise
from specctl.runtime.verify import run_rule

CELLS, SIZE, DEPTH = 8, 3, 2  # probabilities are eighths, so that 8 uniforms stand for all


def eighths(rng: np.random.Generator) -> np.ndarray:
    """A distribution over three tokens, zeros among its entries."""
    cuts = np.sort(rng.integers(0, CELLS + 1, SIZE - 1))
    return np.diff([0, *cuts, CELLS]) / CELLS


@pytest.mark.parametrize("seed", range(3))
def test_rounds_are_exact_for_every_draft_that_is_any_function_of_the_noise(seed: int) -> None:
    """Every cell of the noise of three positions, drafts a random table of all of them. Rounds
    follow until three tokens are there; a later round sees the same number at the same position."""
    rng = np.random.default_rng(seed)
    p = {path: eighths(rng) for n in range(DEPTH + 2) for path in product(range(SIZE), repeat=n)}
    cells = list(product(range(CELLS), repeat=DEPTH + 1))
    best = rng.random() < 0.5  # a drafter that agrees often, and one that does not
    joint, accepted = np.zeros((SIZE,) * (DEPTH + 1)), 0
    for cell in cells:
        uniform = (np.array([*cell, *cell]) + 0.5) / CELLS
        text: tuple[int, ...] = ()
        while len(text) <= DEPTH:
            tokens, path = [], text
            for i in range(DEPTH):
                u = uniform[len(text) + i]
                right = int(np.argmax(np.cumsum(p[path[: DEPTH + 1]]) > u))
                token = right if best and rng.random() < 0.8 else int(rng.integers(SIZE))
                tokens.append(token)
                path = (*path, token)
            fed = [(*text, *tokens[:i])[: DEPTH + 1] for i in range(DEPTH + 1)]
            with np.errstate(divide="ignore"):
                scores = torch.from_numpy(np.log(np.stack([p[one] for one in fed])))[None]
            ours = torch.from_numpy(uniform[len(text) : len(text) + DEPTH + 1])[None]
            noise = FixedNoise(ours, torch.zeros(1, SIZE), torch.zeros(1, DEPTH + 1, SIZE))
            tree = chain_tree(
                torch.tensor([tokens]), torch.ones(1, DEPTH, dtype=torch.bool), NodeKind.POINT
            )
            verdict = run_rule("inverse-cdf", tree, scores, noise)
            count = int(verdict.num_accepted_B[0])
            accepted += count
            text = (*text, *tokens[:count], int(verdict.next_token_B[0]))
        joint[text[: DEPTH + 1]] += 1 / len(cells)
    for path in product(range(SIZE), repeat=DEPTH + 1):
        wanted = np.prod([p[path[:i]][token] for i, token in enumerate(path)])
        assert joint[path] == pytest.approx(wanted, abs=1e-12)
    assert accepted > 0


def test_numbers_cut_the_distribution_in_the_order_of_ids() -> None:
    prob = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    at = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2.0**-40], dtype=torch.float64)
    assert inverse_cdf(prob.expand(6, -1), at).tolist() == [1, 1, 3, 3, 4, 4]


def test_a_position_has_one_number_whatever_the_round() -> None:
    early = RoundNoise([5, 6], [0, 0], [10, 3]).position_BT(torch.arange(4).expand(2, 4))
    later = RoundNoise([5], [9], [12]).position_BT(torch.tensor([[0, 1]]))
    assert torch.equal(early[:1, 2:], later)
    many = RoundNoise([7], [0], [0]).position_BT(torch.arange(20000)[None])[0]
    assert len(set(many.tolist())) == 20000
    counts = torch.histc(many, 20, 0, 1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 50  # chi-square, 19 degrees: p = 1e-4
