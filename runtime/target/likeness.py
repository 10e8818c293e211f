"""Is this the same model in other numbers? Weights that were quantised or rounded are another
target to a fingerprint; what quantisation leaves alone, and what it hardly moves, tells them from
those of another model.

Norms and biases are stored in full by every quantised format, and training moves them; of the
embedding the sign of a number survives rounding nearly always. Two models agree in half of the
signs, one model in two precisions in more than nine of ten.
Letters: D hidden width, V target vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specctl.models.compiled import CompiledLM
from specctl.runtime.target.target import Target

SAMPLES = 4096  # numbers of the embedding, a multiple of 8
ALIKE = 0.85  # share of equal signs from which on it is the same embedding


@dataclass(frozen=True, slots=True)
class Sketch:
    """`vectors`: sha256 over norms and biases, as bfloat16; `signs`: a bit for each number that is
    looked at, in hexadecimal."""

    vectors: str
    signs: str


def sketch_of(target: Target) -> Sketch | None:
    """The sketch of a target's weights; None where they are not all in memory as they are read."""
    lm = target.lm.lm if isinstance(target.lm, CompiledLM) else target.lm
    module = getattr(lm, "module", None)
    if not isinstance(module, nn.Module) or target.spread is not None:
        return None
    vectors = sorted((name, p) for name, p in module.named_parameters() if p.dim() == 1)
    embedding_VD = target.borrowed().embedding_VD
    if not vectors or embedding_VD.is_meta or any(p.is_meta for _, p in vectors):
        return None
    digest = hashlib.sha256()
    for _, vector in vectors:
        bits = vector.detach().cpu().to(torch.bfloat16).view(torch.int16)
        digest.update(bits.numpy().astype("<i2").tobytes())
    return Sketch(digest.hexdigest(), _signs(embedding_VD))


def are_alike(one: Sketch, other: Sketch) -> bool:
    """Whether two sketches are of one model, whatever the numbers that its matrices are stored
    in."""
    if one.vectors != other.vectors or len(one.signs) != len(other.signs):
        return False
    first, second = (bytes.fromhex(each.signs) for each in (one, other))
    differing = sum((a ^ b).bit_count() for a, b in zip(first, second, strict=True))
    return differing <= (1 - ALIKE) * 8 * len(first)


def _signs(embedding_VD: Tensor) -> str:
    flat = embedding_VD.detach().reshape(-1)
    count = min(SAMPLES, len(flat) // 8 * 8)
    at = torch.arange(count, device=flat.device) * (len(flat) - 1) // max(1, count - 1)
    return _packed((flat[at] > 0).tolist())


def _packed(bits: Sequence[bool]) -> str:
    whole = sum(1 << place for place, bit in enumerate(bits) if bit)
    return whole.to_bytes(len(bits) // 8, "little").hex()
