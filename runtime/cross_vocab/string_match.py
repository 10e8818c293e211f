"""String-level exact match: the draft writes text freely, the target's tokenizer reads it.

Timor et al. (arXiv 2502.05202, Algorithm 2, SLEM): the draft's greedy continuation becomes a string
and the string becomes target tokens, which are deterministic candidates (kind POINT) for the rules
that do not depend on the origin of a draft. No probability crosses the vocabularies, so nothing
needs to be shared; where much is shared, TLI (`translate`) accepts more under sampling.

The continuation is read together with the newest text, because tokens may merge across the seam;
its last token is left out, because it may merge with what the draft would have written next. What
the target accepted of the draft's own tokens stays in the draft's cache.
Letters: B rows, M new nodes, N nodes, U foreign vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specctl.core.drafter import Budget, DraftState, Outcome, RoundView, Space
from specctl.core.tree import DraftTree, NodeKind, chain_tree, empty_tree
from specctl.runtime.cross_vocab.token_bytes import Reader
from specctl.runtime.cross_vocab.translated import Texts, Translated

CONTEXT = 8  # target tokens read again with every draft


class StringMatch(Translated):
    """SLEM around a small language model; it proposes whole chains."""

    policies = ("direct",)

    def open(self, space: Space) -> StringMatchState:
        return StringMatchState(self, space)


class StringMatchState(DraftState):
    """The draft's texts, and what it wrote last round."""

    def __init__(self, drafter: StringMatch, space: Space) -> None:
        self.reader, self.texts = drafter.reader, Texts(drafter, space)
        self.written: dict[int, list[int]] = {}

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        self.texts.start(slot, tokens)
        self.written[slot] = []

    def propose(self, view: RoundView, budget: Budget) -> DraftTree:
        length = min(budget.nodes, budget.depth)
        if length <= 0:
            return empty_tree(len(view.slots), view.slot_B.device)
        for slot, tokens in zip(view.slots, view.tokens, strict=True):
            self._read(slot, tokens)
        written = self._write(view, length + 1)  # one more, since the last is left out
        drafts = []
        for slot, tokens, ids in zip(view.slots, view.tokens, written, strict=True):
            self.written[slot] = ids
            drafts.append(as_target(self.reader, tokens, ids)[:length])
        longest = max(map(len, drafts))
        if longest == 0:
            return empty_tree(len(drafts), view.slot_B.device)
        padded = [draft + [0] * (longest - len(draft)) for draft in drafts]
        filled_B1 = torch.tensor([[len(draft)] for draft in drafts], device=view.slot_B.device)
        at_N = torch.arange(longest, device=view.slot_B.device)
        token_BN = torch.tensor(padded, device=view.slot_B.device)
        return chain_tree(token_BN, at_N < filled_B1, NodeKind.POINT)

    def _read(self, slot: int, tokens: Sequence[int]) -> None:
        """Take what was committed; the draft's own tokens where they are the same text, since those
        are in its cache already."""
        texts, target = self.texts, self.reader.target
        new, written = tokens[texts.num_read[slot] :], self.written[slot]
        if not written or any(token in target.marker_of for token in new):
            texts.read(slot, tokens)
            return
        text, kept = target.bytes_of(new), list[int]()
        for i in written:
            own = self.reader.draft.text_of.get(i, b"")
            if not own or not text.startswith(own):
                break
            kept.append(i)
            text = text[len(own) :]
        read = min(len(kept), len(written) - 1)  # the last one written was never read
        texts.state.num_cached[slot] = len(texts.ids[slot]) + read
        texts.ids[slot] += [*kept, *self.reader.draft.spell(text)]
        texts.num_read[slot] = len(tokens)

    def _write(self, view: RoundView, length: int) -> list[list[int]]:
        """Up to `length` draft tokens per row, greedily; a row ends with its end of text."""
        state = self.texts.state
        logits_BU = view.shown(state.root(self.texts.view(view)))
        steps = [logits_BU.argmax(-1)]
        for step in range(length - 1):
            token_B1 = steps[-1][:, None]
            parent_B1 = torch.full_like(token_B1, step - 1)
            logits_BMU = view.shown(state.expand(token_B1, parent_B1))
            steps.append(logits_BMU[:, 0].argmax(-1))
        eos = self.reader.draft.eos_id
        rows = torch.stack(steps, 1).tolist()
        return [row[: row.index(eos) + 1] if eos in row else row for row in rows]

    def observe(self, outcome: Outcome) -> None:
        del outcome  # the next propose reads the committed tokens from its view

    def end(self, slot: int) -> None:
        self.texts.end(slot)


def as_target(reader: Reader, tokens: Sequence[int], ids: list[int]) -> list[int]:
    """What the draft wrote behind `tokens`, as target tokens."""
    target, draft = reader.target, reader.draft
    ends = bool(ids) and ids[-1] == draft.eos_id and target.eos_id is not None
    before, text = target.bytes_of(tokens[-CONTEXT:]), draft.bytes_of(ids)
    found = _behind(target.read(before + text), target.text_of, len(before))
    if found is None:  # a token spans the seam: read the draft alone
        found = target.spell(text)
    if ends and target.eos_id is not None:
        return [*found, target.eos_id]
    return found[:-1]


def _behind(ids: Sequence[int], text_of: Mapping[int, bytes], size: int) -> list[int] | None:
    """The tokens behind the first `size` bytes; None if one of them spans that place."""
    at = 0
    for n, i in enumerate(ids):
        if at == size:
            return list(ids[n:])
        at += len(text_of.get(i, b""))
    return [] if at == size else None
