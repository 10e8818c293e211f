"""Files of data as people keep them: packed, in other encodings, over many lines, in tables."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specctl.core.errors import FileError, RecipeError
from specctl.train.data.files import json_records
from specctl.train.data.records.records import Sample
from specctl.train.data.sources.defects import Defects
from specctl.train.data.sources.sources import read_samples

WORDS = ["one", "two", "three"]
RECORDS = [{"text": word} for word in WORDS]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)
TALK = [{"role": "user", "content": "how?"}, {"role": "assistant", "content": 'so, "this"'}]


def read(
    path: Path, defects: Defects | None = None, split: str = "train", format: str = "auto"
) -> list[Sample]:
    found = defects or Defects()
    samples = list(read_samples(str(path), format, split, 0, found))
    assert defects is not None or not found.counts
    return samples


def texts(path: Path, **how: Any) -> list[str]:
    return [sample.text for sample in read(path, **how)]


def zstd(data: bytes) -> bytes:
    packed: bytes = pytest.importorskip("pyarrow").compress(data, codec="zstd", asbytes=True)
    return packed


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [(".gz", gzip.compress), (".zst", zstd), (".bz2", bz2.compress), (".xz", lzma.compress)],
)
@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.txt"])
def test_a_packed_file_is_read_as_what_is_in_it(
    tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes], name: str
) -> None:
    body = {"x.json": json.dumps(RECORDS, indent=2), "x.csv": "text\none\ntwo\nthree\n"}
    (tmp_path / (name + suffix)).write_bytes(pack(body.get(name, LINES).encode()))
    assert texts(tmp_path / (name + suffix), defects=Defects()) == WORDS
    (tmp_path / f"renamed-{name}").write_bytes(pack(body.get(name, LINES).encode()))
    assert texts(tmp_path / f"renamed-{name}", defects=Defects()) == WORDS


@pytest.mark.parametrize("pack", [gzip.compress, zstd, bz2.compress, lzma.compress])
def test_a_packed_file_that_breaks_off_says_so(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    lines = "".join(json.dumps({"text": f"{n} {n * n}"}) + "\n" for n in range(4_000))
    packed, defects = pack(lines.encode()), Defects()
    (tmp_path / "x.jsonl").write_bytes(packed[: len(packed) * 3 // 4])
    assert len(read(tmp_path / "x.jsonl", defects)) < 4_000
    (reason,) = defects.counts
    assert "the file breaks off: only what stands before is read" in reason


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("indent", [None, 2])
def test_the_encoding_is_told_from_the_file(
    tmp_path: Path, encoding: str, indent: int | None
) -> None:
    said = json.dumps([{"text": "gr\u00fcn"}, {"text": "\u7da0"}], indent=indent)
    (tmp_path / "x.json").write_bytes(said.encode(encoding))
    assert texts(tmp_path / "x.json") == ["gr\u00fcn", "\u7da0"]
    lines = '{"text": "gr\u00fcn"}\r\n{"text": "\u7da0"}\r\n\r\n'
    (tmp_path / "x.jsonl").write_bytes(lines.encode(encoding))
    assert texts(tmp_path / "x.jsonl") == ["gr\u00fcn", "\u7da0"]


def in_list(records: list[Any], indent: int | None) -> str:
    return json.dumps(records, indent=indent)


def after_each_other(records: list[Any], indent: int | None) -> str:
    return "\n".join(json.dumps(record, indent=indent) for record in records)


def by_commas(records: list[Any], indent: int | None) -> str:
    return ",\n".join(json.dumps(record, indent=indent) for record in records) + ",\n"


def in_data(records: list[Any], indent: int | None) -> str:
    return json.dumps({"version": 1, "data": records, "more": {"a": [1]}}, indent=indent)


def in_instances(records: list[Any], indent: int | None) -> str:
    return json.dumps({"type": "text_only", "instances": records}, indent=indent)


def in_rows(records: list[Any], indent: int | None) -> str:
    rows = [{"row_idx": i, "row": r, "truncated_cells": []} for i, r in enumerate(records)]
    return json.dumps({"features": [{"name": "text"}], "rows": rows}, indent=indent)


def in_splits(records: list[Any], indent: int | None) -> str:
    return json.dumps({"train": records, "test": [{"text": "kept back"}]}, indent=indent)


FORMS = [in_list, after_each_other, by_commas, in_data, in_instances, in_rows, in_splits]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("indent", [None, 1, 4])
@pytest.mark.parametrize("name", ["x.json", "x.jsonl", "without-suffix"])
def test_records_over_many_lines_are_records(
    tmp_path: Path, form: Callable[..., str], indent: int | None, name: str
) -> None:
    (tmp_path / name).write_text(form(RECORDS, indent))
    assert texts(tmp_path / name) == WORDS


def test_a_file_of_splits_is_read_by_its_split(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(in_splits(RECORDS, 2))
    assert texts(path, split="test") == ["kept back"]
    assert texts(path, split="all") == [*WORDS, "kept back"]
    with pytest.raises(RecipeError, match="train; 1 more is for measuring"):
        read(path, split="valid")


@pytest.mark.parametrize("indent", [None, 2])
def test_a_conversation_is_no_list_of_records(tmp_path: Path, indent: int | None) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"messages": TALK}, indent=indent))
    (sample,) = read(tmp_path / "x.json")
    assert [message["content"] for message in sample.messages] == ["how?", 'so, "this"']


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("indent", [None, 1])
def test_large_files_are_read_without_holding_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Callable[..., str], indent: int | None
) -> None:
    monkeypatch.setattr(json_records, "LONGEST_LINE", 1 << 17)
    many = [{"text": f"{n} " + "x" * 500} for n in range(2_000)]
    (tmp_path / "x.json").write_text(form(many, indent))
    if form is in_rows:  # what stands before the list of rows is an object, so all is held
        return
    assert [t.split()[0] for t in texts(tmp_path / "x.json")] == [str(n) for n in range(2_000)]


def test_a_broken_record_over_many_lines_costs_no_other(tmp_path: Path) -> None:
    said = json.dumps(RECORDS, indent=2).replace('"two"', '"two')
    (tmp_path / "x.json").write_text(said)
    defects = Defects()
    assert texts(tmp_path / "x.json", defects=defects) == ["one", "three"]
    assert defects.first == {"record is not JSON": f"{tmp_path / 'x.json'}: record 2"}


def test_a_broken_record_behind_which_others_are_lost_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(RECORDS).replace('"two"', '"two'))
    with pytest.raises(FileError, match="one record a line") as caught:
        read(tmp_path / "x.json")
    assert caught.value.where.endswith("record 2")


@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_that_is_cut_off_says_so(tmp_path: Path, indent: int | None) -> None:
    whole = json.dumps(RECORDS, indent=indent)
    for end in (whole.index("three") + 2, whole.index("three") - 4, whole.rindex("}")):
        (tmp_path / "x.json").write_text(whole[:end])
        defects = Defects()
        assert texts(tmp_path / "x.json", defects=defects) == WORDS[:2]
        assert "the file ends within it" in defects.lines()[0]
    (tmp_path / "x.json").write_text(whole[: whole.rindex("]")])
    defects = Defects()
    assert texts(tmp_path / "x.json", defects=defects) == WORDS
    assert "may be cut off" in defects.lines()[0]


def test_a_last_line_that_is_cut_off_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(LINES[:-8])
    defects = Defects()
    assert texts(tmp_path / "x.jsonl", defects=defects) == WORDS[:2]
    assert "the file ends within it" in defects.lines()[0]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "a", "text": "b"}', "stands twice"),
        ('{"messages": [{"role": "user", "role": "system", "content": "a"}]}', "stands twice"),
        ('{"text": "caf\xe9"}', "UnicodeDecodeError"),
    ],
)
def test_what_is_not_clear_is_left_out_by_name(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "x.jsonl").write_bytes((line + '\n{"text": "one"}\n').encode("latin-1"))
    defects = Defects()
    assert texts(tmp_path / "x.jsonl", defects=defects) == ["one"]
    assert reason in defects.lines()[0]


def test_numbers_that_json_has_not_do_no_harm_beside_the_text(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "one", "domain": NaN}\n')
    assert texts(tmp_path / "x.jsonl") == ["one"]


def test_records_under_the_name_of_a_text_are_read_with_a_remark(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text(LINES)
    defects = Defects()
    assert texts(tmp_path / "x.txt", defects=defects) == WORDS
    assert "data.format=text" in defects.remarks[0]
    assert texts(tmp_path / "x.txt", format="text") == [LINES]
    (tmp_path / "y.txt").write_text('{"width": 4}\n')
    assert texts(tmp_path / "y.txt") == ['{"width": 4}\n']


@pytest.mark.parametrize(("mark", "name"), [(",", "x.csv"), (";", "x.csv"), ("\t", "x.tsv")])
def test_the_columns_of_a_table_are_the_fields_of_a_record(
    tmp_path: Path, mark: str, name: str
) -> None:
    rows = [["how, and; why?", 'so\n"this"', "be brief"], ["what?", "that", ""]]
    with (tmp_path / name).open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file, delimiter=mark)
        writer.writerows([["", "prompt", "response", "system"], *([str(i), *r] for i, r in
                                                                   enumerate(rows))])  # fmt: skip
    first, second = read(tmp_path / name)
    assert [m["content"] for m in first.messages] == ["be brief", "how, and; why?", 'so\n"this"']
    assert [m["content"] for m in second.messages] == ["what?", "that"]
    assert second.where.endswith("row 2")


@pytest.mark.parametrize("written", [json.dumps, str])
def test_conversations_in_the_cells_of_a_table_are_read(
    tmp_path: Path, written: Callable[[Any], str]
) -> None:
    with (tmp_path / "x.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["messages"], [written(TALK)]])
    (sample,) = read(tmp_path / "x.csv")
    assert list(sample.messages) == TALK
    parquet = pytest.importorskip("pyarrow.parquet")
    table = {"messages": [written(TALK)], "__index_level_0__": [3]}
    parquet.write_table(pytest.importorskip("pyarrow").table(table), tmp_path / "x.parquet")
    assert list(read(tmp_path / "x.parquet")[0].messages) == TALK
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": written(TALK)}) + "\n")
    assert list(read(tmp_path / "x.jsonl")[0].messages) == TALK


def test_rows_that_do_not_fit_the_first_line_are_left_out_by_name(tmp_path: Path) -> None:
    body = b"prompt,response\na,b\na\na,b,c\na\xe9,b\nx,y\n"
    (tmp_path / "x.csv").write_bytes(body)
    defects = Defects()
    assert [s.messages[0]["content"] for s in read(tmp_path / "x.csv", defects)] == ["a", "x"]
    assert [line.split(" (")[0] for line in defects.lines()] == [
        "1 x row has fewer columns than the first line names",
        "1 x row has more columns than the first line names",
        "1 x row is not UTF-8 text",
    ]
    (tmp_path / "y.csv").write_text("prompt,prompt\na,b\n")
    with pytest.raises(FileError, match="twice: prompt"):
        read(tmp_path / "y.csv")


def test_files_of_arrow_are_read(tmp_path: Path) -> None:
    arrow, ipc = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.ipc")
    table = arrow.Table.from_pylist(RECORDS)
    for new, name in ((ipc.new_stream, "a.arrow"), (ipc.new_file, "b.arrow")):
        with new(tmp_path / name, table.schema) as writer:
            writer.write_table(table)
        assert texts(tmp_path / name) == WORDS


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        (b"PK\x03\x04 and more", "zip archive"),
    ],
)
def test_what_holds_no_records_is_named(tmp_path: Path, body: bytes, found: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(body)
    with pytest.raises(FileError, match=found):
        read(tmp_path / "x.jsonl")
