"""LazyDrafter: rows that draft nothing cost their drafter nothing.

Nothing is computed for such a row; the target's taps at its tokens are kept by reference, one entry
a round for all rows, within the memory that a server counts for a row's taps. Of its logits a few
rounds are kept, then the top-k of all of these, found at once. When the row drafts again its
drafter reads everything at once, as rounds that had drafted the text itself, all of it accepted:
what it then drafts is what it would have drafted had it followed every round. A row that ends
before it drafts again has cost nothing. Where nobody would draft for some rounds, whatever happens
in them, nobody is consulted in these, and learns of them at once when they are over.
Letters: B rows, C candidates, D hidden width, N nodes, P path, R flat rows, T fed tokens, V target
vocabulary, X any axes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specctl.core.drafter import DraftState, Needs, Outcome, RoundSeconds, RoundView, Space
from specctl.core.round_rows import outcome_of_rows
from specctl.core.tree import DraftTree, NodeKind, chain_tree, empty_tree
from specctl.runtime.engine.device_clock import settle
from specctl.runtime.engine.request import Row
from specctl.runtime.engine.round import Round, scatter_rows
from specctl.runtime.engine.round_drafter import RoundDrafter
from specctl.runtime.policies.base import RestSpan

MOST_UNRANKED = 16  # rounds of which the logits are kept


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
        return max(0, self.row.start_len - 1 - self.observed_len)


@dataclass(slots=True, eq=False)
class MissedRound:
    """The rows of a round by slot, and what the target had at their roots: taps [B, 1, D]; its
    best tokens [B, C], with their log-probabilities where they are needed, or the logits [B, V]
    that they are still to be found in. None of the two: the drafter did not listen."""

    places: Mapping[int, int]
    taps: Mapping[int, Tensor]
    topk_BC: Tensor | None = None
    logp_BC: Tensor | None = None
    logits_BV: Tensor | None = None

    @property
    def is_known(self) -> bool:
        return self.topk_BC is not None or self.logits_BV is not None


UNKNOWN = MissedRound({}, {})


class LazyDrafter(RoundDrafter):
    """Shows `inner`, which `needs` that of the target, the rows that draft, and up to `most` missed
    positions of them at once. A row that drafts nothing emits one token a round, so that its newest
    m positions are the last m entries of what is kept. Not `is_lazy`: all rows are drafted for if
    one is, and no round is missed."""

    is_lazy = True

    def __init__(self, inner: RoundDrafter, most: int, needs: Needs) -> None:
        self.inner, self.most, self.needs = inner, most, needs
        self._progress: dict[int, DraftProgress] = {}  # by slot
        self._rounds: deque[MissedRound] = deque()
        self._at: list[int] = []  # rows that draft in this round
        self._seen: Outcome | None = None
        self._device = torch.device("cpu")
        self._rest: RestSpan | None = None
        self._resting: tuple[int, ...] = ()  # slots of its rows
        self._places: dict[int, int] = {}  # of those slots
        self._is_consulted = self._is_resting = False  # in this round

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
        self._rest = None
        self.inner.open(space)

    def speculates(self, slot: int) -> bool:
        return self.inner.speculates(slot)

    def backlog(self, row: Row) -> int:
        return self._of(row).backlog

    def goes_on_resting(self, view: RoundView) -> bool:
        rest = self._rest
        self._is_resting = (
            rest is not None and self._resting == view.slots and self._lasts(rest, view)
        )
        self._is_consulted = not self._is_resting
        if self._is_consulted:
            self._wake()
        return self._is_resting

    def _lasts(self, rest: RestSpan, view: RoundView) -> bool:
        if not rest.left:
            return False
        rest.left -= 1
        is_glanced = rest.glance and (len(rest.seconds) + 1) % rest.glance == 0
        return not (is_glanced and self.inner.wakes(self._with_backlog(view)))

    def rests(self, view: RoundView) -> bool:
        return self.inner.rests(self._with_backlog(view))

    def _with_backlog(self, view: RoundView) -> RoundView:
        """The view, and how much would have to be read before a draft."""
        rows = [self._progress[slot] for slot in view.slots if self.inner.speculates(slot)]
        return replace(view, missed=sum(p.backlog for p in rows if p.row.request.drafts))

    def _wake(self) -> None:
        rest, self._rest = self._rest, None
        if rest is not None and rest.seconds:
            self.inner.rested(rest)

    def needed(self) -> Needs:
        """Of the rows that draft; what the others need is kept until they do."""
        is_shown = self._at or not self.is_lazy
        return self.needs if is_shown and self._is_listening else Needs()

    @property
    def _is_listening(self) -> bool:
        return self.state is not None and self.state.is_listening

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
        progress.observed_len = row.start_len - 1

    def end(self, row: Row) -> None:
        self._wake()
        self._progress.pop(row.slot, None)
        self.inner.end(row)

    def _of(self, row: Row) -> DraftProgress:
        found = self._progress.get(row.slot)
        if found is None:
            found = self._progress[row.slot] = DraftProgress(row)
        return found

    # -- a round --------------------------------------------------------------------------------

    def draft(self, round: Round) -> DraftTree:
        if self.is_lazy and not round.plan.budget.depth:
            self._at, self.catch_up_seconds = [], 0.0
            return empty_tree(len(round.rows), round.view.slot_B.device)
        began = time.perf_counter()
        at = self._speculating(round.view.slots)
        drafting = [b for b in at if round.plan.drafts(b) and self._drafts_for(round, b)]
        at = drafting if self.is_lazy or not drafting else at
        self._catch_up([self._of(round.rows[b]) for b in at])
        settle(round.view.slot_B.device)
        self._at = [b for b in at if self.inner.speculates(round.view.slots[b])]
        self.catch_up_seconds = time.perf_counter() - began
        if not self._at:
            return empty_tree(len(round.rows), round.view.slot_B.device)
        tree = self.inner.draft(round.of_rows(self._at))
        return scatter_rows(tree, self._at, len(round.rows))

    def _drafts_for(self, round: Round, b: int) -> bool:
        return self.inner.drafts_for(round.view.slots[b])

    def observe(self, outcome: Outcome, logits_BTV: Tensor | None = None) -> None:
        """The drafter sees the rows that drafted, or nothing."""
        if self._is_resting:
            self._keep(outcome, logits_BTV)
            return
        slots = outcome.view.slots
        at = [b for b in self._at if self.inner.speculates(slots[b])]
        if not at and not self.is_lazy:
            at = self._speculating(slots)
        for b in at:
            progress = self._progress[slots[b]]
            progress.observed_len = progress.row.kept_len
        self._keep(outcome, logits_BTV)
        is_part = 0 < len(at) < len(outcome.emitted)
        self._seen = outcome_of_rows(outcome, at) if is_part else outcome
        if at:
            self.inner.observe(self._seen)

    def learn(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        """Of the rows that drafted, or of all in a round without drafts."""
        is_consulted, self._is_consulted = self._is_consulted, False
        if self._is_resting:
            assert self._rest is not None
            self._is_resting = False
            self._rest.tokens += sum(map(len, outcome.emitted))
            self._rest.seconds.append(seconds.draft + seconds.verify)
            return
        seen, self._seen = self._seen, None
        assert seen is not None, "a round is observed before it is learned from"
        self.inner.learn(seen, seconds)
        if is_consulted and not outcome.tree.num_nodes and self.is_lazy:
            self._rest, self._resting = self.inner.rest(), outcome.view.slots
            self._places = {} if self._rest is None else _places(self._resting)

    def _speculating(self, slots: Sequence[int]) -> list[int]:
        return [b for b, slot in enumerate(slots) if self.inner.speculates(slot)]

    # -- what was missed ------------------------------------------------------------------------

    def _keep(self, outcome: Outcome, logits_BTV: Tensor | None) -> None:
        """As many rounds as the longest backlog needs."""
        if not (self.needs.taps or self.needs.topk):
            return
        is_known = self.needs.topk > 0 and self._is_listening
        if not (is_known or outcome.taps or any(outcome.finished)):
            self._rounds.append(UNKNOWN)
            return
        if self._is_resting and not is_known and not any(outcome.finished):
            self._rounds.append(MissedRound(self._places, outcome.taps))  # every backlog has grown
            return
        slots, topk, logp = outcome.view.slots, outcome.topk_BTC, outcome.topk_logp_BTC
        taps = outcome.taps if not outcome.tree.num_nodes else _roots(outcome.taps)
        new = MissedRound(_places(slots), taps)
        live = [self._progress[slot] for slot in slots if self.inner.speculates(slot)]
        backlogs = [p.backlog - p.num_without_taps for p in live if p.row.finished is None]
        self._rounds.append(new)
        while len(self._rounds) > max(backlogs, default=0):
            self._rounds.popleft()
        if not self._rounds or not is_known:
            return
        if topk is not None:
            new.topk_BC, new.logp_BC = topk[:, 0].clone(), None if logp is None else logp[:, 0]
        elif logits_BTV is not None:
            new.logits_BV = logits_BTV[:, 0].clone()  # a recorded forward writes to its own again
            self._rank(MOST_UNRANKED)

    def _rank(self, least: int = 1) -> None:
        """Find the top-k of all rounds of which the logits are kept, if they are as many."""
        rounds = [each for each in self._rounds if each.logits_BV is not None]
        if len(rounds) < least:
            return
        counts = [len(each.places) for each in rounds]
        logits_RV = torch.cat([each.logits_BV for each in rounds if each.logits_BV is not None])
        topk, logp = ranked(logits_RV, self.needs)
        first = 0
        for each, count in zip(rounds, counts, strict=True):
            own, first = slice(first, first + count), first + count
            each.topk_BC, each.logp_BC = topk[own], None if logp is None else logp[own]
            each.logits_BV = None

    def _catch_up(self, behind: list[DraftProgress]) -> None:
        """Have the drafter read all that these rows have missed, their prompts first."""
        for progress in behind:
            if not progress.is_started:
                self._start(progress)
        if behind:
            self._rank()
        state = self.state
        ignores_unknown = not self.needs.taps and state is not None and state.ignores_text
        while behind := [p for p in behind if p.backlog and self.inner.speculates(p.row.slot)]:
            is_known = self._is_known(behind[0], 0)  # all or nothing of what is shown at once
            alike = [p for p in behind if self._is_known(p, 0) == is_known]
            if not is_known and ignores_unknown:
                for progress in alike:
                    progress.observed_len += self._num_unknown(progress)
                continue
            missed = self._missed(alike)
            self.inner.catch_up(missed)
            for progress, new in zip(alike, missed.emitted, strict=True):
                progress.observed_len += len(new)

    def _num_unknown(self, progress: DraftProgress) -> int:
        """Of its backlog's first positions those of which the top-k is not known."""
        if not self.needs.topk:
            return progress.backlog
        rounds = islice(self._rounds, len(self._rounds) - progress.backlog, None)
        return next((n for n, each in enumerate(rounds) if each.is_known), progress.backlog)

    def _is_known(self, progress: DraftProgress, at: int) -> bool:
        """Whether the top-k of that position of its backlog is known."""
        return self.needs.topk > 0 and self._rounds[at - progress.backlog].is_known

    def _count(self, progress: DraftProgress) -> int:
        """How many positions of its backlog are read next."""
        most = min(self.most, progress.backlog)
        if not self.needs.topk:
            return most
        first = self._is_known(progress, 0)
        alike = (at for at in range(1, most) if self._is_known(progress, at) != first)
        return next(alike, most)

    def _missed(self, behind: Sequence[DraftProgress]) -> Outcome:
        """The next `most` positions, or as many as there are, of rows whose prompts are known."""
        rows, counts = [p.row for p in behind], [self._count(p) for p in behind]
        if self.needs.topk:  # known at every place that is fed
            counts = [min(counts)] * len(counts)
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
            {
                tap: self._gathered(behind, counts, partial(_tap_at_roots, tap))
                for tap in (self._rounds[-1].taps if self._rounds else ())
            },
            *self._missed_ranks(behind, counts),
        )

    def _missed_ranks(
        self, behind: Sequence[DraftProgress], counts: Sequence[int]
    ) -> tuple[Tensor | None, Tensor | None]:
        """[B, P, C]: the target's best tokens and their log-probabilities, of rows of which they
        are known."""
        if not self._is_known(behind[0], 0):
            return None, None
        topk = self._gathered(behind, counts, attrgetter("topk_BC"))
        if not self.needs.topk_logp:
            return topk, None
        return topk, self._gathered(behind, counts, attrgetter("logp_BC"))

    def _gathered(
        self,
        behind: Sequence[DraftProgress],
        counts: Sequence[int],
        value_of: Callable[[MissedRound], Tensor],
    ) -> Tensor:
        """[B, P, X]: what these rows miss of a value [B, X] of the kept rounds, zero behind what a
        row has."""
        found_BPX = []
        for progress, count in zip(behind, counts, strict=True):
            first, slot = len(self._rounds) - progress.backlog, progress.row.slot
            rounds = [self._rounds[at] for at in range(first, first + count)]
            found_BPX.append(torch.stack([value_of(each)[each.places[slot]] for each in rounds]))
        return pad_sequence(found_BPX, batch_first=True)


def ranked(logits_RV: Tensor, needs: Needs) -> tuple[Tensor, Tensor | None]:
    """[..., C]: the best tokens that a drafter needs, and their log-probabilities if it does."""
    best_RC, topk_RC = logits_RV.topk(needs.topk, dim=-1)
    if not needs.topk_logp:
        return topk_RC, None
    return topk_RC, best_RC.float() - logits_RV.float().logsumexp(-1, keepdim=True)


def _tap_at_roots(tap: int, missed: MissedRound) -> Tensor:
    """[B, D]"""
    return missed.taps[tap][:, 0]


def _places(slots: Sequence[int]) -> dict[int, int]:
    """The row of each slot."""
    return {slot: b for b, slot in enumerate(slots)}


def _roots(taps: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """[B, 1, D]: taps at the roots, which hold no more memory than that."""
    return {tap: value_BPD[:, :1].clone() for tap, value_BPD in taps.items()}
