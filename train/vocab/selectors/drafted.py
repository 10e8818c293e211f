"""VocabTrim's other source (arXiv 2506.22694): count what the drafter proposes, right or wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specctl.core.drafter import Drafter, Outcome, RoundSeconds
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.measure.cost_table import CostTable
from specctl.runtime.policies import Policy
from specctl.runtime.policies.length import LengthChooser
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import HeldoutPrompt
from specctl.train.vocab.coverage import Counted
from specctl.train.vocab.selectors.base import Evidence, Selector


def count(evidence: Evidence) -> Iterator[Counted]:
    """Every token drafted in answers to the prompts."""
    assert evidence.drafter is not None, "needs_drafter"
    assert evidence.policy is not None, "needs_drafter"
    yield from draft_tokens(evidence.target, evidence.drafter, evidence.policy, evidence.prompts)


class _Recorder(LengthChooser):
    """Keeps the drafted tokens of a run, or only the accepted ones. One writer: the engine."""

    first_is_free = False

    def __init__(self, depth: int, accepted: bool) -> None:
        super().__init__(CostTable({}, {}, "", "", 1))
        self.depth, self.accepted = depth, accepted
        self.tokens: list[Tensor] = []

    def length(self, batch: int) -> int:
        return self.depth

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        tree = outcome.tree
        if not self.accepted:
            self.tokens.append(tree.token_BN[tree.valid_BN])
        elif tree.num_nodes:
            node_BP = outcome.path_BP[:, 1:] - 1
            self.tokens.append(tree.token_BN.gather(1, node_BP.clamp(min=0))[node_BP >= 0])


def draft_tokens(
    target: Target,
    drafter: Drafter,
    policy: Policy,
    prompts: Sequence[HeldoutPrompt],
    new_tokens: int = 128,
    accepted: bool = False,
) -> Iterator[Counted]:
    """What the drafter proposes, by domain; with `accepted` only what the target then took."""
    for i, prompt in enumerate(prompts):
        recorder = _Recorder(policy.depth, accepted)
        sampling = Sampling(temperature=0.8 * (i % 2), seed=i, max_new_tokens=new_tokens)
        Engine(target, drafter, policy, chooser=recorder).run([Request(prompt.ids, sampling)])
        if recorder.tokens:
            yield torch.cat(recorder.tokens).cpu(), prompt.domain


SELECTOR = Selector(
    name="drafted",
    summary="counts tokens that the drafter proposes, accepted or not (VocabTrim's comparison)",
    paper="https://arxiv.org/abs/2506.22694",
    count=count,
    needs_drafter=True,
)
