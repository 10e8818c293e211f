"""A target that writes pictures, made and used as its owner would."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from specctl.images.codebook import Codebook
from specctl.images.png import GAP
from specctl.train.pretrain.pictures import FIRST_CODE
from specctl.train.pretrain.run import pretrain
from specctl_testing.cli.ran import Run
from specctl_testing.images import CODES, GRID, read_png, small_pictures


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    final = pretrain(small_pictures(folder / "recipe.yaml"), folder)
    assert final.loss < np.log(CODES)
    return folder / "export"


def test_pictures_are_written_as_their_owner_would(run: Run, trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "seven.png"
    words = ("generate", "--target", trained, "--temperature", 1, "--max-new-tokens", GRID**2)
    ran = run(
        *words, "--json", "--set", f"picture.out={file}", "--draft", "speculative-jacobi", "7"
    )
    assert ran.code == 0, ran.err
    output = ran.json["result"]["outputs"][0]
    assert any(word.startswith("v") for word in output["text"].split())
    pixels, _ = Codebook.load(trained).decode(output["token_ids"])
    found = read_png(file.read_bytes())
    assert (found[GAP:-GAP:4, GAP:-GAP:4] == pixels).all()


def test_rows_at_once_are_marked_and_refuse_what_they_lack(
    run: Run, trained: Path, tmp_path: Path
) -> None:
    words = ("generate", "--target", trained, "--temperature", 1, "--seed", 3)
    shown = {}
    for window in (1, GRID):
        ran = run(*words, "--json", "--set", f"picture.window={window}", "7")
        assert ran.code == 0, ran.err
        stats = ran.json["result"]["stats"]
        shown[window] = ran.json["result"]["outputs"][0]["token_ids"]
        assert stats["passes"] == (GRID - 1) * window + GRID
        assert stats["verification"] == ("plain" if window == GRID else "approximate:zipar")
    plain = run(
        *words, "--json", "--set", "sample.ignore_eos=true", "--max-new-tokens", GRID**2, "7"
    )
    assert plain.code == 0, plain.err
    assert shown[GRID] == plain.json["result"]["outputs"][0]["token_ids"]
    for more, found in (
        (("--draft", "prompt-lookup"), "--draft"),
        (("--top-k", 4), "sample.top_k"),
        (("--set", f"picture.window={GRID + 1}"), f"expected: 1 to {GRID}"),
        (("--set", "picture.out=seven.jpg"), "ends in .png"),
        (("--chat",), "--chat"),
        (("--mix", f"average={trained}"), "--mix average"),
    ):
        ran = run(*words, "--set", "picture.window=1", *more, "7")
        assert ran.code != 0
        assert found in ran.err
    folder = tmp_path / "folder.png"
    folder.mkdir()
    for out, prompt, found in (
        (folder, "7", "in the place of a folder"),
        (tmp_path / "a.png", "7 v1 v2", "2 image tokens"),
        (tmp_path / "a.png", "seven", "does not know"),
    ):
        ran = run(*words, "--set", f"picture.out={out}", prompt)
        assert ran.code != 0
        assert found in ran.err
    half = trained / "file"  # a picture that cannot be written: what was decoded is not lost
    half.write_text("")
    ran = run(
        *words, "--json", "--set", "picture.window=2", "--set", f"picture.out={half}/a.png", "7"
    )
    assert ran.code != 0
    assert len(ran.json["result"]["outputs"][0]["token_ids"]) == GRID**2
    copy = shutil.copytree(trained, tmp_path / "copy")
    Codebook(np.zeros((CODES + 1, 4), np.float32), GRID, FIRST_CODE).save(copy)
    ran = run("generate", "--target", copy, "--set", "picture.window=2", "7")
    assert ran.code != 0
    assert "that of another target" in ran.err
    no_grid = run("generate", "--target", "tiny", "--set", "picture.out=x.png", "def main(")
    assert no_grid.code == 4
    assert "no codebook" in no_grid.err
