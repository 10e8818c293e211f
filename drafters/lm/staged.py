"""Staged speculation (arXiv 2308.04623): the draft model is itself drafted for.

A cheap second drafter guesses what the draft model is about to draft; one forward of the draft
model reads what growth asks for and these guesses behind it. Where growth then asks for a guessed
node, what the draft model predicts after it is known already; where it asks for one that nobody
guessed, that one is read with new guesses behind all that were asked for. Chains and trees of any
shape are grown from the draft model's own logits in every case, so that drafts, and the
distributions they are drawn from, are those of the draft model alone: only its forwards get fewer.
The second stage is an n-gram model of the draft model's own best tokens with back-off, as in the
paper: learned before it serves, from what the draft model says of the text that it is trained on
(`table`), and further from what it says while it drafts, the newest first; or it is a look-up in
the text. Behind nodes of a tree it guesses several children each.
Letters: B rows, C candidates, D hidden width, K draft vocabulary, M new nodes, N nodes, P path, S
sequence, T fed tokens, V target vocabulary, W window (guesses), X any axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import Family, Outcome, RoundView, Space
from specctl.core.errors import IntegrityError, RecipeError
from specctl.core.vocab import VocabMap
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions
from specctl.drafters.nets.options import ADDED
from specctl.drafters.option_checks import Count, OneOf
from specctl.drafters.retrieval.best_ngrams import BestNgrams
from specctl.drafters.retrieval.store import NgramStores, StoreLimits
from specctl.drafters.retrieval.store_registry import Scope
from specctl.drafters.states.lm_state import LmState
from specctl.drafters.states.ngram_distributions import learning_scope, tail
from specctl.drafters.states.tree_layout import aim_cache, expansions
from specctl.drafters.training_free.prompt_lookup import NgramIndex

INNER = ("ngram", "prompt-lookup")
WIDE = 3  # children that are guessed for a node of a tree
NGRAMS = "ngrams"  # the name of the table in a package
LEARN_FROM = 0.75  # share of the training after which the table is filled


@dataclass(frozen=True, slots=True)
class StagedOptions(SmallLmOptions):
    """Those of small-lm and: `inner`, who drafts for it (ngram: its own best tokens after the last
    `order` tokens or fewer; prompt-lookup: what followed them in the text), and how many guesses,
    `inner_length`, a forward reads behind each node. `scope`: whose n-grams may help whom beside
    those of the training, which are kept in `table` slots (a power of two; 0: none)."""

    inner: Annotated[str, OneOf(INNER)] = "ngram"
    inner_length: Count = 4
    order: Count = 2
    scope: str = Scope.REQUEST
    max_mib: int = 32
    table: int = field(default=2**18, metadata=ADDED)

    def __post_init__(self) -> None:
        SmallLmOptions.__post_init__(self)
        if self.table < 0 or self.table & (self.table - 1):
            raise RecipeError(
                "the table of n-grams has no such size",
                where="drafter.options.table",
                found=str(self.table),
                expected="a power of two, or 0 for none",
                do="write table: 262144, or leave it out",
            )


class Staged(SmallLm):
    """A small-lm with a drafter of its own."""

    family = "staged"
    splits_rows = False
    options: StagedOptions
    memories = frozenset({NGRAMS})

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        options = self.options
        has_table = options.inner == "ngram" and options.table > 0
        self.ngrams = BestNgrams(options.order, options.table) if has_table else None
        limits = StoreLimits(options.max_mib << 20, per_key=WIDE, newest_first=True)
        self.registry = NgramStores(learning_scope(options.scope), limits)

    def open(self, space: Space) -> StagedState:
        return StagedState(self, space)

    def loss(self, batch: TrainBatch) -> LossOut:
        """That of small-lm; the second stage learns what the draft model says by now."""
        out = super().loss(batch)
        if self.ngrams is not None and torch.is_grad_enabled() and batch.progress >= LEARN_FROM:
            self._learn(self.ngrams, batch)
        return out

    @torch.no_grad()
    def _learn(self, ngrams: BestNgrams, batch: TrainBatch) -> None:
        masks = self.lm.document_masks(batch.document_BS)
        found = self.lm.dense(self.readable(batch.ids_BS), batch.position_BS, masks).logits_BTV
        assert found is not None
        best_BS = self.draft_logits(found).argmax(-1)
        best_BS = best_BS if self.vocab is None else self.vocab.ids_K[best_BS]
        ngrams.learn(batch.ids_BS, batch.document_BS, best_BS)

    def tensors(self) -> dict[str, Tensor]:
        own = super().tensors()
        return own if self.ngrams is None else {**own, NGRAMS: self.ngrams.tokens}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """A package without a table (of small-lm, or of version 0.1.0) leaves it empty."""
        own = {name: tensor for name, tensor in tensors.items() if name != NGRAMS}
        super().load_tensors(own)
        if self.ngrams is None or NGRAMS not in tensors:
            return
        if tensors[NGRAMS].shape != self.ngrams.tokens.shape:
            raise IntegrityError(
                "the table of n-grams is of another size",
                found=f"{list(tensors[NGRAMS].shape)}",
                expected=f"{list(self.ngrams.tokens.shape)}",
                do="fetch the package again, or train the drafter again",
            )
        self.ngrams.tokens.copy_(tensors[NGRAMS])

    def trimmed(self, vocab: VocabMap) -> Self:
        small = super().trimmed(vocab)
        if small.ngrams is not None and self.ngrams is not None:
            small.ngrams.tokens.copy_(self.ngrams.tokens)
        return small


@dataclass(frozen=True, slots=True)
class GuessedNode:
    """A token, behind the guess of that number (-1: behind the text)."""

    token: int
    parent: int


class Inner(Protocol):
    """The second stage. A text is what the row has written, then what has been drafted for it;
    `reach` of its last tokens are enough (None: it reads all of it)."""

    @property
    def reach(self) -> int | None: ...

    def join(self, slot: int, conversation: str | None) -> None: ...

    def start(self, slot: int) -> None: ...

    def read(self, slot: int, tokens: Sequence[int]) -> None:
        """Learn from the row's text, as far as it is final."""

    def learn(self, slot: int, text: Sequence[int], tokens: Sequence[int]) -> None:
        """The draft model's best tokens after a text, the best first."""

    def guess(self, slot: int, text: Sequence[int], length: int, width: int) -> list[GuessedNode]:
        """At most `length` guesses behind a text, at most `width` of them children of one node."""


class OwnNgrams:
    """The draft model's newest best tokens after the last `order` tokens, or after fewer; where it
    has said nothing in this text, what it said while it was trained."""

    def __init__(self, drafter: Staged, space: Space) -> None:
        order = drafter.options.order
        self.stores = drafter.registry.rows(space.identity, space.num_slots)
        self.lengths, self.table = range(order, 0, -1), drafter.ngrams
        self.reach: int | None = order

    def join(self, slot: int, conversation: str | None) -> None:
        self.stores.join(slot, conversation)

    def start(self, slot: int) -> None:
        self.stores.start(slot)

    def read(self, slot: int, tokens: Sequence[int]) -> None:
        del slot, tokens  # it learns from the draft model, not from the text

    def learn(self, slot: int, text: Sequence[int], tokens: Sequence[int]) -> None:
        for length in self.lengths:
            if length <= len(text):
                entries = [((token,), 1.0) for token in reversed(tokens)]
                self.stores.at(slot).update(tail(text, length), entries)

    def guess(self, slot: int, text: Sequence[int], length: int, width: int) -> list[GuessedNode]:
        found, contexts = list[GuessedNode](), [list(tail(text, self.lengths.start))]
        for at, context in enumerate(contexts):  # which grow meanwhile: level by level
            for token in self._children(slot, context)[:width]:
                if len(found) == length:
                    return found
                found.append(GuessedNode(token, at - 1))
                contexts.append([*context, token][-self.lengths.start :])
        return found

    def _children(self, slot: int, context: Sequence[int]) -> list[int]:
        found = [one.ids[0] for one in self.stores.at(slot).longest(context, self.lengths)]
        if not found and self.table is not None:
            best = self.table.best(context)
            found = [] if best is None else [best]
        return found


class TextLookup:
    """What followed the newest tokens of a text where they last occurred in what was written."""

    reach: int | None = None

    def __init__(self, space: Space) -> None:
        self.indices = [NgramIndex(range(4, 0, -1)) for _ in range(space.num_slots)]

    def join(self, slot: int, conversation: str | None) -> None:
        del slot, conversation  # every row reads its own text

    def start(self, slot: int) -> None:
        self.indices[slot] = NgramIndex(range(4, 0, -1))

    def read(self, slot: int, tokens: Sequence[int]) -> None:
        self.indices[slot].read(tokens)

    def learn(self, slot: int, text: Sequence[int], tokens: Sequence[int]) -> None:
        del slot, text, tokens

    def guess(self, slot: int, text: Sequence[int], length: int, width: int) -> list[GuessedNode]:
        del width  # it knows one continuation
        found = self.indices[slot].continuation(text, length)
        return [GuessedNode(token, at - 1) for at, token in enumerate(found)]


@dataclass(slots=True)
class Read:
    """What the draft model has read of a row's draft: each node's token and parent (-1: the root),
    and which node is that token behind that parent."""

    text: list[int]
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    at: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, token: int, parent: int) -> int:
        """The number of a new node."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.at[parent, token] = len(self.tokens) - 1
        return len(self.tokens) - 1

    def pad(self, count: int) -> None:
        """Nodes that nobody will ask for, up to that count."""
        missing = count - len(self.tokens)
        self.tokens += [0] * missing
        self.parents += [-1] * missing

    def until(self, node: int, most: int | None = None) -> list[int]:
        """The text up to and with a node, its last `most` tokens."""
        path = list[int]()
        while node >= 0:
            path.append(self.tokens[node])
            node = self.parents[node]
        start = 0 if most is None else max(0, len(self.text) - most)
        found = [*self.text[start:], *reversed(path)]
        return found if most is None else found[-most:]


class StagedState(LmState):
    """Nodes that growth asks for and nodes that were only guessed lie in the cache side by side;
    `_asked` gives the place of the former in order of expansion. While growth is a chain, guesses
    that failed are written over, so that its nodes stay in a row. `num_asked` counts the calls that
    growth made, `num_forwards` the forwards they took."""

    def __init__(self, drafter: Staged, space: Space) -> None:
        super().__init__(drafter, space)
        self.options: StagedOptions = drafter.options
        self.vocab = drafter.vocab
        own = self.options.inner == "ngram"
        self.inner: Inner = OwnNgrams(drafter, space) if own else TextLookup(space)
        self.num_asked = self.num_forwards = 0
        self._is_line, self._width, self._slots = True, 1, tuple[int, ...]()
        self._rows: list[Read] = []
        self._asked: list[list[int]] = []  # per row: the node of each expansion
        self._guesses: list[list[int]] = []  # per row of a chain: those not asked for yet
        self._ahead_BWK = self._states_BWD = torch.empty(0)

    def join(self, slot: int, conversation: str | None) -> None:
        self.inner.join(slot, conversation)

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        super().start(slot, tokens, taps)
        self.inner.start(slot)

    def root(self, view: RoundView) -> Tensor:
        self._is_line, self._slots = True, view.slots
        self._rows = [Read(list(tokens)) for tokens in view.tokens]
        self._asked = [[] for _ in view.slots]
        self.num_asked += 1
        for slot, tokens in zip(view.slots, view.tokens, strict=True):
            self.inner.read(slot, tokens)
        self._guess()
        return self._known(self._catch_up(view, self._guesses))

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        growth = self._growth
        assert growth is not None, "root() begins a round"
        self.num_asked += 1
        newest = len(self._asked[0]) - 1
        if self._is_line and token_BM.shape[1] == 1 and bool((parent_BM == newest).all()):
            return self._next(token_BM[:, 0].tolist())[:, None]
        if self._is_line:
            self._branch()
        return self._nodes(token_BM.tolist(), parent_BM.tolist())

    # -- a chain ----------------------------------------------------------------------------------

    def _next(self, wanted: list[int]) -> Tensor:
        """[B, K]: logits behind the next node of every row's chain."""
        growth = self._growth
        assert growth is not None
        for row, asked, token in zip(self._rows, self._asked, wanted, strict=True):
            asked.append(row.add(token, len(asked) - 1))
        growth.num_nodes += 1
        if [guess[:1] for guess in self._guesses] == [[token] for token in wanted]:
            self._guesses = [guess[1:] for guess in self._guesses]
            self._states_BWD = self._states_BWD[:, 1:]
            self._ahead_BWK = self._ahead_BWK[:, 1:]
            return self._first()
        return self._reread(wanted)

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
        """Ask the second stage what comes next in every row; behind the root of a tree a line of
        guesses would be of little use."""
        length = self.options.inner_length if self._width == 1 else 0
        self._guesses = [
            [
                guess.token
                for guess in self.inner.guess(
                    slot, row.until(len(row.tokens) - 1, self.inner.reach), length, 1
                )
            ]
            for slot, row in zip(self._slots, self._rows, strict=True)
        ]

    def _known(self, read_BWX: Tensor) -> Tensor:
        """Keep what a forward has read; the second stage learns from all of it."""
        self.num_forwards += 1
        self._ahead_BWK, self._states_BWD = self._head_logits(read_BWX), self._newest_BTD
        best = self._best(self._ahead_BWK)
        for slot, row, guess, found in zip(
            self._slots, self._rows, self._guesses, best, strict=True
        ):
            text = row.until(len(row.tokens) - 1, self.options.order)
            for count in range(len(guess) + 1):
                self.inner.learn(slot, [*text, *guess[:count]], found[count])
        return self._first()

    def _best(self, logits_BXK: Tensor) -> list[list[list[int]]]:
        """The best tokens at every place, as many as the last rounds asked children of a node."""
        best_BXC = logits_BXK.topk(min(self._width, logits_BXK.shape[-1]), dim=-1).indices
        ids_BXC = best_BXC if self.vocab is None else self.vocab.ids_K[best_BXC]
        found: list[list[list[int]]] = ids_BXC.tolist()
        return found

    def _first(self) -> Tensor:
        self._newest_BTD = self._states_BWD[:, :1]
        return self._ahead_BWK[:, 0]

    # -- a tree -----------------------------------------------------------------------------------

    def _branch(self) -> None:
        """The chain becomes a tree. The guesses behind its end, read and not asked for, are nodes
        of it."""
        growth = self._growth
        assert growth is not None
        self._is_line, self._width = False, WIDE
        for row, guess in zip(self._rows, self._guesses, strict=True):
            for token in guess:
                row.add(token, len(row.tokens) - 1)
        growth.num_nodes = max(len(row.tokens) for row in self._rows)
        for row in self._rows:
            row.pad(growth.num_nodes)
        # of the chain's own nodes nobody asks again; they only keep the numbers right
        before = growth.num_nodes - self._ahead_BWK.shape[1] + 1
        self._ahead_BWK = F.pad(self._ahead_BWK[:, 1:], (0, 0, before, 0))
        self._states_BWD = F.pad(self._states_BWD[:, 1:], (0, 0, before, 0))

    def _nodes(self, tokens: list[list[int]], parents: list[list[int]]) -> Tensor:
        """[B, M, K]: logits behind nodes, after at most one forward."""
        growth, wanted = self._growth, list[list[int]]()
        assert growth is not None
        for row, asked, ids, before in zip(self._rows, self._asked, tokens, parents, strict=True):
            behind = [-1 if parent < 0 else asked[parent] for parent in before]
            pairs = list(zip(behind, ids, strict=True))
            for parent, token in pairs:
                if (parent, token) not in row.at:
                    row.add(token, parent)
            wanted.append([row.at[pair] for pair in pairs])
            asked += wanted[-1]
        if max(map(max, wanted)) >= growth.num_nodes:
            self._read_missing(wanted)
        at_BM1 = torch.tensor(wanted, device=self.lm.device)[:, :, None]
        self._newest_BTD = self._states_BWD.gather(
            1, at_BM1.expand(-1, -1, self._states_BWD.shape[-1])
        )
        return self._ahead_BWK.gather(1, at_BM1.expand(-1, -1, self._ahead_BWK.shape[-1]))

    def _read_missing(self, wanted: list[list[int]]) -> None:
        """Read the nodes of every row that nobody had guessed, and guesses behind all that are
        wanted, in one forward."""
        growth, length = self._growth, self.options.inner_length
        assert growth is not None
        for slot, row, nodes in zip(self._slots, self._rows, wanted, strict=True):
            for node in dict.fromkeys(nodes):
                places = [node]
                for guess in self.inner.guess(
                    slot, row.until(node, self.inner.reach), length, WIDE
                ):
                    parent = places[guess.parent + 1]
                    known = row.at.get((parent, guess.token))
                    places.append(row.add(guess.token, parent) if known is None else known)
        start, total = growth.num_nodes, max(len(row.tokens) for row in self._rows)
        for row in self._rows:
            row.pad(total)
        ids_BM = torch.tensor([row.tokens[start:] for row in self._rows], device=self.lm.device)
        parent_BM = torch.tensor([row.parents[start:] for row in self._rows], device=ids_BM.device)
        logits_BMK = self._read_nodes(ids_BM, parent_BM, is_nested=True)
        self.num_forwards += 1
        self._ahead_BWK = torch.cat([self._ahead_BWK, logits_BMK], dim=1)
        self._states_BWD = torch.cat([self._states_BWD, self._newest_BTD], dim=1)
        for slot, row, found in zip(self._slots, self._rows, self._best(logits_BMK), strict=True):
            for node, best in enumerate(found, start=start):
                text = row.until(node, self.options.order)
                self.inner.learn(slot, text, best)

    def observe(self, outcome: Outcome) -> None:
        """Where guesses lie between the nodes, accepted nodes are where they were read."""
        growth, view = self._growth, outcome.view
        if growth is None or self._is_line:
            super().observe(outcome)
            return
        self._growth = None
        if outcome.path_BP.shape[1] > 2:
            index_BP = expansions(outcome, len(self._asked[0]))
            asked_BN = torch.tensor(self._asked, device=index_BP.device)
            place_BP = asked_BN.gather(1, index_BP.clamp(min=0)).masked_fill(index_BP < 0, -1)
            self.kv.keep(view.slot_B, growth.kept_B, place_BP)
        for slot, kept, accepted in zip(view.slots, self._kept, outcome.num_accepted, strict=True):
            self.num_cached[slot] = kept + max(accepted - 1, 0)


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
