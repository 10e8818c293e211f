"""Where the tokens come from that are counted to choose a draft vocabulary.

Every source yields token ids with their domain, one document at a time; `train.selectors` names
them and says which paper each one is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

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
from specctl.train.data.heldout import HeldoutPrompt
from specctl.train.data.prepare import encode_document
from specctl.train.data.records import Sample
from specctl.train.data.rows import TokenData
from specctl.train.vocab.coverage import Counted


def target_tokens(
    target: Target, prompts: Sequence[HeldoutPrompt], new_tokens: int = 128, batch: int = 16
) -> Iterator[Counted]:
    """What the target writes after the prompts, half of it greedily, by domain."""
    requests = [
        Request(p.ids, Sampling(temperature=0.8 * (i % 2), seed=i, max_new_tokens=new_tokens))
        for i, p in enumerate(prompts)
    ]
    completions = Engine(target, num_slots=max(1, min(batch, len(requests)))).run(requests)
    for prompt, completion in zip(prompts, completions, strict=True):
        yield completion.tokens, prompt.domain


def data_tokens(data: TokenData) -> Iterator[Counted]:
    """What a run's drafter learns to predict; written by the target if the run regenerated."""
    return data.answers()


def text_tokens(
    target: Target, samples: Iterable[Sample], limit: int | None = None
) -> Iterator[Counted]:
    """Raw text of a source, as the target's tokenizer cuts it, until `limit` tokens; of
    conversations, the answers."""
    counted = 0
    for sample in samples:
        with contextlib.suppress(ValueError):  # a sample that cannot be used counts nothing
            document = encode_document(target, sample)
            yield torch.from_numpy(document.ids[document.mask]).long(), sample.domain
            counted += int(document.mask.sum())
        if limit is not None and counted >= limit:
            return


class _Recorder(LengthChooser):
    """Keeps the drafted tokens of a run, or only the accepted ones. One writer: the engine."""

    def __init__(self, depth: int, accepted: bool) -> None:
        super().__init__(CostTable({}, {}, "", "", 1))
        self.depth, self.accepted = depth, accepted
        self.tokens: list[Tensor] = []

    def length(self, batch: int) -> int:
        del batch
        return self.depth

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        del seconds
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
