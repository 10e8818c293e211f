"""LazyDrafter: rows that draft nothing cost their drafter nothing.

Nothing is computed for such a row; the target's taps at its tokens are kept by reference, one entry
a round for all rows, within the memory that a server counts for a row's taps. When the row drafts
again its drafter reads everything at once, as rounds that had drafted the text itself, all of it
accepted: what it then drafts is what it would have drafted had it followed every round. A row that
ends before it drafts again has cost nothing.
Letters: B rows, D hidden width, N nodes, P path.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specctl.core.drafter import DraftState, Outcome, RoundSeconds, RoundView, Space
from specctl.core.tree import DraftTree, NodeKind, chain_tree, empty_tree
from specctl.runtime.engine.request import Row
from specctl.runtime.engine.round import Round, outcome_of_rows, scatter_rows
from specctl.runtime.engine.round_drafter import RoundDrafter


@dataclass(slots=True, eq=False)
class DraftProgress:
    """How far the drafter has read one row; the taps of a prompt that it has not read yet."""

    row: Row
    observed_len: int = 0
    is_started: bool = False
    prompt_taps: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def backlog(self) -> int:
        return self.row.kept_len - self.observed_len

    @property
    def num_without_taps(self) -> int:
        """Positions of the backlog that lie in the prompt, whose taps are the row's own."""
        return max(0, self.row.prompt_len - 1 - self.observed_len)


class LazyDrafter(RoundDrafter):
    """Shows `inner` the rows that draft, and up to `most` missed positions of them at once. A row
    that drafts nothing emits one token a round, so that its newest m positions are the last m
    entries of what is kept. Not `is_lazy`: all rows are drafted for if one is, and no round is
    missed; so it must be with what lives on the target's top-k, which is not kept."""

    def __init__(self, inner: RoundDrafter, most: int, is_lazy: bool) -> None:
        self.inner, self.most, self.is_lazy = inner, most, is_lazy
        self._progress: dict[int, DraftProgress] = {}  # by slot
        self._rounds: deque[tuple[Mapping[int, int], Mapping[int, Tensor]]] = deque()
        self._at: list[int] = []  # rows that draft in this round
        self._seen: Outcome | None = None
        self._device = torch.device("cpu")

    def __len__(self) -> int:
        """Rounds whose taps are kept."""
        return len(self._rounds)

    @property
    def state(self) -> DraftState | None:
        return self.inner.state

    def open(self, space: Space) -> None:
        self._device = space.device
        self._progress.clear()
        self._rounds.clear()
        self.inner.open(space)

    def speculates(self, slot: int) -> bool:
        return self.inner.speculates(slot)

    def backlog(self, row: Row) -> int:
        return self._of(row).backlog

    # -- rows come and go -----------------------------------------------------------------------

    def prefill(self, row: Row, taps: Mapping[int, Tensor], first: int, last: int) -> None:
        self.inner.prefill(row, taps, first, last)
        self._of(row).observed_len = last

    def start(self, row: Row, taps: Mapping[int, Tensor]) -> None:
        progress = self._of(row)
        progress.prompt_taps = taps
        if not self.is_lazy:
            self._start(progress)

    def _start(self, progress: DraftProgress) -> None:
        """The drafter reads the prompt, or what is left of it."""
        row, taps, progress.prompt_taps = progress.row, progress.prompt_taps, {}
        if self.state is not None and self.state.prefills_in_parts and not progress.observed_len:
            self.inner.prefill(row, {}, 0, 0)
        progress.is_started = True
        self.inner.start(row, taps)
        progress.observed_len = row.prompt_len - 1

    def end(self, row: Row) -> None:
        self._progress.pop(row.slot, None)
        self.inner.end(row)

    def _of(self, row: Row) -> DraftProgress:
        found = self._progress.get(row.slot)
        if found is None:
            found = self._progress[row.slot] = DraftProgress(row)
        return found

    # -- a round --------------------------------------------------------------------------------

    def draft(self, round: Round) -> DraftTree:
        began = time.perf_counter()
        at = self._speculating(round.view.slots)
        drafting = [b for b in at if round.plan.drafts(b)]
        at = drafting if self.is_lazy or not drafting else at
        self._catch_up([self._of(round.rows[b]) for b in at])
        self._at = [b for b in at if self.inner.speculates(round.view.slots[b])]
        self.catch_up_seconds = time.perf_counter() - began
        if not self._at:
            return empty_tree(len(round.rows), round.view.slot_B.device)
        tree = self.inner.draft(round.of_rows(self._at))
        return scatter_rows(tree, self._at, len(round.rows))

    def observe(self, outcome: Outcome) -> None:
        """The drafter sees the rows that drafted, or nothing."""
        slots = outcome.view.slots
        at = [b for b in self._at if self.inner.speculates(slots[b])]
        if not at and not self.is_lazy:
            at = self._speculating(slots)
        for b in at:
            progress = self._progress[slots[b]]
            progress.observed_len = progress.row.kept_len
        self._keep_taps(outcome)
        self._seen = outcome_of_rows(outcome, at) if at else outcome
        if at:
            self.inner.observe(self._seen)

    def learn(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        """Of the rows that drafted, or of all in a round without drafts."""
        seen, self._seen = self._seen, None
        assert seen is not None, "a round is observed before it is learned from"
        self.inner.learn(seen, seconds)

    def _speculating(self, slots: Sequence[int]) -> list[int]:
        return [b for b, slot in enumerate(slots) if self.inner.speculates(slot)]

    # -- what was missed ------------------------------------------------------------------------

    def _keep_taps(self, outcome: Outcome) -> None:
        """As many rounds as the longest backlog needs."""
        if not outcome.taps:
            return
        places = {slot: b for b, slot in enumerate(outcome.view.slots)}
        roots = {tap: _root(taps_BPD) for tap, taps_BPD in outcome.taps.items()}
        self._rounds.append((places, roots))
        live = [self._progress[slot] for slot in places if self.inner.speculates(slot)]
        backlogs = [p.backlog - p.num_without_taps for p in live if p.row.finished is None]
        while len(self._rounds) > max(backlogs, default=0):
            self._rounds.popleft()

    def _catch_up(self, behind: list[DraftProgress]) -> None:
        """Have the drafter read all that these rows have missed, their prompts first."""
        for progress in behind:
            if not progress.is_started:
                self._start(progress)
        while behind := [p for p in behind if p.backlog and self.inner.speculates(p.row.slot)]:
            missed = self._missed(behind)
            self.inner.catch_up(missed)
            for progress, new in zip(behind, missed.emitted, strict=True):
                progress.observed_len += len(new)

    def _missed(self, behind: Sequence[DraftProgress]) -> Outcome:
        """The next `most` positions, or as many as there are, of rows whose prompts are known."""
        rows, counts = [p.row for p in behind], [min(self.most, p.backlog) for p in behind]
        P, device = max(counts), self._device
        texts = [p.row.tokens[p.observed_len :] for p in behind]
        path = [[*range(n), *(-1,) * (P - n)] for n in counts]
        emitted = tuple(tuple(text[1 : n + 1]) for text, n in zip(texts, counts, strict=True))
        drafted = [[*new, *(0,) * P][: P - 1] for new in emitted]
        host = [[p.row.slot, p.row.tokens[p.observed_len], p.observed_len] for p in behind]
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
            self._missed_taps(behind, counts),
        )

    def _missed_taps(
        self, behind: Sequence[DraftProgress], counts: Sequence[int]
    ) -> dict[int, Tensor]:
        """[B, P, D] of each tap, zero behind what a row has."""
        if not self._rounds:
            return {}
        found: dict[int, Tensor] = {}
        for tap, newest in self._rounds[-1][1].items():
            taps_BPD = newest.new_zeros(len(behind), max(counts), newest.shape[-1])
            for b, (progress, count) in enumerate(zip(behind, counts, strict=True)):
                first, slot = len(self._rounds) - progress.backlog, progress.row.slot
                entries = [self._rounds[first + i] for i in range(count)]
                taps_BPD[b, :count] = torch.stack([taps[tap][at[slot]] for at, taps in entries])
            found[tap] = taps_BPD
        return found


def _root(taps_BPD: Tensor) -> Tensor:
    """[B, D]: a tap at the roots, which holds no more memory than that."""
    return taps_BPD[:, 0] if taps_BPD.shape[1] == 1 else taps_BPD[:, 0].clone()
