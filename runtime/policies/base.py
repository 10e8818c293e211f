"""What a tree policy is, and what it is given to grow with.

Letters: B rows, K draft vocabulary, M new nodes, N nodes, P path.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import TYPE_CHECKING, Any, Protocol, Self, cast, runtime_checkable

from torch import Tensor

from specctl.core.drafter import Budget, DraftState, Outcome, RoundSeconds, RoundView, StepState
from specctl.core.language_model import WholeChain
from specctl.core.plugins import Plugin
from specctl.core.tree import DraftTree, NodeKind
from specctl.core.vocab import VocabMap
from specctl.runtime.measure.cost_table import TreeCosts
from specctl.runtime.sampling.noise import RoundNoise
from specctl.runtime.sampling.sampling import SamplingBatch

if TYPE_CHECKING:
    from specctl.runtime.sampling.grammar_mask import Guide


@dataclass(frozen=True, slots=True)
class GrowRequest:
    """One round's growth: who drafts, for which rows, under which sampling, with which noise.

    `coupled` asks for drafts drawn with the target's own noise (rule target-only): they are a
    deterministic function of the past, so their kind is POINT. `guide` keeps drafts of rows with a
    grammar inside it. `estimates`: the tree is to say how likely each of its paths is.
    """

    state: DraftState
    view: RoundView
    budget: Budget
    sampling: SamplingBatch
    noise: RoundNoise
    vocab: VocabMap | None = None
    coupled: bool = False
    guide: Guide | None = None
    estimates: bool = False

    def root(self) -> Tensor:
        """[B, K]: draft logits behind the root; growth step by step begins here."""
        logits_BK = self.view.shown(self.steps.root(self.view))
        if self.guide is None:
            return logits_BK
        return self.guide.root(logits_BK, None if self.vocab is None else self.vocab.ids_K)

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        """[B, M, K]: draft logits behind M more nodes (see `StepState.expand`)."""
        logits_BMK = self.view.shown(self.steps.expand(token_BM, parent_BM))
        if self.guide is None:
            return logits_BMK
        return self.guide.expand(token_BM, parent_BM, logits_BMK)

    def marginals(self, length: int) -> Tensor | None:
        """[B, P, K]: logits of up to `length` places at once (see `StepState.marginals`). None
        where a place depends on what is drafted before it, as under a grammar."""
        if self.guide is not None:
            return None
        logits_BPK = self.steps.marginals(self.view, length)
        return None if logits_BPK is None else self.view.shown(logits_BPK)

    def whole_chain(self, length: int) -> WholeChain | None:
        """Greedy, or drawn by temperature and truncation: the chain of that length by one call of
        the drafter. None where it has none, or where more of its logits are asked for."""
        draws = None
        if self.guide is not None or (self.coupled and not self.sampling.all_greedy):
            return None
        if not self.sampling.all_greedy:
            draws = self.sampling.chain_draws(self.noise)
            if draws is None:
                return None
        elif self.estimates:
            return None
        found = self.steps.whole_chain(self.view, length, draws)
        if found is not None:
            self.view.shown(found.logits)
        return found

    @property
    def may_draft_nothing(self) -> bool:
        """Rows may have nothing to draft: logits that are -inf everywhere."""
        return self.steps.may_draft_nothing or self.guide is not None

    @property
    def steps(self) -> StepState:
        """The drafter's state as one that drafts step by step."""
        assert isinstance(self.state, StepState), "this policy grows stepwise drafters"
        return self.state

    @property
    def sampled(self) -> bool:
        """Draw from q and hand q to the verifier (otherwise nodes are POINT)."""
        return not (self.sampling.all_greedy or self.coupled)

    def target_ids(self, row_: Tensor) -> Tensor:
        """Draft vocabulary rows -> target ids."""
        return row_ if self.vocab is None else self.vocab.ids_K[row_]


class Policy(Protocol):
    """Grows one tree per row. `nodes` and `depth` are its largest sizes."""

    @property
    def nodes(self) -> int: ...

    @property
    def depth(self) -> int: ...

    @property
    def is_chain(self) -> bool: ...

    def kind(self, sampled: bool) -> NodeKind:
        """The node kind of the trees it grows, so that rules are checked when configured."""

    def grow(self, growth: GrowRequest) -> DraftTree: ...


@dataclass(frozen=True, slots=True)
class PolicyEntry(Plugin):
    """What the module of a policy defines as POLICY. The settings of a policy are those fields of
    its class that are plain values. A tree grows every drafter that takes trees; any other policy
    grows the families that name it."""

    is_tree: bool = True


@runtime_checkable
class Learner(Protocol):
    """What learns from rounds: a length chooser, or a policy that adapts. Rounds without a draft
    may be left out."""

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None: ...


@runtime_checkable
class Resting(Protocol):
    """A policy that does not draft in every round."""

    def opened(self, state: DraftState) -> None:
        """The drafter's memory is new; no round was asked for yet."""

    def rests(self, state: DraftState, view: RoundView) -> bool:
        """Asked before a round: whether nothing is to be drafted in it. Then `grow` is not called,
        and the rows cost their drafter nothing."""


@dataclass(slots=True)
class RestSpan:
    """Rounds in which nobody is asked, and nothing drafted, while the rows stay the same: `left`
    are still to come, and before every `glance`-th (0: none) there may be a reason to end the rest;
    what those behind have emitted, and the seconds of each."""

    left: int
    glance: int = 0
    tokens: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def usual(self) -> float:
        """Seconds of such a round: the median, one slow moment is no price."""
        return median_low(self.seconds)


@runtime_checkable
class Sleeper(Protocol):
    """A learner that knows ahead that it would draft nothing, so that these rounds cost what plain
    ones do."""

    def rest(self) -> RestSpan | None:
        """After a round without a draft: the rounds that need not be asked for, nor observed."""

    def wakes(self, view: RoundView) -> bool:
        """Whether there is a reason to end the rest before this round."""

    def rested(self, rest: RestSpan) -> None:
        """It is over; at least one round long."""


@runtime_checkable
class Mixing(Protocol):
    """A policy under which several drafters draft."""

    @property
    def steps_in_chains(self) -> bool:
        """Whether those that draft step by step draft chains alone."""


@runtime_checkable
class Pruning(Protocol):
    """A policy whose nodes the target may drop behind its first `early_layer` layers (None: never)
    unless they are among the `early_top` best there, by the early head of the drafter, or with
    `early_shared` by the target's own. Its nodes are POINT."""

    @property
    def early_layer(self) -> int | None: ...

    @property
    def early_top(self) -> int: ...

    @property
    def early_shared(self) -> bool: ...


def fresh(policy: Policy) -> Policy:
    """The same policy without what it has learned: each engine begins with its own memory."""
    return cast(Policy, replace(cast(Any, policy))) if isinstance(policy, Learner) else policy


class PointTree:
    """Trees of deterministic choices, at most `length` deep: POINT under every sampling."""

    __slots__ = ()
    length: int

    @property
    def depth(self) -> int:
        return self.length

    @property
    def is_chain(self) -> bool:
        return False

    def kind(self, sampled: bool) -> NodeKind:
        return NodeKind.POINT


class DrawnTree(PointTree):
    """Trees of draws without replacement where rows are sampled, of best tokens elsewhere."""

    __slots__ = ()

    def kind(self, sampled: bool) -> NodeKind:
        return NodeKind.WITHOUT_REPLACEMENT if sampled else NodeKind.POINT


@runtime_checkable
class Fitting(Protocol):
    """A policy that can be fitted to what the device charges."""

    def fitted(self, costs: TreeCosts) -> Self:
        """The same policy with its sizes, depths or thresholds set by those costs."""
