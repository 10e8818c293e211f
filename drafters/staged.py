"""Staged speculation (arXiv 2308.04623): the draft model is itself drafted for.

A cheap second drafter guesses what the draft model is about to draft; one forward of the draft
model reads the root and these guesses. Where growth then asks for a guessed token, what the draft
model predicts after it is known already; where it asks for another one, the draft model reads that
one, and new guesses behind it. Whatever grows the tree is given the draft model's own logits in
every case, so that drafts, and the distributions they are drawn from, are those of the draft model
alone: only its forwards get fewer. The second stage is an n-gram model of the draft model's own
best tokens, newest first with back-off, as in the paper, or a look-up in the text.
Letters: B rows, D hidden width, K draft vocabulary, M new nodes, T fed tokens, W window (guesses),
X any axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from specctl.core.drafter import Family, RoundView, Space
from specctl.drafters.option_checks import check_choice, check_count
from specctl.drafters.prompt_lookup import NgramIndex
from specctl.drafters.retrieval.store import NgramStores, StoreLimits
from specctl.drafters.retrieval.store_registry import Scope
from specctl.drafters.small_lm import SmallLm, SmallLmOptions
from specctl.drafters.states.lm_state import LmState
from specctl.drafters.states.ngram_distributions import learning_scope, tail
from specctl.drafters.states.tree_layout import aim_cache

INNER = ("ngram", "prompt-lookup")


@dataclass(frozen=True, slots=True)
class StagedOptions(SmallLmOptions):
    """Those of small-lm and: `inner`, who drafts for it (ngram: its own best tokens after the last
    `order` tokens or fewer; prompt-lookup: what followed them in the text), and how many guesses,
    `inner_length`, each of its forwards reads. `scope`: whose n-grams may help whom."""

    inner: str = "ngram"
    inner_length: int = 4
    order: int = 2
    scope: str = Scope.REQUEST
    max_mib: int = 32

    def __post_init__(self) -> None:
        SmallLmOptions.__post_init__(self)
        check_choice("inner", self.inner, INNER)
        check_count("inner_length", self.inner_length)
        check_count("order", self.order)


class Staged(SmallLm):
    """A small-lm with a drafter of its own."""

    family: ClassVar[str] = "staged"

    def open(self, space: Space) -> StagedState:
        return StagedState(self, space)


class Inner(Protocol):
    """The second stage. A text is what the row has written, then what has been drafted for it."""

    def join(self, slot: int, conversation: str | None) -> None: ...

    def start(self, slot: int) -> None: ...

    def read(self, slot: int, tokens: Sequence[int]) -> None:
        """Learn from the row's text, as far as it is final."""

    def learn(self, slot: int, text: Sequence[int], token: int) -> None:
        """The draft model's best token after a text."""

    def guess(self, slot: int, text: Sequence[int], length: int) -> list[int]: ...


class OwnNgrams:
    """The draft model's newest best token after the last `order` tokens, or after fewer."""

    def __init__(self, options: StagedOptions, space: Space) -> None:
        limits = StoreLimits(options.max_mib << 20, per_key=1, newest_first=True)
        registry = NgramStores(learning_scope(options.scope), limits)
        self.stores = registry.rows(space.identity, space.num_slots)
        self.lengths = range(options.order, 0, -1)

    def join(self, slot: int, conversation: str | None) -> None:
        self.stores.join(slot, conversation)

    def start(self, slot: int) -> None:
        self.stores.start(slot)

    def read(self, slot: int, tokens: Sequence[int]) -> None:
        del slot, tokens  # it learns from the draft model, not from the text

    def learn(self, slot: int, text: Sequence[int], token: int) -> None:
        for length in self.lengths:
            if length <= len(text):
                self.stores.at(slot).add(tail(text, length), (token,))

    def guess(self, slot: int, text: Sequence[int], length: int) -> list[int]:
        context, found = list(tail(text, self.lengths.start)), list[int]()
        while len(found) < length:
            best = self.stores.at(slot).longest(context, self.lengths)
            if not best:
                break
            found.append(best[0].ids[0])
            context.append(found[-1])
        return found


class TextLookup:
    """What followed the newest tokens of a text where they last occurred in what was written."""

    def __init__(self, space: Space) -> None:
        self.indices = [NgramIndex(range(4, 0, -1)) for _ in range(space.num_slots)]

    def join(self, slot: int, conversation: str | None) -> None:
        del slot, conversation  # every row reads its own text

    def start(self, slot: int) -> None:
        self.indices[slot] = NgramIndex(range(4, 0, -1))

    def read(self, slot: int, tokens: Sequence[int]) -> None:
        self.indices[slot].read(tokens)

    def learn(self, slot: int, text: Sequence[int], token: int) -> None:
        del slot, text, token

    def guess(self, slot: int, text: Sequence[int], length: int) -> list[int]:
        return self.indices[slot].continuation(text, length)


class StagedState(LmState):
    """Per row: the guesses whose logits have been read but not been asked for. As long as growth is
    a chain the guesses stand in the cache where its nodes will stand. `num_asked` counts the states
    that growth wanted, `num_forwards` the forwards it took."""

    def __init__(self, drafter: Staged, space: Space) -> None:
        super().__init__(drafter, space)
        self.options: StagedOptions = drafter.options
        self.vocab = drafter.vocab
        own = self.options.inner == "ngram"
        self.inner: Inner = OwnNgrams(self.options, space) if own else TextLookup(space)
        self.num_asked = self.num_forwards = 0
        self._is_line, self._slots = True, tuple[int, ...]()
        self._texts: list[list[int]] = []  # per row: its text and the nodes drafted so far
        self._guesses: list[list[int]] = []  # per row: those not asked for yet
        self._ahead_BWK = self._states_BWD = torch.empty(0)

    def join(self, slot: int, conversation: str | None) -> None:
        self.inner.join(slot, conversation)

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        super().start(slot, tokens, taps)
        self.inner.start(slot)

    def root(self, view: RoundView) -> Tensor:
        self._is_line, self._slots = True, view.slots
        self._texts = [list(tokens) for tokens in view.tokens]
        for slot, tokens in zip(view.slots, view.tokens, strict=True):
            self.inner.read(slot, tokens)
        self._guess()
        return self._known(self._catch_up(view, self._guesses))

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        growth = self._growth
        assert growth is not None, "root() begins a round"
        newest = growth.num_nodes - 1
        self._is_line = self._is_line and token_BM.shape[1] == 1
        if not self._is_line or bool((parent_BM != newest).any()):
            self._is_line = False
            self.num_asked, self.num_forwards = self.num_asked + 1, self.num_forwards + 1
            return super().expand(token_BM, parent_BM)
        wanted = token_BM[:, 0].tolist()
        for text, token in zip(self._texts, wanted, strict=True):
            text.append(token)
        growth.num_nodes += 1
        if [guess[:1] for guess in self._guesses] == [[token] for token in wanted]:
            self._guesses = [guess[1:] for guess in self._guesses]
            self._states_BWD = self._states_BWD[:, 1:]
            self._ahead_BWK = self._ahead_BWK[:, 1:]
            return self._first()[:, None]
        return self._reread(wanted)[:, None]

    def _reread(self, tokens: list[int]) -> Tensor:
        """The newest nodes and new guesses behind them, in one forward."""
        growth = self._growth
        assert growth is not None
        self._guess()
        rows = [[token, *guess] for token, guess in zip(tokens, self._guesses, strict=True)]
        W, node = max(map(len, rows)), growth.num_nodes - 1
        ids_BW = torch.tensor([r + [0] * (W - len(r)) for r in rows], device=self.lm.device)
        span = growth.longest + node + W
        uniform = None if growth.uniform is None else growth.uniform + node
        aim_cache(self.kv, growth.view, growth.kept_B + node, W, span, uniform)
        return self._known(self._feed(ids_BW, growth.kept_B + node, span))

    def _guess(self) -> None:
        """Ask the second stage what comes next in every row."""
        length = self.options.inner_length
        self._guesses = [
            self.inner.guess(slot, text, length)
            for slot, text in zip(self._slots, self._texts, strict=True)
        ]

    def _known(self, read_BWX: Tensor) -> Tensor:
        """Keep what a forward has read; the second stage learns from all of it."""
        self.num_forwards += 1
        self._ahead_BWK, self._states_BWD = self._head_logits(read_BWX), self._newest_BTD
        best_BW = self._ahead_BWK.argmax(-1)
        best_BW = best_BW if self.vocab is None else self.vocab.ids_K[best_BW]
        rows = zip(self._slots, self._texts, self._guesses, best_BW.tolist(), strict=True)
        for slot, text, guess, predicted in rows:
            for count in range(len(guess) + 1):
                self.inner.learn(
                    slot, [*text[-self.options.order :], *guess[:count]], predicted[count]
                )
        return self._first()

    def _first(self) -> Tensor:
        self.num_asked += 1
        self._newest_BTD = self._states_BWD[:, :1]
        return self._ahead_BWK[:, 0]


FAMILY = Family(
    name="staged",
    summary=(
        "A small language model that drafts for the target and is drafted for itself: an n-gram "
        "model of its own words, or a look-up in the text, guesses what it will draft, and one of "
        "its forwards confirms several tokens. Its drafts are exactly those of small-lm, for fewer "
        "forwards; it pays where the draft model is large enough to be worth drafting for."
    ),
    paper="https://arxiv.org/abs/2308.04623",
    options=StagedOptions,
    build=Staged,
    trainable=True,
    policies=("chain", "dynamic-tree", "static-tree"),
)
