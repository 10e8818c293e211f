"""A package whose drafter is the model of a GGUF file: it holds the file as it is, every byte, and
beside it the vocabulary map of a trimmed LM head. The rows of the head are chosen when it is read.
So a trimmed draft model stays packed, and nothing is stored twice: of most small models the head is
the embedding, which is needed whole.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import torch

from specctl.core.drafter import Drafter
from specctl.core.errors import IntegrityError
from specctl.core.storage.gguf_header import PART, SUFFIX, read_header
from specctl.drafters.lm.small_lm import SmallLm, options_of
from specctl.export.package.gguf_draft import loaded
from specctl.export.package.manifest import MANIFEST, MODEL, Manifest
from specctl.export.package.padding import DrafterParts, padded_vocab
from specctl.models.llama.fast_llama import LlamaModel
from specctl.runtime.target.target import Target


def hold(file: Path, folder: Path) -> None:
    """Copy a model, all parts of it, into the folder of a package."""
    for part in read_header(file).parts:
        match = PART.fullmatch(part.name)
        end = f"-{match['number']}-of-{match['count']}" if match else ""
        shutil.copyfile(part, folder / f"{MODEL}{end}{SUFFIX}")


def num_parameters(drafter: Drafter) -> int:
    """Weights that are read: of an LM head those of its kept rows."""
    assert drafter.module is not None
    return sum(parameter.numel() for parameter in drafter.module.parameters())


def held_drafter(
    manifest: Manifest, file: Path, parts: DrafterParts, target: Target | None, widened: bool
) -> Drafter:
    """The drafter of such a package, packed where this machine reads it so; it speaks of the ids
    that the target has. `widened`: in float32, as tensors that know no file."""
    spec, vocab, options = parts.spec, parts.vocab, parts.options
    device = torch.device("cpu") if target is None else target.device
    if target is not None and target.spec.vocab_size != spec.vocab_size:
        vocab = padded_vocab(parts, target.spec.vocab_size)
        spec = replace(spec, vocab_size=target.spec.vocab_size)
    whole = SmallLm.from_lm(loaded(file, device, widened).lm, spec)
    whole.file = None if widened else file
    if parts.family.name != SmallLm.family or not isinstance(whole.module, LlamaModel):
        found = f"{type(whole.module).__name__} for family {parts.family.name}"
        raise _other_model(found, f"a Llama-shaped model for {SmallLm.family}")
    drafter = whole if vocab is None else whole.trimmed(vocab.to(device))
    assert isinstance(drafter.module, LlamaModel)
    shape = options_of(drafter.module.shape, manifest.model_spec)
    if replace(options, **shape) != options:
        said = {name: getattr(options, name) for name in shape}
        odd = next(name for name in shape if shape[name] != said[name])
        raise _other_model(f"{odd} {shape[odd]}", f"{odd} {said[odd]}")
    drafter.options = options
    return drafter


def _other_model(found: str, expected: str) -> IntegrityError:
    return IntegrityError(
        "the GGUF file of the package is not the model that its manifest describes",
        found=found[:100],
        expected=expected[:100],
        do="get the package again, or trim the model's own file again",
        where=MANIFEST,
    )
