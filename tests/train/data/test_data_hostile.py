"""Records that no program wrote for us: nested without end, endless lines, values JSON has not.
They are left out and counted with their place, as everything is that cannot be used."""

from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import pytest

from specctl.cli.options.prompts import read_prompts
from specctl.core.errors import FileError, SpecctlError
from specctl.runtime.target.target import Target
from specctl.train.data.files import json_records
from specctl.train.data.prompts.heldout import heldout_prompts
from specctl.train.data.records.records import DEEPEST, Sample, sample_of
from specctl.train.data.sources.defects import Defects
from specctl.train.data.sources.sources import read_samples

GOOD = {"prompt": "ask", "response": "answer"}
DEEP = "[" * 100_000
VALUES = {
    "datetime": datetime.datetime(2024, 1, 2),
    "date": datetime.date(2024, 1, 2),
    "bytes": b"\x00\xff",
    "Decimal": decimal.Decimal("1.5"),
}


def read(path: Path) -> tuple[list[Sample], Defects]:
    """The usable samples, each hashed as preparing does, and what was left out."""
    defects = Defects()
    samples = list(read_samples(str(path), "auto", "train", 0, defects))
    assert all(sample.digest() for sample in samples)
    return samples, defects


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "record-without-suffix"])
@pytest.mark.parametrize("line", [DEEP, DEEP + "]" * 100_000, '{"a":' * 100_000])
def test_a_line_nested_without_end_is_left_out_by_its_number(
    tmp_path: Path, name: str, line: str
) -> None:
    (tmp_path / name).write_text(f"{json.dumps(GOOD)}\n{line}\n{json.dumps(GOOD)}\n")
    samples, defects = read(tmp_path / name)
    assert [sample.messages[0]["content"] for sample in samples] == ["ask", "ask"]
    assert defects.counts == {"line is nested too deep": 1}
    assert defects.first["line is nested too deep"] == f"{tmp_path / name}:2"


def test_a_file_that_begins_with_a_nested_line_is_read_on(tmp_path: Path) -> None:
    for name in ("x.jsonl", "record-without-suffix"):
        (tmp_path / name).write_text(f"{DEEP}\n{json.dumps(GOOD)}\n")
    samples, defects = read(tmp_path / "x.jsonl")
    assert (len(samples), defects.counts.total()) == (1, 1)
    read(tmp_path / "record-without-suffix")  # the first line says that it holds text


def test_a_line_without_end_is_left_out_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_records, "LONGEST_LINE", 1000)
    long = {**GOOD, "metadata": "x" * 5000}
    exact = json.dumps({**GOOD, "metadata": ""})
    exact = exact.replace('""', '"' + "x" * (1000 - len(exact)) + '"')
    assert len(exact) == 1000
    lines = [json.dumps(one) for one in (GOOD, long, GOOD)] + [exact, exact + " ", "y" * 7000]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    samples, defects = read(tmp_path / "x.jsonl")
    assert [sample.where.rpartition(":")[2] for sample in samples] == ["1", "3", "4"]
    assert defects.counts == {"line is longer than 1,000 bytes": 3}
    assert defects.first["line is longer than 1,000 bytes"] == f"{tmp_path / 'x.jsonl'}:2"


@pytest.mark.parametrize("kind", list(VALUES))
def test_parquet_messages_with_values_that_json_has_not_are_left_out(
    tmp_path: Path, kind: str
) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    turns = [
        {"role": "user", "content": "ask", "at": None},
        {"role": "assistant", "content": "answer", "at": None},
    ]
    bad = [{**turns[0], "at": VALUES[kind]}, turns[1]]
    parquet.write_table(arrow.table({"messages": [bad, turns]}), tmp_path / "x.parquet")
    samples, defects = read(tmp_path / "x.parquet")
    assert [sample.where for sample in samples] == [f"{tmp_path / 'x.parquet'}: row 2"]
    reason = f"a message holds a value that JSON has not: {kind}"
    assert defects.counts == {reason: 1}
    assert defects.first[reason] == f"{tmp_path / 'x.parquet'}: row 1"


def test_a_parquet_row_that_cannot_be_read_costs_no_other(tmp_path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    columns: dict[str, Any] = {
        "text": ["one", "two", "three"],
        "at": arrow.array([0, 2**62, 0], arrow.timestamp("ms")),  # beyond the last year
    }
    parquet.write_table(arrow.table(columns), tmp_path / "x.parquet")
    samples, defects = read(tmp_path / "x.parquet")
    assert [sample.text for sample in samples] == ["one", "three"]
    assert list(defects.first.values()) == [f"{tmp_path / 'x.parquet'}: row 2"]


@pytest.mark.parametrize(
    "change",
    [
        {"tool_calls": nested(DEEPEST + 1)},
        {"tool_calls": [{"name": "\ud800"}]},
        {"name": b"x"},
        {"tool_calls": {1: "x"}},
        {"role": 5},
        {"role": datetime.date(2024, 1, 2)},
    ],
)
def test_a_message_that_no_template_can_write_is_refused(change: dict[str, Any]) -> None:
    turns = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "yes", **change}]
    with pytest.raises(ValueError, match=r"message|nested|surrogate"):
        sample_of({"messages": turns}, "here")
    with pytest.raises(ValueError, match=r"tool|nested|surrogate|JSON"):
        sample_of({**GOOD, "tools": [change, datetime.date(2024, 1, 2)]}, "here")


def test_tools_and_calls_are_kept(tmp_path: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": nested(8)}]}
    record = {
        "messages": [{"role": "user", "content": "ask"}, call],
        "tools": [nested(9), 1.5, None],
    }
    sample = sample_of(record, "here")
    assert sample.messages[1] == call
    assert sample.tools == (nested(9), 1.5, None)


HOSTILE_PROMPTS = {
    "nested": DEEP,
    "nested in a record": '{"prompt": "x", "more": ' + "[" * 100_000,
    "a nested message": json.dumps(
        {"messages": [{"role": "user", "content": "x", "calls": nested(DEEPEST + 1)}]}
    ),
    "half a character": '{"messages": [{"role": "user", "content": "x", "name": "\\ud800"}]}',
}


@pytest.mark.parametrize("line", HOSTILE_PROMPTS.values(), ids=list(HOSTILE_PROMPTS))
def test_a_line_of_prompts_that_cannot_be_read_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "x"}}\n{line}\n')
    with pytest.raises(FileError) as caught:
        read_prompts(None, file, None)
    assert caught.value.where == f"{file}:2"
    assert len(caught.value.found) <= 200


@pytest.mark.parametrize("line", [*HOSTILE_PROMPTS.values(), '{"text": "\\ud800"}'])
def test_a_held_out_prompt_that_cannot_be_read_is_named(
    tmp_path: Path, tiny_target: Target, line: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(SpecctlError) as caught:
        heldout_prompts(tiny_target, 1, None, file)
    assert str(file) in caught.value.where
