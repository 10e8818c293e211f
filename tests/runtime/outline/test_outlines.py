"""Answers from outlines: what is read as an outline, which rows are written at once and what each
reads, texts against those of the rows alone, the exact ends, limits, stops, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

import specctl
from specctl.core.errors import IncompatibleError, RecipeError, SpecctlError
from specctl.drafters.training_free.prompt_lookup import PromptLookup, PromptLookupOptions
from specctl.runtime.generate import Generated, generate
from specctl.runtime.outline import answer as planned
from specctl.runtime.outline.answer import OutlinedAnswer, Outlining
from specctl.runtime.outline.parse import Outline, read_outline
from specctl.runtime.outline.row_text import ids_behind, plain_ids
from specctl.runtime.outline.writer import Chat, encoder_of, write_outlined
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl_testing.runtime.byte_fallback import byte_fallback_tokenizer
from specctl_testing.runtime.scripted import LIST, TEXTS, Script, scripted, with_blanks_stripped

QUESTION = "How do trees grow?"
TURNS = ({"role": "user", "content": QUESTION},)
WHOLE = "\n\n".join(TEXTS.values())
GREEDY = Sampling(max_new_tokens=200)


def answered(
    script: Script, how: Outlining, sampling: Sampling = GREEDY, **more: Any
) -> tuple[Generated, Any]:
    target, lm = scripted(script)
    return write_outlined(target, [chat_of(target)], how, sampling=sampling, **more), lm


def chat_of(target: Target, turns: Sequence[Any] = TURNS) -> Chat:
    return Chat(tuple(turns), tuple(target.encode_chat(turns)), QUESTION)


# -- outlines --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "titles"),
    [
        (LIST, ["Roots", "The trunk", "Leaves"]),
        ("1. **Roots**\n\n 2) Trunk\n\nThat is it.\n3. No", ["Roots", "Trunk"]),
        ("1. a\n2. b\n3. c\n4. d\n5. e", ["a", "b", "c", "d"]),  # four are wanted
        ("1. a\n2. b\n4. d", ["a", "b"]),
        ("1. a\n2. b\n3. A\n4. c", ["a", "b"]),
        (f"1. a\n2. b\n3. {'x' * 121}", ["a", "b"]),
        ("1. a\n- b", None),
        ("1. a\n1. b", None),
        ("2. a\n3. b", None),
        ("Here it is:\n1. a\n2. b", None),
        ("", None),
    ],
)
def test_an_outline_is_a_list_numbered_from_one(text: str, titles: list[str] | None) -> None:
    found = read_outline(text, 4, is_graph=False)
    assert (None if found is None else [point.title for point in found.points]) == titles
    if found is not None:
        assert found.waves == (tuple(range(1, len(found.points) + 1)),)


def test_the_last_line_of_a_text_that_broke_off_is_not_read() -> None:
    cut = read_outline("1. a\n2. b\n3. and", 4, is_graph=False, is_cut=True)
    assert cut is not None
    assert str(cut) == "1. a\n2. b"


@pytest.mark.parametrize(
    ("needs", "waves", "why"),
    [
        (("none", "none", "1,2", "none", "3"), ((1, 2, 4), (3,), (5,)), None),
        (("none", "1", "2; difficulty: 5"), ((1,), (2,), (3,)), None),
        (("none", "1", "7"), None, "point 3 needs point 7"),
        (("none", "2"), None, "point 2 needs point 2"),
        (("2", "1"), None, "point 1 needs point 2"),
        (("none", None, "1"), None, "point 2 does not say"),
    ],
)
def test_points_of_a_graph_wait_for_what_they_need(needs: Any, waves: Any, why: str | None) -> None:
    """Where that is no graph, each waits for all in front of it."""
    said = ["" if one is None else f" (needs: {one})" for one in needs]
    found = read_outline("\n".join(f"{i}. t{i}{n}" for i, n in enumerate(said, 1)), 9, True)
    assert found is not None
    assert [point.title for point in found.points] == [f"t{i}" for i in range(1, len(needs) + 1)][
        : len(found.points)
    ] or why == "point 2 does not say"
    if why is None:
        assert (found.waves, found.why_sequential) == (waves, None)
        return
    assert why in str(found.why_sequential)
    assert found.waves == tuple((point.number,) for point in found.points)
    assert [point.needs for point in found.points] == [
        tuple(range(1, point.number)) for point in found.points
    ]


# -- answers ---------------------------------------------------------------------------------------


def test_all_points_are_rows_of_one_batch_and_come_in_order() -> None:
    """A row that goes on with the next point ends there."""
    texts = {**TEXTS, 1: TEXTS[1] + "\n2. The trunk: I write it, too."}
    script, shown, rounds = Script(LIST, texts), list[int](), list[int]()
    made, lm = answered(
        script,
        Outlining("skeleton"),
        on_tokens=lambda index, new: shown.extend(new),
        on_round=lambda index, new, accepted: rounds.append(len(new)),
    )
    [output] = made.outputs
    assert (output.text, output.finish_reason, output.prompt) == (WHOLE, "eos", QUESTION)
    assert tuple(shown) == output.token_ids
    assert sum(rounds) == len(shown)
    assert made.stats.verification == "approximate:skeleton"
    assert max(lm.widths) == 3
    assert all("What is written so far" not in prompt for prompt in script.prompts.values())
    assert all(LIST in prompt and QUESTION in prompt for prompt in script.prompts.values())
    report = output.outline
    assert report is not None
    assert (report.titles, report.waves) == (("Roots", "The trunk", "Leaves"), ((1, 2, 3),))
    assert (report.why_plain, report.why_sequential) == (None, None)
    assert report.tokens == made.stats.tokens > report.outline_tokens > 0
    assert output.to_json()["outline"]["points"] == 3


def test_an_outline_that_repeats_itself_is_not_written_on() -> None:
    """Its budget goes to the points; with drafts, tokens behind the list's end do not count."""
    script = Script(LIST + "\n4. Roots\n5. Roots" * 20, TEXTS)
    made, _ = answered(script, Outlining("skeleton"), Sampling(max_new_tokens=900))
    target, _ = scripted(script)
    read = target.encode("1" + LIST[1:] + "\n4. Roots\n")
    report = made.outputs[0].outline
    assert report is not None
    assert len(report.titles) == 3
    assert report.outline_tokens <= len(read)
    one = OutlinedAnswer(
        TURNS, (1,), GREEDY, Outlining("skeleton"), lambda turns, begun: ([1], []), 99
    )
    assert one.add_outline([" a\n", "2. b\n", "3. a", "\n", "4. c", "\n"])
    assert one.outline_tokens == 4


def test_a_point_of_a_graph_reads_the_texts_that_it_needs() -> None:
    listed = (
        "1. Roots (needs: none)\n2. The trunk (needs: none; difficulty: 2)\n3. Leaves (needs: 2)"
    )
    script = Script(listed, TEXTS)
    made, lm = answered(script, Outlining("skeleton-graph"))
    [output] = made.outputs
    assert output.text == WHOLE
    assert made.stats.verification == "approximate:skeleton-graph"
    assert output.outline is not None
    assert output.outline.waves == ((1, 2), (3,))
    assert max(lm.widths) == 2
    assert TEXTS[2] in script.prompts[3]
    assert TEXTS[1] not in script.prompts[3]
    assert "What is written so far" not in script.prompts[2]
    undeclared = Script(LIST, TEXTS)
    made, lm = answered(undeclared, Outlining("skeleton-graph"))
    assert made.outputs[0].text == WHOLE
    assert max(lm.widths) == 1
    assert "\n\n".join((TEXTS[1], TEXTS[2])) in undeclared.prompts[3]
    assert "point 1 does not say" in str(made.outputs[0].outline and made.outputs[0].outline)


def test_texts_go_on_from_how_they_begin_where_tokenizers_strip_blanks() -> None:
    """The blank behind `1.` and behind a heading is of the text, as in SentencePiece."""
    target, _ = scripted(script := Script("1. Roots (needs: none)\n2. Leaves (needs: 1)", TEXTS))
    script.texts = {1: TEXTS[1], 2: "2. Leaves: they eat light."}
    target = with_blanks_stripped(target)
    how = Outlining("skeleton-graph")
    [output] = write_outlined(target, [chat_of(target)], how, sampling=GREEDY).outputs
    assert output.text == "\n\n".join(script.texts.values())
    assert TEXTS[1] in script.prompts[2]


def test_headings_behind_text_have_no_blank_that_a_tokenizer_adds(tiny_target: Target) -> None:
    """As those of Llama 2 do: `\\n\\n2.` alone would be encoded with a blank in front."""
    text = "\n\n2. end words"
    assert ids_behind(tiny_target, text) == plain_ids(tiny_target, text)
    target = replace(tiny_target, tokenizer=byte_fallback_tokenizer())
    front = plain_ids(target, "then")
    assert target.decode([*front, *plain_ids(target, text)]) == "then " + text
    assert target.decode([*front, *ids_behind(target, text)]) == "then" + text


def test_a_smaller_model_writes_the_points_that_are_easy() -> None:
    """Beside the target's, in one wave; greedily each text is that of the model that writes it."""
    listed = (
        "1. Roots (needs: none; difficulty: 2)\n2. The trunk (needs: none; difficulty: 3)\n"
        "3. Leaves (needs: 1; difficulty: 1)"
    )
    theirs = {number: text + " Simply." for number, text in TEXTS.items()}
    script, (small, lm) = Script(listed, TEXTS), scripted(Script("", theirs))
    how = Outlining("skeleton-graph", small=small)
    made, _ = answered(script, how)
    [output] = made.outputs
    assert output.text == "\n\n".join((theirs[1], TEXTS[2], theirs[3]))
    assert output.outline is not None
    assert output.outline.small == (1, 3)
    assert output.outline.waves == ((1, 2), (3,))
    assert output.to_json()["outline"]["small"] == [1, 3]
    assert set(script.prompts) == {2}
    assert lm.widths
    stopped, _ = answered(script, how, Sampling(max_new_tokens=200, stop=("Simply",)))
    assert stopped.outputs[0].text == TEXTS[1] + " "
    for hard, wanted in ((1, WHOLE), (6, "\n\n".join(theirs.values()))):
        made, _ = answered(script, Outlining("skeleton-graph", small=small, hard=hard))
        assert made.outputs[0].text == wanted


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new_tokens=60),
        Sampling(temperature=0.9, seed=3, max_new_tokens=60, top_p=0.9),
        Sampling(max_new_tokens=60, repetition_penalty=1.2, stop=("qq",)),
    ],
    ids=["greedy", "drawn", "penalty"],
)
def test_every_point_is_what_the_target_writes_behind_its_own_prompt(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch, sampling: Sampling
) -> None:
    """Also with drafts. The outline is given: the target is too small to write one."""
    outline = read_outline("1. def add\n2. class Tree\n3. import os", 8, is_graph=False)
    assert outline is not None
    monkeypatch.setattr(planned, "read_outline", lambda *given: outline)
    how, chat = Outlining("skeleton"), chat_of(tiny_target)
    made = write_outlined(tiny_target, [chat], how, sampling=sampling)
    one = OutlinedAnswer(chat.turns, chat.tokens, sampling, how, encoder_of(tiny_target), 512)
    report = made.outputs[0].outline
    assert report is not None
    one.add_outline([""] * report.outline_tokens)
    one.take_outline(is_cut=False)
    wanted = list[str]()
    for part in one.parts(outline.waves[0]):
        alone = generate(tiny_target, [part.tokens], sampling=part.sampling)
        wanted.append(outline.points[part.number - 1].heading + alone.outputs[0].text)
    assert len(set(wanted)) == 3
    assert made.outputs[0].text == "\n\n".join(wanted)
    if sampling.temperature == 0:
        drafter = PromptLookup(PromptLookupOptions(), tiny_target.spec)
        drafting = {"drafter": drafter, "policy": make_policy({"policy": "direct"})}
        drafted = write_outlined(tiny_target, [chat], how, sampling=sampling, **drafting)
        assert drafted.outputs == made.outputs
        assert drafted.stats.accepted > 0


@pytest.mark.parametrize(
    ("kind", "points", "sampling"),
    [
        ("skeleton", 8, Sampling(max_new_tokens=34)),
        ("skeleton-graph", 8, Sampling(temperature=0.9, seed=3, max_new_tokens=34)),
        ("skeleton", 1, Sampling(temperature=0.9, seed=3, max_new_tokens=34)),
        ("skeleton-graph", 1, Sampling(max_new_tokens=34, stop=("self",))),
    ],
)
def test_without_an_outline_the_answer_is_the_plain_one(
    tiny_target: Target, kind: str, points: int, sampling: Sampling
) -> None:
    """The target writes none, or none is wanted; an answer before makes no difference."""
    turns = [TURNS, ({"role": "user", "content": "class Tree:\n    def add("},)]
    chats = [chat_of(tiny_target, one) for one in turns]
    plain = generate(tiny_target, [chat.tokens for chat in chats], sampling=sampling)
    shown = [list[int](), list[int]()]
    made = write_outlined(
        tiny_target,
        chats,
        Outlining(kind, points),
        sampling=sampling,
        on_tokens=lambda index, new: shown[index].extend(new),
    )
    for ours, theirs, ids in zip(made.outputs, plain.outputs, shown, strict=True):
        assert ours.text == theirs.text
        assert ours.token_ids == theirs.token_ids == tuple(ids)
        assert ours.finish_reason == theirs.finish_reason
        assert ours.outline is not None
        assert ours.outline.why_plain
        extra = ours.outline.tokens - len(theirs.token_ids)
        assert extra == ours.outline.outline_tokens
        assert (extra == 0) == (points == 1)


def test_what_the_context_has_no_room_for_is_left_out() -> None:
    """A prompt that fits is answered, though not all that is requested beside it fits."""
    listed = "1. Roots (needs: none)\n2. The trunk (needs: none)\n3. Leaves (needs: 1)"
    target, lm = scripted(Script(listed, {**TEXTS, 1: TEXTS[1] + " more" * 300}))
    chat, how, most = chat_of(target), Outlining("skeleton-graph"), Sampling(max_new_tokens=3000)
    one = OutlinedAnswer(chat.turns, chat.tokens, most, how, encoder_of(target), 4096)
    requested = one.outline_part()
    assert requested is not None
    lm.spec = replace(lm.spec, max_positions=len(requested.tokens) + 99)
    [output] = write_outlined(target, [chat], how, sampling=most).outputs
    first, *others = output.text.split("\n\n")
    assert first.startswith(TEXTS[1] + " more more")
    assert others == [TEXTS[2], "3. Leaves:"]
    assert output.finish_reason == "context"
    lm.spec = replace(lm.spec, max_positions=len(requested.tokens))
    [output] = write_outlined(target, [chat], how, sampling=most).outputs
    assert output.text == "They do."
    assert "no room" in str(output.outline)


def test_the_points_share_what_the_outline_leaves() -> None:
    long = {
        n: f"{n}. " + {1: "Roots", 2: "The trunk", 3: "Leaves"}[n] + ":" + " word" * 99
        for n in TEXTS
    }
    made, _ = answered(Script(LIST, long), Outlining("skeleton"), Sampling(max_new_tokens=80))
    [output] = made.outputs
    report = output.outline
    assert report is not None
    assert output.finish_reason == "length"
    share = (80 - report.outline_tokens) // 3
    assert report.tokens == report.outline_tokens + 3 * share
    assert output.text.count("word") > 3
    short, _ = answered(Script(LIST, TEXTS), Outlining("skeleton"), Sampling(max_new_tokens=30))
    assert short.outputs[0].text == "They do."
    assert "too short" in str(short.outputs[0].outline)


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("rises", "1. Roots: they drink.\n\n2. The trunk: it "),
        ("\n\n2.", "1. Roots: they drink."),
        (".\n\n3", "1. Roots: they drink.\n\n2. The trunk: it rises"),
        ("they", "1. Roots: "),
        ("never", WHOLE),
    ],
)
@pytest.mark.parametrize("kind", ["skeleton", "skeleton-graph"])
def test_a_stop_string_ends_the_answer_wherever_it_stands(stop: str, text: str, kind: str) -> None:
    """In a point, in a heading, across both; what is behind it is written in vain at most."""
    long = {**TEXTS, 3: TEXTS[3] + " more" * 60}
    texts = TEXTS if stop == "never" else long
    sampling = Sampling(max_new_tokens=400, stop=(stop,))
    shown = list[int]()
    made, _ = answered(
        Script(LIST, texts),
        Outlining(kind),
        sampling,
        on_tokens=lambda index, new: shown.extend(new),
    )
    [output] = made.outputs
    assert output.text == text
    assert output.finish_reason == ("eos" if stop == "never" else "stop")
    assert tuple(shown) == output.token_ids
    assert output.outline is not None
    assert output.outline.tokens == made.stats.tokens
    if stop != "never":
        assert made.stats.tokens < 80  # the last point was cancelled


def test_a_heading_ends_like_a_sentence_or_with_a_colon() -> None:
    found = read_outline("1. Roots\n2. They drink.\n3. Why? (a guess)", 8, is_graph=False)
    assert isinstance(found, Outline)
    headings = [point.heading for point in found.points]
    assert headings == ["1. Roots:", "2. They drink.", "3. Why? (a guess):"]


def test_rows_reuse_what_was_read_of_the_conversation(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first point goes on in the slot of the outline, and waves in those of others."""
    from specctl.runtime.engine.scheduler import Scheduler

    text = "1. a b (needs: none)\n2. c d (needs: none)\n3. e f (needs: 1)\n4. g h (needs: 2)"
    outline = read_outline(text, 8, is_graph=True)
    monkeypatch.setattr(planned, "read_outline", lambda *given: outline)
    reused, take = list[int](), Scheduler._take_slot

    def taken(scheduler: Any, *given: Any) -> Any:
        progress = take(scheduler, *given)
        reused.append(progress.row.reused_len)
        return progress

    monkeypatch.setattr(Scheduler, "_take_slot", taken)
    chat = chat_of(tiny_target, ({"role": "user", "content": QUESTION * 20},))
    write_outlined(
        tiny_target, [chat], Outlining("skeleton-graph"), sampling=Sampling(max_new_tokens=40)
    )
    first, *points = reused
    assert first == points[1] == 0
    assert points[0] >= len(chat.tokens) - 4
    assert min(points[2:]) > points[0]


# -- refusals --------------------------------------------------------------------------------------


def test_what_speaks_of_one_text_is_refused(tiny_target: Target) -> None:
    wrong: list[dict[str, Any]] = [
        {"kind": "skeletons"},
        {"kind": "skeleton", "points": 0},
        {"kind": "skeleton", "small": tiny_target},
        {"kind": "skeleton-graph", "small": tiny_target, "hard": 7},
    ]
    for given in wrong:
        with pytest.raises(RecipeError, match="outline"):
            Outlining(**given)
    with pytest.raises(RecipeError, match="skeleton-graph"):
        specctl.generate(tiny_target, QUESTION, chat=True, outline=True)  # type: ignore[arg-type]
    other = Outlining("skeleton-graph", small=replace(tiny_target, tokenizer_fingerprint="other"))
    with pytest.raises(IncompatibleError, match="same tokens"):
        write_outlined(tiny_target, [], other)
    noop = Sampling(processors=(lambda ids, scores: scores,))
    with pytest.raises(IncompatibleError, match="processors"):
        write_outlined(tiny_target, [], Outlining("skeleton"), sampling=noop)
    for prompts, more in ((QUESTION, {"chat": False}), ([[5, 6, 7]], {})):
        with pytest.raises(IncompatibleError, match="in chats"):
            specctl.generate(tiny_target, prompts, outline="skeleton", **more)  # type: ignore[arg-type]
    with pytest.raises(SpecctlError, match="beside the target"):
        specctl.generate(
            tiny_target, QUESTION, "prompt-lookup", chat=True, outline="skeleton", parallel=True
        )
