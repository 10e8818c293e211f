"""Parallel decoding by fixed-point iteration: Jacobi, Gauss-Seidel, hybrid (arXiv 2305.10427).

Greedy decoding solves y_i = argmax p(. | x, y_<i) for i = 1 .. m. Algorithm 1 (Jacobi) starts from
padding and updates all y_i at once; at least one more leading token is final after each step, so m
steps suffice. Algorithm 2 (Gauss-Seidel over blocks) does this block by block, each block starting
behind final tokens. Algorithm 3 (hybrid) does so up to an assumed length and then goes on token by
token, so that it need not know where the text ends. Here a step is a round: the iterate is drafted,
verification finds the final tokens, the end of text is cut by the engine, and the fixed point is
the target's own output.
Letters: B rows, N nodes, W window (guesses), Z slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

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
from specctl.core.tree import DraftTree, NodeKind, chain_tree, empty_tree
from specctl.drafters.option_checks import Count, OneOf, Options, Within
from specctl.drafters.states.iterate import Iterate, blank_token

SCHEDULES = ("jacobi", "gauss-seidel", "hybrid")


@dataclass(frozen=True, slots=True)
class JacobiOptions(Options):
    """`schedule` jacobi iterates over as many tokens as a round may draft, gauss-seidel and hybrid
    over `block` tokens at a time; hybrid stops after `assumed_length` tokens of answer."""

    schedule: Annotated[str, OneOf(SCHEDULES)] = "gauss-seidel"
    block: Annotated[int, Within(2)] = 5
    assumed_length: Count = 128


class Jacobi(Drafter):
    """No weights; everything is in the state."""

    family = "jacobi"

    def needs(self) -> Needs:
        return Needs(topk=1)

    def open(self, space: Space) -> JacobiState:
        return JacobiState(self.options, blank_token(self.spec), space)


class JacobiState(DraftState):
    """The iterate of each slot, and how many tokens of its block are not final yet."""

    def __init__(self, options: JacobiOptions, blank: int, space: Space) -> None:
        self.iterate, self.device = Iterate(space, blank), space.device
        is_whole = options.schedule == "jacobi"
        self.block = self.iterate.width + 1 if is_whole else options.block
        self.limit = options.assumed_length if options.schedule == "hybrid" else None
        self.left_Z = torch.full((space.num_slots,), self.block, device=space.device)
        self.prompt_len = [0] * space.num_slots

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        self.iterate.reset(slot)
        self.left_Z[slot], self.prompt_len[slot] = self.block, len(tokens)

    def propose(self, view: RoundView, budget: Budget) -> DraftTree:
        """The rest of each row's block; its first open token is what the root predicts."""
        length = min(budget.nodes, budget.depth, self.block - 1)
        if length <= 0:
            return empty_tree(len(view.slots), self.device)
        count_B1 = self.left_Z[view.slot_B, None] - 1
        if self.limit is not None:
            written = [
                len(tokens) - self.prompt_len[slot]
                for slot, tokens in zip(view.slots, view.tokens, strict=True)
            ]
            is_open = [[count < self.limit] for count in written]
            count_B1 = count_B1 * torch.tensor(is_open, device=self.device)
        valid_BN = torch.arange(length, device=self.device) < count_B1
        return chain_tree(self.iterate.ahead(view, length), valid_BN, NodeKind.POINT)

    def observe(self, outcome: Outcome) -> None:
        slot_B = outcome.view.slot_B  # what was missed may end blocks anywhere
        left_B1 = self.left_Z[slot_B, None] - self.iterate.advance(outcome)
        is_done_B1 = left_B1 <= 0
        left_B1 = (left_B1 - 1) % self.block + 1
        guess_BW = self.iterate.guess_ZW[slot_B]
        self.iterate.guess_ZW[slot_B] = guess_BW.masked_fill(is_done_B1, self.iterate.blank)
        self.left_Z[slot_B] = left_B1[:, 0]


FAMILY = Family(
    name="jacobi",
    summary=(
        "No training and no draft model: guesses the next tokens as padding and lets the target "
        "correct all guesses at once, round after round, until they stand still. Jacobi iterates "
        "over the whole draft, Gauss-Seidel and hybrid over blocks. Ordinary models gain little; "
        "it shows what parallel decoding is, and suits targets trained to converge fast."
    ),
    paper="https://arxiv.org/abs/2305.10427",
    options=JacobiOptions,
    build=Jacobi,
    trainable=False,
    policies=("direct",),
)
