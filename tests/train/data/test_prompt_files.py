"""Files of prompts: whatever trains can be measured and continued, too."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from specctl.cli.options.prompts import read_prompts
from specctl.core.errors import FileError, SpecctlError
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import heldout_prompts

ASK, TELL = {"role": "user", "content": "how?"}, {"role": "assistant", "content": "so"}
TURNS = [ASK, TELL, {"role": "user", "content": "why?"}]


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [ASK]},
        {"messages": [ASK, TELL]},
        {"conversations": [{"from": "human", "value": "how?"}, {"from": "gpt", "value": "so"}]},
        {"instruction": "how?", "output": "so"},
        {"question": "how?", "answer": "so"},
        {"prompt": [ASK], "completion": [TELL]},
    ],
)
def test_a_record_that_trains_is_a_prompt_up_to_its_answer(
    tmp_path: Path, tiny_target: Target, record: dict[str, Any]
) -> None:
    path = write(tmp_path / "x.jsonl", record)
    asked = tuple(tiny_target.encode_chat([ASK]))
    assert [prompt.ids for prompt in heldout_prompts(tiny_target, 4, path=path)] == [asked]
    (prompt,) = read_prompts(None, path, None)
    assert (prompt.text, list(prompt.messages)) == ("how?", [ASK])


def test_a_conversation_ends_before_the_last_answer(tmp_path: Path, tiny_target: Target) -> None:
    path = write(tmp_path / "x.jsonl", {"messages": [*TURNS, TELL]}, {"messages": TURNS})
    first, second = read_prompts(None, path, None)
    assert first.messages == second.messages == tuple(TURNS)
    assert len({prompt.ids for prompt in heldout_prompts(tiny_target, 4, path=path)}) == 1


def test_a_prompt_alone_is_read_as_it_is(tmp_path: Path, tiny_target: Target) -> None:
    """As in HumanEval, whose other fields a benchmark has no use for."""
    record = {"task_id": "HumanEval/0", "prompt": "def f(", "canonical_solution": "x", "test": "y"}
    path = write(tmp_path / "x.jsonl", record)
    (held,) = heldout_prompts(tiny_target, 4, path=path)
    assert held.ids == tuple(tiny_target.encode("def f("))
    (prompt,) = read_prompts(None, path, None)
    assert (prompt.text, prompt.messages) == ("def f(", ())


def test_what_is_said_beside_a_prompt_is_not_dropped(tmp_path: Path, tiny_target: Target) -> None:
    path = write(tmp_path / "x.jsonl", {"prompt": "how?", "system": "be brief"})
    said = [{"role": "system", "content": "be brief"}, ASK]
    (held,) = heldout_prompts(tiny_target, 4, path=path)
    assert held.ids == tuple(tiny_target.encode_chat(said))
    assert list(read_prompts(None, path, None)[0].messages) == said


def test_tools_beside_the_messages_are_kept(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    path = write(tmp_path / "x.jsonl", {"messages": [ASK], "tools": tools})
    assert list(read_prompts(None, path, None)[0].tools) == tools


def test_a_category_is_the_domain_of_a_prompt(tmp_path: Path, tiny_target: Target) -> None:
    records = [{"category": c, "messages": [ASK]} for c in ("a", "a", "b")]
    path = write(tmp_path / "x.jsonl", *records)
    assert [p.domain for p in heldout_prompts(tiny_target, 2, path=path)] == ["a", "b"]
    with pytest.raises(SpecctlError, match="one of a, b"):
        heldout_prompts(tiny_target, 1, "c", path)


@pytest.mark.parametrize("name", ["x.json", "x.jsonl.gz", "x.csv", "x.parquet", "x.txt", "x"])
def test_prompts_come_in_all_kinds_of_files(tmp_path: Path, tiny_target: Target, name: str) -> None:
    path, records = tmp_path / name, [{"prompt": "how?"}, {"prompt": "why?"}]
    if name == "x.json":
        path.write_text(json.dumps(records, indent=2))
    elif name == "x.csv":
        path.write_text("prompt,notes\nhow?,a\nwhy?,b\n")
    elif name == "x.parquet":
        table = pytest.importorskip("pyarrow").Table.from_pylist(records)
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    else:
        write(path, *records)
        if name.endswith(".gz"):
            path.write_bytes(gzip.compress(path.read_bytes()))
    assert [p.text for p in heldout_prompts(tiny_target, 4, path=path)] == ["how?", "why?"]
    assert [p.text for p in read_prompts(None, path, None)] == ["how?", "why?"]


def test_standard_input_may_hold_records(monkeypatch: pytest.MonkeyPatch) -> None:
    def given(text: str) -> list[str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        return [prompt.text for prompt in read_prompts(None, Path("-"), None)]

    assert given('{"prompt": "how?"}\n{"prompt": "why?"}\n') == ["how?", "why?"]
    assert given("how?\n\n{why}?\n") == ["how?", "{why}?"]
    with pytest.raises(FileError) as caught:
        given('{"prompt": "how?"}\n{"neither": 1}\n')
    assert caught.value.where == "standard input:2"


@pytest.mark.parametrize("line", ['{"neither": 1}', "5", '{"broken'])
def test_a_record_that_is_no_prompt_is_named(
    tmp_path: Path, tiny_target: Target, line: str
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "x"}\n' + line + "\n")
    for read in (
        lambda: read_prompts(None, path, None),
        lambda: heldout_prompts(tiny_target, 4, path=path),
    ):
        with pytest.raises(FileError) as caught:
            read()
        assert caught.value.where == f"{path}:2"


def test_token_ids_are_a_prompt_up_to_what_is_learned(tmp_path: Path, tiny_target: Target) -> None:
    record = {"input_ids": [40, 41, 42, 43], "loss_mask": [0, 0, 1, 1]}
    path = write(tmp_path / "x.jsonl", record)
    assert [prompt.ids for prompt in heldout_prompts(tiny_target, 4, path=path)] == [(40, 41)]
    with pytest.raises(FileError, match="token ids alone"):
        read_prompts(None, path, None)
