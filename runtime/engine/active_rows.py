"""ActiveRows: the rows of the coming round, and what follows from who they are. Letters: B rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specctl.core.drafter import RoundView
from specctl.runtime.engine.outcome import view_of_rows
from specctl.runtime.engine.request import Row
from specctl.runtime.sampling.noise import RoundNoise
from specctl.runtime.sampling.sampling import SamplingBatch


@dataclass(frozen=True, slots=True)
class RoundInputs:
    """What rows bring to a round."""

    view: RoundView
    sampling: SamplingBatch
    noise: RoundNoise


class ActiveRows:
    """Rows in the order of their slots. One writer: the engine."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.rows: list[Row] = []
        self.vocab_size, self.device = vocab_size, device
        self._sampling: SamplingBatch | None = None
        self._is_stale = True
        self._unread: RoundNoise | None = None

    def join(self, rows: Sequence[Row]) -> None:
        self.rows = sorted([*self.rows, *rows], key=lambda row: row.slot)
        self._is_stale = True

    def leave(self, rows: Sequence[Row]) -> None:
        gone = {id(row) for row in rows}
        self.rows = [row for row in self.rows if id(row) not in gone]
        self._is_stale = self._is_stale or bool(gone)

    def turn(self) -> RoundInputs:
        """The coming round of all rows."""
        return RoundInputs(self.view(), self.sampling(), self.noise())

    def turn_of(self, turn: RoundInputs, at: Sequence[int]) -> RoundInputs:
        """The same of some rows only."""
        if len(at) == len(self.rows):
            return turn
        rows, at_B = [self.rows[b] for b in at], torch.tensor(at, device=self.device)
        view = view_of_rows(turn.view, at, at_B)
        is_mixed = not turn.sampling.all_greedy
        return RoundInputs(view, self.sampling_of(rows, is_mixed), self.noise_of(rows))

    def view(self) -> RoundView:
        """What drafter and policies see."""
        slots = tuple(row.slot for row in self.rows)
        texts = tuple(row.tokens for row in self.rows)
        host = [slots, [text[-1] for text in texts], [row.kept_len for row in self.rows]]
        slot_B, root_B, kept_len_B = torch.tensor(host, device=self.device).unbind()
        prompts = tuple(row.prompt_len for row in self.rows)
        return RoundView(slots, slot_B, root_B, kept_len_B, texts, prompts)

    def sampling(self) -> SamplingBatch:
        """The settings of all rows, made anew when rows have joined or left."""
        if self._sampling is None or self._is_stale:
            self._sampling, self._is_stale = self.sampling_of(self.rows), False
        return self._sampling

    def sampling_of(self, rows: Sequence[Row], is_mixed: bool = False) -> SamplingBatch:
        settings = [row.request.sampling for row in rows]
        made = SamplingBatch(settings, self.vocab_size, self.device, is_mixed)
        if self._sampling is not None:
            made.inherit(self._sampling)
        return made

    def noise(self) -> RoundNoise:
        """The random numbers of the coming round; greedy rows read none, so theirs is made once."""
        if not self.sampling().all_greedy:
            return self.noise_of(self.rows)
        if self._unread is None:
            self._unread = self.noise_of(self.rows)
        return self._unread

    def noise_of(self, rows: Sequence[Row]) -> RoundNoise:
        return RoundNoise(
            [row.request.sampling.seed for row in rows],
            [row.num_rounds for row in rows],
            [row.kept_len for row in rows],
            self.device,
        )
