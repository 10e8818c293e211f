"""FR-Spec (arXiv 2502.14856): count the tokens of a raw text corpus.

Needs no target at hand and is done once per tokenizer, which is why it is the usual baseline; text
that people wrote has another long tail than what the target writes.
"""

from __future__ import annotations

from collections.abc import Iterator

from specctl.core.errors import SpecctlError
from specctl.train.vocab.counting import text_tokens
from specctl.train.vocab.coverage import Counted
from specctl.train.vocab.selectors.base import Evidence, Selector

MOST_TOKENS = 1_000_000


def count(evidence: Evidence) -> Iterator[Counted]:
    """The first MOST_TOKENS tokens of the text."""
    if evidence.samples is None:
        raise SpecctlError("there is no text to count", do="give a text or JSONL file")
    yield from text_tokens(evidence.target, evidence.samples(), MOST_TOKENS)


SELECTOR = Selector(
    name="fr-spec",
    summary="counts tokens of a raw text corpus (FR-Spec); the baseline",
    paper="https://arxiv.org/abs/2502.14856",
    count=count,
)
