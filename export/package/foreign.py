"""A draft model of another tokenizer than the target's: found out here, translated by the runtime.

Only a whole language model can be translated: a transformers folder with its tokenizer, or a
package of family small-lm, whose tokenizer is that of the target it was made for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specctl.core.drafter import Drafter
from specctl.core.errors import SpecctlError
from specctl.core.storage.gguf_header import read_header
from specctl.drafters.lm.small_lm import SmallLm
from specctl.export.package.load import read_package
from specctl.export.package.manifest import MANIFEST, check_files
from specctl.export.package.pretrained import (
    has_ids_of,
    inspect_folder,
    load_lm,
    load_tokenizer,
    whole_model,
)
from specctl.recipes.targets import resolve
from specctl.runtime.cross_vocab.translate import translated
from specctl.runtime.target.folders.hub import with_file
from specctl.runtime.target.gguf.tokens import tokenizer_of
from specctl.runtime.target.target import Target, tokenizer_fingerprint


def load_foreign(
    folder: Path, target: Target, method: str, allow: Sequence[str] = ()
) -> Drafter | None:
    """The folder's model, translated for the target; None if it needs no translation, or none can
    be made, or the caller vouches for the tokenizer (`allow`)."""
    if target.tokenizer is None or "tokenizer" in allow:
        return None
    is_package = (folder / MANIFEST).is_file() and not (folder / "config.json").is_file()
    base = None if is_package else whole_model(folder)
    if base is not None:
        inspect_folder(base.folder)  # before transformers reads anything of it
    tokenizer = _packaged_tokenizer(folder) if base is None else base.tokenizer()
    if tokenizer is None or has_ids_of(tokenizer, target):
        return None
    if base is None:
        drafter = read_package(folder, None).to(target.device, target.dtype)
        lm = drafter.language_model()
        assert lm is not None, "only small-lm packages need a tokenizer"
    else:
        lm = load_lm(base, inspect_folder(base.folder)[1], target)
    return translated(lm, tokenizer, tokenizer.eos_token_id, target, method)


def _packaged_tokenizer(folder: Path) -> Any:
    """The tokenizer that a package's drafter reads with, None where it is not at hand."""
    manifest = check_files(folder)
    if manifest.family != SmallLm.family:
        return None
    try:
        named = resolve(manifest.target.name, manifest.target.revision)
        found = with_file(named, offline=True)
    except SpecctlError:
        return None
    tokenizer = None if found.path is None else load_tokenizer(found.path)
    if found.file is not None:
        tokenizer = tokenizer_of(read_header(found.file))
    is_same = tokenizer is not None and tokenizer_fingerprint(tokenizer) == manifest.tokenizer
    return tokenizer if is_same else None
