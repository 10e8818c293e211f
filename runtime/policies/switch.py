"""Switch: the policy that plays arms. A controller orders them, the first with a draft plays.

The arms are whole configurations of a team's members; plain decoding is one of them. Choices follow
from earlier rounds and from the text only, so every arm keeps its own guarantee.
Letters: B rows, N nodes, T fed tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specctl.core.drafter import Budget, DraftState, Outcome, RoundSeconds, RoundView, StepState
from specctl.core.errors import unknown
from specctl.core.tree import DraftTree, NodeKind, empty_tree, fitted
from specctl.drafters.team import TeamState
from specctl.runtime.controllers import CONTROLLERS
from specctl.runtime.controllers.base import OFF, Arm, ArmCount, Controller, Prices, Score
from specctl.runtime.controllers.match import Matches
from specctl.runtime.controllers.shadow import Shadows
from specctl.runtime.measure.cost_table import CostTable
from specctl.runtime.policies.base import GrowRequest, PolicyEntry, RestSpan
from specctl.runtime.policies.chain import Chain
from specctl.runtime.policies.direct import Direct

MEASURED = 4  # rounds of a rest of which one is measured


@dataclass(slots=True)
class Switch:
    """Drafts up to `length` deep, trees of at most `nodes`. `lengths` are those of the arms of each
    member, none above `length`; `arms` replaces this choice. `costs`
    are prices measured beforehand. One writer: the engine."""

    controller: str = "cascade"
    length: int = 8
    nodes: int = 12
    lengths: tuple[int, ...] = (2, 4, 8)
    arms: tuple[Arm, ...] = ()
    costs: CostTable | None = field(default=None, repr=False)
    depth: int = field(init=False, repr=False)  # of the longest arm
    control: Controller = field(init=False, repr=False)
    counts: dict[str, ArmCount] = field(default_factory=dict, init=False, repr=False)
    unasked: ArmCount = field(default_factory=ArmCount, init=False, repr=False)
    prices: Prices = field(init=False, repr=False)
    matches: Matches = field(default_factory=Matches, init=False, repr=False)
    shadows: Shadows = field(default_factory=Shadows, init=False, repr=False)
    played: int = field(default=0, init=False, repr=False)
    idle: float = field(default=0.0, init=False, repr=False)  # seconds of drafts not played
    contexts: list[int] = field(default_factory=list, init=False, repr=False)
    order: Sequence[int] = field(default=(), init=False, repr=False)  # of this round's arms
    looks: bool = field(default=False, init=False, repr=False)
    is_open: bool = field(default=False, init=False, repr=False)
    is_asked: bool = field(default=False, init=False, repr=False)  # in this round
    is_grown: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.controller not in CONTROLLERS:
            listed = "specctl recipes schema --field serve"
            raise unknown("controller", self.controller, CONTROLLERS, "serve.controller", listed)
        self.nodes = max((arm.nodes for arm in self.arms), default=max(self.nodes, self.length))
        self.lengths = tuple(sorted({min(int(k), self.length) for k in self.lengths}))
        self.depth = self._longest()
        self.control, self.prices = CONTROLLERS[self.controller](), Prices(self.costs)

    def _longest(self) -> int:
        return max((arm.length for arm in self.arms), default=self.length)

    @property
    def is_chain(self) -> bool:
        return False

    @property
    def steps_in_chains(self) -> bool:
        policies = [arm.policy for arm in self.arms if arm.policy is not None]
        return all(policy.is_chain or isinstance(policy, Direct) for policy in policies)

    def kind(self, sampled: bool) -> NodeKind:
        kinds = {arm.policy.kind(sampled) for arm in self.arms if arm.policy is not None}
        return next(iter(kinds - {NodeKind.POINT}), NodeKind.POINT)

    # -- a round --------------------------------------------------------------------------------

    def opened(self, state: DraftState) -> None:
        state.is_listening = self.control.is_listening

    def rests(self, state: DraftState, view: RoundView) -> bool:
        """The controller orders the arms of the coming round; the first may be plain decoding."""
        assert isinstance(state, TeamState), "arms are configurations of a team's members"
        if not self.is_open:
            self._open(state)
        self.contexts, self.prices.missed = [], view.missed
        if self.control.needs_contexts:
            self.contexts = self._read(view)
        self.order, self.idle = self.control.order(self.contexts), 0.0
        self.played, self.looks = self.order[0], self.control.looks()
        state.is_listening = self.control.is_listening
        rests = self.arms[self.played].is_off and not self.looks
        self.is_asked, self.is_grown = rests, False  # else it is asked to grow, if rows have room
        return rests

    def _read(self, view: RoundView) -> list[int]:
        """The contexts of the newest tokens; the controller hears how the text went on."""
        contexts = self.matches.contexts(view.slots, view.tokens)
        for repeat in self.matches.repeats():
            self.control.repeated(repeat)
        return contexts

    def grow(self, growth: GrowRequest) -> DraftTree:
        """The first of the arms that has a draft."""
        state = growth.state
        assert isinstance(state, TeamState), "arms are configurations of a team's members"
        tree = empty_tree(len(growth.view.slots), growth.view.slot_B.device)
        if not self.order:
            self.rests(state, growth.view)
        order, self.order = self.order, ()
        self.is_asked = self.is_grown = True
        if self.contexts and len(self.contexts) > len(growth.view.slots):  # some draft nothing
            self.contexts = self.matches.contexts(growth.view.slots, growth.view.tokens)
        for index in order:
            if self.arms[index].member in state.busy:
                continue
            self.played, began = index, time.perf_counter()
            tree = self._draft(self.arms[index], growth, state)
            if tree.num_nodes or self.arms[index].is_off:
                break
            self.idle += time.perf_counter() - began
        if self.looks and not state.busy:
            began = time.perf_counter()
            self._look(growth, state)
            self.idle += time.perf_counter() - began
        return tree

    @property
    def preferred(self) -> int | None:
        """The member that the controller would have draft in this round, before it is grown."""
        return self.arms[self.order[0]].member if self.order else None

    def _draft(self, arm: Arm, growth: GrowRequest, state: TeamState) -> DraftTree:
        if arm.member is None or arm.policy is None:
            return empty_tree(len(growth.view.slots), growth.view.slot_B.device)
        depth = min(growth.budget.depth, arm.length)
        budget = Budget(min(growth.budget.nodes, arm.nodes), depth)
        member, vocab = state.members[arm.member], state.vocabs[arm.member]
        return fitted(arm.policy.grow(replace(growth, state=member, vocab=vocab, budget=budget)))

    def _look(self, growth: GrowRequest, state: TeamState) -> None:
        """Members that did not play draft as well, to be scored; stepwise ones cost forwards and
        are scored by what they play only."""
        playing = self.arms[self.played].member
        longest = {arm.member: arm for arm in self.arms if arm.member is not None}
        for member, arm in longest.items():
            drafter = state.members[member]
            if member == playing or isinstance(drafter, StepState):
                continue
            depth = min(growth.budget.depth, arm.length)
            tree = drafter.propose(growth.view, Budget(arm.nodes, depth))
            self._note_shape(member, tree)
            self.shadows.add(member, tree, growth.view.tokens, self.contexts)

    def rest(self) -> RestSpan | None:
        is_off = self.is_open and self.arms[self.played].is_off and self.control.off_for > 0
        return RestSpan(self.control.off_for, self.control.glance) if is_off else None

    def wakes(self, view: RoundView) -> bool:
        self.prices.missed = view.missed
        return self.control.wakes(self._read(view))

    def rested(self, rest: RestSpan) -> None:
        rounds = len(rest.seconds)
        self.counts[self.arms[self.played].name].add(rest.tokens, sum(rest.seconds), rounds)
        self.control.rested(rounds)
        self.prices.observe(0, rest.usual, rounds)
        for score in self.shadows.ripe():
            self.control.scored(score)

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        tokens, spent = sum(map(len, outcome.emitted)), seconds.draft + seconds.verify
        is_asked, self.is_asked = self.is_asked, False
        if seconds.is_free or not is_asked:  # too short to draft in
            self.unasked.add(tokens, spent)
            return
        arm = self.arms[self.played]
        count = self.counts[arm.name]
        count.add(tokens, spent)
        if self.control.is_resting and (self.control.off_for or count.rounds % MEASURED):
            return  # a rest costs next to nothing
        lost, learned = self.idle, 0.0
        if arm.is_off and self.control.is_listening:
            learned = seconds.commit
            lost += learned + seconds.wake
        if lost:
            self.control.lost(lost)
        for score in self.shadows.ripe():
            self.control.scored(score)
        if self.is_grown:
            self.prices.woke(seconds.wake)
        if any(outcome.finished):
            return  # cut rounds tell nothing about an arm
        played, verified = max(spent - self.idle - learned, 0.0), seconds.verify
        if arm.member is not None and arm.is_stepwise and outcome.tree.depth:
            self.prices.drafted(arm.member, outcome.tree.depth, max(played - verified, 0.0))
        else:  # its draft is a small part of the round
            verified = played
        self.prices.observe(outcome.tree.num_nodes, verified)
        self.control.reward(self.played, tokens / len(outcome.emitted), played + seconds.wake)
        if arm.member is not None:
            self._score_played(arm.member, outcome)

    def _score_played(self, member: int, outcome: Outcome) -> None:
        tree = outcome.tree
        if tree.num_nodes == 0:
            return
        self._note_shape(member, tree)
        if tree.is_chain:
            depth_B = tree.valid_BN.sum(1)
        else:
            depth_B = (tree.depth_BT()[:, 1:] * tree.valid_BN).amax(1)
        for b, (accepted, depth) in enumerate(
            zip(outcome.num_accepted, depth_B.tolist(), strict=True)
        ):
            if depth > 0:
                context = self.contexts[b] if self.contexts else 0
                known = min(accepted + 1, depth)
                self.control.scored(Score(member, accepted, known, context, depth))

    def _note_shape(self, member: int, tree: DraftTree) -> None:
        if tree.num_nodes:
            prices = self.prices
            (prices.branching if tree.num_nodes > tree.depth else prices.chains).add(member)

    def _open(self, state: TeamState) -> None:
        """The arms, once the members are known."""
        self.is_open = True
        arms = self.arms or (Arm(OFF), *self._default_arms(state))
        self.arms = tuple(_of_member(arm, state) for arm in arms)
        if not any(arm.is_off for arm in self.arms):
            self.arms = (Arm(OFF), *self.arms)
        self.depth = self._longest()
        self.counts = {arm.name: ArmCount() for arm in self.arms}
        self.control.open(self.arms, self.prices)
        self.counts[self.arms[self.control.off].name] = self.unasked

    def _default_arms(self, state: TeamState) -> Sequence[Arm]:
        found = []
        for member, name in enumerate(state.names):
            is_stepwise = isinstance(state.members[member], StepState)
            for length in self.lengths:
                direct = Direct(length, max(length, self.nodes))
                policy = Chain(length=length) if is_stepwise else direct
                found.append(Arm(f"{name} {length}", member, policy, is_stepwise))
        return found

    def to_json(self) -> dict[str, Any]:
        """Counts per arm, and what the controller itself reports."""
        arms = {name: count.to_json() for name, count in self.counts.items() if count.rounds}
        return {"controller": self.controller, "arms": arms, **self.control.to_json()}


def _of_member(arm: Arm, state: TeamState) -> Arm:
    if arm.member is None:
        return arm
    is_copy = state.reads_text_alone[arm.member] and not arm.is_stepwise
    return replace(arm, is_listener=state.may_sleep[arm.member], is_copy=is_copy)


POLICY = PolicyEntry(
    "switch", "what a controller's choice among drafters grows", "", Switch, is_tree=False
)
