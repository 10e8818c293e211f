"""GuardedEngine: an engine whose answers outlive its drafter.

A drafter that raises, hands out NaN or names tokens that do not exist costs speed, never an answer:
the row it failed for is decoded plainly from then on, with its text as the target's distribution
has it. A failure that cannot be pinned on one row takes the drafts of all rows that were drafted
for; rows that join later are tried anew, until failures come one upon another and drafting ends for
good. The drafter no longer sees a row that it failed for, so what it garbled there harms nobody.
Letters: B rows, M nodes, K draft vocabulary.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specctl.core.drafter import DraftState, Outcome, RoundSeconds
from specctl.core.tree import DraftTree, QRows, empty_tree
from specctl.runtime.engine.active_rows import RoundInputs
from specctl.runtime.engine.commit import Committed
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.plan import RoundPlan
from specctl.runtime.engine.request import Row
from specctl.runtime.verify import Verdict

IN_A_ROW = 3  # failures without a good round between them that end drafting


class GuardedEngine(Engine):
    """`say` is told once what failed; `num_disabled` counts the rows that lost their drafts;
    `why_off` says why nothing is drafted any more, None while it is."""

    def __init__(self, *given: Any, say: Callable[[str], None], **named: Any) -> None:
        super().__init__(*given, **named)
        self.say, self.num_disabled, self.why_off = say, 0, None if self.drafter else "no drafter"
        self._failures, self._has_said = 0, False
        self._seen: list[Tensor] = []
        self._bad_B: Tensor | None = None

    def open(self, longest: int) -> None:
        try:
            super().open(longest)
        except Exception as error:
            if self._kv is None:
                raise  # the target's own caches do not fit
            self.lose_all(f"{place_of(error)} when it was opened")

    def lose_all(self, why: str) -> None:
        """Nothing is drafted: the drafter could not even be taken on."""
        self.num_disabled += 1
        self._end_drafting(why)

    # -- a round --------------------------------------------------------------------------------

    def _wake(self, plan: RoundPlan) -> float:
        try:
            return super()._wake(plan)
        except Exception as error:
            self._lose([self.rows[b] for b in self._at], f"{place_of(error)} while it caught up")
            self._at = []
            return 0.0

    def _draft(self, turn: RoundInputs, plan: RoundPlan) -> DraftTree:
        self._seen, self._bad_B = [], None
        try:
            return super()._draft(turn, plan)
        except Exception as error:
            self._lose([self.rows[b] for b in self._at], f"{place_of(error)} while it drafted")
            self._at, self._bad_B = [], None
            return empty_tree(len(self.rows), self.device)

    def _grow(self, state: DraftState, turn: RoundInputs, plan: RoundPlan) -> DraftTree:
        watched = replace(turn, view=replace(turn.view, watch=self._see))
        return self._checked(super()._grow(state, watched, plan), len(turn.view.slots))

    def _see(self, logits: Tensor) -> None:
        """Note the rows whose draft logits are no distribution: NaN or +inf anywhere."""
        self._seen.append(~(logits.flatten(1).amax(1) < torch.inf))

    def _checked(self, tree: DraftTree, num_rows: int) -> DraftTree:
        """The tree without rows that were drafted from no distribution, or with tokens that do not
        exist."""
        token_BN, vocab_size = tree.token_BN, self.target.spec.vocab_size
        bad_B = ((token_BN < 0) | (token_BN >= vocab_size)).any(1)
        for seen_B in self._seen:
            bad_B = bad_B | seen_B
        self._bad_B = bad_B
        if not tree.num_nodes or (bad_B.device.type == "cpu" and not bool(bad_B.any())):
            return tree
        bad_B1, q = bad_B[:, None], tree.q
        if q is not None:
            q = QRows(q.prob_BTK.masked_fill(bad_B1[:, :, None], 0.0), q.ids_K)
        token_BN = token_BN.masked_fill(bad_B1, 0)
        return replace(tree, token_BN=token_BN, valid_BN=tree.valid_BN & ~bad_B1, q=q)

    def _commit(self, tree: DraftTree, verdict: Verdict) -> Committed:
        made = super()._commit(tree, verdict)
        if self._bad_B is not None:
            bad = [
                self.rows[b]
                for b, is_bad in zip(self._at, self._bad_B.tolist(), strict=True)
                if is_bad
            ]
            if bad:
                self._lose(bad, "it drafted from NaN, or tokens that do not exist")
            elif tree.num_nodes:
                self._failures = 0
        return made

    def _learn(self, state: DraftState, outcome: Outcome, spent: RoundSeconds) -> RoundSeconds:
        if not any(row.speculates for row in self.rows):
            return spent
        try:
            return super()._learn(state, outcome, spent)
        except Exception as error:
            rows = self.rows if not self._at else [self.rows[b] for b in self._at]
            self._lose(rows, f"{place_of(error)} while it learned")
            return spent

    # -- rows -----------------------------------------------------------------------------------

    def _greet(self, row: Row) -> None:
        try:
            super()._greet(row)
        except Exception as error:
            self._lose([row], f"{place_of(error)} while it read a prompt")

    def _follow(self, row: Row, taps: Mapping[int, Tensor], first: int, last: int) -> None:
        try:
            super()._follow(row, taps, first, last)
        except Exception as error:
            self._lose([row], f"{place_of(error)} while it read a prompt")

    def _end(self, row: Row) -> None:
        try:
            super()._end(row)
        except Exception as error:
            self._lose([], f"{place_of(error)} when a row left")

    def _lose(self, rows: Sequence[Row], why: str) -> None:
        """These rows go on without drafts."""
        lost = [row for row in rows if row.speculates]
        for row in lost:
            row.speculates = False
        self.num_disabled += len(lost)
        self._failures += 1
        if not self._has_said:
            self._has_said = True
            self.say(f"the drafter failed: {why}; {len(lost)} row(s) go on without it")
        if self._failures >= IN_A_ROW:
            self._end_drafting(why)

    def _end_drafting(self, why: str) -> None:
        self.why_off, self._state = f"the drafter failed: {why}", None
        for row in self.rows:
            row.speculates = False
        self.say(f"nothing is drafted any more: {why}")


def place_of(error: BaseException) -> str:
    """The type of an error and where it was raised; not its text, which may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}"
