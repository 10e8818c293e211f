"""CopySpec (arXiv 2502.08923): copy what followed the last gamma tokens when they first occurred.

A hash index over the whole text so far (prompt, earlier turns, output) finds the last `gamma`
tokens in constant time; equal hashes are equal n-grams here, since the n-grams themselves are the
keys. `copy` tokens after the first occurrence are drafted. Where nothing repeats, nothing is
drafted: a draft model that takes over there is family rasd with policy retrieve-first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from specctl.core.drafter import Budget, Drafter, Family, Space
from specctl.drafters.option_checks import check_options
from specctl.drafters.retrieval.occurrences import Occurrences, copied
from specctl.drafters.retrieval.trie import Trie, TrieState

STAYS = 0.9  # guessed chance that a copy holds for one more token; policies read it, no verifier


@dataclass(frozen=True, slots=True)
class CopySpecOptions:
    """`gamma` tokens must have occurred before; `copy` tokens are copied. A small gamma copies
    often, a large one copies well."""

    gamma: int = 3
    copy: int = 10

    def __post_init__(self) -> None:
        is_right = self.gamma >= 1 and self.copy >= 1
        check_options(self, is_right, ("gamma", "copy"), "positive numbers")


class CopySpec(Drafter):
    """No weights; everything is in the state."""

    family = "copyspec"
    options: CopySpecOptions

    def open(self, space: Space) -> CopySpecState:
        return CopySpecState(self.options, space)


class CopySpecState(TrieState):
    """One index of gamma-grams per slot."""

    def __init__(self, options: CopySpecOptions, space: Space) -> None:
        self.options, self.device = options, space.device
        self.indices = [Occurrences(options.gamma, 1) for _ in range(space.num_slots)]

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        self.end(slot)
        self.indices[slot].read(tokens)

    def end(self, slot: int) -> None:
        self.indices[slot] = Occurrences(self.options.gamma, 1)

    def draft_row(self, slot: int, tokens: Sequence[int], budget: Budget) -> Trie:
        index, trie = self.indices[slot], Trie()
        index.read(tokens)
        places = index.of_suffix(tokens)
        if places:
            length = min(self.options.copy, budget.depth, budget.nodes)
            chance = [STAYS**k for k in range(1, length + 1)]
            trie.add_path(copied(tokens, places[0], length), chance)
        return trie


FAMILY = Family(
    name="copyspec",
    summary=(
        "No training: when the last three tokens occurred before in the conversation, copies what "
        "followed them the first time, ten tokens or more. Fewer and longer copies than prompt "
        "lookup makes; meant for later turns of a conversation that return to earlier text."
    ),
    paper="https://arxiv.org/abs/2502.08923",
    options=CopySpecOptions,
    build=CopySpec,
    trainable=False,
    policies=("direct",),
)
