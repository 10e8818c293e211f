"""The target's distributions after the last few tokens, remembered in an `NgramStore`.

The key is a context (the last tokens in front of a place), the continuations are single tokens with
weights. Every token that the target is fed, accepted or not, teaches the contexts that end with it:

    summed   weight(token) := weight(token) + p(token): the average distribution, times the visits
    fading   weight(token) := keep weight(token) + (1 - keep) p(token), and p for a new context: a
             probability, newest evidence first. With keep = 0 and contexts of one token it is the
             matrix of Token Recycling (arXiv 2408.08696)
Letters: B rows, C candidates, T fed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specctl.core.drafter import Drafter, Needs, Outcome
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.option_checks import OneOf
from specctl.drafters.retrieval.store import Ids, NgramStore, NgramStores, StoreLimits
from specctl.drafters.retrieval.store_registry import RowStores, Scope

LEARNING = tuple(str(scope) for scope in Scope if scope is not Scope.DISK)


def learning_scope(name: str) -> Scope:
    """The scope of that name; one that cannot learn is refused."""
    OneOf(LEARNING).check("scope", name)
    return Scope(name)


class NgramDrafter(Drafter):
    """A drafter without weights that remembers the target's distributions. Its options have `scope`
    and `max_mib`; `num_kept` tokens of each distribution are kept."""

    def __init__(self, options: Any, spec: ModelSpec, vocab: VocabMap | None = None) -> None:
        super().__init__(options, spec, vocab)
        limits = StoreLimits(options.max_mib << 20, self.num_kept)
        self.registry = NgramStores(learning_scope(options.scope), limits)

    @property
    def num_kept(self) -> int:
        return int(self.options.topk)

    def needs(self) -> Needs:
        return Needs(topk=min(self.num_kept, self.spec.vocab_size), topk_logp=True)


def tail(tokens: Sequence[int], length: int, end: int | None = None) -> Ids:
    """The last `length` tokens of the first `end` (fewer where there are fewer)."""
    end = len(tokens) if end is None else end
    return tuple(tokens[max(0, end - length) : end])


def step(context: Ids, token: int, length: int) -> Ids:
    """The context one token later."""
    return (*context, token)[-length:]


def fed_contexts(outcome: Outcome, length: int) -> list[list[Ids | None]]:
    """[B][T]: up to `length` tokens that end with each fed token; None for padding, and for a row
    that has finished: what stands behind its end is nobody's text."""
    view, tree = outcome.view, outcome.tree
    ends = (view.kept_len_B + 1).tolist()
    fed, parents = tree.fed_token_BT(view.root_B).tolist(), tree.fed_parent_BT().tolist()
    valid = tree.fed_valid_BT().tolist()
    rows: list[list[Ids | None]] = []
    for b, text in enumerate(view.tokens):
        row: list[Ids | None] = [tail(text, length, ends[b])]
        for t in range(1, len(fed[b])):
            before = row[parents[b][t]] if valid[b][t] else None
            row.append(None if before is None else step(before, fed[b][t], length))
        rows.append([None] * len(row) if outcome.finished[b] is not None else row)
    return rows


def learn(
    store: NgramStore,
    context: Ids,
    tokens: Sequence[int],
    chances: Sequence[float],
    keep: float | None,
) -> None:
    """The target has thought `chances` of `tokens` after `context`; keep None: summed."""
    share, fade = 1.0, 1.0
    if keep is not None and context in store:
        share, fade = 1.0 - keep, keep
    distributions = zip(tokens, chances, strict=True)
    store.update(context, (((token,), share * chance) for token, chance in distributions), fade)


def learn_text(
    store: NgramStore, tokens: Sequence[int], lengths: range, keep: float | None
) -> None:
    """A text counts as a target that was certain of each of its tokens."""
    for at in range(1, len(tokens)):
        for length in lengths:
            if length <= at:
                learn(store, tuple(tokens[at - length : at]), (tokens[at],), (1.0,), keep)


def learn_round(
    stores: RowStores[NgramStore], outcome: Outcome, lengths: range, keep: float | None
) -> None:
    """What the target thought at every token it was fed, accepted or not; nothing, where the round
    brought no top-k."""
    if outcome.topk_BTC is None or outcome.topk_logp_BTC is None:
        return
    best, chances = outcome.topk_BTC.tolist(), outcome.topk_logp_BTC.exp().tolist()
    for b, row in enumerate(fed_contexts(outcome, lengths.start)):
        store = stores.at(outcome.view.slots[b])
        for t, context in enumerate(row):
            for length in lengths:
                if context is not None and length <= len(context):
                    learn(store, context[-length:], best[b][t], chances[b][t], keep)
