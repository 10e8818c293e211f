"""A slice of every proof of serving; `make proof-serving` runs them whole."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specctl.runtime.server import body, listen

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def proof(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A module of benchmarks/ by name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def assert_proved(checks: Sequence[Any]) -> None:
    assert checks
    for check in checks:
        assert check.ok, check


def test_whatever_the_schema_allows_or_forbids_is_answered_in_words(proof: Any) -> None:
    module = proof("proof_serve_fuzz")
    with module.stub_server() as server:
        assert_proved(module.prove_schema(server, 30, ("fuzzing",), seed=1))


def test_bytes_that_are_no_http_or_json_do_no_harm(
    proof: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = proof("proof_serve_fuzz")
    monkeypatch.setattr(listen, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(body, "BODY_SECONDS", 0.5)
    small = [kind for kind in module.INPUTS if "10 MiB" not in kind.name]
    monkeypatch.setattr(module, "INPUTS", small)
    with module.stub_server() as server:
        assert_proved(module.prove_bytes(server, 2 * len(small), slow=2, seed=1))


def test_prompts_are_read_whole_or_refused_with_counts(proof: Any) -> None:
    module = proof("proof_serve_fuzz")
    with proof("serve_common").tiny_server() as server:
        assert_proved(module.prove_prompts(server, 14, seed=1))
