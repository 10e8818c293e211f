"""What trimming is asked for, and what it goes by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specctl.train.data.heldout import HeldoutPrompt
from specctl.train.vocab.chains import TargetAnswer
from specctl.train.vocab.coverage import TokenCounts


@dataclass(frozen=True, slots=True)
class TrimSettings:
    """How to trim. "auto" takes the size with the best speed-up that covers `min_coverage`, after
    measuring the `confirm` most promising. `search` tpe also chooses draft length and domain
    weights, from `trials` predictions."""

    size: int | Literal["auto"] = "auto"
    min_coverage: float = 0.95
    new_tokens: int = 64
    temperature: float = 0.0
    confirm: int = 3
    search: Literal["exhaustive", "tpe"] = "exhaustive"
    trials: int = 60
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Material:
    """What trimming goes by: counts that rank the ids and the selector that made them; answers of
    the target on which sizes are predicted and coverage is measured; prompts on which tau is."""

    selector: str
    counts: TokenCounts
    heldout: TokenCounts
    answers: Sequence[TargetAnswer]
    prompts: Sequence[HeldoutPrompt]
