"""Suffix automaton of token ids, built one token at a time (Blumer et al. 1985).

Each state stands for the substrings that end at the same places; `link` leads to the longest suffix
that occurs in more places. Reading a token takes amortised constant time, and so does keeping up
with the longest suffix of another text that occurs here. SAM-Decoding (arXiv 2411.10666) drafts
what follows that suffix.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Match:
    """Where a text stands in an automaton: the state of its longest suffix that occurs there, and
    that suffix's length (0: none)."""

    state: int = 0
    length: int = 0


@dataclass(slots=True)
class SuffixAutomaton:
    """State 0 is the empty string. `end[s]`: where the substrings of state s ended, the newest
    place but for those inside a longer repeat. One writer: whoever extends it."""

    length: list[int] = field(default_factory=lambda: [0])
    link: list[int] = field(default_factory=lambda: [-1])
    end: list[int] = field(default_factory=lambda: [-1])
    following: list[dict[int, int]] = field(default_factory=lambda: [{}])
    last: int = 0
    num_read: int = 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Read more text."""
        for token in tokens:
            self._read(token)

    def _read(self, token: int) -> None:
        if self.last:  # what `repeat` named until now has its newest place at the end of the text
            self.end[self.link[self.last]] = self.num_read - 1
        new = self._state(self.length[self.last] + 1, self.num_read, {})
        self.num_read += 1
        at = self.last
        while at >= 0 and token not in self.following[at]:
            self.following[at][token] = new
            at = self.link[at]
        self.link[new] = 0 if at < 0 else self._suffix(at, token)
        self.last = new

    def _state(self, length: int, end: int, following: dict[int, int]) -> int:
        self.length.append(length)
        self.link.append(0)
        self.end.append(end)
        self.following.append(following)
        return len(self.length) - 1

    def _suffix(self, at: int, token: int) -> int:
        """The state of exactly (longest string of `at`) + token, split off where it is none yet."""
        found = self.following[at][token]
        if self.length[found] == self.length[at] + 1:
            return found
        twin = self._state(self.length[at] + 1, self.end[found], dict(self.following[found]))
        self.link[twin], self.link[found] = self.link[found], twin
        while at >= 0 and self.following[at].get(token) == found:
            self.following[at][token] = twin
            at = self.link[at]
        return twin

    def repeat(self) -> Match:
        """The longest suffix of the text read so far that occurred in it before, there ending at
        `end[state]`."""
        state = max(self.link[self.last], 0)
        return Match(state, self.length[state])

    def advance(self, match: Match, token: int) -> None:
        """Another text, whose longest known suffix is `match`, goes on with `token`."""
        state, length = match.state, match.length
        while state > 0 and token not in self.following[state]:
            state = self.link[state]
            length = self.length[state]
        if token in self.following[state]:
            match.state, match.length = self.following[state][token], length + 1
        else:
            match.state, match.length = 0, 0
