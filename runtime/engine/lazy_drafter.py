"""Asleep: what a drafter is told of rounds that it slept through.

A row that drafts nothing needs no drafter, so nothing is computed for it: its drafter sleeps. What
the target felt at its tokens (taps) is kept by reference, one entry a round for all rows, within
the room that admission counts for a row's taps. When the row drafts again its drafter is told of
everything at once, as of rounds that had drafted the text itself, all of it accepted: what it then
drafts is what it would have drafted without sleep. A row that ends asleep has cost nothing.
Letters: B rows, P path length, D width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from specctl.core.drafter import DraftState, Outcome, RoundView
from specctl.core.tree import NodeKind, chain_tree
from specctl.runtime.engine.outcome import of_rows
from specctl.runtime.engine.plan import RoundPlan
from specctl.runtime.engine.request import Row


class LazyDrafter:
    """Who sleeps, and the taps of the rounds that they miss. A sleeping row emits one token a
    round, so that its newest m positions are the last m entries. Up to `most` positions are told at
    once. Not `is_allowed`: all rows are drafted for if one is, and no round is missed; so it is
    with what lives on the target's top-k, which is not kept. One writer: the engine."""

    def __init__(self, device: torch.device, most: int, is_allowed: bool) -> None:
        self.device, self.most, self.is_allowed = device, most, is_allowed
        self._rounds: deque[tuple[Mapping[int, int], Mapping[int, Tensor]]] = deque()

    def __len__(self) -> int:
        return len(self._rounds)

    def drafting(self, rows: Sequence[Row], plan: RoundPlan) -> list[int]:
        """The rows that take part in this round's draft."""
        at = [b for b, row in enumerate(rows) if row.speculates]
        found = [b for b in at if plan.drafts(b)]
        return found if self.is_allowed or not found else at

    def hear(
        self, state: DraftState, outcome: Outcome, rows: Sequence[Row], at: Sequence[int]
    ) -> Outcome:
        """A round of these rows is over. The state observes its part `at`, which is returned, or
        the whole where it observes nothing."""
        if not at and not self.is_allowed:
            at = [b for b, row in enumerate(rows) if row.speculates]
        for b in at:
            rows[b].observed_len = rows[b].kept_len
        self._note(outcome, rows)
        seen = outcome
        if at:
            seen = of_rows(outcome, at, self.device)
            state.observe(seen)
        return seen

    def _note(self, outcome: Outcome, rows: Sequence[Row]) -> None:
        """The past is kept as far as the longest sleeper needs it."""
        if not outcome.taps:
            return
        places = {slot: b for b, slot in enumerate(outcome.view.slots)}
        roots = {tap: _root(taps_BPD) for tap, taps_BPD in outcome.taps.items()}
        self._rounds.append((places, roots))
        waiting = [row for row in rows if row.speculates and row.finished is None]
        longest = max((row.backlog - _unread(row) for row in waiting), default=0)
        while len(self._rounds) > longest:
            self._rounds.popleft()

    def wake(self, state: DraftState, rows: Sequence[Row], greet: Callable[[Row], None]) -> None:
        """Of these rows all that was missed: prompts first, which `greet` has the drafter read."""
        for row in rows:
            if not row.is_met:
                greet(row)
        while rows := [row for row in rows if row.speculates and row.backlog]:
            told = self._told(rows)
            state.observe(told)
            for row, new in zip(rows, told.emitted, strict=True):
                row.observed_len += len(new)

    def _told(self, rows: Sequence[Row]) -> Outcome:
        """The next `most` positions, or as many as there are, of rows whose prompts are known."""
        counts = [min(self.most, row.backlog) for row in rows]
        P, device = max(counts), self.device
        texts = [row.tokens[row.observed_len :] for row in rows]
        path = [[*range(n), *(-1,) * (P - n)] for n in counts]
        emitted = tuple(tuple(text[1 : n + 1]) for text, n in zip(texts, counts, strict=True))
        drafted = [[*new, *(0,) * P][: P - 1] for new in emitted]
        host = [[row.slot, row.tokens[row.observed_len], row.observed_len] for row in rows]
        slot_B, root_B, kept_len_B = torch.tensor(host, device=device).T.unbind()
        count_B1 = torch.tensor(counts, device=device)[:, None]
        view = RoundView(
            tuple(row.slot for row in rows),
            slot_B,
            root_B,
            kept_len_B,
            tuple(row.tokens for row in rows),
            tuple(row.prompt_len for row in rows),
        )
        token_BN = torch.tensor(drafted, dtype=torch.long, device=device).view(len(rows), P - 1)
        valid_BN = torch.arange(1, P, device=device) < count_B1
        return Outcome(
            view,
            chain_tree(token_BN, valid_BN, NodeKind.POINT),
            torch.tensor(path, device=device),
            tuple(n - 1 for n in counts),
            torch.tensor([new[-1] for new in emitted], device=device),
            emitted,
            (None,) * len(rows),
            self._taps(rows, counts),
        )

    def _taps(self, rows: Sequence[Row], counts: Sequence[int]) -> dict[int, Tensor]:
        """[B, P, D] of each tap, zero behind what a row has."""
        if not self._rounds:
            return {}
        found: dict[int, Tensor] = {}
        for tap, newest in self._rounds[-1][1].items():
            taps_BPD = newest.new_zeros(len(rows), max(counts), newest.shape[-1])
            for b, (row, count) in enumerate(zip(rows, counts, strict=True)):
                first = len(self._rounds) - row.backlog
                entries = [self._rounds[first + i] for i in range(count)]
                taps_BPD[b, :count] = torch.stack([taps[tap][at[row.slot]] for at, taps in entries])
            found[tap] = taps_BPD
        return found


def _root(taps_BPD: Tensor) -> Tensor:
    """[B, D]: a tap at the roots, which holds no more memory than that."""
    return taps_BPD[:, 0] if taps_BPD.shape[1] == 1 else taps_BPD[:, 0].clone()


def _unread(row: Row) -> int:
    """Positions of the prompt that the drafter has not read; their taps are the row's own."""
    return max(0, row.prompt_len - 1 - row.observed_len)


def meet(state: DraftState, row: Row) -> None:
    """The drafter begins with a row: it reads the prompt, or what it has not read ahead."""
    taps, prompt = row.prompt_taps, row.request.tokens
    if row.request.conversation is None:
        row.prompt_taps = {}
    if state.prefills_in_parts and not row.observed_len:
        state.prefill(row.slot, prompt, {}, 0, 0)
    row.is_met = True
    state.join(row.slot, row.request.conversation)
    state.start(row.slot, prompt, taps)
    row.observed_len = row.prompt_len - 1
