"""The engine: one round is draft -> target forward -> verify -> keep -> commit -> learn.

Batched from the first line: every row has its own length and its own acceptance, rows join and
leave between rounds, batch 1 is the case B = 1. Nothing between the draft and the commit reads a
tensor back to the host; the commit reads one small tensor. Plain decoding is the same round with
an empty tree.
Letters: B rows, N nodes, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specctl.core.drafter import Drafter, Needs, Outcome, RoundSeconds, Space
from specctl.core.errors import NumbersError, RowsError
from specctl.core.tree import DraftTree
from specctl.drafters.team import Team
from specctl.models.not_finite import adapter_numbers, not_numbers
from specctl.models.torch_threads import around_steps
from specctl.runtime.batching.base import Batching, Choosing
from specctl.runtime.engine.commit import commit, outcome_of
from specctl.runtime.engine.device_clock import mark, seconds_between, settle
from specctl.runtime.engine.lazy_drafter import LazyDrafter
from specctl.runtime.engine.peaks import BadRows, Peaks, nothing_left
from specctl.runtime.engine.reflection import reflection_of
from specctl.runtime.engine.request import Completion, Emission, Request, Row
from specctl.runtime.engine.round import Round
from specctl.runtime.engine.round_drafter import PolicyDrafter, RoundDrafter
from specctl.runtime.engine.row_features import add_features
from specctl.runtime.engine.scheduler import RoundPlanner, Scheduler
from specctl.runtime.engine.target_reader import TargetReader, shares_kv
from specctl.runtime.engine.team_drafter import TeamDrafter, with_drafts_of
from specctl.runtime.policies.base import Learner, Policy, fresh
from specctl.runtime.policies.direct import Direct
from specctl.runtime.policies.length import LengthChooser
from specctl.runtime.sampling.gumbel_max import best_token
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.mixture import alone
from specctl.runtime.verify import Verdict, run_rule
from specctl.runtime.verify.choice import check_rule, native, rule_for, sampling_rule
from specctl.runtime.verify.forced import with_forced
from specctl.runtime.verify.relaxed import Relaxation, relaxation


class Engine:
    """Generates for many rows at once. Single-threaded.

    `rule` is a verification rule by name or "auto": greedy rows are verified greedily, sampled
    rows by the rule that fits the policy's node kind; or a relaxed rule, which is approximate
    (verify/relaxed). `chooser` picks the draft length of each
    round from measured costs (None = always the policy's own length), `batching` that of every row.
    With a `prefill_chunk` no round reads more than so many prompt tokens of joining rows.
    `wrap_drafter` is put around what drafts, such as a `Guard`. `assumed_seconds` is given to those
    who learn from rounds for what each took, so that two runs draft alike (None: what it took).
    `features`: layers whose states are kept of rows that allow it (`Row.features`).
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
        wrap_drafter: Callable[[RoundDrafter], RoundDrafter] | None = None,
        assumed_seconds: RoundSeconds | None = None,
        features: tuple[int, ...] = (),
    ) -> None:
        if target.mixture is not None and target.beside:
            raise alone(target.mixture)
        target.lm.check_unchanged()
        self.target, self.drafter, self.rule, self.batching = target, drafter, rule, batching
        self.assumed_seconds = assumed_seconds
        self._choosing = batching if isinstance(batching, Choosing) else None
        self.context, self.num_slots, self.max_len = target.spec.max_positions, num_slots, max_len
        self.policy: Policy = fresh(policy) if policy is not None else Direct()
        self._usual_rule = sampling_rule(rule, drafter, self.policy)
        self._relaxed = None if drafter is None else relaxation(rule)
        self.needs, self._shares_kv = Needs(), False
        if drafter is not None:
            needs, self._shares_kv = drafter.needs(), shares_kv(drafter, self.policy)
            self.needs = needs.without_copy() if self._shares_kv else needs
        reflection = reflection_of(target, self._relaxed)
        taps = self.needs.taps
        self.reader = TargetReader(target, self.policy, taps, drafter, reflection, features)
        self._read_again = 0  # positions behind the drafts
        if reflection is not None:
            self._read_again = self.policy.nodes + len(reflection.prompt)
        check_rule(rule, drafter, self.policy)
        if drafter is not None and self.needs.borrow:
            drafter.bind(target.borrowed())
        self.drafting = RoundDrafter()
        if drafter is not None:
            learners = [each for each in (chooser, self.policy) if isinstance(each, Learner)]
            kind = TeamDrafter if isinstance(drafter, Team) else PolicyDrafter
            inner: RoundDrafter = kind(drafter, self.policy, learners, native(rule))
            inner = wrap_drafter(inner) if wrap_drafter is not None else inner
            self.drafting = LazyDrafter(inner, self.policy.nodes + 1, self.needs)
        who = (self.policy, chooser, batching, self.drafting)
        follows = self._usual_rule != "target-only", self._relaxed is not None
        planner = RoundPlanner(self.context, *who, *follows)
        self.scheduler = Scheduler(self.reader, planner, num_slots, prefill_chunk)
        self.draft_seconds = self.verify_seconds = self.catch_up_seconds = 0.0
        self._numbers: NumbersError | None = None  # why the target's logits were none, once known
        self._space: Space | None = None
        self._is_stained = False  # the drafter may have read what was no number

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
            for emission in self.step():
                row = emission.row
                if on_round is not None:
                    on_round(row, emission.tokens)
                if row.finished is not None:
                    done[row.index] = row.completion()
        return [done[index] for index in range(len(requests))]

    def open(self, longest: int) -> None:
        """Reserve caches for `longest` positions a row; kept when they already suffice."""
        needed = longest + self.policy.nodes + 2 + self._read_again
        if self.max_len is not None and self.reader.is_open and self.max_len >= needed:
            return
        assert not self.rows, "caches cannot grow while rows are active"
        self.max_len = max(needed, self.max_len or 0)
        self.reader.open(self.num_slots, self.max_len)
        self.scheduler.forget_prefixes()
        size = (self.num_slots, self.max_len, self.policy.nodes, self.target.device)
        shared = self.reader.kv if self._shares_kv else None
        about = self.target.dtype, self.target.identity, shared, self.target.is_recorded
        vision = self.target.vision
        self._space = Space(*size, *about, unsaid=() if vision is None else vision.unsaid)
        self.drafting.open(self._space)

    def submit(self, index: int, request: Request) -> None:
        """Put a request in the queue; `index` names it for as long as it lives."""
        self.scheduler.submit(index, with_drafts_of(self.drafter, request))

    @torch.inference_mode()
    def cancel(self, index: int) -> bool:
        """Forget a request wherever it stands, between rounds; the other rows notice nothing."""
        return self.scheduler.cancel(index)

    @property
    def is_busy(self) -> bool:
        return self.scheduler.is_busy

    @property
    def rows(self) -> Sequence[Row]:
        """The active rows."""
        return self.scheduler.rows

    @property
    def prefill_seconds(self) -> float:
        """For prompts, and for what the drafter read of rows that it had not followed."""
        return self.scheduler.prefill_seconds + self.catch_up_seconds

    # -- the round ------------------------------------------------------------------------------

    @torch.inference_mode()
    @around_steps()
    def step(self) -> list[Emission]:
        """One round of every active row: what each of them emitted. Raises `RowsError` for rows
        that cannot be decoded, which leave; the others are where they were."""
        self._clean()
        round = self.scheduler.next_round()  # active rows, sampling, noise, plan
        if round is None:
            return []
        started, began = time.perf_counter(), mark(self.target.device)
        tree = self.drafting.draft(round)
        if self._choosing is not None:
            tree = self._choosing.chosen(tree)
        drafted = mark(self.target.device)
        tree, out = self.reader.read(round, tree)
        assert out.logits_BTV is not None
        given_BTV = out.logits_BTV.float()
        logits_BTV = round.sampling.processed(given_BTV, tree, round.view)
        peaks = Peaks.of(given_BTV, logits_BTV, tree)
        logits_BTV = peaks.without_voids(logits_BTV)
        verdict = self._verify(round, tree, logits_BTV)
        self.reader.keep(round, tree, verdict)
        try:
            done = commit(round, tree, verdict, logits_BTV, self.target, peaks)
        except BadRows as bad:
            raise self._failed(round, tree, bad, peaks) from None
        self.reader.advance(round, tree, verdict)
        self.scheduler.extend_rows(done)
        waited, verified = self.drafting.catch_up_seconds, time.perf_counter()
        drafting = seconds_between(began, drafted)
        planned = started - round.began
        took = planned + drafting - waited, verified - started - drafting
        spent = RoundSeconds(*took, 0.0, waited, is_free=round.roots is not None)
        outcome = outcome_of(round, tree, verdict, out, done, self.drafting.needed())
        if self.reader.features:
            add_features([row.features for row in round.rows], outcome)
        self._learn(outcome, out.logits_BTV, spent, verified)
        return self.scheduler.retire(done)

    def _failed(self, round: Round, tree: DraftTree, bad: BadRows, peaks: Peaks) -> RowsError:
        """Why rows cannot be decoded. They leave, and nothing is kept of what they cached."""
        places = bad.numbers or bad.banned
        rows = [round.rows[b] for b in places]
        indices = tuple(row.index for row in rows)
        for row in rows:
            if bad.numbers:
                self.reader.kv.clear(row.slot)
                row.kept_len, self._is_stained = 0, True
            self.scheduler.cancel(row.index)
        if not bad.numbers:
            return nothing_left(indices)
        b, at = places[0], peaks.first_bad(places[0])
        adapters = [row.request.adapter for row in rows]
        if None not in adapters:  # the target alone may well have numbers
            return adapter_numbers(adapters, peaks.logits_BTV[b, at], indices)
        if self._numbers is None:
            tokens = [*round.view.tokens[b], *tree.path_to(b, at)]
            model, name = self.target.lm, self.target.name
            self._numbers = not_numbers(model, name, tokens, peaks.logits_BTV[b, at])
        return self._numbers.of_rows(indices)

    def _clean(self) -> None:
        """Have the drafter begin anew once no row is left that it drafts for: masks do not keep
        NaN in its caches from other rows."""
        if self._is_stained and not (self.rows or self.scheduler.prefilling):
            assert self._space is not None, "open() reserves the caches"
            self.drafting.open(self._space)
            self._is_stained = False

    def _verify(self, round: Round, tree: DraftTree, logits_BTV: Tensor) -> Verdict:
        """Which drafted tokens are accepted, and the token behind them."""
        scores_BTV = with_forced(round.sampling.distribution(logits_BTV), tree)
        if self._relaxed is not None and tree.num_nodes:
            return self._relaxed_verdict(self._relaxed, round, tree, logits_BTV, scores_BTV)
        rule = rule_for(self.rule, tree, round.sampling.all_greedy, self._usual_rule)
        noise = round.noise if tree.is_chain else round.noise.counted_over(tree.valid_BN)
        return run_rule(rule, tree, scores_BTV, noise)

    def _relaxed_verdict(
        self,
        relaxed: Relaxation,
        round: Round,
        tree: DraftTree,
        logits_BTV: Tensor,
        scores_BTV: Tensor,
    ) -> Verdict:
        """What the lossless rule would choose, and what may stand beside it."""
        if round.sampling.all_greedy:
            choice_BT = best_token(scores_BTV)
        elif relaxed.rule.judges is not None:
            return relaxed.rule.judges(tree, scores_BTV, round.noise, relaxed.values)
        else:
            depth_BT = None if tree.is_chain else tree.depth_BT()
            choice_BT = round.noise.target_draw_BT(scores_BTV, depth_BT)
        return relaxed.verdict(tree, choice_BT, round.sampling.softened(logits_BTV))

    def _learn(
        self, outcome: Outcome, logits_BTV: Tensor, spent: RoundSeconds, began: float
    ) -> None:
        """Whoever drafts or plans sees what the round did; observing counts as drafting."""
        self.drafting.observe(outcome, logits_BTV)
        settle(self.target.device)
        learned = time.perf_counter() - began
        seconds = replace(spent, draft=spent.draft + learned, commit=learned)
        given = self.assumed_seconds or seconds
        self.drafting.learn(outcome, given)
        if self.batching is not None:
            self.batching.observe(outcome, given)
        self.draft_seconds += seconds.draft
        self.verify_seconds += seconds.verify
        self.catch_up_seconds += seconds.wake
