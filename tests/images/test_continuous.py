"""Continuous drafts: acceptance as integrated, results that follow the target, one draw a point."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import chisquare, kstest
from torch import Tensor

from specctl.images.continuous import (
    DenoisingPath,
    GaussianMixture,
    accept_or_redraw,
    integrated_acceptance,
)

COUNT = 40_000


def mixture(*parts: tuple[float, float, float]) -> GaussianMixture:
    weight, mean, width = torch.tensor(parts, dtype=torch.float64).T
    return GaussianMixture(weight, mean[:, None], width)


TARGET = mixture((0.5, -1.0, 0.4), (0.3, 0.8, 0.25), (0.2, 2.5, 0.6))
DRAFTS = {
    "same": TARGET,
    "moved": mixture((0.5, -0.7, 0.4), (0.3, 1.0, 0.25), (0.2, 2.1, 0.6)),
    "one": mixture((1.0, 0.3, 1.5)),
}


def below(at: Tensor) -> Tensor:
    """The distribution function of the target."""
    gap = (at[..., None] - TARGET.mean_RX[:, 0]) / (TARGET.width_R * math.sqrt(2))
    return (TARGET.weight_R * 0.5 * (1 + torch.erf(gap))).sum(-1)


@pytest.mark.parametrize("name", DRAFTS)
def test_points_follow_the_target_and_acceptance_is_the_integral(name: str) -> None:
    draft, random = DRAFTS[name], torch.Generator().manual_seed(3)
    drawn = draft.draw(COUNT, random)
    made = accept_or_redraw(TARGET, draft, drawn, random)
    alpha = integrated_acceptance(TARGET, draft, -12, 12, 20_000)
    error = math.sqrt(alpha * (1 - alpha) / COUNT) + 1e-9
    assert float(made.accepted.double().mean()) == pytest.approx(alpha, abs=4 * error)
    assert (made.points[made.accepted] == drawn[made.accepted]).all()
    share = below(made.points[:, 0]).numpy()
    assert kstest(share, "uniform").pvalue > 1e-3
    if name != "same":
        assert kstest(below(drawn[:, 0]).numpy(), "uniform").pvalue < 1e-9
        # rejected points alone follow the residual, not the target
        redrawn = below(made.points[~made.accepted, 0]).numpy()
        assert kstest(redrawn, "uniform").pvalue < 1e-9
        assert made.draws / COUNT == pytest.approx(1, abs=0.05)


def test_a_density_sums_to_one_and_is_that_of_its_draws() -> None:
    grid = torch.linspace(-12, 12, 20_001, dtype=torch.float64)[:, None]
    assert float(TARGET.log_density(grid).exp().sum() * 24 / 20_000) == pytest.approx(1, abs=1e-6)
    points = TARGET.draw(COUNT, torch.Generator().manual_seed(0))
    assert kstest(below(points[:, 0]).numpy(), "uniform").pvalue > 1e-3


def head(shift: float) -> DenoisingPath:
    return DenoisingPath(
        lambda state, step: 0.6 * state + 0.3 * torch.tanh(2 * state) + 0.05 * step + shift,
        (0.3, 0.4, 0.5),
        1,
    )


def test_paths_of_denoising_end_as_those_of_the_target() -> None:
    target, draft, random = head(0.0), head(0.25), torch.Generator().manual_seed(1)
    drawn = draft.draw(COUNT, random)
    made = accept_or_redraw(target, draft, drawn, random)
    alpha = float(made.accepted.double().mean())
    assert 0.2 < alpha < 0.8
    assert made.draws / COUNT == pytest.approx(1, abs=0.06)
    truth = target.draw(COUNT, torch.Generator().manual_seed(9))[:, -1, 0]
    cells = truth.quantile(torch.linspace(0, 1, 21, dtype=torch.float64))[1:-1]

    def counts(ends: Tensor) -> Tensor:
        return torch.bucketize(ends.contiguous(), cells).bincount(minlength=20).double()

    kept, raw = counts(made.points[:, -1, 0]), counts(drawn[:, -1, 0])
    both = counts(truth) + kept
    assert chisquare(kept, both / 2).pvalue > 1e-3
    assert chisquare(raw, (counts(truth) + raw) / 2).pvalue < 1e-9
    # the density of a path is the product of its steps, written out
    path = drawn[:3]
    expected = torch.distributions.Normal(0.0, 1.0).log_prob(path[:, 0, 0])
    for index, step in enumerate((3, 2, 1)):
        mean = draft.mean(path[:, index], step)[:, 0]
        width = draft.widths[step - 1]
        expected = expected + torch.distributions.Normal(mean, width).log_prob(
            path[:, index + 1, 0]
        )
    assert torch.allclose(draft.log_density(path), expected)
