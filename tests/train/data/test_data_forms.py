"""Data as people keep them: the forms of a record, and what a folder or a file may hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specctl.core.errors import RecipeError
from specctl.recipes.schema import DataPart
from specctl.train.data.prompts.answers import AnswerPlan
from specctl.train.data.prompts.heldout import heldout_prompts
from specctl.train.data.prompts.prompts import cut_prompts
from specctl.train.data.records.records import Sample, sample_of
from specctl.train.data.rows.context import check_context
from specctl.train.data.sources.defects import Defects
from specctl.train.data.sources.sources import read_samples

ASK, TELL = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def read(path: Path, defects: Defects | None = None, format: str = "auto") -> list[Sample]:
    return list(read_samples(str(path), format, "train", 0, defects or Defects()))


def said(record: Any) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in sample_of(record, "x:1").messages]


@pytest.mark.parametrize(
    ("record", "turns"),
    [
        ({"prompt": "a", "completion": "b"}, [("user", "a"), ("assistant", "b")]),
        (
            {"instruction": "add", "input": "1 2", "output": "3"},
            [("user", "add\n\n1 2"), ("assistant", "3")],
        ),
        (
            {"instruction": "add", "input": "", "output": "3"},
            [("user", "add"), ("assistant", "3")],
        ),
        ({"prompt": [ASK], "completion": [TELL]}, [("user", "a"), ("assistant", "b")]),
        ({"prompt": [ASK, TELL, ASK], "response": "b"}, [*[("user", "a"), ("assistant", "b")] * 2]),
        ({"prompt": "a"}, [("user", "a")]),
        ({"instruction": "add", "input": "1 2"}, [("user", "add\n\n1 2")]),
    ],
)
def test_what_is_asked_arrives_whole(record: Any, turns: list[tuple[str, str]]) -> None:
    assert said(record) == turns


@pytest.mark.parametrize(
    "record",
    [
        {"system": "be brief", "messages": [ASK, TELL]},
        {"system": "be brief", "conversations": [{"from": "human", "value": "a"}]},
        {"system_prompt": "be brief", "prompt": "a", "response": "b"},
    ],
)
def test_a_system_prompt_beside_the_turns_stands_before_them(record: Any) -> None:
    assert said(record)[0] == ("system", "be brief")


def test_turns_that_bring_a_system_prompt_keep_their_own() -> None:
    own = {"role": "system", "content": "own"}
    assert said({"system": "other", "messages": [own, ASK]}) == [("system", "own"), ("user", "a")]


def test_a_text_beside_a_prompt_is_the_whole_document() -> None:
    assert sample_of({"prompt": "a", "text": "whole"}, "x:1").text == "whole"


@pytest.mark.parametrize("content", [5, {"text": "a"}, True])
def test_a_message_that_says_no_text_is_refused(content: Any) -> None:
    with pytest.raises(ValueError, match="neither text nor parts"):
        sample_of({"messages": [{"role": "user", "content": content}, TELL]}, "x:1")


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf", b"\n  "])
def test_a_json_file_may_be_one_list(tmp_path: Path, mark: bytes) -> None:
    records = [{"text": "one"}, {"other": 1}, {"text": "two"}]
    path, defects = tmp_path / "a.json", Defects()
    path.write_bytes(mark + json.dumps(records, indent=1).encode())
    assert [s.text for s in read(path, defects)] == ["one", "two"]
    assert "a.json: record 2" in defects.lines()[0]


def test_lines_that_hold_lists_are_still_lines(tmp_path: Path) -> None:
    path, defects = tmp_path / "a.jsonl", Defects()
    path.write_text('[1]\n{"text": "one"}\n')
    assert [s.text for s in read(path, defects)] == ["one"]
    assert defects.counts["record is not an object"] == 1


def test_a_cloned_data_set_is_read_as_records(tmp_path: Path) -> None:
    """Its description, licence and version history are no data."""
    for name in ("README.md", "LICENSE", ".gitattributes", ".git/a.x", ".git/b.x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("about")
    (tmp_path / "train.jsonl").write_text('{"text": "one"}\n')
    defects = Defects()
    assert [s.text for s in read(tmp_path, defects)] == ["one"]
    assert not defects.counts


def test_a_folder_of_several_kinds_of_records_is_read_whole(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist([{"text": "two"}])
    parquet.write_table(table, tmp_path / "b.parquet")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "c.txt").write_text("three")
    defects = Defects()
    assert [s.text for s in read(tmp_path, defects)] == ["one", "two"]
    assert "c.txt" in defects.lines()[0]


def test_a_folder_of_programs_with_a_few_records_is_text(tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "c.py"):
        (tmp_path / name).write_text(f"# {name}")
    (tmp_path / "package.json").write_text("{}")
    assert len(read(tmp_path)) == 4


def test_a_line_separator_inside_a_record_ends_no_line(tmp_path: Path, tiny_target: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "x = 1\u2028y\x85z"}, ensure_ascii=False) + "\n")
    (prompt,) = heldout_prompts(tiny_target, 4, path=path)
    assert prompt.text == "x = 1\u2028y\x85z"


def test_a_prompt_alone_is_answered_by_the_target(tiny_target: Any) -> None:
    sample = sample_of({"prompt": "how?"}, "x:1")
    (cut,) = cut_prompts(tiny_target, [sample], AnswerPlan(1, 48, 8, 0.8, 0.5, 0), Defects())
    asked = tiny_target.encode_chat([{"role": "user", "content": "how?"}])
    assert list(cut.ids) == asked


def test_prompts_follow_from_the_text_and_not_from_its_place(tiny_target: Any) -> None:
    text = "".join(f"line {i}\n" for i in range(200))
    plan, samples = AnswerPlan(8, 8, 8, 0.8, 0.5, 0), [Sample(f"/{at}/t", "", text) for at in "ab"]
    one, other = (cut_prompts(tiny_target, [sample], plan, Defects()) for sample in samples)
    assert [cut.ids for cut in one] == [cut.ids for cut in other]
    assert len(one) == 8


def test_the_longest_answer_that_is_offered_leaves_room_for_a_prompt(tiny_target: Any) -> None:
    spec = tiny_target.spec
    with pytest.raises(RecipeError) as caught:
        check_context("tiny", DataPart(new_tokens=1024), 8, spec)
    longest = int(caught.value.do.split("=")[1].split(",")[0])
    check_context("tiny", DataPart(new_tokens=longest), 8, spec)
    plan = AnswerPlan(1, 48, longest, 0.8, 0.5, 0)
    assert cut_prompts(tiny_target, [Sample("x", "", text="def main(): pass")], plan, Defects())


@pytest.mark.parametrize(
    "record", [{"text": "ab \ud800 cd"}, {"prompt": "a", "response": "\udc00"}]
)
def test_half_a_character_is_left_out_by_name(tmp_path: Path, record: dict[str, str]) -> None:
    path, defects = tmp_path / "a.jsonl", Defects()
    path.write_text(json.dumps(record) + "\n" + json.dumps({"text": "one"}) + "\n")
    assert [s.text for s in read(path, defects)] == ["one"]
    assert "surrogate" in defects.lines()[0]


def test_records_in_a_file_without_suffix_are_records(tmp_path: Path) -> None:
    (tmp_path / "records").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert [s.text for s in read(tmp_path / "records")] == ["one", "two"]
    (tmp_path / "words").write_text("one\ntwo\n")
    assert [s.text for s in read(tmp_path / "words")] == ["one\ntwo\n"]


def test_a_table_is_records_unless_text_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt,response\na,b\n")
    assert [m["content"] for m in read(path)[0].messages] == ["a", "b"]
    assert [s.text for s in read(path, format="text")] == ["prompt,response\na,b\n"]


def test_an_empty_file_of_records_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    defects = Defects()
    assert not read(tmp_path / "a.jsonl", defects)
    assert "empty file" in defects.lines()[0]
