"""Rows of the target's LM head are not stored twice: a package leaves out the tensors that are
nothing else, and whoever loads it beside a target takes them from there.

Which tensors may be such rows is the family's to say (`Drafter.target_rows`); whether they are is
looked at when the package is written. What differs in one bit is stored.
Letters: D hidden width, K draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specctl.core.drafter import Drafter
from specctl.core.errors import IncompatibleError, IntegrityError
from specctl.core.vocab import VocabMap
from specctl.drafters.nets.heads import fitting_rows
from specctl.export.package.compat import made_for
from specctl.export.package.manifest import MANIFEST, Manifest
from specctl.runtime.target.target import Target


def rows_left_out(
    drafter: Drafter, target: Target, tensors: Mapping[str, Tensor]
) -> tuple[str, ...]:
    """The names among `tensors` whose numbers are those of the target's rows, none lost by either
    dtype."""
    named = [name for name in drafter.target_rows() if name in tensors]
    if not named:
        return ()
    rows_KD = _rows(target, drafter.vocab, drafter.spec.vocab_size)
    return tuple(name for name in named if _are_equal(tensors[name], rows_KD))


def with_target_rows(
    manifest: Manifest,
    tensors: Mapping[str, Tensor],
    vocab: VocabMap | None,
    target: Target | None,
) -> dict[str, Tensor]:
    """The stored tensors and those that were left out, in the dtype in which the target has
    them."""
    if not manifest.target_rows:
        return dict(tensors)
    if target is None:
        raise IncompatibleError(
            "the package leaves out rows that its target has, and no target is here",
            found=", ".join(manifest.target_rows),
            expected=f"{made_for(manifest)} beside it",
            do="name the target, or get the package in a form that holds everything",
        )
    twice = [name for name in manifest.target_rows if name in tensors]
    if twice:
        raise IntegrityError(
            "a tensor is stored and said to be left out",
            found=twice[0],
            expected="one or the other",
            do="get the package again, or export it again from its run",
            where=f"{MANIFEST}:target_rows",
        )
    rows_KD = _rows(target, vocab, manifest.vocabulary.target_size)
    return {**tensors, **{name: rows_KD.clone() for name in manifest.target_rows}}


def check_target_rows(manifest: Manifest, drafter: Drafter) -> None:
    """Refuse a manifest that leaves out what a drafter of this family has itself."""
    other = sorted({*manifest.target_rows} - {*drafter.target_rows()})
    if other:
        raise IntegrityError(
            "the package leaves out weights that no target has",
            found=ascii(other[0])[1:-1][:100],
            expected=", ".join(drafter.target_rows()) or "every tensor stored",
            do="get the package again, or export it again from its run",
            where=f"{MANIFEST}:target_rows",
        )


def _rows(target: Target, vocab: VocabMap | None, size: int) -> Tensor:
    """[K, D]: rows of the target's LM head on the CPU, of a vocabulary of `size` ids."""
    head_VD = fitting_rows(target.borrowed().head_VD.detach(), size)
    if vocab is None:
        return head_VD.cpu().contiguous()
    return head_VD[vocab.ids_K.to(head_VD.device)].cpu().contiguous()


def _are_equal(tensor: Tensor, rows_KD: Tensor) -> bool:
    if tensor.shape != rows_KD.shape or not tensor.is_floating_point():
        return False
    both = torch.promote_types(tensor.dtype, rows_KD.dtype)
    return torch.equal(tensor.to(both), rows_KD.to(both))
