"""A run of two steps on the embedded target, made once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import specctl
from specctl.api.train import TrainResult


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No measured costs of other tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def events() -> list[dict[str, Any]]:
    """What the run reported."""
    return []


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings with which data are made in a second."""
    path: Path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    lines = (json.dumps({"text": f"def area_{n}(width, height):\n" * 4}) for n in range(12))
    path.write_text("\n".join(lines) + "\n")
    sizes = {"prompts": 6, "prompt_tokens": 8, "new_tokens": 8, "text_tokens": 0}
    tau = {"tau_every": 2, "tau_prompts": 1, "tau_tokens": 4}
    return {"rows": 2, "seq_len": 32, "data": {"source": str(path), **sizes}, **tau}


@pytest.fixture(scope="session")
def run(
    tmp_path_factory: pytest.TempPathFactory,
    small_data: dict[str, Any],
    events: list[dict[str, Any]],
) -> TrainResult:
    out: Path = tmp_path_factory.mktemp("api") / "run"
    shape = {"layers": 1, "width": 32, "serve": {"length": 2}}
    return specctl.distill("tiny", out=out, progress=events.append, steps=2, **shape, **small_data)
