"""A run of the program in this process: arguments in, exit code and both streams out."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specctl.cli.app.console import Console
from specctl.cli.main import main
from specctl.models.native.library import folder as native_folder
from specctl.models.native.library import library
from specctl_testing.cli.ran import Ran, Run

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of our own: no test may depend on what another one has measured. The compiled
    step is the same for all."""
    folder = tmp_path_factory.mktemp("cache")
    if library().functions is not None:
        (folder / "specctl").mkdir()
        (folder / "specctl" / "native").symlink_to(native_folder())
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture(scope="module", autouse=True)
def little_beside_a_run() -> Iterator[None]:
    """A draft vocabulary is counted on 20,000 tokens of text, where a million take seconds; nobody
    looks at the curve of a run here, as tests/train/test_run.py does, nor but in test_costs.py at
    the costs that a benchmark measures before it begins."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specctl.api.arguments.drafting.COST_ROUNDS", 2)
        patch.setattr("specctl.train.vocab.selectors.fr_spec.MOST_TOKENS", 20_000)
        patch.setattr("specctl.train.run.save_learning_curve", lambda log, path: None)
        yield


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    def run_(*arguments: object, stdin: str = "") -> Ran:
        words = [str(word) for word in arguments]
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "argv", ["specctl", *words])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main(words, Console(out, err))
        return Ran(code, out.getvalue(), err.getvalue())

    return run_


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the program as its own process; whatever still runs at the end is stopped."""
    started: list[subprocess.Popen[str]] = []

    def start_(*arguments: object, **options: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "specctl", *map(str, arguments)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        started.append(process)
        return process

    yield start_
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()
