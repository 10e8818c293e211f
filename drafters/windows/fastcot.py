"""FastCoT (arXiv 2311.08263): a sliding window of approximate tokens behind the exact text.

Each forward reads the exact text and a window of guesses; the guesses that agree become exact, all
others are refreshed, and new padding enters at the far end, so that a place has been guessed many
times before the text reaches it. Drafted this way the output is the target's own. The paper goes
further: once enough of a rationale is exact, the window's guesses are taken as they are, a trigger
("So the answer is") is put behind them, and the target answers from that. `answer_after` asks for
this; the answer is then approximate, and every result says so.
Letters: B rows, N nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specctl.core.drafter import (
    Budget,
    Drafter,
    DraftState,
    Family,
    Needs,
    Outcome,
    RoundView,
    Space,
)
from specctl.core.errors import RecipeError
from specctl.core.spec import ModelSpec
from specctl.core.tree import DraftTree, NodeKind, chain_tree, empty_tree
from specctl.core.vocab import VocabMap
from specctl.drafters.option_checks import Options
from specctl.drafters.states.iterate import Iterate, blank_token


@dataclass(frozen=True, slots=True)
class FastCotOptions(Options):
    """`answer_after` exact tokens of rationale the window is taken as it is, followed by the token
    ids of `trigger`, and the target answers; None: never, which is lossless."""

    answer_after: int | None = None
    trigger: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.answer_after is None and self.trigger:
            raise RecipeError(
                "a trigger is ignored without an early answer",
                where="drafter.options.trigger",
                found=f"trigger {list(self.trigger)}, answer_after null",
                expected="both or neither",
                do="set drafter.options.answer_after, and know that answers become approximate",
            )
        if self.answer_after is not None and (self.answer_after < 0 or not self.trigger):
            raise RecipeError(
                "an early answer needs a trigger and a length of rationale",
                where="drafter.options",
                found=f"trigger {list(self.trigger)}, answer_after {self.answer_after}",
                expected="answer_after 0 or more, token ids of a trigger",
                do="encode the trigger with the target's tokenizer, or leave both out",
            )


class FastCot(Drafter):
    """No weights. Approximate if it answers early."""

    family = "fastcot"

    def __init__(
        self, options: FastCotOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        super().__init__(options, spec, vocab)
        self.lossless = options.answer_after is None

    def needs(self) -> Needs:
        return Needs(topk=1)

    def open(self, space: Space) -> FastCotState:
        if len(self.options.trigger) > space.max_nodes:
            raise RecipeError(
                "the trigger is longer than a round's draft",
                where="drafter.options.trigger",
                found=f"{len(self.options.trigger)} tokens, {space.max_nodes} nodes",
                expected="at most as many tokens as serve.length and serve.nodes allow",
                do=f"--length {len(self.options.trigger)} and as many nodes, or more",
            )
        return FastCotState(self.options, blank_token(self.spec), space)


class FastCotState(DraftState):
    """The window of each slot, and what became of its early answer: None while none was given, else
    how many guesses were taken unverified."""

    def __init__(self, options: FastCotOptions, blank: int, space: Space) -> None:
        self.options, self.device = options, space.device
        self.window = Iterate(space, blank)
        self.prompt_len = [0] * space.num_slots
        self.unverified: list[int | None] = [None] * space.num_slots

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        self.window.reset(slot)
        self.prompt_len[slot], self.unverified[slot] = len(tokens), None

    def propose(self, view: RoundView, budget: Budget) -> DraftTree:
        length = min(budget.nodes, budget.depth)
        if length <= 0:
            return empty_tree(len(view.slots), self.device)
        token_BN = self.window.ahead(view, length)
        tree = chain_tree(token_BN, torch.ones_like(token_BN).bool(), NodeKind.POINT)
        early_B = [self._answers(*row, length) for row in zip(view.slots, view.tokens, strict=True)]
        return self._answered(view, tree, early_B) if any(early_B) else tree

    def _answers(self, slot: int, tokens: Sequence[int], length: int) -> bool:
        """Whether the rationale of this row ends now."""
        wanted = self.options.answer_after
        if wanted is None or self.unverified[slot] is not None:
            return False
        return len(tokens) - self.prompt_len[slot] >= wanted and len(self.options.trigger) <= length

    def _answered(self, view: RoundView, tree: DraftTree, early_B: list[bool]) -> DraftTree:
        """The trigger behind the guesses of those rows, and all of it forced."""
        num_taken = tree.num_nodes - len(self.options.trigger)
        for slot, early in zip(view.slots, early_B, strict=True):
            if early:
                self.unverified[slot] = num_taken
        early_B1 = torch.tensor(early_B, device=self.device)[:, None]
        token_BN, trigger = tree.token_BN.clone(), torch.tensor(self.options.trigger)
        token_BN[early_B1[:, 0], num_taken:] = trigger.to(self.device)
        return replace(tree, token_BN=token_BN, forced_BN=early_B1.expand_as(token_BN))

    def observe(self, outcome: Outcome) -> None:
        self.window.advance(outcome)


FAMILY = Family(
    name="fastcot",
    summary=(
        "No training and no draft model: a window of guesses slides ahead of the text, refreshed "
        "by every forward, so that far places are guessed long before they are reached. On request "
        "the target may answer from the guesses before the rationale is written out, which is "
        "approximate; left alone the drafts are verified and the output is the target's own."
    ),
    paper="https://arxiv.org/abs/2311.08263",
    options=FastCotOptions,
    build=FastCot,
    trainable=False,
    policies=("direct",),
)
