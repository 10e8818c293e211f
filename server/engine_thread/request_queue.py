"""RequestQueue: all that event loops and the engine thread share. Tickets and cancellations lie in
it until the engine thread comes by; it counts who is inside, so that the queue has an exact
length."""

from __future__ import annotations

import math
import threading
from collections import deque

from specctl.server.engine_thread.contract import Busy, GenerateRequest, Ticket, Unavailable
from specctl.server.engine_thread.exchange import Exchange


class RequestQueue:
    """Any thread may call anything. `state` is "loading", "ready", "draining", "stopped" or
    "failed"; only a service that is loading becomes ready."""

    def __init__(self, max_queue: int) -> None:
        self.max_queue, self.slots = max_queue, 0
        self.state, self.num_open, self.num_refused = "loading", 0, 0
        self._changed = threading.Condition()
        self._tickets: deque[Ticket] = deque()
        self._given_up: deque[Ticket] = deque()
        self._ordered: Exchange | None = None
        self._mean_seconds = 1.0

    def enter(self, state: str, only_from: tuple[str, ...] = ()) -> None:
        """Change the state, if it is one of those (none named: in any case)."""
        with self._changed:
            if not only_from or self.state in only_from:
                self.state = state
            self._changed.notify_all()

    def check(self, request: GenerateRequest) -> None:
        """Raises Unavailable where none is taken now, or none but those of answers under way."""
        if self.state != "ready" and not (request.goes_on and self.state == "draining"):
            raise Unavailable(self.state)

    def admit(self, ticket: Ticket) -> None:
        """Take an ask in. Raises Unavailable or Busy."""
        with self._changed:
            self.check(ticket.ask)
            if self.num_open >= self.slots + self.max_queue:
                self.num_refused += 1
                raise Busy(self.retry_after())
            self.num_open += 1
            self._tickets.append(ticket)
            self._changed.notify_all()

    def give_up(self, ticket: Ticket) -> None:
        with self._changed:
            self._given_up.append(ticket)
            self._changed.notify_all()

    def order(self, exchange: Exchange) -> None:
        """Have the drafter exchanged; new requests wait until it is done, or withdrawn."""
        with self._changed:
            if self.state != "ready":
                raise Unavailable(self.state)
            if self._ordered is not None:
                raise Busy(self.retry_after(), "the drafter is being exchanged already")
            self._ordered = exchange
            self._changed.notify_all()

    def withdraw(self, exchange: Exchange) -> bool:
        """Whether it had not begun yet, and is not going to."""
        with self._changed:
            is_waiting = self._ordered is exchange
            self._ordered = None if is_waiting else self._ordered
            self._changed.notify_all()
            return is_waiting

    def take_order(self) -> Exchange | None:
        """The exchange to carry out now; from here on it cannot be withdrawn."""
        with self._changed:
            found, self._ordered = self._ordered, None
            return found

    def close(self, seconds: float) -> None:
        """An ask has left, so many seconds after it came."""
        with self._changed:
            self.num_open -= 1
            self._mean_seconds += 0.1 * (seconds - self._mean_seconds)

    def take(self, wait: bool) -> tuple[list[Ticket], list[Ticket]]:
        """New requests and cancellations since the last call; `wait` until there are any, or an
        exchange, or until the service is stopped. While an exchange is due no request is given,
        nor the cancellation of one that was not."""
        with self._changed:
            while wait and not (self._tickets or self._given_up or self._ordered) and self.is_open:
                self._changed.wait()
            held = set[Ticket]()
            if self._ordered is not None and self.is_open:
                held = {*self._tickets}
            new = [ticket for ticket in self._tickets if ticket not in held]
            given_up = [ticket for ticket in self._given_up if ticket not in held]
            self._tickets = deque(ticket for ticket in self._tickets if ticket in held)
            self._given_up = deque(ticket for ticket in self._given_up if ticket in held)
            return new, given_up

    def retry_after(self) -> int:
        """Seconds until a place in the queue is free: a slot is, once per mean answer and slot."""
        return max(1, min(60, math.ceil(self._mean_seconds / max(self.slots, 1))))

    @property
    def is_open(self) -> bool:
        """The engine thread goes on."""
        return self.state not in ("stopped", "failed")
