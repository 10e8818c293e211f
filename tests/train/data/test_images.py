"""Training with images: records as people write them, rows, what the target reads, a whole run."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.core.batch import HeadRows, TrainBatch
from specctl.core.errors import FileError, IncompatibleError
from specctl.core.language_model import Feed
from specctl.drafters.frames.text_alone import text_alone
from specctl.recipes.load import load_recipe
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.target.target import Target, load_target
from specctl.runtime.target.text.image_files import read_image
from specctl.train import assemble
from specctl.train.assemble import build_drafter
from specctl.train.data.images import shown_images
from specctl.train.data.images.image_checks import check_parts, planned_images, shows_images
from specctl.train.data.images.known_images import KnownImages
from specctl.train.data.images.shown_images import ImageReader, image_digests
from specctl.train.data.images.shown_images import bytes_of as plain_bytes
from specctl.train.data.prepare import encode_documents, prepare
from specctl.train.data.records.record_images import resolved
from specctl.train.data.records.records import sample_of, without_images
from specctl.train.features.capture import training_needs
from specctl.train.features.target_source import InProcess
from specctl.train.init.initial import checkpoint_drafter
from specctl.train.run import train_draft
from specctl_testing.runtime.tiny_vision import make_folder, picture

SMALL = {
    "data.prompts": 6, "data.new_tokens": 6, "train.seq_len": 96, "train.rows": 2,
    "target.dtype": "float32", "vocab.size": "null", "data.text_tokens": 0,
    "train.steps": 2, "train.tau_prompts": 2, "train.tau_tokens": 4,
}  # fmt: skip


@pytest.fixture(scope="module", params=["llava", "qwen2_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_folder(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(str(folder), dtype="float32", device="cpu", images=True)


def uri(seed: int) -> str:
    held = io.BytesIO()
    picture(seed).save(held, "PNG")
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()


def chats(place: Path, more: Any = ()) -> Path:
    """Records in the forms that people have, beside their images."""
    for seed in range(4):
        picture(seed, 20 + 8 * seed).save(place / f"{seed}.png")
    question = [
        {"from": "human", "value": "<image>\nhello or <image>"},
        {"from": "gpt", "value": "x"},
    ]
    part = {"type": "image_url", "image_url": {"url": uri(5)}}
    rows: list[Any] = [
        {"prompt": "hello world", "images": ["0.png"]},
        {"prompt": "hello world", "image": "1.png"},
        {"conversations": question, "images": ["2.png", "3.png"]},
        {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "def f1(x):"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}, "how are you?"]}],
         "images": [str(place / "2.png")]},
        {"prompt": "hello world 7"},
        *more,
    ]  # fmt: skip
    file = place / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def noting(read: list[str]) -> Any:
    """Reads an image, and notes that it did."""

    def bytes_of(source: str) -> bytes:
        read.append(source)
        return plain_bytes(source) if source.startswith("data:") else Path(source).read_bytes()

    return bytes_of


def recipe(folder: Path, file: Path, name: str = "eagle3", **more: Any) -> Any:
    named = {key.replace("__", "."): value for key, value in more.items()}
    fields = {**SMALL, "target.name": str(folder), "data.source": str(file), **named}
    return load_recipe(name, sets=[f"{key}={value}" for key, value in fields.items()])


def test_rows_hold_what_the_target_was_shown(
    folder: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe(folder, chats(tmp_path), data__train_on_prompt=True)
    data = prepare(made, target, tmp_path / "run")
    assert sum(len(images) for images in data.images.values()) == 6
    batch = data.batch(range(data.num_rows))
    for text in batch.images:
        for image in text.images:
            span = slice(text.start + image.first, text.start + image.end)
            assert not batch.loss_mask_BS[text.row, span].any()
    drafter = build_drafter(made.drafter, made.train, target.spec, None)
    read = InProcess(target).read(batch, training_needs(drafter))
    assert read.image_BS is not None
    assert target.vision is not None
    shown_BS = torch.isin(batch.ids_BS, torch.tensor(target.vision.unsaid))
    assert torch.equal(read.image_BS, shown_BS)
    for text in batch.images:  # each text by itself, as prefill reads it
        ids = batch.ids_BS[text.row, text.start : text.end]
        images = InProcess(target).reader.seen(ids.tolist(), text.images)  # type: ignore[union-attr]
        at_1T = torch.arange(len(ids))[None]
        feed = Feed(ids[None], at_1T, target.lm.document_masks(torch.zeros_like(at_1T)), (1, 2))
        with torch.no_grad():
            alone = target.lm.run(target.vision.feed(feed, [images], [0]), None).taps
        for tap, state_BSD in alone.items():
            if tap in read.taps:
                own_TD = read.taps[tap][text.row, text.start : text.end]
                torch.testing.assert_close(own_TD, state_BSD[0], rtol=1e-4, atol=1e-4)
    seen: list[Any] = []
    with monkeypatch.context() as patch:  # as many images are read as are decoded
        patch.setattr(assemble, "measuring_rows", lambda part, data: range(data.num_rows))
        patch.setattr(assemble.ImageReader, "seen", lambda self, ids, images: seen.append(images))
        assert len(assemble.measuring_images(made.data, 2, target, data) or ()) == 2
    assert len(seen) <= 2
    read_again: list[str] = []
    with monkeypatch.context() as patch:  # a run that goes on reads no image to know it
        patch.setattr("specctl.train.data.images.known_images.SETTLED", -1.0)
        assert prepare(made, target, tmp_path / "run").digest == data.digest
        patch.setattr(shown_images, "bytes_of", noting(read_again))
        again = prepare(made, target, tmp_path / "run")
    assert again.digest == data.digest
    assert [name[:5] for name in read_again] == ["data:"]
    (moved := tmp_path / "moved").mkdir()  # data that were moved are the same
    there = recipe(folder, chats(moved), data__train_on_prompt=True)
    same = prepare(there, target, tmp_path / "run")
    assert same.digest == data.digest
    sources = {image.source for images in same.images.values() for image in images}
    assert str(moved / "0.png") in sources
    assert not any(source == str(tmp_path / "0.png") for source in sources)
    picture(9).save(tmp_path / "0.png")  # another image: other rows
    assert prepare(made, target, tmp_path / "run").digest != data.digest


def test_only_an_image_that_lay_there_unchanged_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, read = tmp_path / "a.png", list[str]()

    def digest() -> str:
        known = KnownImages(tmp_path)
        found = known.digest(str(image), noting(read))
        known.save()
        return found

    image.write_bytes(b"1234")
    os.utime(image, (1, 1))
    first = digest()
    assert digest() == first
    assert len(read) == 2, "its entry was written just now"
    monkeypatch.setattr("specctl.train.data.images.known_images.SETTLED", -1.0)
    assert {digest(), digest()} == {first}
    assert len(read) == 3
    image.write_bytes(b"5678")
    os.utime(image, (1, 1))  # as long, and of the same time
    assert digest() == hashlib.sha256(b"5678").hexdigest()
    (tmp_path / "image-digests.json").write_text('{"a": [[1], 2, 3]}')
    assert digest() == hashlib.sha256(b"5678").hexdigest()
    image.unlink()
    with pytest.raises(FileNotFoundError):
        digest()


@pytest.mark.parametrize("name", ["eagle3", "mllm-text-draft"])
def test_a_run_learns_from_images_and_measures_with_them(
    folder: Path, target: Target, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe(folder, chats(tmp_path), name, data__images="read", data__drop="[]")
    shown: list[Any] = []
    plain = assemble.generate

    def noted(*args: Any, **more: Any) -> Any:
        shown.append(more.get("images"))
        return plain(*args, **more)

    monkeypatch.setattr(assemble, "generate", noted)
    result = train_draft(made, tmp_path / "run", reporter=SilentReporter())
    assert result.steps == 2
    assert any(images and any(images) for images in shown)
    answers = list((tmp_path / "run" / "data").glob("images-*.json"))
    assert len(answers) == 1
    drafter = checkpoint_drafter(tmp_path / "run", target)
    is_turned = name == "eagle3" and target.inside_of == "qwen2_vl"
    assert getattr(drafter.options, "mrope", None) == ((0, 1, 2, 2) if is_turned else None)


def test_a_data_set_of_the_hub_is_read_with_its_images(
    folder: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    made = recipe(folder, Path("owner/shapes"))
    parts = made.data, made.train, made.drafter, made.target
    monkeypatch.setattr(datasets, "load_dataset", None)
    assert planned_images(*parts) == 0, "a plan downloads nothing"
    images = [{"bytes": base64.b64decode(uri(i).partition(",")[2]), "path": None} for i in range(3)]
    rows = {"prompt": ["hello world"] * 3, "image": images}
    kinds = {"prompt": datasets.Value("string"), "image": datasets.Image()}
    there = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **more: there)
    assert shows_images(*parts)
    data = prepare(made, target, tmp_path / "run")
    found = {image.source for images in data.images.values() for image in images}
    assert found == {uri(i) for i in range(3)}


def test_text_that_spells_a_placeholder_takes_no_image(target: Target) -> None:
    """An image that comes in a later turn does not stand where an earlier one spells its mark."""
    reader = ImageReader(target)
    place, images = reader.vision.place, reader.shown((uri(1),), image_digests((uri(1),), "x"), "x")
    assert len(reader.expanded([1, place, 2], images, 1)) == 2 + len(images[0].ids)
    assert reader.expanded([1, 2], images, 0) == [1, 2]
    with pytest.raises(ValueError, match="writes 1 places for images, and the record has 0"):
        reader.expanded([1, place, 2], images, 0)


@pytest.mark.parametrize("kind", ["pipe", "device", "giant", "null", "gone", "address"])
def test_what_is_no_file_is_refused_unread(tmp_path: Path, kind: str) -> None:
    name = str(tmp_path / "~1.png")
    if kind == "pipe":
        os.mkfifo(name)
    elif kind == "giant":
        with open(name, "wb") as file:
            file.truncate(1 << 40)
    name = {"device": "/dev/zero", "null": "a\0.png", "address": "http://x/1.png"}.get(kind, name)
    with pytest.raises(FileError, match=r"network|too large|cannot be read"):
        read_image(name)
    sources = resolved([name], tmp_path)
    with pytest.raises(FileError, match=r"(network|too large|cannot be read)[^\n]*\n?.*x:7"):
        image_digests(sources, "x:7")


def test_a_template_that_loses_images_loses_the_record(target: Target) -> None:
    part = {"type": "image_url", "image_url": {"url": uri(1)}}
    says = [{"role": "user", "content": [part, "hello"]}, {"role": "assistant", "content": "x y"}]
    sample = sample_of({"messages": says}, "x:1")
    sample = replace(sample, image_digests=image_digests(sample.images, "x:1"))
    whole = encode_documents(target, sample, reader=ImageReader(target))
    assert [len(document.images) for document in whole] == [1]
    tokenizer = deepcopy(target.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content[-1]['text'] }}{% else %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    with pytest.raises(ValueError, match="writes 0 places for images, and the record has 1"):
        encode_documents(replace(target, tokenizer=tokenizer), sample, reader=ImageReader(target))


def test_images_stand_where_records_say() -> None:
    assert resolved(["~1.png", "file:///a/b.png"], Path("/d")) == ("/d/~1.png", "/a/b.png")
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}
    question = [
        {"role": "user", "content": [part, {"type": "text", "text": "a"}, {"type": "image"}]}
    ]
    sample = sample_of({"messages": question, "images": ["b.png"]}, "x:1")
    assert sample.images == ("data:image/png;base64,eA==", "b.png")
    kinds = [part["type"] for part in sample.messages[0]["content"]]
    assert kinds == ["image", "text", "image"]
    marked = sample_of({"prompt": "a <image> b", "images": ["1.png"]}, "x:2")
    assert [p.get("text") for p in marked.messages[0]["content"]] == ["a ", None, " b"]
    assert without_images(marked).messages[0]["content"] == "a b"
    front = sample_of({"prompt": "a", "image": {"bytes": b"x", "path": None}}, "x:3")
    assert front.images == ("data:image/png;base64,eA==",)
    assert front.messages[0]["content"][0] == {"type": "image"}
    again = {"prompt": "a", "images": ["1.png", "2.png"], "image": "1.png"}
    assert sample_of(again, "x:3").images == ("1.png", "2.png")
    nowhere = sample_of({"messages": [{"role": "user", "content": [{"type": "image"}, "a"]}]}, "x")
    with pytest.raises(FileError, match=r"place for an image, and no image.*x:9"):
        image_digests(nowhere.images, "x:9")
    for record, why in (
        ({"prompt": "<image> <image>", "images": ["1.png"]}, "1 images and 2 places"),
        ({"prompt": "a", "images": [7]}, "neither a path nor a data URI"),
        ({"text": "a b", "images": ["1.png"]}, "they stand in conversations"),
        ({"prompt": "a", "images": ["1.png"], "Image": "2.png"}, "others in 'image'"),
    ):
        with pytest.raises(ValueError, match=why):
            sample_of(record, "x:4")


@pytest.mark.parametrize(
    ("sets", "named"),
    [
        (["data.features=offline"], "data.features=offline"),
        (["data.kept_features=/kept"], "data.kept_features"),
        (["data.target_source=files", "data.states=/s", "data.regenerate=false"], "=files"),
        (["data.endpoint=http://127.0.0.1:1"], "data.endpoint"),
        (["data.on_policy=0.5"], "data.on_policy"),
        (["train.joint={}"], "train.joint"),
        (["train.sequence_parallel=2"], "train.sequence_parallel"),
        (["train.parallel=fsdp"], "train.parallel=fsdp"),
    ],
)
def test_parts_that_read_text_alone_are_named(sets: list[str], named: str) -> None:
    made = load_recipe("eagle3", sets=sets)
    with pytest.raises(IncompatibleError, match=rf"{named}.*does not go with images"):
        check_parts(made.data, made.train, "eagle3", 2)


def test_what_cannot_be_learned_is_refused_before_the_run(
    folder: Path, tmp_path: Path, target: Target
) -> None:
    file = chats(tmp_path)
    with pytest.raises(IncompatibleError, match=r"data\.on_policy"):
        train_draft(recipe(folder, file, data__on_policy=0.5), tmp_path / "no")
    with pytest.raises(IncompatibleError, match="runs layers of the target"):
        train_draft(recipe(folder, file, "kangaroo"), tmp_path / "no")
    blind = load_target(str(folder), dtype="float32", device="cpu")
    with pytest.raises(IncompatibleError, match=r"reads none.*chats.jsonl:1"):
        prepare(recipe(folder, file), blind, tmp_path / "blind")
    alone = prepare(recipe(folder, file, data__images="drop"), blind, tmp_path / "alone")
    assert not alone.images
    for name, body, why in (("gone", None, "cannot be read"), ("bad", b"no", "cannot be decoded")):
        if body is not None:
            (tmp_path / f"{name}.png").write_bytes(body)
        more_rows = [{"prompt": f"hello {name}", "images": [f"{name}.png"]}]
        with pytest.raises(FileError, match=rf"{why}.*chats.jsonl:7"):
            prepare(recipe(folder, chats(tmp_path, more_rows), data__prompts=9), target, tmp_path)


def test_a_text_draft_reads_the_text_alone() -> None:
    """Two texts in a row; the teacher of a token behind an image stands right before it."""
    ids_BS = torch.tensor([[1, 2, 9, 9, 9, 3, 4, 9, 5, 6], [7, 8, 1, 2, 3, 4, 5, 0, 0, 0]])
    document_BS = torch.tensor([[0] * 7 + [1] * 3, [2] * 7 + [-1] * 3])
    at_BS = torch.tensor([[*range(7), 0, 1, 2], [*range(7), 0, 0, 0]])
    teacher_BSV = torch.arange(10.0).repeat(2, 1)[..., None].repeat(1, 1, 12)
    batch = TrainBatch(
        ids_BS, (document_BS >= 0) & (ids_BS != 9), document_BS, at_BS, {}, teacher_BSV,
        image_BS=ids_BS == 9,
    )  # fmt: skip
    text = text_alone(batch)
    assert text.ids_BS[0, :6].tolist() == [1, 2, 3, 4, 5, 6]
    assert text.ids_BS[1].tolist() == [7, 8, 1, 2, 3, 4, 5]
    assert text.position_BS[0, :6].tolist() == [0, 1, 2, 3, 0, 1]
    assert text.document_BS[0].tolist() == [0, 0, 0, 0, 1, 1, -1]
    assert not text.loss_mask_BS[0, 6]
    assert text.teacher_BSV is not None
    assert text.teacher_BSV[0, :6, 0].tolist() == [0, 4, 5, 7, 8, 9]
    assert text.teacher_BSV[1, :, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]
    rows = HeadRows(teacher_BSV.flatten(0, 1), torch.eye(12))
    by_rows = text_alone(replace(batch, teacher_BSV=None, teacher_rows=rows)).teacher_rows
    assert by_rows is not None
    assert torch.equal(by_rows.state_RD.view(2, 7, 12), text.teacher_BSV)
    assert text_alone(replace(batch, image_BS=None)).ids_BS is ids_BS
