"""Prompt lookup: copy what followed the newest tokens when they last occurred in this text.

The longest suffix of `max_ngram` down to `min_ngram` tokens that occurred before wins, and of its
occurrences the most recent. A copy that reaches the end of the text goes on copying itself, as in
LZ77, so that a loop is drafted to any length. An n-gram index grows with the text: the cost of a
round is proportional to its new tokens. (Saxena 2023, apoorvumang/prompt-lookup-decoding on GitHub)
Letters: B rows, N nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specctl.core.drafter import (
    Budget,
    Drafter,
    DraftState,
    Family,
    RoundView,
    Space,
)
from specctl.core.tree import DraftTree, NodeKind, chain_tree, empty_tree
from specctl.drafters.option_checks import check_options


@dataclass(frozen=True, slots=True)
class PromptLookupOptions:
    """Suffix lengths that are looked up, longest first."""

    max_ngram: int = 4
    min_ngram: int = 1

    def __post_init__(self) -> None:
        is_right = 1 <= self.min_ngram <= self.max_ngram
        names = ("min_ngram", "max_ngram")
        check_options(self, is_right, names, "1 <= min_ngram <= max_ngram")


@dataclass(slots=True)
class NgramIndex:
    """Where each n-gram of one text ended last. One writer: the DraftState of that row."""

    lengths: range
    num_read: int = 0
    last_end: dict[tuple[int, ...], int] = field(default_factory=dict)

    def read(self, tokens: Sequence[int]) -> None:
        """Index the n-grams that end before the last token: those have a continuation."""
        for end in range(self.num_read, len(tokens) - 1):
            for length in self.lengths:
                if length <= end + 1:
                    self.last_end[tuple(tokens[end + 1 - length : end + 1])] = end
        self.num_read = max(self.num_read, len(tokens) - 1)

    def match(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Length of the longest known suffix, and where its newest occurrence ended."""
        size = len(tokens)
        for n in self.lengths:
            end = self.last_end.get(tuple(tokens[size - n :])) if n <= size else None
            if end is not None:
                return n, end
        return None

    def continuation(self, tokens: Sequence[int], length: int) -> list[int]:
        """`length` tokens that followed the newest occurrence of the longest known suffix."""
        found = self.match(tokens)
        if found is None:
            return []
        first = found[1] + 1
        period = len(tokens) - first
        return [tokens[first + i % period] for i in range(length)]


class PromptLookup(Drafter):
    """No weights; everything is in the state."""

    family = "prompt-lookup"

    def open(self, space: Space) -> PromptLookupState:
        return PromptLookupState(self.options, space)


class PromptLookupState(DraftState):
    """One n-gram index per slot."""

    def __init__(self, options: PromptLookupOptions, space: Space) -> None:
        self.lengths = range(options.max_ngram, options.min_ngram - 1, -1)
        self.device = space.device
        self.indices = [NgramIndex(self.lengths) for _ in range(space.num_slots)]

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        self.indices[slot] = NgramIndex(self.lengths)
        self.indices[slot].read(tokens)

    def propose(self, view: RoundView, budget: Budget) -> DraftTree:
        length = min(budget.nodes, budget.depth)
        drafts = []
        for slot, tokens in zip(view.slots, view.tokens, strict=True):
            self.indices[slot].read(tokens)
            drafts.append(self.indices[slot].continuation(tokens, length))
        longest = max(len(draft) for draft in drafts)
        if longest == 0:
            return empty_tree(len(drafts), self.device)
        padded = [draft + [0] * (longest - len(draft)) for draft in drafts]
        token_BN = torch.tensor(padded, device=self.device)
        filled_B1 = torch.tensor([[len(draft)] for draft in drafts], device=self.device)
        valid_BN = torch.arange(longest, device=self.device) < filled_B1
        return chain_tree(token_BN, valid_BN, NodeKind.POINT)

    def end(self, slot: int) -> None:
        self.indices[slot] = NgramIndex(self.lengths)


FAMILY = Family(
    name="prompt-lookup",
    summary=(
        "No training and no model: when the newest tokens occurred earlier in the prompt or in the "
        "output, drafts what followed them there. Strong where the output repeats its input (code "
        "edits, summaries, retrieval), nearly free and nearly useless elsewhere."
    ),
    paper="https://github.com/apoorvumang/prompt-lookup-decoding",
    options=PromptLookupOptions,
    build=PromptLookup,
    trainable=False,
    policies=("direct",),
)
