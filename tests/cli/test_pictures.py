"""A target that writes pictures, made and used as its owner would."""

from __future__ import annotations

import json
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
    return made_of(tmp_path_factory, "digits")


def made_of(tmp_path_factory: pytest.TempPathFactory, kind: str) -> Path:
    folder = tmp_path_factory.mktemp(kind)
    final = pretrain(small_pictures(folder / "recipe.yaml", kind), folder)
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
    ran = run(*words, "--json", "--set", "picture.window=auto:2", "7")
    assert ran.code == 0, ran.err
    stats = ran.json["result"]["stats"]
    assert (GRID - 1) * 3 + GRID <= stats["passes"] < GRID**2
    assert stats["verification"] == "approximate:zipar-auto"
    plain = run(
        *words, "--json", "--set", "sample.ignore_eos=true", "--max-new-tokens", GRID**2, "7"
    )
    assert plain.code == 0, plain.err
    assert shown[GRID] == plain.json["result"]["outputs"][0]["token_ids"]
    for more, found in (
        (("--draft", "prompt-lookup"), "--draft"),
        (("--top-k", 4), "sample.top_k"),
        (("--set", f"picture.window={GRID + 1}"), f"expected: 1 to {GRID}"),
        (("--set", "picture.window=auto"), "auto:MIN"),
        (("--set", "picture.passes=3"), "means nothing for this target"),
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
    for codes, found in ((CODES, "SHA-256"), (CODES + 1, "tokens up to")):
        Codebook(np.zeros((codes, 4), np.float32), GRID, FIRST_CODE).save(copy)
        ran = run("generate", "--target", copy, "--set", "picture.window=2", "7")
        assert ran.code != 0
        assert "that of another target" in ran.err
        assert found in ran.err
        config = json.loads((copy / "config.json").read_text())
        config.pop("codebook_sha256", None)  # as in folders of earlier versions
        (copy / "config.json").write_text(json.dumps(config))
    no_grid = run("generate", "--target", "tiny", "--set", "picture.out=x.png", "def main(")
    assert no_grid.code == 4
    assert "no codebook" in no_grid.err


@pytest.mark.parametrize(
    ("kind", "passes", "marks"),
    [
        ("neighbours", (None,), ("own-target:neighbours",)),
        ("any-order", (None, 5), ("own-target:any-order", "approximate:arpg")),
    ],
)
def test_models_with_an_order_of_their_own_write_pictures(
    run: Run,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    kind: str,
    passes: tuple[int | None, ...],
    marks: tuple[str, ...],
) -> None:
    folder, file = made_of(tmp_path_factory, kind), tmp_path / "seven.png"
    words = ("generate", "--target", folder, "--temperature", 1, "--seed", 3)
    for number, mark in zip(passes, marks, strict=True):
        more = [] if number is None else ["--set", f"picture.passes={number}"]
        ran = run(*words, "--json", *more, "--set", f"picture.out={file}", "7")
        assert ran.code == 0, ran.err
        stats = ran.json["result"]["stats"]
        assert stats["verification"] == mark
        own = 2 * GRID - 1 if kind == "neighbours" else GRID**2
        assert stats["passes"] == (number or own)
        ids = ran.json["result"]["outputs"][0]["token_ids"]
        pixels, missing = Codebook.load(folder).decode(ids)
        assert missing == 0
        assert (read_png(file.read_bytes())[GAP:-GAP:4, GAP:-GAP:4] == pixels).all()
    wrong = "3" if kind == "neighbours" else str(GRID**2 + 1)
    for more, found in (
        (["--draft", "prompt-lookup"], "--draft"),
        (["--top-k", "4"], "sample.top_k"),
        (["--set", "picture.window=2"], "picture.window"),
        (["--max-new-tokens", "5"], "sample.max_new_tokens"),
        (["--set", f"picture.passes={wrong}"], "picture.passes"),
        (["--set", "picture.out=seven.jpg"], "ends in .png"),
        (["--set", "target.dtype=bfloat16"], "target.dtype"),
    ):
        ran = run(*words, *more, "7")
        assert ran.code != 0, more
        assert found in ran.err
