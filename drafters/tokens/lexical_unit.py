"""Lexical Unit Decoding (arXiv 2405.15208): spans the target is sure of are said in one forward.

A lexical unit is a maximal run of tokens to which the target gives at least `unit` of probability,
each behind the text before it. [PAD] tokens stand behind the newest token; pad i learns to say the
token i + 1 further on, where that token and all between it and the text are of one unit. With
`train.joint` the target itself learns to read the pads, as in the paper. In use a forward emits the
target's next token, and the pads' tokens while each has at least `keep` of probability. Nothing
confirms them: the text is approximate, and every result says so. Without `keep` the same guesses
are drafts that the next forward verifies, and the output is the target's own.

The pads are prompt tokens of PPD (ppd.py), one guess a place. Where guesses are kept unconfirmed,
the token that the next pads stand behind is known, and no others are read: a forward is fed the
newest token, what was kept behind it and the pads. Ours: a unit may be entered at any of its
tokens, probabilities are those of the target as it stands, and the repetition control of the paper
is left out.
Letters: A anchors, B rows, D hidden width, K draft vocabulary, M new nodes (pads), N nodes, P path,
Q picked rows, S sequence, V target vocabulary, W window (pads), Z slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Budget, Family, Needs, Outcome, RoundView, Space
from specctl.core.spec import ModelSpec
from specctl.core.tree import DraftTree, NodeKind, chain_tree, empty_tree
from specctl.core.vocab import VocabMap
from specctl.drafters.losses.align import AlignedRows, teacher_of
from specctl.drafters.losses.teacher import TeacherLogits
from specctl.drafters.nets.routed import read_head
from specctl.drafters.option_checks import Within
from specctl.drafters.states.probes import with_probes
from specctl.drafters.states.prompt_tree import Chances
from specctl.drafters.tokens.ppd import Ppd, PpdOptions, PpdState

CHUNK = 1024  # rows whose distributions are made at once, while units are looked for


@dataclass(frozen=True, slots=True)
class LexicalUnitOptions(PpdOptions):
    """`num_heads` pads. `unit`: the least probability of a token inside a unit (0: the pads learn
    everywhere). `keep`: the least probability of a pad's token that is taken unconfirmed; None:
    every token is verified, which is lossless."""

    decay: Annotated[float, Within(0, 10)] = 1.0
    unit: Annotated[float, Within(0, 1)] = 0.5
    keep: Annotated[float, Within(0, 1)] | None = None

    def levels(self) -> Chances:
        """One guess a place, unless chances say otherwise."""
        levels = PpdOptions.levels(self)
        return levels if self.chances is not None else tuple(level[:1] for level in levels)


class LexicalUnit(Ppd):
    """Prompt tokens that learn inside units. Approximate if it keeps what nothing confirms."""

    family = "lexical-unit"
    options: LexicalUnitOptions

    def __init__(
        self, options: LexicalUnitOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        super().__init__(options, spec, vocab)
        self.lossless = options.keep is None

    def needs(self) -> Needs:
        """The target's probabilities of the text, too, which say where units are."""
        needs = super().needs()
        return replace(needs, teacher=needs.teacher or self.options.unit > 0)

    def _aimed(self, batch: TrainBatch, anchor_BA: Tensor, index: int) -> AlignedRows:
        """The next token and those up to the place's own are of one unit."""
        rows = super()._aimed(batch, anchor_BA, index)
        if self.options.unit == 0:
            return rows
        run_BS = unit_lengths(batch, self.options.unit)
        return rows.only(run_BS.flatten()[rows.teacher_row_Q + 1] >= self.reach + index)

    def open(self, space: Space) -> PpdState:
        return PpdState(self, space) if self.options.keep is None else UnconfirmedState(self, space)


@torch.no_grad()
def unit_lengths(batch: TrainBatch, least: float) -> Tensor:
    """[B, S]: of how many tokens the unit is that ends with that token; 0 outside of units."""
    teacher, (B, S) = teacher_of(batch), batch.ids_BS.shape
    assert teacher is not None, "units are where the target is sure"
    sure_BS = torch.zeros(B, S, dtype=torch.bool, device=batch.ids_BS.device)
    same_BS = batch.document_BS[:, 1:] == batch.document_BS[:, :-1]
    sure_BS[:, 1:] = same_BS & (batch.document_BS[:, 1:] >= 0)
    for at_Q in torch.split(sure_BS.flatten().nonzero()[:, 0], CHUNK):
        log_p_QV = TeacherLogits(teacher).distribution(at_Q - 1, None).log_p_QK
        log_p_Q = log_p_QV.gather(1, batch.ids_BS.flatten()[at_Q, None])[:, 0]
        sure_BS.view(-1)[at_Q] = log_p_Q.exp() >= least
    place_S = torch.arange(1, S + 1, device=sure_BS.device)
    ended_BS = torch.where(sure_BS, 0, place_S).cummax(1).values
    return place_S - ended_BS


class UnconfirmedState(PpdState):
    """Chains of kept guesses, and pads behind the last of them."""

    def __init__(self, drafter: LexicalUnit, space: Space) -> None:
        super().__init__(drafter, space)
        assert drafter.options.keep is not None, "what is verified needs no such state"
        self.keep, self._is_read = drafter.options.keep, False

    @torch.no_grad()
    def propose(self, view: RoundView, budget: Budget) -> DraftTree:
        """Up to W guesses and always W pads, if there are rows for the pads."""
        W, self._is_read = len(self.chances), False
        length = min(W, budget.depth, budget.nodes - W)
        if length <= 0:
            return empty_tree(len(view.slots), self.device)
        token_BN, p_BN = (found_BW[:, :length] for found_BW in self._spans(view))
        place_N = torch.arange(length, device=self.device)
        keep_BN = (p_BN >= self.keep) & (place_N < self.level_Z[view.slot_B, None])
        kept_BN = keep_BN.long().cumprod(1).bool()
        tree = replace(chain_tree(token_BN, kept_BN, NodeKind.POINT), forced_BN=kept_BN)
        self._is_read = True
        parent_BM = torch.arange(length - 1, length + W - 1, device=self.device).repeat(
            len(view.slots), 1
        )
        parent_BM[:, 0] = kept_BN.sum(1) - 1
        pads_BMD = self.tokens_MD.expand(len(view.slots), -1, -1)
        return with_probes(tree, torch.zeros_like(parent_BM), parent_BM, length + W, pads_BMD)

    def _spans(self, view: RoundView) -> tuple[Tensor, Tensor]:
        """[B, W] twice: what the pads say, and with which probability."""
        ready_BWD = self.ready_ZWD[view.slot_B] + 0 * self.tokens_MD.sum()
        logits_BWK = view.shown(read_head(ready_BWD, self._head))
        p_BW, best_BW = logits_BWK.float().softmax(-1).max(-1)
        return (best_BW if self.vocab is None else self.vocab.ids_K[best_BW]), p_BW

    @torch.no_grad()
    def observe(self, outcome: Outcome) -> None:
        slot_B, tree, W = outcome.view.slot_B, outcome.tree, len(self.chances)
        if not self._is_read or tree.num_probes != W:
            self.level_Z[slot_B] = 0
            return
        whole_B = (outcome.path_BP >= 0).sum(1) - 1 == tree.valid_BN.sum(1)
        self.ready_ZWD[slot_B] = outcome.probe_taps[self.last].to(self.ready_ZWD.dtype)
        self.level_Z[slot_B] = torch.where(whole_B, W, 0)


FAMILY = Family(
    name="lexical-unit",
    summary=(
        "Pads behind the newest token say the rest of spans that the target is sure of, in the "
        "forward that reads it. On request (`keep`) such spans are taken unconfirmed as long as "
        "each token is probable enough, which is approximate; left alone they are drafts that the "
        "next forward verifies."
    ),
    paper="https://arxiv.org/abs/2405.15208",
    options=LexicalUnitOptions,
    build=LexicalUnit,
    trainable=True,
    policies=("direct",),
    borrows_layers=True,
)
