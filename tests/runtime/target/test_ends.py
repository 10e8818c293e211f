"""Where a text of a target ends, by many checkpoints' files and templates."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from specctl.runtime.target.folders.tokenizer_files import ends_in, read_tokenizer
from specctl.runtime.target.save_target import write_target
from specctl.runtime.target.served import load_served
from specctl.runtime.target.target import Target, load_target
from specctl.runtime.target.templates.ends import CONFIG, GENERATION, NamedEnds, ends_of, united

TINY = Path(__file__).parents[3] / "recipes" / "tiny"
BYTES = 256  # ids of bytes stand in front of those of markers
SIZE = BYTES + 40
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
)
HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")


def spelling(
    template: str | None, markers: Sequence[str], eos: str | None = None, **more: Any
) -> Any:
    """A tokenizer of bytes and of these markers, which have the ids from BYTES on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(markers))
    found = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=eos, **more)
    found.chat_template = template
    return found


def ends(tokenizer: Any, generation: Any = None, config: Any = None, size: int = SIZE) -> Any:
    named = [NamedEnds(GENERATION, generation), NamedEnds(CONFIG, config, may_be_default=True)]
    return united(named, tokenizer, size)


def said(template: str | None, markers: Sequence[str], eos: str | None = None, **more: Any) -> Any:
    """The spelling of the end of a turn; `known`: what generation_config names."""
    known = more.pop("known", None)
    tokenizer = spelling(template, markers, eos, **more)
    number = None if known is None else tokenizer.convert_tokens_to_ids(known)
    turn = ends(tokenizer, number).of_turn
    return None if turn is None else tokenizer.convert_ids_to_tokens(turn)


@pytest.mark.parametrize(
    ("template", "markers", "end"),
    [
        (CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
        (LLAMA3, HEADERS, "<|eot_id|>"),
        (
            LLAMA3 + "<|start_header_id|>assistant<|end_header_id|>\n\n",  # asked for or not
            HEADERS,
            "<|eot_id|>",
        ),
        (
            "{% for m in messages %}<start_of_turn>{{ m.role.replace('assistant', 'model') }}\n"
            "{{ m.content | trim }}<end_of_turn>\n{% endfor %}",
            ("<start_of_turn>", "<end_of_turn>"),
            "<end_of_turn>",
        ),
        (
            "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
            "{% else %} {{ m.content | trim }} </s>{% endif %}{% endfor %}",
            ("<s>", "</s>"),
            "</s>",
        ),
        (  # Mistral's, whose headers are tokens
            "<s>{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
            "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}",
            ("<s>", "</s>", "[INST]", "[/INST]"),
            "</s>",
        ),
        (  # Phi's, which ends a conversation beside its turns
            "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
            "{% if not add_generation_prompt %}<|endoftext|>{% endif %}",
            ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"),
            "<|end|>",
        ),
        (  # gpt-oss: what ends the last answer does not end those before
            "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
            "{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}"
            "{% endfor %}",
            ("<|start|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
            "<|return|>",
        ),
        (  # Command R: an answer is closed before its turn is
            "{% for m in messages %}<|START_OF_TURN|><|{{ m.role }}|><|START_RESPONSE|>"
            "{{ m.content }}<|END_RESPONSE|><|END_OF_TURN|>{% endfor %}",
            ("<|START_OF_TURN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|END_OF_TURN|>"),
            "<|END_OF_TURN|>",
        ),
        (  # the same on two lines
            "{% for m in messages %}<|START|>{{ m.content }}\n</answer>\n<|END|>\n{% endfor %}",
            ("<|START|>", "</answer>", "<|END|>"),
            "<|END|>",
        ),
        (  # thoughts are cut out of what was said
            "{% for m in messages %}<|im_start|>{{ m.role }}\n"
            "{{ m.content.split('</think>')[-1].strip() }}<|im_end|>{% endfor %}",
            ("<|im_start|>", "<|im_end|>"),
            "<|im_end|>",
        ),
        (  # a system message is wanted
            "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
            + CHATML,
            ("<|im_start|>", "<|im_end|>"),
            "<|im_end|>",
        ),
        (  # contents come in parts
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}"
            "{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}",
            ("<|im_start|>", "<|im_end|>"),
            "<|im_end|>",
        ),
        (  # no headers: every turn ends, and that is all
            "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
            ("<s>", "<|im_end|>"),
            "<|im_end|>",
        ),
        (  # one question and its answer, no more
            "{% if messages | length > 2 %}{{ raise_exception('one turn') }}{% endif %}" + CHATML,
            ("<|im_start|>", "<|im_end|>"),
            "<|im_end|>",
        ),
    ],
)
def test_a_turn_ends_with_what_the_template_writes_behind_an_answer(
    template: str, markers: Sequence[str], end: str
) -> None:
    assert said(template, markers) == end


def test_a_token_that_begins_texts_may_begin_turns() -> None:
    markers = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    system = "{% if loop.first %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    for template in (CHATML, CHATML.replace("%}<|im", "%}" + system + "<|im", 1)):
        assert said(template, markers, "<|endoftext|>", bos_token="<|im_start|>") == "<|im_end|>"


CALLING = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{% for c in m.tool_calls or [] %}"
    "CALL{% endfor %}{{ m.content }}{% if m.tool_calls %}BEHIND{% else %}<|end|>{% endif %}"
    "{% endfor %}"
)
CALL = "<|call_begin|>{{ c.function.arguments | tojson }}<|call_end|>"


@pytest.mark.parametrize(
    ("call", "behind", "further"),
    [
        (CALL, "<|end|>", []),
        (CALL, "<|call|>\n", ["<|call|>"]),
        (CALL, "", []),  # another call may follow
        (CALL, "</calls>", []),  # no special token
        (CALL, "<|end|>\n<|call|>", []),  # what follows the end of a turn ends no turn
        (
            "{{ raise_exception('!') if m.tool_calls | length > 1 }}" + CALL,
            "<|call|>",
            ["<|call|>"],
        ),
        ("{% if loop.first %}" + CALL + "{% endif %}", "<|call|>", ["<|call|>"]),
        ("{{ c.function.arguments + 'no text' }}", "<|call|>", []),
    ],
)
def test_a_turn_that_calls_tools_may_have_an_end_of_its_own(
    call: str, behind: str, further: list[str]
) -> None:
    markers = ("<|start|>", "<|message|>", "<|call_begin|>", "<|call_end|>", "<|call|>", "<|end|>")
    template = CALLING.replace("CALL", call).replace("BEHIND", behind)
    found = ends(spelling(template, markers))
    assert [end.token for end in found.each] == ["<|end|>", *further]
    assert found.each[0].token_id == found.of_turn == found.of_document


@pytest.mark.parametrize(
    ("template", "markers"),
    [
        (None, ("<|im_end|>",)),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}", ("</s>",)),
        (CHATML, ("<|im_start|>",)),  # <|im_end|> is ten ordinary characters
        ("{{ raise_exception('no conversations') }}", ("<|im_end|>",)),
        ("{{ messages[7].content }}{{ 1 / 0 }}", ("<|im_end|>",)),
        ("{% for m in messages %}", ("<|im_end|>",)),  # no template at all
        ("{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}", ("<|im_start|>",)),
        (  # the next turn's header is no end
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>",
            ("<|user|>", "<|assistant|>"),
        ),
    ],
)
def test_a_template_that_shows_no_end_adds_none(
    template: str | None, markers: Sequence[str]
) -> None:
    tokenizer = spelling(template, ["<|endoftext|>", *markers], "<|endoftext|>")
    found = ends(tokenizer)
    assert (found.of_turn, found.ids, found.of_answer) == (None, (BYTES,), BYTES)


def test_a_next_turns_header_ends_an_answer_where_the_checkpoint_says_so() -> None:
    template = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    markers = ("<|endoftext|>", "<|user|>", "<|assistant|>")
    assert said(template, markers, "<|endoftext|>", known="<|user|>") == "<|user|>"


def test_the_ends_of_all_sources_are_united_in_their_order() -> None:
    markers = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eom|>")
    tokenizer = spelling(CHATML, markers, "<|endoftext|>")
    found = ends(tokenizer, [BYTES + 3, BYTES], BYTES)
    assert found.ids == (BYTES + 3, BYTES, BYTES + 2)
    assert [end.sources for end in found.each] == [
        ("generation_config",),
        ("generation_config", "config", "tokenizer"),
        ("chat template",),
    ]
    assert [end.token for end in found.each] == ["<|eom|>", "<|endoftext|>", "<|im_end|>"]
    assert (found.of_turn, found.of_document) == (BYTES + 2, BYTES)


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        (None, None, (BYTES,)),
        (BYTES + 1, None, (BYTES + 1, BYTES)),
        ([BYTES + 1, BYTES + 1], BYTES, (BYTES + 1, BYTES)),
        ([], [], (BYTES,)),
        (-1, SIZE, (BYTES,)),
        ([10**12], "2", (BYTES,)),
        (True, 2.0, (BYTES,)),
    ],
)
def test_whatever_a_file_names_the_ends_are_tokens_of_the_model(
    generation: Any, config: Any, ids: tuple[int, ...]
) -> None:
    tokenizer = spelling(None, ("<|endoftext|>", "<|other|>"), "<|endoftext|>")
    assert ends(tokenizer, generation, config).ids == ids


def test_an_end_that_the_model_lacks_is_named_with_its_source() -> None:
    tokenizer = spelling(CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>")
    found = ends(tokenizer, generation=7, size=BYTES)  # the model knows bytes alone
    assert (found.ids, found.of_turn, found.of_document) == ((7,), None, 7)
    assert [one.text() for one in found.left_out] == [
        f"{BYTES + 1} of tokenizer (the model has {BYTES} tokens)"
    ]


def test_an_id_that_a_configuration_class_brings_along_ends_nothing() -> None:
    tokenizer = spelling(LLAMA3, ("<|begin|>", *HEADERS), "<|eot_id|>", bos_token="<|begin|>")
    found = ends(tokenizer, None, 2)  # LlamaConfig's own, an ordinary character here
    assert found.ids == (BYTES + 3,)
    assert "an ordinary token" in found.left_out[0].text()


def test_an_ordinary_token_that_the_checkpoint_chose_ends_a_text() -> None:
    tokenizer = spelling(CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>")
    assert ends(tokenizer, 10, None).ids == (10, BYTES + 1)
    assert ends(None, None, [2, 3]).ids == (2, 3)


def test_a_document_ends_with_what_ends_no_turn() -> None:
    markers = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    chat = spelling(CHATML, markers, "<|im_end|>")
    assert ends(chat, [BYTES + 2, BYTES]).of_document == BYTES
    assert ends(chat).of_document == BYTES + 2  # nothing else is known
    assert ends(spelling(None, markers, "<|endoftext|>"), BYTES + 2).of_document == BYTES


def test_an_end_that_was_added_as_no_special_token_ends_a_turn() -> None:
    tokenizer = spelling(CHATML, ("<|im_start|>",))
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=False)])
    assert ends(tokenizer).of_turn == BYTES + 1


# -- folders ---------------------------------------------------------------------------------------


def folder_of(tmp_path: Path, **changes: Any) -> Path:
    """The embedded target with other fields in its JSON files (`{file: fields}`, None removes the
    file); `template` another chat template."""
    shutil.copytree(TINY, tmp_path / "model", ignore=shutil.ignore_patterns("*.gz", "licences"))
    template = changes.pop("template", None)
    if template is not None:
        (tmp_path / "model" / "chat_template.jinja").write_text(template, encoding="utf-8")
    for name, fields in changes.items():
        path = tmp_path / "model" / f"{name}.json"
        if fields is None:
            path.unlink()
        else:
            path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return tmp_path / "model"


BASE_FILES = {
    "generation_config": {"eos_token_id": 1, "_from_model_config": False},
    "config": {"eos_token_id": 1},
}


@pytest.mark.parametrize(
    ("changes", "ids", "turn"),
    [
        ({}, (1, 5), 5),
        (BASE_FILES, (1, 5), 5),  # 5 by the chat template alone
        (BASE_FILES | {"tokenizer_config": {"eos_token": "<|end|>"}}, (1, 5), 5),
        (
            BASE_FILES | {"template": "{% for m in messages %}{{ m.content }}{% endfor %}"},
            (1,),
            None,
        ),
        ({"generation_config": None, "config": {"eos_token_id": [4, 1]}}, (4, 1, 5), 5),
        ({"generation_config": {"eos_token_id": 5}, "config": {"eos_token_id": None}}, (5, 1), 5),
        ({"generation_config": {"eos_token_id": [5, 6144, -1]}}, (5, 1), 5),
        ({"generation_config": None, "config": {"eos_token_id": 17}}, (1, 5), 5),
    ],
)
def test_a_folder_shows_the_ends_that_the_loaded_target_has(
    changes: dict[str, Any], ids: tuple[int, ...], turn: int | None, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, **changes)
    config = AutoConfig.from_pretrained(folder)
    generation = GenerationConfig.from_model_config(config)
    if (folder / "generation_config.json").exists():
        generation = GenerationConfig.from_pretrained(folder)
    model = SimpleNamespace(config=config, generation_config=generation)
    loaded = ends_of(model, PreTrainedTokenizerFast.from_pretrained(folder))
    assert (loaded.ids, loaded.of_turn) == (ids, turn)
    assert ends_in(folder, json.loads((folder / "config.json").read_text())) == loaded


def test_a_loaded_target_ends_where_its_tokenizer_does(tmp_path: Path) -> None:
    files = BASE_FILES | {"tokenizer_config": {"eos_token": "<|end|>"}}
    folder = str(folder_of(tmp_path, **files))
    target, served = load_target(folder), load_served(folder, device="cpu")
    assert served.ends == target.ends
    assert (served.eos_ids, served.spec.eos_ids) == ((1, 5), (1, 5))
    assert (target.eos_ids, target.lm.spec.eos_ids) == ((1, 5), (1, 5))
    assert (target.end_of_turn, target.end_of_document) == (5, 1)
    assert replace(target, eos_ids=(9,)).end_of_turn == 9


@pytest.mark.parametrize(
    ("template", "eos"),
    [
        (CHATML, "<|endoftext|>"),
        (LLAMA3, None),
        (
            "{% if messages[0].role != 'system' %}{{ raise_exception('!') }}{% endif %}" + CHATML,
            None,
        ),
        ([{"name": "default", "template": CHATML}, {"name": "rag", "template": LLAMA3}], None),
        (None, "<|endoftext|>"),
    ],
)
def test_a_tokenizers_files_say_what_the_tokenizer_says(
    template: Any, eos: str | None, tmp_path: Path
) -> None:
    markers = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *HEADERS)
    tokenizer = spelling(None, markers, eos, bos_token="<|im_start|>")
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    read = read_tokenizer(tmp_path)
    assert ends(read) == ends(AutoTokenizer.from_pretrained(tmp_path, local_files_only=True))
    assert ends(read).ids or template is None


def test_a_folder_without_a_tokenizer_shows_what_its_configurations_name(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert ends_in(tmp_path, {"vocab_size": 10, "eos_token_id": 8}).ids == (7, 8)
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "generation_config.json").write_text("[")
    assert ends_in(tmp_path, {"text_config": {"vocab_size": 10, "eos_token_id": 9}}).ids == (9,)


def test_an_end_that_is_no_special_token_is_left_out_of_the_text(tiny_target: Target) -> None:
    tokenizer = copy.deepcopy(tiny_target.tokenizer)
    word = next(i for i in range(300, 600) if tokenizer.decode([i]).isalpha())
    assert tiny_target.decode([word, 5]) == tokenizer.decode([word])
    found = replace(tiny_target.ends, spelled=frozenset({word}))
    assert replace(tiny_target, ends=found).decode([400, word]) == tokenizer.decode([400])


def test_a_saved_target_names_all_its_ends(tmp_path: Path) -> None:
    files = BASE_FILES | {"tokenizer_config": {"eos_token": "<|end|>"}}
    target = load_target(str(folder_of(tmp_path, **files)))
    (tmp_path / "out").mkdir()
    write_target(target, tmp_path / "out")
    body = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (body["eos_token_id"], body["bos_token_id"]) == ([1, 5], 0)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 1
