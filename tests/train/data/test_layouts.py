"""Every layout of records, field by field: what it becomes, or by which name it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specctl.core.errors import RecipeError
from specctl.train.data.records.layouts import LAYOUTS, ROLE_OF, FieldChoices
from specctl.train.data.records.records import sample_of, samples_of, without_nulls
from specctl.train.data.sources.defects import Defects
from specctl.train.data.sources.sources import read_samples

ASK, TELL = {"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}
PAIR = [("user", "a b"), ("assistant", "c d")]
CALL = {"name": "weather", "arguments": {"city": "Bern"}}


def said(record: Any) -> list[tuple[str, Any]]:
    return [(m["role"], m.get("content")) for m in sample_of(record, "x:1").messages]


@pytest.mark.parametrize(
    ("record", "turns"),
    [
        (
            {"conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c d"}]},
            PAIR,
        ),
        ({"conversation": [{"human": "a b", "assistant": "c d"}]}, PAIR),
        (
            {
                "systemInstruction": {"parts": [{"text": "s"}]},
                "contents": [
                    {"role": "user", "parts": [{"text": "a b"}]},
                    {"role": "model", "parts": [{"text": "c d"}]},
                ],
            },
            [("system", "s"), *PAIR],
        ),
        (
            {"dialogue": [{"speaker": "User", "text": "a b"}, {"speaker": "Bot", "text": "c d"}]},
            PAIR,
        ),
        ({"messages": json.dumps([ASK, TELL])}, PAIR),
        (
            {"instruction": "a", "context": "b c", "response": "d"},
            [("user", "a\n\nb c"), ("assistant", "d")],
        ),
        (
            {
                "instruction": "i j",
                "output": "o p",
                "history": [["a b", "c d"]],
                "text": "i j. o p",
            },
            [*PAIR, ("user", "i j"), ("assistant", "o p")],
        ),
        ({"input": "a b", "output": "c d"}, PAIR),
        ({"Question": "a b", "Answer": "c d"}, PAIR),
        ({"user": "a b", "assistant": "c d"}, PAIR),
        ({"question": "a b", "answer": 4}, [("user", "a b"), ("assistant", "4")]),
        ({"prompt": "a b", "response": None}, PAIR[:1]),
        ({"prompt": "a b", "chosen": "c d", "rejected": "e f"}, PAIR),
        ({"prompt": "a b", "chosen": [ASK, TELL], "rejected": [ASK, ASK]}, PAIR),
        ({"chosen": "\n\nHuman: a b\n\nAssistant: c d", "rejected": "x y"}, PAIR),
        (
            {
                "custom_id": "1",
                "url": "/v1/chat/completions",
                "body": {"model": "m", "messages": [ASK]},
            },
            PAIR[:1],
        ),
        ({"custom_id": "1", "url": "/v1/completions", "body": {"prompt": "a b"}}, PAIR[:1]),
        (
            {"turns": ["a b", "e f"], "category": "writing", "reference": ["no text of ours"]},
            [("user", "a b"), ("assistant", ""), ("user", "e f"), ("assistant", "")],
        ),
        ({"messages": [ASK, TELL], "prompt": "a b", "source": "a data set"}, PAIR),
        (
            {"system": "Be brief.", "mask": "User", "conversations": [ASK, TELL]},
            [("system", "Be brief."), *PAIR],
        ),
    ],
)
def test_a_record_becomes_the_turns_that_it_means(record: Any, turns: Any) -> None:
    assert said(record) == turns


def test_several_answers_make_several_conversations() -> None:
    record = {"question": "a b", "answers": {"text": ["c", "d", "c"], "answer_start": [1, 2, 1]}}
    assert [s.messages[-1]["content"] for s in samples_of(record, "x:1")] == ["c", "d"]


@pytest.mark.parametrize(("word", "role"), sorted(ROLE_OF.items()))
def test_roles_are_known_by_all_their_names(word: str, role: str) -> None:
    turns = [{"role": word.upper(), "content": "a b"}, TELL]
    assert sample_of({"messages": turns}, "x:1").messages[0]["role"] == role


def test_an_unknown_role_is_named() -> None:
    with pytest.raises(ValueError, match="unknown role 'narrator'"):
        sample_of({"messages": [{"role": "narrator", "content": "a b"}, TELL]}, "x:1")


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ({"question": "a b", "answer": "c", "passage": "what it is about"}, "passage"),
        ({"messages": [ASK, {**TELL, "critique": "not so good"}]}, "messages.critique"),
        ({"messages": [ASK, TELL], "prompt": "another text"}, "prompt"),
        ({"messages": [ASK, TELL], "documents": [{"body": "some long text"}]}, "documents"),
        ({"text": "a b", "summary": "what it says"}, "summary"),
    ],
)
def test_a_field_that_holds_text_and_is_not_understood_stops_by_name(
    record: Any, name: str
) -> None:
    advice = "data.ignore=[{name}]"
    with pytest.raises(RecipeError, match=f"field '{name}'") as caught:
        sample_of(record, "file.jsonl:7", choices=FieldChoices(advice=advice))
    assert caught.value.where == "file.jsonl:7"
    assert caught.value.do == f"data.ignore=[{name}]"
    sample_of(record, "x:1", choices=FieldChoices(ignore=frozenset({name})))


def test_a_mapped_field_is_read_as_what_it_is() -> None:
    choices = FieldChoices(map={"passage": "context", "messages.who": "role"})
    record = {"question": "a b", "passage": "c d", "answer": "e"}
    assert sample_of(record, "x:1", choices=choices).messages[0]["content"] == "a b\n\nc d"
    turns = [{"who": "user", "content": "a b"}]
    assert sample_of({"messages": turns}, "x:1", choices=choices).messages == (ASK,)


def test_a_key_that_the_chat_template_reads_reaches_it() -> None:
    turn = {**TELL, "emotion": "very glad"}
    choices = FieldChoices(template="{{ message.emotion }}")
    assert sample_of({"messages": [ASK, turn]}, "x:1", choices=choices).messages[1] == turn


def test_labels_numbers_and_what_was_read_already_stop_nothing() -> None:
    about = {"difficulty_class": "very-hard", "num_turns": 3, "seen": True, "title": "On a lake"}
    assert said({"messages": [ASK, TELL], **about}) == PAIR
    assert said({"messages": [ASK, TELL], "rendered": "Q: a b A: c d"}) == PAIR


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"loss": 0}, {"weight": 0.0}])
def test_turns_marked_as_not_to_be_learned_are_given(mark: dict[str, Any]) -> None:
    sample = sample_of({"messages": [ASK, {**TELL, **mark}, ASK, {**TELL, "weight": 1}]}, "x:1")
    assert sample.given == (1,)
    assert sample.messages[1] == TELL
    with pytest.raises(ValueError, match="marked as not to be learned"):
        sample_of({"messages": [ASK, {**TELL, **mark}]}, "x:1")
    with pytest.raises(ValueError, match="marked as not to be learned"):
        sample_of({"messages": [ASK, TELL], **mark}, "x:1")


def test_only_the_last_answer_is_learned_with_mask_history() -> None:
    assert sample_of({"messages": [ASK, TELL, ASK, TELL], "mask_history": True}, "x:1").given == (
        1,
    )


def test_calls_of_older_forms_become_tool_calls() -> None:
    wanted = ({"type": "function", "function": CALL},)
    old = {"role": "assistant", "content": None, "function_call": CALL}
    flat = {"from": "function_call", "value": json.dumps(CALL)}
    listed = {"role": "assistant", "tool_calls": json.dumps(wanted)}
    for turn in (old, flat, listed):
        message = sample_of({"messages": [ASK, turn]}, "x:1").messages[1]
        assert tuple(message["tool_calls"]) == wanted
        assert "content" not in message
    tools = json.dumps([{"name": "weather"}])
    assert sample_of({"messages": [ASK, TELL], "tools": tools}, "x:1").tools == (
        {"name": "weather"},
    )
    wrapped = sample_of({"messages": [ASK, TELL], "functions": [{"name": "weather"}]}, "x:1").tools
    assert wrapped == ({"type": "function", "function": {"name": "weather"}},)


def test_thoughts_are_known_by_all_their_names() -> None:
    parts = [{"type": "thinking", "thinking": "so so"}, {"type": "text", "text": "c d"}]
    for turn in (
        {**TELL, "reasoning": "so so"},
        {**TELL, "thinking": "so so"},
        {**TELL, "content": parts},
    ):
        message = sample_of({"messages": [ASK, turn]}, "x:1").messages[1]
        assert message == {**TELL, "reasoning_content": "so so"}


def test_sounds_are_counted_and_unknown_parts_are_refused() -> None:
    parts = [{"type": "audio", "audio": {"url": "x"}}, {"type": "text", "text": "a b"}]
    sample = sample_of({"messages": [{**ASK, "content": parts}, TELL], "videos": ["x y"]}, "x:1")
    assert (sample.messages[0], sample.left_out) == (ASK, ("videos", "audio"))
    with pytest.raises(ValueError, match="unknown kind: 'tool_result'"):
        sample_of({"messages": [{**ASK, "content": [{"type": "tool_result"}]}, TELL]}, "x:1")


def test_labels_of_transformers_say_what_is_learned() -> None:
    sample = sample_of({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, "x:1")
    assert (sample.ids, sample.mask) == ((5, 6, 7), (False, True, True))
    with pytest.raises(ValueError, match="do not say what is learned"):
        sample_of({"input_ids": [5, 6, 7]}, "x:1")


def test_the_nulls_of_a_table_are_dropped(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    tools = [
        {"type": "function", "function": {"name": "a", "parameters": {"x": {"type": "string"}}}},
        {"type": "function", "function": {"name": "b", "parameters": {"y": {"type": "number"}}}},
    ]
    rows = [{"messages": [ASK, TELL], "tools": tools}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    assert parquet.read_table(tmp_path / "x.parquet").to_pylist() != rows
    (sample,) = read_samples(str(tmp_path / "x.parquet"), "auto", "train", 0, Defects())
    assert list(sample.tools) == tools
    assert without_nulls({"a": [{"b": None}], "c": None}) == {"a": [{}]}


def test_one_message_alone_is_no_document() -> None:
    with pytest.raises(ValueError, match="one message of a conversation"):
        sample_of({"text": "hello there", "role": "prompter", "parent_id": "x"}, "x:1")


def test_the_table_of_layouts_stands_in_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
    for layout in LAYOUTS:
        assert f"| {layout.name} |" in page
        for fields, becomes in layout.fields.items():
            assert f"`{'`, `'.join(fields.split(', '))}`" in page, fields
            assert becomes in page, becomes
