"""Questions that a chat target writes itself: what is kept, in which order, and when it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specctl.api.preflight import check_run
from specctl.core.errors import FileError, RecipeError
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import DataPart, Recipe, TrainPart
from specctl.runtime.measure.reporter import Advance, SilentReporter
from specctl.runtime.target.target import Target
from specctl.train.data.prepare import (
    prepare,
    rows_digest,
    with_questions,
    write_answers_alone,
)
from specctl.train.data.prompts.answers import AnswerPlan
from specctl.train.data.sources.self_source import FILE
from specctl.train.data.sources.sources import check_source
from specctl.train.data.written import regenerate as engine_module
from specctl.train.data.written.self_prompts import (
    ENDLESS,
    OTHER,
    REPEATED,
    Attempt,
    Questions,
    is_long_enough,
    opening_of,
    words_of,
    write_self_prompts,
)
from specctl.train.distributed.ranks import Ranks
from specctl.train.planning.data_shares import source_shares, tokens_in
from specctl.train.planning.work import QUESTIONS, WorkSizes, work_of
from specctl.train.runs.kept import kept_in
from specctl.train.vocab.draft_vocab import recipe_samples
from specctl_testing.runtime.chat_targets import TEMPLATE, spoken_with
from specctl_testing.train.of_recipe import preparation_of

PLAN = AnswerPlan(10, 48, 16, temperature=0.8, greedy_share=0.5, seed=3, longest=112)


class Talk(SilentReporter):
    """Keeps what was said; interrupts the job after so many questions."""

    def __init__(self, dies_after: int | None = None) -> None:
        super().__init__()
        self.said: list[str] = []
        self.left, self.total = dies_after, 0

    def say(self, text: str) -> None:
        self.said.append(text)

    @contextmanager
    def task(self, label: str, total: int, unit: str) -> Iterator[Advance]:
        def advance(amount: int, note: str = "") -> None:
            if self.left is not None:
                self.left -= amount
                if self.left < 0:
                    raise KeyboardInterrupt

        self.total = total
        yield advance


@pytest.fixture(scope="module")
def chatty(chat_target: Target) -> Target:
    """A random model that is spoken to by a template and ends two turns of three."""
    return spoken_with(chat_target)


@pytest.fixture(scope="module")
def written(chatty: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten questions of it."""
    return write_self_prompts(chatty, 10, PLAN, tmp_path_factory.mktemp("ten"), SilentReporter())


def recipe(source: Any, **data: Any) -> Recipe:
    fields = {"prompts": 6, "new_tokens": 8, "seed": 3, **data}
    return Recipe(data=DataPart(source=source, **fields), train=TrainPart(seq_len=128))


def texts_of(path: Path) -> list[str]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line["category"] for line in lines)
    return [message["content"] for line in lines for message in line["messages"]]


# -- what is written -------------------------------------------------------------------------------


def test_the_target_goes_on_where_its_template_lets_a_user_speak(chatty: Target) -> None:
    opening = opening_of(chatty, PLAN)
    assert chatty.tokenizer.decode(opening.ids) == "<|user|>\n"
    assert (opening.stop_ids, opening.stop) == ((), ())  # <|end|> is an end of the target's own


def test_as_many_questions_are_kept_as_were_wanted(chatty: Target, written: Path) -> None:
    texts = texts_of(written)
    assert len(texts) == 10
    assert written.name == FILE
    assert all(is_long_enough(text) and text == text.strip() for text in texts)
    assert not any("<|" in text for text in texts)


def test_questions_do_not_depend_on_which_row_ended_first(
    chatty: Target, written: Path, tmp_path: Path
) -> None:
    alone = write_self_prompts(chatty, 10, PLAN, tmp_path, SilentReporter(), batch=1)
    assert alone.read_bytes() == written.read_bytes()


def test_another_seed_gives_other_questions(chatty: Target, written: Path, tmp_path: Path) -> None:
    other = write_self_prompts(chatty, 10, replace(PLAN, seed=4), tmp_path, SilentReporter())
    assert not set(texts_of(other)) & set(texts_of(written))


def test_a_killed_job_goes_on_where_it_was(chatty: Target, written: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_self_prompts(chatty, 10, PLAN, tmp_path, Talk(dies_after=5))
    assert not (tmp_path / FILE).exists()
    (journal,) = tmp_path.rglob("answers-*.bin")
    before = journal.read_bytes()
    console = Talk()
    path = write_self_prompts(chatty, 10, PLAN, tmp_path, console)
    assert path.read_bytes() == written.read_bytes()
    assert console.said[0] == "self: 6 of 10 questions are written"  # the sixth was kept, too
    assert console.total == 4
    assert journal.read_bytes()[: len(before)] == before


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
def test_a_torn_journal_costs_what_was_torn_off(
    chatty: Target, written: Path, tmp_path: Path, share: float
) -> None:
    write_self_prompts(chatty, 10, PLAN, tmp_path, SilentReporter())
    (journal,) = tmp_path.rglob("answers-*.bin")
    body = journal.read_bytes()
    journal.write_bytes(body[: int(share * len(body))])
    path = write_self_prompts(chatty, 10, PLAN, tmp_path, SilentReporter())
    assert path.read_bytes() == written.read_bytes()
    assert journal.stat().st_size >= len(body)


def test_what_is_written_is_read_without_the_engine(
    chatty: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Talk()
    path = write_self_prompts(chatty, 10, PLAN, tmp_path, console)
    ten, changed = texts_of(path), path.stat().st_mtime_ns
    assert console.said[-1].startswith("self: 10 questions written by the target (")
    monkeypatch.setattr(engine_module.Engine, "step", None)
    silent = Talk()
    assert write_self_prompts(chatty, 10, PLAN, tmp_path, silent) == path
    assert (path.stat().st_mtime_ns, silent.said) == (changed, [])
    assert texts_of(write_self_prompts(chatty, 4, PLAN, tmp_path, silent)) == ten[:4]


def test_more_questions_begin_with_those_that_are_there(
    chatty: Target, written: Path, tmp_path: Path
) -> None:
    write_self_prompts(chatty, 4, PLAN, tmp_path, SilentReporter())
    console = Talk()
    more = write_self_prompts(chatty, 10, PLAN, tmp_path, console)
    assert more.read_bytes() == written.read_bytes()
    assert console.total == 6


def test_words_of_a_user_end_where_the_template_goes_on(chatty: Target, tmp_path: Path) -> None:
    """<|end|> is no end of this target's texts: its template alone says that it ends a turn."""
    other = replace(chatty, eos_ids=(1,))
    end = chatty.tokenizer.convert_tokens_to_ids("<|end|>")
    assert opening_of(other, PLAN).stop_ids == (end,)
    texts = texts_of(write_self_prompts(other, 6, PLAN, tmp_path, SilentReporter()))
    assert not any("<|end|>" in text for text in texts)


def test_an_end_in_plain_words_is_cut_off(chat_target: Target, tmp_path: Path) -> None:
    plain = "{% for m in messages %}[INST] {{ m.content }} e\n{% endfor %}"
    target = replace(spoken_with(chat_target, plain), eos_ids=(1,))
    opening = opening_of(target, PLAN)
    assert (target.tokenizer.decode(opening.ids), opening.stop) == ("[INST]", ("e",))
    texts = texts_of(write_self_prompts(target, 4, PLAN, tmp_path, SilentReporter()))
    assert not any("e" in text for text in texts)


# -- what is kept ----------------------------------------------------------------------------------


def test_what_was_said_before_is_dropped() -> None:
    questions = Questions()
    said = [
        "What is the capital of France?",
        "what is  the capital of FRANCE",  # case, blanks and punctuation do not count
        "Can you write a short story about a dog that flies?",
        "Can you write a short story about a cat?",  # the same eight words
        "What is the capital of Spain?",
    ]
    for text in said:
        questions.add(Attempt(text, ""))
    questions.add(Attempt("And then it went on and", ENDLESS))
    assert questions.texts == [said[0], said[2], said[4]]
    assert questions.dropped == {REPEATED: 2, ENDLESS: 1}
    summary = questions.summary()
    assert "3 questions written by the target (3 dropped: 2 said before, 1 did not end)" in summary
    assert '"what is" 67%' in summary


def test_categories_are_how_several_questions_begin() -> None:
    """Whoever counts tokens by category keeps a vocabulary of each: rare ones are one together."""
    numbers = [f"Can you add {i}?" for i in range(60)]
    questions = Questions(numbers + [f"word{i} is rare" for i in range(40)])
    found = [record["category"] for record in questions.records()]
    assert found == ["can you"] * 60 + [OTHER] * 40


@pytest.mark.parametrize(
    ("text", "is_kept"),
    [
        ("Why not?", True),
        ("Why?", False),
        ("? !", False),
        ("", False),
        ("\u4eca\u5929\u5929\u6c14\u600e\u4e48\u6837", True),  # Chinese, without blanks
        ("\u4eca", False),
    ],
)
def test_a_question_has_two_words_or_letters_that_stand_for_them(text: str, is_kept: bool) -> None:
    assert is_long_enough(text) == is_kept


def test_an_apostrophe_is_inside_a_word() -> None:
    assert words_of("I'm HERE, isn\u2019t it?") == ["i'm", "here", "isn\u2019t", "it"]


# -- in a run --------------------------------------------------------------------------------------


def test_the_questions_are_answered_and_the_rows_of_a_finished_run_stay(
    chatty: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = prepare(recipe("self"), chatty, tmp_path)
    assert len(texts_of(tmp_path / "data" / FILE)) == 6
    assert (data.manifest.writer, data.manifest.documents) == ("target", 6)
    assert "written questions, written answers" in (kept_in(tmp_path) or "")
    monkeypatch.setattr(engine_module.Engine, "step", None)
    assert rows_digest(preparation_of(recipe("self"), chatty), tmp_path) == data.digest
    console = Talk()
    assert prepare(recipe("self"), chatty, tmp_path, console).digest == data.digest
    assert [text.split(" ")[1] for text in console.said] == ["reusing"]
    samples = list(recipe_samples(recipe("self").data, tmp_path / "data"))
    assert [s.messages[0]["content"] for s in samples] == texts_of(tmp_path / "data" / FILE)
    (tmp_path / "data" / FILE).unlink()
    with pytest.raises(FileError, match="questions that the target wrote are gone"):
        rows_digest(preparation_of(recipe("self"), chatty), tmp_path)


def test_self_writes_what_other_sources_lack(chatty: Target, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"hello {i}"}) + "\n" for i in range(4)))
    console = Talk()
    answers = write_answers_alone(
        preparation_of(recipe((str(file), "self")), chatty), tmp_path / "a", console
    )
    assert len(texts_of(tmp_path / "a" / "data" / FILE)) == 2
    asked = {a.prompt.dialogue.messages[0]["content"] for a in answers if a.prompt.dialogue}
    assert asked == {*(f"hello {i}" for i in range(4)), *texts_of(tmp_path / "a" / "data" / FILE)}
    assert [a.prompt.is_question for a in answers].count(True) == 2
    few = recipe((str(file), "self"), prompts=3)
    assert len(write_answers_alone(preparation_of(few, chatty), tmp_path / "b", console)) == 3
    assert (tmp_path / "b" / "data" / FILE).read_text() == ""
    assert any("self writes nothing" in text for text in console.warnings)


def test_other_sources_are_checked_before_a_question_is_written(
    chatty: Target, tmp_path: Path
) -> None:
    file = tmp_path / "chats.jsonl"
    bad = json.dumps({"messages": [{"role": "narrator", "content": "x y"}]}) + "\n"
    file.write_text(json.dumps({"prompt": "hello"}) + "\n" + 9 * bad)
    with pytest.raises(RecipeError, match="90% of the records"):
        prepare(recipe((str(file), "self")), chatty, tmp_path / "run")
    assert not list(tmp_path.rglob("answers-*.bin"))
    file.write_text(json.dumps({"prompt": "hello", "passage": "of other words"}) + "\n")
    with pytest.raises(RecipeError, match="passage"):
        prepare(recipe((str(file), "self")), chatty, tmp_path / "run")
    ignoring = recipe((str(file), "self"), ignore=("passage",), prompts=2)
    assert prepare(ignoring, chatty, tmp_path / "run").manifest.documents == 2


def test_a_file_of_that_name_is_pointed_out(
    chatty: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "self").write_text("hello world\n")
    console = SilentReporter()
    write_self_prompts(chatty, 1, PLAN, tmp_path / "out", console)
    assert console.warnings == ["data: self is what the target writes; what lies here is ./self"]
    check_source("./self", "auto")


def test_one_process_writes_and_the_others_read(chatty: Target, tmp_path: Path) -> None:
    class Second(Ranks):
        def gather(self, value: Any) -> list[Any]:
            return [value]  # the first rank is not running: it came before

    second = Second(1, 2)
    about = (preparation_of(recipe("self"), chatty), tmp_path, SilentReporter())
    with pytest.raises(FileError):
        with_questions(*about, second)
    first = with_questions(*about, Ranks())
    assert first.source == (str(tmp_path / FILE),)
    assert with_questions(*about, second) == first


def test_a_plan_knows_the_source_and_that_it_takes_time() -> None:
    check_source(("self",), "auto")
    (share,) = source_shares(DataPart(source="self"))
    assert (share.what, share.bytes) == ("questions that the target writes itself", None)
    assert tokens_in(DataPart(source="self")) > 0
    wanted, sizes = recipe("self"), WorkSizes(100, 10, 10, 1, True, 4)
    works = {w.name: w for w in work_of(wanted.data, wanted.train, sizes, 1000)}
    assert works[QUESTIONS].writing > 0
    assert works[QUESTIONS].amount == "6 questions"


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"regenerate": False}, "regenerate: false"),
        ({"endpoint": "http://a:8000"}, "data.endpoint: http://a:8000"),
        (
            {"endpoint": "http://a", "target_source": "endpoint", "states": "http://b"},
            "data.target_source: endpoint",
        ),
        ({"format": "csv"}, "data.format: csv"),
    ],
)
def test_a_recipe_in_which_nobody_would_write_is_refused_before_anything_is_loaded(
    fields: dict[str, Any], found: str, tmp_path: Path
) -> None:
    for source in ("self", ("corpus", "self")):
        with pytest.raises(RecipeError) as caught:
            check_run(recipe(source, **fields), tmp_path / "run")
        assert found in caught.value.found
        assert caught.value.expected
        assert caught.value.do


def test_a_target_that_is_no_chat_model_is_refused(chat_target: Target, tmp_path: Path) -> None:
    for target in (chat_target, spoken_with(chat_target, None)):
        with pytest.raises(RecipeError, match="no chat model") as caught:
            prepare(recipe("self"), target, tmp_path)
        assert caught.value.found == target.why_text


def test_a_target_that_cannot_be_decoded_with_is_refused(
    chatty: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(chatty.lm), "can_run", False)
    with pytest.raises(RecipeError, match="writes no questions"):
        write_answers_alone(preparation_of(recipe("self"), chatty), tmp_path, SilentReporter())


def test_a_template_that_writes_other_words_than_the_user_s_is_refused(
    chatty: Target, tmp_path: Path
) -> None:
    loud = spoken_with(chatty, TEMPLATE.replace("m.content", "m.content | upper"))
    with pytest.raises(RecipeError, match="no place where a user speaks"):
        prepare(recipe("self"), loud, tmp_path)


def test_a_target_that_ends_no_turn_is_refused(chatty: Target, tmp_path: Path) -> None:
    endless = replace(spoken_with(chatty, TEMPLATE.replace("<|end|>", "")), eos_ids=())
    few = replace(PLAN, longest=40)
    with pytest.raises(RecipeError, match="does not write questions") as caught:
        write_self_prompts(endless, 3, few, tmp_path, SilentReporter())
    assert "0 of 32 attempts; 32 dropped: 32 did not end" in caught.value.found


def test_fewer_questions_than_wanted_are_warned_of(chatty: Target, tmp_path: Path) -> None:
    console = SilentReporter()
    short = replace(PLAN, longest=33)  # most attempts are longer than the room for them
    path = write_self_prompts(chatty, 20, short, tmp_path, console)
    assert 2 <= len(texts_of(path)) < 20
    assert "of 20 questions were found" in console.warnings[0]


def test_rows_without_room_for_a_question_are_refused(chatty: Target) -> None:
    with pytest.raises(RecipeError, match="no room for a question") as caught:
        opening_of(chatty, replace(PLAN, longest=20))
    assert caught.value.where == "train.seq_len"


def test_who_would_train_a_chat_model_on_files_is_offered_questions(
    chatty: Target, tmp_path: Path
) -> None:
    sets = ["data.prompts=1", "data.new_tokens=4", "train.seq_len=64", "data.text_tokens=0"]
    with pytest.raises(RecipeError, match="on Python files") as caught:
        prepare(load_recipe("eagle3", sets), chatty, tmp_path)
    assert "--data self, questions that the target writes itself" in caught.value.do
    with pytest.raises(RecipeError, match="on Python files") as caught:
        prepare(load_recipe("fastdraft", ["train.seq_len=64"]), chatty, tmp_path)
    assert "--data self" not in caught.value.do  # the recipe lets nobody answer them
