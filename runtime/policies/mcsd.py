"""Candidates: several independent candidates at every position (multi-candidate speculative
decoding, arXiv 2401.06706), with the decision of its improvement (arXiv 2409.10644).

Sampled rows draw `branch[d]` children of each node independently from q and keep duplicates (kind
IID): rejecting one then tells nothing about the next beyond the residual. The improvement decides
after each level whether another is worth drafting, by a small network that reads the draft model's
state and was trained on what became of drafted tokens: here a trained stop rule (`stop: specdec-pp`
with the file of `specctl train-stop`), asked behind every level about the path of its last
candidate. Candidates of a node are drawn alike, so one speaks for all; what its children turn out
to be is not known when it decides. Without a file `confidence` decides: a level is followed by
another only where the drafter is sure enough of some node that is already in the tree. The
improvement's other idea, seeding the first level from the target's own distribution, is the
engine's bonus token: once that token is drawn its rivals cannot win.
Letters: B rows, K draft vocabulary, M new nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specctl.core.drafter import Outcome, RoundSeconds, StepState
from specctl.core.errors import RecipeError
from specctl.core.tree import DraftTree, NodeKind
from specctl.runtime.policies.base import GrowRequest, PolicyEntry
from specctl.runtime.policies.draw import log_guess
from specctl.runtime.policies.shaped import GoesOn, grow_shape, shape_of
from specctl.runtime.policies.static_tree import BranchTree, full_paths
from specctl.runtime.stops import DraftStep, StopRule, make_stop


@dataclass(frozen=True, slots=True)
class Candidates(BranchTree):
    """Another level only where some node's largest probability is at least `confidence` (None:
    always), or only as long as the stop rule `stop` would draft on; `threshold` replaces its own,
    `stop_file` holds the weights of a trained one."""

    confidence: float | None = None
    stop: str | None = None
    threshold: float | None = None
    stop_file: str | None = None
    stopper: StopRule | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        BranchTree.__post_init__(self)
        if self.stop is not None and self.confidence is None:
            stopper = make_stop(self.stop, self.threshold, self.stop_file)
            object.__setattr__(self, "stopper", stopper)
            return
        given = (self.stop, self.threshold, self.stop_file)
        if any(one is not None for one in given):
            raise RecipeError(
                "two decisions about another level, or settings of a stop rule without one",
                where="serve.stop",
                found=f"stop {self.stop}, confidence {self.confidence}",
                expected="serve.stop with its threshold and file, or serve.confidence",
                do="leave one of them out",
            )

    def kind(self, sampled: bool) -> NodeKind:
        return NodeKind.IID if sampled else NodeKind.POINT

    def grow(self, growth: GrowRequest) -> DraftTree:
        budget, device = growth.budget, growth.view.slot_B.device
        shape = shape_of(full_paths(self.branch), budget.nodes, budget.depth, device)
        decide: GoesOn | None = None if self.confidence is None else self._is_sure
        if self.stopper is not None:
            decide = Decision(self.stopper, growth.steps)
        return grow_shape(growth, shape, self.kind(growth.sampled), decide)

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        if self.stopper is not None:
            self.stopper.observe(outcome, seconds)

    def _is_sure(self, logits_BMK: Tensor) -> Tensor:
        assert self.confidence is not None
        best_BM = log_guess(logits_BMK).amax(-1).exp()
        return (best_BM >= self.confidence).any(1) & torch.isfinite(best_BM).all(1)


@dataclass(slots=True)
class Decision:
    """A stop rule for chains, asked about the last candidate of every level."""

    rule: StopRule
    state: StepState
    level: int = 0

    def __call__(self, logits_BMK: Tensor) -> Tensor:
        """Bool [B]: whether a level more is drafted, after logits behind the newest one."""
        logits_BK = logits_BMK[:, -1]
        best_B, stop_B = logits_BK.argmax(-1), None
        for index in (0, 1) if self.level == 0 else (self.level + 1,):  # a rule begins at 0
            stop_B = self.rule.stops(DraftStep(index, logits_BK, best_B, self.state))
        self.level += 1
        return torch.ones_like(best_B, dtype=torch.bool) if stop_B is None else ~stop_B


POLICY = PolicyEntry(
    "mcsd", "independent draws, duplicates kept", "https://arxiv.org/abs/2401.06706", Candidates
)
