"""benchmarks/gpu_common.py: cases are kept one by one, and a call goes on where the last one ended;
the scripts themselves are run by `make gpu-dry`."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from specctl import Sampling
from specctl.runtime.generate import generate


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("gpu_common")


def options(out: Path, **fields: Any) -> argparse.Namespace:
    given = {"out": out, "dry_run": True, "minutes": 9.0, "only": "", "json": True, "part": "1/1"}
    return argparse.Namespace(**{**given, **fields})


def left_with(cases: Any) -> int:
    with pytest.raises(SystemExit) as left:
        cases.finish()
    return int(left.value.code or 0)


def test_a_call_measures_what_is_missing_or_failed(common: ModuleType, tmp_path: Path) -> None:
    calls = list[str]()

    def body(name: str, fails: bool = False) -> dict[str, Any]:
        calls.append(name)
        return {"found": 1 // (not fails)}

    first = common.Cases("some", options(tmp_path))
    first.case("a", lambda: body("a"))
    first.case("b", lambda: body("b", fails=True))
    assert left_with(first) == 8
    second = common.Cases("some", options(tmp_path))
    for name in "abc":
        second.case(name, lambda name=name: body(name))
    assert left_with(second) == 0
    assert calls == ["a", "b", "b", "c"]
    kept = json.loads((tmp_path / "some-dry.json").read_text())["cases"]
    assert [kept[name]["found"] for name in "abc"] == [1, 1, 1]


def test_parts_share_the_cases(common: ModuleType, tmp_path: Path) -> None:
    done = list[str]()
    for part in ("1/2", "2/2"):
        cases = common.Cases("some", options(tmp_path, part=part))
        for name in "abc":
            cases.case(name, lambda name=name: done.append(name) or {})
    assert done == ["a", "c", "b"]
    assert sorted(path.name for path in tmp_path.glob("*.json")) == [
        "some-1-of-2-dry.json", "some-2-of-2-dry.json",
    ]  # fmt: skip


def test_no_case_is_begun_without_time_for_it(common: ModuleType, tmp_path: Path) -> None:
    cases = common.Cases("some", options(tmp_path, minutes=0.0))
    cases.case("a", lambda: {"found": 1})
    assert cases.found["cases"] == {}
    assert left_with(cases) == 75


def test_figures_of_another_device_are_not_mixed(common: ModuleType, tmp_path: Path) -> None:
    cases = common.Cases("some", options(tmp_path))
    cases.case("a", lambda: {"found": 1})
    kept = json.loads(cases.file.read_text())
    cases.file.write_text(json.dumps({**kept, "device": "NVIDIA H100"}))
    with pytest.raises(SystemExit, match="NVIDIA H100"):
        common.Cases("some", options(tmp_path))


def test_a_target_of_random_weights_says_the_known_text(common: ModuleType) -> None:
    target = common.known_target(common.SMALL, torch.float32, torch.device("cpu"))
    sampling = Sampling(temperature=0.0, max_new_tokens=5, ignore_eos=True)
    made = generate(target, [[1, 2, 3]], sampling=sampling).outputs[0].token_ids
    token = torch.tensor(3)
    for said in made:
        token = common.after(token, target.spec.vocab_size)
        assert said == int(token)
