"""The target as it writes answers and questions.

Training reads a GGUF target widened to float32. Where the file is packed and a CPU can decode it as
it is packed, text is written so: about twice as fast, and by the very weights that are served.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from specctl.recipes.schema import TargetPart
from specctl.recipes.targets import resolve
from specctl.runtime.target.folders.hub import with_file
from specctl.runtime.target.gguf.model import open_gguf
from specctl.runtime.target.gguf.packed import is_packed, packed_bytes, why_not_packed
from specctl.runtime.target.placement.device import PACKED
from specctl.runtime.target.target import Target, load_part


def writing_target(part: TargetPart, target: Target) -> Target:
    """The target itself, or the same one as its file packs it."""
    if not writes_packed(part, target):
        return target
    as_stored = part.model_copy(update={"dtype": PACKED})
    packed = load_part(as_stored, device=str(target.device))
    return packed if packed.fingerprint == target.fingerprint else target


def writes_packed(part: TargetPart, target: Target) -> bool:
    """Whether text is written by packed weights: of a file that is packed, on a CPU that can, where
    nobody has named another dtype or changed the weights."""
    is_here = target.device.type == "cpu" and target.can_run and target.dtype_name != PACKED
    return is_here and packed_copy(part) > 0


def packed_copy(part: TargetPart) -> int:
    """Bytes that a target takes on a CPU as its file packs it, beside the widened one; 0 where text
    is not written so."""
    is_as_stored = part.dtype == "auto" and not part.adapters and part.inflate is None
    return _packed_bytes(part.name, part.revision) if is_as_stored else 0


def is_read_packed(part: TargetPart) -> bool:
    """Whether a CPU reads the target as its file packs it, where nobody names another dtype."""
    return packed_copy(part.model_copy(update={"dtype": "auto"})) > 0


def written_in(part: TargetPart, target: Target) -> str:
    """The precision in which the target writes, under which its answers are kept."""
    return PACKED if writes_packed(part, target) else str(target.dtype)


@lru_cache(maxsize=4)
def _packed_bytes(name: str, revision: str | None) -> int:
    resolved = with_file(resolve(name, revision), offline=True)
    if resolved.file is None:
        return 0
    file = open_gguf(resolved.file)
    can_pack = is_packed(file) and why_not_packed(file, torch.device("cpu")) is None
    return packed_bytes(file) if can_pack else 0
