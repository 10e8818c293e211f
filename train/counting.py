"""Which tokens are counted to choose a draft vocabulary: the target's, a text's or the drafter's.

Best first, as VocabTrim (arXiv 2506.22694) found: what the target wrote, what the drafter proposes,
raw text. Every source yields token ids with their domain, one document at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from specctl.drafters.parts.base import Drafter, Outcome, RoundSeconds
from specctl.drafters.parts.vocab import VocabMap
from specctl.runtime.engine import Engine
from specctl.runtime.policies import Policy
from specctl.runtime.policies.length import CostTable, LengthChooser
from specctl.runtime.sampling import Sampling
from specctl.runtime.session import Request
from specctl.runtime.target import Target
from specctl.train.coverage import (
    Counted,
    always_kept,
    count_tokens,
    coverage_curve,
    ranking,
    vocab_map,
)
from specctl.train.data import encode_document
from specctl.train.heldout import Prompt
from specctl.train.rows import TokenData
from specctl.train.sources import Sample


def target_tokens(
    target: Target, prompts: Sequence[Prompt], new_tokens: int = 128, batch: int = 16
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


def text_tokens(target: Target, samples: Iterable[Sample]) -> Iterator[Counted]:
    """Raw text of a source, as the target's tokenizer cuts it; of conversations, the answers."""
    for sample in samples:
        with contextlib.suppress(ValueError):  # a sample that cannot be used counts nothing
            document = encode_document(target, sample)
            yield torch.from_numpy(document.ids[document.mask]).long(), sample.domain


class _Recorder(LengthChooser):
    """Keeps every drafted token of a run. One writer: the engine."""

    def __init__(self, depth: int) -> None:
        super().__init__(CostTable({}, {}, "", "", 1))
        self.depth = depth
        self.drafted: list[Tensor] = []

    def length(self, batch: int) -> int:
        del batch
        return self.depth

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        del seconds
        self.drafted.append(outcome.tree.token_BN[outcome.tree.valid_BN])


def draft_tokens(
    target: Target,
    drafter: Drafter,
    policy: Policy,
    prompts: Sequence[Prompt],
    new_tokens: int = 128,
) -> Iterator[Counted]:
    """What the drafter proposes, accepted or not, by domain."""
    for i, prompt in enumerate(prompts):
        recorder = _Recorder(policy.depth)
        sampling = Sampling(temperature=0.8 * (i % 2), seed=i, max_new_tokens=new_tokens)
        Engine(target, drafter, policy, chooser=recorder).run([Request(prompt.ids, sampling)])
        if recorder.drafted:
            yield torch.cat(recorder.drafted).cpu(), prompt.domain


def vocab_from_data(
    data: TokenData, target: Target, size: int | Literal["auto"], min_coverage: float
) -> VocabMap:
    """A map made before training, when no acceptance can be measured yet: the `size` best ids, or
    with "auto" the fewest that reach `min_coverage`."""
    counts, heldout = count_tokens(data_tokens(data), target.spec.vocab_size)
    always = always_kept(target)
    rank = ranking(counts, always)
    kept = size
    if kept == "auto":
        enough = (coverage_curve(rank, heldout) >= min_coverage).nonzero()
        fewest = int(enough[0]) + 1 if enough.numel() else rank.numel()
        kept = min(rank.numel(), max(-(-fewest // 8) * 8, len(always), 2))
    return vocab_map(rank, int(kept), always, target.spec.vocab_size)
