"""Count the drafts that the target accepts: the only tokens whose rows earn anything.

An id that the target says often and the drafter never foresees costs head rows and saves no round;
VocabTrim (arXiv 2506.22694) counts the first, this selector both together. It sees fewer tokens
for the same prompts, so rare ids are ranked with more noise.
"""

from __future__ import annotations

from collections.abc import Iterator

from specctl.train.vocab.coverage import Counted
from specctl.train.vocab.selectors.base import Evidence, Selector
from specctl.train.vocab.selectors.drafted import draft_tokens


def count(evidence: Evidence) -> Iterator[Counted]:
    """Every accepted draft in answers to the prompts."""
    assert evidence.drafter is not None, "needs_drafter"
    assert evidence.policy is not None, "needs_drafter"
    yield from draft_tokens(
        evidence.target, evidence.drafter, evidence.policy, evidence.prompts, accepted=True
    )


SELECTOR = Selector(
    name="accepted",
    summary="counts drafts that the target accepted: only their rows ever save a round",
    paper="https://arxiv.org/abs/2506.22694",
    count=count,
    needs_drafter=True,
)
