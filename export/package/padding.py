"""A package for a target whose embedding is padded otherwise: the drafter speaks of the ids that
both have, and its tables have a row for each of the target's.
Letters: K draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specctl.core.drafter import Drafter, Family
from specctl.core.errors import IncompatibleError
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.lm.small_lm import SmallLm
from specctl.drafters.nets.heads import fitting_rows


@dataclass(frozen=True, slots=True)
class DrafterParts:
    """What a drafter is built of: its family and options, the target's spec, the ids it speaks
    (None: all), and its tensors."""

    family: Family
    options: Any
    spec: ModelSpec
    vocab: VocabMap | None
    tensors: Mapping[str, Tensor]


def padded_parts(parts: DrafterParts, size: int) -> DrafterParts:
    """The same for a target of `size` ids."""
    spec, before = replace(parts.spec, vocab_size=size), parts.spec.vocab_size
    vocab = padded_vocab(parts, size)
    with torch.device("meta"):
        shell = parts.family.build(parts.options, spec, None)
        if type(shell).trimmed is Drafter.trimmed:  # it speaks as the target does, with all ids
            vocab = None
        wanted = parts.family.build(parts.options, spec, vocab).tensors()
    if shell.holds_data and size < before:
        _check_stored_ids(parts.tensors, size)
    fitted = {}
    for name, tensor in parts.tensors.items():
        fitted[name], shape = tensor, tuple(wanted[name].shape) if name in wanted else ()
        if shape == (size, *tensor.shape[1:]) and tensor.shape[:1] == (before,):
            fitted[name] = fitting_rows(tensor, size)
    return DrafterParts(parts.family, parts.options, spec, vocab, fitted)


def _check_stored_ids(tensors: Mapping[str, Tensor], size: int) -> None:
    """Refuse a memory of texts with ids that the target lacks."""
    for name, tensor in tensors.items():
        is_ids = not tensor.is_floating_point() and tensor.dtype != torch.bool and tensor.numel()
        if is_ids and int(tensor.max()) >= size:
            raise IncompatibleError(
                "vocab_size: the drafter's memory holds ids that the target lacks",
                found=f"id {int(tensor.max()):,} in {name}",
                expected=f"ids below {size:,}",
                do="make it again for this target, as the package's README says it was made",
                where="vocab_size",
            )


def padded_vocab(parts: DrafterParts, size: int) -> VocabMap | None:
    """Of the ids that were spoken those below `size`, and none of the padding behind."""
    before, vocab = parts.spec.vocab_size, parts.vocab
    if vocab is None:
        return None if size <= before else VocabMap(torch.arange(before), size)
    if int(vocab.ids_K[-1]) >= size:
        raise IncompatibleError(
            "vocab_size: the drafter speaks of ids that the target lacks",
            found=f"id {int(vocab.ids_K[-1]):,} in its vocabulary",
            expected=f"ids below {size:,}",
            do="trim it again for this target with `specctl vocab-trim`, or train one for it",
            where="vocab_size",
        )
    return VocabMap(vocab.ids_K, size)


def padded_small_lm(drafter: SmallLm, parts: DrafterParts, size: int) -> Drafter:
    """A language model stays as it is stored: it reads ids behind its own as its last, and what it
    says of ids that the target lacks is left out."""
    spec = replace(parts.spec, vocab_size=size)
    if drafter.router is not None and size < parts.spec.vocab_size:
        raise IncompatibleError(
            "vocab_size: the groups of the drafter's head count the rows of another padding",
            found=f"{parts.spec.vocab_size:,} rows",
            expected=f"{size:,} rows, the target's",
            do="train a drafter for this target with `specctl train-draft`",
            where="vocab_size",
        )
    vocab = padded_vocab(parts, size)
    if type(drafter) is SmallLm:
        return SmallLm(drafter.options, spec, vocab, drafter.lm)
    # Its kin feed ids to the layers, and read its head, in ways of their own: both get the sizes.
    ids_K = torch.arange(min(size, parts.spec.vocab_size)) if vocab is None else vocab.ids_K
    cut = drafter.trimmed(VocabMap(ids_K, parts.spec.vocab_size))
    fit = type(drafter)(cut.options, spec, VocabMap(ids_K, size), cut.lm)
    return fit.trimmed(VocabMap(ids_K, size)) if size > parts.spec.vocab_size else fit
