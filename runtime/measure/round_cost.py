"""Where the time of a drafted round goes, in plain tokens, and what would make it faster.

A round that brings tau tokens and costs c plain tokens makes decoding tau / c times as fast. c is
the target's pass over the draft, the drafting, and the rest (choosing, sampling, bookkeeping); a
plain token costs 1, its own rest included. Time for reading prompts stands aside: it is the same
for both. (In the words of Leviathan et al., arXiv 2211.17192, theorem 3.8: a draft that costs
nothing would leave tau over the cost of the pass.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from specctl.runtime.measure.stats import Stats

LITTLE = 0.5  # so few of the drafted tokens accepted: acceptance is what holds it back


@dataclass(frozen=True, slots=True)
class Spent:
    """Rounds, tokens and seconds of one run, by part of the time. `in_chains`: what is drafted can
    be accepted whole, as of a tree only one path can."""

    rounds: int
    tokens: int
    drafted: int
    seconds: float
    prefill: float
    drafting: float
    verifying: float
    in_chains: bool = True

    @classmethod
    def of(cls, stats: Stats, in_chains: bool = True) -> Spent:
        return cls(
            stats.rounds,
            stats.tokens,
            stats.drafted,
            stats.seconds,
            stats.prefill_seconds,
            stats.draft_seconds,
            stats.verify_seconds,
            in_chains,
        )

    @classmethod
    def sum(cls, parts: Sequence[Spent]) -> Spent:
        return cls(
            sum(one.rounds for one in parts),
            sum(one.tokens for one in parts),
            sum(one.drafted for one in parts),
            sum(one.seconds for one in parts),
            sum(one.prefill for one in parts),
            sum(one.drafting for one in parts),
            sum(one.verifying for one in parts),
            all(one.in_chains for one in parts),
        )

    @property
    def rest(self) -> float:
        """Negative where drafting and verifying went on at the same time."""
        return self.seconds - self.prefill - self.drafting - self.verifying


@dataclass(frozen=True, slots=True)
class RoundCost:
    """A round of a drafter in plain tokens: `tau` tokens come of `drafted` drafted ones, for these
    costs of the target's pass, of drafting and of the rest."""

    tau: float
    drafted: float
    verifying: float
    drafting: float
    rest: float
    in_chains: bool = True

    @classmethod
    def of(cls, spent: Spent | None, plain: Spent | None) -> RoundCost | None:
        """None where nothing was drafted, or the parts do not add up."""
        if spent is None or plain is None or not spent.drafted or spent.rest < 0:
            return None
        token = (plain.seconds - plain.prefill) / max(1, plain.tokens)
        if token <= 0:
            return None
        each = token * spent.rounds
        return cls(
            spent.tokens / spent.rounds,
            spent.drafted / spent.rounds,
            spent.verifying / each,
            spent.drafting / each,
            spent.rest / each,
            spent.in_chains,
        )

    @classmethod
    def of_json(cls, read: Mapping[str, Any]) -> RoundCost:
        """What `to_json` made of it."""
        return cls(**{one.name: read[one.name] for one in fields(cls)})

    @property
    def total(self) -> float:
        return self.verifying + self.drafting + self.rest

    @property
    def speedup(self) -> float:
        """Of decoding, without the prompts."""
        return self.tau / self.total

    @property
    def accepted(self) -> float:
        """The share of drafted tokens that were accepted."""
        return (self.tau - 1) / self.drafted

    @property
    def with_free_drafts(self) -> float:
        return self.tau / (self.verifying + self.rest)

    @property
    def with_all_accepted(self) -> float | None:
        """None of trees, of which one path at most is accepted."""
        return (self.drafted + 1) / self.total if self.in_chains else None

    @property
    def limits(self) -> dict[str, float]:
        """Speed-up over plain decoding, without the prompts: as it is, and what it would be."""
        found = {
            "measured": self.speedup,
            "if drafting were free": self.with_free_drafts,
            "if a round cost a plain token": self.tau,
        }
        whole = self.with_all_accepted
        return found if whole is None else {**found, "if all drafts were accepted": whole}

    @property
    def dearest(self) -> str:
        """The part that costs most beyond a plain token."""
        beyond = {
            "drafting": self.drafting,
            "the width of the pass": self.verifying + self.rest - 1,
        }
        return max(beyond, key=lambda part: beyond[part])

    def text(self) -> str:
        """What it costs, its limits, and what holds it back."""
        limit = self.with_all_accepted
        whole = "" if limit is None else f", {limit:.2f}x if all were accepted"
        return (
            f"a round brings {self.tau:.2f} tokens and costs {self.total:.2f} plain ones (the "
            f"target's pass {self.verifying:.2f}, drafting {self.drafting:.2f}, the rest "
            f"{self.rest:.2f}): {self.speedup:.2f}x without the prompts. Limits: "
            f"{self.tau:.2f}x if a round cost one plain token, {self.with_free_drafts:.2f}x if "
            f"drafting were free{whole} (of {self.drafted:.1f} drafted tokens {self.accepted:.2f} "
            f"are accepted). {self._remedy()}"
        )

    def _remedy(self) -> str:
        dear = self.dearest
        if self.speedup > 1 and (self.accepted >= LITTLE or not self.in_chains):
            return f"Most of the cost beyond a plain token: {dear}."
        if self.accepted < LITTLE and self.total < 1.5:
            return (
                "Acceptance holds it back: train on this target's answers to prompts like yours, "
                "or try another family."
            )
        if dear == "drafting":
            return "Drafting holds it back: fewer tokens (--length), or specctl vocab-trim."
        return "The width of the pass holds it back: fewer tokens (--length, --set serve.nodes)."

    def to_json(self) -> dict[str, Any]:
        limit = self.with_all_accepted
        return {
            "tau": round(self.tau, 3),
            "drafted": round(self.drafted, 3),
            "verifying": round(self.verifying, 3),
            "drafting": round(self.drafting, 3),
            "rest": round(self.rest, 3),
            "total": round(self.total, 3),
            "in_chains": self.in_chains,
            "speedup_without_prompts": round(self.speedup, 3),
            "speedup_if_drafts_were_free": round(self.with_free_drafts, 3),
            "speedup_if_all_were_accepted": None if limit is None else round(limit, 3),
        }
