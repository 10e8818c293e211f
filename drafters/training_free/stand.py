"""STAND (arXiv 2506.04708): stochastic drafts from remembered distributions of n-grams.

For the last 1 .. `max_context` tokens in front of every token that the target was fed, accepted or
not, a store holds the target's `topk` best tokens with the sum of their probabilities: after k
visits the average distribution, times k. Drafting is stepwise: the distribution m of a node is that
of its longest known context, and its logits are log m, so that

    q = softmax(log m / T) = m^(1/T), normalised,

and the tree policies draw distinct children from it by Gumbel top-k. Under sampling a draft from q
is accepted with probability sum_x min(p, q), the best single token only with p(x): that is why the
distributions are kept and not the tokens alone. Children of a node that falls back to a shorter
context have that context's distribution: each node hands out its own. The prompt brings no
probabilities; its tokens are read as distributions of one token.
Letters: B rows, M new nodes, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.core.drafter import Family, Outcome, RoundView, Space, StepState
from specctl.drafters.option_checks import check_options
from specctl.drafters.retrieval.store import Ids
from specctl.drafters.retrieval.store_registry import Scope, StoredState
from specctl.drafters.states.ngram_distributions import (
    NgramDrafter,
    learn_round,
    learn_text,
    step,
    tail,
)


@dataclass(frozen=True, slots=True)
class StandOptions:
    """`max_context` tokens are looked up, then fewer; `topk` tokens are kept of each distribution;
    `scope` says whose text may help whom (request, conversation, process), `max_mib` caps each
    store."""

    max_context: int = 3
    topk: int = 10
    scope: str = Scope.REQUEST
    max_mib: int = 32

    def __post_init__(self) -> None:
        is_right = self.max_context >= 1 and self.topk >= 1
        check_options(self, is_right, ("max_context", "topk"), "positive counts")


class Stand(NgramDrafter):
    """No weights; the distributions are in stores."""

    family = "stand"

    def open(self, space: Space) -> StandState:
        return StandState(self, space)


class StandState(StoredState, StepState):
    """One store per row or shared, by scope, and the contexts of the nodes of this round."""

    may_draft_nothing = True

    def __init__(self, drafter: Stand, space: Space) -> None:
        self.V, self.device = drafter.spec.vocab_size, space.device
        self.lengths = range(drafter.options.max_context, 0, -1)
        self.stores = drafter.registry.rows(space.identity, space.num_slots)
        self._slots: tuple[int, ...] = ()
        self._contexts: list[list[Ids]] = []  # per row: the root's, then those of its expansions

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        learn_text(self.stores.start(slot), tokens, self.lengths, keep=None)

    def root(self, view: RoundView) -> Tensor:
        self._slots = view.slots
        self._contexts = [[tail(tokens, self.lengths.start)] for tokens in view.tokens]
        return self._logits([row[-1:] for row in self._contexts])[:, 0]

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        tokens, parents = token_BM.tolist(), parent_BM.tolist()
        added = []
        for b, row in enumerate(self._contexts):
            new = [
                step(row[parent + 1], token, self.lengths.start)
                for token, parent in zip(tokens[b], parents[b], strict=True)
            ]
            row.extend(new)
            added.append(new)
        return self._logits(added)

    def _logits(self, contexts: Sequence[Sequence[Ids]]) -> Tensor:
        """[B, M, V]: log weights of the longest known contexts, -inf elsewhere."""
        at: list[int] = []
        chances: list[float] = []
        first = 0
        for slot, row in zip(self._slots, contexts, strict=True):
            store = self.stores.at(slot)
            for context in row:
                for length in range(len(context), 0, -1):
                    if distribution := store.weights(context[-length:]):
                        at.extend(first + token for (token,) in distribution)
                        chances.extend(distribution.values())
                        break
                first += self.V
        logits = torch.full((first,), -torch.inf)
        logits[torch.tensor(at, dtype=torch.long)] = torch.tensor(chances).log()
        return logits.to(self.device).view(len(contexts), -1, self.V)

    def observe(self, outcome: Outcome) -> None:
        learn_round(self.stores, outcome, self.lengths, keep=None)


FAMILY = Family(
    name="stand",
    summary=(
        "No training: remembers, for the last few tokens, with which probabilities the target went "
        "on, and samples its drafts from them. Under sampling its drafts are accepted more often "
        "than the same memory's single best token; made for many samples of similar reasoning."
    ),
    paper="https://arxiv.org/abs/2506.04708",
    options=StandOptions,
    build=Stand,
    trainable=False,
    policies=("static-tree", "chain", "dynamic-tree"),
)
