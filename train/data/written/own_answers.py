"""Answers in the data that the target of the run has written itself, before and elsewhere.

`specctl regenerate` notes in every record who wrote it. Where that is the target of the run, with
the same chat template, the record is learned as it is, however it was sampled. Answers of another
target are answered anew, as all answers in data are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from specctl.core.messages.printable import counted
from specctl.recipes.schema import DataPart
from specctl.runtime.measure.reporter import Reporter
from specctl.runtime.target.target import Target
from specctl.train.data.records.records import Sample, WrittenBy
from specctl.train.data.rows.context import check_ids
from specctl.train.data.rows.pack import Document


def writer_of(target: Target, thinking: bool | None) -> WrittenBy:
    """What a target notes of itself."""
    return WrittenBy(target.name, target.fingerprint, target.template_digest, thinking)


def why_foreign(sample: Sample, target: Target, data: DataPart) -> str | None:
    """Why the answer of a sample is not the target's own; None where it is."""
    by, ours = sample.written_by, writer_of(target, data.thinking)
    if by is None:
        return "it does not say who wrote it"
    if by.fingerprint != ours.fingerprint:
        return f"of target {by.target} ({by.fingerprint[:12]})"
    if by.template != ours.template:
        return "behind another chat template"
    if by.thinking != ours.thinking:
        return f"with thinking: {by.thinking}"
    return None


def is_own(sample: Sample, target: Target, data: DataPart) -> bool:
    """Whether the target wrote the answer of the sample, as it would write it now."""
    return bool(sample.ids) and why_foreign(sample, target, data) is None


def own_documents(samples: Iterable[Sample], target: Target, data: DataPart) -> list[Document]:
    """Those of the samples that are the target's own answers, as they were written."""
    found: list[Document] = []
    for sample in samples:
        if is_own(sample, target, data):
            check_ids(sample.ids, target)
            mask = np.array(sample.mask, dtype=np.bool_) | data.train_on_prompt
            found.append(Document(np.array(sample.ids, dtype=np.int32), mask, sample.domain))
    return found


def say_writers(
    samples: Sequence[Sample], target: Target, data: DataPart, console: Reporter
) -> None:
    """Say whose answers there are in the data, and what becomes of them."""
    noted = [sample for sample in samples if sample.written_by is not None]
    foreign = Counter(filter(None, (why_foreign(sample, target, data) for sample in noted)))
    num_own = len(noted) - foreign.total()
    if num_own:
        console.say(
            f"data: {counted(num_own, 'answer')} of target {target.name} are in the data: learned "
            "as they are, not written again"
        )
    what = "their prompts are answered anew" if data.regenerate else "learned as they are"
    for why, count in foreign.items():
        console.warn(
            f"data: {counted(count, 'answer')} in the data {why}, and the run is for target "
            f"{target.name} ({target.fingerprint[:12]}): {what}"
        )
