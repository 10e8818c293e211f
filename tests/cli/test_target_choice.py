"""What is said of the step that a target is decoded with."""

from __future__ import annotations

import pytest

from specctl.cli.options.target_choice import AnsweringChoice
from specctl.models.native import library as native
from specctl_testing.cli.ran import Run


def test_a_step_that_could_not_be_compiled_is_said(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "is_to_be_built", lambda: True)
    monkeypatch.setattr(native, "library", lambda: native.Library(None, "c++: no such flag"))
    ran = run("generate", "--target", "tiny", "--max-new-tokens", "2", "def main(")
    assert ran.code == 0
    assert "it was not compiled, decoding is slower without it: c++: no such flag" in ran.err


def test_nothing_is_said_of_one_that_was(run: Run) -> None:
    ran = run("generate", "--target", "tiny", "--max-new-tokens", "2", "def main(")
    assert ran.code == 0
    assert "compiled" not in ran.err


def test_no_mixture_is_trained_for() -> None:
    choice = AnsweringChoice("tiny", mix="average=tiny")
    assert choice.words() == ["--target", "tiny", "--mix", "average=tiny"]
    assert choice.training_words() == ["--target", "tiny"]
