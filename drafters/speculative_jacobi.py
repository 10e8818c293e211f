"""Speculative Jacobi Decoding (arXiv 2410.01699): Jacobi iteration that may be sampled.

Each round the target is shown guesses of the next tokens and says, behind each of them, what it
would say next. What it said before is what the next guesses are drawn from: token i from p_before,
accepted with min(1, p_now / p_before), else drawn anew from what is left of p_now; that is the rule
of every chain of samples, with q = p_before. Guesses behind the first rejected one are drawn from
the newest distributions of their places. A place that the target has not spoken of yet repeats the
newest place that it has (`fill: uniform` draws any token). Of p_before the `ranks` most probable
tokens are kept. Greedy, it is Jacobi decoding. Made for flat distributions, such as those of image
tokens, where a guess is often as good as another.
Letters: B rows, C candidates, M new nodes, P path, T fed tokens, V target vocabulary, W window, Z
slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from specctl.core.drafter import Drafter, Family, Needs, Outcome, RoundView, Space, StepState
from specctl.drafters.option_checks import Count, OneOf, Options

FILLS = ("repeat", "uniform")


@dataclass(frozen=True, slots=True)
class SpeculativeJacobiOptions(Options):
    """`ranks` tokens are kept of a distribution; `fill` says what stands where nothing is known."""

    ranks: Count = 64
    fill: Annotated[str, OneOf(FILLS)] = "repeat"


class SpeculativeJacobi(Drafter):
    """No weights; everything is in the state."""

    family = "speculative-jacobi"
    options: SpeculativeJacobiOptions

    def needs(self) -> Needs:
        return Needs(topk=min(self.options.ranks, self.spec.vocab_size), topk_logp=True)

    def open(self, space: Space) -> SpeculativeJacobiState:
        return SpeculativeJacobiState(self, space)


class SpeculativeJacobiState(StepState):
    """Entry i of a slot is the distribution of the token i + 1 places behind its root, as the
    target saw it last: token ids, and log-probabilities that are NaN where it has not spoken."""

    def __init__(self, drafter: SpeculativeJacobi, space: Space) -> None:
        self.V, self.C = drafter.spec.vocab_size, drafter.needs().topk
        self.repeats, self.width = drafter.options.fill == "repeat", max(space.max_nodes, 1)
        shape = (space.num_slots, self.width, self.C)
        self.ids_ZWC = torch.zeros(shape, dtype=torch.long, device=space.device)
        self.logp_ZWC = torch.full(shape, torch.nan, device=space.device)
        self._slot_B, self._depth = torch.empty(0, dtype=torch.long), 0

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        self.logp_ZWC[slot] = torch.nan

    def root(self, view: RoundView) -> Tensor:
        self._slot_B, self._depth = view.slot_B, 0
        return self._entry()

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        del token_BM, parent_BM  # what stands there does not depend on what is drawn before it
        self._depth += 1
        return self._entry()[:, None]

    def _entry(self) -> Tensor:
        """[B, V]: log-probabilities of the place that is drafted next."""
        at_B1 = torch.full_like(self._slot_B[:, None], min(self._depth, self.width - 1))
        is_known_BW = ~self.logp_ZWC[self._slot_B, :, 0].isnan()
        if self.repeats:  # the places that are known come first
            at_B1 = torch.minimum(at_B1, (is_known_BW.sum(1, keepdim=True) - 1).clamp(min=0))
        row_B1 = self._slot_B[:, None]
        logits_BV = self.logp_ZWC.new_full((len(at_B1), self.V), -torch.inf)
        logits_BV.scatter_(1, self.ids_ZWC[row_B1, at_B1][:, 0], self.logp_ZWC[row_B1, at_B1][:, 0])
        is_known_B1 = is_known_BW.gather(1, at_B1)
        return torch.where(is_known_B1, logits_BV, 0.0)

    def observe(self, outcome: Outcome) -> None:
        ids_BTC, logp_BTC = outcome.topk_BTC, outcome.topk_logp_BTC
        assert ids_BTC is not None
        assert logp_BTC is not None
        slot_B, T = outcome.view.slot_B, ids_BTC.shape[1]
        num_final_B1 = (outcome.path_BP >= 0).sum(1, keepdim=True)
        at_BW = num_final_B1 + torch.arange(self.width, device=slot_B.device)
        is_fed_BW = outcome.tree.fed_valid_BT().gather(1, at_BW.clamp(max=T - 1)) & (at_BW < T)
        row_B1 = torch.arange(len(slot_B), device=slot_B.device)[:, None]
        self.ids_ZWC[slot_B] = ids_BTC[row_B1, at_BW.clamp(max=T - 1)]
        new_BWC = logp_BTC[row_B1, at_BW.clamp(max=T - 1)].float()
        self.logp_ZWC[slot_B] = new_BWC.masked_fill(~is_fed_BW[:, :, None], torch.nan)


FAMILY = Family(
    name="speculative-jacobi",
    summary=(
        "No training and no draft model: the next tokens are drawn from what the target said of "
        "their places in the round before, and accepted by how much it has changed its mind. "
        "Jacobi decoding that samples exactly; suits flat distributions, such as those of image "
        "tokens, and gains little on ordinary text."
    ),
    paper="https://arxiv.org/abs/2410.01699",
    options=SpeculativeJacobiOptions,
    build=SpeculativeJacobi,
    trainable=False,
    policies=("chain",),
)
