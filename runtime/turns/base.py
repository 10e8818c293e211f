"""What all ways to write in turns share: the models' engines, and one row after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace

from specctl.core.errors import SpecctlError
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Completion, Emission, Request, Row
from specctl.runtime.measure.stats import TurnCounts
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.mixture import Mixture


class Turns(ABC):
    """Generates one row at a time. `large` is the target's engine, with what drafts for it; of the
    `others`, the first writes too. Counts as an engine does; drafting is all that the small model
    does. `counts`: who wrote how much, of all rows."""

    def __init__(self, large: Engine, others: Sequence[Target], mixture: Mixture) -> None:
        self.large, self.small = large, Engine(others[0])
        self.policy, self.mixture, self.counts = large.policy, mixture, TurnCounts()
        self.context = min(one.spec.max_positions for one in (large.target, *others))

    @abstractmethod
    def rounds(self, row: Row) -> Iterator[tuple[int, ...]]:
        """The tokens that join the row, which is extended by them, until it ends."""

    def open(self, longest: int) -> None:
        """Caches for so many positions."""
        for engine in (self.large, self.small):
            engine.open(longest)

    def run(
        self,
        requests: Sequence[Request],
        on_round: Callable[[Row, tuple[int, ...]], None] | None = None,
    ) -> list[Completion]:
        """Completions in the order of the requests; `on_round(row, new)` after each round."""
        longest = max((len(r.tokens) + r.sampling.max_new_tokens for r in requests), default=1)
        self._check_room(requests)
        self.open(min(longest, self.context))
        done = []
        for index, request in enumerate(requests):
            row = Row.of(index, 0, request)
            for new in self.rounds(row):
                if on_round is not None:
                    on_round(row, new)
            done.append(row.completion())
        return done

    def _check_room(self, requests: Sequence[Request]) -> None:
        longest = max((len(request.tokens) for request in requests), default=0)
        if longest >= self.context:
            raise SpecctlError(
                "the prompt does not fit the context of every model that writes",
                where="--mix",
                found=f"{longest:,} tokens",
                expected=f"1 to {self.context - 1:,} tokens",
                do="shorten the prompt, or leave out --mix",
            )

    @property
    def prefill_seconds(self) -> float:
        """For prompts, and for what each read of the others' turns."""
        return self.large.prefill_seconds + self.small.prefill_seconds

    @property
    def draft_seconds(self) -> float:
        return self.large.draft_seconds + self.small.draft_seconds + self.small.verify_seconds

    @property
    def verify_seconds(self) -> float:
        return self.large.verify_seconds

    def write(self, engine: Engine, row: Row, seed: int | None = None) -> Generator[Emission]:
        """What that model would go on with, round by round, from the row as it stands. Its cache
        keeps what it has read of the row: the rest is read now, in chunks. Closing it ends the
        turn. `seed`: random numbers that are not the row's own."""
        sampling = row.request.sampling
        if seed is not None:
            sampling = replace(sampling, seed=seed)
        name, text = str(row.index), tuple(row.tokens)
        request = Request(text, sampling, name, logprobs=0, written=row.num_new)
        engine.submit(row.index, request)
        try:
            while engine.is_busy:
                yield from engine.step()
        finally:
            engine.cancel(row.index)

    def extend(self, row: Row, emission: Emission, num_kept: int) -> tuple[int, ...]:
        """Append the first so many tokens of an emission; with all of them the row ends as the
        emission does, and where the smallest context is full."""
        num_kept = min(num_kept, self.context - len(row.tokens))
        new = emission.tokens[:num_kept]
        is_whole = num_kept == len(emission.tokens)
        row.tokens.extend(new)
        row.kept_len = len(row.tokens) - 1
        row.finished = emission.finished if is_whole else None
        if row.finished is None and len(row.tokens) == self.context:
            row.finished = "context"
        accepted = min(emission.num_accepted, num_kept)
        row.stats.count(emission.num_drafted, accepted, num_kept, is_whole and emission.is_rejected)
        return new
