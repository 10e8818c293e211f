"""Every command for those who have a model, of their page and of the README. The model lies in
three places: a hub's cache, a folder, a GGUF file. Benchmarks are shortened."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import specctl
from specctl.cli.main import main
from specctl.recipes.targets import resolve
from specctl.runtime.target.save_target import write_target

ROOT = Path(__file__).parents[2]
NAME = "SmolLM2-135M-Instruct"
INSTALLED = resolve("smollm2-135m").installed
assert INSTALLED is not None
REPO = f"HuggingFaceTB/{NAME}"
TEXT = (ROOT / "docs" / "your-model.md").read_text(encoding="utf-8")
FRONT = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    *re.findall(r"^\$ (specctl (?!serve).*)$", TEXT, re.MULTILINE),  # a server runs on
    *re.findall(rf"^\$ (specctl .*--target \S*{NAME}.*)$", FRONT, re.MULTILINE),
]
pytestmark = pytest.mark.skipif(
    INSTALLED.path() is None, reason=f"{NAME} is not here: `{INSTALLED.command}`, or make real"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the model as a GGUF file, as a folder and as a hub's cache, and the page's prompts."""
    assert INSTALLED is not None
    found, file = tmp_path_factory.mktemp("mine"), INSTALLED.path()
    (found / f"{NAME}.Q4_1.gguf").symlink_to(str(file))
    write_target(specctl.load_target(str(file), dtype="float32"), found / NAME)
    cache = found / "hub" / f"models--{REPO.replace('/', '--')}"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40)
    (cache / "snapshots").mkdir()
    (cache / "snapshots" / ("0" * 40)).symlink_to(found / NAME)
    for name, text in re.findall(r"^`(\S+\.txt)`:\n\n```text\n(.*?)^```", TEXT, re.M | re.S):
        (found / name).write_text(text)
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_runs(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    words = shlex.split(command)
    words += ["--num-prompts", "1", "--max-new-tokens", "8"] if words[1] == "bench" else []
    monkeypatch.setattr("sys.argv", words)
    code, said = main(words[1:]), capfd.readouterr()
    assert code == 0, said.err
    assert said.out.strip()
    if REPO in command:  # not the package's file, which has the same name
        assert "GGUF" not in said.err
    if "--compare" in words:
        assert "yes" in said.out  # the same text as plain decoding
