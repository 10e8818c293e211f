"""What is learned of a conversation is what the target would be asked for, whatever its chat
template does to thoughts, system messages, dates and calls of tools."""

from __future__ import annotations

import copy
import datetime
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specctl.core.errors import RecipeError
from specctl.recipes.load import load_recipe, with_fields
from specctl.recipes.schema import DataPart, Recipe, TrainPart
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.target.target import Target
from specctl.runtime.target.templates.chat_turns import as_taken, call_form, written_on
from specctl.train.data.prepare import prepare
from specctl.train.data.prompts.answers import AnswerPlan, Dialogue
from specctl.train.data.prompts.prompts import cut_prompts, prompt_key
from specctl.train.data.records.chat import answerable, encode_sample, preview, render
from specctl.train.data.records.records import Sample, sample_of
from specctl.train.data.sources.defects import Defects
from specctl.train.data.written.regenerate import answers_digest
from specctl_testing.runtime.chat_targets import spoken_with

END = 5  # <|end|>
ASK, MORE = {"role": "user", "content": "hello"}, {"role": "user", "content": "how are you?"}
ONE = {"role": "assistant", "content": "<think>\nwell\n</think>\n\nworld"}
TWO = {"role": "assistant", "content": "<think>\nso\n</think>\n\nfine"}
CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}

# Thoughts are opened in the prompt and left out of every turn (DeepSeek-R1); calls are JSON text.
R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' and m.content is not defined %}{% for c in m.tool_calls %}"
    "<|assistant|>CALL {{ c.function.name + ' ' + c.function.arguments }}<|end|>{% endfor %}"
    "{% elif m.role == 'assistant' %}<|assistant|>"
    "{{ m.content.split('</think>')[-1] }}<|end|>{% endif %}"
    "{% if m.role == 'tool' %}<|user|>RESULT {{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
# Thoughts of the last answer are kept, of earlier ones left out (Qwen3); arguments are objects.
QWEN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n"
    "{% if loop.last and m.reasoning_content %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|end|>\n{% else %}<|user|>\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# The system message stands in the last question (Mistral); the day stands before all (Llama 3).
MOVED = (
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.s = m.content + ' ' %}{% elif m.role == 'user' %}<|user|>"
    "{{ ns.s if loop.index0 == messages | length - 1 or loop.index0 == messages | length - 2 }}"
    "{{ m.content }}{% else %}<|assistant|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DAY = "{{ strftime_now('%d %b %Y') }}" + QWEN


def under(tokenizer: Any, template: str) -> Any:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def learned(tokenizer: Any, *messages: Any, **more: Any) -> list[str]:
    """Each document as text, what is learned in [[ ]]."""
    encoded = encode_sample(tokenizer, Sample("x:1", "", messages=messages), (END,), **more)
    return [preview(tokenizer, one, 10_000) for one in encoded.documents()]


def test_thoughts_that_the_prompt_opens_are_learned_behind_it(plain_tokenizer: Any) -> None:
    tokenizer = under(plain_tokenizer, R1)
    assert learned(tokenizer, ASK, ONE, MORE, TWO) == [
        "<|user|>hello<|assistant|><think>\\n[[well\\n</think>\\n\\nworld<|end|>]]",
        "<|user|>hello<|assistant|>\\n\\nworld<|end|><|user|>how are you?<|assistant|><think>\\n"
        "[[so\\n</think>\\n\\nfine<|end|>]]",
    ]


def test_every_answer_stands_behind_exactly_its_prompt(plain_tokenizer: Any) -> None:
    for template in (R1, QWEN, MOVED):
        tokenizer = under(plain_tokenizer, template)
        said = (ASK, ONE, MORE, TWO)
        encoded = encode_sample(tokenizer, Sample("x", "", messages=said), (END,))
        prompts = [answerable(tokenizer, said[:turn]) for turn in (1, 3)]
        starts = [_first_learned(d.ids, d.mask) for d in encoded.documents()]
        found = [ids for document in starts for ids in document]
        assert found == prompts, template


def _first_learned(ids: Sequence[int], mask: Sequence[bool]) -> list[list[int]]:
    places = [i for i in range(1, len(ids)) if mask[i] and not mask[i - 1]]
    return [list(ids[:place]) for place in places]


def test_an_answer_without_the_thoughts_that_the_prompt_opens_is_refused(
    plain_tokenizer: Any,
) -> None:
    plain = {"role": "assistant", "content": "world"}
    with pytest.raises(ValueError, match="opens <think> in the prompt, and the answer has no"):
        learned(under(plain_tokenizer, R1), ASK, plain)
    assert learned(under(plain_tokenizer, QWEN), ASK, plain)[0].count("[[") == 1


def test_thoughts_beside_an_answer_are_learned_where_the_template_writes_them(
    plain_tokenizer: Any,
) -> None:
    beside = {"role": "assistant", "content": "world", "reasoning_content": "well"}
    for template in (R1, QWEN):
        text = learned(under(plain_tokenizer, template), ASK, beside)[0]
        assert text.endswith("well\\n</think>\\n\\nworld<|end|>]]" + "\\n" * (template is QWEN))


def test_a_system_message_that_moves_is_where_the_target_reads_it(plain_tokenizer: Any) -> None:
    system = {"role": "system", "content": "return"}
    texts = learned(under(plain_tokenizer, MOVED), system, ASK, ONE, MORE, TWO)
    assert texts[0].startswith("<|user|>return hello<|assistant|>[[")
    assert texts[1].startswith("<|user|>hello<|assistant|>")
    assert "<|user|>return how are you?<|assistant|>[[" in texts[1]


@pytest.mark.parametrize(("template", "as_text"), [(R1, True), (QWEN, False)])
def test_arguments_reach_a_template_in_the_form_that_it_writes(
    plain_tokenizer: Any, template: str, as_text: bool
) -> None:
    tokenizer = under(plain_tokenizer, template)
    call_form.cache_clear()
    for arguments in ('{"x": "é"}', {"x": "é"}):
        call = {**CALL, "function": {"name": "f", "arguments": arguments}}
        turns = [ASK, {"role": "assistant", "tool_calls": [call]}]
        text = render(tokenizer, turns, (), tokenize=False, return_dict=False)
        assert '{"x": "é"}' in text or '{"x": "\\u00e9"}' in text
        (_, taken) = as_taken(tokenizer, turns)
        assert isinstance(taken["tool_calls"][0]["function"]["arguments"], str) == as_text
    broken = {**CALL, "function": {"name": "f", "arguments": "not JSON"}}
    kept = as_taken(tokenizer, [{"role": "assistant", "tool_calls": [broken]}])
    assert kept[0]["tool_calls"][0]["function"]["arguments"] == "not JSON"


def test_calls_that_the_template_does_not_write_are_refused(plain_tokenizer: Any) -> None:
    turns = (ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]})
    with pytest.raises(ValueError, match="does not write calls of tools"):
        learned(plain_tokenizer, *turns)
    assert "[[<tool_call>" in learned(under(plain_tokenizer, QWEN), *turns)[0]


def test_developer_is_system_where_a_template_knows_no_developer(plain_tokenizer: Any) -> None:
    turn = {"role": "developer", "content": "return"}
    assert as_taken(plain_tokenizer, [turn])[0]["role"] == "system"
    knows = under(plain_tokenizer, "{% if m.role == 'developer' %}{% endif %}")
    assert as_taken(knows, [turn])[0]["role"] == "developer"


def test_the_day_of_a_template_is_one_in_a_run_and_no_part_of_what_answers_are_kept_by(
    chat_target: Target,
) -> None:
    target = replace(chat_target, tokenizer=under(chat_target.tokenizer, DAY))
    sample = Sample("s:1", "chat", messages=(ASK,))
    plans = [AnswerPlan(1, 48, 8, 0.8, 0.5, 0, date=day) for day in ("2026-01-02", "2026-03-04")]
    (one,), (two,) = (cut_prompts(target, [sample], plan, Defects()) for plan in plans)
    assert target.decode(one.ids).startswith("02 Jan 2026")
    assert list(one.ids) != list(two.ids)
    assert prompt_key(one) == prompt_key(two)
    first, second = (
        answers_digest(target, [cut], plan, "engine")
        for cut, plan in zip((one, two), plans, strict=True)
    )
    assert first == second
    later = Dialogue.of(Sample("s", "", messages=(ASK, ONE, MORE)))
    ids = later.prompt(target.tokenizer, plans[0].variables(target.tokenizer), ("x",))
    assert target.decode(ids).startswith("02 Jan 2026")


def test_a_run_that_goes_on_another_day_writes_the_day_on_which_it_began(
    chat_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = replace(chat_target, tokenizer=under(chat_target.tokenizer, DAY))
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": [ASK, {"role": "assistant", "content": "world"}]}))
    part = DataPart(source=str(path), regenerate=False)
    recipe = Recipe(data=part, train=TrainPart(seq_len=64)).with_origin(
        {"data.regenerate": "--set"}
    )
    first = prepare(recipe, target, tmp_path / "run")
    today = datetime.date.today().strftime("%d %b %Y")
    assert target.decode(first.batch([0]).ids_BS[0].tolist()).startswith(today)
    kept = tmp_path / "run" / "data" / "date.json"
    kept.write_text(json.dumps({"date": "2020-02-03"}))  # as if it had begun then
    again = prepare(recipe, target, tmp_path / "run")
    assert target.decode(again.batch([0]).ids_BS[0].tolist()).startswith("03 Feb 2020")
    dated = written_on(target.tokenizer, "2020-02-03")
    text = render(target.tokenizer, [ASK], (), dated, tokenize=False, return_dict=False)
    assert text.startswith("03 Feb 2020")


def test_questions_without_answers_are_answered_one_by_one(chat_target: Target) -> None:
    sample = sample_of({"turns": ["hello", "how are you?"], "category": "writing"}, "x:1")
    dialogue = Dialogue.of(sample)
    assert dialogue.turns == (1, 3)
    assert dialogue.said(("world",)) == [ASK, {"role": "assistant", "content": "world"}, MORE]
    with pytest.raises(ValueError, match="questions without answers"):
        encode_sample(chat_target.tokenizer, sample, (END,))


def test_given_answers_are_neither_learned_nor_written_anew(plain_tokenizer: Any) -> None:
    world, fine = ({"role": "assistant", "content": text} for text in ("world", "fine"))
    record = {"messages": [ASK, {**world, "weight": 0}, MORE, fine]}
    sample = sample_of(record, "x:1")
    encoded = encode_sample(plain_tokenizer, sample, (END,))
    assert preview(plain_tokenizer, encoded).count("[[") == 1
    assert Dialogue.of(sample).turns == (3,)
    assert Dialogue.of(sample).said(())[1] == world


# -- what a recipe says of its own text --------------------------------------------------------


@pytest.mark.parametrize("name", ["eagle3", "distill", "medusa", "prune", "adapt", "quickstart"])
def test_what_a_demonstration_learns_of_its_own_text_does_not_hold_for_a_user_s(name: str) -> None:
    assert load_recipe(name).data.train_on_prompt
    flags = {"data.source": "chats.jsonl"}
    for made in (load_recipe(name, flags=flags), load_recipe(name, ["data.source=chats.jsonl"])):
        assert (made.data.text_tokens, made.data.train_on_prompt) == (0, False)
    by_api = with_fields(load_recipe(name), flags, "Python")
    assert (by_api.data.text_tokens, by_api.data.train_on_prompt) == (0, False)
    kept = load_recipe(name, ["data.text_tokens=7"], flags=flags)
    assert (kept.data.text_tokens, kept.data.train_on_prompt) == (7, False)


def test_a_recipe_of_a_user_says_both_of_its_own_source(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("based_on: eagle3\ndata: {source: x.jsonl, train_on_prompt: true}\n")
    data = load_recipe(str(path)).data
    assert (data.text_tokens, data.train_on_prompt) == (0, True)


def test_the_format_of_a_recipe_s_own_data_does_not_hold_for_a_user_s() -> None:
    assert load_recipe("llama3-8b-eagle3").data.format == "jsonl"
    made = load_recipe("llama3-8b-eagle3", flags={"data.source": "chats.parquet"})
    assert made.data.format == "auto"


def test_foreign_answers_are_learned_only_where_the_user_says_so(
    chat_target: Target, tmp_path: Path
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"prompt": "hello", "response": "world"}) + "\n")
    flags = {"data.source": str(path), "train.seq_len": 64}
    shipped = load_recipe("fastdraft", flags=flags)
    with pytest.raises(RecipeError, match="would learn the answers in the data") as caught:
        prepare(shipped, chat_target, tmp_path / "a")
    assert "data.regenerate=true lets the target write them" in caught.value.do
    explicit = load_recipe("fastdraft", ["data.regenerate=false"], flags=flags)
    assert prepare(explicit, chat_target, tmp_path / "a").manifest.documents == 1
    (tmp_path / "t.txt").write_text("def f1(x): return x")
    text = load_recipe("fastdraft", flags={**flags, "data.source": str(tmp_path / "t.txt")})
    assert prepare(text, chat_target, tmp_path / "b").manifest.documents == 1


def test_a_chat_model_learns_from_the_files_of_this_machine_only_where_the_user_says_so(
    tiny_target: Target, tmp_path: Path
) -> None:
    sets = ["data.prompts=1", "data.new_tokens=4", "train.seq_len=64", "data.text_tokens=0"]
    chatty = spoken_with(tiny_target)
    with pytest.raises(RecipeError, match="drafter of a chat model on Python files") as caught:
        prepare(load_recipe("eagle3", sets), chatty, tmp_path / "a")
    assert "--data corpus" in caught.value.do
    assert not (tmp_path / "a").exists()
    explicit = load_recipe("eagle3", sets, flags={"data.source": "corpus"})
    assert prepare(explicit, chatty, tmp_path / "a").manifest.writer == "target"


def test_prompts_alone_are_known_to_have_no_words_of_their_own_before_any_is_answered(
    chat_target: Target, tmp_path: Path
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"prompt": "hello"}) + "\n")
    sets = ["data.text_tokens=100", "data.prompts=1", "data.new_tokens=4", "train.seq_len=64"]
    made = load_recipe("eagle3", sets, flags={"data.source": str(path)})
    console = SilentReporter()
    assert prepare(made, chat_target, tmp_path / "run", console).manifest.writer == "target"
    assert any("text_tokens has no effect" in warning for warning in console.warnings)


def test_a_run_stops_where_a_fifth_of_the_records_would_be_left_out(
    chat_target: Target, tmp_path: Path
) -> None:
    path, good = tmp_path / "x.jsonl", json.dumps({"prompt": "hello", "response": "world"}) + "\n"
    bad = json.dumps({"messages": [{"role": "narrator", "content": "x y"}]}) + "\n"
    sets = ["data.regenerate=false", "train.seq_len=64"]
    path.write_text(good * 24 + bad * 8)
    flags = {"data.source": str(path)}
    with pytest.raises(RecipeError, match="25% of the records") as caught:
        prepare(load_recipe("eagle3", sets, flags=flags), chat_target, tmp_path / "a")
    assert "8 x a message has the unknown role 'narrator'" in caught.value.found
    remedy = caught.value.do.rpartition("--set ")[2]
    prepare(load_recipe("eagle3", [*sets, remedy], flags=flags), chat_target, tmp_path / "a")
    path.write_text(good * 4 + bad * 2)  # a few are only warned of
    prepare(load_recipe("eagle3", sets, flags=flags), chat_target, tmp_path / "b")
