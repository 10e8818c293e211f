"""What is said of a model that is not where it was looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.core.errors import FileError
from specctl.core.storage.model_folder import no_gguf_file
from specctl.export.package.find import locate
from specctl.recipes.targets import resolve


def test_a_missing_gguf_file_is_named_as_one_with_the_file_that_is_alike(tmp_path: Path) -> None:
    (tmp_path / "smollm2-q4.gguf").touch()
    (tmp_path / "smollm2-q5.gguf").mkdir()
    error = no_gguf_file(tmp_path / "smollm-q4.gguf")
    assert (error.what, error.do) == (
        "there is no such GGUF file",
        f"did you mean {tmp_path / 'smollm2-q4.gguf'}",
    )
    for name in ("smollm.gguf", "./smollm.gguf"):
        with pytest.raises(FileError, match="there is no such GGUF file"):
            resolve(name)
        with pytest.raises(FileError, match="there is no such GGUF file"):
            locate(name)
    far = no_gguf_file(tmp_path / "llama.gguf")
    assert far.do == f"check the path: {tmp_path} has no GGUF file of a name like llama.gguf"
