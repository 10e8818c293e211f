"""The target as it writes answers and questions.

Training reads a GGUF target widened to float32. Where the file is packed and a CPU can decode it as
it is packed, text is written so: about twice as fast, and by the very weights that are served.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from specctl.recipes.schema import Recipe
from specctl.recipes.targets import resolve
from specctl.runtime.target.device import PACKED
from specctl.runtime.target.gguf.model import open_gguf
from specctl.runtime.target.gguf.packed import is_packed, why_not_packed
from specctl.runtime.target.hub import with_file
from specctl.runtime.target.target import Target, load_part


def writing_target(recipe: Recipe, target: Target) -> Target:
    """The target itself, or the same one as its file packs it."""
    if not writes_packed(recipe, target):
        return target
    part = recipe.target.model_copy(update={"dtype": PACKED})
    packed = load_part(part, device=str(target.device))
    return packed if packed.fingerprint == target.fingerprint else target


def writes_packed(recipe: Recipe, target: Target) -> bool:
    """Whether text is written by packed weights: of a file that is packed, on a CPU that can, where
    nobody has named another dtype or changed the weights."""
    part = recipe.target
    is_as_stored = part.dtype == "auto" and not part.adapters and part.inflate is None
    is_here = target.device.type == "cpu" and target.can_run and target.dtype_name != PACKED
    return is_as_stored and is_here and _is_packed(part.name, part.revision)


def written_in(recipe: Recipe, target: Target) -> str:
    """The precision in which the target writes, under which its answers are kept."""
    return PACKED if writes_packed(recipe, target) else str(target.dtype)


@lru_cache(maxsize=4)
def _is_packed(name: str, revision: str | None) -> bool:
    resolved = with_file(resolve(name, revision), offline=True)
    if resolved.file is None:
        return False
    file = open_gguf(resolved.file)
    return is_packed(file) and why_not_packed(file, torch.device("cpu")) is None
