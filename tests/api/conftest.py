"""A run of two steps on the embedded target, made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import specctl
from specctl.api.train import TrainResult
from specctl_testing.small_run import SMALL


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No measured costs of other tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def events() -> list[dict[str, Any]]:
    """What the run reported."""
    return []


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory, events: list[dict[str, Any]]) -> TrainResult:
    out: Path = tmp_path_factory.mktemp("api") / "run"
    return specctl.distill("tiny", out=out, progress=events.append, layers=1, width=32, **SMALL)
