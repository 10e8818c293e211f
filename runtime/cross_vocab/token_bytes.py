"""TokenBytes: what every token of a tokenizer stands for, as bytes, so that two tokenizers compare.

Byte-level tokenizers write bytes in a printable alphabet, others write a space as U+2581 and bytes
as <0x0A>; both are undone here. Special tokens are markers: they stand for themselves, never for
the characters of their name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


def _printable_bytes() -> dict[str, int]:
    """The alphabet of byte-level tokenizers: printable Latin-1 characters stand for themselves,
    the other bytes, in order, for the characters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


ALPHABET = _printable_bytes()


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """`text_of[id]`: the bytes of a token; `marker_of[id]`: the name of a special one; `id_of` and
    `marker_id` the way back, the lowest id among equals. `tokenizer` reads whole texts."""

    tokenizer: Any
    eos_id: int | None
    text_of: dict[int, bytes]
    marker_of: dict[int, str]
    id_of: dict[bytes, int] = field(init=False)
    marker_id: dict[str, int] = field(init=False)
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        texts = {text: i for i, text in sorted(self.text_of.items(), reverse=True) if text}
        markers = {name: i for i, name in sorted(self.marker_of.items(), reverse=True)}
        object.__setattr__(self, "id_of", texts)
        object.__setattr__(self, "marker_id", markers)
        object.__setattr__(self, "longest", max(map(len, texts), default=1))

    @classmethod
    def of(cls, tokenizer: Any, size: int, eos_id: int | None) -> TokenBytes:
        """The tokens below `size`, the rows of the model's head."""
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {i for i, token in added.items() if token.special} | set(
            tokenizer.all_special_ids
        )
        is_byte_level = _is_byte_level(tokenizer)
        text_of: dict[int, bytes] = {}
        marker_of: dict[int, str] = {}
        for token, i in tokenizer.get_vocab().items():
            if i >= size:
                continue
            if i in special:
                marker_of[i] = token
            elif i in added:
                text_of[i] = token.encode()
            else:
                text_of[i] = _bytes_of(token, is_byte_level)
        return cls(tokenizer, eos_id, text_of, marker_of)

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """The text of token ids; markers stand for nothing."""
        return b"".join(self.text_of.get(i, b"") for i in ids)

    def read(self, text: bytes) -> list[int]:
        """The tokens of a text as the tokenizer itself would write them; bytes that are no whole
        character are spelled out."""
        try:
            found = list(self.tokenizer.encode(text.decode(), add_special_tokens=False))
        except UnicodeDecodeError:
            return self.spell(text)
        return found if self.bytes_of(found) == text else self.spell(text)

    def spell(self, text: bytes) -> list[int]:
        """Any text as tokens, the longest match first; bytes that no token starts with are left
        out."""
        found, at = [], 0
        while at < len(text):
            token = self.longest_match(text[at : at + self.longest])
            if token is not None:
                found.append(token)
            at += 1 if token is None else len(self.text_of[token])
        return found

    def longest_match(self, text: bytes) -> int | None:
        """The longest token that a text begins with, if any."""
        sizes = range(min(self.longest, len(text)), 0, -1)
        return next((self.id_of[text[:n]] for n in sizes if text[:n] in self.id_of), None)

    def opening(self) -> list[int]:
        """What the tokenizer puts in front of every text."""
        return [i for i in self.tokenizer.encode("") if i in self.marker_of and i != self.eos_id]


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    parts = json.loads(backend.to_str())
    return any('"ByteLevel"' in json.dumps(parts.get(key)) for key in ("pre_tokenizer", "decoder"))


def _bytes_of(token: str, is_byte_level: bool) -> bytes:
    if is_byte_level:
        if all(char in ALPHABET for char in token):
            return bytes(ALPHABET[char] for char in token)
        return token.encode()
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()


@dataclass(frozen=True, slots=True)
class Shared:
    """Tokens that mean the same in both vocabularies, ascending by target id."""

    target_ids: tuple[int, ...]
    draft_ids: tuple[int, ...]

    @classmethod
    def of(
        cls,
        draft: TokenBytes,
        target: TokenBytes,
        documents: tuple[int | None, int | None] = (None, None),
    ) -> Shared:
        """Equal texts, equal markers, and the two ends of text; where several ids of one side mean
        the same, the lowest. `documents`: what ends a document in either, where that is another."""
        pairs = {i: draft.id_of[text] for text, i in target.id_of.items() if text in draft.id_of}
        for name, i in target.marker_id.items():
            if name in draft.marker_id:
                pairs[i] = draft.marker_id[name]
        for theirs, ours in (documents, (draft.eos_id, target.eos_id)):
            if theirs is not None and ours is not None:
                pairs = {t: d for t, d in pairs.items() if d != theirs}
                pairs[ours] = theirs
        order = sorted(pairs)
        return cls(tuple(order), tuple(pairs[i] for i in order))


@dataclass(frozen=True, slots=True)
class Reader:
    """Target text as draft tokens."""

    draft: TokenBytes
    target: TokenBytes
    shared: dict[int, int]  # target id -> draft id

    def prompt(self, tokens: Sequence[int]) -> list[int]:
        """A whole text, as the draft's own tokenizer would read it; never empty."""
        first = self.shared.get(tokens[0]) if tokens else None
        found, text = [i for i in self.draft.opening() if i != first], b""
        for token in tokens:
            if token not in self.target.marker_of:
                text += self.target.text_of.get(token, b"")
            elif token in self.shared:
                found += [*self.draft.read(text), self.shared[token]]
                text = b""
        return [*found, *self.draft.read(text)] or [self.draft.eos_id or 0]

    def more(self, tokens: Sequence[int]) -> list[int]:
        """What follows a text: token by token where both vocabularies have it, else spelled out."""
        found: list[int] = []
        for token in tokens:
            if token in self.shared:
                found.append(self.shared[token])
            else:
                found += self.draft.spell(self.target.text_of.get(token, b""))
        return found
