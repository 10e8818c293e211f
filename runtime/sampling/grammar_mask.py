"""What a grammar permits behind every node of a draft tree, by that node's own text.

The target's distribution p is masked at every node, so that every verification rule sees the
distribution of the grammar; the drafter's logits are masked too (`Guide`), so that q drafts what
can be accepted. The text of a node is what the row has emitted and the path down to the node;
whatever the matcher knows about a path follows from that path alone, never from tokens drawn later.
Letters: B rows, K draft vocabulary, M new nodes, N nodes, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from specctl.core.drafter import RoundView
from specctl.core.tree import DraftTree
from specctl.runtime.sampling.grammar import Grammar

Path = tuple[int, ...]


class Walk:
    """One row's way through its grammar. A cache: it may be dropped and made again at any time."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self._begin()

    def _begin(self) -> None:
        self._matcher = self.grammar.start()
        self.text: list[int] = []
        self._below: list[int] = []  # consumed beyond the text
        self._masks: dict[Path, Tensor | None] = {}
        self._is_over = False

    def leads_to(self, text: list[int]) -> bool:
        return text[: len(self.text)] == self.text

    def follow(self, text: list[int]) -> None:
        """The row's text has become this."""
        if not self.leads_to(text):
            self._begin()
        new = text[len(self.text) :]
        if not new:
            return
        self._climb(0)
        self._is_over = self._is_over or not self._consume(new)
        self.text += new
        self._masks.clear()

    def mask_V(self, path: Path) -> Tensor | None:
        """Bool: what may follow the text and that path. None if the path itself is not permitted.
        Where the text has ended or left its grammar, or the grammar gave up, it can only end (and
        `cut.py` tells which it was)."""
        if path not in self._masks:
            self._masks[path] = self._find(path)
        return self._masks[path]

    def _find(self, path: Path) -> Tensor | None:
        if path:
            above_V = self.mask_V(path[:-1])
            if above_V is None or not above_V[path[-1]]:
                return None
            if path[-1] in self.grammar.eos_ids:
                return self._only_end()
        elif self._is_over:
            return self._only_end()
        mask_V = self._read() if self._descend(path) else None
        if mask_V is not None:
            return mask_V
        if not path:
            self._is_over = True
        elif self._matcher.is_error():
            self._renew()
        return self._only_end()

    def _descend(self, path: Path) -> bool:
        """The matcher goes to the end of a path that is permitted; False if it gives up."""
        same = 0
        while same < min(len(path), len(self._below)) and path[same] == self._below[same]:
            same += 1
        self._climb(same)
        for token in path[same:]:
            if not self._consume([token]):
                return False
            self._below.append(token)
        return True

    def _read(self) -> Tensor | None:
        """What the matcher permits where it stands; None if it gives up, or knows no token."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        bits = np.unpackbits(packed, count=self.grammar.vocab_size, bitorder="little")
        if self._matcher.is_error() or not bits.any():
            return None
        return torch.from_numpy(bits.view(np.bool_))

    def _renew(self) -> None:
        """A matcher that gave up at a drafted node never leaves that state, and the text may not
        come there: a new one goes to the end of the text."""
        self._matcher, self._below = self.grammar.start(), []
        self._consume(self.text)

    def _climb(self, depth: int) -> None:
        """Back to the first `depth` tokens of the path."""
        if len(self._below) > depth:
            self._matcher.rollback(len(self._below) - depth)
            del self._below[depth:]

    def _consume(self, tokens: list[int]) -> bool:
        """False if the grammar does not go on like that. The end of a text is never consumed: a
        matcher that has stopped by itself cannot be rolled back from there."""
        if not self.grammar.eos_ids.isdisjoint(tokens):
            return False
        if int(self._matcher.validate_tokens(tokens)) < len(tokens):
            return False
        return bool(self._matcher.consume_tokens(tokens))

    def _only_end(self) -> Tensor:
        mask_V = torch.zeros(self.grammar.vocab_size, dtype=torch.bool)
        mask_V[[*self.grammar.eos_ids]] = True
        return mask_V


class GrammarRows:
    """The grammars of the rows of a batch (None: free). One writer: the engine."""

    def __init__(self, grammars: Sequence[Grammar | None]) -> None:
        self._grammars = {b: grammar for b, grammar in enumerate(grammars) if grammar is not None}
        self._walks: dict[int, Walk] = {}
        self._known: list[Walk] = []

    def inherit(self, before: GrammarRows) -> None:
        """Rows that were in an earlier batch go on from where its walks are."""
        self._known = list(before._walks.values())

    def apply(self, scores_BTV: Tensor, tree: DraftTree, view: RoundView) -> None:
        """In place: -inf on what the grammar forbids behind root and nodes. Behind a node that is
        forbidden itself anything goes: the text never comes there."""
        self._follow(view)
        tokens, parents = tree.token_BN.tolist(), tree.parent_BN.tolist()
        rows, banned = [], []
        for b, walk in self._walks.items():
            paths: list[Path] = [()]
            for token, parent in zip(tokens[b], parents[b], strict=True):
                paths.append((*paths[parent + 1], token))
            rows.append(b)
            banned.append(torch.stack([_banned(walk, path, scores_BTV) for path in paths]))
        scores_BTV[rows] = scores_BTV[rows].masked_fill(
            torch.stack(banned).to(scores_BTV.device), -math.inf
        )

    def guide(self, view: RoundView) -> Guide:
        self._follow(view)
        return Guide(self._walks)

    def _follow(self, view: RoundView) -> None:
        assert view.prompt_lens, "a grammar begins where the prompt ends"
        for b, grammar in self._grammars.items():
            text = list(view.tokens[b][view.prompt_lens[b] :])
            if b not in self._walks:
                self._walks[b] = self._found(grammar, text)
            self._walks[b].follow(text)
        self._known = []

    def _found(self, grammar: Grammar, text: list[int]) -> Walk:
        """The known walk of that grammar that is furthest on the way to this text, or a new one.
        No two rows share one."""
        fitting = [w for w in self._known if w.grammar is grammar and w.leads_to(text)]
        if not fitting:
            return Walk(grammar)
        best = max(fitting, key=lambda walk: len(walk.text))
        self._known.remove(best)
        return best


class Guide:
    """Masks the logits of a stepwise drafter while it drafts: those of the root, then those of the
    nodes in order of expansion. It reads the drafted tokens on the host."""

    def __init__(self, walks: dict[int, Walk]) -> None:
        self._walks, self._ids_K = walks, cast("Tensor | None", None)
        self._paths: dict[int, list[Path]] = {}

    def root(self, logits_BK: Tensor, ids_K: Tensor | None) -> Tensor:
        """`ids_K`: target ids of the draft vocabulary (None: the target's). A new tree begins."""
        self._ids_K = None if ids_K is None else ids_K.cpu()
        self._paths = {b: [] for b in self._walks}
        return self._masked(logits_BK[:, None], {b: [()] for b in self._walks})[:, 0]

    def expand(self, token_BM: Tensor, parent_BM: Tensor, logits_BMK: Tensor) -> Tensor:
        tokens, parents = token_BM.tolist(), parent_BM.tolist()
        new: dict[int, list[Path]] = {}
        for b, paths in self._paths.items():
            known = len(paths)
            for token, parent in zip(tokens[b], parents[b], strict=True):
                paths.append((*(paths[parent] if parent >= 0 else ()), token))
            new[b] = paths[known:]
        return self._masked(logits_BMK, new)

    def _masked(self, logits_BMK: Tensor, paths: dict[int, list[Path]]) -> Tensor:
        logits_BMK = logits_BMK.clone()
        for b, row in paths.items():
            banned = [_banned(self._walks[b], path, logits_BMK) for path in row]
            banned_MV = torch.stack(banned)
            banned_MK = banned_MV if self._ids_K is None else banned_MV[:, self._ids_K]
            logits_BMK[b] = logits_BMK[b].masked_fill(banned_MK.to(logits_BMK.device), -math.inf)
        return logits_BMK


def _banned(walk: Walk, path: Path, like: Tensor) -> Tensor:
    mask_V = walk.mask_V(path)
    if mask_V is None:
        return torch.zeros(walk.grammar.vocab_size, dtype=torch.bool)
    return ~mask_V
