"""Speculative Jacobi Decoding (arXiv 2410.01699): Jacobi iteration that may be sampled.

Each round the target is shown guesses of the next tokens and says, behind each of them, what it
would say next. What it said before is what the next guesses are drawn from: token i from p_before,
accepted with min(1, p_now / p_before), else drawn anew from what is left of p_now; that is the rule
of every chain of samples, with q = p_before. Guesses behind the first rejected one are drawn from
the newest distributions of their places. A place that the target has not spoken of yet is filled
as `fill` says: `repeat` draws from the distribution of the newest place that it has spoken of,
`last-token` repeats the token before, `uniform` draws any token. In images of `columns` tokens a
row, `above` draws from the distribution that the target had one row above, and `above-token`
repeats the token there (the paper's initialisation by spatial locality, in the first row and in a
prompt `repeat`). Of p_before the `ranks` most probable tokens are kept. Greedy, it is Jacobi
decoding. Made for flat distributions, such as those of image tokens, where a guess is often as good
as another.
Letters: B rows, C candidates, L positions, M new nodes, P path, T fed tokens, V target vocabulary,
W window, Z slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from specctl.core.drafter import Drafter, Family, Needs, Outcome, RoundView, Space, StepState
from specctl.drafters.option_checks import Count, OneOf, Options, Within, check_options

ABOVE = ("above", "above-token")
FILLS = ("repeat", "last-token", "uniform", *ABOVE)


@dataclass(frozen=True, slots=True)
class SpeculativeJacobiOptions(Options):
    """`ranks` tokens are kept of a distribution; `fill` says what stands where nothing is known;
    `columns`: tokens in a row of an image, which the fills from above need (0: no image)."""

    ranks: Count = 64
    fill: Annotated[str, OneOf(FILLS)] = "repeat"
    columns: Annotated[int, Within(0, 4096)] = 0

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        is_right = self.fill not in ABOVE or self.columns > 0
        check_options(self, is_right, ("fill", "columns"), "the tokens in a row of the image")


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
        options = drafter.options
        self.V, self.C = drafter.spec.vocab_size, drafter.needs().topk
        self.fill, self.width = options.fill, max(space.max_nodes, 1)
        shape = (space.num_slots, self.width, self.C)
        self.ids_ZWC = torch.zeros(shape, dtype=torch.long, device=space.device)
        self.logp_ZWC = torch.full(shape, torch.nan, device=space.device)
        self.columns = options.columns if options.fill in ABOVE else 0
        # of the newest tokens of each slot, at their position modulo the columns
        written = (space.num_slots, self.columns, self.C)
        self.above_ids_ZLC = torch.zeros(written, dtype=torch.long, device=space.device)
        self.above_logp_ZLC = torch.full(written, torch.nan, device=space.device)
        self._view: RoundView | None = None
        self._last_B, self._depth = torch.empty(0, dtype=torch.long), 0

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        self.logp_ZWC[slot] = torch.nan
        self.above_logp_ZLC[slot] = torch.nan

    def root(self, view: RoundView) -> Tensor:
        self._view, self._last_B, self._depth = view, view.root_B, 0
        return self._entry()

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        del parent_BM  # but for fill: last-token, nothing depends on what is drawn before a place
        self._last_B, self._depth = token_BM[:, -1].clamp(min=0), self._depth + 1
        return self._entry()[:, None]

    def _entry(self) -> Tensor:
        """[B, V]: log-probabilities of the place that is drafted next."""
        assert self._view is not None, "root() comes first"
        slot_B = self._view.slot_B
        at_B1 = torch.full_like(slot_B[:, None], min(self._depth, self.width - 1))
        is_known_BW = ~self.logp_ZWC[slot_B, :, 0].isnan()
        is_new_B1 = ~is_known_BW.gather(1, at_B1)
        if self.fill != "uniform":  # the places that are known come first
            at_B1 = torch.minimum(at_B1, (is_known_BW.sum(1, keepdim=True) - 1).clamp(min=0))
        row_B1 = slot_B[:, None]
        logits_BV = self._spread(self.ids_ZWC[row_B1, at_B1], self.logp_ZWC[row_B1, at_B1])
        if self.fill == "last-token":
            return torch.where(is_new_B1, self._one(self._last_B), logits_BV)
        if self.columns and self._depth < self.columns:
            place_B1 = (self._view.kept_len_B[:, None] + 1 + self._depth) % self.columns
            logp_B1C = self.above_logp_ZLC[row_B1, place_B1]
            ids_B1C = self.above_ids_ZLC[row_B1, place_B1]
            above_BV = self._spread(ids_B1C, logp_B1C)
            if self.fill == "above-token":
                above_BV = self._one(self._above_token_B())
            is_there_B1 = ~logp_B1C[:, :, 0].isnan()
            return torch.where(is_new_B1 & is_there_B1, above_BV, logits_BV)
        return logits_BV

    def _above_token_B(self) -> Tensor:
        """[B]: the token a row above the place that is drafted next."""
        assert self._view is not None
        back = [len(text) + self._depth - self.columns for text in self._view.tokens]
        found = [
            text[max(at, 0)] for text, at in zip(self._view.tokens, back, strict=True)
        ]  # what lies in front of the text is never taken
        return torch.tensor(found, device=self._last_B.device)

    def _spread(self, ids_B1C: Tensor, logp_B1C: Tensor) -> Tensor:
        """[B, V]: the distribution over the vocabulary; a uniform one where none is known."""
        logits_BV = logp_B1C.new_full((len(ids_B1C), self.V), -torch.inf)
        logits_BV.scatter_(1, ids_B1C[:, 0], logp_B1C[:, 0])
        return torch.where(logp_B1C[:, 0, :1].isnan(), 0.0, logits_BV)

    def _one(self, token_B: Tensor) -> Tensor:
        """[B, V]: that token and no other."""
        logits_BV = self.logp_ZWC.new_full((len(token_B), self.V), -torch.inf)
        return logits_BV.scatter_(1, token_B[:, None], 0.0)

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
        if self.columns:
            self._keep_row(outcome, ids_BTC, logp_BTC.float(), num_final_B1)

    def _keep_row(
        self, outcome: Outcome, ids_BTC: Tensor, logp_BTC: Tensor, num_final_B1: Tensor
    ) -> None:
        """Keep the distributions of the tokens that this round has written."""
        slot_B1, first_B = outcome.view.slot_B[:, None], outcome.view.kept_len_B + 1
        count = min(ids_BTC.shape[1], self.columns)
        at_BT = (num_final_B1 - count).clamp(min=0) + torch.arange(count, device=slot_B1.device)
        is_new_BT1 = (at_BT < num_final_B1)[:, :, None]
        at_BT = at_BT.clamp(max=ids_BTC.shape[1] - 1)
        place_BL = (first_B[:, None] + at_BT) % self.columns
        row_B1 = torch.arange(len(slot_B1), device=slot_B1.device)[:, None]
        for kept, new in ((self.above_ids_ZLC, ids_BTC), (self.above_logp_ZLC, logp_BTC)):
            old = kept[slot_B1, place_BL]
            kept[slot_B1, place_BL] = torch.where(is_new_BT1, new[row_B1, at_BT], old)


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
