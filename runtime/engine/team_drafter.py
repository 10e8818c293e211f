"""TeamDrafter: a team of which rows may choose a member, side by side in one batch.

A row that names a member is drafted for by that one alone, as deep as it usually drafts and the
team reserves room for; the others neither read its text nor are started for it. Rows that name
nobody are the policy's, as ever. The trees of both are verified together, in one forward of the
target. Where rows of one round are drafted for in several ways, drafts are deterministic functions
of the past (drawn with the target's own noise), which the rule target-only verifies whatever drew
them. The policy learns prices and agreement from the rounds in which all rows are its own.
Letters: B rows, N nodes, R flat rows, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specctl.core.drafter import Budget, Drafter, Outcome, RoundSeconds, RoundView, Space
from specctl.core.errors import SpecctlError, unknown
from specctl.core.round_rows import outcome_of_rows, view_of_rows
from specctl.core.tree import DraftTree, NodeKind, empty_tree
from specctl.drafters import family
from specctl.drafters.team import Team, TeamState
from specctl.runtime.engine.request import Request
from specctl.runtime.engine.round import Round, scatter_rows
from specctl.runtime.engine.round_drafter import PolicyDrafter
from specctl.runtime.policies.base import Policy, RestSpan
from specctl.runtime.policies.chain import Chain
from specctl.runtime.policies.direct import Direct
from specctl.runtime.policies.dynamic_tree import DynamicTree
from specctl.runtime.policies.switch import Switch


def drafter_names(drafter: Drafter | None) -> tuple[str, ...]:
    """What a request may name: the members of a team, else the drafter itself."""
    if drafter is None:
        return ()
    return tuple(drafter.names) if isinstance(drafter, Team) else (drafter.family,)


def with_drafts_of(drafter: Drafter | None, request: Request) -> Request:
    """The request as an engine with that drafter decodes it; SpecctlError for a name that is not
    among its drafters."""
    name, names = request.drafts, drafter_names(drafter)
    if not isinstance(name, str):
        return request
    if not names:
        raise SpecctlError(
            f"no drafter {name!r}: nothing drafts here",
            where="drafts",
            found=name,
            expected="True or False where there is no drafter",
            do="leave drafts out, or load a drafter",
        )
    if name not in names:
        raise unknown("drafter", name, names, "drafts", kind=SpecctlError)
    return request if isinstance(drafter, Team) else replace(request, drafts=True)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of a round that are drafted for alike, by `member` or as the policy says (None): `at`
    these places, in these slots. Those `joined` have chosen nobody."""

    member: int | None
    at: tuple[int, ...]
    slots: tuple[int, ...]
    joined: frozenset[int] = frozenset()
    is_chain: bool = False

    def of(self, outcome: Outcome) -> tuple[int, ...]:
        """Its rows among those of an outcome."""
        return tuple(b for b, slot in enumerate(outcome.view.slots) if slot in self.slots)


class TeamDrafter(PolicyDrafter):
    """A team, grown by a policy for the rows that choose no member, and by each member's own for
    those that do."""

    drafter: Team

    def open(self, space: Space) -> None:
        super().open(space)
        self._groups: list[RowGroup] = []  # of this round, where rows have chosen
        self._idle: frozenset[int] = frozenset()  # slots whose rows draft nothing in this round
        self._has_chosen, self._turn = False, 0
        self._own = [_usual(member) for member in self.drafter.members]

    @property
    def team(self) -> TeamState:
        """The members' memories."""
        state = self.state
        assert isinstance(state, TeamState), "a team has one memory of all its members"
        return state

    def rests(self, view: RoundView) -> bool:
        self._has_chosen, self._idle = any(view.chosen), frozenset()
        own, free = view, [b for b, name in enumerate(view.chosen) if name is None]
        if self._has_chosen:
            at_R = torch.tensor(free, dtype=torch.long, device=view.slot_B.device)
            own = view_of_rows(view, free, at_R)
            own = replace(own, missed=view.missed)
        is_idle = bool(own.slots) and super().rests(own)
        if not self._has_chosen:
            return is_idle
        if is_idle:
            self._idle = frozenset(own.slots)
        names = (self.team.names.index(name) for name in view.chosen if name is not None)
        if any(self.team.may_sleep[index] for index in names):
            self.team.is_listening = True
        return False

    def drafts_for(self, slot: int) -> bool:
        return slot not in self._idle

    def rest(self) -> RestSpan | None:
        return None if self._has_chosen else super().rest()

    # -- a round ----------------------------------------------------------------------------------

    def draft(self, round: Round) -> DraftTree:
        self._groups, self.team.busy = [], frozenset()
        if not any(round.view.chosen):
            return super().draft(round)
        groups, trees = self._grouped(round.view), list[DraftTree]()
        self.team.busy = frozenset(g.member for g in groups if g.member is not None)
        for group in groups:
            part = round.of_rows(group.at)
            part = replace(part, view=replace(part.view, watch=_watch(round.view, group.at)))
            tree = self._of_group(part, group.member, len(groups) > 1)
            self._groups.append(replace(group, is_chain=tree.is_chain))
            trees.append(tree)
        if len(trees) > 1 and any(tree.num_probes for tree in trees):
            self._turn += 1  # probes are the last columns of a tree: one tree of a round has them
            able = [i for i, tree in enumerate(trees) if tree.num_nodes]
            kept = able[self._turn % len(able)]
            nothing = [empty_tree(len(g.at), round.view.slot_B.device) for g in groups]
            trees = [tree if i == kept else nothing[i] for i, tree in enumerate(trees)]
        return joined([(g.at, tree) for g, tree in zip(groups, trees, strict=True)])

    def _grouped(self, view: RoundView) -> list[RowGroup]:
        """Rows by the member that they have chosen. The others come last, or join those of the
        member that the policy would have draft for them: it grows once a round."""
        rows: dict[int | None, list[int]] = {}
        for b, name in enumerate(view.chosen):
            rows.setdefault(None if name is None else self.team.names.index(name), []).append(b)
        free = rows.pop(None, [])
        preferred = self.policy.preferred if isinstance(self.policy, Switch) else None
        if free and preferred in rows:
            rows[preferred] += free
        elif free:
            rows[None] = free
        groups = list[RowGroup]()
        for member, unsorted in rows.items():
            at = tuple(sorted(unsorted))
            slots = tuple(view.slots[b] for b in at)
            joining = [] if member is None else [view.slots[b] for b in at if b in free]
            groups.append(RowGroup(member, at, slots, frozenset(joining)))
        return groups

    def _of_group(self, round: Round, member: int | None, is_beside: bool) -> DraftTree:
        """The tree of a group's rows."""
        is_coupled = self.is_coupled or is_beside
        if member is None:
            return self.grown(round, self.state, self.policy, None, is_coupled)
        own, most = self._own[member], round.plan.budget
        budget = Budget(min(most.nodes, own.nodes), min(most.depth, own.depth))
        round = replace(round, plan=replace(round.plan, budget=budget))
        team = self.team
        return self.grown(round, team.members[member], own, team.vocabs[member], is_coupled)

    def observe(self, outcome: Outcome, logits_BTV: Tensor | None = None) -> None:
        """A member sees first what it has drafted, then the rows that others drafted for."""
        groups, self._groups = self._groups, []
        if not groups:
            super().observe(outcome, logits_BTV)
            return
        for group in groups:
            if group.member is not None and (at := group.of(outcome)):
                own = outcome_of_rows(outcome, at)
                if len(at) < len(outcome.emitted):
                    own = replace(own, tree=replace(own.tree, is_chain=group.is_chain))
                self.team.show(group.member, own)
        for group in groups:
            free = group.slots if group.member is None else group.joined
            at = tuple(b for b, slot in enumerate(outcome.view.slots) if slot in free)
            if at:
                own = outcome_of_rows(outcome, at)
                for index in range(len(self.team.members)):
                    if index != group.member:
                        self.team.show(index, own)

    def learn(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        if not any(outcome.view.chosen):
            super().learn(outcome, seconds)
            return
        free = [b for b, name in enumerate(outcome.view.chosen) if name is None]
        policy: object = self.policy
        for learner in self.learners:
            if learner is not policy:
                learner.observe(outcome, seconds)
            elif free:  # what such a round takes is no price of theirs
                learner.observe(outcome_of_rows(outcome, free), replace(seconds, is_free=True))


def _watch(view: RoundView, at: Sequence[int]) -> Callable[[Tensor], None] | None:
    """Shows whoever watches a round the largest logits of rows that are a part of it."""
    watch = view.watch
    if watch is None or len(at) == len(view.slots):
        return watch
    at_R = torch.tensor(at, device=view.slot_B.device)

    def shown(logits: Tensor) -> None:
        largest_R1 = logits.flatten(1).amax(1, keepdim=True)
        watch(largest_R1.new_zeros(len(view.slots), 1).index_copy(0, at_R, largest_R1))

    return shown


def _usual(member: Drafter) -> Policy:
    """How a member drafts by itself, as its package or its family says: what it proposes, a tree of
    its best tokens where it has a cache of its own, else a chain."""
    from specctl.runtime.policies import make_policy

    names = member.policies or family(member.family).policies
    policy = make_policy({"policy": names[0], **member.serve})
    is_tree = isinstance(policy, DynamicTree) and not member.needs().copied
    if is_tree or isinstance(policy, Direct | Chain):
        return policy
    return Chain(length=policy.depth)


def joined(parts: Sequence[tuple[Sequence[int], DraftTree]]) -> DraftTree:
    """Trees of some rows each as one of all rows; POINT trees without probes, if there are several.
    Nodes keep their places; behind them is padding."""
    num_rows = sum(len(at) for at, _ in parts)
    grown = [(at, tree) for at, tree in parts if tree.num_nodes]
    if not grown:
        return empty_tree(num_rows, parts[0][1].token_BN.device)
    if len(grown) == 1:
        at, tree = grown[0]
        return scatter_rows(tree, at, num_rows)
    assert all(tree.kind is NodeKind.POINT and not tree.num_probes for _, tree in grown)
    rows, N = [b for at, _ in grown for b in at], max(tree.num_nodes for _, tree in grown)
    columns = zip(*(_columns(tree, N) for _, tree in grown), strict=True)
    token, parent, rank, valid, expanded, estimate, forced = map(torch.cat, columns)
    tree = DraftTree(
        token,
        parent,
        rank,
        valid,
        NodeKind.POINT,
        max(tree.depth for _, tree in grown),
        is_chain=all(tree.is_chain for _, tree in grown),
        estimate_BN=estimate if any(t.estimate_BN is not None for _, t in grown) else None,
        expanded_BN=expanded,
        forced_BN=forced if any(t.forced_BN is not None for _, t in grown) else None,
    )
    order_R = torch.tensor(sorted(range(len(rows)), key=rows.__getitem__), device=token.device)
    return scatter_rows(tree.of_rows(order_R), sorted(rows), num_rows)


def _columns(tree: DraftTree, N: int) -> tuple[Tensor, ...]:
    """Tokens, parents, ranks, validity, expansions, estimates and what is forced, [R, N] each."""
    B, own = tree.token_BN.shape
    at_BN = torch.arange(N, device=tree.token_BN.device).expand(B, N)

    def filled(value_BN: Tensor | None, default_BN: Tensor) -> Tensor:
        return default_BN if value_BN is None else torch.cat([value_BN, default_BN[:, own:]], 1)

    zero_BN, no_BN = torch.zeros_like(at_BN), torch.zeros_like(at_BN, dtype=torch.bool)
    return (
        filled(tree.token_BN, zero_BN),
        filled(tree.parent_BN, at_BN - 1),
        filled(tree.rank_BN, zero_BN),
        filled(tree.valid_BN, no_BN),
        filled(tree.expanded_BN, at_BN),
        filled(tree.estimate_BN, torch.ones_like(at_BN, dtype=torch.float32)),
        filled(tree.forced_BN, no_BN),
    )
