"""benchmarks/ablations.py: what a difference says; that the tests its page names are there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

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


def test_every_test_that_the_page_names_is_there() -> None:
    page = (ROOT / "docs" / "ablations.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", page)
    assert len(named) > 10
    missing = [
        f"{file}::{test}" for file, test in named if f"def {test}(" not in (ROOT / file).read_text()
    ]
    assert missing == []
