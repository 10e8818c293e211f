"""ModelSpec: the shape of a target, as a drafter family needs it to build itself; Identity: which
target it is."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

# The most that a size of a model may be, far above any that was trained.
MOST = {
    "num_layers": 1024,
    "hidden_size": 1 << 20,
    "vocab_size": 1 << 24,
    "num_heads": 1 << 16,
    "num_kv_heads": 1 << 16,
    "head_dim": 1 << 16,
    "intermediate_size": 1 << 24,
    "max_positions": 1 << 40,
}


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose token ids and whose habits a memory holds: fingerprints of tokenizer and target."""

    tokenizer: str | None
    target: str


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape and constants of a decoder-only language model (sizes in units, not bytes).
    `rope_scaling` holds transformers' rope parameters where positions are scaled, else None."""

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    embed_scale: float = 1.0
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> ModelSpec:
        return cls(**{**fields, "eos_ids": tuple(fields.get("eos_ids", ()))})


def check_spec(spec: ModelSpec) -> None:
    """Raise ValueError for a shape that no model has, so that nothing of its size is made."""
    for name, most in MOST.items():
        size = getattr(spec, name)
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= most:
            raise ValueError(f"{name} is {str(size)[:60]}, expected 1 to {most:,}")
    for name in ("norm_eps", "rope_theta", "embed_scale"):
        number = getattr(spec, name)
        if not math.isfinite(number) or number < 0:
            raise ValueError(f"{name} is {str(number)[:60]}, expected a finite number")
    for token in (spec.bos_id, spec.pad_id, *spec.eos_ids):
        if token is not None and not -1 <= token < 1 << 31:
            raise ValueError(f"{str(token)[:60]} is no token id")
