"""FR-Spec (arXiv 2502.14856): count the tokens of a raw text corpus.

Needs no target at hand and is done once per tokenizer, which is why it is the usual baseline; text
that people wrote has another long tail than what the target writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from specctl.core.errors import SpecctlError
from specctl.runtime.target.target import Target
from specctl.train.data.prepare import encode_document
from specctl.train.data.records.records import Sample
from specctl.train.vocab.coverage import Counted
from specctl.train.vocab.selectors.base import Evidence, Selector

MOST_TOKENS = 1_000_000


def count(evidence: Evidence) -> Iterator[Counted]:
    """The first MOST_TOKENS tokens of the text."""
    if evidence.samples is None:
        raise SpecctlError("there is no text to count", do="give a text or JSONL file")
    yield from text_tokens(evidence.target, evidence.samples(), MOST_TOKENS)


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


SELECTOR = Selector(
    name="fr-spec",
    summary="counts tokens of a raw text corpus (FR-Spec); the baseline",
    paper="https://arxiv.org/abs/2502.14856",
    count=count,
)
