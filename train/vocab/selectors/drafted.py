"""VocabTrim's other source (arXiv 2506.22694): count what the drafter proposes, right or wrong."""

from __future__ import annotations

from collections.abc import Iterator

from specctl.train.vocab.counting import draft_tokens
from specctl.train.vocab.coverage import Counted
from specctl.train.vocab.selectors.base import Evidence, Selector


def count(evidence: Evidence) -> Iterator[Counted]:
    """Every token drafted in answers to the prompts."""
    assert evidence.drafter is not None, "needs_drafter"
    assert evidence.policy is not None, "needs_drafter"
    yield from draft_tokens(evidence.target, evidence.drafter, evidence.policy, evidence.prompts)


SELECTOR = Selector(
    name="drafted",
    summary="counts tokens that the drafter proposes, accepted or not (VocabTrim's comparison)",
    paper="https://arxiv.org/abs/2506.22694",
    count=count,
    needs_drafter=True,
)
