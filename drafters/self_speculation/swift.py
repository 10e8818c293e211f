"""SWIFT (arXiv 2410.06916): which layers to skip is found out while the text is written.

A row begins with every other layer left out. Every `every` tokens one other set of the same size is
tried: it says the newest `window` tokens of the answer in one parallel pass, each from the target's
own context, and its score is the share that it gets right. A better set replaces the present one.
Sets are drawn at random; every 25th is the one with the highest upper confidence bound of a
Gaussian process over those tried (kappa 2.5, noise 0.01). The search rests when a set is good
enough, or nothing better has come for long. First and last layer always run.
Letters: C candidates, I input width, R flat rows, V target vocabulary, W window.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from specctl.core.drafter import Family, Outcome, Space
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.language_model import LanguageModel
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.frames.self_drafter import SelfDrafter
from specctl.drafters.option_checks import OneOf, Options, Within, check_options
from specctl.drafters.retrieval.store_registry import RowStores, Scope, StoredState, StoreRegistry
from specctl.drafters.states.borrowed_state import BorrowedState, shadow_logits

BAYES_EVERY, CANDIDATES, KAPPA, NOISE = 25, 256, 2.5, 1e-2
PATIENCE = 300  # sets that are tried without progress
REMEMBERED = 300  # sets that the Gaussian process is fitted to
Many = Annotated[int, Within(most=1_000_000)]
SCOPES = (Scope.REQUEST, Scope.CONVERSATION, Scope.PROCESS)


@dataclass(frozen=True, slots=True)
class SwiftOptions(Options):
    """`ratio` of the attentions and MLPs between first and last layer are left out. A set is tried
    every `every` tokens on the newest `window`; the search ends at a score of `enough`, after
    300 sets without progress or `trials` in all. `scope` says whose search may help whom."""

    ratio: float = 0.45
    window: Many = 32
    every: Many = 8
    enough: float = 0.95
    trials: Many = 1000
    scope: Annotated[str, OneOf(SCOPES)] = Scope.REQUEST

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        check_options(self, 0.0 < self.ratio < 1.0, ("ratio",), "a share between 0 and 1")
        check_options(self, 0.0 < self.enough <= 1.0, ("enough",), "a share above 0, up to 1")


@dataclass(slots=True, eq=False)
class LayerSearch:
    """What is known of sets of sub-layers: the best one, and all that were tried, as bits (one for
    each attention, then for each MLP, between first and last layer; True: left out)."""

    options: SwiftOptions
    num_layers: int
    best: SubLayers = field(init=False)
    score: float = field(init=False, default=-1.0)
    trials: int = field(init=False, default=0)
    idle: int = field(init=False, default=0)
    tried: list[tuple[tuple[bool, ...], float]] = field(init=False, default_factory=list)
    coins: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.coins = random.Random(0)
        odd = range(1, max(self.num_layers - 1, 1), 2)
        self.best = SubLayers.without(self.num_layers, odd, odd)

    def freeze(self) -> None:
        """Nothing is kept on disk."""

    @property
    def is_over(self) -> bool:
        options = self.options
        is_good = self.score >= options.enough or self.num_layers < 3
        return is_good or self.idle >= PATIENCE or self.trials >= options.trials

    def proposal(self) -> SubLayers:
        """The set to be tried next; the present one where it has no score yet."""
        if self.score < 0:
            return self.best
        if self.trials % BAYES_EVERY == 0 and len(self.tried) > 1:
            return self._parts(self._most_promising())
        return self._parts(self._random())

    def learn(self, parts: SubLayers, score: float) -> None:
        self.trials += 1
        self.idle += 1
        self.tried = [*self.tried, (self._bits(parts), score)][-REMEMBERED:]
        if score > self.score:
            self.best, self.score, self.idle = parts, score, 0

    def _random(self) -> tuple[bool, ...]:
        size = 2 * (self.num_layers - 2)
        out = set(self.coins.sample(range(size), max(1, round(self.options.ratio * size))))
        return tuple(i in out for i in range(size))

    def _most_promising(self) -> tuple[bool, ...]:
        """Of random sets the one with the highest upper confidence bound."""
        drawn = [self._random() for _ in range(CANDIDATES)]
        known_RI = torch.tensor([bits for bits, _ in self.tried], dtype=torch.float64)
        score_R = torch.tensor([score for _, score in self.tried], dtype=torch.float64)
        new_CI = torch.tensor(drawn, dtype=torch.float64)
        mean, spread = score_R.mean(), score_R.std().clamp(min=1e-6)
        between_RR = _similar(known_RI, known_RI)
        noise_RR = NOISE * torch.eye(len(score_R), dtype=torch.float64)
        factor_RR = torch.linalg.cholesky(between_RR + noise_RR)
        across_RC = _similar(known_RI, new_CI)
        weight_R1 = torch.cholesky_solve(((score_R - mean) / spread)[:, None], factor_RR)
        known_part_RC = torch.linalg.solve_triangular(factor_RR, across_RC, upper=False)
        deviation_C = (1.0 - known_part_RC.square().sum(0)).clamp(min=0.0).sqrt()
        bound_C = (across_RC.T @ weight_R1)[:, 0] + KAPPA * deviation_C
        return drawn[int(bound_C.argmax())]

    def _parts(self, bits: tuple[bool, ...]) -> SubLayers:
        inner = self.num_layers - 2
        attention = [1 + i for i in range(inner) if bits[i]]
        mlp = [1 + i for i in range(inner) if bits[inner + i]]
        return SubLayers.without(self.num_layers, attention, mlp)

    def _bits(self, parts: SubLayers) -> tuple[bool, ...]:
        attention, mlp = parts.skipped(self.num_layers)
        inner = range(1, self.num_layers - 1)
        return (*(i in attention for i in inner), *(i in mlp for i in inner))


def _similar(a_RI: Tensor, b_CI: Tensor) -> Tensor:
    """[R, C]: a Gaussian kernel as wide as a quarter of the bits differ."""
    squared_RC = torch.cdist(a_RI, b_CI).square()
    return (-squared_RC / (0.5 * a_RI.shape[1])).exp()


class Swift(SelfDrafter):
    """All layers may run."""

    family = "swift"
    options: SwiftOptions

    def __init__(
        self, options: SwiftOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        super().__init__(options, spec, vocab)
        new = partial(LayerSearch, options, spec.num_layers)
        self.registry = StoreRegistry(Scope(options.scope), new)

    @property
    def attention(self) -> tuple[int, ...]:
        return tuple(range(self.spec.num_layers))

    def open(self, space: Space) -> SwiftState:
        return SwiftState(self, self.lm, space)


class SwiftState(StoredState, BorrowedState):
    """A search for each row, or shared as the scope allows. Whether a set is tried follows from the
    length of the text, so that a row which has slept searches as one that has not."""

    stores: RowStores[LayerSearch]

    def __init__(self, drafter: Swift, lm: LanguageModel, space: Space) -> None:
        window = drafter.options.window
        super().__init__(lm, drafter.attention, space, extra=window)
        self.options, self.stores = (
            drafter.options,
            drafter.registry.rows(space.identity, space.num_slots),
        )
        self.answer_at = [0] * space.num_slots

    def parts_of(self, slot: int, first: int) -> SubLayers:
        return self.stores.at(slot).best

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        super().start(slot, tokens, taps)
        self.answer_at[slot] = len(tokens)
        self.stores.start(slot)

    def observe(self, outcome: Outcome) -> None:
        before = [self.num_known[slot] + 1 for slot in outcome.view.slots]
        super().observe(outcome)
        view = outcome.view
        rows = zip(view.slots, view.tokens, before, outcome.emitted, outcome.finished, strict=True)
        for slot, tokens, length, new, finished in rows:
            if finished is None:
                self._search(slot, [*tokens[:length], *new], length)

    def _search(self, slot: int, text: Sequence[int], length: int) -> None:
        """Try a set for every `every` tokens that the text has grown since it was so long."""
        search, window, every = self.stores.at(slot), self.options.window, self.options.every
        least = self.answer_at[slot] + window
        for end in range(max(length + 1, least), len(text) + 1):
            if (end - least) % every or search.is_over:
                continue
            read = text[end - window - 1 : end]
            ids_1W = torch.tensor([read[:-1]], device=self.lm.device)
            parts, first = search.proposal(), end - window - 1
            said_1WV = shadow_logits(
                self.lm, self.kv, (slot,), ids_1W, first, self.num_known[slot], parts
            )
            right = said_1WV.argmax(-1)[0].tolist()
            search.learn(parts, sum(map(int.__eq__, right, read[1:])) / window)


FAMILY = Family(
    name="swift",
    summary=(
        "No second model, no training, no preparation: the target without some of its attentions "
        "and MLPs drafts, and which ones are left out is searched for while it writes, by how well "
        "sets would have said the newest tokens. Long answers pay for the search; conversations "
        "share it."
    ),
    paper="https://arxiv.org/abs/2410.06916",
    options=SwiftOptions,
    build=Swift,
    trainable=False,
    policies=("chain",),
    borrows_layers=True,
)
