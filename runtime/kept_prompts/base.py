"""What all ways to keep a part of a prompt share: the target's engine, and what is counted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specctl.core.drafter import Drafter
from specctl.core.errors import SpecctlError
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Completion, Request, Row
from specctl.runtime.measure.stats import KeptCounts
from specctl.runtime.policies.base import Policy
from specctl.runtime.policies.length import LengthChooser
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.mixture import Mixture

OnNew = Callable[[Row, tuple[int, ...]], None]


@dataclass(frozen=True, slots=True)
class Answering:
    """The target and how it writes its answers."""

    target: Target
    drafter: Drafter | None
    policy: Policy | None
    rule: str
    num_slots: int
    chooser: LengthChooser | None

    def engine(self, target: Target, num_slots: int) -> Engine:
        """What writes with that form of the target."""
        how = self.drafter, self.policy, self.rule, num_slots
        return Engine(target, *how, chooser=self.chooser)


class KeptPrompts(ABC):
    """Answers requests of which the target keeps `keep` tokens. `beside` chooses them; `engine` is
    the target's. `counts`: tokens of all prompts, and of those kept."""

    engine: Engine

    def __init__(self, writing: Answering, beside: Target, mixture: Mixture) -> None:
        self.beside, self.mixture, self.counts = beside, mixture, KeptCounts()
        self.keep = int(mixture.numbers[0])
        self.choosing_seconds = 0.0
        self.engine = self.open_engine(writing)
        self.policy = self.engine.policy

    @abstractmethod
    def open_engine(self, writing: Answering) -> Engine:
        """The target's engine; refuses what cannot be used here."""

    @abstractmethod
    def run(self, requests: Sequence[Request], on_round: OnNew | None = None) -> list[Completion]:
        """Completions in the order of the requests; `on_round(row, new)` after each round."""

    def check_read(self, requests: Sequence[Request], room: int = 0) -> None:
        """Refuse prompts that the model beside the target cannot read, with so much behind them."""
        most = self.beside.spec.max_positions - room
        longest = max((len(request.tokens) for request in requests), default=0)
        if longest > self.keep and longest >= most:
            raise SpecctlError(
                "the prompt does not fit the context of the model that chooses what is kept of it",
                where="--mix",
                found=f"{longest:,} tokens",
                expected=f"1 to {most - 1:,} tokens",
                do="shorten the prompt, or leave out --mix",
            )

    @property
    def prefill_seconds(self) -> float:
        """For prompts, and for choosing what is kept of them."""
        return self.engine.prefill_seconds + self.choosing_seconds

    @property
    def draft_seconds(self) -> float:
        return self.engine.draft_seconds

    @property
    def verify_seconds(self) -> float:
        return self.engine.verify_seconds
