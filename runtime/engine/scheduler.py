"""Scheduler: which rows take part in a round, from a request's queue to the end of its row.

Requests wait in order; a free slot takes the first of them, its prompt is read, whole or (where
active rows shall go on meanwhile) one chunk per round, and the row joins. A free slot keeps what it
has cached of a conversation until it is taken: the next request of that conversation goes to the
slot that holds its longest beginning, and only the rest is read. Never between conversations: a
name that matches exactly is the only key, and None matches nothing.
Letters: V target vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from specctl.core.drafter import Budget, RoundView
from specctl.core.forward.prompt_images import PromptImages, common_images
from specctl.core.forward.slot_state import PENDING, StateKV, StateSnapshot
from specctl.core.language_model import LmOut
from specctl.runtime.batching.base import Batching, Choosing, RowView
from specctl.runtime.engine.device_clock import settle
from specctl.runtime.engine.prefill import CHUNK, PrefillProgress, read, roots_of
from specctl.runtime.engine.request import Emission, Request, Row, check_fits
from specctl.runtime.engine.round import Round, RoundPlan, noise_of, view_of
from specctl.runtime.engine.round_drafter import RoundDrafter
from specctl.runtime.engine.row_features import features_of
from specctl.runtime.engine.target_reader import TargetReader
from specctl.runtime.policies.base import Policy, Resting
from specctl.runtime.policies.length import LengthChooser
from specctl.runtime.sampling.noise import RoundNoise
from specctl.runtime.sampling.sampling import SamplingBatch
from specctl.runtime.target.variants.row_adapters import check_adapter


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """What a free slot still holds: the tokens whose entries are true, and the taps at them.
    `states`: where recurrent states can be gone on from, by the number of tokens that they have
    read: a snapshot, or None for those that stand in the slot; None where any position will do.
    `images` are those among the tokens: other images have the same ids; `adapter` is the one that
    read them."""

    conversation: str
    tokens: Sequence[int]
    taps: Mapping[int, Tensor]
    states: Mapping[int, StateSnapshot | None] | None = None
    images: PromptImages | None = None
    adapter: str | None = None

    def common(self, request: Request) -> int:
        """How many positions of that request need not be read; its last token is always fed."""
        if (request.conversation, request.adapter) != (self.conversation, self.adapter):
            return 0
        longest = min(len(self.tokens), len(request.tokens) - 1)
        alike = next(
            (at for at in range(longest) if self.tokens[at] != request.tokens[at]), longest
        )
        alike = common_images(self.images, request.images, alike)
        if self.states is None:
            return alike
        return max((at for at in self.states if at <= alike), default=0)


@dataclass(frozen=True, slots=True)
class RoundPlanner:
    """Asks who may shorten drafts: the length chooser for the round, the batch policy by row.
    `follows_drafts`: what sampled rows emit depends on what was drafted for them; what greedy ones
    do, too, if the rule `is_relaxed`."""

    context: int
    policy: Policy
    chooser: LengthChooser | None
    batching: Batching | None
    drafting: RoundDrafter
    follows_drafts: bool
    is_relaxed: bool = False

    def plan(self, rows: Sequence[Row], view: RoundView) -> RoundPlan:
        """No row drafts what it has no room for: its last token is the bonus."""
        rooms = self._rooms(rows)
        most, lengths = max(*rooms, 0), None
        depth = self.policy.depth
        if self.drafting.goes_on_resting(view):
            depth = 0
        elif self.chooser is not None:
            able = (
                row for row in rows if row.request.drafts and self.drafting.speculates(row.slot)
            )
            self.chooser.missed = sum(map(self.drafting.backlog, able))
            depth = min(depth, self.chooser.length(len(rows)))
        if depth and most > 0 and self.drafting.rests(view):
            depth = 0
        if self.batching is not None:
            lengths = self.batching.lengths(self._views(rows, rooms))
            depth = min(depth, max(lengths))
        elif min(rooms) < depth and (self._is_cut(rows) or self._has_plain(rows)):
            lengths = tuple(max(0, min(depth, room)) for room in rooms)
        if most == 0 or lengths is None or self.policy.is_chain:
            depth = min(depth, most)
        budget = Budget(nodes=self.policy.nodes, depth=depth)
        chooses = self.batching is not None and isinstance(self.batching, Choosing)
        return RoundPlan(budget, lengths, chooses)

    @property
    def first_is_free(self) -> bool:
        """Whether rows that join alone take their first token from the prompt, undrafted: a round
        without a forward of its own. So it is wherever costs decide."""
        if self.drafting.state is None:
            return True
        if self.batching is not None:
            return False
        chooser = self.chooser
        return isinstance(self.policy, Resting) if chooser is None else chooser.first_is_free

    def undrafted(self) -> RoundPlan:
        return RoundPlan(Budget(nodes=self.policy.nodes, depth=0))

    def _is_cut(self, rows: Sequence[Row]) -> bool:
        """Whether every row is cut to its own room."""
        if self.is_relaxed:
            return True
        return self.follows_drafts and not all(row.request.sampling.greedy for row in rows)

    def _has_plain(self, rows: Sequence[Row]) -> bool:
        return not all(row.request.drafts for row in rows)

    def would_draft(self, rows: Sequence[Row]) -> bool:
        """Whether any of these rows may be expected to draft."""
        if self.batching is None:
            return True
        return self.batching.would_draft(self._views(rows, self._rooms(rows)))

    def _rooms(self, rows: Sequence[Row]) -> list[int]:
        """How many drafted tokens every row could use; none where none are wanted."""
        return [
            min(row.room, self.context - len(row.tokens)) - 1 if row.request.drafts else 0
            for row in rows
        ]

    def _views(self, rows: Sequence[Row], rooms: Sequence[int]) -> list[RowView]:
        drafting = self.drafting
        return [
            RowView(
                row.index,
                room,
                drafting.speculates(row.slot),
                drafting.backlog(row),
                row.request.sampling.greedy,
            )
            for row, room in zip(rows, rooms, strict=True)
        ]


class Scheduler:
    """Waiting requests, prompts being read, active rows (in the order of their slots), free slots.
    The only writer of rows. `chunk` prompt tokens are read per round, shared by the rows that join;
    None reads whole prompts at once."""

    def __init__(
        self,
        reader: TargetReader,
        planner: RoundPlanner,
        num_slots: int,
        chunk: int | None = None,
    ) -> None:
        self.reader, self.planner, self.chunk = reader, planner, chunk
        self.drafting = planner.drafting
        self.waiting: deque[tuple[int, Request]] = deque()
        self.prefilling: list[PrefillProgress] = []
        self.rows: list[Row] = []
        self.free = list(range(num_slots))
        self.prefixes: dict[int, CachedPrefix] = {}  # by slot, the longest unused first
        self.prefill_seconds = 0.0
        self._roots: LmOut | None = None
        self._sampling: SamplingBatch | None = None
        self._is_stale = True
        self._unread: RoundNoise | None = None

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.prefilling or self.rows)

    # -- requests -------------------------------------------------------------------------------

    def submit(self, index: int, request: Request) -> None:
        """Put a request at the end of the queue; refuses a prompt that can never be read."""
        target = self.reader.target
        check_fits(request, target.spec.max_positions)
        check_adapter(target.row_adapters, request.adapter)
        self.waiting.append((index, request))

    def cancel(self, index: int) -> bool:
        """Forget a request wherever it stands; whether there was one."""
        for row in self.rows:
            if row.index == index:
                self._release([row])
                return True
        for progress in self.prefilling:
            if progress.row.index == index:
                self.prefilling.remove(progress)
                progress.row.kept_len = progress.at
                progress.row.prompt_taps = progress.prompt_taps()
                self._release([progress.row])
                return True
        found = [each for each in self.waiting if each[0] == index]
        for each in found:
            self.waiting.remove(each)
        return bool(found)

    def forget_prefixes(self) -> None:
        """The caches are new: nothing is kept of anybody."""
        self.prefixes.clear()

    # -- rounds ---------------------------------------------------------------------------------

    def next_round(self) -> Round | None:
        """Free slots are given away, prompts are read as far as a round may; then the round of all
        active rows, None if there are none."""
        if self.waiting or self.prefilling:
            self._admit()
        if not self.rows:
            return None
        began, device = time.perf_counter(), self.reader.device
        rows, (roots, self._roots) = tuple(self.rows), (self._roots, None)
        view, sampling = view_of(rows, device), self._batch_sampling()
        noise = self._noise(sampling)
        plan = self.planner.plan(rows, view) if roots is None else self.planner.undrafted()
        return Round(rows, view, sampling, noise, plan, began, roots)

    def extend_rows(self, done: Sequence[Emission]) -> None:
        """Append what a round emitted."""
        for each in done:
            row, new = each.row, each.tokens
            row.tokens.extend(new)
            row.kept_len = len(row.tokens) - 1
            row.num_rounds += 1
            row.finished = each.finished
            accepted = min(each.num_accepted, len(new))
            row.stats.count(each.num_drafted, accepted, len(new), each.is_rejected)

    def retire(self, done: list[Emission]) -> list[Emission]:
        """Rows that have ended leave their slots; returns what the round emitted."""
        self._release([each.row for each in done if each.finished is not None])
        return done

    def _batch_sampling(self) -> SamplingBatch:
        """The settings of all rows, made anew when rows have joined or left."""
        before, target = self._sampling, self.reader.target
        if before is None or self._is_stale:
            settings = [row.request.sampling for row in self.rows]
            made = SamplingBatch(settings, target.spec.vocab_size, target.device)
            if before is not None:
                made.inherit(before)
            self._sampling, self._is_stale = made, False
            return made
        return before

    def _noise(self, sampling: SamplingBatch) -> RoundNoise:
        """Greedy rows read no random numbers, so theirs are made once."""
        if not sampling.all_greedy:
            return noise_of(self.rows, self.reader.device)
        if self._unread is None:
            self._unread = noise_of(self.rows, self.reader.device)
        return self._unread

    # -- rows join and leave --------------------------------------------------------------------

    def _admit(self) -> None:
        """Rows join whose prompts are read, up to the last token: the root of the first round. If
        nothing is drafted in it, the forward of that round is part of the reading."""
        began = time.perf_counter()
        # States cannot stand behind roots that a failed round gives back.
        may_have_roots = self.chunk is None and not self.reader.kv.holds_state
        # On a CPU rounds have one order of sums, and prompts may have another. In 16 bits that can
        # decide between two tokens, so a root is read by its round, as it is beside a draft.
        target = self.reader.target
        may_have_roots &= target.device.type != "cpu" or target.dtype.itemsize != 2
        with_roots = may_have_roots and not self.rows and self.planner.first_is_free
        while self.waiting and self.free:
            self.prefilling.append(self._take_slot(*self.waiting.popleft(), with_roots))
        done = self._prefill(with_roots)
        if with_roots:
            self._roots = roots_of(done)
        self.prefilling = [progress for progress in self.prefilling if progress not in done]
        for progress in done:
            row, taps = progress.row, progress.prompt_taps()
            others = row.request.images, row.request.adapter
            keeps = row.request.keeps_features and others == (None, None)
            if self.reader.features and keeps:
                row.features = features_of(row.tokens, row.prompt_len, taps, self.reader.features)
            if row.request.conversation is not None:
                row.prompt_taps = taps
                if isinstance(self.reader.kv, StateKV):
                    row.prompt_states = self.reader.kv.state.snapshot(row.slot)
            self.drafting.start(row, taps)
        if done:
            settle(self.reader.device)
            self.rows = sorted([*self.rows, *(p.row for p in done)], key=lambda row: row.slot)
            self._is_stale = True
        self.prefill_seconds += time.perf_counter() - began

    def _prefill(self, with_roots: bool) -> list[PrefillProgress]:
        """Read on, prompts whole or as much of them as a round may; those that are read."""
        kv, taps = self.reader.kv, self.reader.taps
        while not all(progress.is_done for progress in self.prefilling):
            num_open = sum(not progress.is_done for progress in self.prefilling)
            width = CHUNK if self.chunk is None else max(1, self.chunk // num_open)
            if kv.holds_state:
                width = min(width, max(1, PENDING // num_open))
            read(self.reader.target, kv, self.prefilling, width, taps, with_roots)
            if self.chunk is not None:
                break
        done = [progress for progress in self.prefilling if progress.is_done]
        if self.chunk is not None and self._drafter_prefills():
            most = max(1, self.chunk // max(len(self.prefilling), 1))
            behind = [p for p in self.prefilling if p.prefill_drafter(self.drafting, most)]
            done = [progress for progress in done if progress not in behind]
        return sorted(done, key=lambda progress: progress.row.slot)

    def _drafter_prefills(self) -> bool:
        """Whether the drafter reads prompts as the target does, before the first draft."""
        state = self.drafting.state
        if state is None or not state.prefills_in_parts:
            return False
        rows = [*self.rows, *(progress.row for progress in self.prefilling)]
        return not self.drafting.is_lazy or self.planner.would_draft(rows)

    def _take_slot(self, index: int, request: Request, with_roots: bool) -> PrefillProgress:
        """The slot that holds most of the request; else the first that holds nothing; else the one
        that was not used for longest."""
        best = max(self.prefixes, key=lambda slot: self.prefixes[slot].common(request), default=-1)
        common = self.prefixes[best].common(request) if best >= 0 else 0
        empty = [slot for slot in self.free if slot not in self.prefixes]
        slot = best if common else min(empty) if empty else next(iter(self.prefixes))
        self.free.remove(slot)
        held = self.prefixes.pop(slot, None)
        row = Row.of(index, slot, request)
        row.reused_len = common
        progress = PrefillProgress(row, common, row.kept_len + with_roots)
        if isinstance(self.reader.kv, StateKV):
            snapshot = held.states[common] if common and held is not None and held.states else None
            if snapshot is not None:
                self.reader.kv.state.restore(slot, snapshot)
            elif not common:  # a prompt of one token is not read before the first round
                self.reader.kv.state.clear(slot)
        if common and held is not None and held.taps:
            progress.taps.append({tap: value[:common] for tap, value in held.taps.items()})
        return progress

    def _release(self, rows: Sequence[Row]) -> None:
        """Rows leave their slots, which may go on remembering what they read."""
        for row in rows:
            self.drafting.end(row)
            self.free.append(row.slot)
            name, taps = row.request.conversation, row.prompt_taps
            if name is not None and (taps or not self.reader.taps):
                end = min([row.kept_len, *(len(value) for value in taps.values())])
                text, states = tuple(row.tokens[:end]), self._states_of(row)
                read_as = row.request.images, row.request.adapter
                self.prefixes[row.slot] = CachedPrefix(name, text, taps, states, *read_as)
        if rows:
            gone = {id(row) for row in rows}
            self.rows = [row for row in self.rows if id(row) not in gone]
            self._is_stale = True

    def _states_of(self, row: Row) -> dict[int, StateSnapshot | None] | None:
        """Where the states of a row that leaves can be gone on from: behind its prompt, and where
        it ended. Behind an end of text in mid-path they have read more than the row says, and
        stand for no beginning of another."""
        if not isinstance(self.reader.kv, StateKV):
            return None
        found: dict[int, StateSnapshot | None] = {}
        if row.prompt_states is not None:
            found[row.prompt_states.position] = row.prompt_states
        if (position := self.reader.kv.state.position(row.slot)) == row.kept_len:
            found[position] = None
        return {at: state for at, state in found.items() if at <= row.kept_len}
