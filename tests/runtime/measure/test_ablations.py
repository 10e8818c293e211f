"""benchmarks/ablations.py: what a difference says; that the tests its page names are there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

from specctl.recipes.load import load_recipe
from specctl.recipes.stages import runs_of
from specctl.runtime.batching import RowView

ROOT = Path(__file__).parents[3]


@pytest.fixture
def ablations(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("ablations")


def verdict(ablations: ModuleType, *pairs: tuple[list[float], list[float]]) -> str:
    return str(ablations.compare(pairs)["verdict"])


def test_two_paired_standard_errors_decide(ablations: ModuleType) -> None:
    without = [1.0, 5.0, 9.0, 2.0]  # prompts differ far more than the arms: pairs tell them apart
    ahead = [1.3, 5.2, 9.3, 2.2]
    found = ablations.compare([(ahead, without)])
    assert found["difference"] == pytest.approx(0.25)
    assert found["error"] == pytest.approx((0.05**2 * 4 / 3) ** 0.5 / 2)
    assert found["verdict"] == "reproduced"
    assert verdict(ablations, (without, ahead)) == "opposite"
    assert verdict(ablations, ([1.4, 4.8, 9.3, 2.0], without)) == "level"


def test_seeds_are_averaged_and_must_agree(ablations: ModuleType) -> None:
    without = [1.0, 2.0, 3.0, 4.0]
    far, near, behind = ([x + d for x in without] for d in (1.0, 0.1, -0.1))
    both = ablations.compare([(far, without), (near, without)])
    assert both["seeds"] == 2
    assert both["difference"] == pytest.approx(0.55)
    assert both["verdict"] == "reproduced"
    assert verdict(ablations, (far, without), (behind, without)) == "level"


def test_the_best_of_several_settings_is_that_of_all_seeds(ablations: ModuleType) -> None:
    one = ([2.0, 2.0], [1.0, 1.0])  # the best on the first seed only
    other = ([1.6, 1.8], [1.6, 1.8])
    assert ablations.best([one, other]) == 1


def test_arms_that_differ_have_files_of_their_own(ablations: ModuleType, tmp_path: Path) -> None:
    for line in ablations.STOPPED:
        ruled, fixed = ablations.stopped_arms(line, 0, tmp_path)
        files = [arm.file(tmp_path) for arm in (*ruled, *fixed)]
        assert len(set(files)) == len(line.thresholds) + len(ablations.FIXED)
    served = [ablations.served_arms(line, 0) for line in ablations.SERVED]
    piped = [ablations.piped_arms(line, 0) for line in ablations.PIPED]
    batched = [side for line in ablations.BATCHED for side in ablations.batch_arms(line, 0)]
    for pairs in (served, piped, batched):
        arms = {arm for pair in pairs for arm in pair}
        assert len({arm.file(tmp_path) for arm in arms}) == len(arms)


def test_a_pipeline_is_a_recipe_whose_stages_are_as_long_as_it_says(ablations: ModuleType) -> None:
    for line in ablations.PIPED:
        for arm in ablations.piped_arms(line, 0):
            found = runs_of(load_recipe(arm.words[0], arm.words[1:]))
            assert 60 <= sum(run.train.steps for run in found) <= 180
            assert {run.train.rows for run in found} == {4}


def test_rounds_take_what_the_device_says_and_the_policy_is_told_so(ablations: ModuleType) -> None:
    arm = ablations.BatchArm("goodput", None, users=4, fills=16, price=0.1, seed=0)
    assert [arm.seconds(4, length) for length in (0, 3, 7)] == pytest.approx([1.0, 1.3, 2.7])
    policy = arm.made()
    assert policy.costs.seconds(4, 7) == pytest.approx(2.7)
    rows = [RowView(i, room=100) for i in range(4)]
    device = importlib.import_module("ablation_batches").OnDevice(arm, policy)
    asked = max(device.lengths(rows))
    assert device.clock == pytest.approx(arm.seconds(4, asked))


def test_every_test_that_the_page_names_is_there() -> None:
    page = (ROOT / "docs" / "ablations.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", page)
    assert len(named) > 10
    missing = [
        f"{file}::{test}" for file, test in named if f"def {test}(" not in (ROOT / file).read_text()
    ]
    assert missing == []
