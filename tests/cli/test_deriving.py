"""`--time`: a recipe is derived, shown, kept with the run, and written as a file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from specctl.api.derive import AMOUNTS, FOLLOWING
from specctl.core.errors import Exit, RecipeError
from specctl.recipes.targets import resolve
from specctl.train.planning import amounts as amounts_of_time
from specctl.train.planning import derive as deriving
from specctl.train.planning import plan as planning
from specctl.train.planning.amounts import SPENT, TimeLeft
from specctl_testing.cli.ran import Run
from specctl_testing.train.known_pace import is_known

# Sizes are set by hand so that the run itself takes seconds.
SMALL = (
    "data.new_tokens=8", "data.prompt_tokens=8", "train.rows=2", "train.seq_len=32",
    "train.tau_prompts=2", "train.tau_tokens=6", "vocab.size=64", "data.features=online",
)  # fmt: skip


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """--target, --data and small sizes, for a target whose pace and data are known."""
    monkeypatch.chdir(tmp_path)
    is_known(monkeypatch)
    monkeypatch.setattr(deriving, "stand_in", lambda *given: None)
    shutil.copytree(str(resolve("tiny").path), tmp_path / "other")
    texts = (f"def function_{i}(value):\n    return value + {i}\n" for i in range(60))
    file = tmp_path / "words.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sets = [word for one in SMALL for word in ("--set", one)]
    return ["--target", "other", "--data", file, *sets]


def test_a_cut_is_healed_for_the_time_that_it_leaves(
    run: Run, flags: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "matrix_speed", lambda: 1e12)
    words = ("prune", *flags, "--layers", "2", "--width", "0.5", "--set", "train.save_every=50")
    plan = run(*words, "--time", "80s", "--dry-run", "--out", "cut")
    assert plan.code == 0, plan.err
    assert "calibrated here: 0.5 s a step" in plan.out
    assert not Path("cut").exists()
    ran = run(*words, "--time", "80s", "--out", "cut")
    assert ran.code == 0, ran.err
    assert "  scoring what matters, " in ran.out
    kept = json.loads(Path("cut/derived.json").read_text())
    chosen = {one["field"]: one["value"] for one in kept["choices"]}
    assert not [field for field in chosen if field.startswith("drafter.")]  # the cut decides
    recorded = yaml.safe_load(Path("cut/run.yaml").read_text())["recipe"]
    assert recorded["train"]["steps"] == chosen["train.steps"] > 0
    assert recorded["data"]["prompts"] == chosen["data.prompts"]
    assert (recorded["drafter"]["init"], recorded["drafter"]["options"]["layers"]) == ("cut/cut", 2)
    again = run(*words, "--out", "cut")
    assert again.code == 0, again.err
    assert "recipe: as it was derived for the run in cut" in again.err
    assert "left as it is" in again.err
    Path("half").mkdir()
    shutil.copy("cut/derived.json", "half")  # as a kill leaves it before the cut
    larger = run(*words, "--layers", "3", "--time", "80s", "--dry-run", "--out", "half")
    assert larger.code == 0, larger.err
    assert "not used" in larger.err
    assert "scoring what matters" in larger.out
    for more in (("--two-step",), ("--heal-steps", "0"), ("--search",)):
        assert run(*words, *more, "--time", "80s", "--out", "other-cut").code == Exit.RECIPE
    Path("cut/derived.json").rename("gone.json")
    refused = run(*words, "--time", "80s", "--out", "cut")
    assert (refused.code, "recipe was not derived" in refused.err) == (Exit.FILE, True)
    assert not Path("cut/derived.json").exists()


def test_what_comes_before_a_run_takes_from_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amounts_of_time, "now", lambda: 10.0)
    whole, less = TimeLeft(110.0, 0.0), TimeLeft(110.0, 0.0, taken=50.0)
    assert (whole.left(), less.left()) == (SPENT * 100.0, SPENT * 50.0)
    whole.check(60.0, is_all=True)
    with pytest.raises(RecipeError) as caught:
        less.check(SPENT * 60.0, is_all=True)
    assert caught.value.expected == "at least 3 min"  # 10 s spent, 50 before, 60 of the run, and 60


def test_a_run_in_a_given_time_goes_on_and_a_longer_time_adds_answers_and_steps(
    run: Run, flags: list[Any]
) -> None:
    words = ("train-draft", "--recipe", "eagle3", *flags, "--out", "run")
    ran = run(*words, "--time", "50s")
    assert ran.code == 0, ran.err
    assert "deriving eagle3 for other, to be done in 50s" in ran.err
    assert "every row is read" in ran.out
    assert "was made for the target tiny" not in ran.err
    before = json.loads(Path("run/derived.json").read_text())
    assert before["seconds"] == 50.0
    recorded = yaml.safe_load(Path("run/run.yaml").read_text())
    assert recorded["origin"]["train.steps"] == "derived"
    assert recorded["recipe"]["train"]["steps"] == amounts(before)[1] >= 40
    assert Path("run/package/manifest.json").is_file()
    again = run(*words, "--time", "50s")
    assert again.code == 0, again.err
    assert "recipe: as it was derived for the run in run" in again.err
    assert "left as it is" in again.err
    assert run(*words).code == 0
    other = run(*words, "--time", "2h")
    assert other.code == Exit.RECIPE
    assert "--time 50s goes on with it" in other.err
    assert "--allow data goes on with more answers and steps" in other.err

    more = ("--time", "80s", "--allow", "data")
    plan = run(*words, *more, "--dry-run")
    assert plan.code == 0, plan.err
    answers, steps = amounts(before)
    assert f"{answers} answers kept, at most " in plan.out
    assert f"{steps} steps made, " in plan.out
    assert json.loads(Path("run/derived.json").read_text()) == before
    ran = run(*words, *more)
    assert ran.code == 0, ran.err
    assert "with more data, in all in 80s" in ran.err
    assert f"{answers} answers in " in ran.err
    now = json.loads(Path("run/derived.json").read_text())
    assert now["seconds"] == 80.0
    assert amounts(now) > (answers, steps)
    same = {choice["field"] for choice in before["choices"]} - {*AMOUNTS, *FOLLOWING}
    assert same <= {choice["field"] for choice in now["choices"] if choice in before["choices"]}
    longer = run(*words, "--steps", "900", "--allow", "data", "--dry-run")
    assert longer.code == 0, longer.err
    assert "was made for the target" not in longer.err  # sizes are derived


def amounts(record: dict[str, Any]) -> tuple[int, int]:
    """Answers and steps."""
    found = {choice["field"]: choice["value"] for choice in record["choices"]}
    return found["data.prompts"], found["train.steps"]


def test_a_demonstration_for_another_target_is_derived_unless_its_length_is_given(
    run: Run, flags: list[Any]
) -> None:
    words = ("train-draft", "--recipe", "eagle3", *flags, "--out", "run", "--dry-run")
    ran = run(*words)
    assert ran.code == 0, ran.err
    assert "to be done in 40m" in ran.err
    assert not Path("run").exists()
    for given in (("--steps", "9"), ("--allow", "recipe")):
        ran = run(*words, *given)
        assert ran.code == 0, ran.err
        assert "deriving" not in ran.err
    plan = run("plan", "--recipe", "eagle3", *flags, "--time", "20m", "--json")
    assert plan.code == 0, plan.err
    answer = json.loads(plan.out)["result"]
    assert answer["origin"]["train.steps"] == "derived"
    assert "0.5 s a step" in answer["plan"]["basis"]


def test_a_recipe_is_written_with_its_reasons_and_trains(run: Run, flags: list[Any]) -> None:
    words = ("recipes", "write", "mine.yaml", "--recipe", "eagle3", *flags, "--time", "10m")
    ran = run(*words)
    assert ran.code == 0, ran.err
    text = Path("mine.yaml").read_text()
    assert text.startswith("# specctl train-draft --recipe mine.yaml\n# Derived from recipe eagle3")
    assert "every row is read" in text
    shown = run("recipes", "show", "mine.yaml")
    assert "every row is read" in shown.out
    assert run("recipes", "validate", "mine.yaml").code == 0
    twice = run(*words)
    assert twice.code == Exit.FILE
    assert "--force" in twice.err
    plan = run("train-draft", "--recipe", "mine.yaml", "--steps", "3", "--dry-run", "--out", "run")
    assert plan.code == 0, plan.err
    assert "deriving" not in plan.err


def test_a_time_is_refused_for_a_run_that_was_not_derived(run: Run, flags: list[Any]) -> None:
    Path("run").mkdir()
    record = {"recipe": {"name": "eagle3"}, "origin": {}}
    Path("run/run.yaml").write_text(yaml.safe_dump(record))
    words = ("train-draft", "--recipe", "eagle3", *flags, "--out", "run", "--time", "10m")
    ran = run(*words)
    assert ran.code == Exit.FILE
    assert "holds a run whose recipe was not derived" in ran.err
    assert run(*words[:-1], "soon").code == Exit.RECIPE


def test_too_few_prompts_are_refused_with_a_way_out(run: Run, flags: list[Any]) -> None:
    file = Path(flags[3])
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))
    ran = run("train-draft", "--recipe", "eagle3", *flags, "--time", "10m", "--out", "run")
    assert ran.code == Exit.RECIPE
    assert "3 in" in ran.err
    assert "a chat model as the target" in ran.err
    assert not Path("run").exists()
