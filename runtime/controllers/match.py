"""How long a suffix of the text occurred before, and how far the text then went on as it had there.

The newest place behind a token or a pair of tokens is looked up, and at the pair's place how many
more tokens in front of it are the same; a longer suffix elsewhere is not looked for. A context is
the number of SUFFIXES (1, 2, 4 and 8 tokens) that were found, 0 to 4: 0 = the newest token is new.

The tokens behind that place are about what a copying drafter would draft. Reading the text tells
how many of them came, prompt included, so what copying is worth by context is known before anything
was drafted, and while nothing is.
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

    context: int
    source: int
    matched: int = 0


@dataclass(slots=True)
class MatchIndex:
    """Tokens and pairs of one text, each with the place behind its newest occurrence. Repeats are
    compared one at a time in each context. One writer: the policy `switch`."""

    num_read: int = 0
    newest: int = 0  # context of the last token read
    behind: dict[int, int] = field(default_factory=dict)
    behind_pair: dict[tuple[int, int], int] = field(default_factory=dict)
    compared: list[OpenRepeat] = field(default_factory=list)
    repeats: list[Repeat] = field(default_factory=list)  # decided since they were last taken

    def context(self, tokens: Sequence[int]) -> int:
        """Read what is new, the prompt at first; then the context of the newest token. This runs
        beside every token of a text, drafted or not."""
        first, behind, behind_pair = self.num_read, self.behind, self.behind_pair
        is_prompt, before = first == 0, tokens[first - 1] if first else -1
        for end in range(first, len(tokens)):
            token = tokens[end]
            if self.compared:
                self._compare(tokens, token, is_prompt)
            pair = before, token
            source = behind.get(token)
            if source is None:
                self.newest = 0
            else:
                found, self.newest = behind_pair.get(pair), 1
                if found is not None:
                    source, self.newest = found, self._length(tokens, end - 1, found - 2)
                for each in self.compared:
                    if each.context == self.newest:
                        break
                else:
                    self.compared.append(OpenRepeat(self.newest, source))
            behind[token] = behind_pair[pair] = end + 1
            before = token
        self.num_read = max(first, len(tokens))
        return self.newest

    @staticmethod
    def _length(tokens: Sequence[int], new: int, old: int) -> int:
        """The context of two pairs that are the same and begin at these places."""
        context = 2
        for size in SUFFIXES[2:]:
            for _ in range(size // 2):
                new, old = new - 1, old - 1
                if old < 0 or tokens[old] != tokens[new]:
                    return context
            context += 1
        return context

    def _compare(self, tokens: Sequence[int], token: int, is_prompt: bool) -> None:
        going = []
        for each in self.compared:
            is_same = tokens[each.source] == token
            if is_same:
                each.source, each.matched = each.source + 1, each.matched + 1
            if is_same and each.matched < FURTHEST:
                going.append(each)
            else:
                known = each.matched + (not is_same)
                self.repeats.append(Repeat(each.context, each.matched, known, is_prompt))
        self.compared = going


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

    def repeats(self) -> Iterator[Repeat]:
        """What has been decided since this was last asked."""
        for _, index in self.indices.values():
            if index.repeats:
                yield from index.repeats
                index.repeats = []
