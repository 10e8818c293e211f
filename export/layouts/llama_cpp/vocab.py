"""A tokenizer as llama.cpp reads it: texts and types of all ids, merges or scores, special ids.

Two kinds can be written. Byte-level BPE becomes `gpt2` with its merges; how text is split in front
of it is a name (`pretokenizers.py`). BPE with byte fallback, as sentencepiece makes it, becomes
`llama`: there llama.cpp joins, of all neighbours whose joint text is a token, those of the highest
score. That is BPE if every pair that forms a token is a merge and merges stand in the order of the
tokens they form; minus the place in that order is the score. Texts and types follow llama.cpp's
own converter, since `-md` compares them with the target's file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specctl.core.errors import IncompatibleError
from specctl.core.spec import ModelSpec
from specctl.export.layouts.llama_cpp import library
from specctl.runtime.target.gguf.pretokenizers import nearest_pre, pre_of
from specctl.runtime.target.save_target import write_tokenizer
from specctl.runtime.target.templates.ends import CONFIG, NamedEnds, united

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"
_CONTRACTED = re.compile(r"'(?:s|t|re|ve|m|ll|d)(?=[^\W\d_])", re.IGNORECASE)
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_PLACEHOLDER = -1000.0  # score of what no merge forms
_BRACKETS = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
_NAMES = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`special` is the library's table of merges, special ids and chat template. `is_exact`: text
    given to llama.cpp is split as the tokenizer splits it; `deviation` says in which texts not."""

    kind: str
    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...]
    space_prefix: bool | None
    is_exact: bool
    special: Any

    @property
    def deviation(self) -> str | None:
        if self.is_exact:
            return None
        if self.kind == "llama":
            return "llama.cpp reads a text that begins with a blank with one blank more."
        if self.pre != "default":
            return (
                f"llama.cpp has no name for the way this tokenizer splits text; the nearest, "
                f"{self.pre}, differs in one thing: behind an apostrophe, s, t, re, ve, m, ll or d "
                "is a piece of its own even where a word goes on ('tell). Where that matters, send "
                "prompts as token ids."
            )
        return (
            "llama.cpp has no name for the way this tokenizer splits text (tokenizer.ggml.pre is "
            "'default'). Drafts are right, but the engine would read text as other tokens, with "
            "this file and with the target's: send prompts as token ids."
        )

    def is_read_alike(self, text: str) -> bool:
        """Whether llama.cpp splits this text as the tokenizer does."""
        if self.is_exact:
            return True
        if self.kind == "llama":
            return not text.startswith(" ")
        return self.pre != "default" and _CONTRACTED.search(text) is None

    def write(self, writer: Any) -> None:
        """Add the tokenizer's fields to a GGUF file."""
        writer.add_tokenizer_model(self.kind)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        if self.scores:
            writer.add_token_scores(self.scores)
        writer.add_token_types(self.types)
        if self.space_prefix is not None:
            writer.add_add_space_prefix(self.space_prefix)
        self.special.add_to_gguf(writer, quiet=True)


def vocabulary_of(tokenizer: Any, spec: ModelSpec) -> Vocabulary:
    """The target's tokenizer over all of its `vocab_size` ids."""
    if tokenizer is None:
        raise _refused("the target has no tokenizer", "a target with its tokenizer")
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(tokenizer, folder)
        if not (folder / "tokenizer.json").exists():
            raise _refused("a tokenizer without tokenizer.json", "a fast tokenizer")
        body = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        ids = {"bos_token_id": spec.bos_id, "eos_token_id": next(iter(spec.eos_ids), None)}
        (folder / "config.json").write_text(json.dumps(ids), encoding="ascii")
        kind = _kind(body)
        special = library().SpecialVocab(folder, kind == "gpt2", n_vocab=spec.vocab_size)
    special.special_token_ids |= _further_ends(tokenizer, spec, special.special_token_ids)
    tokens, types = _texts(tokenizer, body, kind, spec.vocab_size)
    if kind == "gpt2":
        pre, near = pre_of(body), nearest_pre(body)
        name = pre or near or "default"
        return Vocabulary(kind, name, tokens, types, (), None, pre is not None, special)
    scores, prefix = _scores(body["model"], tokens), _space_prefix(body)
    # Metaspace puts no blank in front of a blank, llama.cpp in front of every text
    is_exact = not (prefix and body.get("normalizer") is None)
    return Vocabulary(kind, "default", tokens, types, scores, prefix, is_exact, special)


def _further_ends(tokenizer: Any, spec: ModelSpec, known: Mapping[str, int]) -> dict[str, int]:
    """The ends of text beside `eos` under the names that llama.cpp has for them: `eot` ends a
    turn, `eom` a message in it. It generates past any other that it does not know by name."""
    named = [NamedEnds(CONFIG, spec.eos_ids)]
    ends = united(named, tokenizer, spec.vocab_size)
    others = [number for number in ends.ids if number != known.get("eos")]
    if ends.of_turn in others:
        others.insert(0, others.pop(others.index(ends.of_turn)))
    return dict(zip(("eot", "eom"), others, strict=False))


def _kind(body: Mapping[str, Any]) -> str:
    model = body["model"]
    if model.get("type") != "BPE":
        raise _refused(f"a {model.get('type')} tokenizer", "BPE")
    odd = [
        n for n in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(n)
    ]
    if odd:
        raise _refused(f"BPE with {', '.join(odd)}", "plain BPE")
    if model.get("byte_fallback"):
        return "llama"
    if '"ByteLevel"' not in json.dumps(body.get("pre_tokenizer")):
        raise _refused("BPE over characters", "BPE over bytes, or with byte fallback")
    return "gpt2"


def _texts(
    tokenizer: Any, body: Mapping[str, Any], kind: str, size: int
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Text and type of every id; ids that no token has are padding."""
    known = {number: text for text, number in body["model"]["vocab"].items()}
    added = {entry["id"]: entry for entry in body.get("added_tokens", ())}
    largest = max((*known, *added))
    if largest >= size:
        raise _refused(f"token id {largest:,} of {size:,}", "ids inside the target's vocabulary")
    unknown = body["model"].get("unk_token")
    tokens, types = [], []
    for number in range(size):
        if number in added:
            text, sort = _added(tokenizer, added[number])
        elif number in known:
            text = known[number]
            is_byte = kind == "llama" and _BYTE.fullmatch(text) is not None
            sort = BYTE if is_byte else UNKNOWN if text == unknown else NORMAL
        else:
            text, sort = f"[PAD{number}]", UNUSED
        tokens.append(text)
        types.append(sort)
    return tuple(tokens), tuple(types)


def _added(tokenizer: Any, entry: Mapping[str, Any]) -> tuple[str, int]:
    """An added token in the form that llama.cpp looks for in text."""
    text = str(entry["content"])
    if not entry.get("normalized", True):
        text = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
    seems = text in _NAMES or any(text.startswith(a) and text.endswith(z) for a, z in _BRACKETS)
    if entry.get("special") or seems:
        return text, CONTROL
    return text.replace(SPACE, " "), USER_DEFINED


def _scores(model: Mapping[str, Any], tokens: Sequence[str]) -> tuple[float, ...]:
    """Minus the place of a token among those that merges form; else the tokenizer is refused."""
    pairs = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    place: dict[str, int] = {}
    last = None
    for left, right in pairs:
        if left + right != last and left + right in place:
            raise _refused("merges in another order than the tokens they form", "one after another")
        last = left + right
        place.setdefault(last, len(place))
    known, allowed = model["vocab"], set(pairs)
    for text in known:
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in known and right in known and (left, right) not in allowed:
                raise _refused(
                    f"no merge of {left!a} and {right!a}, whose joint text is a token",
                    "a merge for every pair that forms a token",
                )
    return tuple(float(-place[t]) if t in place else _PLACEHOLDER - len(place) for t in tokens)


def _space_prefix(body: Mapping[str, Any]) -> bool:
    """Whether a blank is put in front of a text; ways to write blanks that llama.cpp lacks are
    refused."""
    normalizer, split = body.get("normalizer"), body.get("pre_tokenizer")
    marks = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    if steps == [{"type": "Prepend", "prepend": SPACE}, marks] and split is None:
        return True
    blank = split is None or split.get("pattern") == {"String": " "}
    if steps == [marks] and blank:
        return False
    prefix = {"always": True, "first": True, "never": False}
    metaspace = {"type": "Metaspace", "replacement": SPACE, "split": False}
    if not steps and split is not None and metaspace.items() <= split.items():
        return prefix[split.get("prepend_scheme", "always")]
    raise _refused("another way to write blanks than sentencepiece's", "blanks as U+2581")


def _refused(found: str, expected: str) -> IncompatibleError:
    return IncompatibleError(
        "the tokenizer cannot be written for llama.cpp",
        found=found,
        expected=expected,
        do="--to hf, and convert with llama.cpp's convert_hf_to_gguf.py if it knows the tokenizer",
    )
