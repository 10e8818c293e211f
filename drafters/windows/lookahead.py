"""Lookahead decoding (arXiv 2402.02057): n-grams of the target's own Jacobi steps, verified later.

A window of n - 1 rows (their age) and W columns (places ahead) is fed beside the draft as probes.
Probe (r, i) stands r + i places behind the root (0, 0); it sees the oldest row up to column i and
its own column, that is, it is a child of (r - 1, i), and (0, i) one of (0, i - 1). What the target
predicts after the newest row becomes the new newest row; the oldest row is dropped, and the window
moves on by one place. Column i with its result is an n-gram: it enters a pool under its first
token, `guesses` of a key, the newest first. Drafted are all n-grams that begin with the root, equal
beginnings as one path. Row 0, column 0 always is the root, a token that was really written.
Letters: B rows, C candidates, M new nodes (probes), T fed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.core.drafter import (
    Budget,
    Drafter,
    Family,
    Needs,
    Outcome,
    RoundView,
    Space,
)
from specctl.core.errors import RecipeError
from specctl.core.spec import ModelSpec
from specctl.core.tree import DraftTree
from specctl.core.vocab import VocabMap
from specctl.drafters.option_checks import check_options
from specctl.drafters.retrieval.store import NgramStores, StoreLimits
from specctl.drafters.retrieval.store_registry import Scope, StoredState
from specctl.drafters.retrieval.trie import merged, pack
from specctl.drafters.states.ngram_distributions import learning_scope
from specctl.drafters.states.probes import with_probes


@dataclass(frozen=True, slots=True)
class LookaheadOptions:
    """N-grams of `ngram` tokens, `guesses` of them kept under a first token; a `window` of so many
    columns (None: as many as half of the round's nodes allow; 0: none). `from_text`: n-grams of
    prompt and answer join the pool. `scope` says whose pool may help whom."""

    ngram: int = 4
    window: int | None = None
    guesses: int = 7
    from_text: bool = True
    scope: str = Scope.REQUEST
    max_mib: int = 32

    def __post_init__(self) -> None:
        window = 1 if self.window is None else self.window
        is_right = self.ngram >= 2 and self.guesses >= 1 and window >= 0
        expected = "ngram 2 or more, guesses 1 or more, window 0 or more"
        check_options(self, is_right, ("ngram", "guesses", "window"), expected)

    def columns(self, nodes: int) -> int:
        """W: the window's width in rounds of so many nodes."""
        rows = self.ngram - 1
        if self.window is None:
            return (nodes // 2 + 1) // rows
        if self.window * rows > nodes:
            raise RecipeError(
                "the window leaves no place for a guess",
                where="serve.nodes",
                found=f"{nodes} nodes for {rows} rows of {self.window} columns",
                expected=f"{(self.window + self.guesses) * rows} nodes or so",
                do=f"--set serve.nodes={(self.window + self.guesses) * rows}, or leave window out",
            )
        return self.window


class Lookahead(Drafter):
    """No weights; the pool is a store."""

    family = "lookahead"

    def __init__(
        self, options: LookaheadOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        super().__init__(options, spec, vocab)
        limits = StoreLimits(options.max_mib << 20, options.guesses, newest_first=True)
        self.registry = NgramStores(learning_scope(options.scope), limits)

    def needs(self) -> Needs:
        return Needs(topk=1)

    def open(self, space: Space) -> LookaheadState:
        return LookaheadState(self, space)


@dataclass(slots=True)
class Window:
    """rows[r][i] is the guess r + i places behind the root; `age` counts its steps."""

    rows: list[list[int]]
    age: int = 0

    def step(self, results: list[int]) -> list[tuple[int, ...]]:
        """Take the target's best tokens after the newest row; returns the n-grams of all columns,
        none while a row still holds what the window was filled with."""
        columns = zip(*self.rows, results, strict=True)
        found = list(columns) if self.age >= len(self.rows) - 1 else []
        self.rows = [*self.rows[1:], results]
        self.age += 1
        return found


class LookaheadState(StoredState):
    """Per slot: the pool, the window, and how much of the text has joined the pool."""

    def __init__(self, drafter: Lookahead, space: Space) -> None:
        self.options, self.device = drafter.options, space.device
        self.stores = drafter.registry.rows(space.identity, space.num_slots)
        self.num_rows = drafter.options.ngram - 1
        self.num_columns = drafter.options.columns(space.max_nodes)
        self.windows = [self._filled([0]) for _ in range(space.num_slots)]
        self.num_read = [0] * space.num_slots

    def _filled(self, tokens: Sequence[int]) -> Window:
        """A window of random tokens of the prompt, the same for every slot."""
        size = (self.num_rows, self.num_columns)
        at = torch.randint(len(tokens), size, generator=torch.Generator().manual_seed(0))
        return Window([[tokens[i] for i in row] for row in at.tolist()])

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        self.stores.start(slot)
        self.windows[slot], self.num_read[slot] = self._filled(tokens), 0

    def propose(self, view: RoundView, budget: Budget) -> DraftTree:
        parents = self._parents()
        if len(parents) > budget.nodes:
            parents = []
        drafts, probes = [], []
        for slot, tokens in zip(view.slots, view.tokens, strict=True):
            if self.options.from_text:
                self._read(slot, tokens)
            found = self.stores.at(slot).get((tokens[-1],))
            drafts.append(merged(ngram.ids for ngram in found))
            rows = self.windows[slot].rows
            probes.append([token for row in rows for token in row][1:] if parents else [])
        left = Budget(budget.nodes - len(parents), budget.depth)
        tree = pack(drafts, left, self.device)
        parent_M = torch.tensor(parents, dtype=torch.long, device=self.device)
        parent_M = torch.where(parent_M >= 0, parent_M + tree.num_nodes, parent_M)
        token_BM = torch.tensor(probes, dtype=torch.long, device=self.device)
        return with_probes(tree, token_BM, parent_M, self.num_rows + self.num_columns - 2)

    def _parents(self) -> list[int]:
        """The probes' parents among the probes, row by row; (0, 0) is the root, -1."""
        W = self.num_columns
        first = [i - 2 for i in range(1, W)]
        return first + [(r - 1) * W + i - 1 for r in range(1, self.num_rows) for i in range(W)]

    def _read(self, slot: int, tokens: Sequence[int]) -> None:
        """The text's new n-grams join the pool."""
        store, n = self.stores.at(slot), self.options.ngram
        for at in range(self.num_read[slot], len(tokens) - n + 1):
            store.add((tokens[at],), tuple(tokens[at + 1 : at + n]))
        self.num_read[slot] = max(self.num_read[slot], len(tokens) - n + 1)

    def observe(self, outcome: Outcome) -> None:
        num_probes = len(self._parents())
        if self.num_columns == 0 or outcome.tree.num_probes != num_probes:
            return  # the window was not fed
        assert outcome.topk_BTC is not None
        fed, roots = outcome.topk_BTC[:, :, 0].tolist(), outcome.view.root_B.tolist()
        for b, slot in enumerate(outcome.view.slots):
            window = self.windows[slot]
            window.rows[0][0] = roots[b]
            results = [fed[b][0], *fed[b][len(fed[b]) - num_probes :]][-self.num_columns :]
            for first, *rest in window.step(results):
                self.stores.at(slot).add((first,), tuple(rest))


FAMILY = Family(
    name="lookahead",
    summary=(
        "No training and no draft model: beside each draft the target is fed a small window of its "
        "own guesses a few tokens ahead, and what it makes of them is kept as n-grams and drafted "
        "where their first token comes up. Works on any text, for some fifty more tokens a round: "
        "where the hardware computes those for nothing it gains, elsewhere it loses."
    ),
    paper="https://arxiv.org/abs/2402.02057",
    options=LookaheadOptions,
    build=Lookahead,
    trainable=False,
    policies=("direct",),
)
