"""The scaling law: known coefficients are found, its error is honest, the grid runs and resumes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from specctl.core.errors import IncompatibleError, RecipeError
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import Recipe
from specctl.runtime.target.target import Target
from specctl.train.planning.scaling import (
    BatchSpeed,
    Law,
    Point,
    fit,
    fit_batches,
    grid,
    measure_batches,
    report,
    run_grid,
    save_picture,
)
from specctl_testing.train.small_runs import Talk

SIZES, BUDGETS = (10_000, 40_000, 90_000, 200_000), (2**16, 2**18, 2**20)


def made(noise: float = 0.0) -> list[Point]:
    """tau = -1 + 0.2 log(tokens) + 0.05 log(parameters), and noise."""
    rng = np.random.default_rng(0)
    return [
        Point(size, tokens, -1 + 0.2 * math.log(tokens) + 0.05 * math.log(size) + noise * error)
        for size in SIZES
        for tokens, error in zip(BUDGETS, rng.normal(size=len(BUDGETS)), strict=True)
    ]


def test_known_coefficients_are_found() -> None:
    law = fit(made())
    assert (law.intercept, law.per_tokens, law.per_parameters) == pytest.approx((-1, 0.2, 0.05))
    assert law.r2 == pytest.approx(1.0)
    assert law.error == pytest.approx(0.0, abs=1e-9)
    assert law.tau(2**17, 50_000) == pytest.approx(
        -1 + 0.2 * math.log(2**17) + 0.05 * math.log(5e4)
    )


def test_the_error_is_that_of_points_left_out() -> None:
    points = made(noise=0.05)
    law, errors = fit(points), []
    for i, point in enumerate(points):
        rest = fit([p for j, p in enumerate(points) if j != i])
        errors.append(point.tau - rest.tau(point.tokens, point.parameters))
    assert law.error == pytest.approx(math.sqrt(sum(e * e for e in errors) / len(errors)))
    assert 0.0 < law.r2 < 1.0
    assert law.error > 0.01


def test_a_point_that_the_law_hangs_on_leaves_its_error_open() -> None:
    law = fit([Point(10, 100, 1.0), Point(10, 1000, 1.5), Point(90, 100, 1.2)])
    assert law.error is None
    assert law.r2 == pytest.approx(1.0)


def test_the_next_tenth_costs_what_the_law_says() -> None:
    law = fit(made())
    found = report(made(), law)
    best = found["best"]
    assert (best["tokens"], best["parameters"]) == (2**20, 200_000)
    more = found["next_tenth"]["tokens"]["total"]
    assert law.tau(more, 200_000) == pytest.approx(best["tau"] + 0.1)
    assert found["next_tenth"]["parameters"]["factor"] == pytest.approx(math.exp(2.0))
    falling = Law(1.0, -0.1, 0.0001, 0.9, 0.1)
    assert falling.factor(falling.per_tokens) is None
    assert falling.factor(falling.per_parameters) is None


def test_the_law_of_the_batch_is_found_and_needs_three_sizes() -> None:
    speeds = [BatchSpeed(size, 100.0 + 40.0 * math.log(size)) for size in (1, 2, 4, 8)]
    law = fit_batches(speeds)
    assert (law.intercept, law.per_batch, law.r2) == pytest.approx((100.0, 40.0, 1.0))
    found = report(made(), fit(made()), speeds)["batches"]
    assert [one["fitted"] for one in found["points"]] == pytest.approx(
        [speed.tokens_per_second for speed in speeds]
    )
    bent = [*speeds[:3], BatchSpeed(8, 150.0)]
    assert 0.0 < fit_batches(bent).r2 < 0.9
    with pytest.raises(RecipeError, match="three sizes"):
        fit_batches(speeds[:2])


def test_one_size_or_one_budget_is_no_grid() -> None:
    for points in ([], made()[:3], made()[::3]):
        with pytest.raises(RecipeError, match="two of each"):
            fit(points)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    path = save_picture(made(0.1), fit(made(0.1)), tmp_path / "scaling.png")
    assert path is not None
    assert path.stat().st_size > 10_000


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    text = tmp_path / "words.txt"
    text.write_text("\n\n".join(f"def f{i}(x):\n    return x + {i}" for i in range(200)))
    sets = [
        f"data.source={text}", "data.format=text", "data.regenerate=false", "data.text_tokens=0",
        "train.rows=4", "train.seq_len=32", "train.tau_prompts=2", "train.tau_tokens=4",
        "scaling.sizes=[[1, 8], [2, 16]]", "scaling.steps=[2, 4]", "scaling.batches=[1, 2, 3]",
        "drafter.options={head_dim: 8}",
    ]  # fmt: skip
    return load_recipe("scaling", sets)


def test_a_grid_runs_once_shares_its_data_and_resumes(
    recipe: Recipe, chat_target: Target, tmp_path: Path
) -> None:
    out, talk = tmp_path / "grid", Talk()
    cells = grid(recipe, out)
    assert [c.folder.name for c in cells] == ["1x8-2", "1x8-4", "2x16-2", "2x16-4"]
    points = run_grid(cells, chat_target, talk)
    assert [p.tokens for p in points] == [256, 512, 256, 512]
    assert points[0].parameters == points[1].parameters < points[2].parameters
    assert all(p.tau >= 1.0 for p in points)
    fit(points)
    assert sum(line.startswith("data: reusing") for line in talk.said) == 3
    again = Talk()
    assert run_grid(cells, chat_target, again) == points
    assert again.said == []
    (cells[1].folder / "point.json").unlink()  # as if it had been stopped there
    assert run_grid(cells, chat_target, again) == points
    assert "continuing from step 4" in again.said
    speeds = measure_batches(cells[1], chat_target)
    assert [speed.batch for speed in speeds] == [1, 2, 3]
    assert all(speed.tokens_per_second > 0 for speed in speeds)


def test_a_cell_of_another_recipe_is_refused(
    recipe: Recipe, chat_target: Target, tmp_path: Path
) -> None:
    cell = grid(recipe, tmp_path)[0]
    cell.folder.mkdir()
    (cell.folder / "point.json").write_text(json.dumps({"config": {}, "tau": 2.0}))
    with pytest.raises(IncompatibleError, match="started differently"):
        run_grid([cell], chat_target)


@pytest.mark.parametrize("wrong", ["eagle3", "fastdraft"])
def test_other_recipes_have_no_grid(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="sizes of small-lm"):
        grid(load_recipe(wrong), tmp_path)


def test_the_shipped_grid_is_four_sizes_by_three_budgets(tmp_path: Path) -> None:
    cells = grid(load_recipe("scaling"), tmp_path)
    assert len({(c.layers, c.width) for c in cells}) == 4
    assert len({c.tokens for c in cells}) == 3
    assert len(cells) == 12
