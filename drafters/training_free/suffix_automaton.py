"""SAM-Decoding (arXiv 2411.10666): draft what followed the longest repeat of the newest tokens.

A suffix automaton of the row's own text finds, in amortised constant time per token, the longest
suffix of any length that occurred before; a second, static one over given texts is kept up with
likewise, and is believed where its match is longer by `bias` tokens. How far to copy follows the
length of the match (SuffixDecoding, arXiv 2411.04975). Having matched m tokens, the k-th further
one is guessed to come true with chance (m + 1) / (m + k + 1), the rule of succession.

The automaton (Blumer et al. 1985) is built one token at a time. Each state stands for the
substrings that end at the same places; `link` leads to the longest suffix that occurs in more
places. Reading a token takes amortised constant time, and so does following the longest suffix of
another text.
Letters: R flat rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from specctl.core.drafter import Budget, Family, Space
from specctl.drafters.option_checks import check_options
from specctl.drafters.retrieval.corpus import BREAK, CorpusDrafter
from specctl.drafters.retrieval.occurrences import copied
from specctl.drafters.retrieval.trie import Trie, TrieState


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


@dataclass(frozen=True, slots=True)
class SuffixAutomatonOptions:
    """A match of at least `min_match` tokens is continued by `factor` times its length plus
    `offset` tokens; given texts win with a match longer by `bias`."""

    min_match: int = 1
    factor: float = 2.0
    offset: int = 1
    bias: int = 5

    def __post_init__(self) -> None:
        is_right = min(self.factor, self.offset) >= 0 and self.factor + self.offset > 0
        expected = "min_match at least 1, and factor or offset above 0"
        names = ("min_match", "factor", "offset")
        check_options(self, self.min_match >= 1 and is_right, names, expected)


class SuffixAutomatonDrafter(CorpusDrafter):
    """No weights; a package may hold the texts of the static automaton."""

    family = "suffix-automaton"
    max_tokens: ClassVar[int] = 2_000_000  # an automaton takes about half a kilobyte per token
    options: SuffixAutomatonOptions

    def index(self) -> None:
        self.static = SuffixAutomaton()
        self.static.extend(self.corpus_R.tolist())

    def open(self, space: Space) -> SuffixAutomatonState:
        return SuffixAutomatonState(self, space)


@dataclass(slots=True)
class _AutomatonRow:
    """One row's automaton and its place in the static one. One writer: the DraftState."""

    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    there: Match = field(default_factory=Match)


class SuffixAutomatonState(TrieState):
    """One automaton per slot."""

    def __init__(self, drafter: SuffixAutomatonDrafter, space: Space) -> None:
        self.drafter, self.device = drafter, space.device
        self.rows = [_AutomatonRow() for _ in range(space.num_slots)]

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        self.rows[slot] = _AutomatonRow()
        self._read(slot, tokens)

    def end(self, slot: int) -> None:
        self.rows[slot] = _AutomatonRow()

    def _read(self, slot: int, tokens: Sequence[int]) -> None:
        row = self.rows[slot]
        new = tokens[row.own.num_read :]
        row.own.extend(new)
        if self.drafter.static.num_read:
            for token in new:
                self.drafter.static.advance(row.there, token)

    def draft_row(self, slot: int, tokens: Sequence[int], budget: Budget) -> Trie:
        self._read(slot, tokens)
        options, row, trie = self.drafter.options, self.rows[slot], Trie()
        own = row.own.repeat()
        is_static = row.there.length > own.length + options.bias
        match = row.there if is_static else own
        if match.length < options.min_match:
            return trie
        wanted = int(options.factor * match.length) + options.offset
        length = min(wanted, budget.depth, budget.nodes)
        if is_static:
            draft = self._static(match, length)
        else:
            draft = copied(tokens, row.own.end[match.state], length)
        chance = [(match.length + 1) / (match.length + k + 1) for k in range(1, length + 1)]
        trie.add_path(draft, chance)
        return trie

    def _static(self, match: Match, length: int) -> list[int]:
        after = self.drafter.static.end[match.state] + 1
        ids: list[int] = self.drafter.corpus_R[after : after + length].tolist()
        return ids[: ids.index(BREAK)] if BREAK in ids else ids


FAMILY = Family(
    name="suffix-automaton",
    summary=(
        "No training: finds the longest repeat of the newest tokens, however long, in the text so "
        "far (and in texts given to it), and copies the further the longer the repeat is. Prompt "
        "lookup without a limit on the n-gram, at constant cost per token; the choice for long "
        "contexts that repeat themselves."
    ),
    paper="https://arxiv.org/abs/2411.10666",
    options=SuffixAutomatonOptions,
    build=SuffixAutomatonDrafter,
    trainable=False,
    policies=("direct",),
)
