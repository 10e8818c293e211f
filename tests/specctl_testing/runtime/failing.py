"""Drafters that break at a chosen moment."""

from __future__ import annotations

from specctl.core.drafter import Needs, StepState
from specctl.drafters.lm.small_lm import SmallLmOptions
from specctl.drafters.states.lm_state import LmState


class Failing(StepState):
    """A language model's draft state that goes wrong where and when it is told to: in one of its
    calls (`where`), at the `at`-th of them, for the row of that `slot` (None: for all)."""

    def __init__(self, inner, where, at, slot, how):
        self.inner, self.where, self.at, self.slot, self.how = inner, where, at, slot, how
        self.calls, self.view, self.seen = 0, None, []

    def _fails(self, where):
        if where != self.where:
            return False
        self.calls += 1
        return self.calls == self.at or (self.at == 0)

    def _spoil(self, logits, where):
        slots = self.view.slots
        if not self._fails(where) or (self.slot is not None and self.slot not in slots):
            return logits
        if self.how == "raise":
            raise ValueError("secret prompt")
        logits = logits.clone()
        rows = slice(None) if self.slot is None else slots.index(self.slot)
        logits[rows] = float(self.how)
        return logits

    def start(self, slot, tokens, taps):
        if self.slot in (None, slot) and self._fails("start"):
            raise ValueError("secret prompt")
        self.inner.start(slot, tokens, taps)

    def root(self, view):
        self.view = view
        self.seen.append(view.slots)
        return self._spoil(self.inner.root(view), "root")

    def expand(self, token_BM, parent_BM):
        return self._spoil(self.inner.expand(token_BM, parent_BM), "expand")

    def observe(self, outcome):
        if self._fails("observe"):
            raise ValueError("secret prompt")
        self.inner.observe(outcome)

    def end(self, slot):
        if self._fails("end"):
            raise ValueError("secret prompt")
        self.inner.end(slot)


class FailingDrafter:
    """The target drafts for itself, until something breaks."""

    family, module, vocab, lossless, policies = "small-lm", None, None, True, ("chain",)
    options, shared_bytes = SmallLmOptions(), 0

    def __init__(self, target, where, at=2, slot=None, how="raise"):
        self.lm, self.router, self.how = target.lm, None, (where, at, slot, how)

    def readable(self, ids):
        return ids

    def draft_logits(self, logits):
        return logits

    def needs(self):
        return Needs()

    def bind(self, borrowed):
        raise AssertionError("borrows nothing")

    def open(self, space):
        if self.how[0] == "open":
            raise ValueError("secret prompt")
        self.state = Failing(LmState(self, space), *self.how)
        return self.state
