"""Aggressive decoding (arXiv 2205.10350): copy the input where the output follows it.

Input-guided (IAD), for outputs that are edited inputs: the rest of the source is drafted; where the
target leaves it, decoding goes on token by token until the end of the output matches exactly one
place in the source, and copying goes on from there. Here the match is kept for every place p at
once: run(p) = run(p - 1) + 1 where the newest token equals source[p], else 0. The longest run says
where the output stands, if one place alone has it; the alignment from the start begins longest.
Generalised (GAD), for outputs unlike their inputs: a block of k tokens is filled in at once, each
without seeing the others, then verified at once. The paper trains a model for that; here the target
itself fills in masks, fed as probes behind every token that may turn out to be the last one.
Letters: B rows, C candidates, M new nodes (probes), N nodes, P path, R flat rows (places of the
source), T fed tokens, W window (one block), Z slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
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
from specctl.core.tree import DraftTree, NodeKind, chain_tree, empty_tree
from specctl.drafters.option_checks import Count, CountOrZero, OneOf, Options
from specctl.drafters.retrieval.trie import Trie, TrieState
from specctl.drafters.states.iterate import blank_token
from specctl.drafters.states.probes import with_probes

MODES = ("input", "generalised")


@dataclass(frozen=True, slots=True)
class AggressiveOptions(Options):
    """`mode` input copies the source, generalised fills in blocks. The source is the prompt without
    its first `skip` and its last `tail` tokens (an instruction around it); a match has `match`
    tokens or more. A `block` has so many tokens; None: what the round's nodes allow."""

    mode: Annotated[str, OneOf(MODES)] = "input"
    match: Count = 1
    skip: CountOrZero = 0
    tail: CountOrZero = 0
    block: Count | None = None


class Aggressive(Drafter):
    """No weights; everything is in the state."""

    family = "aggressive"

    def needs(self) -> Needs:
        return Needs(topk=0 if self.options.mode == "input" else 1)

    def open(self, space: Space) -> DraftState:
        if self.options.mode == "input":
            return InputState(self.options, space)
        return GuessedBlocks(self.options.block, blank_token(self.spec), space)


@dataclass(slots=True)
class Alignment:
    """Where an output stands in its source. `run_R[p]` tokens of its end equal those in front of
    place p; place 0, the start, begins longer than any match. One writer: the row's DraftState."""

    source: np.ndarray
    run_R: np.ndarray
    num_read: int

    @classmethod
    def of(cls, source: Sequence[int], written: int) -> Alignment:
        run_R = np.zeros(len(source) + 1, dtype=np.int64)
        run_R[0] = len(source) + 1
        return cls(np.array(source, dtype=np.int64), run_R, written)

    def read(self, tokens: Sequence[int]) -> None:
        for token in tokens[self.num_read :]:
            self.run_R[1:] = np.where(self.source == token, self.run_R[:-1] + 1, 0)
            self.run_R[0] = 0
        self.num_read = len(tokens)

    def rest(self, match: int, length: int) -> list[int]:
        """What follows in the source, if a single place has the longest run."""
        longest = int(self.run_R.max())
        if longest < match or int((self.run_R == longest).sum()) > 1:
            return []
        place = int(self.run_R.argmax())
        rest: list[int] = self.source[place : place + length].tolist()
        return rest


class InputState(TrieState):
    """IAD: the alignment of each slot."""

    def __init__(self, options: AggressiveOptions, space: Space) -> None:
        self.options, self.device = options, space.device
        self.alignments = [Alignment.of((), 0) for _ in range(space.num_slots)]

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        source = tokens[self.options.skip : len(tokens) - self.options.tail]
        self.alignments[slot] = Alignment.of(source, len(tokens))

    def draft_row(self, slot: int, tokens: Sequence[int], budget: Budget) -> Trie:
        alignment, trie = self.alignments[slot], Trie()
        alignment.read(tokens)
        rest = alignment.rest(self.options.match, min(budget.nodes, budget.depth))
        trie.add_path(rest, [1.0] * len(rest))
        return trie

    def end(self, slot: int) -> None:
        self.alignments[slot] = Alignment.of((), 0)


class GuessedBlocks(DraftState):
    """GAD: the block that the target has filled in for each slot. A block of masks hangs behind the
    root and behind every drafted token; the one behind the last accepted token is kept."""

    def __init__(self, block: int | None, blank: int, space: Space) -> None:
        W = 1
        while space.max_nodes >= (W + 1) * (W + 3):
            W += 1
        self.W, self.blank, self.device = block or W, blank, space.device
        if block is not None and block * (block + 2) > space.max_nodes:
            raise RecipeError(
                "the block and its masks do not fit a round",
                where="serve.nodes",
                found=f"{space.max_nodes} nodes for a block of {block}",
                expected=f"{block * (block + 2)} nodes",
                do=f"--set serve.nodes={block * (block + 2)}, or leave block out",
            )
        self.guess_ZW = torch.full((space.num_slots, self.W), blank, device=space.device)

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        self.guess_ZW[slot] = self.blank

    def propose(self, view: RoundView, budget: Budget) -> DraftTree:
        N, W = min(self.W, budget.nodes, budget.depth), self.W
        if N <= 0:
            return empty_tree(len(view.slots), self.device)
        token_BN = self.guess_ZW[view.slot_B, :N]
        tree = chain_tree(token_BN, torch.ones_like(token_BN).bool(), NodeKind.POINT)
        if budget.nodes < N + (N + 1) * W:
            return tree
        index_M = torch.arange((N + 1) * W, device=self.device)
        parent_M = torch.where(index_M % W == 0, index_M // W - 1, index_M + N - 1)
        token_BM = torch.full((len(token_BN), len(index_M)), self.blank, device=self.device)
        return with_probes(tree, token_BM, parent_M, N + W)

    def observe(self, outcome: Outcome) -> None:
        slot_B, num_probes = outcome.view.slot_B, outcome.tree.num_probes
        if num_probes == 0:
            self.guess_ZW[slot_B] = self.blank
            return
        assert outcome.topk_BTC is not None
        best_BM = outcome.topk_BTC[:, -num_probes:, 0]
        accepted_B1 = (outcome.path_BP >= 0).sum(1, keepdim=True) - 1
        at_BW = accepted_B1 * self.W + torch.arange(self.W, device=self.device)
        self.guess_ZW[slot_B] = best_BM.gather(1, at_BW)


FAMILY = Family(
    name="aggressive",
    summary=(
        "No training: drafts the rest of the input wherever the output follows it, leaves it at an "
        "edit, and finds the one place where it goes on. For rewriting: corrections, code edits, "
        "simplification. Mode generalised lets the target fill in a block of masks instead, for "
        "outputs unlike their input; without a model trained for that it gains little."
    ),
    paper="https://arxiv.org/abs/2205.10350",
    options=AggressiveOptions,
    build=Aggressive,
    trainable=False,
    policies=("direct",),
)
