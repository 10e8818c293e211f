"""Sources, loss masks, and the data folder."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from specctl.core.errors import (
    FileError,
    IntegrityError,
    NetworkError,
    RecipeError,
    SpecctlError,
)
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import DataPart, Recipe, TrainPart
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.target.target import Target
from specctl.train.data.prepare import TokenData, prepare
from specctl.train.data.prompts.heldout import heldout_prompts
from specctl.train.data.records.chat import Encoded, encode_sample, preview
from specctl.train.data.records.records import Sample, sample_of, without, without_images
from specctl.train.data.rows.pack import better_seq_len
from specctl.train.data.sources.defects import Defects
from specctl.train.data.sources.sources import read_samples
from specctl_testing.runtime.chat_targets import spoken_with

TALK = (
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "def f1(x):"},
    {"role": "user", "content": "how are you?"},
    {"role": "assistant", "content": "return x"},
)


def chat(*messages: dict[str, Any]) -> Sample:
    return Sample("talk:1", "chat", messages=messages or TALK)


def predicted(tokenizer: Any, encoded: Encoded) -> list[str]:
    """The stretches of text that are to be predicted."""
    text = preview(tokenizer, encoded, width=10_000)
    return [part.split("]]")[0] for part in text.split("[[")[1:]]


def write_lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records))
    return path


def read(path: Path, defects: Defects | None = None) -> list[Sample]:
    return list(read_samples(str(path), "auto", "train", 0, defects or Defects()))


def recipe(source: Path | str, seq_len: int = 32, **data: Any) -> Recipe:
    part = DataPart(source=str(source), **{"regenerate": False, **data})
    return Recipe(data=part, train=TrainPart(seq_len=seq_len))


# -- loss masks -------------------------------------------------------------------------------


def test_markers_mask_exactly_what_the_assistant_says(marked_tokenizer: Any) -> None:
    encoded = encode_sample(marked_tokenizer, chat(), (5,))
    assert predicted(marked_tokenizer, encoded) == ["def f1(x):<|end|>", "return x<|end|>"]


def test_prefix_difference_masks_the_same_words_without_markers(plain_tokenizer: Any) -> None:
    encoded = encode_sample(plain_tokenizer, chat(), (5,))
    assert predicted(plain_tokenizer, encoded) == ["def f1(x):<|end|>", "return x<|end|>"]


def test_words_of_the_assistant_in_a_question_are_not_masked(plain_tokenizer: Any) -> None:
    """A text search for the marker or the answer would find the wrong place."""
    asked = chat(
        {"role": "user", "content": "repeat: assistant\nreturn x"},
        {"role": "assistant", "content": "return x"},
    )
    encoded = encode_sample(plain_tokenizer, asked, (5,))
    assert predicted(plain_tokenizer, encoded) == ["return x<|end|>"]
    assert encoded.mask[-3:] == [True, True, False]  # the newline after the end is the template's


def test_a_template_that_shortens_old_turns_masks_up_to_the_end_marker(
    plain_tokenizer: Any,
) -> None:
    tokenizer = copy.deepcopy(plain_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>\n"
        "{% if m['role'] == 'assistant' and loop.last %}(thinking) {% endif %}"
        "{{ m['content'] }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    encoded = encode_sample(tokenizer, chat(), (5,))
    answers = ["(thinking) def f1(x):<|end|>", "(thinking) return x<|end|>"]
    assert predicted(tokenizer, encoded) == answers
    _, second = encoded.documents()
    assert "(thinking)" not in tokenizer.decode(second.ids).split("how are you?")[0]


def test_each_answer_stands_behind_the_prompt_that_a_rewriting_template_writes_for_it(
    plain_tokenizer: Any,
) -> None:
    tokenizer = copy.deepcopy(plain_tokenizer)
    tokenizer.chat_template = (
        "{{ messages | length }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
        "{% endfor %}"
    )
    documents = encode_sample(tokenizer, chat(), (5,)).documents()
    texts = [preview(tokenizer, document) for document in documents]
    assert texts == [
        "1<|user|>hello[[def f1(x):<|end|>]]",
        "3<|user|>hello<|assistant|>def f1(x):<|user|>how are you?[[return x<|end|>]]",
    ]


def test_markers_around_the_wrong_words_stop_with_a_preview(plain_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(plain_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}"
        "{% if m['role'] == 'tool' %}{% generation %}x{% endgeneration %}{% endif %}{% endfor %}"
    )
    with pytest.raises(SpecctlError, match=r"loss mask .* is empty") as caught:
        encode_sample(tokenizer, chat(), (5,))
    assert "talk:1" in str(caught.value)
    assert "hello" in str(caught.value)


def test_the_prompt_of_a_conversation_ends_where_the_last_answer_begins(
    chat_target: Target, marked_tokenizer: Any, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "p.jsonl", {"messages": list(TALK)})
    ids = list(heldout_prompts(chat_target, 1, path=path)[0].ids)
    full = encode_sample(marked_tokenizer, chat(), (5,))
    starts = [i for i in range(1, len(full.mask)) if full.mask[i] and not full.mask[i - 1]]
    assert ids == full.ids[: starts[-1]]


def test_a_base_model_learns_the_response_of_a_pair(plain_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(plain_tokenizer)
    tokenizer.chat_template = None
    sample = sample_of({"prompt": "hello", "response": " world"}, "x:1")
    encoded = encode_sample(tokenizer, sample, (1,))
    assert predicted(tokenizer, encoded) == [" world<|eos|>"]
    with pytest.raises(SpecctlError, match="no chat template"):
        encode_sample(tokenizer, chat(), (1,))


# -- sources ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "roles"),
    [
        ({"messages": list(TALK)}, ["user", "assistant", "user", "assistant"]),
        ({"prompt": "a", "response": "b"}, ["user", "assistant"]),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            ["user", "assistant"],
        ),
    ],
)
def test_conversations_come_in_the_usual_forms(record: Any, roles: list[str]) -> None:
    assert [m["role"] for m in sample_of(record, "x:1").messages] == roles


def test_bad_lines_are_counted_with_their_place(tmp_path: Path) -> None:
    defects = Defects()
    path = write_lines(
        tmp_path / "a.jsonl", {"text": "one"}, "{broken\n", {"other": 1}, [3], {"text": "two"}
    )
    assert [s.text for s in read(path, defects)] == ["one", "two"]
    assert sum(defects.counts.values()) == 3
    assert any(f"{path}:2" in line for line in defects.lines())


def test_a_folder_of_text_is_one_document_per_file(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    defects = Defects()
    assert [s.text for s in read(tmp_path, defects)] == ["first", "second"]
    assert "c.bin" in defects.lines()[0]


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow.parquet")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(FileError, match=r"after 0 rows") as caught:
        read(tmp_path / "x.parquet")
    assert caught.value.where.endswith("x.parquet")


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbfdef")
    assert [sample.text for sample in read(tmp_path / "x.txt")] == ["def"]


def test_parquet_rows_are_read(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist(
        [{"messages": list(TALK), "category": "a"}, {"messages": list(TALK[:2]), "category": None}]
    )
    parquet.write_table(table, tmp_path / "x.parquet")
    samples = read(tmp_path / "x.parquet")
    assert [len(s.messages) for s in samples] == [4, 2]
    assert [s.domain for s in samples] == ["a", "x"]


def test_a_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    write_lines(tmp_path / "answers.jsonl", {"text": "a"})
    with pytest.raises(FileError, match=r"answers\.jsonl"):
        read(tmp_path / "answer.jsonl")


def test_an_unreachable_hub_is_a_network_error_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    datasets = pytest.importorskip("datasets")

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(NetworkError, match=r"data\.source=corpus needs no network"):
        list(read_samples("owner/name", "auto", "train", 0, Defects()))


# -- the data folder --------------------------------------------------------------------------


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    records = [{"messages": list(TALK), "domain": "ab"[i % 2]} for i in range(6)]
    return write_lines(tmp_path / "talks.jsonl", *records, "broken\n")


def test_prepared_rows_hold_the_masked_words_and_report_what_is_left_out(
    chat_target: Target, talks: Path, tmp_path: Path
) -> None:
    console = SilentReporter()
    data = prepare(recipe(talks, seq_len=96), chat_target, tmp_path, console)
    words = {chat_target.tokenizer.decode(ids) for ids, _ in data.answers()}
    assert words == {"def f1(x):<|end|>return x<|end|>"}
    assert sorted(domain for _, domain in data.answers()) == list("aaabbb")
    assert data.manifest.writer == "source"
    assert any("talks.jsonl:7" in warning for warning in console.warnings)


def test_a_batch_marks_padding_and_predicts_no_first_token(
    chat_target: Target, talks: Path, tmp_path: Path
) -> None:
    data = prepare(recipe(talks, seq_len=96), chat_target, tmp_path)
    batch = data.batch(range(data.num_rows))
    assert not batch.loss_mask_BS[batch.document_BS < 0].any()
    assert not batch.loss_mask_BS[batch.position_BS == 0].any()
    assert int(batch.loss_mask_BS.sum()) == data.manifest.loss_tokens


def test_the_same_settings_reuse_the_rows_and_others_replace_them(
    chat_target: Target, talks: Path, tmp_path: Path
) -> None:
    first = prepare(recipe(talks, seq_len=64), chat_target, tmp_path)
    stamp = (first.folder / first.manifest.file).stat().st_mtime_ns
    again = prepare(recipe(talks, seq_len=64), chat_target, tmp_path)
    assert (again.digest, stamp) == (
        first.digest,
        (again.folder / again.manifest.file).stat().st_mtime_ns,
    )
    other = prepare(recipe(talks, seq_len=48), chat_target, tmp_path)
    assert other.digest != first.digest
    assert [p.name for p in other.folder.glob("rows-*")] == [other.manifest.file]


def test_changed_text_changes_the_digest(chat_target: Target, talks: Path, tmp_path: Path) -> None:
    first = prepare(recipe(talks, seq_len=64), chat_target, tmp_path).digest
    talks.write_text(talks.read_text().replace("hello", "world"))
    assert prepare(recipe(talks, seq_len=64), chat_target, tmp_path).digest != first


def test_damaged_rows_are_never_read(chat_target: Target, talks: Path, tmp_path: Path) -> None:
    data = prepare(recipe(talks), chat_target, tmp_path)
    path = data.folder / data.manifest.file
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    with pytest.raises(IntegrityError, match="sha256"):
        TokenData.open(data.folder)
    path.unlink()
    with pytest.raises(IntegrityError, match="damaged"):
        TokenData.open(data.folder)


def test_data_without_a_usable_line_say_so(chat_target: Target, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "bad.jsonl", "a\n", "b\n")
    with pytest.raises(RecipeError, match=r"2 x line is not JSON.*bad\.jsonl:1"):
        prepare(recipe(path), chat_target, tmp_path)


def test_rows_too_short_for_any_answer_are_an_error(
    chat_target: Target, talks: Path, tmp_path: Path
) -> None:
    with pytest.raises(SpecctlError, match=r"raise train\.seq_len"):
        prepare(recipe(talks, seq_len=8), chat_target, tmp_path)


def test_conversations_without_an_answer_are_left_out_by_name(
    chat_target: Target, tmp_path: Path
) -> None:
    good = {"messages": list(TALK[:2])}
    path = write_lines(tmp_path / "q.jsonl", {"messages": [TALK[0]]}, *[good] * 4)
    console = SilentReporter()
    data = prepare(recipe(path), chat_target, tmp_path, console)
    assert data.manifest.documents == 4
    assert any("no assistant turn" in w and "q.jsonl:1" in w for w in console.warnings)


# -- held-out prompts -------------------------------------------------------------------------


def test_heldout_prompts_take_domains_in_turn(chat_target: Target, tmp_path: Path) -> None:
    records = [{"text": f"a{i}", "domain": "a"} for i in range(3)] + [{"text": "b0", "domain": "b"}]
    path = write_lines(tmp_path / "p.jsonl", *records)
    prompts = heldout_prompts(chat_target, 9, path=path)
    assert [p.text for p in prompts] == ["a0", "b0", "a1", "a2"]
    assert prompts[0].ids == tuple(chat_target.encode("a0"))
    assert [p.text for p in heldout_prompts(chat_target, 2, "a", path)] == ["a0", "a1"]
    with pytest.raises(SpecctlError, match="one of a, b"):
        heldout_prompts(chat_target, 1, "c", path)


def test_heldout_texts_are_turns_of_a_chat_model(tiny_target: Target, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", {"prompt": "hello"})
    chatty = spoken_with(tiny_target)
    [prompt] = heldout_prompts(chatty, 1, path=path)
    assert prompt.ids == tuple(chatty.encode_chat([{"role": "user", "content": "hello"}]))
    assert prompt.text == "hello"
    [raw] = heldout_prompts(chatty, 1, path=path, chat=False)
    assert raw.ids == tuple(chatty.encode("hello"))
    embedded = heldout_prompts(chatty, 2)
    assert all(chatty.tokenizer.decode(p.ids[-2:]) == "<|assistant|>\n" for p in embedded)


def test_a_text_file_is_one_prompt_per_line(chat_target: Target, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.txt", "one\n", "\n", "two\n")
    assert [p.text for p in heldout_prompts(chat_target, 5, path=path)] == ["one", "two"]


def test_the_embedded_prompts_are_balanced(chat_target: Target) -> None:
    prompts = heldout_prompts(chat_target, 10)
    assert [p.domain for p in prompts] == ["code", "docstring"] * 5
    assert prompts == heldout_prompts(chat_target, 10)


def test_a_batch_is_cut_where_all_its_rows_only_pad(
    chat_target: Target, talks: Path, tmp_path: Path
) -> None:
    data = prepare(recipe(talks, seq_len=150), chat_target, tmp_path)
    whole = data.batch(range(data.num_rows))
    assert int((whole.document_BS >= 0).sum()) == data.manifest.tokens
    emptiest = min(
        range(data.num_rows), key=lambda row: int((data.batch([row]).document_BS >= 0).sum())
    )
    assert data.batch([emptiest]).ids_BS.shape[1] < whole.ids_BS.shape[1] <= 150


def test_a_row_length_that_wastes_half_is_told_with_a_better_one() -> None:
    better, fill = better_seq_len([144] * 100, 256)
    assert (better, fill) == (288, 1.0)


def test_the_source_s_own_text_can_be_learned_beside_the_answers(tmp_path, tiny_target):
    source = tmp_path / "text.txt"
    source.write_text("\n".join(f"line {n} says {n * n}" for n in range(400)))
    sets = [f"data.source={source}", "data.prompts=1", "data.new_tokens=8", "train.seq_len=64"]
    sets += ["data.text_tokens=0", "data.train_on_prompt=false"]
    alone = prepare(load_recipe("distill", sets), tiny_target, tmp_path / "alone")
    both = prepare(
        load_recipe("distill", [*sets, "data.text_tokens=600"]), tiny_target, tmp_path / "both"
    )
    assert both.digest != alone.digest
    gained = int(both.batch(range(both.num_rows)).loss_mask_BS.sum()) - 8
    assert gained >= 600 - 32


def test_images_and_their_placeholders_are_left_out_of_text(tmp_path: Path) -> None:
    """Parts of other kinds than text vanish, and so do the strings that data.drop names."""
    parts = [{"type": "image"}, {"type": "text", "text": "hello world"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "how are you"}]
    flat = [{"from": "human", "value": "<image>\nhello world"}, {"from": "gpt", "value": "fine"}]
    records = [{"messages": turns}, {"conversations": flat}]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    read = read_samples(str(file), "auto", "", 0, Defects())
    samples = [without_images(without(s, ["<image>"])) for s in read]
    assert [s.messages[0]["content"] for s in samples] == ["hello world", "hello world"]
    assert without(samples[0], []) is samples[0]
    assert without(Sample("", "", text="a <image> b"), ["<image>"]).text == "a b"
