"""Team: several drafters over the same rows, one of which drafts in each round.

Every member sees every prompt and every outcome, so that any of them can draft at any time, but for
rows that have chosen one of them: those that one alone sees. Who drafts for the others is for the
policy to say (`switch`, runtime/controllers). Alone, the team is a cascade: of each row the first
member that has a draft proposes it. Members whose only input is the target's top-k may sleep: they
then cost nothing and learn nothing.
Letters: B rows, C candidates, N nodes, T fed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from specctl.core.drafter import (
    Budget,
    Drafter,
    DraftState,
    Family,
    Needs,
    Outcome,
    RoundView,
    Space,
    StepState,
)
from specctl.core.errors import RecipeError
from specctl.core.forward.prompt_images import PromptImages
from specctl.core.language_model import Borrowed, LanguageModel
from specctl.core.round_rows import outcome_of_rows
from specctl.core.spec import ModelSpec
from specctl.core.tree import DraftTree, NodeKind, empty_tree
from specctl.core.vocab import VocabMap
from specctl.drafters import family
from specctl.drafters.option_checks import Options
from specctl.drafters.self_speculation.quantspec import pays_rounded

QUANTSPEC = "quantspec"


@dataclass(frozen=True, slots=True)
class TeamOptions(Options):
    """Names of training-free families, in the order in which a cascade tries them. `rounded`:
    `quantspec` joins them where the target's weights of 4 bits pay (`pays_rounded`)."""

    members: tuple[str, ...] = ("prompt-lookup",)
    rounded: bool = False

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if not self.members or len(set(self.members)) < len(self.members):
            raise RecipeError(
                "a team needs members, each of them once",
                where="drafter.options.members",
                found=", ".join(self.members) or "none",
                expected="drafters of different families",
                do="name one of each, such as prompt-lookup and token-recycling",
            )

    def of(self, lm: LanguageModel) -> TeamOptions:
        """The team for that target."""
        joins = self.rounded and QUANTSPEC not in self.members and pays_rounded(lm)
        return replace(self, members=(*self.members, QUANTSPEC)) if joins else self


class Team(Drafter):
    """Drafters that share the rows. `members` may be any drafters, trained ones included."""

    family = "team"

    def __init__(
        self,
        options: TeamOptions,
        spec: ModelSpec,
        vocab: VocabMap | None = None,
        members: Sequence[Drafter] = (),
    ) -> None:
        super().__init__(options, spec, vocab)
        self.members = list(members) or [_built(name, spec) for name in options.members]
        self.names = [m.family for m in self.members]
        self.lossless = all(m.lossless for m in self.members)

    @classmethod
    def of(cls, members: Sequence[Drafter]) -> Self:
        """A team of these drafters."""
        options = TeamOptions(tuple(m.family for m in members))
        return cls(options, members[0].spec, None, members)

    @property
    def positions(self) -> int | None:
        known = [most for member in self.members if (most := member.positions) is not None]
        return min(known, default=None)

    def needs(self) -> Needs:
        all_needs = [m.needs() for m in self.members]
        return Needs(
            taps=tuple(sorted({tap for needs in all_needs for tap in needs.taps})),
            topk=max(needs.topk for needs in all_needs),
            topk_logp=any(needs.topk_logp for needs in all_needs),
            borrow=any(needs.borrow for needs in all_needs),
            copied=tuple(sorted(_copied(all_needs))),
        )

    @property
    def shared_bytes(self) -> int:
        return sum(member.shared_bytes for member in self.members)

    def bind(self, borrowed: Borrowed) -> None:
        for member in self.members:
            if member.needs().borrow:
                member.bind(borrowed)

    def open(self, space: Space) -> TeamState:
        return TeamState(self, space)

    def tensors(self) -> dict[str, Tensor]:
        found = ((n, m.tensors()) for n, m in zip(self.names, self.members, strict=True))
        return {f"{name}.{key}": t for name, tensors in found for key, t in tensors.items()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        for name, member in zip(self.names, self.members, strict=True):
            prefix = name + "."
            own = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
            member.load_tensors(own)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Drafter:
        self.members = [member.to(device, dtype) for member in self.members]
        return self


class TeamState(DraftState):
    """The members' memories side by side. While `is_listening` is False, members that live on the
    target's top-k alone sleep. `chosen`: the member of each slot that has chosen one. `busy`: those
    that draft for rows that chose them in this round, and for no others."""

    def __init__(self, team: Team, space: Space) -> None:
        self.names, self.vocabs = team.names, [m.vocab for m in team.members]
        needs = [m.needs() for m in team.members]
        unshared = replace(space, target_kv=None)
        spaces = [space if each.copied else unshared for each in needs]
        self.members = [m.open(own) for m, own in zip(team.members, spaces, strict=True)]
        self.is_listening = True
        self.chosen: dict[int, int] = {}
        self.busy: frozenset[int] = frozenset()
        self._topk = [n.topk for n in needs]
        self.may_sleep = [n.topk > 0 and not n.taps for n in needs]
        self.reads_text_alone = [not (n.topk or n.taps or n.borrow) for n in needs]

    def join(self, slot: int, conversation: str | None) -> None:
        for member in self._of(slot):
            member.join(slot, conversation)

    def belong(self, slot: int, tenant: str | None) -> None:
        for member in self._of(slot):
            member.belong(slot, tenant)

    def see(self, slot: int, images: PromptImages | None) -> None:
        for member in self.members:
            member.see(slot, images)

    def choose(self, slot: int, member: str | None) -> None:
        self.chosen.pop(slot, None)
        if member is not None:
            self.chosen[slot] = self.names.index(member)

    def _of(self, slot: int) -> Sequence[DraftState]:
        """The members that follow the row of that slot."""
        chosen = self.chosen.get(slot)
        return self.members if chosen is None else (self.members[chosen],)

    def finish(self, slot: int, answer: Sequence[int]) -> None:
        for member in self._of(slot):
            member.finish(slot, answer)

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        for member in self._of(slot):
            member.start(slot, tokens, taps)

    def propose(self, view: RoundView, budget: Budget) -> DraftTree:
        direct = [(i, m) for i, m in enumerate(self.members) if not isinstance(m, StepState)]
        assert direct, "a team of stepwise drafters is grown by the policy switch"
        trees = [m.propose(view, budget) for i, m in direct if i not in self.busy]
        return first_of(trees or [empty_tree(len(view.slots), view.slot_B.device)])

    @property
    def ignores_text(self) -> bool:
        pairs = zip(self.members, self.may_sleep, strict=True)
        return all(sleeps or member.ignores_text for member, sleeps in pairs)

    def observe(self, outcome: Outcome) -> None:
        slots = outcome.view.slots
        for index in range(len(self.members)):
            at = [b for b, slot in enumerate(slots) if self.chosen.get(slot, index) == index]
            if at:
                self.show(index, outcome_of_rows(outcome, at))

    def show(self, index: int, outcome: Outcome) -> None:
        """That member sees what became of rows that it follows."""
        if outcome.topk_BTC is not None or not self.may_sleep[index]:
            self.members[index].observe(_narrowed(outcome, self._topk[index]))

    def end(self, slot: int) -> None:
        for member in self._of(slot):
            member.end(slot)
        self.chosen.pop(slot, None)


def _copied(all_needs: Sequence[Needs]) -> set[int]:
    """Taps that no member asks for but to copy the target's cache."""
    read = {tap for needs in all_needs for tap in needs.without_copy().taps}
    return {tap for needs in all_needs for tap in needs.copied} - read


def _narrowed(outcome: Outcome, topk: int) -> Outcome:
    """The outcome with as many ranks as a member asked for."""
    found, logp = outcome.topk_BTC, outcome.topk_logp_BTC
    if found is None or topk in (0, found.shape[-1]):
        return outcome
    logp = None if logp is None else logp[..., :topk]
    return replace(outcome, topk_BTC=found[..., :topk], topk_logp_BTC=logp)


def first_of(trees: Sequence[DraftTree]) -> DraftTree:
    """Of each row the first tree that has a node there; POINT trees only."""
    best = trees[0]
    for other in trees[1:]:
        has_B = best.valid_BN.any(1)
        if other.num_nodes == 0 or bool(has_B.all()):
            continue
        if best.num_nodes == 0 or not bool(has_B.any()):
            best = other
            continue
        best = _by_row(has_B, best, other)
    return best


def _by_row(first_B: Tensor, one: DraftTree, two: DraftTree) -> DraftTree:
    """Rows of `one` where `first_B`, of `two` elsewhere."""
    N = max(one.num_nodes, two.num_nodes)

    def pick(a_BN: Tensor, b_BN: Tensor, fill: int) -> Tensor:
        a_BN, b_BN = (pad(x, (0, N - x.shape[1]), value=fill) for x in (a_BN, b_BN))
        return torch.where(first_B[:, None], a_BN, b_BN)

    return DraftTree(
        pick(one.token_BN, two.token_BN, 0),
        pick(one.parent_BN, two.parent_BN, -1),
        pick(one.rank_BN, two.rank_BN, 0),
        pick(one.valid_BN, two.valid_BN, 0),
        NodeKind.POINT,
        max(one.depth, two.depth),
    )


def _built(name: str, spec: ModelSpec) -> Drafter:
    found = family(name)
    if found.trainable or found.name == Team.family:
        raise RecipeError(
            f"{name} cannot be named as a member",
            where="drafter.options.members",
            expected="families that need no training",
            do="load the drafter and use Team.of([...]) in Python",
        )
    return found.build(found.options(), spec, None)


FAMILY = Family(
    name="team",
    summary=(
        "Several training-free drafters at once. Each round one of them drafts: the first that has "
        "a draft, or, under the policy switch, the one that a controller expects most of "
        "by what was measured. The way to serve text whose kind is not known beforehand."
    ),
    paper="https://arxiv.org/abs/2510.20064",
    options=TeamOptions,
    build=Team,
    trainable=False,
    policies=("direct", "switch"),
)
