"""The engine: one round is draft -> target forward -> verify -> keep -> commit -> observe.

Batched from the first line: every row has its own length and its own acceptance, rows join and
leave between rounds, batch 1 is the case B = 1. Nothing between the draft and the commit reads a
tensor back to the host; the commit reads one small tensor. Plain decoding is the same round with
an empty tree.

Letters: B live rows, N drafted nodes, T = N + 1 fed tokens, P path length, D width, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from specctl.drafters.parts.base import (
    Budget,
    Drafter,
    DraftState,
    Needs,
    Outcome,
    RoundSeconds,
    RoundView,
    Space,
)
from specctl.drafters.parts.lm import Feed, LmOut
from specctl.drafters.parts.slots import SlotKV
from specctl.drafters.parts.tree import DraftTree, NodeKind, empty_tree, fitted
from specctl.recipes.errors import SpecctlError
from specctl.runtime.cut import cut
from specctl.runtime.early import pruning_of
from specctl.runtime.noise import RoundNoise
from specctl.runtime.policies.base import Growth, Learner, Policy, fresh
from specctl.runtime.policies.direct import Direct
from specctl.runtime.policies.length import LengthChooser
from specctl.runtime.prefill import prefill
from specctl.runtime.sampling import SamplingBatch
from specctl.runtime.session import Completion, Request, Row
from specctl.runtime.target import Target
from specctl.runtime.verify import Verdict, check_legal, default_rule, run_rule
from specctl.runtime.verify.forced import with_forced


class Engine:
    """Generates for many rows at once. Single-threaded; the only writer of rows and caches.

    `rule` is a verification rule by name or "auto": greedy rows are verified greedily, sampled
    rows by the rule that fits the policy's node kind. `chooser` picks the draft length of each
    round from measured costs (None = always the policy's own length).
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
    ) -> None:
        self.target, self.drafter, self.rule, self.chooser = target, drafter, rule, chooser
        self.device, self.context = target.device, target.spec.max_positions
        self.policy: Policy = fresh(policy) if policy is not None else Direct()
        self._early = pruning_of(target.lm, self.policy)
        self._learners = [each for each in (chooser, self.policy) if isinstance(each, Learner)]
        self.needs = drafter.needs() if drafter is not None else Needs()
        self.num_slots, self.max_len = num_slots, max_len
        self.rows: list[Row] = []
        self.waiting: deque[tuple[int, Request]] = deque()
        self.prefill_seconds = self.draft_seconds = self.verify_seconds = 0.0
        self._check_rule()
        if drafter is not None and self.needs.borrow:
            drafter.bind(target.borrowed())
        self._kv: SlotKV | None = None
        self._state: DraftState | None = None
        self._sampling: SamplingBatch | None = None
        self._unread: RoundNoise | None = None
        self._ahead: LmOut | None = None

    # -- requests -------------------------------------------------------------------------------

    def run(
        self,
        requests: Sequence[Request],
        on_round: Callable[[Row, tuple[int, ...]], None] | None = None,
    ) -> list[Completion]:
        """Completions in the order of the requests; `on_round(row, new)` after each round."""
        longest = max((len(r.tokens) + r.sampling.max_new_tokens for r in requests), default=1)
        self._open(min(longest, self.context))
        self.waiting.extend(enumerate(requests))
        done: list[Completion | None] = [None] * len(requests)
        while self.rows or self.waiting:
            if self.waiting and len(self.rows) < self.num_slots:
                self._admit()
            for row, new in self.step():
                if on_round is not None:
                    on_round(row, new)
                if row.finished is not None:
                    done[row.index] = row.completion()
        return [completion for completion in done if completion is not None]

    def _open(self, longest: int) -> None:
        """Reserve caches for `longest` positions; kept when they already suffice."""
        needed = longest + self.policy.nodes + 2
        if self.max_len is not None and self._kv is not None and self.max_len >= needed:
            return
        assert not self.rows, "caches cannot grow while rows are live"
        self.max_len = max(needed, self.max_len or 0)
        self._kv = self.target.new_kv(self.num_slots, self.max_len)
        if self.drafter is not None:
            space = Space(
                self.num_slots,
                self.max_len,
                self.policy.nodes,
                self.device,
                self.target.dtype,
                self.target.identity,
            )
            self._state = self.drafter.open(space)

    @torch.inference_mode()
    def _admit(self) -> None:
        """Give free slots to waiting requests and read their prompts: all but the last token, the
        root of the first round. If nothing can be drafted, that round's forward is part of it."""
        started = time.perf_counter()
        taken = {row.slot for row in self.rows}
        free = [slot for slot in range(self.num_slots) if slot not in taken]
        joined = []
        for slot in free[: len(self.waiting)]:
            index, request = self.waiting.popleft()
            self._check_prompt(request)
            joined.append(Row.of(index, slot, request))
        whole = self._state is None and not self.rows
        found = prefill(self.target, self._cache(), joined, self.needs.taps, whole)
        self._ahead = found.roots
        if self._state is not None:
            for row, taps in zip(joined, found.taps, strict=True):
                self._state.join(row.slot, row.request.conversation)
                self._state.start(row.slot, row.tokens, taps)
        self.rows = sorted([*self.rows, *joined], key=lambda row: row.slot)
        self._sampling = None
        self.prefill_seconds += time.perf_counter() - started

    # -- the round ------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[tuple[Row, tuple[int, ...]]]:
        """One round of every live row; returns each row with the tokens it emitted."""
        if not self.rows:
            return []
        started = time.perf_counter()
        view, sampling = self._view(), self._samplings()
        noise = self._noise(sampling)
        tree = self._draft(view, sampling, noise)
        drafted = time.perf_counter()
        tree, out = self._forward(view, tree)
        assert out.logits_BTV is not None
        scores_BTV = with_forced(sampling.scores(out.logits_BTV, tree, view), tree)
        verdict = run_rule(self._rule_for(tree, sampling), tree, scores_BTV, noise)
        if not tree.is_chain:
            self._cache().keep(view.slot_B, view.kept_len_B, verdict.path_BP)
        accepted, emitted = self._commit(tree, verdict)
        verified = time.perf_counter()
        self.draft_seconds += drafted - started
        self.verify_seconds += verified - drafted
        if self._state is not None:
            outcome = self._outcome(view, tree, verdict, out, accepted, emitted)
            self._learn(self._state, outcome, drafted - started, verified - drafted)
        return self._release(emitted)

    def _draft(self, view: RoundView, sampling: SamplingBatch, noise: RoundNoise) -> DraftTree:
        if self.drafter is None or self._state is None or (budget := self._budget()).depth <= 0:
            return empty_tree(len(view.slots), self.device)
        coupled = self.rule == "target-only"
        growth = Growth(self._state, view, budget, sampling, noise, self.drafter.vocab, coupled)
        tree = self.policy.grow(growth)
        assert tree.forced_BN is None or not self.drafter.lossless, (
            "only approximate drafters force"
        )
        return fitted(tree)

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

    def _commit(self, tree: DraftTree, verdict: Verdict) -> tuple[list[int], list[tuple[int, ...]]]:
        """The round's one host read; EOS, stop strings and limits cut here, in token order."""
        packed = verdict.next_token_B[:, None]
        if tree.num_nodes:
            node_BP = (verdict.path_BP[:, 1:] - 1).clamp(min=0)
            path_BP = tree.token_BN.gather(1, node_BP)
            counts_B2 = torch.stack([verdict.num_accepted_B, tree.valid_BN.sum(1)], dim=1)
            packed = torch.cat([packed, counts_B2, path_BP], dim=1)
        accepted, emitted = [], []
        for row, (next_token, *rest) in zip(self.rows, packed.tolist(), strict=True):
            num_accepted, num_drafted, *path = rest or (0, 0)
            kept, row.finished = cut(row, [*path[:num_accepted], next_token], self.target)
            row.tokens.extend(kept)
            row.kept_len = len(row.tokens) - 1
            row.num_rounds += 1
            used = min(num_accepted, len(kept))
            row.stats.count(num_drafted, tree.depth, used, len(kept))
            accepted.append(num_accepted)
            emitted.append(tuple(kept))
        return accepted, emitted

    # -- pieces of a round ----------------------------------------------------------------------

    def _view(self) -> RoundView:
        slots, texts = tuple(row.slot for row in self.rows), tuple(row.tokens for row in self.rows)
        host = [slots, [text[-1] for text in texts], [row.kept_len for row in self.rows]]
        slot_B, root_B, kept_len_B = torch.tensor(host, device=self.device).unbind()
        prompts = tuple(row.prompt_len for row in self.rows)
        return RoundView(slots, slot_B, root_B, kept_len_B, texts, prompts)

    def _samplings(self) -> SamplingBatch:
        if self._sampling is None:
            samplings = [row.request.sampling for row in self.rows]
            self._sampling = SamplingBatch(samplings, self.target.spec.vocab_size, self.device)
        return self._sampling

    def _noise(self, sampling: SamplingBatch) -> RoundNoise:
        """This round's noise; greedy rows read none, so theirs is made once."""
        if not sampling.all_greedy:
            return self._make_noise()
        if self._unread is None:
            self._unread = self._make_noise()
        return self._unread

    def _make_noise(self) -> RoundNoise:
        return RoundNoise(
            [row.request.sampling.seed for row in self.rows],
            [row.num_rounds for row in self.rows],
            [row.kept_len for row in self.rows],
            self.device,
        )

    def _budget(self) -> Budget:
        """No deeper than the row with the most room can use: its last token is the bonus."""
        room = max(min(row.room, self.context - len(row.tokens)) for row in self.rows) - 1
        depth = min(self.policy.depth, room)
        if self.chooser is not None:
            depth = min(depth, self.chooser.length(len(self.rows)))
        return Budget(nodes=self.policy.nodes, depth=max(depth, 0))

    def _outcome(
        self,
        view: RoundView,
        tree: DraftTree,
        verdict: Verdict,
        out: LmOut,
        accepted: list[int],
        emitted: list[tuple[int, ...]],
    ) -> Outcome:
        taps = {tap: _along(value, verdict.path_BP, tree) for tap, value in out.taps.items()}
        topk_BTK, logp_BTK = None, None
        listens = self._state is not None and self._state.is_listening
        if self.needs.topk and listens and out.logits_BTV is not None:
            logits_BTK, topk_BTK = out.logits_BTV.topk(self.needs.topk, dim=-1)
            if self.needs.topk_logp:
                logp_BTK = logits_BTK.float() - out.logits_BTV.float().logsumexp(-1, keepdim=True)
        return Outcome(
            view,
            tree,
            verdict.path_BP,
            tuple(accepted),
            verdict.next_token_B,
            tuple(emitted),
            tuple(row.finished for row in self.rows),
            taps,
            topk_BTK,
            logp_BTK,
        )

    def _learn(
        self, state: DraftState, outcome: Outcome, draft_seconds: float, verify_seconds: float
    ) -> None:
        """Drafter and policies see what the round did; learning counts as drafting."""
        started = time.perf_counter()
        state.observe(outcome)
        learned = time.perf_counter() - started
        self.draft_seconds += learned
        seconds = RoundSeconds(draft_seconds + learned, verify_seconds, learned)
        for learner in self._learners:
            learner.observe(outcome, seconds)

    def _release(self, emitted: list[tuple[int, ...]]) -> list[tuple[Row, tuple[int, ...]]]:
        """Hand out the round's tokens; finished rows free their slots."""
        handed = list(zip(self.rows, emitted, strict=True))
        if any(row.finished is not None for row in self.rows):
            for row in self.rows:
                if row.finished is not None and self._state is not None:
                    self._state.end(row.slot)
            self.rows = [row for row in self.rows if row.finished is None]
            self._sampling = None
        return handed

    # -- configuration --------------------------------------------------------------------------

    def _check_rule(self) -> None:
        """An illegal pair of rule and node kind is refused before anything is drafted."""
        if self.rule in ("auto", "greedy") or self.drafter is None:
            return
        kind = self.policy.kind(sampled=self.rule != "target-only")
        check_legal(self.rule, kind, self.policy.is_chain)

    def _rule_for(self, tree: DraftTree, sampling: SamplingBatch) -> str:
        if sampling.all_greedy:
            return "greedy"
        if self.rule in ("auto", "greedy") or tree.num_nodes == 0:
            return "target-only" if tree.num_nodes == 0 else default_rule(tree.kind, tree.is_chain)
        return self.rule

    def _check_prompt(self, request: Request) -> None:
        if not 0 < len(request.tokens) < self.context:
            raise SpecctlError(
                "the prompt does not fit the target's context",
                found=f"{len(request.tokens):,} tokens",
                expected=f"1 to {self.context - 1:,} tokens",
                do="shorten the prompt, or choose a target with a longer context",
            )

    def _cache(self) -> SlotKV:
        assert self._kv is not None, "run() opens the caches"
        return self._kv


def _along(value_BTD: Tensor, path_BP: Tensor, tree: DraftTree) -> Tensor:
    """[B, P, D]: rows of `value` at the path's fed tokens."""
    if tree.is_chain:
        return value_BTD[:, : path_BP.shape[1]]
    index_BP1 = path_BP.clamp(min=0)[:, :, None]
    return value_BTD.gather(1, index_BP1.expand(-1, -1, value_BTD.shape[-1]))


def verification_of(
    rule: str, drafter: Drafter | None, policy: Policy, sampled: bool
) -> Mapping[str, str]:
    """The mark that every result carries: lossless or approximate, and by which rule."""
    lossless = "lossless" if drafter is None or drafter.lossless else "approximate"
    if drafter is None:
        name = "plain"
    elif not sampled:
        name = "greedy"
    else:
        kind = policy.kind(sampled=rule != "target-only")
        name = default_rule(kind, policy.is_chain) if rule in ("auto", "greedy") else rule
    return {"class": lossless, "rule": name}


__all__ = ["Engine", "NodeKind", "verification_of"]
