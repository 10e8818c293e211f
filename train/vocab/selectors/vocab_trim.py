"""VocabTrim (arXiv 2506.22694): count what the target itself writes.

Of the three sources the paper compares, this one is best: it has the target's own taste for tokens,
which neither raw text nor the drafter's proposals have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import HeldoutPrompt
from specctl.train.vocab.coverage import Counted
from specctl.train.vocab.selectors.base import Evidence, Selector


def count(evidence: Evidence) -> Iterator[Counted]:
    """The answers in the run's data; without a run, the target's answers to the prompts."""
    if evidence.data is not None:
        yield from evidence.data.answers()
    else:
        yield from target_tokens(evidence.target, evidence.prompts)


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


SELECTOR = Selector(
    name="vocab-trim",
    summary="counts tokens that the target itself wrote (VocabTrim); the usual best choice",
    paper="https://arxiv.org/abs/2506.22694",
    count=count,
)
