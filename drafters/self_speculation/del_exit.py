"""DEL (arXiv 2504.05598): exit layer and draft length chosen anew for every round.

Behind every token that the target has read, every exit's own next token (a shadow token: the final
norm and LM head on the residual there) is held against the text; their faded shares of agreement
are the acceptance alpha_l of each exit. A round drafts d tokens through l layers where

    tokens per layer = (1 - alpha_l^(d+1)) / (1 - alpha_l) / (d l + L)

is largest; d = 0 is plain decoding. All read tokens count, where the paper stops at a round's first
mismatch: they are of the text, so that none of them is behind a wrong one. `every` measures only
some positions, as L heads on every token are not free.
Letters: B rows, C candidates (exits), D hidden width, K draft vocabulary, M new nodes, T fed
tokens, W window, Z slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from specctl.core.drafter import Family, Needs, Outcome, RoundView, Space
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.language_model import LanguageModel
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.frames.self_drafter import SelfDrafter, check_layers
from specctl.drafters.option_checks import Count, Options, Within, check_options
from specctl.drafters.states.borrowed_state import BorrowedState, read_out


@dataclass(frozen=True, slots=True)
class DelOptions(Options):
    """`exits`: layer counts after which a draft may leave, None all below the target's. At most
    `most` tokens are drafted; `memory` fades what was counted with every token; every `every`th
    position is measured."""

    exits: tuple[int, ...] | None = None
    most: Annotated[int, Within(most=64)] = 8
    memory: float = 0.97
    every: Count = 1

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        check_options(self, 0.0 < self.memory < 1.0, ("memory",), "a share between 0 and 1")


@dataclass(frozen=True, slots=True)
class ExitChoice:
    """Leave after so many layers, draft so many tokens."""

    layers: int
    length: int


def best_choice(alpha: Mapping[int, float], num_layers: int, most: int) -> ExitChoice:
    """The exit and length with the most tokens per layer; plain decoding where none gains."""
    best, choice = 1.0 / num_layers, ExitChoice(min(alpha), 0)
    for layers, chance in alpha.items():
        tokens = reached = 1.0
        for length in range(1, most + 1):
            reached *= chance
            tokens += reached
            rate = tokens / (length * layers + num_layers)
            if rate > best:
                best, choice = rate, ExitChoice(layers, length)
    return choice


class Del(SelfDrafter):
    """Every exit's layers may run."""

    family = "del"
    shares_kv = True
    options: DelOptions

    def __init__(self, options: DelOptions, spec: ModelSpec, vocab: VocabMap | None = None) -> None:
        super().__init__(options, spec, vocab)
        every = tuple(range(1, spec.num_layers))
        self.layers = check_layers("exits", options.exits or every, spec.num_layers)
        check_options(options, bool(self.layers) and self.layers[0] > 0, ("exits",), "1 and up")

    @property
    def attention(self) -> tuple[int, ...]:
        return tuple(range(self.layers[-1]))

    def needs(self) -> Needs:
        taps = range(self.layers[-1] + 1)
        copied = tuple(tap for tap in taps if tap not in self.layers)
        return Needs(taps=tuple(taps), borrow=True, copied=copied)

    def open(self, space: Space) -> DelState:
        return DelState(self, self.lm, space)


class DelState(BorrowedState):
    """What each exit of each row has got right, and what the row chose for this round."""

    may_draft_nothing = True

    def __init__(self, drafter: Del, lm: LanguageModel, space: Space) -> None:
        super().__init__(lm, drafter.attention, space)
        self.options, self.layers = drafter.options, drafter.layers
        exits = len(self.layers)
        self.right_ZC = torch.zeros(space.num_slots, exits, dtype=torch.float64)
        self.seen_Z = torch.zeros(space.num_slots, dtype=torch.float64)
        self.choice = [ExitChoice(self.layers[0], 0)] * space.num_slots

    def parts_of(self, slot: int, first: int) -> SubLayers:
        return SubLayers.span(0, self.choice[slot].layers)

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        super().start(slot, tokens, taps)
        self.right_ZC[slot], self.seen_Z[slot] = 0.0, 0.0

    def alpha(self, slot: int) -> dict[int, float]:
        """Acceptance of every exit; what is hoped for before anything is known grows with the depth
        and counts as one token."""
        count = self.lm.spec.num_layers
        prior = [(layers / count) ** 0.5 for layers in self.layers]
        seen = float(self.seen_Z[slot])
        right = self.right_ZC[slot].tolist()
        pairs = zip(self.layers, right, prior, strict=True)
        return {layers: (done + first) / (seen + 1.0) for layers, done, first in pairs}

    def root(self, view: RoundView) -> Tensor:
        for slot in view.slots:
            alpha = self.alpha(slot)
            self.choice[slot] = best_choice(alpha, self.lm.spec.num_layers, self.options.most)
        return super().root(view)

    def _nodes(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        depth = self.growth.num_nodes
        is_over = [self.choice[slot].length <= depth for slot in self.growth.view.slots]
        if all(is_over):  # nothing is drafted, so that no layer has to run
            spec, device = self.lm.spec, token_BM.device
            self._ready_BMD = torch.zeros(*token_BM.shape, spec.hidden_size, device=device)
            return torch.full((*token_BM.shape, spec.vocab_size), -torch.inf, device=device)
        logits_BMK = super()._nodes(token_BM, parent_BM)
        over_B11 = torch.tensor(is_over, device=logits_BMK.device)[:, None, None]
        return logits_BMK.masked_fill(over_B11, -torch.inf)

    @torch.no_grad()
    def observe(self, outcome: Outcome) -> None:
        before = [self.num_known[slot] for slot in outcome.view.slots]
        super().observe(outcome)
        W = max(1, *(len(new) for new in outcome.emitted))
        state_BTD = torch.cat([outcome.taps[layers][:, :W] for layers in self.layers], dim=1)
        said_BCW = read_out(self.lm, state_BTD).argmax(-1).view(-1, len(self.layers), W).cpu()
        rows = zip(outcome.view.slots, before, outcome.emitted, strict=True)
        for b, (slot, position, new) in enumerate(rows):
            for i, token in enumerate(new):
                if (position + i) % self.options.every == 0:
                    self.right_ZC[slot] *= self.options.memory
                    self.right_ZC[slot] += (said_BCW[b, :, i] == token).double()
                    self.seen_Z[slot] = self.options.memory * self.seen_Z[slot] + 1.0


FAMILY = Family(
    name="del",
    summary=(
        "The target's lower layers draft through its own head, and every round chooses after which "
        "layer to leave and how far to draft, by how often each exit would have been right so far. "
        "Nothing to train and nothing to tune; made for targets that can be read early, and plain "
        "decoding on others."
    ),
    paper="https://arxiv.org/abs/2504.05598",
    options=DelOptions,
    build=Del,
    trainable=False,
    policies=("chain",),
    borrows_layers=True,
)
