"""Pictures as tokens: the codebook, the files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from specctl.core.errors import FileError, RecipeError, ResourceError
from specctl.core.storage.files import Disk
from specctl.images.codebook import CODEBOOK, Codebook, patches
from specctl.images.digits import digits
from specctl.images.png import GAP, png_bytes, sheet
from specctl.train.pretrain.pictures import FIRST_CODE, prepare_pictures
from specctl.train.pretrain.recipe import PretrainRecipe, load_pretrain_recipe
from specctl.train.pretrain.run import pretrain
from specctl_testing.images import LENGTH, read_png, small_pictures


def test_a_grid_of_a_codebook_is_the_picture_it_was_made_of() -> None:
    pictures, shown = digits(40, 8, seed=1)
    assert set(np.unique(shown)) <= set(range(10))
    again, _ = digits(40, 8, seed=1)
    assert (pictures == again).all()
    assert (pictures != digits(40, 8, seed=2)[0]).any()
    count = len(np.unique(patches(pictures, 2).reshape(-1, 4), axis=0))
    book = Codebook.learned(pictures, count, 2, first_id=12, seed=0)  # every patch is a code
    ids = book.encode(pictures)
    assert ids.shape == (40, 16)
    assert ids.min() >= 12
    for picture, row in zip(pictures, ids, strict=True):
        found, missing = book.decode(row.tolist())
        assert (found == picture).all()
        assert missing == 0
    found, missing = book.decode([*ids[0, :3].tolist(), 2])
    assert (found[:2, :6] == pictures[0, :2, :6]).all()
    assert (missing, found[2:].max()) == (13, 0)


def test_few_codes_are_the_nearest_ones() -> None:
    pictures, _ = digits(20, 8, seed=1)
    book = Codebook.learned(pictures, 5, 2, first_id=0, seed=0)
    patch_LX = patches(pictures, 2).reshape(-1, 4)
    gap_LK = ((patch_LX[:, None] - book.patch_KX[None]) ** 2).sum(-1)
    chosen = book.encode(pictures).ravel()
    assert np.allclose(gap_LK[np.arange(len(chosen)), chosen], gap_LK.min(1), atol=1e-2)
    first = Codebook(patch_LX[:5].astype(np.float32), book.grid, 0)
    squares = [
        ((b.patch_KX[b.encode(pictures).ravel()] - patch_LX) ** 2).sum() for b in (book, first)
    ]
    assert squares[0] < squares[1] / 2, "k-means is better than the first patches there are"


def test_a_codebook_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no codebook"):
        Codebook.load(tmp_path)
    (tmp_path / "codebook.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(FileError, match="no codebook"):
        Codebook.load(tmp_path)
    for patch_KX, grid in ((np.zeros((4, 3)), 4), (np.zeros((0, 4)), 4), (np.zeros((4, 4)), 4000)):
        Codebook(patch_KX.astype(np.float32), grid, 0).save(tmp_path)
        with pytest.raises(FileError, match="no codebook"):
            Codebook.load(tmp_path)
    words = {"grid": "4", "first_id": "0"}
    save_file({"patches": torch.zeros(4, 4).bfloat16()}, tmp_path / CODEBOOK, metadata=words)
    with pytest.raises(FileError, match="no codebook"):
        Codebook.load(tmp_path)


def test_a_sheet_holds_its_pictures() -> None:
    pictures, _ = digits(5, 8, seed=3)
    found = read_png(png_bytes(sheet(list(pictures), columns=3, zoom=2)))
    assert found.shape == (2 * (16 + GAP) + GAP, 3 * (16 + GAP) + GAP)
    corner = found[16 + 2 * GAP : 32 + 2 * GAP, 16 + 2 * GAP : 32 + 2 * GAP]
    assert (corner[::2, ::2] == pictures[4]).all()


def test_recipes_that_do_not_fit_pictures_are_refused(tmp_path: Path) -> None:
    path = small_pictures(tmp_path / "recipe.yaml", seq_len=20, decay_seq_len=20)
    with pytest.raises(RecipeError, match=r"train\.seq_len .* expected: 18"):
        pretrain(path, tmp_path / "run")
    raw = yaml.safe_load(small_pictures(path).read_text())
    for name, wrong in (("max_position_embeddings", 17), ("model_type", "llada")):
        recipe = PretrainRecipe(**raw | {"model": raw["model"] | {name: wrong}})
        with pytest.raises(RecipeError, match=str(wrong)):
            prepare_pictures(recipe, tmp_path / "run")


def test_a_stopped_preparation_leaves_no_half_files_and_other_pictures_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Disk, descriptor: int, data: memoryview) -> int:
        os.write(descriptor, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    recipe = load_pretrain_recipe(small_pictures(tmp_path / "recipe.yaml"))
    images, run = recipe.images, tmp_path / "run"
    assert images is not None
    for name in (CODEBOOK, "train.bin"):
        with monkeypatch.context() as patch:
            patch.setattr(Disk, "write", full)
            with pytest.raises(ResourceError, match=name):
                prepare_pictures(recipe, run)
        assert not (run / name).exists()
        if name == CODEBOOK:
            pictures, _ = digits(images.pictures, images.grid * images.side, recipe.data.seed)
            Codebook.learned(pictures, images.codes, images.side, FIRST_CODE, 0).save(run)
    assert len(prepare_pictures(recipe, run).train) == images.pictures * LENGTH
    for other in (
        images.model_copy(update={"pictures": images.pictures + 1}),
        images.model_copy(update={"side": 1}),
    ):
        with pytest.raises(FileError, match="of another recipe"):
            prepare_pictures(recipe.model_copy(update={"images": other}), run)
