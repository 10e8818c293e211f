"""A smaller model in a GGUF file as a draft model, its matrices as the file packs them; widened
where they are to be trained or cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from specctl.core.drafter import Drafter
from specctl.drafters.lm.small_lm import SmallLm
from specctl.export.package.pretrained import check_tokenizer, check_vocab, described, has_ids_of
from specctl.export.package.tensors import refuse_not_finite
from specctl.models.weights.released import Released
from specctl.runtime.cross_vocab.translate import translated
from specctl.runtime.target.target import Target, load_target


def loaded(file: Path, device: torch.device, widened: bool = False) -> Target:
    """The model of the file, all of its numbers finite."""
    dtype = "float32" if widened else "auto"
    draft = load_target(str(file), device=str(device), dtype=dtype)
    refuse_not_finite(
        {name: p for name, p in draft.lm.module.named_parameters() if not isinstance(p, Released)},
        "fetch the file again: it is damaged",
    )
    return draft


def load_gguf(
    file: Path,
    target: Target,
    allow: Sequence[str] = (),
    translate: str | None = None,
    widened: bool = False,
) -> Drafter:
    """The model of the file as a small-lm drafter for `target`; with `translate` one of another
    tokenizer, too. `widened`: in float32, with weights that can be read. Raises for a file that
    cannot be a target either."""
    draft = loaded(file, target.device, widened)
    is_same = has_ids_of(draft.tokenizer, target)
    if translate is None or is_same or target.tokenizer is None or "tokenizer" in allow:
        check_vocab({"vocab_size": draft.spec.vocab_size}, {}, target, allow)
        check_tokenizer(draft.tokenizer, file, target, allow)
        drafter = described(SmallLm.from_lm(draft.lm, target.spec))
        drafter.file = None if widened else file
        return drafter
    tokenizer = draft.tokenizer
    return translated(draft.lm, tokenizer, tokenizer.eos_token_id, target, translate)
