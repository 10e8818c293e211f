"""How much of what the target says a smaller draft vocabulary can say.

Coverage C(k) is the share of tokens that lie in the k kept ids. It caps acceptance: with p the
target's distribution and S the kept ids, alpha_S <= p(S), and a token inside S is never accepted
less often than before (the draft distribution only grows there). Ids are ranked on some documents
and coverage is measured on others, so that the long tail is not flattered by its own count.
Letters: V target vocabulary, K kept ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.core.errors import SpecctlError
from specctl.core.vocab import VocabMap
from specctl.runtime.target.target import Target

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

    def weighted(self, weights: Mapping[str, float]) -> Tensor:
        """float64 [V]: shares of each domain's tokens, added with these weights (1 if unnamed)."""
        shares = [
            weights.get(name, 1.0) * count_V.double() / count_V.sum().clamp(min=1)
            for name, count_V in self.by_domain.items()
        ]
        return torch.stack(shares).sum(0)


Counted = tuple[Sequence[int] | Tensor, str]


def total_counts(documents: Iterable[Counted], vocab_size: int) -> TokenCounts:
    """Counts over all documents, by domain."""
    found: dict[str, Tensor] = {}
    for tokens, domain in documents:
        _add(found, domain, tokens, vocab_size)
    if not found:
        raise SpecctlError("no tokens were counted", do="give more text, or more prompts")
    return TokenCounts(found)


def count_tokens(documents: Iterable[Counted], vocab_size: int) -> tuple[TokenCounts, TokenCounts]:
    """Counts for ranking and counts for measuring: of every domain each fifth document is only
    measured on. With a single document in all, both are that document."""
    parts: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    seen: dict[str, int] = {}
    for tokens, domain in documents:
        if len(tokens):
            seen[domain] = seen.get(domain, 0) + 1
            _add(parts[seen[domain] % HELDOUT_EVERY == 0], domain, tokens, vocab_size)
    if not parts[0]:
        raise SpecctlError("no tokens were counted", do="give more text, or more prompts")
    ranked = TokenCounts(parts[0])
    return ranked, TokenCounts(parts[1]) if parts[1] else ranked


def _add(
    counts: dict[str, Tensor], domain: str, tokens: Sequence[int] | Tensor, vocab_size: int
) -> None:
    ids = torch.as_tensor(tokens, dtype=torch.long)
    if ids.numel() == 0:
        return
    if int(ids.max()) >= vocab_size:
        raise SpecctlError(
            "a counted token lies outside the target's vocabulary",
            found=str(int(ids.max())),
            expected=f"ids below {vocab_size:,}",
            do="count text that was encoded with this target's tokenizer",
        )
    count_V = torch.bincount(ids, minlength=vocab_size)
    counts[domain] = counts[domain] + count_V if domain in counts else count_V


def always_kept(target: Target) -> tuple[int, ...]:
    """Ids that every map keeps: end, begin, padding, chat markers and the tokenizer's other special
    tokens; a drafter that cannot say them never proposes to stop."""
    spec, tokenizer = target.spec, target.tokenizer
    ids = {*target.eos_ids, *(i for i in (spec.bos_id, spec.pad_id) if i is not None)}
    if tokenizer is not None:
        added = tokenizer.added_tokens_decoder
        ids |= {*tokenizer.all_special_ids, *(i for i, t in added.items() if t.special)}
    return tuple(sorted(i for i in ids if 0 <= i < spec.vocab_size))


def ranking(
    counts: TokenCounts,
    always: Sequence[int],
    allowed: VocabMap | None = None,
    weights: Mapping[str, float] | None = None,
) -> Tensor:
    """All ids that may be kept, the first to keep first: `always`, then by falling count; ties, and
    ids never seen, by rising id. `allowed` restricts to what an already trimmed drafter speaks;
    `weights` of domains, when given, replace counts by weighted shares."""
    count_V = counts.total_V if weights is None else counts.weighted(weights)
    order_V = torch.sort(-count_V, stable=True).indices
    first_V = torch.zeros_like(count_V, dtype=torch.bool)
    first_V[list(always)] = True
    order_V = torch.cat([first_V.nonzero()[:, 0], order_V[~first_V[order_V]]])
    if allowed is None:
        return order_V
    return order_V[torch.isin(order_V, allowed.ids_K.cpu())]


def seen_ranking(counts: TokenCounts, always: Sequence[int]) -> Tensor:
    """The ids worth keeping at all, the first to keep first: `always` and those that were counted.
    Of an id that never comes a drafter learns nothing."""
    count_V = counts.total_V.clone()
    count_V[list(always)] += 1
    return ranking(counts, always)[: int((count_V > 0).sum())]


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


def fewest(rank: Tensor, counts: TokenCounts, always: Sequence[int], coverage: float) -> int:
    """How many of the ranked ids cover that share of what was counted, rounded up to eights; all
    of `always` among them."""
    enough = (coverage_curve(rank, counts) >= coverage).nonzero()
    size = int(enough[0]) + 1 if enough.numel() else rank.numel()
    return min(rank.numel(), max(-(-size // 8) * 8, len(always), 2))


def coverage_curve(rank: Tensor, counts: TokenCounts) -> Tensor:
    """float64 [len(rank)]: entry k - 1 is C(k), the covered share with the first k ranked ids."""
    return cumulative(rank, counts.total_V)


def cumulative(rank: Tensor, count_V: Tensor) -> Tensor:
    return count_V[rank].double().cumsum(0) / count_V.sum().clamp(min=1)


def size_grid(num_ids: int, least: int) -> list[int]:
    """Sizes worth trying and plotting: fractions of all ids, in multiples of 8."""
    grid = {min(num_ids, max(least, -(-int(num_ids * share) // 8) * 8)) for share in DEFAULT_SHARES}
    return sorted({*grid, num_ids})
