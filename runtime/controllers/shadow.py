"""Shadows: drafts that nobody verifies, held against the text when it has grown past them.

What a drafter would have had accepted is the length of the path in its tree that the text took; for
rules that follow the target's own draws (greedy, target-only) this is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from specctl.core.tree import DraftTree
from specctl.runtime.controllers.base import Score

MOST = 64  # drafts that wait at the same time


@dataclass(frozen=True, slots=True)
class Shadow:
    """One row of a tree on the host: token and parent of every node; `text` is the row's own list,
    which grows, and `start` its length when the draft was made."""

    member: int
    context: int
    text: Sequence[int]
    start: int
    depth: int
    tokens: Sequence[int]
    parents: Sequence[int]

    def score(self) -> Score | None:
        """None while the draft agrees with all that is known and goes on."""
        at, matched = -1, 0
        known = min(self.depth, len(self.text) - self.start)
        for token in self.text[self.start : self.start + known]:
            child = self._child(at, token)
            if child is None:
                return Score(self.member, matched, matched + 1, self.context, self.depth)
            at, matched = child, matched + 1
        if known < self.depth:
            return None
        return Score(self.member, matched, matched, self.context, self.depth)

    def _child(self, parent: int, token: int) -> int | None:
        for node in range(parent + 1, len(self.tokens)):
            if self.parents[node] == parent and self.tokens[node] == token:
                return node
        return None


@dataclass(slots=True)
class Shadows:
    """Drafts that wait for text. One writer: the policy `switch`."""

    waiting: list[Shadow] = field(default_factory=list)

    def add(
        self, member: int, tree: DraftTree, texts: Sequence[Sequence[int]], contexts: Sequence[int]
    ) -> None:
        if tree.num_nodes == 0:
            return
        tokens, parents = tree.token_BN.tolist(), tree.parent_BN.tolist()
        counts = tree.valid_BN.tolist()
        for b, text in enumerate(texts):
            if not any(counts[b]) or len(self.waiting) >= MOST:
                continue
            kept = [t if valid else -1 for t, valid in zip(tokens[b], counts[b], strict=True)]
            context = contexts[b] if contexts else 0
            depth = _depth(parents[b], counts[b])
            shadow = Shadow(member, context, text, len(text), depth, kept, parents[b])
            self.waiting.append(shadow)

    def ripe(self) -> Iterator[Score]:
        """Scores of the drafts that the text has decided; the others go on waiting."""
        left = []
        for shadow in self.waiting:
            score = shadow.score()
            if score is None:
                left.append(shadow)
            else:
                yield score
        self.waiting = left


def _depth(parents: Sequence[int], valid: Sequence[bool]) -> int:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max((d for d, is_real in zip(depths, valid, strict=True) if is_real), default=0)
