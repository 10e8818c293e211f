"""Rendered shapes and digits, and the multimodal targets that learn to say what they are."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import ImageColor
from transformers.utils import logging

from specctl.core.errors import FileError, RecipeError
from specctl.images.digits import render
from specctl.images.shapes import (
    COLOURS,
    DIGIT_SIDE,
    DIGITS,
    PLACES,
    QUESTION,
    SIZE,
    WORDS,
    named,
    scene,
)
from specctl.recipes.files import PRETRAINED
from specctl.runtime.target.target import load_target
from specctl.train.pretrain import shapes
from specctl.train.pretrain.shapes import Captions, ShapesRecipe, made, shapes_recipe
from specctl_testing.cli.ran import Run
from specctl_testing.runtime.served_target import served
from specctl_testing.runtime.web import post

RECIPES = Path(__file__).parents[2] / "recipes"
NAMES = [name for name in PRETRAINED if name.startswith("tiny-shapes")]
SMALL = {
    "what": ["shapes", "digits"],
    "scenes": 16,
    "heldout": 5,
    "steps": 2,
    "rows": 2,
    "words": 300,
}
BOTH = ("shapes", "digits")


def test_a_scene_follows_from_its_seed_and_is_described() -> None:
    made, again, other = scene(3), scene(3), scene(4)
    assert made.image.tobytes() == again.image.tobytes() != other.image.tobytes()
    assert made.image.size == (SIZE, SIZE)
    assert made.caption == again.caption
    for seed in range(12):  # size, colour, shape, place, ground; a digit has one size
        assert len(named(scene(seed).caption)) == 5
        assert len(named(scene(seed, ("digits",)).caption)) == 4
    assert [scene(seed, BOTH).what for seed in range(4)] == [*BOTH, *BOTH]
    assert scene(2, BOTH).image.tobytes() == scene(2).image.tobytes()
    sizes = {scene(seed, BOTH, (24, 30)).image.size for seed in range(20)}
    assert sizes == {(24, 24), (24, 30), (30, 24), (30, 30)}
    assert named("A red circle, large.") == {"red", "circle", "large"} < WORDS


def nearest(pixel: np.ndarray) -> str:
    """The colour that a pixel looks like."""
    return min(COLOURS, key=lambda name: np.abs(ImageColor.getrgb(COLOURS[name]) - pixel).sum())


def test_a_digit_is_drawn_where_and_as_the_caption_says() -> None:
    strokes = np.random.default_rng(5)
    means = [
        np.mean([render(digit, DIGIT_SIDE, strokes) for _ in range(12)], 0) for digit in range(10)
    ]
    alike = 0
    for seed in range(30):
        made = scene(seed, ("digits",))
        (digit,), (place,) = (named(made.caption) & {*words} for words in (DIGITS, PLACES))
        x, y = PLACES[place]
        pixels = np.asarray(made.image, np.float64)
        ground = pixels[-1 if y == 0 else 0, -1 if x == 0 else 0]
        drawn = np.abs(pixels - ground).sum(-1)
        inside = drawn[y : y + DIGIT_SIDE, x : x + DIGIT_SIDE]
        assert drawn.sum() == inside.sum() > 0
        strongest = pixels.reshape(-1, 3)[drawn.argmax()]
        assert {nearest(ground), nearest(strongest)} == named(made.caption) & {*COLOURS}
        gap = [np.abs(mean / mean.max() - inside / inside.max()).sum() for mean in means]
        alike += int(np.argmin(gap)) == int(digit)
    assert alike >= 20  # of 30; by chance 3. A digit of 12 pixels may look as another


def small(name: str, **changed: Any) -> dict[str, Any]:
    raw: dict[str, Any] = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    return {"shapes": {**raw["shapes"], **SMALL, **changed}}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chat", [True, False])
def test_captions_alone_are_learned(name: str, chat: bool) -> None:
    changed = {"chat": chat, "lead": "" if chat else "A picture follows: "}
    recipe = ShapesRecipe.model_validate(small(name, **changed)["shapes"])
    scenes = [recipe.scene(seed) for seed in range(12)]
    processor, model = made(recipe, scenes)
    rows, tokenizer = Captions.of(recipe, processor, scenes), processor.tokenizer
    assert (len({*rows.prompts}) > 1) == (len(recipe.sides) > 1)  # images have as many sizes
    for each, ids, prompt in zip(scenes, rows.ids, rows.prompts, strict=True):
        assert tokenizer.decode(ids[prompt:-1]).strip() == each.caption
        assert tokenizer.decode(ids[-1]) == ("<|end|>" if chat else tokenizer.eos_token)
        before = tokenizer.decode(ids[:prompt], skip_special_tokens=True).strip()
        assert before.startswith(changed["lead"])
        assert before.endswith(QUESTION)
    one, two = (float(rows.loss(model, [at]).detach()) for at in (0, 1))
    lengths = [len(rows.ids[at]) - rows.prompts[at] for at in (0, 1)]
    both = (one * lengths[0] + two * lengths[1]) / sum(lengths)  # rows of a batch do not mix
    assert float(rows.loss(model, [0, 1]).detach()) == pytest.approx(both, rel=1e-5)


def test_a_lead_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(small("tiny-shapes", lead="A shape: ")))
    with pytest.raises(RecipeError, match=r"shapes\.lead"):
        shapes_recipe(tmp_path / "recipe.yaml")


def stopped(*args: object) -> None:
    raise KeyboardInterrupt


def test_a_stopped_run_leaves_no_half_of_a_target_and_another_model_is_kept(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = tmp_path / "out" / "export"
    monkeypatch.setattr(shapes, "_measured", stopped)
    command = pretraining(tmp_path, "tiny-shapes", steps=1)
    assert run(*command).code != 0
    assert not export.exists()
    export.mkdir(parents=True)
    (export / "config.json").write_text("{}")
    assert run(*command).code == FileError.exit


def pretraining(folder: Path, name: str, **changed: Any) -> list[Any]:
    """The command that trains the recipe of that name, made small."""
    (folder / "recipe.yaml").write_text(yaml.safe_dump(small(name, **changed)))
    return ["pretrain", "--recipe", folder / "recipe.yaml", "--out", folder / "out", "--json"]


@pytest.mark.parametrize("name", NAMES)
def test_a_target_of_shapes_and_digits_is_made_and_reads_images(
    run: Run, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    out, export = tmp_path / "out", tmp_path / "out" / "export"
    done = run(*pretraining(tmp_path, name))
    assert done.code == 0, done.err
    assert capfd.readouterr().err == ""  # transformers has bars and remarks of its own
    assert logging.is_progress_bar_enabled()
    named = done.json["result"]["named"]
    assert {what: found["images"] for what, found in named.items()} == {"shapes": 3, "digits": 2}

    rows = [json.loads(line) for line in (out / "heldout.jsonl").read_text().splitlines()]
    assert len(rows) == 5
    image = out / rows[1]["images"][0]
    words = ["generate", "--target", export, "--max-new-tokens", "4", "--json"]
    shown = run(*words, "--image", image, QUESTION)
    assert shown.code == 0, shown.err
    (output,) = shown.json["result"]["outputs"]
    assert len(output["token_ids"]) == 4

    url = "data:image/png;base64," + base64.b64encode(image.read_bytes()).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": QUESTION},
    ]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "temperature": 0}
    target = load_target(str(export), dtype="float32", device="cpu", images=True)
    with served(target) as app:
        answer = post(app, "/v1/chat/completions", body)
    assert answer.json()["choices"][0]["message"]["content"] == output["text"], answer.text

    trained = run(
        "train-draft", "--target", export, "--recipe", "eagle3", "--data", out / "heldout.jsonl",
        "--out", tmp_path / "draft", "--json", *settings(),
    )  # fmt: skip
    assert trained.code == 0, trained.err
    drafted = run(
        *words, "--draft", tmp_path / "draft" / "package", "--image", image, "--compare", QUESTION
    )
    assert drafted.code == 0, drafted.err
    assert drafted.json["result"]["outputs"][0]["token_ids"] == output["token_ids"]


def settings() -> list[str]:
    """A run of two steps."""
    fields = {
        "train.seq_len": 128, "data.new_tokens": 6, "data.text_tokens": 0, "vocab.size": "null",
        "train.steps": 2, "train.rows": 2, "train.tau_prompts": 1, "train.tau_tokens": 4,
        "target.dtype": "float32",
    }  # fmt: skip
    return [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]
