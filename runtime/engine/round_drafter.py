"""RoundDrafter: what drafts in a round, behind one interface, so that parts of it can be wrapped.

The engine holds one: a PolicyDrafter (a drafter's state, grown by a policy) inside whatever wraps
it, such as LazyDrafter and Guard. The base class drafts nothing: plain decoding.
Letters: B rows, K draft vocabulary, M new nodes, N nodes, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specctl.core.drafter import (
    Drafter,
    DraftState,
    Needs,
    Outcome,
    RoundSeconds,
    RoundView,
    SharedNoise,
    Space,
    StepState,
)
from specctl.core.tree import DraftTree, empty_tree, fitted
from specctl.core.vocab import VocabMap
from specctl.runtime.engine.request import Row
from specctl.runtime.engine.round import Round
from specctl.runtime.policies.base import GrowRequest, Learner, Policy, Resting, RestSpan, Sleeper


class RoundDrafter:
    """Drafts for the rows of a round; by itself nothing. Rows are known by their slots.

    `is_lazy`: a row that drafts nothing costs nothing. `catch_up_seconds`: what the newest `draft`
    took for reading what its rows had missed.
    """

    is_lazy: bool = False
    catch_up_seconds: float = 0.0

    @property
    def state(self) -> DraftState | None:
        """The drafter's memory of the rows; None while nothing can be drafted."""
        return None

    def open(self, space: Space) -> None:
        """Reserve memory for that many rows; what was known of others is forgotten."""

    def speculates(self, slot: int) -> bool:
        """Whether the row in that slot may be drafted for."""
        return False

    def goes_on_resting(self, view: RoundView) -> bool:
        """Called first before a round: whether it is one of those in which nobody is consulted."""
        return False

    def rests(self, view: RoundView) -> bool:
        """Called before a round: whether nothing is to be drafted in it."""
        return False

    def drafts_for(self, slot: int) -> bool:
        """Once a round is planned: whether that row is one of those that are to draft in it."""
        del slot
        return True

    def rest(self) -> RestSpan | None:
        """After a round without a draft: those that need no decision and are not observed."""
        return None

    def wakes(self, view: RoundView) -> bool:
        """Whether there is a reason to end the rest before this round."""
        return False

    def rested(self, rest: RestSpan) -> None:
        """It is over; at least one round long."""

    def backlog(self, row: Row) -> int:
        """Positions that the target has read and the drafter has not."""
        return 0

    def prefill(self, row: Row, taps: Mapping[int, Tensor], first: int, last: int) -> None:
        """Read positions first .. last - 1 of a prompt; with last = 0 a new prompt begins."""

    def start(self, row: Row, taps: Mapping[int, Tensor]) -> None:
        """A row becomes active; the taps of its whole prompt."""

    def catch_up(self, missed: Outcome) -> None:
        """Read text that was emitted in rounds in which it was not drafted for."""

    def draft(self, round: Round) -> DraftTree:
        """One tree for all rows of the round; rows with nothing to draft have no valid node."""
        return empty_tree(len(round.rows), round.view.slot_B.device)

    def needed(self) -> Needs:
        """What of the target's answer this round's `observe` is to be shown."""
        return Needs()

    def observe(self, outcome: Outcome, logits_BTV: Tensor | None = None) -> None:
        """What became of the rows of a round. `logits_BTV`: the target's."""

    def learn(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        """A round is over, what it observed included: what adapts may adapt."""

    def end(self, row: Row) -> None:
        """A row has left its slot, started or not."""


class PolicyDrafter(RoundDrafter):
    """A drafter's state, grown into trees by a policy. `learners` adapt to what rounds did;
    under `rule` target-only drafts are drawn with the target's own noise, under inverse-cdf the
    drafter is shown it."""

    def __init__(
        self, drafter: Drafter, policy: Policy, learners: Sequence[Learner], rule: str
    ) -> None:
        self.drafter, self.policy, self.learners = drafter, policy, learners
        self.is_coupled, self.is_shown = rule == "target-only", rule == "inverse-cdf"
        self._state: DraftState | None = None
        self._started: set[int] = set()
        self._resting = policy if isinstance(policy, Resting) else None
        self._sleepers = [each for each in learners if isinstance(each, Sleeper)]

    @property
    def state(self) -> DraftState:
        assert self._state is not None, "open() reserves the drafter's memory"
        return self._state

    def open(self, space: Space) -> None:
        self._state = self.drafter.open(space)
        self._started.clear()
        if self._resting is not None:
            self._resting.opened(self._state)

    def speculates(self, slot: int) -> bool:
        return True

    def rests(self, view: RoundView) -> bool:
        return self._resting is not None and self._resting.rests(self.state, view)

    def rest(self) -> RestSpan | None:
        spans = [span for each in self._sleepers if (span := each.rest()) is not None]
        return max(spans, key=lambda rest: rest.left, default=None)

    def wakes(self, view: RoundView) -> bool:
        return any(each.wakes(view) for each in self._sleepers)

    def rested(self, rest: RestSpan) -> None:
        for each in self._sleepers:
            each.rested(rest)

    def prefill(self, row: Row, taps: Mapping[int, Tensor], first: int, last: int) -> None:
        if first == 0:
            self.state.see(row.slot, row.request.images)
        self.state.prefill(row.slot, row.tokens, taps, first, last)

    def start(self, row: Row, taps: Mapping[int, Tensor]) -> None:
        self._started.add(row.slot)
        drafts = row.request.drafts
        self.state.choose(row.slot, drafts if isinstance(drafts, str) else None)
        self.state.join(row.slot, row.request.conversation)
        self.state.belong(row.slot, row.request.tenant)
        self.state.see(row.slot, row.request.images)
        self.state.start(row.slot, row.request.tokens, taps)

    def catch_up(self, missed: Outcome) -> None:
        self.state.observe(missed)

    def draft(self, round: Round) -> DraftTree:
        return self.grown(round, self.state, self.policy, self.drafter.vocab, self.is_coupled)

    def grown(
        self,
        round: Round,
        state: DraftState,
        policy: Policy,
        vocab: VocabMap | None,
        is_coupled: bool,
    ) -> DraftTree:
        """The tree that a policy grows from that state, for all rows of the round."""
        view, plan, sampling = round.view, round.plan, round.sampling
        if self.is_shown and not sampling.all_greedy:  # such a round has no noise of its own
            view = replace(view, shared=self._shared(round, vocab))
        guide = sampling.guide(view)
        given = (view, plan.budget, sampling, round.noise, vocab, is_coupled, guide)
        tree = policy.grow(GrowRequest(state, *given, estimates=plan.estimates))
        tree = fitted(plan.cut(tree))
        if isinstance(state, StepState) and tree.num_nodes:
            forced_BN = state.unverified(tree)
            tree = tree if forced_BN is None else replace(tree, forced_BN=forced_BN)
        assert tree.forced_BN is None or not self.drafter.lossless, "only approximate ones force"
        if tree.is_chain and tree.num_nodes and isinstance(state, StepState):
            exits = state.exit_states()
            tree = tree if exits is None else replace(tree, exits=exits)
        return tree

    def _shared(self, round: Round, vocab: VocabMap | None) -> SharedNoise:
        device, rows = round.view.slot_B.device, len(round.rows)
        heats = [row.request.sampling.temperature for row in round.rows]
        ids_K = None if vocab is None else vocab.ids_K
        return SharedNoise(
            lambda count: round.noise.position_BT(
                torch.arange(count, device=device).expand(rows, count)
            ),
            torch.tensor(heats, device=device),
            lambda logits_BMK: round.sampling.draft_distribution(logits_BMK, ids_K),
        )

    def observe(self, outcome: Outcome, logits_BTV: Tensor | None = None) -> None:
        self.state.observe(outcome)

    def learn(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        for learner in self.learners:
            learner.observe(outcome, seconds)

    def end(self, row: Row) -> None:
        if row.slot in self._started:
            self._started.remove(row.slot)
            if row.finished is not None:
                self.state.finish(row.slot, row.tokens[row.prompt_len :])
            self.state.end(row.slot)
