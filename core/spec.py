"""ModelSpec: the shape of a target, as a drafter family needs it to build itself; Identity: which
target it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


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
