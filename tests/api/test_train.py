"""train() and distill() from a notebook: settings, progress, results, silence, signals."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

import specctl
from specctl.api.arguments.progress import ProgressEvent
from specctl.api.arguments.recipe import recipe_of
from specctl.api.train import TrainResult
from specctl.recipes.load import load_recipe


def test_a_run_is_its_package_its_figures_and_a_table(run: TrainResult) -> None:
    assert (run.package / "manifest.json").is_file()
    assert run.tau is not None
    assert run.tau >= 1.0
    assert [line["step"] for line in run.metrics if "loss" in line] == [2]
    assert str(run.out) in repr(run)
    assert "<table>" in run._repr_html_()
    assert run.to_json()["steps"] == 2
    assert "specctl train-draft --recipe" in (run.out / "run.yaml").read_text()


def test_progress_is_called_with_events_that_print(
    run: TrainResult, events: list[dict[str, Any]]
) -> None:
    assert run.tau is not None
    assert {"message", "progress"} <= {event["event"] for event in events}
    steps = [event for event in events if event.get("task") == "train"]
    assert steps[-1]["is_over"]
    assert steps[-1]["done"] == 2
    assert str(steps[-1]).startswith("train: 2/2 step | loss ")
    assert str(ProgressEvent(event="warning", text="so")) == "warning: so"


def test_a_call_is_silent_and_leaves_signals_as_they_were(
    run: TrainResult, capfd: pytest.CaptureFixture[str]
) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    again = specctl.train("tiny", run.recipe, out=run.out)
    assert again.tau == run.tau
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("settings", "field", "value"),
    [
        ({"steps": 7}, "train.steps", 7),
        ({"train": {"steps": 7}}, "train.steps", 7),
        ({"train.steps": 7}, "train.steps", 7),
        ({"layers": 3}, "drafter.options.layers", 3),
        ({"data": "chats.jsonl"}, "data.source", "chats.jsonl"),
        ({"drafter": {"options": {"layers": 3}}}, "drafter.options.layers", 3),
        ({"init": "target"}, "drafter.init", "target"),
    ],
)
def test_a_setting_is_a_key_of_the_recipe(
    settings: dict[str, Any], field: str, value: object
) -> None:
    made = recipe_of("distill", "tiny", settings)
    found: Any = made.to_json()
    for key in field.split("."):
        found = found[key]
    assert found == value
    assert made.origin[field] == "Python"
    unchanged = load_recipe("distill").to_json()["serve"]
    assert made.to_json()["serve"] == unchanged


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"seed": 1}, "several sections"), ({"stpes": 1}, "steps"), ({"steps": "many"}, "steps")],
)
def test_other_settings_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(specctl.SpecctlError, match=named):
        recipe_of("distill", "tiny", settings)


def test_distill_refuses_a_head_and_train_a_progress_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(specctl.SpecctlError, match="independent"):
        specctl.distill("tiny", "eagle3", out=tmp_path)
    wrong: Any = 3
    with pytest.raises(specctl.SpecctlError, match="progress"):
        specctl.train("tiny", out=tmp_path, progress=wrong)
