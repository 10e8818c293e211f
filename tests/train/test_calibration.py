"""A calibration: seconds of a step, an answer, a measurement, from a few of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specctl.cli.commands.plan import calibration
from specctl.core.errors import SpecctlError
from specctl.core.spec import ModelSpec
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import Recipe
from specctl.runtime.measure.reporter import SilentReporter
from specctl.train.planning import calibration as measuring
from specctl.train.planning.calibration import calibrate
from specctl.train.planning.plan import RunPlan, plan
from specctl.train.planning.stand_in import process_seconds, source_text, stand_in
from specctl.train.planning.target_shape import shape_of

SPEC = ModelSpec("llama", 4, 32, 88, 4, 2, 8, 96, 1e-5, 1e4, 1024)
SMALL = [
    "data.prompts=40", "data.prompt_tokens=8", "data.new_tokens=16", "data.text_tokens=200",
    "train.seq_len=32", "train.tau_prompts=2", "train.tau_tokens=8", "vocab.size=64",
]  # fmt: skip
STATES = ["data.target_source=files", "data.states=states", "data.regenerate=false"]


@pytest.fixture
def words(tmp_path: Path) -> Path:
    file = tmp_path / "words.txt"
    file.write_text("\n\n".join(f"def f{i}(x):\n    return x + {i}" for i in range(50)))
    return file


def recipe_of(name: str, words: Path, *sets: str) -> Recipe:
    """For a target that is not here; its shape is given beside it."""
    given = [f"data.source={words}", "data.format=text", *SMALL, *sets]
    return load_recipe(name, given, target="no/where")


def seconds(made: RunPlan) -> dict[str, float]:
    return {part.name: sum(part.seconds_range) / 2 for part in made.parts}


class Said(SilentReporter):
    def say(self, text: str) -> None:
        self.warnings.append(text)


def test_a_plan_is_calibrated_where_the_run_shall_be(words: Path) -> None:
    recipe, said = recipe_of("eagle3", words, "train.rows=2"), Said()
    made = plan(recipe, SPEC, calibrate=calibration(said))  # type: ignore[arg-type]
    assert made.basis.startswith("calibrated in ")
    assert said.warnings[0].startswith("calibrating eagle3 here: a few steps and rounds of the run")
    assert len(said.warnings) == 1
    found = seconds(made)
    assert {*found} == {
        "start, text, package", "the target writes answers", "training", "measuring tau", "saving"
    }  # fmt: skip
    assert made.seconds_range[1] / made.seconds_range[0] < 1.6
    longer = recipe_of("eagle3", words, "train.rows=2", "train.steps=1600")
    later = seconds(plan(longer, SPEC, calibrate=lambda recipe, shape: PACE))
    assert later["training"] == pytest.approx(1600 * PACE.step, rel=0.03)


PACE = measuring.Pace(1.0, 0.1, 0.5, 2.0, 0.1)


def test_a_plan_that_cannot_be_calibrated_is_estimated(
    words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*given: Any, **more: Any) -> None:
        raise SpecctlError("no room")

    recipe, said = recipe_of("medusa", words), Said()
    monkeypatch.setattr(measuring, "calibrate", refused)
    made = plan(recipe, SPEC, flops_per_second=1e10, calibrate=calibration(said))  # type: ignore[arg-type]
    assert made.basis.startswith("estimate from FLOPs")
    assert said.warnings[-1] == "not calibrated: no room"


@pytest.mark.parametrize(
    ("limit", "compiling"),
    [(1e9, 0.0), (3.0, 0.0), (90.0, 100.0)],
    ids=["whole steps", "from a few rows", "compiled in the first"],
)
def test_a_step_is_all_its_rows_and_batches_and_one_update(
    words: Path, monkeypatch: pytest.MonkeyPatch, limit: float, compiling: float
) -> None:
    """By a clock that counts rows, and two for an update."""
    now = [0.0]

    def taken(job: Any, progress: Any, advance: Callable[..., None]) -> None:
        nonlocal compiling
        now[0] += job.settings.rows * job.settings.accumulate + 2 + compiling
        compiling = 0.0

    monkeypatch.setattr(measuring, "take_step", taken)
    monkeypatch.setattr(measuring, "STEP_SECONDS", limit)
    compiled = f"train.compile={compiling > 0}".lower()
    recipe = recipe_of("eagle3", words, "train.rows=8", "train.accumulate=3", compiled)
    found = calibrate(recipe, shape_of(SPEC), clock=lambda: now[0])
    assert found is not None
    assert found.step == 8 * 3 + 2


def test_what_runs_elsewhere_is_not_loaded_and_takes_no_time_here(words: Path) -> None:
    recipe = recipe_of("eagle3", words, "train.rows=2", *STATES)
    shape = shape_of(SPEC)
    target = stand_in(recipe.target, False, shape, measuring.run_device())
    assert target is not None
    assert target.lm.module.shape.num_layers == 1  # type: ignore[attr-defined]
    assert target.spec.num_layers == SPEC.num_layers
    made = plan(recipe, SPEC, calibrate=calibration(SilentReporter()))  # type: ignore[arg-type]
    assert made.basis.startswith("calibrated in ")
    assert seconds(made)["training"] > 0
    asked = recipe_of("eagle3", words, "data.endpoint=http://a:8000")
    parts = seconds(plan(asked, SPEC, flops_per_second=1e10))
    assert parts.pop("the target writes answers") == 0
    assert all(parts.values())


def test_text_is_read_whole_or_reckoned_from_its_beginning(
    words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    recipe = recipe_of("medusa", words)
    assert source_text(recipe.data, clock).seconds == 1.0
    monkeypatch.setattr("specctl.train.planning.stand_in.TEXT_BYTES", 10)
    part = source_text(recipe.data, clock)
    assert part.seconds == pytest.approx(words.stat().st_size / len(part.samples[0].text))
    missing = recipe.data.model_copy(update={"source": "gone.txt"})
    assert source_text(missing, clock).samples == ()


def test_the_age_of_a_process_counts_only_at_its_start() -> None:
    assert process_seconds(most=1e-9) is None
    age = process_seconds(most=1e9)
    assert age is None or age > 0.1
