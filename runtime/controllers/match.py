"""How long a suffix of the text occurred before, and how far the text then went on as it had there.

Suffixes of 1, 2, 4 and 8 tokens are looked up among all that ended earlier in the same text. A
context is the number of these that were found, 0 to 4: 0 = the newest token is new.

The tokens behind the newest occurrence are what a copying drafter would draft. Reading the text
tells how many of them came, prompt included, so what copying is worth by context is known before
anything was drafted, and while nothing is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

SUFFIXES = (1, 2, 4, 8)
FURTHEST = 8  # tokens behind an occurrence that are compared


@dataclass(frozen=True, slots=True)
class Repeat:
    """In that context, `matched` of `known` compared tokens came as before. `is_prompt`: the text
    was given, not generated."""

    context: int
    matched: int
    known: int
    is_prompt: bool = False


@dataclass(slots=True)
class OpenRepeat:
    """The tokens from `source` on are compared with those that come now."""

    source: int
    matched: int = 0


@dataclass(slots=True)
class MatchIndex:
    """Suffixes of one text, each with the place behind its newest occurrence. Repeats are compared
    one at a time in each context. One writer: the policy `switch`."""

    num_read: int = 0
    newest: int = 0  # context of the last token read
    behind: list[dict[int, int]] = field(default_factory=lambda: [{} for _ in SUFFIXES])
    codes: list[list[int]] = field(default_factory=lambda: [[] for _ in SUFFIXES])
    compared: dict[int, OpenRepeat] = field(default_factory=dict)  # by context
    repeats: list[Repeat] = field(default_factory=list)  # decided since they were last taken

    def context(self, tokens: Sequence[int]) -> int:
        """Read what is new, the prompt at first; then the context of the newest token."""
        is_prompt = self.num_read == 0
        for end in range(self.num_read, len(tokens)):
            if self.compared:
                self._compare(tokens, tokens[end], is_prompt)
            self._read(tokens, end)
        self.num_read = max(self.num_read, len(tokens))
        return self.newest

    def _read(self, tokens: Sequence[int], end: int) -> None:
        """A suffix is known by the code of its halves, a single token by itself."""
        newest, source, code = 0, 0, tokens[end]
        for level, n in enumerate(SUFFIXES):
            behind, codes = self.behind[level], self.codes[level]
            found, behind[code] = behind.get(code), end + 1
            if found is not None and newest == level:
                newest, source = level + 1, found
            codes.append(code)
            if end + 1 < 2 * n:
                break
            code = hash((codes[-1 - n], code))
        self.newest = newest
        if self.newest and self.newest not in self.compared:
            self.compared[self.newest] = OpenRepeat(source)

    def _compare(self, tokens: Sequence[int], token: int, is_prompt: bool) -> None:
        for context, each in tuple(self.compared.items()):
            is_same = tokens[each.source] == token
            if is_same:
                each.source, each.matched = each.source + 1, each.matched + 1
            if not is_same or each.matched == FURTHEST:
                known = each.matched + (not is_same)
                self.repeats.append(Repeat(context, each.matched, known, is_prompt))
                del self.compared[context]


@dataclass(slots=True)
class Matches:
    """One index per live text, found by slot; a slot with another text begins anew."""

    indices: dict[int, tuple[Sequence[int], MatchIndex]] = field(default_factory=dict)

    def contexts(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> list[int]:
        found = []
        for slot, text in zip(slots, texts, strict=True):
            known = self.indices.get(slot)
            if known is None or known[0] is not text:
                known = self.indices[slot] = (text, MatchIndex())
            found.append(known[1].context(text))
        return found

    @property
    def has_repeat(self) -> bool:
        """Whether more than a token has come as before since `repeats` was last asked."""
        return any(
            repeat.matched > 1 for _, index in self.indices.values() for repeat in index.repeats
        )

    def repeats(self) -> Iterator[Repeat]:
        """What has been decided since this was last asked."""
        for _, index in self.indices.values():
            if index.repeats:
                yield from index.repeats
                index.repeats = []
