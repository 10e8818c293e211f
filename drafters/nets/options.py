"""Options that trained drafters share. A family's own dataclass extends one of these and overrides
the defaults that its paper sets otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from specctl.drafters.losses.head_losses import LossOptions
from specctl.drafters.nets.heads import check_count

ADDED = {"added": True}  # metadata of an option that older packages lack: they have its default


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """`loss` compares a drafter's distributions with the target's at `temperature`, `chunk` rows at
    a time (None fits the vocabulary)."""

    loss: str = "kl"
    temperature: float = 1.0
    chunk: int | None = None

    def __post_init__(self) -> None:
        self.compared()

    def compared(self) -> LossOptions:
        """How a head is compared with the target."""
        return LossOptions(self.loss, self.temperature, self.chunk)


@dataclass(frozen=True, slots=True)
class DepthOptions(CompareOptions):
    """The same at every depth of a draft: head, step or slot i weighs decay^i."""

    decay: float = 1.0

    def __post_init__(self) -> None:
        CompareOptions.__post_init__(self)
        check_count("decay", self.decay, 0, 10)


@dataclass(frozen=True, slots=True)
class HeadOptions(DepthOptions):
    """The same for drafters that are trained `num_heads` tokens deep."""

    num_heads: int = 4

    def __post_init__(self) -> None:
        DepthOptions.__post_init__(self)
        check_count("num_heads", self.num_heads)
