"""Shared fixtures: random tiny targets of any architecture, and the embedded one."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from specctl_testing.fast_tier import parted

if TYPE_CHECKING:  # the process that hands tests to workers runs none: PyTorch is not for it
    from specctl.runtime.target.target import Target

# A shell that starts the tests in the background hands down an ignored Ctrl-C; some tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):  # so does nohup with a hang-up
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="the tests of make test-fast alone")
    parser.addoption("--errors", type=Path, help="write every error that is made to that folder")


def pytest_configure(config: pytest.Config) -> None:
    if (folder := config.getoption("errors")) is not None:
        from specctl_testing.error_walk import record

        record(folder)


@pytest.hookimpl(trylast=True)  # after -m and -k: a part of what they leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("fast"):
        items[:], others = parted(items)
        config.hook.pytest_deselected(items=others)


def pytest_sessionstart() -> None:
    """What is imported and collected stays: garbage is not looked for meanwhile."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Full collections of garbage leave out all that was imported and all tests."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    from specctl_testing.models import build_model

    return build_model


@pytest.fixture(scope="session")
def make_target(make_model: Callable[..., Any]) -> Callable[..., Target]:
    """make_target(model_type="llama", num_layers=4, hidden=32, vocab=96, seed=0, dtype=float32)."""
    from specctl.runtime.target.target import Target

    def make(*args: Any, **fields: Any) -> Target:
        return Target.from_model(make_model(*args, **fields))

    return make


@pytest.fixture(scope="session")
def tiny_target() -> Target:
    """The embedded target in float32."""
    from specctl.runtime.target.target import load_target

    return load_target("tiny", dtype="float32")


@pytest.fixture(scope="session")
def tiny_gguf(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target as a GGUF file of float32."""
    pytest.importorskip("gguf", reason="the library gguf, of the extra gguf, is not installed")
    from specctl.export.layouts.llama_cpp.target import write_target

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_target(tiny_target, path)
    return path


@pytest.fixture(autouse=True)
def next_lines_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test has commands do: each `Next:` line that they print is read by the program,
    and what it names is there."""
    from specctl.cli.app.console import Console
    from specctl_testing.cli.next_lines import wrong_lines

    wrong, done = list[str](), Console.done

    def checked(
        console: Console, result: dict[str, Any], next: Sequence[str] = (), ok: bool = True
    ) -> None:
        wrong.extend(wrong_lines(next))
        done(console, result, next, ok)

    monkeypatch.setattr(Console, "done", checked)
    yield
    assert not wrong, wrong


@pytest.fixture(autouse=True)
def lines_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where lines are wrapped is not decided by the terminal that started the tests."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def uncalibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of commands estimate their time: to calibrate it takes seconds each."""
    monkeypatch.setattr("specctl.cli.commands.plan.calibration", lambda console, processes=1: None)
