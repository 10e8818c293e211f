"""Cascade by match length: the longer the repeated suffix, the longer the copies from the text;
where nothing repeats, the other members draft, and where they have nothing either, nobody does.

(The order of Hierarchy Drafting and of suffix decoding before a model; no statistics, no clock.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specctl.core.plugins import Plugin
from specctl.runtime.controllers.base import Arm, Controller, Prices


@dataclass
class Cascade(Controller):
    """The first member that copies from the text, else the first of all, drafts in contexts of
    `least` and more (suffixes of 2^(least - 1) tokens); its shortest arm there, its longest in the
    highest context. `rest` False leaves rounds without such a match to plain decoding."""

    least: int = 2
    rest: bool = True
    by_member: list[list[int]] = field(default_factory=list, init=False)

    needs_contexts = True

    def open(self, arms: Sequence[Arm], prices: Prices) -> None:
        super().open(arms, prices)
        copying = {arm.member: arm.is_copy for arm in arms if arm.member is not None}
        members = sorted(copying, key=lambda member: (not copying[member], member))
        self.by_member = [
            sorted((i for i, a in enumerate(arms) if a.member == m), key=lambda i: arms[i].length)
            for m in members
        ]

    def order(self, contexts: Sequence[int]) -> Sequence[int]:
        context = min(contexts, default=0)
        first, *others = self.by_member
        found = []
        if context >= self.least:
            found.append(first[min(context - self.least, len(first) - 1)])
        if self.rest:
            found += [each[0] for each in others]
        return [*found, self.off]


CONTROLLER = Plugin("cascade", "the first member where text repeats, then the others", "", Cascade)
