"""Arms and controllers: which configuration speculates in the next round, if any does.

An arm is a whole configuration: a member of the team, the policy that grows it and its length; one
arm is plain decoding. A controller orders the arms of a round by what it expects of them; the first
that has something to draft is played. It learns tokens and seconds of the arm played (`reward`),
and how far the drafts of any member agreed with the text, played or not (`scored`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specctl.runtime.controllers.match import Repeat
from specctl.runtime.measure.live_costs import FEW_POSITIONS, Ratios, Recent

if TYPE_CHECKING:
    from specctl.runtime.measure.cost_table import CostTable
    from specctl.runtime.policies.base import Policy

OFF = "off"
TRUSTED = 3  # drafts of a stepwise member before which they cost nothing


@dataclass(frozen=True, slots=True)
class Arm:
    """`member` drafts under `policy` (both None: plain decoding). `is_stepwise`: its drafts cost
    forwards, so they are only judged by what is played. `is_listener`: it drafts from the target's
    top-k of earlier rounds; `is_copy`: from the text alone, which therefore tells what it is worth.
    The policy knows the last two of its members."""

    name: str
    member: int | None = None
    policy: Policy | None = None
    is_stepwise: bool = False
    is_listener: bool = False
    is_copy: bool = False

    @property
    def is_off(self) -> bool:
        return self.member is None

    @property
    def length(self) -> int:
        return 0 if self.policy is None else self.policy.depth

    @property
    def nodes(self) -> int:
        return 0 if self.policy is None else self.policy.nodes


@dataclass(frozen=True, slots=True)
class Score:
    """A draft of `member` held against the text: `matched` tokens agreed, of the `known` that could
    be compared; `context` is the length of the repeated suffix in front of it, `depth` how deep the
    draft went (None: as deep as any arm wants)."""

    member: int
    matched: int
    known: int
    context: int = 0
    depth: int | None = None

    @property
    def is_whole(self) -> bool:
        """Nothing is censored: the draft ended in a mismatch."""
        return self.matched < self.known


@dataclass(slots=True)
class ArmCount:
    """What one arm has done. One writer: the policy `switch`."""

    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float, rounds: int = 1) -> None:
        self.rounds += rounds
        self.tokens += tokens
        self.seconds += seconds

    def to_json(self) -> dict[str, Any]:
        return {"rounds": self.rounds, "tokens": self.tokens, "seconds": round(self.seconds, 6)}


@dataclass(slots=True)
class Prices:
    """Seconds of a round by nodes drafted: measured beforehand (`table`), else guessed, `slope`
    dearer per node; both corrected by the rounds as they come. Of a stepwise member `drafts` says
    what a drafted token takes beside it. `branching` are the members that were seen to draft trees,
    which have more nodes than levels, `chains` the others that were seen; before, those that rank
    candidates count as `branching`."""

    table: CostTable | None = None
    slope: float = 0.08
    ratios: Ratios = field(default_factory=lambda: Ratios(first_wait=1))
    branching: set[int] = field(default_factory=set)
    chains: set[int] = field(default_factory=set)
    read: float = 0.0  # a position of what drafters have missed; as measured lately
    missed: int = 0  # so many positions, before this round
    drafts: dict[int, Recent] = field(default_factory=dict)
    _known: dict[int, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.table is not None and not self.read:
            self.read = self.table.read

    @property
    def wake(self) -> float:
        """Before a draft, to read what was missed."""
        return self.read * self.missed

    def woke(self, seconds: float) -> None:
        """That took so long."""
        if self.missed:
            seen = seconds / max(self.missed, FEW_POSITIONS)
            self.read = 0.5 * (self.read + seen) if self.read else seen

    def of(self, arm: Arm, depth: int | None = None) -> float:
        """Of a round with that arm; a chain may come out shorter than its length."""
        if arm.member is None:
            return self.seconds(0)
        length = arm.length if depth is None else min(arm.length, max(depth, 1))
        is_tree = arm.member in self.branching or (
            arm.is_listener and arm.member not in self.chains
        )
        nodes = arm.nodes if is_tree else length
        drafts = self.drafts.get(arm.member)
        is_known = drafts is not None and len(drafts.ratios) >= TRUSTED
        return self.seconds(nodes) + (length * drafts.middle if drafts and is_known else 0.0)

    def observe(self, nodes: int, seconds: float, rounds: int = 1) -> None:
        self.ratios.observe(nodes, seconds / self._expected(nodes), rounds)

    def drafted(self, member: int, length: int, seconds: float) -> None:
        """A stepwise member took so long for a draft of that length."""
        self.drafts.setdefault(member, Recent()).add(seconds / length, 0)

    def seconds(self, nodes: int) -> float:
        """Of a round with so many drafted nodes per row, as rounds go now."""
        return self.ratios.of(nodes) * self._expected(nodes)

    def _expected(self, nodes: int) -> float:
        if self.table is None:
            return 1.0 + self.slope * nodes
        if nodes not in self._known:
            self._known[nodes] = self._from_table(self.table, nodes)
        return self._known[nodes]

    @staticmethod
    def _from_table(table: CostTable, nodes: int) -> float:
        longest = max(table.verify)
        if nodes <= longest:
            return table.seconds(nodes)
        # beyond the table: as dear per node as its longest draft on average
        return table.round_seconds(longest) * nodes / max(longest, 1)


class Controller(ABC):
    """One writer: the policy `switch` of one engine."""

    needs_contexts = False  # asks for the length of the repeated suffix
    is_listening = True  # members that live on the target's top-k need not sleep
    is_resting = False  # nothing was asked of anybody in this round
    off_for = 0  # so many more rounds need not be ordered, where plain decoding was the choice,
    glance = 0  # unless it `wakes`: asked every `glance` rounds, 0 = never

    def open(self, arms: Sequence[Arm], prices: Prices) -> None:
        """The arms of this engine, known when the first round begins."""
        self.arms, self.prices = tuple(arms), prices
        self.off = next(i for i, arm in enumerate(arms) if arm.is_off)

    @abstractmethod
    def order(self, contexts: Sequence[int]) -> Sequence[int]:
        """Arms to try, best first; `contexts` per row (empty if not asked for)."""

    def wakes(self, contexts: Sequence[int]) -> bool:
        """Within a rest: whether another arm than plain decoding would come first now."""
        del contexts
        return False

    def rested(self, rounds: int) -> None:
        """So many rounds of a rest are over."""
        del rounds

    def looks(self) -> bool:
        """Whether members that do not play should draft now, to be scored later."""
        return False

    def reward(self, arm: int, tokens: float, seconds: float) -> None:
        """The arm played emitted so many tokens per row in that time."""
        del arm, tokens, seconds

    def lost(self, seconds: float) -> None:
        """So long was spent on drafts that were not played: looked at, or empty."""
        del seconds

    def repeated(self, repeat: Repeat) -> None:
        """The text went on, or not, as it had behind the same suffix."""
        del repeat

    def scored(self, score: Score) -> None:
        """A draft was held against the text."""
        del score

    def to_json(self) -> Mapping[str, Any]:
        """What a report says beyond the counts per arm."""
        return {}


def first(best: int, off: int) -> tuple[int, ...]:
    """That arm, and plain decoding where it has nothing to draft."""
    return (best,) if best == off else (best, off)
