"""Whatever has no end is refused in a moment: devices, pipes, sparse files, aliases of YAML."""

from __future__ import annotations

import io
import os
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from specctl.cli.options.prompts import read_prompts
from specctl.core.errors import FileError, RecipeError, SpecctlError
from specctl.core.storage.bounded_read import open_regular, read_stream, read_text
from specctl.recipes.files import MOST, parse_yaml, read_source
from specctl.train.data.files.streams import opened

ENDLESS = Path("/dev/zero")
needs_devices = pytest.mark.skipif(not ENDLESS.exists(), reason="no /dev/zero")
FOLDS = 9


def bomb(first: str) -> str:
    """A billion values in 500 bytes."""
    lines = [f"a0: &a0 [{first}]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * FOLDS)}]" for i in range(1, 10)]
    return "\n".join(lines)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@needs_devices
def test_a_device_is_no_file_of_prompts() -> None:
    before = peak_mib()
    with pytest.raises(FileError, match="device or a pipe"):
        read_prompts(None, ENDLESS, None)
    with pytest.raises(FileError, match="device or a pipe"), opened(ENDLESS):
        pass
    assert peak_mib() - before < 200


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "prompts.txt"
    os.mkfifo(pipe)
    began = time.monotonic()
    with pytest.raises(FileError, match="nothing was written"):
        read_prompts(None, pipe, None)
    with pytest.raises(OSError, match="device or a pipe"):
        open_regular(pipe)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("body", "texts"),
    [(b"one\n\ntwo\n", ["one", "two"]), (b'{"prompt": "three"}\n', ["three"])],
)
def test_prompts_that_another_program_writes_are_read(body: bytes, texts: list[str]) -> None:
    reading, writing = os.pipe()  # as the shell's <(command) is
    os.write(writing, body)
    os.close(writing)
    try:
        found = read_prompts(None, Path(f"/dev/fd/{reading}"), None)
    finally:
        os.close(reading)
    assert [prompt.text for prompt in found] == texts


@needs_devices
def test_a_recipe_and_a_text_of_settings_end_somewhere() -> None:
    with pytest.raises(OSError, match="more than"):
        read_text(ENDLESS)


def test_a_sparse_file_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "sparse.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    before = peak_mib()
    with pytest.raises(FileError, match="more than"):
        read_source(str(path))
    prompts = path.rename(tmp_path / "sparse.jsonl")
    with pytest.raises(FileError):
        next(iter(read_prompts(None, prompts, None)))
    assert peak_mib() - before < 400


def test_standard_input_ends_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(io.StringIO):
        def read(self, size: int | None = -1) -> str:
            assert size is not None
            assert 0 < size <= 1 << 20
            return "a" * size

    monkeypatch.setattr("specctl.cli.options.prompts.MOST_INPUT", 1 << 22)
    monkeypatch.setattr("sys.stdin", Endless())
    for words in (("-", None), (None, Path("-"))):
        with pytest.raises(SpecctlError, match="standard input is too long"):
            read_prompts(*words, None)


@pytest.mark.parametrize("body", [b"abc", b"", "äö"])
def test_a_stream_is_given_back_as_it_is(body: Any) -> None:
    stream = io.BytesIO(body) if isinstance(body, bytes) else io.StringIO(body)
    assert read_stream(stream) == body
    with pytest.raises(OSError, match="more than 1 bytes"):
        read_stream(io.BytesIO(b"ab"), 1)


@pytest.mark.parametrize(
    "text",
    [
        bomb("lol"),
        bomb("x" * 1000),
        bomb("{a: 1}"),
        "a: &a {x: 1}\n" + "\n".join(f"b{i}: &b{i} {{<<: [*{'a' if not i else f'b{i - 1}'}, "
        f"*{'a' if not i else f'b{i - 1}'}]}}" for i in range(40)),
        "a: &a [*a]",
        f"long: &long {'x' * (MOST // 20)}\nall: [{', '.join(['*long'] * 50)}]",
    ],
    ids=["list", "long words", "mappings", "merged", "of itself", "one long text"],
)  # fmt: skip
def test_aliases_are_followed_only_where_what_they_make_is_bounded(text: str) -> None:
    before, began = peak_mib(), time.monotonic()
    with pytest.raises(RecipeError, match="alias"):
        parse_yaml(text, "bomb.yaml")
    assert time.monotonic() - began < 10
    assert peak_mib() - before < 400


def test_aliases_of_a_recipe_are_read() -> None:
    text = "base: &base {steps: 3, rate: 1e-3}\none: *base"
    found = parse_yaml(text, "recipe.yaml")
    assert found["one"] == {"steps": 3, "rate": 1e-3}
    assert parse_yaml("", "empty.yaml") is None


@pytest.mark.parametrize("value", ["9" * 5000, "2001-40-40", "!!int x", "!!float x"])
def test_values_that_python_refuses_are_errors_of_the_recipe(value: str) -> None:
    with pytest.raises(RecipeError, match="not valid YAML"):
        parse_yaml(f"steps: {value}", "recipe.yaml")
