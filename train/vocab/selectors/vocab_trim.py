"""VocabTrim (arXiv 2506.22694): count what the target itself writes.

Of the three sources the paper compares, this one is best: it has the target's own taste for tokens,
which neither raw text nor the drafter's proposals have.
"""

from __future__ import annotations

from collections.abc import Iterator

from specctl.train.vocab.counting import data_tokens, target_tokens
from specctl.train.vocab.coverage import Counted
from specctl.train.vocab.selectors.base import Evidence, Selector


def count(evidence: Evidence) -> Iterator[Counted]:
    """The answers in the run's data; without a run, the target's answers to the prompts."""
    if evidence.data is not None:
        yield from data_tokens(evidence.data)
    else:
        yield from target_tokens(evidence.target, evidence.prompts)


SELECTOR = Selector(
    name="vocab-trim",
    summary="counts tokens that the target itself wrote (VocabTrim); the usual best choice",
    paper="https://arxiv.org/abs/2506.22694",
    count=count,
)
