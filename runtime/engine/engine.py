"""The engine: one round is wake -> draft -> target forward -> verify -> keep -> commit -> observe.

Batched from the first line: every row has its own length and its own acceptance, rows join and
leave between rounds, batch 1 is the case B = 1. Nothing between the draft and the commit reads a
tensor back to the host; the commit reads one small tensor. Plain decoding is the same round with
an empty tree. Rows that draft nothing are not shown to the drafter until they draft again.

Letters: B live rows, N drafted nodes, T = N + 1 fed tokens, P path length, D width, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specctl.core.drafter import (
    Drafter,
    DraftState,
    Needs,
    Outcome,
    RoundSeconds,
    RoundView,
    Space,
)
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Feed, LmOut
from specctl.core.tree import DraftTree, empty_tree, fitted
from specctl.runtime.batching.base import Batching
from specctl.runtime.engine.active_rows import ActiveRows, RoundInputs
from specctl.runtime.engine.commit import Committed, commit
from specctl.runtime.engine.early_pruning import pruning_of
from specctl.runtime.engine.lazy_drafter import LazyDrafter, meet
from specctl.runtime.engine.logprobs import logprobs_of
from specctl.runtime.engine.outcome import outcome_of, spread, with_topk
from specctl.runtime.engine.plan import RoundPlan, RoundPlanner
from specctl.runtime.engine.request import Completion, Emission, Request, Row
from specctl.runtime.engine.scheduler import Scheduler, roots_of
from specctl.runtime.policies.base import GrowRequest, Learner, Policy, fresh
from specctl.runtime.policies.direct import Direct
from specctl.runtime.policies.length import LengthChooser
from specctl.runtime.target.target import Target
from specctl.runtime.verify import Verdict, run_rule
from specctl.runtime.verify.choice import check_rule, rule_for, sampling_rule
from specctl.runtime.verify.forced import with_forced


class Engine:
    """Generates for many rows at once. Single-threaded; the only writer of rows and caches.

    `rule` is a verification rule by name or "auto": greedy rows are verified greedily, sampled
    rows by the rule that fits the policy's node kind. `chooser` picks the draft length of each
    round from measured costs (None = always the policy's own length), `batching` that of every row.
    With a `prefill_chunk` no round reads more than so many prompt tokens of joining rows.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        policy: Policy | None = None,
        rule: str = "auto",
        num_slots: int = 1,
        max_len: int | None = None,
        chooser: LengthChooser | None = None,
        batching: Batching | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        self.target, self.drafter, self.rule = target, drafter, rule
        self.chooser, self.batching = chooser, batching
        self.device, self.context = target.device, target.spec.max_positions
        self.policy: Policy = fresh(policy) if policy is not None else Direct()
        self._usual_rule = sampling_rule(rule, drafter, self.policy)
        follows_drafts = self._usual_rule != "target-only"
        self._planner = RoundPlanner(self.context, self.policy, chooser, batching, follows_drafts)
        self._early = pruning_of(target.lm, self.policy)
        self._learners = [each for each in (chooser, self.policy) if isinstance(each, Learner)]
        self.needs = drafter.needs() if drafter is not None else Needs()
        self.num_slots, self.max_len = num_slots, max_len
        self.live = ActiveRows(target.spec.vocab_size, target.device)
        self.admission = Scheduler(target, num_slots, self.needs.taps, prefill_chunk)
        self.prefill_seconds = self.draft_seconds = self.verify_seconds = 0.0
        check_rule(rule, drafter, self.policy)
        if drafter is not None and self.needs.borrow:
            drafter.bind(target.borrowed())
        self._kv: SlotKV | None = None
        self._state: DraftState | None = None
        self._ahead: LmOut | None = None
        self.sleep = LazyDrafter(self.device, self.policy.nodes + 1, not self.needs.topk)
        self._at: list[int] = []  # rows that draft in this round

    def run(
        self,
        requests: Sequence[Request],
        on_round: Callable[[Row, tuple[int, ...]], None] | None = None,
    ) -> list[Completion]:
        """Completions in the order of the requests; `on_round(row, new)` after each round."""
        longest = max((len(r.tokens) + r.sampling.max_new_tokens for r in requests), default=1)
        self.open(min(longest, self.context))
        for index, request in enumerate(requests):
            self.submit(index, request)
        done: dict[int, Completion] = {}
        while self.is_busy:
            for emission in self.advance():
                row = emission.row
                if on_round is not None:
                    on_round(row, emission.tokens)
                if row.finished is not None:
                    done[row.index] = row.completion()
        return [done[index] for index in range(len(requests))]

    def open(self, longest: int) -> None:
        """Reserve caches for `longest` positions a row; kept when they already suffice."""
        needed = longest + self.policy.nodes + 2
        if self.max_len is not None and self._kv is not None and self.max_len >= needed:
            return
        assert not self.live.rows, "caches cannot grow while rows are live"
        self.max_len = max(needed, self.max_len or 0)
        self._kv = self.target.new_kv(self.num_slots, self.max_len)
        self.admission.forget()
        if self.drafter is not None:
            size = (self.num_slots, self.max_len, self.policy.nodes, self.device)
            self._state = self.drafter.open(Space(*size, self.target.dtype, self.target.identity))

    @property
    def rows(self) -> Sequence[Row]:
        return self.live.rows

    @property
    def is_busy(self) -> bool:
        return bool(self.live.rows) or self.admission.is_busy

    def submit(self, index: int, request: Request) -> None:
        """Put a request in the queue; `index` names it for as long as it lives."""
        self.admission.submit(index, request)

    def advance(self) -> list[Emission]:
        """Seat who waits, read their prompts as far as a round may, and do a round."""
        if self.admission.is_busy:
            self._admit()
        return self.step()

    @torch.inference_mode()
    def cancel(self, index: int) -> bool:
        """Forget a request wherever it stands, between rounds; the other rows notice nothing."""
        for row in self.live.rows:
            if row.index == index:
                self._part([row])
                return True
        return self.admission.cancel(index)

    @torch.inference_mode()
    def _admit(self) -> None:
        """Rows join whose prompts are read, up to the last token: the root of the first round. If
        nothing can be drafted, that round's forward is part of the reading."""
        started = time.perf_counter()
        alone = self._state is None and not self.live.rows and self.admission.chunk is None
        self.admission.seat(alone)
        joined = self.admission.read(self._cache(), alone, self._follow if self._reads() else None)
        self._ahead = roots_of(joined) if alone else None
        rows = self.admission.joined(joined)
        for row in rows if not self.sleep.is_allowed else ():
            self._greet(row)
        self.live.join(rows)
        self.prefill_seconds += time.perf_counter() - started

    # -- the round ------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Emission]:
        """One round of every live row: what each of them emitted."""
        if not self.live.rows:
            return []
        started = time.perf_counter()
        turn = self.live.turn()
        view, sampling = turn.view, turn.sampling
        plan = self._planner.plan(self.live.rows)
        woken = self._wake(plan)
        started += woken
        tree = self._draft(turn, plan)
        drafted = time.perf_counter()
        tree, out = self._forward(view, tree)
        assert out.logits_BTV is not None
        logits_BTV = sampling.processed(out.logits_BTV, tree, view)
        scores_BTV = with_forced(sampling.distribution(logits_BTV), tree)
        rule = rule_for(self.rule, tree, sampling.all_greedy, self._usual_rule)
        noise = turn.noise if tree.is_chain else turn.noise.counted_over(tree.valid_BN)
        verdict = run_rule(rule, tree, scores_BTV, noise)
        if not tree.is_chain:
            self._cache().keep(view.slot_B, view.kept_len_B, verdict.path_BP)
        done = self._commit(tree, verdict)
        logprobs = logprobs_of(logits_BTV, verdict.path_BP, self.live.rows, done.emitted)
        verified = time.perf_counter()
        self.draft_seconds += drafted - started
        self.verify_seconds += verified - drafted
        if self._state is not None:
            outcome = outcome_of(view, tree, verdict, out, self.live.rows, *done)
            if self._state.is_listening:
                outcome = with_topk(outcome, self.needs, out.logits_BTV)
            spent = RoundSeconds(drafted - started, verified - drafted, 0.0, woken)
            seconds = self._learn(self._state, outcome, spent)
            if self.batching is not None:
                self.batching.observe(outcome, seconds)
        made = zip(self.live.rows, done.emitted, done.accepted, logprobs, strict=True)
        emissions = [Emission(row, new, min(n, len(new)), logp) for row, new, n, logp in made]
        self._part([row for row in self.live.rows if row.finished is not None])
        return emissions

    def _wake(self, plan: RoundPlan) -> float:
        """Who drafts is told what the drafter has missed; the seconds that took."""
        started = time.perf_counter()
        self._at = self.sleep.drafting(self.rows, plan)
        if self._state is not None:
            self.sleep.wake(self._state, [self.rows[b] for b in self._at], self._greet)
        self._at = [b for b in self._at if self.rows[b].speculates]
        self.prefill_seconds += (woken := time.perf_counter() - started)
        return woken

    def _draft(self, turn: RoundInputs, plan: RoundPlan) -> DraftTree:
        """Of the rows that draft; the tree of all rows has nothing for the others."""
        if not self._at or self._state is None:
            return empty_tree(len(self.rows), self.device)
        part, plan = self.live.turn_of(turn, self._at), plan.of_rows(self._at)
        return spread(self._grow(self._state, part, plan), self._at, len(self.rows))

    def _grow(self, state: DraftState, turn: RoundInputs, plan: RoundPlan) -> DraftTree:
        assert self.drafter is not None, "a state belongs to a drafter"
        words, coupled = self.drafter.vocab, self.rule == "target-only"
        guide = turn.sampling.guide(turn.view)
        given = (turn.view, plan.budget, turn.sampling, turn.noise, words, coupled, guide)
        tree = self.policy.grow(GrowRequest(state, *given))
        assert tree.forced_BN is None or not self.drafter.lossless, "only approximate ones force"
        return fitted(plan.cut(tree))

    def _forward(self, view: RoundView, tree: DraftTree) -> tuple[DraftTree, LmOut]:
        """Feed root and nodes: fed token i is written at kept_len + i, its position is by depth.
        Early pruning may hand back a tree of which fewer nodes are valid."""
        if self._ahead is not None:  # the prefill has read the roots
            out, self._ahead = self._ahead, None
            return tree, out
        num_fed = tree.num_nodes + 1
        lengths = [len(tokens) - 1 for tokens in view.tokens]
        span = max(lengths) + num_fed
        same = lengths[0] if min(lengths) == max(lengths) else None
        self._cache().begin(view.slots, view.slot_B, view.kept_len_B, num_fed, span, same)
        position_BT = tree.position_BT(view.kept_len_B)
        if span > self.context:  # padding beyond the context: cut at commit
            position_BT = position_BT.clamp(max=self.context - 1)
        masks = self.target.lm.tree_masks(tree, view.kept_len_B, span)
        feed = Feed(tree.fed_token_BT(view.root_B), position_BT, masks, self.needs.taps)
        if self._early is not None and tree.num_nodes:
            return self._early.forward(feed, tree, self._cache())
        return tree, self.target.lm.run(feed, self._cache())

    def _commit(self, tree: DraftTree, verdict: Verdict) -> Committed:
        return commit(self.live.rows, tree, verdict, self.target)

    # -- pieces of a round ----------------------------------------------------------------------

    def _learn(self, state: DraftState, outcome: Outcome, spent: RoundSeconds) -> RoundSeconds:
        """The drafter sees what the round did to the rows that drafted, policies as much, or a
        round without drafts whole; learning counts as drafting."""
        started = time.perf_counter()
        seen = self.sleep.hear(state, outcome, self.rows, self._at)
        learned = time.perf_counter() - started
        self.draft_seconds += learned
        seconds = replace(spent, draft=spent.draft + learned, commit=learned)
        for learner in self._learners:
            learner.observe(seen, seconds)
        return seconds

    def _greet(self, row: Row) -> None:
        """The drafter reads a prompt: as the row joins, or if it may sleep when it first drafts."""
        if self._state is not None and row.speculates:
            meet(self._state, row)

    def _reads(self) -> bool:
        """Whether the drafter reads prompts as the target does, ahead of the first draft."""
        is_able = self._state is not None and self._state.reads_ahead
        rows = [*self.rows, *(reading.row for reading in self.admission.readings)]
        return is_able and (not self.sleep.is_allowed or self._planner.would_draft(rows))

    def _follow(self, row: Row, taps: Mapping[int, Tensor], first: int, last: int) -> None:
        if self._state is not None and row.speculates:
            self._state.ahead(row.slot, row.tokens, taps, first, last)
            row.observed_len = last

    def _part(self, rows: Sequence[Row]) -> None:
        """Rows leave: their slots are free."""
        for row in rows:
            self._end(row)
            self.admission.release(row)
        self.live.leave(rows)

    def _end(self, row: Row) -> None:
        if self._state is not None and row.is_met:
            self._state.end(row.slot)

    def _cache(self) -> SlotKV:
        assert self._kv is not None, "open() reserves the caches"
        return self._kv
