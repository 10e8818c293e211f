"""SmolLM2-135M-Instruct, a published chat model, as its owner uses it: `make real` brings it.

In the rest of the suite the target is the embedded one, which knows no chat and repeats itself.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import specctl
from specctl.models.native.library import no_int8
from specctl.recipes.targets import resolve
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.save_target import write_target
from specctl.runtime.target.target import Target

NAME = "smollm2-135m"
INSTALLED = resolve(NAME).installed
assert INSTALLED is not None
pytestmark = pytest.mark.skipif(
    INSTALLED.path() is None, reason=f"{NAME} is not here: `{INSTALLED.command}`, or make real"
)
QUESTIONS = (
    "Repeat this twice: the quick brown fox jumps over the lazy dog.",
    "Write a Python function that adds two numbers.",
)


@pytest.fixture(scope="module")
def file() -> str:
    assert INSTALLED is not None
    return str(INSTALLED.path())


@pytest.fixture(scope="module")
def target(file: str) -> Target:
    return specctl.load_target(file)


def answers(target: Target, drafter: str | None, tokens: int = 32) -> list[str]:
    sampling = Sampling(max_new_tokens=tokens)
    found = specctl.generate(target, list(QUESTIONS), sampling=sampling, drafter=drafter)
    return [output.text for output in found.outputs]


def test_it_answers_as_it_was_asked_and_ends_its_turn(target: Target) -> None:
    assert target.is_chat
    repeated, written = answers(target, None)
    assert "quick brown fox jumps over the lazy dog." in repeated
    assert len(repeated) < 100  # it does not go on as the user
    assert "def add" in written
    assert "return" in written


@pytest.mark.skipif(no_int8() is not None, reason=f"no packed weights: {no_int8()}")
def test_it_is_decoded_as_the_file_packs_it(target: Target) -> None:
    assert target.dtype_name == "gguf"
    assert any("Q4_1" in note for note in target.notes)


@pytest.mark.parametrize("drafter", ["prompt-lookup", "token-recycling", "auto"])
def test_drafted_answers_are_those_of_plain_decoding(target: Target, drafter: str) -> None:
    assert answers(target, drafter) == answers(target, None)


def test_a_folder_of_its_numbers_is_the_same_target(file: str, tmp_path: Path) -> None:
    wide = specctl.load_target(file, dtype="float32")
    (tmp_path / "folder").mkdir()
    write_target(wide, tmp_path / "folder")
    folder = specctl.load_target(str(tmp_path / "folder"), dtype="float32")
    assert folder.fingerprint == wide.fingerprint
    assert answers(folder, None, 16) == answers(wide, "prompt-lookup", 16)


def test_a_drafter_learns_from_it_and_drafts_for_it(
    file: str, target: Target, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        json.dumps({"prompt": f"{question} Then say {n}."}) for n in "12" for question in QUESTIONS
    ]
    prompts.write_text("\n".join(lines) + "\n")
    run = specctl.train(
        file,
        "eagle3",
        out=tmp_path / "run",
        data={"source": str(prompts), "prompts": 4, "new_tokens": 8, "text_tokens": 0},
        train={"steps": 2, "tau_prompts": 1, "tau_tokens": 8},
    )
    [drafted, *_] = answers(target, str(run.package), 16)
    assert drafted == answers(target, None, 16)[0]
