"""Where a text of a target ends: the union of what its checkpoint and its tokenizer say.

generation_config, config and tokenizer name ids, and files of engines may name more; the chat
template shows one more by what it writes behind an answer. Checkpoints rarely agree in all of these
(a fine-tune that kept its base's generation_config.json, a chat tokenizer on base weights), and a
model ends its answers as it was trained to, whichever file says so: so every one of them ends a
text, as in vLLM and SGLang, which stop at the tokenizer's end beside those of generation_config.
An id of config.json that is an ordinary token is left out where a source names a marker: the
configuration classes of transformers have ids of their own for files that name none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

GENERATION, CONFIG, TOKENIZER, TEMPLATE = (
    "generation_config",
    "config",
    "tokenizer",
    "chat template",
)
GGUF, SPELLING = "gguf", "spelling"  # what a file of llama.cpp names; tokens spelled like ends
ASK, ANSWER = "Askedwords", "Answeredwords"  # in no template, and the same when trimmed
Conversation = Sequence[Mapping[str, Any]]
TURNS: Conversation = (
    {"role": "user", "content": ASK},
    {"role": "assistant", "content": ANSWER},
)


@dataclass(frozen=True, slots=True)
class NamedEnds:
    """The ids that one source names, as it writes them: an id, several, or None. `may_be_default`:
    nobody may have chosen them for this checkpoint."""

    source: str
    ids: Any
    may_be_default: bool = False


@dataclass(frozen=True, slots=True)
class EndOfText:
    """A token that ends a text, its spelling where the tokenizer knows it, and who says so."""

    token_id: int
    token: str | None
    sources: tuple[str, ...]

    def text(self) -> str:
        return f"{self.token_id} {self.token or 'no token'} ({', '.join(self.sources)})"


@dataclass(frozen=True, slots=True)
class NoEnd:
    """An id that a source names and that ends nothing, and why."""

    token_id: int
    source: str
    why: str

    def text(self) -> str:
        return f"{self.token_id} of {self.source} ({self.why})"


@dataclass(frozen=True, slots=True)
class EndsOfText:
    """Every end of a target's texts, those of generation_config first. `of_turn`: what its chat
    template writes behind the last answer, None where it shows none; `of_document`: what ends a
    text that is no conversation; `spelled`: ends that a tokenizer would write into a text, because
    they were added to it as no special tokens."""

    each: tuple[EndOfText, ...] = ()
    of_turn: int | None = None
    of_document: int | None = None
    left_out: tuple[NoEnd, ...] = ()
    spelled: frozenset[int] = frozenset()

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(end.token_id for end in self.each)

    @property
    def of_answer(self) -> int | None:
        """What ends an answer of the assistant."""
        return self.of_document if self.of_turn is None else self.of_turn

    @property
    def usual(self) -> tuple[int, ...]:
        """The ends that the first source names, and that of a turn: a drafter that cannot propose
        these never proposes to stop."""
        first = self.each[0].sources[0] if self.each else None
        return tuple(
            end.token_id
            for end in self.each
            if end.sources[0] == first or end.token_id == self.of_turn
        )

    def to_json(self) -> dict[str, Any]:
        """As `specctl show --json` prints it."""
        return {
            "ids": [
                {"id": end.token_id, "token": end.token, "sources": list(end.sources)}
                for end in self.each
            ],
            "of_turn": self.of_turn,
            "of_document": self.of_document,
            "left_out": [
                {"id": one.token_id, "source": one.source, "why": one.why} for one in self.left_out
            ],
        }


NO_ENDS = EndsOfText()


def ends_of(
    model: Any, tokenizer: Any = None, named: Sequence[NamedEnds] | None = None
) -> EndsOfText:
    """The ends of a model of transformers with its tokenizer (None: as its configurations say).
    `named`: what its file names, in the place of its configurations."""
    text = model.config.get_text_config()
    if named is not None:
        return united(named, tokenizer, int(text.vocab_size))
    generation = getattr(model, "generation_config", None)
    own = named_ends(_field(generation), _field(model.config), _field(text))
    return united(own, tokenizer, int(text.vocab_size))


def _field(source: Any) -> Callable[[str], Any]:
    def read(name: str) -> Any:
        try:
            return getattr(source, name, None)
        except RuntimeError:  # transformers' word for a field that layers do not share
            return None

    return read


def named_ends(
    generation: Callable[[str], Any], config: Callable[[str], Any], text: Callable[[str], Any]
) -> list[NamedEnds]:
    """What the two configurations name, each given by how a field of it is read; `text` is the
    part of config that describes the language model."""
    of_config = [*_ids(text("eos_token_id")), *_ids(config("eos_token_id"))]
    of_generation = _ids(generation("eos_token_id"))
    is_derived = bool(generation("_from_model_config"))
    if is_derived and set(of_generation) <= set(of_config):
        of_generation = []  # transformers copied them where the checkpoint has no file
    return [
        NamedEnds(GENERATION, of_generation, is_derived),
        NamedEnds(CONFIG, of_config, may_be_default=True),
    ]


def united(named: Sequence[NamedEnds], tokenizer: Any, vocab_size: int) -> EndsOfText:
    """The ends that the sources name, with those of a tokenizer (None without one) and of its chat
    template, as far as they are ids below `vocab_size`."""
    named = [*named, NamedEnds(TOKENIZER, getattr(tokenizer, "eos_token_id", None))]
    ids = range(vocab_size)  # looked into, never walked through
    special = frozenset(n for n in _special(tokenizer) if n in ids)
    markers = special.union(n for n in _added(tokenizer) if n in ids)
    known = {n for one in named for n in _ids(one.ids) if n in ids}
    turn = _end_of_turn(tokenizer, known, markers)
    call = _end_of_call(tokenizer, known, special, turn)
    sure = {n for one in named if not one.may_be_default for n in _ids(one.ids)} | markers
    has_marker = not markers.isdisjoint({*known, turn, call})
    found: dict[int, list[str]] = {}
    left: list[NoEnd] = []
    for one in [*named, NamedEnds(TEMPLATE, [turn, call])]:
        for number in _ids(one.ids):
            if number not in ids:
                left.append(NoEnd(number, one.source, f"the model has {vocab_size:,} tokens"))
            elif has_marker and number not in sure:
                left.append(NoEnd(number, one.source, "an ordinary token of the tokenizer"))
            elif one.source not in found.setdefault(number, []):
                found[number].append(one.source)
    each = tuple(EndOfText(n, _spelling(tokenizer, n), tuple(s)) for n, s in found.items())
    document = _end_of_document([*found], turn, call, getattr(tokenizer, "eos_token_id", None))
    spelled = frozenset(found) & markers - special
    return EndsOfText(each, turn, document, tuple(dict.fromkeys(left)), spelled)


def _ids(value: Any) -> list[int]:
    """The ids in the value of an `eos_token_id`, each once."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return list(dict.fromkeys(v for v in values if isinstance(v, int) and type(v) is not bool))


def _special(tokenizer: Any) -> frozenset[int]:
    """Tokens that a tokenizer leaves out of the texts that it writes."""
    added = {number for number, token in _added(tokenizer).items() if token.special}
    return frozenset(getattr(tokenizer, "all_special_ids", ())) | added


def _added(tokenizer: Any) -> Mapping[int, Any]:
    found: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return found


def _spelling(tokenizer: Any, number: int) -> str | None:
    convert = getattr(tokenizer, "convert_ids_to_tokens", None)
    try:
        found = None if convert is None else convert(number)
    except (IndexError, KeyError, OverflowError, ValueError):  # a row without a token
        return None
    return None if found is None else str(found)


def _end_of_document(
    ends: Sequence[int], turn: int | None, call: int | None, tokenizers: Any
) -> int | None:
    """The tokenizer's end, unless a turn ends with it and there is another that ends no turn."""
    if tokenizers in ends and tokenizers != turn:
        return int(tokenizers)
    return next((number for number in ends if number not in (turn, call)), turn)


# -- what a chat template writes behind an answer --------------------------------------------------


def _end_of_turn(tokenizer: Any, known: set[int], markers: frozenset[int]) -> int | None:
    """The marker (a special token, or one that was added to the vocabulary) that ends the last
    answer of a conversation as the template writes it; None without a template, or where it writes
    none. `known`: the ends that other sources name."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    for last, middle in _conversations():
        written = _written(tokenizer, last)
        if written is None or ANSWER not in written:
            continue
        longer = _written(tokenizer, middle) or ""
        behind = _behind(tokenizer, written, markers)
        between = _behind(tokenizer, longer, markers) if ANSWER in longer else []
        turns, answers = _openings(tokenizer, written, markers)
        return _chosen(behind, between, known, (turns - known, answers - known))
    return None


def _end_of_call(
    tokenizer: Any, known: set[int], specials: frozenset[int], end_of_turn: int | None
) -> int | None:
    """The special token with which a turn ends that calls tools, where that is another than of any
    turn (gpt-oss); None where the template writes none, or one that stands between two calls as
    well."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    call = {"name": "look", "arguments": {"where": ANSWER}}
    calls = [{"id": f"call0000{i}", "type": "function", "function": call} for i in range(2)]
    for given in (calls, calls[:1]):
        turns = [TURNS[0], {"role": "assistant", "content": "", "tool_calls": given}]
        before, found, behind = (_written(tokenizer, turns) or "").rpartition(ANSWER)
        if not found:
            continue
        last = _read(tokenizer, behind.rstrip())
        if not last or end_of_turn in last:
            return None
        between = _read(tokenizer, before.partition(ANSWER)[2])
        turn, answer = _openings(tokenizer, before.partition(ANSWER)[0] + ANSWER, specials)
        is_end = last[-1] in specials - (turn | answer | {*between}) | known
        return last[-1] if is_end else None
    return None


def _conversations() -> Iterator[tuple[Conversation, Conversation]]:
    """Conversations that templates take, and each once more with a question behind the answer."""
    system = {"role": "system", "content": "Be brief."}
    parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in TURNS]
    for turns in (TURNS, [system, *TURNS], parts):
        yield turns, [*turns, turns[-2]]


def _written(tokenizer: Any, turns: Conversation) -> str | None:
    from specctl.runtime.target.templates.bounded_templates import tried

    try:
        return tried(tokenizer, list(turns))
    except Exception:  # a template is somebody's program: it may refuse turns in any way
        return None


def _behind(tokenizer: Any, text: str, markers: frozenset[int]) -> list[int]:
    """The markers behind the answer, up to the first word; blanks between are the template's."""
    found: list[int] = []
    for number in _read(tokenizer, text.rpartition(ANSWER)[2]):
        if number in markers:
            found.append(number)
        elif str(tokenizer.decode([number])).strip():
            break
    return found


def _openings(tokenizer: Any, text: str, markers: frozenset[int]) -> tuple[set[int], set[int]]:
    """The markers with which texts and turns begin, and those with which answers do."""
    before = text.rpartition(ANSWER)[0]
    seen = [number for number in _read(tokenizer, before) if number in markers]
    first = [number for number in _read(tokenizer, before.rpartition(ASK)[0]) if number in markers]
    begin = getattr(tokenizer, "bos_token_id", None)
    # there is a ChatML whose texts begin with <|im_start|>, as its turns do
    begins_turns = sum(number == begin for number in seen) > 1
    turn = [number for number in first if begins_turns or number != begin][:1]
    between = _read(tokenizer, before.rpartition(ASK)[2])
    answer = [number for number in between if number in markers][-1:]
    return {*turn, *([] if begin is None else [begin])}, {*answer}


def _read(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _chosen(
    behind: Sequence[int],
    between: Sequence[int],
    known: set[int],
    openings: tuple[set[int], set[int]],
) -> int | None:
    """The end among the markers behind the last answer, given those behind one in the middle. What
    both have closes the answer, and its last marker the turn (Command R closes two things); a
    marker that only the last answer has is the end where that differs (gpt-oss). A template that
    writes the next turn's header alone ends the turn with it, where it is known to (GLM)."""
    pairs = zip(behind, between, strict=False)
    same = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    same = [number for number in same if number not in openings[0]]
    if same:
        return same[-1]
    ends = [number for number in behind if number not in openings[0] | openings[1]]
    if ends:
        return next((number for number in ends if number in known), ends[0])
    return next((number for number in between[:1] if number in known), None)
