"""How much of what the target says a smaller draft vocabulary can say, and which size pays best.

Coverage C(k) is the share of tokens that lie in the k kept ids. It caps acceptance: with p the
target's law and S the kept ids, alpha_S <= p(S), and a token inside S is never accepted less often
than before (the draft law only grows there). Ids are ranked on one part of the counted documents
and coverage is measured on the other, so that the long tail is not flattered by its own count.

Sizes are chosen by predicted speed-up over plain decoding (arXiv 2603.05210 in exact form):
S(k) = tau(alpha0 C(k)) / (c_verify + g (c_body + c_head k / V)), all costs in plain target steps.
Letters: V target vocabulary, K kept ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specctl.drafters.parts.vocab import VocabMap
from specctl.recipes.errors import SpecctlError
from specctl.runtime.stats import expected_tau
from specctl.runtime.target import Target

HELDOUT_EVERY = 5
DEFAULT_SHARES = (1 / 64, 1 / 32, 1 / 16, 1 / 12, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1.0)


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """How often every token was counted, by domain: int64 [V] on the host."""

    by_domain: Mapping[str, Tensor]

    @property
    def total_V(self) -> Tensor:
        return torch.stack(list(self.by_domain.values())).sum(0)

    @property
    def num_tokens(self) -> int:
        return int(self.total_V.sum())


Counted = tuple[Sequence[int] | Tensor, str]


def count_tokens(documents: Iterable[Counted], vocab_size: int) -> tuple[TokenCounts, TokenCounts]:
    """Counts for ranking and counts for measuring: of every domain each fifth document is only
    measured on. With a single document in all, both are that document."""
    parts: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    seen: dict[str, int] = {}
    for tokens, domain in documents:
        ids = torch.as_tensor(tokens, dtype=torch.long)
        if ids.numel() == 0:
            continue
        if int(ids.max()) >= vocab_size:
            raise SpecctlError(
                "a counted token lies outside the target's vocabulary",
                found=str(int(ids.max())),
                expected=f"ids below {vocab_size:,}",
                do="count text that was encoded with this target's tokenizer",
            )
        number = seen[domain] = seen.get(domain, 0) + 1
        part = parts[number % HELDOUT_EVERY == 0]
        count_V = torch.bincount(ids, minlength=vocab_size)
        part[domain] = part[domain] + count_V if domain in part else count_V
    if not parts[0]:
        raise SpecctlError("no tokens were counted", do="give more text, or more prompts")
    ranked = TokenCounts(parts[0])
    return ranked, TokenCounts(parts[1]) if parts[1] else ranked


def always_kept(target: Target) -> tuple[int, ...]:
    """Ids that every map keeps: end, begin, padding, chat markers and the tokenizer's other special
    tokens; a drafter that cannot say them never proposes to stop."""
    spec, tokenizer = target.spec, target.tokenizer
    ids = {*target.eos_ids, *(i for i in (spec.bos_id, spec.pad_id) if i is not None)}
    if tokenizer is not None:
        added = tokenizer.added_tokens_decoder
        ids |= {*tokenizer.all_special_ids, *(i for i, t in added.items() if t.special)}
    return tuple(sorted(i for i in ids if 0 <= i < spec.vocab_size))


def ranking(counts: TokenCounts, always: Sequence[int], allowed: VocabMap | None = None) -> Tensor:
    """All ids that may be kept, the first to keep first: `always`, then by falling count; ties, and
    ids never seen, by rising id. `allowed` restricts to what an already trimmed drafter speaks."""
    count_V = counts.total_V
    first_V = torch.zeros_like(count_V)
    first_V[list(always)] = 1
    keys = zip((-first_V).tolist(), (-count_V).tolist(), range(count_V.numel()), strict=True)
    order_V = torch.tensor([id for _, _, id in sorted(keys)])
    if allowed is None:
        return order_V
    return order_V[torch.isin(order_V, allowed.ids_K.cpu())]


def vocab_map(rank: Tensor, size: int, always: Sequence[int], vocab_size: int) -> VocabMap:
    """The map that keeps the first `size` ranked ids; all of `always` must fit."""
    if not max(len(always), 1) <= size <= rank.numel():
        raise SpecctlError(
            "this many tokens cannot be kept",
            found=f"{size:,}",
            expected=f"{max(len(always), 1):,} (special tokens) to {rank.numel():,}",
            do="give another size",
        )
    return VocabMap(rank[:size].sort().values, vocab_size)


def coverage_curve(rank: Tensor, counts: TokenCounts) -> Tensor:
    """float64 [len(rank)]: entry k - 1 is C(k), the covered share with the first k ranked ids."""
    return cumulative(rank, counts.total_V)


def cumulative(rank: Tensor, count_V: Tensor) -> Tensor:
    return count_V[rank].double().cumsum(0) / count_V.sum().clamp(min=1)


@dataclass(frozen=True, slots=True)
class HeadCost:
    """Measured seconds on this device: a plain target step, a verification of a full draft, and one
    of the `calls` sequential draft calls, split into body and LM head at full vocabulary."""

    plain: float
    verify: float
    body: float
    head: float
    calls: int
    vocab_size: int
    measured: tuple[tuple[int, float], ...] = ()  # (kept ids, drafting seconds of a round)

    def speedup(self, tau: float, size: int) -> float:
        """tau / (c_verify + g (c_body + c_head k / V)), costs in plain steps."""
        call = self.body + self.head * size / self.vocab_size
        return tau * self.plain / (self.verify + self.calls * call)

    def to_json(self) -> dict[str, Any]:
        milliseconds = {n: 1e3 * getattr(self, n) for n in ("plain", "verify", "body", "head")}
        return {
            **{f"{name}_ms": round(value, 4) for name, value in milliseconds.items()},
            "calls": self.calls,
            "measured_ms": [[size, round(1e3 * s, 4)] for size, s in self.measured],
        }


def fit_cost(
    plain: float,
    verify: float,
    rounds: Sequence[tuple[int, float]],
    calls: int,
    vocab_size: int,
) -> HeadCost:
    """Least squares of drafting time = calls (body + head k / V), neither part below zero."""
    size = torch.tensor([[1.0, k / vocab_size] for k, _ in rounds], dtype=torch.float64)
    seconds = torch.tensor([[s / calls] for _, s in rounds], dtype=torch.float64)
    body, head = torch.linalg.lstsq(size, seconds).solution[:, 0].tolist()
    mean = float(seconds.mean())
    if head < 0.0:
        body, head = mean, 0.0
    elif body < 0.0:
        body, head = 0.0, mean / max(float(size[:, 1].mean()), 1e-9)
    return HeadCost(plain, verify, body, head, calls, vocab_size, tuple(rounds))


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a size promises: coverage, tokens per round, speed-up over plain decoding."""

    size: int
    coverage: float
    tau: float
    speedup: float


def predict(
    size: int, curve: Tensor, alpha: float, length: int, cost: HeadCost, tau_full: float
) -> Predicted:
    """tau falls with alpha0 C(k), scaled so that the full vocabulary gives the measured tau."""
    covered = float(curve[size - 1] / curve[-1])
    tau = tau_full * expected_tau(alpha * covered, length) / expected_tau(alpha, length)
    return Predicted(size, float(curve[size - 1]), tau, cost.speedup(tau, size))


def choose_size(
    curve: Tensor,
    alpha: float,
    length: int,
    cost: HeadCost,
    *,
    min_coverage: float,
    least: int = 1,
    tau_full: float | None = None,
    sizes: Sequence[int] | None = None,
) -> list[Predicted]:
    """Predictions, the best first, over every size (or those given) that covers enough.

    One integer and a table: the search is exhaustive. The largest size is always a candidate."""
    tau_full = tau_full if tau_full is not None else expected_tau(alpha, length)
    wanted = range(least, curve.numel() + 1) if sizes is None else sizes
    enough = [k for k in wanted if least <= k <= curve.numel() and curve[k - 1] >= min_coverage]
    found = [
        predict(k, curve, alpha, length, cost, tau_full) for k in sorted({*enough, curve.numel()})
    ]
    return sorted(found, key=lambda p: (-p.speedup, p.size))


def size_grid(num_ids: int, least: int) -> list[int]:
    """Sizes worth trying and plotting: fractions of all ids, in multiples of 8."""
    grid = {min(num_ids, max(least, -(-int(num_ids * share) // 8) * 8)) for share in DEFAULT_SHARES}
    return sorted({*grid, num_ids})
