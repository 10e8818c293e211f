"""Images of `specctl.generate` and its command: where they stand, and what is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from specctl.api.arguments.targets import load_target
from specctl.api.generate import generate
from specctl.core.errors import SpecctlError
from specctl.runtime.target.text.image_files import read_image
from specctl_testing.cli.ran import Run
from specctl_testing.runtime.tiny_vision import make_folder, picture


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    make_folder(folder, "qwen2_vl")
    for seed in (1, 2):
        picture(seed).save(folder / f"{seed}.png")
    return folder


def test_images_stand_where_the_prompt_says_or_in_front(folder: Path) -> None:
    target, files = load_target(str(folder), dtype="float32", images=True), [folder / "1.png"]
    how: dict[str, Any] = {"max_new_tokens": 10, "chat": False}
    front = generate(target, "hello world", images=files, **how)
    marked = generate(target, ["<image>hello world"], images=[[picture(1)]], **how)
    behind = generate(target, "hello world<image>", images=files[0].read_bytes(), **how)
    assert front.outputs[0].token_ids == marked.outputs[0].token_ids
    assert behind.outputs[0].token_ids != front.outputs[0].token_ids
    both = [folder / "1.png", folder / "2.png"]
    swapped = [
        generate(target, "so <image> or <image>", images=i, **how) for i in (both, both[::-1])
    ]
    assert swapped[0].outputs[0].token_ids != swapped[1].outputs[0].token_ids
    drafted = generate(target, "so <image> or <image>", "prompt-lookup", images=both, **how)
    assert drafted.outputs[0].token_ids == swapped[0].outputs[0].token_ids


def test_the_command_reads_images(folder: Path, run: Run) -> None:
    words = ["generate", "--target", str(folder), "--dtype", "float32", "--raw"]
    words += ["--max-new-tokens", "10", "--image", str(folder / "1.png")]
    ran = run(*words, "--json", "hello world")
    assert ran.code == 0, ran.out
    out = ran.json["result"]
    direct = generate(str(folder), "hello world", images=[folder / "1.png"], chat=False,
                      max_new_tokens=10)  # fmt: skip
    assert out["outputs"][0]["token_ids"] == list(direct.outputs[0].token_ids)
    assert f"--image {folder / '1.png'} --compare" in ran.json["next"][0]


def test_what_does_not_go_with_images_is_refused(folder: Path, tmp_path: Path) -> None:
    image = str(folder / "1.png")
    for how in ({"inflate": "100m"}, {"compile": True}, {"dtype": "int8"}):
        with pytest.raises(SpecctlError, match="as it is published"):
            load_target(str(folder), images=True, **how)
    with pytest.raises(SpecctlError, match="reads no images"):
        load_target("tiny", images=True)
    with pytest.raises(SpecctlError, match="reads no images"):
        generate(load_target(str(folder)), "hello", images=[image], chat=False)
    with pytest.raises(SpecctlError, match="do not belong together"):
        generate(str(folder), ["a", "b"], images=[image])
    with pytest.raises(SpecctlError, match="stands for a video"):
        generate(str(folder), "a <|video_pad|>", images=[image], chat=False)
    with pytest.raises(SpecctlError, match="not fetched"):
        read_image("https://example.org/cat.png")
    (tmp_path / "no.png").write_bytes(b"no image")
    with pytest.raises(SpecctlError, match="cannot be decoded"):
        read_image(tmp_path / "no.png")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(SpecctlError, match="processor"):
        load_target(str(folder), images=True)


def test_pictures_are_read_as_they_look(tmp_path: Path) -> None:
    grey = Image.new("I;16", (4, 2), 30000)
    held = io.BytesIO()
    grey.save(held, "PNG")
    assert {read_image(one).getpixel((0, 0)) for one in (grey, held.getvalue())} == {(117,) * 3}
    with pytest.raises(SpecctlError, match="no known range"):
        read_image(Image.new("F", (4, 2), 0.5))
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: a quarter turn
    Image.new("RGB", (4, 2)).save(tmp_path / "turned.jpg", exif=exif)
    with Image.open(tmp_path / "turned.jpg") as opened:
        assert read_image(opened).size == read_image(tmp_path / "turned.jpg").size == (2, 4)
    picture(3, 64, 64).save(tmp_path / "cut.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "cut.jpg").read_bytes()[:-90])
    with Image.open(tmp_path / "cut.jpg") as opened:
        for cut in (opened, tmp_path / "cut.jpg"):
            with pytest.raises(SpecctlError, match="cannot be decoded"):
                read_image(cut)
