"""PEARL (arXiv 2408.11850): the drafter goes on drafting while the target verifies.

Each round two things happen at once: the target reads the newest committed token and the drafts
behind it that wait for a verdict, and the drafter draws `gamma` more. Then the waiting drafts and
the first new one are verified (the target has just given their distributions). With nothing waiting
this is the paper's pre-verification, which tests the first token of a draft before the rest exists
for the target; with drafts waiting it is post-verification. While everything is accepted the
drafter never stops, so runs of accepted tokens are not bounded by gamma; a rejection drops what is
waiting and rolls both caches back. Verification is token-level speculative sampling, or greedy:
lossless.

Drafting costs nothing where target and drafter have devices (or cores) of their own; where they
share them, both slow down. Two threads: torch releases the interpreter while it computes.

Letters: B = 1 row, N drafted tokens, P waiting drafts, V target vocabulary, K draft vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from specctl.core.drafter import Budget, Drafter, DraftState, Outcome, RoundView, Space, StepState
from specctl.core.errors import IncompatibleError, RecipeError
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import LmOut
from specctl.core.tree import DraftTree, NodeKind, QRows, chain_parent, chain_tree, empty_tree
from specctl.models.not_finite import not_numbers
from specctl.runtime.engine.commit import cut
from specctl.runtime.engine.device_clock import settle
from specctl.runtime.engine.peaks import Peaks, nothing_left
from specctl.runtime.engine.prefill import prefill
from specctl.runtime.engine.request import Completion, Request, Row, check_fits
from specctl.runtime.policies.base import GrowRequest, Policy
from specctl.runtime.policies.chain import Chain
from specctl.runtime.sampling.noise import RoundNoise
from specctl.runtime.sampling.sampling import SamplingBatch
from specctl.runtime.target.target import Target
from specctl.runtime.verify import run_rule

LONGEST_RUN = 96  # drafted tokens after which both sides meet, whatever was accepted


@dataclass(slots=True)
class DraftRun:
    """Drafts since the drafter's last root. `tokens` and `distributions` of all of them, of which
    the last `waiting` have no verdict; `fed` are the target's outputs since then."""

    growth: GrowRequest | None = None
    tokens: list[int] = field(default_factory=list)
    distributions: list[Tensor | None] = field(default_factory=list)
    waiting: int = 0
    emitted: list[int] = field(default_factory=list)
    fed: list[LmOut] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DraftedAhead:
    """What the drafter's thread brought: tokens, the distributions they were drawn from, its
    seconds."""

    growth: GrowRequest | None
    tokens: list[int] = field(default_factory=list)
    distributions: list[Tensor | None] = field(default_factory=list)
    seconds: float = 0.0


class Pearl:
    """Generates one row at a time, drafting and verifying in two threads. `policy` is a chain whose
    length is gamma. Counts as an engine does; `waited_seconds` is what the target spent waiting for
    the drafter, `run_lengths` the accepted tokens of every run that ended in a rejection."""

    def __init__(self, target: Target, drafter: Drafter, policy: Policy) -> None:
        if not isinstance(policy, Chain) or policy.stopper is not None:
            raise RecipeError(
                "drafting in parallel needs a chain of fixed length",
                where="serve.parallel",
                found=type(policy).__name__,
                expected="policy chain without a stop rule",
                do="--set serve.policy=chain --length 4, or leave parallel out",
            )
        if drafter.needs().topk:
            raise RecipeError(
                "this drafter cannot draft while the target verifies",
                where="serve.parallel",
                found=f"{drafter.family}, which learns from every token that is verified",
                expected="a drafter that reads the text or the target's features",
                do="leave parallel out",
            )
        if target.lm.state_bytes:
            raise IncompatibleError(
                "drafting in parallel needs a target whose cache can be rolled back",
                found=f"{target.name}, with recurrent states",
                expected="a target of attention alone",
                do="leave parallel out",
            )
        target.lm.check_unchanged()
        self.target, self.drafter, self.policy = target, drafter, policy
        self.gamma, self.needs = policy.length, drafter.needs()
        self.prefill_seconds = self.draft_seconds = self.verify_seconds = self.waited_seconds = 0.0
        self.run_lengths: list[int] = []
        if self.needs.borrow:
            drafter.bind(target.borrowed())

    def run(
        self,
        requests: Sequence[Request],
        on_round: Callable[[Row, tuple[int, ...]], None] | None = None,
    ) -> list[Completion]:
        """Completions in the order of the requests; `on_round(row, new)` after each round."""
        for request in requests:
            check_fits(request, self.target.spec.max_positions)
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafter") as pool:
            done = []
            for index, request in enumerate(requests):
                session = PearlRow(self, Row.of(index, 0, request), pool)
                for new in session.rounds():
                    if on_round is not None:
                        on_round(session.row, new)
                done.append(session.row.completion())
        return done


class PearlRow:
    """One row's caches and its run of drafts. One writer: the main thread; the drafter's thread
    touches the drafter's state only, and only between submit and result."""

    def __init__(self, pearl: Pearl, row: Row, pool: ThreadPoolExecutor) -> None:
        self.pearl, self.row, self.pool = pearl, row, pool
        target, device = pearl.target, pearl.target.device
        longest = len(row.tokens) + row.request.sampling.max_new_tokens
        space = Space(
            1,
            min(longest, target.spec.max_positions) + 2 * LONGEST_RUN + 2,
            LONGEST_RUN + pearl.gamma,
            device,
            target.dtype,
            target.identity,
        )
        self.kv: SlotKV = target.new_kv(1, space.max_len)
        self.state: DraftState = pearl.drafter.open(space)
        self.sampling = SamplingBatch([row.request.sampling], target.spec.vocab_size, device)
        self.slot_B = torch.zeros(1, dtype=torch.long, device=device)
        self.now = DraftRun()

        self.learning: Future[None] | None = None
        is_cuda = device.type == "cuda"
        self.lane = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]

    def rounds(self) -> Iterator[tuple[int, ...]]:
        """The tokens of each round, until the row ends."""
        began = time.perf_counter()
        self._start()
        self.pearl.prefill_seconds += time.perf_counter() - began
        while self.row.finished is None:
            yield self._round()
        self._learned()

    @torch.inference_mode()
    def _start(self) -> None:
        taps = prefill(self.pearl.target, self.kv, self.row, self.pearl.needs.taps)
        self.state.start(0, self.row.tokens, taps)
        if self.lane is not None:
            self.lane.wait_stream(torch.cuda.current_stream(self.slot_B.device))

    @torch.inference_mode()
    def _round(self) -> tuple[int, ...]:
        row, now = self.row, self.now
        device, seed = self.slot_B.device, row.request.sampling.seed
        noise = RoundNoise([seed], [row.num_rounds], [row.kept_len], device)
        view = self._view()
        waiting = now.tokens[len(now.tokens) - now.waiting :]
        count = self._count()
        settle(device)  # the other stream reads what was made on this one
        drafting = self.pool.submit(self._draft, view, noise, count) if count else None
        began = time.perf_counter()
        out = self._forward(view, waiting)
        verified = time.perf_counter()
        drafted = drafting.result() if drafting is not None else DraftedAhead(now.growth)
        self._learned()
        ended = time.perf_counter()
        self.pearl.verify_seconds += verified - began
        self.pearl.waited_seconds += ended - verified
        self.pearl.draft_seconds += drafted.seconds
        candidates = [*waiting, *drafted.tokens[:1]]
        distributions = [
            *now.distributions[len(now.distributions) - now.waiting :],
            *drafted.distributions[:1],
        ]
        accepted, next_token = self._verify(view, out, candidates, distributions, noise)
        now.fed.append(out)
        return self._commit(view, drafted, candidates, accepted, next_token)

    def _view(self) -> RoundView:
        row = self.row
        root_B = torch.full_like(self.slot_B, row.tokens[-1])
        kept_B = torch.full_like(self.slot_B, row.kept_len)
        return RoundView((0,), self.slot_B, root_B, kept_B, (row.tokens,), (row.prompt_len,))

    def _count(self) -> int:
        """How many tokens to draft now: none beyond what the row may still emit."""
        row, now = self.row, self.now
        if len(now.tokens) + self.pearl.gamma > LONGEST_RUN:
            return 0
        room = min(row.room, self.pearl.target.spec.max_positions - len(row.tokens))
        return max(0, min(self.pearl.gamma, room - now.waiting))

    # -- the drafter's thread -------------------------------------------------------------------

    def _on_lane(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.lane is None else torch.cuda.stream(self.lane)

    @torch.inference_mode()
    def _draft(self, view: RoundView, noise: RoundNoise, count: int) -> DraftedAhead:
        """`count` more tokens behind those that wait; their host copy ends the lane's work."""
        began, now, state = time.perf_counter(), self.now, self.state
        assert isinstance(state, StepState)
        tokens: list[Tensor] = []
        distributions: list[Tensor | None] = []
        with self._on_lane():
            if now.growth is None:
                budget, vocab = Budget(count, count), self.pearl.drafter.vocab
                growth = GrowRequest(state, view, budget, self.sampling, noise, vocab)
                logits_BK = state.root(view)
            else:
                growth = replace(now.growth, noise=noise)
                logits_BK = self._expand(state, now.tokens[-1], len(now.tokens) - 1)
            for step in range(count):
                row_B, distribution_BK = self.pearl.policy.pick(growth, logits_BK, step)
                tokens.append(growth.target_ids(row_B))
                distributions.append(distribution_BK)
                if step + 1 < count:
                    logits_BK = self._expand(state, tokens[-1], len(now.tokens) + step)
            found = torch.cat(tokens).tolist()
        return DraftedAhead(growth, found, distributions, time.perf_counter() - began)

    def _expand(self, state: StepState, token: Tensor | int, index: int) -> Tensor:
        """Logits behind token number `index` of the run."""
        parent_11 = chain_parent(index, 1, self.slot_B.device)
        token_11 = torch.full_like(parent_11, token) if isinstance(token, int) else token[:, None]
        return state.expand(token_11, parent_11)[:, 0]

    @torch.inference_mode()
    def _observe(self, outcome: Outcome) -> None:
        with self._on_lane():
            self.state.observe(outcome)
            settle(self.slot_B.device)  # what it read may be freed now

    def _learned(self) -> None:
        """Wait until the drafter has taken in the last rejection."""
        if self.learning is not None:
            self.learning.result()
            self.learning = None

    # -- the target's thread --------------------------------------------------------------------

    def _forward(self, view: RoundView, waiting: Sequence[int]) -> LmOut:
        """Feed the newest committed token and the drafts that wait."""
        target, kept, num_fed = self.pearl.target, self.row.kept_len, len(waiting) + 1
        ids_BT = torch.tensor([[self.row.tokens[-1], *waiting]], device=target.device)
        position_BT = view.kept_len_B[:, None] + torch.arange(num_fed, device=target.device)
        self.kv.begin((0,), self.slot_B, view.kept_len_B, num_fed, kept + num_fed, kept)
        masks = target.lm.chain_masks(view.kept_len_B, num_fed, kept + num_fed)
        return target.lm.forward(ids_BT, position_BT, masks, self.kv, self.pearl.needs.taps)

    def _verify(
        self,
        view: RoundView,
        out: LmOut,
        candidates: Sequence[int],
        distributions: Sequence[Tensor | None],
        noise: RoundNoise,
    ) -> tuple[int, int | None]:
        """How many candidates are accepted, and the token behind them (None: all are banned). The
        target has not read the newest candidate: the distribution behind it is unknown, and the
        token drawn there is not used."""
        assert out.logits_BTV is not None
        num_read = out.logits_BTV.shape[1] - 1
        tree = self._tree(candidates, distributions)
        read = self._tree(candidates[:num_read], distributions[:num_read])
        given_BTV = out.logits_BTV.float()
        processed_BTV = self.sampling.processed(given_BTV, read, view)
        peaks = Peaks.of(given_BTV, processed_BTV, read)
        scores_BTV = self.sampling.distribution(peaks.without_voids(processed_BTV))
        if len(candidates) > num_read:
            scores_BTV = torch.cat([scores_BTV, scores_BTV[:, -1:]], dim=1)
            peaks = peaks.with_unread()
        sampled = "chain" if candidates else "target-only"
        rule = "greedy" if self.sampling.all_greedy else sampled
        verdict = run_rule(rule, tree, scores_BTV, noise)
        packed_BX = torch.stack([verdict.num_accepted_B, verdict.next_token_B], dim=1)
        found = peaks.read_with(packed_BX, verdict)
        if found.is_bad(0, num_read + 1):
            target, at, known = self.pearl.target, peaks.first_bad(0), self.row.tokens
            tokens = [*known, *read.path_to(0, at)]
            raise not_numbers(target.lm, target.name, tokens, given_BTV[0, at], (self.row.index,))
        (num_accepted, next_token), *_ = found.packed
        return num_accepted, None if found.is_banned(0) else next_token

    def _tree(
        self, tokens: Sequence[int], distributions: Sequence[Tensor | None] = ()
    ) -> DraftTree:
        device, vocab = self.slot_B.device, self.pearl.drafter.vocab
        if not tokens:
            return empty_tree(1, device)
        token_BN = torch.tensor([list(tokens)], device=device)
        known = [distribution for distribution in distributions if distribution is not None]
        kind, q = NodeKind.POINT, None
        if known:
            prob_BTK = torch.stack([*known, torch.zeros_like(known[0])], dim=1)
            kind, q = NodeKind.IID, QRows(prob_BTK, None if vocab is None else vocab.ids_K)
        return chain_tree(token_BN, torch.ones_like(token_BN, dtype=torch.bool), kind, q)

    def _commit(
        self,
        view: RoundView,
        drafted: DraftedAhead,
        candidates: Sequence[int],
        accepted: int,
        next_token: int | None,
    ) -> tuple[int, ...]:
        row, now = self.row, self.now
        goes_on = bool(drafted.tokens) and accepted == len(candidates)
        last = [] if goes_on or next_token is None else [next_token]
        kept, row.finished = cut(row, [*candidates[:accepted], *last], self.pearl.target)
        if next_token is None and not goes_on and row.finished is None:
            raise nothing_left((row.index,))
        row.tokens.extend(kept)
        row.kept_len = len(row.tokens) - 1
        row.num_rounds += 1
        used = min(accepted, len(kept))
        is_rejected = used < len(candidates) and len(kept) > accepted
        row.stats.count(len(drafted.tokens), used, len(kept), is_rejected)
        now.emitted.extend(kept)
        now.growth = drafted.growth
        now.tokens.extend(drafted.tokens)
        now.distributions.extend(drafted.distributions)
        now.waiting = len(drafted.tokens) - 1
        if row.finished is None and not goes_on:
            self.pearl.run_lengths.append(len(now.emitted) - 1)
            outcome = self._outcome(view)
            settle(self.slot_B.device)
            self.learning = self.pool.submit(self._observe, outcome)
            self.now = DraftRun()
        return tuple(kept)

    def _outcome(self, view: RoundView) -> Outcome:
        """The whole run as one round, as the drafter's memory expects it."""
        now, device = self.now, self.slot_B.device
        accepted, root = len(now.emitted) - 1, view if now.growth is None else now.growth.view
        tree = self._tree(now.tokens)
        path = [*range(accepted + 1), *(-1,) * (len(now.tokens) - accepted)]
        taps = {
            tap: torch.cat([out.taps[tap] for out in now.fed], dim=1)[:, : accepted + 1]
            for tap in self.pearl.needs.taps
        }
        return Outcome(
            root,
            tree,
            torch.tensor([path], device=device),
            (accepted,),
            torch.full_like(self.slot_B, now.emitted[-1]),
            (tuple(now.emitted),),
            (None,),
            taps,
        )
