"""How people lay records out, and what each field becomes: one table, `LAYOUTS`.

A layout reads the fields it knows; what is left over is known to say nothing of the text (ids,
scores, labels), or says again what was read, or stops the run by its name. docs/data.md shows the
table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from specctl.core.errors import RecipeError, nearest
from specctl.recipes.schema import DataPart
from specctl.runtime.target.templates.chat_turns import template_text

BY_SET = (
    "--set 'data.map={{{name}: {close}}}' reads it as that; "
    "--set 'data.ignore=[{name}]' leaves it out"
)
ROLES = {
    "system": ("system", "sys", "system_prompt"),
    "developer": ("developer",),
    "user": ("user", "human", "prompter", "person", "instruction", "question"),
    "assistant": (
        *("assistant", "gpt", "chatgpt", "gpt-3.5", "gpt-4", "gpt4", "model", "bot", "chatbot"),
        *("bing", "bard", "gemini", "claude", "llama", "ai", "llm", "agent", "response", "answer"),
        *("function_call", "tool_call", "function-call", "tool-call"),
    ),
    "tool": (
        *("tool", "function", "observation", "tool_response", "tool-response", "tool_result"),
        *("function_response", "function-response", "ipython"),
    ),
}
ROLE_OF = {word: role for role, words in ROLES.items() for word in words}
CALLERS = ("function_call", "tool_call", "function-call", "tool-call")

ROLE_KEYS = ("role", "from", "speaker", "author", "sender")
CONTENT_KEYS = ("content", "value", "text", "message", "utterance", "parts")
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking", "thoughts", "thought")
LEARN = ("weight", "train", "training", "trainable", "loss", "learn", "loss_weight")
KEPT_KEYS = ("name", "tool_call_id", "tool_calls")

CHATS = ("messages", "conversations", "conversation", "dialog", "dialogue", "chat", "contents")
PROMPTS = ("prompt", "instruction", "question", "query", "problem", "user", "human")
BESIDE = ("input", "context")  # what a prompt is about, behind it
ANSWERS = (
    *("response", "completion", "output", "answer", "solution"),
    *("responses", "completions", "outputs", "answers", "assistant", "gpt", "bot"),
)
TEXTS = ("text", "content")
GOOGLES = ("systemInstruction", "system_instruction")  # of Gemini: a message without a role
SYSTEMS = ("system", "system_prompt", "system_message", *GOOGLES)
IMAGES = ("images", "image")
SOUNDS = ("audio", "audios", "video", "videos")  # left out, and said

# Of records and of messages: they say nothing that a model reads or writes.
ABOUT = frozenset({
    "id", "ids", "idx", "index", "row", "uid", "uuid", "guid", "hash", "sha", "sha1",
    "sha256", "md5", "source", "sources", "src", "origin", "dataset", "dataset_name", "data_source",
    "subset", "split", "category", "categories", "domain", "domains", 
    "task_type", "type", "kind", "lang", "language", "languages", "locale",
    "country", "state", "model", "model_name", "models", "generator", "created", "created_at",
    "updated_at", "timestamp", "timestamps", "date", "time", "datetime", "score", "scores",
    "rating", "ratings", "rank", "quality", "difficulty", "level", "label", "labels", "tag", "tags",
    "license", "licence", "url", "urls", "link", "path", "file", "filename", "file_name", "title",
    "author", "user", "username", "version", "metadata", "meta", "meta_data", "extra_info", "usage",
    "finish_reason", "stop_reason", "reference", "references", "reference_answer",
    "reference_answers", "ground_truth", "canonical_solution", "test", "tests", "entry_point",
    "openai_moderation", "detoxify_moderation", "moderation", "toxic", "redacted", "header",
    "hashed_ip", "avatar", "avatarurl", "views", "status", "refusal", "annotations", "audio",
    "cache_control", "greedy", "tokenizer", "attention_mask", "position_ids", "token_type_ids",
    "answer_start", "name",
})  # fmt: skip
ABOUT_ENDINGS = ("_id", "_ids", "_hash", "_url", "_at", "_score", "_count")
WORD = re.compile(r"[\w.:/@#+%?=&~,;-]{0,200}", re.ASCII)  # a label, a number, an address: no text
SHOWN = 60

Turn = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FieldChoices:
    """What the user says of fields. `map`: theirs -> ours; `ignore`: left out. Fields of messages
    are written "messages.NAME". `written`: keys of messages that the target's chat template reads.
    `advice`: how to say so, e.g. by --set; "" where the file has to be changed."""

    map: Mapping[str, str] = field(default_factory=dict)
    ignore: frozenset[str] = frozenset()
    template: str = ""
    advice: str = ""

    def of_messages(self) -> FieldChoices:
        """The same for the fields of a message."""
        start = "messages."
        inner = {
            name.removeprefix(start): ours.removeprefix(start)
            for name, ours in self.map.items()
            if name.startswith(start)
        }
        dropped = {n.removeprefix(start) for n in self.ignore if n.startswith(start)}
        return FieldChoices(inner, frozenset(dropped), self.template, self.advice)


NO_CHOICES = FieldChoices()


def field_choices(data: DataPart, tokenizer: Any = None) -> FieldChoices:
    """What the recipe says of the fields of records, and what it can say; the chat template of the
    tokenizer says which other keys of messages it reads."""
    return FieldChoices(data.map, frozenset(data.ignore), template_text(tokenizer), BY_SET)


@dataclass(frozen=True, slots=True)
class RecordContent:
    """What a record says. `turns` are still as they are written, each of `answers` stands behind
    them; `unanswered`: behind each turn the target is to answer; `text`: a document."""

    turns: tuple[Any, ...] = ()
    answers: tuple[tuple[Any, ...], ...] = ((),)
    is_unanswered: bool = False
    text: str = ""


class FieldReader:
    """The fields of one record or message, and which of them were read. One writer: its layout."""

    def __init__(self, record: Mapping[str, Any], choices: FieldChoices, owner: str = "") -> None:
        self.choices, self.owner = choices, owner
        self.values: dict[str, Any] = {}
        for name, value in record.items():
            self.values[choices.map.get(name, name)] = value
        self.seen: set[str] = set()
        self._lower = {name.lower(): name for name in self.values if isinstance(name, str)}

    def find(self, names: Sequence[str]) -> tuple[str, Any] | None:
        """The first of these fields that says something, and its name; it counts as read. Fields
        are found without case."""
        for wanted in names:
            name = wanted if wanted in self.values else self._lower.get(wanted)
            if name is not None and not _is_empty(self.values[name]):
                self.seen.add(name)
                return name, self.values[name]
        return None

    def get(self, *names: str) -> Any:
        """The value of the first of these fields that says something, or None."""
        found = self.find(names)
        return None if found is None else found[1]

    def has(self, *names: str) -> bool:
        """Whether one of these fields says something; it does not count as read."""
        before = set(self.seen)
        found = self.find(names)
        self.seen = before
        return found is not None

    def skip(self, *names: str) -> None:
        """Fields that are understood, and said otherwise already."""
        self.seen |= {name for name in self.values if name.lower() in names}

    def check(self, said: Sequence[str]) -> None:
        """RecipeError for a field that carries content and was not read; `said`: the texts that
        were read, so that what says them again is no loss."""
        for name, value in self.values.items():
            if name in self.seen or name in self.choices.ignore or _is_about(name):
                continue
            texts = [text for text in _texts(value) if not WORD.fullmatch(text.strip())]
            lost = next((text for text in texts if not _is_said(text, said)), None)
            if lost is not None:
                raise unread_field(f"{self.owner}{name}", lost, self.choices)


def unread_field(name: str, text: str, choices: FieldChoices) -> RecipeError:
    """The error for a field that a model might have to see."""
    known = [*CHATS, *PROMPTS, *BESIDE, *ANSWERS, *TEXTS, *SYSTEMS, "tools", "history", "turns"]
    shown = " ".join(text.split())
    shown = shown if len(shown) <= SHOWN else shown[:SHOWN] + "..."
    short = name.rpartition(".")[2]
    close = nearest(short, known, 1)
    edit = f"rename the field {name} in the file to what it is, or remove it"
    return RecipeError(
        f"the records have a field {name!r} that is not understood",
        found=f"{name}: {shown}",
        expected="fields of the table of records in docs/data.md",
        do=choices.advice.format(name=name, close=close) if choices.advice else edit,
    )


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | tuple | Mapping) and not value)


def _is_about(name: str) -> bool:
    low = name.lower()
    return low in ABOUT or low.endswith(ABOUT_ENDINGS) or low.startswith(("num_", "n_", "is_"))


def _texts(value: Any) -> Iterator[str]:
    """Every text within a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _is_said(text: str, said: Sequence[str]) -> bool:
    """Whether a text repeats what was read: it is a part of it, or a rendering of all of it."""
    bare = text.strip()
    if any(bare in one for one in said):
        return True
    parts = [one.strip() for one in said if one.strip()]
    return bool(parts) and all(part in bare for part in parts)


# -- roles ------------------------------------------------------------------------------------


def role_of(word: Any) -> str:
    """The role that a word names, without case; ValueError for a word that names none."""
    if not isinstance(word, str) or not word.strip():
        raise ValueError("a message has no role")
    found = ROLE_OF.get(word.strip().lower())
    if found is None:
        raise ValueError(f"a message has the unknown role {word[:40]!r}")
    return found


def learns(reader: FieldReader) -> bool | None:
    """Whether a mark (weight, train, loss ...) says that this is learned; None without a mark."""
    marks = [name for name in LEARN if isinstance(reader.values.get(name), bool | int | float)]
    reader.seen |= set(marks)
    if not marks:
        return None
    return all(reader.values[name] > 0 for name in marks)


# -- layouts ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layout:
    """One way of writing records down. `fields`: what each of them becomes; `read` gives None for a
    record of another layout."""

    name: str
    fields: Mapping[str, str]
    read: Callable[[FieldReader], RecordContent | None]


def _chat(reader: FieldReader) -> RecordContent | None:
    found = reader.find(CHATS)
    if found is None:
        return None
    turns = listed(found[1], "messages")
    if all(isinstance(turn, str) for turn in turns):
        raise ValueError("messages is a list of texts, which do not say who speaks")
    return RecordContent(tuple(_expanded(turns)))


def _expanded(turns: Sequence[Any]) -> Iterator[Any]:
    """Turns of their own where one object holds a question and its answer by role: {"human": ...,
    "assistant": ...}."""
    for turn in turns:
        words = [key for key in turn if str(key).lower() in ROLE_OF] if _is_mapping(turn) else []
        is_pair = "user" in {ROLE_OF[str(word).lower()] for word in words}
        if is_pair and not any(key in turn for key in ROLE_KEYS):
            yield from ({"role": word, "content": turn[word]} for word in words if turn[word])
        else:
            yield turn


def _batch(reader: FieldReader) -> RecordContent | None:
    """A line of an OpenAI batch file: the request is in `body`."""
    body = reader.values.get("body")
    if not _is_mapping(body) or not any(key in reader.values for key in ("custom_id", "url")):
        return None
    reader.seen |= {"body", "custom_id", "method", "url"}
    inner = FieldReader(body, reader.choices, "body.")
    inner.skip("model", "metadata", "user", "response_format", "tool_choice", "stop")
    instructions, prompt = inner.get("instructions"), inner.get("messages", "input", "prompt")
    tools = inner.get("tools")
    if tools is not None:
        reader.values["tools"] = tools
    turns = spoken(prompt, "user")
    if instructions is not None:
        turns = [{"role": "system", "content": instructions}, *turns]
    inner.check([])
    return RecordContent(tuple(turns)) if prompt is not None else None


def _preference(reader: FieldReader) -> RecordContent | None:
    """The chosen answer is what is learned; the rejected one is not."""
    chosen = reader.get("chosen")
    if chosen is None:
        return None
    reader.skip("rejected")
    prompt = reader.find((*PROMPTS, *CHATS))
    if isinstance(chosen, str) and prompt is None:
        return RecordContent(tuple(_transcript(chosen)))
    if isinstance(chosen, Mapping):
        chosen = [chosen]
    turns = spoken(chosen, "assistant")
    before = [] if prompt is None else spoken(prompt[1], "user")
    is_whole = bool(before) and len(turns) > 1
    return RecordContent(tuple(turns if is_whole else [*before, *turns]))


def _transcript(text: str) -> list[Turn]:
    """Turns of a text such as "\\n\\nHuman: ...\\n\\nAssistant: ..." (HH-RLHF)."""
    parts = re.split(r"(?:^|\n\n)(Human|Assistant): ?", text)
    if len(parts) < 3 or parts[0].strip():
        raise ValueError("chosen is a text without its prompt")
    return [{"role": r, "content": said} for r, said in zip(parts[1::2], parts[2::2], strict=True)]


def _questions(reader: FieldReader) -> RecordContent | None:
    """MT-Bench and Spec-Bench: `turns` are the user's questions, to be answered one by one."""
    found = reader.find(("turns",))
    if found is None or not isinstance(found[1], list | tuple | str):
        return None
    turns = listed(found[1], "turns")
    if not all(isinstance(turn, str) for turn in turns):
        return RecordContent(tuple(_expanded(turns)))
    said = tuple({"role": "user", "content": question} for question in turns)
    return RecordContent(said, is_unanswered=True)


def _answered(reader: FieldReader) -> RecordContent | None:
    """A prompt with its answer, or with several, each of which makes a conversation."""
    if not reader.has(*PROMPTS, "input") or not reader.has(*ANSWERS):
        return None
    turns = _prompt_turns(reader)
    answers = reader.get(*ANSWERS)
    reader.skip("text")  # a rendering of both, as in Alpaca
    if _is_mapping(answers):  # SQuAD: {"text": [...], "answer_start": [...]}
        answers = answers.get("text")
    is_list = isinstance(answers, list | tuple) and not any(map(_is_mapping, answers))
    several = [*dict.fromkeys(answers)] if is_list else [answers]
    return RecordContent(tuple(turns), tuple(tuple(spoken(a, "assistant")) for a in several))


def _text(reader: FieldReader) -> RecordContent | None:
    text = reader.get(*TEXTS)
    if not isinstance(text, str) or not text.strip():
        return None
    if isinstance(reader.values.get("role"), str):
        raise ValueError("record is one message of a conversation, not a conversation")
    reader.skip(*PROMPTS)  # the text is the whole document
    return RecordContent(text=text)


def _prompt(reader: FieldReader) -> RecordContent | None:
    """A prompt that waits for its answer."""
    return RecordContent(tuple(_prompt_turns(reader))) if reader.has(*PROMPTS, "input") else None


LAYOUTS = (
    Layout(
        "conversation",
        {
            "messages, conversations, conversation, dialog, dialogue, chat, contents": "the turns",
            "role, from, speaker, author, sender": "who speaks",
            "content, value, text, message, utterance, parts": "what is said, as text or in parts",
            "reasoning_content, reasoning, thinking, thoughts": "the thoughts before an answer",
            "tool_calls, function_call": "calls of tools",
            "weight, train, training, trainable, loss, learn": "0 or false: not learned",
        },
        _chat,
    ),
    Layout("OpenAI batch file", {"body": "the request: messages, input or prompt; tools"}, _batch),
    Layout(
        "preference",
        {"prompt": "the user's words", "chosen": "the answer", "rejected": "left out"},
        _preference,
    ),
    Layout(
        "MT-Bench, Spec-Bench",
        {"turns": "the user's questions, each to be answered", "reference": "left out"},
        _questions,
    ),
    Layout(
        "prompt and answer",
        {
            "prompt, instruction, question, query, problem": "the user's words",
            "input, context": "what they are about, after them (without them: the user's words)",
            "history": "earlier questions and answers, before them",
            "response, completion, output, answer, solution": "the answer",
            "responses, completions, outputs, answers": "the answer, or several",
            "text": "left out beside an answer",
        },
        _answered,
    ),
    Layout("text", {"text, content": "a document, whole"}, _text),
    Layout(
        "prompt",
        {"prompt, instruction, question, query, problem, input": "a prompt without an answer"},
        _prompt,
    ),
)


def _prompt_turns(reader: FieldReader) -> list[Any]:
    """What the user says, behind the turns of `history`: an instruction with what it is about."""
    found = reader.find(PROMPTS) or reader.find(("input",))
    assert found is not None, "the layout has looked for it"
    name, prompt = found
    history = _history(reader.get("history"))
    parts = [] if name.lower() == "input" else [reader.get("input")]
    parts = [part for part in (*parts, reader.get("context")) if part is not None]
    if not parts:
        return [*history, *spoken(prompt, "user")]
    if not all(isinstance(part, str) for part in (prompt, *parts)):
        raise ValueError("input or context beside a prompt is not text")
    return [*history, *spoken("\n\n".join([prompt, *(p for p in parts if p.strip())]), "user")]


def _history(pairs: Any) -> list[Any]:
    """Earlier turns: messages, or pairs of question and answer (Alpaca of LLaMA-Factory)."""
    turns: list[Any] = []
    for pair in listed(pairs, "history") if pairs is not None else ():
        if _is_mapping(pair):
            turns += _expanded([pair])
        elif isinstance(pair, list | tuple) and len(pair) == 2:
            turns += [*spoken(pair[0], "user"), *spoken(pair[1], "assistant")]
        else:
            raise ValueError("history is not a list of pairs of question and answer")
    return turns


def spoken(said: Any, role: str) -> list[Any]:
    """One side of a pair as turns: words, or the messages themselves."""
    if role == "assistant" and type(said) is int:  # of sums, as many data sets have them
        said = str(said)
    is_turns = isinstance(said, list | tuple) and bool(said) and all(map(_has_role, said))
    return list(said) if is_turns else [{"role": role, "content": said}]


def listed(value: Any, name: str) -> list[Any]:
    """A list, also one that is written as JSON text; ValueError for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} is not a list")
    return list(value)


def _has_role(turn: Any) -> bool:
    return _is_mapping(turn) and any(turn.get(key) for key in ROLE_KEYS)


def _is_mapping(value: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping)
