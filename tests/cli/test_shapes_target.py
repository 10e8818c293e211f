"""Rendered shapes, and the multimodal target that learns to say what they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from specctl.core.errors import FileError
from specctl.images.shapes import SIZE, WORDS, named, scene
from specctl.train.pretrain import shapes
from specctl_testing.cli.ran import Run

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-shapes.yaml"


def test_a_scene_follows_from_its_seed_and_is_described() -> None:
    made, again, other = scene(3), scene(3), scene(4)
    assert made.image.tobytes() == again.image.tobytes() != other.image.tobytes()
    assert made.image.size == (SIZE, SIZE)
    assert made.caption == again.caption
    for seed in range(12):
        assert len(named(scene(seed).caption)) == 5  # size, colour, shape, place, ground
    assert named("A red circle, large.") == {"red", "circle", "large"} < WORDS


def stopped(*args: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("chat", [True, False])
def test_a_target_of_shapes_is_made_and_reads_images(
    run: Run, tmp_path: Path, chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = yaml.safe_load(RECIPE.read_text())
    raw["shapes"] |= {"scenes": 16, "heldout": 1, "steps": 2, "rows": 2, "words": 300, "chat": chat}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(raw))
    command = ["pretrain", "--recipe", tmp_path / "recipe.yaml", "--out", tmp_path / "out"]
    with monkeypatch.context() as patch:  # a run that is stopped leaves no half of a target
        patch.setattr(shapes, "_measured", stopped)
        assert run(*command).code != 0
    assert not (tmp_path / "out" / "export").exists()
    made = run(*command)
    assert made.code == 0, made.err
    for seed in (1, 2):
        scene(seed).image.save(tmp_path / f"{seed}.png")
    words = ["generate", "--target", tmp_path / "out" / "export", "--max-new-tokens", "4", "--json"]
    shown = run(*words, "--image", tmp_path / "1.png", "What is this?")
    assert shown.code == 0, shown.err
    assert len(shown.json["result"]["outputs"][0]["token_ids"]) == 4
    (tmp_path / "out" / "shapes.json").unlink()  # the model of another run
    over = run(*command)
    assert over.code == FileError.exit
