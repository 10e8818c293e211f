"""Which engines will read a drafter that is not trained yet: the formats' own checks decide, over a
drafter and a target whose tensors have a shape and no content, so that nothing is said twice.
Letters: D hidden width, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from specctl.core.drafter import Drafter
from specctl.core.errors import SpecctlError
from specctl.core.forward.only_shapes import only_shapes
from specctl.core.language_model import Borrowed, LanguageModel
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters import family
from specctl.export.formats import ENGINES, ExportSource, Format, format_for, formats
from specctl.export.package.manifest import Manifest, TapsRecord, TargetRecord, VocabRecord
from specctl.runtime.target.target import Target


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A drafter that will be trained, and what is known of its target: its shape, its transformers
    configuration, its tokenizer (None: not at hand), the ids that end a text. `kept`: how many ids
    it drafts (None: all). Which ids those are is of no consequence to any format."""

    family: str
    options: Any
    spec: ModelSpec
    kept: int | None
    serve: Mapping[str, Any]
    config: Any = None
    tokenizer: Any = None
    ends: tuple[int, ...] = ()


def refusals(seen: Foreseen) -> dict[str, SpecctlError | None]:
    """For each engine that has a format for the family: None where it will read the drafter, else
    the error that its export will be."""
    known, found = formats(), dict[str, SpecctlError | None]()
    with FakeTensorMode(allow_non_fake_inputs=True), only_shapes():
        source = _source(seen)
        for engine in ENGINES:
            with suppress(SpecctlError):  # no format of the engine holds the family
                found[engine] = _refusal(known[format_for(engine, seen.family)], source)
    return found


def _refusal(form: Format, source: ExportSource) -> SpecctlError | None:
    try:
        form.fits(source)
        form.layout(source)
    except SpecctlError as error:
        return error
    return None


def _source(seen: Foreseen) -> ExportSource:
    spec = seen.spec
    kept = seen.kept if seen.kept is not None and seen.kept < spec.vocab_size else None
    vocab = None if kept is None else VocabMap(torch.arange(kept), spec.vocab_size)
    drafter = family(seen.family).build(seen.options, spec, vocab)
    return ExportSource(Path(), _manifest(seen, drafter), drafter, _target(seen))


def _manifest(seen: Foreseen, drafter: Drafter) -> Manifest:
    """What formats read of it; there are no files yet."""
    needs, vocab, size = drafter.needs(), drafter.vocab, seen.spec.vocab_size
    return Manifest.model_construct(
        family=seen.family,
        spec=seen.spec.to_json(),
        dtype="float32",
        target=TargetRecord(name="", repo=None, revision=None, fingerprint="", inflated=None),
        taps=TapsRecord(
            convention="hidden_states", indices=needs.taps, topk=needs.topk, borrow=needs.borrow
        ),
        vocabulary=VocabRecord.model_construct(
            target_size=size, draft_size=size if vocab is None else vocab.size, digest=None
        ),
        serve=dict(seen.serve),
    )


@dataclass(frozen=True, slots=True)
class _Lender:
    """As much of a language model as formats read."""

    spec: ModelSpec
    module: Any

    def borrowed(self) -> Borrowed:
        rows_VD = torch.empty(self.spec.vocab_size, self.spec.hidden_size)
        return Borrowed(rows_VD, rows_VD, self.spec.embed_scale)


def _target(seen: Foreseen) -> Target:
    lm = _Lender(seen.spec, SimpleNamespace(config=seen.config))
    ends = seen.ends or seen.spec.eos_ids
    return Target("", None, cast(LanguageModel, lm), seen.tokenizer, "", None, None, tuple(ends))
