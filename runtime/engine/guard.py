"""Guard: answers outlive their drafter.

A drafter that raises, hands out NaN or names tokens that do not exist costs speed, never an answer:
the row it failed for is decoded plainly from then on, with its text as the target's distribution
has it. What was drawn from NaN the verification rules leave out (`verify/walk.py`); here it is
counted. A failure that cannot be pinned on one row takes the drafts of all rows that were drafted
for; rows that join later are tried anew, until failures come one upon another and drafting ends for
good. The drafter no longer sees a row that it failed for, so what it garbled there harms nobody.
Letters: B rows, K draft vocabulary, N nodes, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from specctl.core.drafter import DraftState, Outcome, RoundSeconds, RoundView, Space
from specctl.core.tree import DraftTree, NodeKind, QRows
from specctl.runtime.engine.request import Row
from specctl.runtime.engine.round import Round
from specctl.runtime.engine.round_drafter import RoundDrafter
from specctl.runtime.policies.base import RestSpan

IN_A_ROW = 3  # failures without a good round between them that end drafting


class Guard(RoundDrafter):
    """Goes around what drafts: `Engine(..., wrap_drafter=guard.wrap)`. Tokens exist below
    `vocab_size`. `say` is told once what failed; `num_disabled` counts the rows that lost their
    drafts; `why_off` says why nothing is drafted any more, None while it is."""

    def __init__(self, vocab_size: int, say: Callable[[str], None]) -> None:
        self.vocab_size, self.say, self.num_disabled = vocab_size, say, 0
        self.why_off: str | None = "no drafter"
        self.inner = RoundDrafter()
        self._lost: set[int] = set()  # slots of rows that go on without drafts
        self._failures, self._has_said = 0, False
        self._seen: list[Tensor] = []
        self._bad: tuple[tuple[int, ...], Tensor] | None = None  # slots, [B]: drafts are void

    def wrap(self, inner: RoundDrafter) -> RoundDrafter:
        """What drafts, guarded."""
        self.inner, self.why_off = inner, None
        return self

    def let_go(self) -> None:
        """Hold no memory of what drafted, and count on: `wrap` may give it another."""
        self.inner, self._seen, self._bad = RoundDrafter(), [], None

    @property
    def state(self) -> DraftState | None:
        return self.inner.state if self.why_off is None else None

    def speculates(self, slot: int) -> bool:
        return self.why_off is None and slot not in self._lost and self.inner.speculates(slot)

    def drafts_for(self, slot: int) -> bool:
        return self.inner.drafts_for(slot)

    def rests(self, view: RoundView) -> bool:
        if any(map(self.speculates, view.slots)):
            with self._surviving(view.slots, "while it chose"):
                return self.inner.rests(view)
        return True

    def rest(self) -> RestSpan | None:
        with self._surviving([], "while it chose"):
            return self.inner.rest() if self.why_off is None else None
        return None

    def wakes(self, view: RoundView) -> bool:
        with self._surviving(view.slots, "while it chose"):
            return self.inner.wakes(view)
        return True

    def rested(self, rest: RestSpan) -> None:
        if self.why_off is None:
            with self._surviving([], "while it learned"):
                self.inner.rested(rest)

    def open(self, space: Space) -> None:
        if self.why_off is None:
            try:
                self.inner.open(space)
            except Exception as error:
                self.give_up(f"{place_of(error)} when it was opened")

    # -- rows -----------------------------------------------------------------------------------

    def prefill(self, row: Row, taps: Mapping[int, Tensor], first: int, last: int) -> None:
        if self.speculates(row.slot):
            with self._surviving([row.slot], "while it read a prompt"):
                self.inner.prefill(row, taps, first, last)

    def start(self, row: Row, taps: Mapping[int, Tensor]) -> None:
        if self.speculates(row.slot):
            with self._surviving([row.slot], "while it read a prompt"):
                self.inner.start(row, taps)

    def end(self, row: Row) -> None:
        if self.why_off is None:
            with self._surviving([], "when a row left"):
                self.inner.end(row)
        self._lost.discard(row.slot)

    def catch_up(self, missed: Outcome) -> None:
        with self._surviving(missed.view.slots, "while it caught up"):
            self.inner.catch_up(missed)

    # -- a round --------------------------------------------------------------------------------

    def draft(self, round: Round) -> DraftTree:
        self._seen, self._bad = [], None
        watched, slots = replace(round, view=replace(round.view, watch=self._see)), round.view.slots
        with self._surviving(slots, "while it drafted"):
            return self._checked(self.inner.draft(watched), slots)
        return super().draft(round)

    def _see(self, logits: Tensor) -> None:
        """Note the rows whose draft logits are no distribution: NaN or +inf anywhere."""
        self._seen.append(~(logits.flatten(1).amax(1) < torch.inf))

    def _checked(self, tree: DraftTree, slots: tuple[int, ...]) -> DraftTree:
        """The tree without rows that name tokens that do not exist, and where nothing is drawn
        without those drafted from no distribution. A row that draws keeps what it drew in front of
        that: to drop it for what came behind would favour some of those tokens."""
        token_BN = tree.token_BN
        bad_B = lost_B = ((token_BN < 0) | (token_BN >= self.vocab_size)).any(1)
        for seen_B in self._seen:
            lost_B = lost_B | seen_B
        self._bad = slots, lost_B
        bad_B = lost_B if tree.kind is NodeKind.POINT else bad_B
        if not tree.num_nodes or (bad_B.device.type == "cpu" and not bool(bad_B.any())):
            return tree
        bad_B1, q = bad_B[:, None], tree.q
        if q is not None:
            q = QRows(q.prob_BTK.masked_fill(bad_B1[:, :, None], 0.0), q.ids_K)
        token_BN = token_BN.masked_fill(bad_B1, 0)
        return replace(tree, token_BN=token_BN, valid_BN=tree.valid_BN & ~bad_B1, q=q)

    def observe(self, outcome: Outcome, logits_BTV: Tensor | None = None) -> None:
        """What was drafted from is read on the host here, when the round has been read anyway."""
        slots, found, self._bad = outcome.view.slots, self._bad, None
        if found is not None and found[0] == slots:
            bad = [slot for slot, is_bad in zip(slots, found[1].tolist(), strict=True) if is_bad]
            if bad:
                self._lose(bad, "it drafted from NaN, or tokens that do not exist")
            elif outcome.tree.num_nodes:
                self._failures = 0
        if any(map(self.speculates, slots)):
            with self._surviving(slots, "while it learned"):
                self.inner.observe(outcome)

    def learn(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        slots = outcome.view.slots
        if any(map(self.speculates, slots)):
            with self._surviving(slots, "while it learned"):
                self.inner.learn(outcome, seconds)

    # -- failures -------------------------------------------------------------------------------

    @contextmanager
    def _surviving(self, slots: Sequence[int], when: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._lose(slots, f"{place_of(error)} {when}")

    def _lose(self, slots: Sequence[int], why: str) -> None:
        """The rows in these slots go on without drafts."""
        lost = [slot for slot in slots if self.speculates(slot)]
        self._lost.update(lost)
        self.num_disabled += len(lost)
        self._failures += 1
        if not self._has_said:
            self._has_said = True
            self.say(f"the drafter failed: {why}; {len(lost)} row(s) go on without it")
        if self._failures >= IN_A_ROW:
            self._end_drafting(why)

    def give_up(self, why: str) -> None:
        """Nothing is drafted: the drafter could not even be taken on."""
        self.num_disabled += 1
        self._end_drafting(why)

    def _end_drafting(self, why: str) -> None:
        self.why_off = f"the drafter failed: {why}"
        self.say(f"nothing is drafted any more: {why}")


def place_of(error: BaseException) -> str:
    """The type of an error and where it was raised; not its text, which may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}"
