"""The service: asks of many users meet the one thread that owns the engine.

Event loops put asks and cancellations into an inbox; the engine thread takes them between two
rounds, does a round, and posts every piece back to the loop that its ticket belongs to, one call
per loop and round. Nothing else is shared. An ask is refused at the door (queue full, too long,
not ready) or it is answered: what fails afterwards fails for as few rows as possible. How many rows
of which length the caches are reserved for is settled before anybody asks.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace

from specctl.core.drafter import Drafter, Space
from specctl.core.errors import ResourceError, SpecctlError
from specctl.core.forward.slot_state import PENDING
from specctl.core.kv_cache import SlotKV
from specctl.core.messages.sizes import size_text
from specctl.runtime.batching.base import Batching
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.guard import Guard, place_of
from specctl.runtime.engine.request import Request, TokenLogprob
from specctl.runtime.engine.row_features import DTYPE, layers_kept
from specctl.runtime.engine.target_reader import shares_kv
from specctl.runtime.generate import default_policy
from specctl.runtime.policies.base import Policy
from specctl.runtime.sampling.sampling import Sampling, SamplingBatch
from specctl.runtime.target.placement.device import available_bytes
from specctl.runtime.target.target import Target
from specctl.runtime.verify.choice import check_rule
from specctl.server.engine_thread.contract import (
    Busy,
    Counters,
    Finished,
    GenerateRequest,
    Piece,
    Serving,
    Status,
    Ticket,
    TooLong,
    Unavailable,
)
from specctl.server.engine_thread.exchange import Drafting, Exchange
from specctl.server.engine_thread.request_queue import RequestQueue
from specctl.server.engine_thread.worker import Worker
from specctl.server.requests.limits import Limits

LOG = logging.getLogger("specctl.server")
USUAL = 4096  # positions per row, where nobody says how many
WARM_UP = 128  # tokens read before the first ask: more than forwards for few tokens take (96)


@dataclass(frozen=True, slots=True)
class Capacity:
    """`slots` rows of `context` tokens (prompt and answer), `slot_bytes` of memory for each, of
    which the drafter takes `drafter_bytes`; and what it may take beside them, `shared_bytes`."""

    slots: int
    context: int
    slot_bytes: int
    drafter_bytes: int = 0
    shared_bytes: int = 0


def room_for(
    target: Target,
    policy: Policy,
    limits: Limits,
    drafter: Drafter | None = None,
    keeps_features: bool = False,
) -> Capacity:
    """At most `max_batch` slots, as many as the memory holds: the target's cache and what the
    drafter keeps of a row, with the features that are kept for training, beside what it keeps for
    all of them. ResourceError names both where not even one fits."""
    spec = target.spec
    context = min(spec.max_positions, limits.max_len or USUAL)
    length = context + policy.nodes + 2
    entry = target.lm.kv_bytes
    # States twice: those of the row, and those behind its prompt, for the next turn. What nodes
    # would add to them waits for the round's end, what prompt tokens do for that of their forward.
    waiting = target.lm.pending_bytes
    cache, kept = entry * length + 2 * target.lm.state_bytes + waiting * (policy.nodes + 1), 0
    if drafter is not None:
        try:
            kept = drafter_bytes(target, drafter, policy, length)
            kept += features_bytes(drafter, length) if keeps_features else 0
        except Exception as error:  # the engine goes on without a drafter that cannot be opened
            LOG.warning("the drafter's memory was not measured: %s", place_of(error))
    memory = limits.memory
    if memory is None and (free := available_bytes(target.device)) is not None:
        memory = free // 2
    slot = cache + kept
    chunk = waiting * min(PENDING, limits.prefill_chunk)
    shared = 0 if drafter is None else drafter.shared_bytes
    slots = limits.max_batch
    if memory is not None:
        slots = min(slots, max(0, memory - chunk - shared) // slot)
    if slots < 1:
        own = "serve a shorter context (--max-len), or with --set limits.memory=GB more memory"
        raise ResourceError(
            "the cache of one row does not fit in memory",
            found=f"{size_text(memory or 0)} for caches",
            expected=f"{size_text(slot + chunk + shared)} for one row of {context:,} tokens: "
            f"{size_text(cache + chunk)} for the target and "
            f"{size_text(kept + shared)} for the drafter",
            do=own + (", or serve without the drafter" if kept + shared else ""),
        )
    return Capacity(int(slots), context, slot, kept, shared)


def drafter_bytes(target: Target, drafter: Drafter, policy: Policy, length: int) -> int:
    """What one row of `length` positions takes for the drafter: its own memory, and the taps of the
    prompt, which wait for it and stay where a conversation may go on."""
    needs = drafter.needs()
    if needs.borrow:
        drafter.bind(target.borrowed())
    space = Space(1, length, policy.nodes, target.device, target.dtype, target.identity)
    if shares_kv(drafter, policy):
        nothing = SlotKV.of((), 1, length, target.dtype, target.device)
        needs, space = needs.without_copy(), replace(space, target_kv=nothing)
    taps = len(needs.taps) * target.spec.hidden_size * target.dtype.itemsize
    return drafter.slot_bytes(space) + taps * length


def features_bytes(drafter: Drafter, length: int) -> int:
    """What one row of `length` positions takes for features that are kept for training."""
    return len(layers_kept(drafter)) * drafter.spec.hidden_size * DTYPE.itemsize * length


def _free(error: BaseException | None) -> None:
    """Let go of what the frames of a failure hold, which may be half of the memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


__all__ = [
    "Busy",
    "Counters",
    "Finished",
    "GenerateRequest",
    "Limits",
    "Piece",
    "Service",
    "Serving",
    "Status",
    "Ticket",
    "TokenLogprob",
    "TooLong",
    "Unavailable",
]

LOG = logging.getLogger("specctl.server")


class Service:
    """A target, perhaps with a drafter, served to many at once.

    Rule "target-only" makes a seeded answer a function of the ask alone: not of the drafter, of the
    draft lengths or of who else is served. `batching` decides the draft length of every row. `say`
    is told what whoever runs the server should know; `why_off` says why there is no drafter,
    `drafter_name` what users know it by (None: its family). `keeps_features`: of requests that
    allow it, tickets have the states that the drafter learns from (`Ticket.features`).
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        policy: Policy | None = None,
        rule: str = "target-only",
        *,
        batching: Batching | None = None,
        limits: Limits | None = None,
        say: Callable[[str], None] = LOG.warning,
        why_off: str | None = None,
        drafter_name: str | None = None,
        keeps_features: bool = False,
    ) -> None:
        self.target, self.rule, self.keeps_features = target, rule, keeps_features
        given = policy if policy is not None else default_policy(drafter)
        if drafter is not None and drafter_name is None:
            drafter_name = drafter.family
        self.drafting = Drafting(drafter, given, batching, drafter_name, int(time.time()))
        self.limits = limits if limits is not None else Limits()
        check_rule(rule, drafter, given)
        self.counters = Counters()
        self.on_finish: list[Callable[[Finished], None]] = []
        self.answers = set[Ticket]()
        self.room: Capacity = room_for(target, given, self.limits, drafter, keeps_features)
        self.failure: str | None = None
        self._say, self._why_off = say, why_off
        self._own: Target | None = None  # the engine thread's
        self._desk = RequestQueue(self.limits.max_queue)
        self._desk.slots = self.room.slots
        self._worker: Worker | None = None
        self._thread: threading.Thread | None = None

    # -- its life -------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to load, in the engine thread; "ready" when asks are served."""
        assert self._thread is None, "a service is started once"
        if self.room.slots < self.limits.max_batch:
            found, wanted = self.room.slots, self.limits.max_batch
            self._say(f"memory holds the caches of {found} rows of the {wanted} that may run")
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        """The engine thread."""
        timeout = self.limits.queue_timeout
        try:
            guard = Guard(self.target.spec.vocab_size, self._say)
            shared = self._desk, self.counters, self.on_finish, timeout
            worker = Worker(self._engine(guard), guard, *shared, self._carry_out)
        except Exception as error:
            self._fail(error)
            return
        del guard  # the worker alone holds what an exchange is to free
        self._worker = worker
        self._desk.enter("ready", only_from=("loading",))
        try:
            worker.serve()
        except Exception as error:
            self._fail(error)
            worker.end()

    def _fail(self, error: Exception) -> None:
        self.failure = str(error) if isinstance(error, SpecctlError) else place_of(error)
        LOG.error("the engine thread failed: %s", place_of(error), exc_info=error)
        self._desk.enter("failed")

    def _engine(self, guard: Guard) -> Engine:
        """The engine with its caches; without the drafter if that cannot be had. The tokenizer is
        a copy: those of transformers may be used by one thread at a time."""
        target = replace(self.target, tokenizer=copy.deepcopy(self.target.tokenizer))
        self._own = target
        try:
            engine = self._made(self.drafting, guard)
        except Exception as error:
            engine = self._made(replace(self.drafting, drafter=None), guard)
            guard.give_up(place_of(error))
        engine.open(self.room.context)
        self._warm_up(target)
        return engine

    def _made(self, drafting: Drafting, guard: Guard) -> Engine:
        """An engine without caches yet."""
        assert self._own is not None, "the engine thread has begun"
        has_drafter = drafting.drafter is not None
        return Engine(
            self._own,
            drafting.drafter,
            drafting.policy if has_drafter else None,
            self.rule,
            self.room.slots,
            batching=drafting.batching if has_drafter else None,
            prefill_chunk=self.limits.prefill_chunk,
            wrap_drafter=guard.wrap,
            features=layers_kept(drafting.drafter) if self.keeps_features else (),
        )

    # -- another drafter ------------------------------------------------------------------------

    async def exchange(self, prepare: Callable[[], Drafting], wait: float) -> Drafting:
        """Serve with what `prepare` gives, from the moment on at which no answer is under way: at
        most `wait` seconds later, else Busy is raised and nothing has changed. `prepare` runs in
        the engine thread, which serves nobody meanwhile. Raises what it raises, and ResourceError
        for a drafter that leaves less room."""
        order = Exchange(prepare)
        self._desk.order(order)
        try:
            return await asyncio.wait_for(order.done(), wait)
        except TimeoutError:
            if self._desk.withdraw(order):
                raise Busy(
                    self._desk.retry_after(),
                    f"answers were under way for {wait:g} s: the drafter was not exchanged",
                ) from None
            return await order.done()  # it had begun
        except asyncio.CancelledError:
            self._desk.withdraw(order)
            raise

    def _carry_out(self, worker: Worker, order: Exchange) -> None:
        """In the engine thread, while no row is active."""
        before, guard = self.drafting, Guard(self.target.spec.vocab_size, self._say)
        try:
            wanted = replace(order.prepare(), since=int(time.time()))
            check_rule(self.rule, wanted.drafter, wanted.policy)
            room = self._room_with(wanted)
            engine = self._made(wanted, guard)
        except Exception as error:
            LOG.warning("the drafter was not exchanged: %s", place_of(error))
            _free(error)
            order.settle(error)
            return
        kept = worker.guard
        worker.replace(engine, guard)
        kept.let_go()  # the caches of before are free for the new ones
        try:
            engine.open(self.room.context)
            if guard.why_off is not None:
                raise ResourceError("the new drafter could not be opened", found=guard.why_off)
        except Exception as error:
            _free(error)
            guard.let_go()
            order.settle(error)
            off = kept.why_off
            engine = self._made(before if off is None else replace(before, drafter=None), kept)
            worker.replace(engine, kept)
            engine.open(self.room.context)
            return
        self.drafting, self.room, self._why_off = wanted, room, None
        self.counters.exchanges += 1
        if self.keeps_features and not layers_kept(wanted.drafter):
            self._say(f"no features are kept while {wanted.name} drafts: it learns from none")
        order.settle(wanted)

    def _room_with(self, wanted: Drafting) -> Capacity:
        """The room with another drafter; it must not be for fewer rows."""
        now, memory = self.room, self.limits.memory
        if memory is None and (free := available_bytes(self.target.device)) is not None:
            memory = free // 2 + now.slots * now.slot_bytes + now.shared_bytes
        limits = replace(self.limits, memory=memory, max_batch=now.slots, max_len=now.context)
        room = room_for(self.target, wanted.policy, limits, wanted.drafter, self.keeps_features)
        if room.slots < now.slots:
            raise ResourceError(
                "the new drafter leaves room for fewer rows",
                found=f"caches for {room.slots} of {now.slots} rows, "
                f"{size_text(room.slot_bytes)} each",
                expected=f"{size_text(now.slot_bytes)} for each, as now",
                do="start the server anew with it, or with a smaller --max-batch",
            )
        return room

    def _warm_up(self, target: Target) -> None:
        """Read as a prompt is read, before anybody waits: a first wide forward lays weights out (of
        300M parameters in bfloat16 on a CPU, 0.9 s)."""
        count = min(WARM_UP, self.room.context - 1)
        if count < 1:
            return
        request = Request((0,) * count, Sampling(max_new_tokens=1))
        try:
            Engine(target, prefill_chunk=self.limits.prefill_chunk).run([request])
        except Exception as error:  # who asks will be told, should it be so again
            why = str(error) if isinstance(error, SpecctlError) else place_of(error)
            LOG.warning("the target was not warmed up: %s", why)

    async def drain(self, seconds: float) -> bool:
        """Refuse new asks and let the others finish; True if all did within that time."""
        self._desk.enter("draining", only_from=("loading", "ready"))
        until = time.monotonic() + seconds
        while (self._desk.num_open or self.answers) and time.monotonic() < until:
            await asyncio.sleep(0.02)
        return self._desk.num_open == 0 and not self.answers

    def stop(self) -> None:
        """End after the round that runs; what is left unfinished is cancelled."""
        self._desk.enter("stopped")
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=30.0)

    # -- asks -----------------------------------------------------------------------------------

    async def submit(self, request: GenerateRequest) -> Ticket:
        """A ticket of a request that will be served. Raises Busy, Unavailable, TooLong, or another
        SpecctlError for a setting that does not fit the target."""
        self._desk.check(request)
        self._check(request)
        ticket = Ticket(request, self._desk.give_up)
        try:
            self._desk.admit(ticket)
        except Busy:
            self.counters.requests["refused"] = self._desk.num_refused
            raise
        return ticket

    def _check(self, ask: GenerateRequest) -> None:
        """Refuse what could only fail later: its length, and ids that do not exist."""
        sampling, vocab_size = ask.sampling, self.target.spec.vocab_size
        if len(ask.tokens) + sampling.max_new_tokens > self.room.context:
            raise TooLong(len(ask.tokens), self.room.context, sampling.max_new_tokens)
        if not ask.tokens or not 0 <= min(ask.tokens) <= max(ask.tokens) < vocab_size:
            raise SpecctlError(
                "the prompt is not made of the target's tokens",
                found=f"{len(ask.tokens):,} tokens",
                expected=f"one or more ids below {vocab_size:,}",
                do="encode the prompt with the target's own tokenizer",
            )
        if sampling.logit_bias or sampling.bad_words:
            SamplingBatch([replace(sampling, grammar=None, processors=())], vocab_size)

    def status(self) -> Status:
        worker, desk = self._worker, self._desk
        running = 0 if worker is None else min(worker.num_running, desk.num_open)
        why_off = self._why_off
        if why_off is None and worker is not None:
            why_off = worker.guard.why_off
        return Status(
            desk.state,
            running,
            desk.num_open - running,
            self.room.slots,
            self.room.context,
            "on" if why_off is None and self.drafting.drafter is not None else "off",
            why_off,
            self.drafting.name,
            self.drafting.names,
        )

    @property
    def drafter(self) -> Drafter | None:
        return self.drafting.drafter

    @property
    def policy(self) -> Policy:
        return self.drafting.policy
