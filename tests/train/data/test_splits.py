"""Splits of folders, several sources, and what the plan says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specctl.api.arguments.recipe import recipe_of
from specctl.cli.options.recipe_flags import RecipeFlags
from specctl.core.errors import FileError, RecipeError
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import DataPart
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.target.target import Target
from specctl.train.data.files.splits import folder_splits
from specctl.train.data.prepare import prepare
from specctl.train.data.sources.defects import Defects
from specctl.train.data.sources.sources import check_source, read_samples
from specctl.train.planning.data_shares import UNKNOWN_TOKENS, source_shares, tokens_in

HUB_CARD = """---
license: mit
configs:
- config_name: default
  data_files:
  - split: train_sft
    path: data/train_sft-*
  - split: test_sft
    path: data/test_sft-*
- config_name: other
  data_files: "other/**"
---
# About
"""


def fill(folder: Path, *names: str) -> Path:
    """A folder with files of one record each, which says the file's name."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            table = pytest.importorskip("pyarrow").Table.from_pylist([{"text": name}])
            pytest.importorskip("pyarrow.parquet").write_table(table, path)
        else:
            path.write_text(json.dumps({"text": name}) + "\n")
    return folder


def read(source: Any, split: str = "train", defects: Defects | None = None) -> list[str]:
    found = defects or Defects()
    return [s.text for s in read_samples(source, "auto", split, 0, found)]


LAYOUTS = [
    ("train.jsonl", "test.jsonl", "validation.jsonl"),
    ("train.jsonl.gz", "dev.jsonl.gz", "README.md"),
    ("my-train.json", "my-val.json"),
    ("train/a.jsonl", "train/b.jsonl", "test/a.jsonl"),
    ("en/training-1.jsonl", "de/training-1.jsonl", "en/eval-1.jsonl"),
    ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet",
     "data/test-00000-of-00001.parquet"),
    ("data/train_sft-00000-of-00001.parquet", "data/test_gen-00000-of-00001.parquet"),
    ("a.jsonl", "b.jsonl", "contest.jsonl", "retraining.jsonl"),
]  # fmt: skip


@pytest.mark.parametrize("names", LAYOUTS, ids=["|".join(names) for names in LAYOUTS])
def test_files_belong_to_the_splits_that_datasets_finds(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    data_files = pytest.importorskip("datasets.data_files")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    base = str(tmp_path)
    patterns = data_files.get_data_patterns(base)
    theirs = data_files.DataFilesDict.from_patterns(patterns, base_path=base)
    listed = {str(split): sorted(files) for split, files in theirs.items()}
    every = [tmp_path / name for name in names if not name.startswith("README")]
    ours = folder_splits(tmp_path, every, "", must_be_all=False).splits
    found = {split: sorted(map(str, files)) for split, files in ours.items()}
    assert (found or {"train": sorted(map(str, every))}) == listed


def test_a_downloaded_data_set_is_read_by_the_splits_of_its_card(tmp_path: Path) -> None:
    train, test = (f"data/{s}-00000-of-00001.parquet" for s in ("train_sft", "test_sft"))
    fill(tmp_path, train, test, "other/x.jsonl", "dataset_infos.json")
    (tmp_path / "README.md").write_text(HUB_CARD)
    assert read(str(tmp_path), "train_sft") == [train]
    assert read(str(tmp_path), "test_sft") == [test]
    assert read(str(tmp_path), "all") == [test, train]
    assert read(f"{tmp_path}:other") == ["other/x.jsonl"]
    with pytest.raises(RecipeError, match=r"train_sft \(1 file\); 1 more is for measuring"):
        check_source(str(tmp_path), "auto", "train")
    with pytest.raises(RecipeError, match=r"data\.split=test_sft"):
        check_source(str(tmp_path), "auto", "tests_sft")
    with pytest.raises(RecipeError, match="one of default, other"):
        check_source(f"{tmp_path}:third", "auto", "train")


def test_a_data_set_without_its_files_says_how_to_get_them(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(HUB_CARD)
    with pytest.raises(FileError, match="hf download"):
        check_source(str(tmp_path), "auto", "train_sft")


def test_the_splits_of_names_are_read_one_by_one(tmp_path: Path) -> None:
    fill(tmp_path, "train.jsonl", "test.jsonl", "notes.jsonl")
    defects = Defects()
    assert read(str(tmp_path), defects=defects) == ["train.jsonl"]
    assert "notes.jsonl" in defects.remarks[0]
    assert read(str(tmp_path), "test") == ["test.jsonl"]
    assert read(str(tmp_path), "train+test") == ["test.jsonl", "train.jsonl"]
    with pytest.raises(RecipeError, match="no split 'nonsense'"):
        read(str(tmp_path), "nonsense")


def test_a_folder_with_splits_of_other_names_asks_which(tmp_path: Path) -> None:
    names = [f"data/{s}-00000-of-00001.parquet" for s in ("train_sft", "train_gen")]
    fill(tmp_path, *names)
    with pytest.raises(RecipeError, match=r"one of train_gen \(1 file\), train_sft \(1 file\)"):
        read(str(tmp_path))
    assert read(str(tmp_path), "train_sft") == [names[0]]


def test_texts_are_split_only_where_every_name_says_so(tmp_path: Path) -> None:
    for name in ("test/a.py", "b.py", "train.py"):
        (tmp_path / "program" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "program" / name).write_text(name)
    assert len(read(str(tmp_path / "program"))) == 3
    for name in ("wiki.train.txt", "wiki.test.txt"):
        (tmp_path / "wiki").mkdir(exist_ok=True)
        (tmp_path / "wiki" / name).write_text(name)
    assert read(str(tmp_path / "wiki")) == ["wiki.train.txt"]


@pytest.mark.parametrize("source", ["one.jsonl", "."])
def test_a_split_of_what_has_none_is_no_silent_setting(tmp_path: Path, source: str) -> None:
    fill(tmp_path, "one.jsonl", "two.jsonl")
    defects = Defects()
    found = read(str(tmp_path / source), "validation", defects)
    assert found == ["one.jsonl", "two.jsonl"][: 2 - (source == "one.jsonl")]
    assert "data.split=validation has no effect" in defects.remarks[0]
    assert "one.jsonl" in defects.remarks[0]


def test_what_datasets_saved_is_read_by_its_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {
        name: datasets.Dataset.from_list([{"text": f"{name} {i}"} for i in range(2)])
        for name in ("train", "test")
    }
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "dict"))
    parts["train"].save_to_disk(str(tmp_path / "one"))
    assert read(str(tmp_path / "one")) == ["train 0", "train 1"]
    assert read(str(tmp_path / "dict")) == ["train 0", "train 1"]
    assert read(str(tmp_path / "dict"), "test") == ["test 0", "test 1"]
    assert len(read(str(tmp_path / "dict"), "all")) == 4
    with pytest.raises(RecipeError, match="no split 'dev'"):
        check_source(str(tmp_path / "dict"), "auto", "dev")
    defects = Defects()
    read(str(tmp_path / "one"), "dev", defects)
    assert "no effect" in defects.remarks[0]


def test_values_of_several_kinds_that_datasets_saved_come_back(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    features = datasets.Features({"messages": datasets.List(datasets.Json())})
    table = datasets.Dataset.from_dict({"messages": [talk]}, features=features)
    table.save_to_disk(str(tmp_path / "saved"))
    (sample,) = read_samples(str(tmp_path / "saved"), "auto", "train", 0, Defects())
    assert list(sample.messages) == talk
    shown = datasets.Dataset.from_list([{"prompt": "a", "images": ["0.png"]}])
    shown.save_to_disk(str(tmp_path / "shown"))
    (sample,) = read_samples(str(tmp_path / "shown"), "auto", "train", 0, Defects())
    assert sample.images == (str(tmp_path / "shown" / "0.png"),)


def test_a_pattern_names_several_files(tmp_path: Path) -> None:
    fill(tmp_path, "a1.jsonl", "a2.jsonl", "b.jsonl")
    assert read(f"{tmp_path}/a*.jsonl") == ["a1.jsonl", "a2.jsonl"]
    with pytest.raises(FileError, match="does not exist"):
        read(f"{tmp_path}/c*.jsonl")


# -- several sources ------------------------------------------------------------------------------


def test_several_sources_are_all_read_in_turn(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "a{i}"}}\n' for i in range(3)))
    (tmp_path / "b.jsonl").write_text('{"text": "b0"}\nbroken\n')
    names = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    defects = Defects()
    assert read(names, defects=defects) == ["a0", "b0", "a1", "a2"]
    assert defects.records == {names[0]: 3, names[1]: 1}
    defects.chose([1, 2, 3])
    assert defects.chosen == {names[0]: 2, names[1]: 1}
    with pytest.raises(FileError, match="does not exist"):
        check_source([names[0], "./none.jsonl"], "auto")


def test_a_source_that_is_given_twice_is_remarked(tmp_path: Path) -> None:
    fill(tmp_path, "a.jsonl")
    defects = Defects()
    assert len(read([str(tmp_path / "a.jsonl")] * 2, defects=defects)) == 2
    assert "given 2 times" in defects.remarks[0]


def test_sources_come_from_flags_recipes_and_calls_alike(tmp_path: Path) -> None:
    both = ("a.jsonl", "b.jsonl")
    file = tmp_path / "own.yaml"
    file.write_text("based_on: distill\ndata: {source: [a.jsonl, b.jsonl]}\n")
    found = [
        RecipeFlags(data=list(both)).load(),
        load_recipe("distill", ["data.source=[a.jsonl, b.jsonl]"]),
        load_recipe(str(file)),
        recipe_of("distill", None, {"data": list(both)}),
    ]
    assert [recipe.data.source for recipe in found] == [both] * 4
    assert RecipeFlags(data=["a.jsonl"]).load().data.source == "a.jsonl"
    assert load_recipe("distill", ["data.source=[a.jsonl]"]).data.source == "a.jsonl"
    with pytest.raises(RecipeError, match="at least one"):
        load_recipe("distill", ["data.source=[]"])


def test_prepared_rows_hold_every_source_and_say_their_shares(
    tiny_target: Target, tmp_path: Path
) -> None:
    class Listener(SilentReporter):
        def say(self, text: str) -> None:
            self.warnings.append(text)

    names = [str(fill(tmp_path, name) / name) for name in ("a.jsonl", "b.jsonl")]
    sets = [f"data.source={names}", "data.regenerate=false", "data.text_tokens=0"]
    listener = Listener()
    data = prepare(load_recipe("distill", sets), tiny_target, tmp_path / "run", listener)
    assert data.manifest.documents == 2
    said = [text for text in listener.warnings if "50%" in text]
    assert said == [f"data: {name}: 1 record (50% of all)" for name in names]


def test_tokens_of_a_file_are_those_of_its_texts_not_of_its_keys(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    said = [{"role": role, "content": "x" * 100} for role in ("user", "assistant")]
    record = {"messages": said, "domain": "y" * 2000}
    file.write_text((json.dumps(record) + "\n") * 700)
    assert tokens_in(DataPart(source=str(file))) == pytest.approx(700 * 50, rel=0.02)
    written = {"input_ids": [49000] * 30, "loss_mask": [1] * 30}
    file.write_text((json.dumps(written) + "\n") * 700 + "not JSON\n")
    assert tokens_in(DataPart(source=str(file))) == pytest.approx(700 * 30, rel=0.02)
    file.write_text('{"text": "half a character: \\ud83d"}\n{"text": "%s"}\n' % ("x" * 400))
    assert tokens_in(DataPart(source=str(file))) > 100
    plain = tmp_path / "b.txt"
    plain.write_text("x" * 400)
    assert tokens_in(DataPart(source=(str(plain), "owner/name"))) == 100 + UNKNOWN_TOKENS


def test_the_plan_knows_the_share_of_every_source(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n' * 3)
    (tmp_path / "b.jsonl").write_text('{"text": "abc"}\n')
    names = tuple(str(tmp_path / name) for name in ("a.jsonl", "b.jsonl"))
    shares = source_shares(DataPart(source=names))
    assert [(one.name, one.what, one.share) for one in shares] == [
        (names[0], "1 file", 0.75),
        (names[1], "1 file", 0.25),
    ]
    mixed = source_shares(DataPart(source=(names[0], "owner/name", "./none.jsonl")))
    assert [(one.what, one.share) for one in mixed] == [
        ("1 file", None), ("split train", None), ("not here yet", None),
    ]  # fmt: skip
