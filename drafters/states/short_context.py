"""ShortContextState: a draft model that reads the useful parts of a long prompt (RAPID, arXiv
2502.20330, section 3.1).

The target reads the whole prompt and verifies, so the output distribution is the target's, whatever
the draft has read; behind a short prompt each drafted token is cheaper, as there are fewer keys and
values. Kept are the first tokens (a chat template's beginning), the last ones (the question, and
the header of the answer), and the pieces between that are most like the last ones, in their order.
RAPID compares embeddings of a model; here it is BM25 over token ids (Robertson and Zaragoza 2009),
which needs none. RAPID's target, whose distribution leans towards the draft's, is not built.
Letters: B rows, K draft vocabulary, M new nodes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import overload

from torch import Tensor

from specctl.core.drafter import Outcome, RoundView, StepState
from specctl.core.language_model import ChainDraws, WholeChain

LEAST = 64  # tokens that a draft may be given
PARTS = 8  # of the tokens that are kept: one begins, two end, the others are pieces between
SATURATION = 1.2  # BM25's k1; its b is 0, as all pieces are of one length


def shortened(tokens: Sequence[int], size: int) -> list[int]:
    """At most `size` of these tokens, in their order; all if there are no more."""
    if len(tokens) <= size:
        return list(tokens)
    piece = size // PARTS
    first, last = list(tokens[:piece]), list(tokens[len(tokens) - 2 * piece :])
    between = tokens[piece : len(tokens) - 2 * piece]
    pieces = [list(between[at : at + piece]) for at in range(0, len(between), piece)]
    score = bm25(set(last), pieces)
    best = sorted(range(len(pieces)), key=lambda at: (-score[at], -at))[: PARTS - 3]
    return first + [token for at in sorted(best) for token in pieces[at]] + last


def bm25(question: set[int], pieces: Sequence[Sequence[int]]) -> list[float]:
    """How well each piece answers to the tokens of a question."""
    counts = [Counter(piece) for piece in pieces]
    holders = {token: sum(token in count for count in counts) for token in question}
    weight = {
        token: math.log1p((len(pieces) - n + 0.5) / (n + 0.5)) for token, n in holders.items()
    }
    return [
        sum(
            weight[token] * count[token] * (SATURATION + 1) / (count[token] + SATURATION)
            for token in question & count.keys()
        )
        for count in counts
    ]


class ShortText(Sequence[int]):
    """A text whose first `instead` tokens are replaced by those of `head`."""

    def __init__(self, head: Sequence[int], instead: int, text: Sequence[int]) -> None:
        self.head, self.text, self.cut = head, text, instead - len(head)

    def __len__(self) -> int:
        return len(self.text) - self.cut

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        at = at + len(self) if at < 0 else at
        return self.head[at] if at < len(self.head) else self.text[at + self.cut]


class ShortContextState(StepState):
    """A state that reads tokens alone, shown at most `size` tokens of each prompt (None: all), and
    none of `unsaid`, which stand for images (a text-only draft: arXiv 2404.08856, section 3)."""

    def __init__(self, inner: StepState, size: int | None, unsaid: Collection[int] = ()) -> None:
        self.inner, self.size, self.unsaid = inner, size, frozenset(unsaid)
        self._heads: dict[int, tuple[list[int], int]] = {}  # of a slot, and in place of how many

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        head = [token for token in tokens[:-1] if token not in self.unsaid] + [*tokens[-1:]]
        head = head if self.size is None else shortened(head, self.size)
        self._heads[slot] = head, len(tokens)
        self.inner.start(slot, head, taps)

    def root(self, view: RoundView) -> Tensor:
        return self.inner.root(self._short(view))

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        """[B, M, K]."""
        return self.inner.expand(token_BM, parent_BM)

    def whole_chain(
        self, view: RoundView, length: int, draws: ChainDraws | None = None
    ) -> WholeChain | None:
        return self.inner.whole_chain(self._short(view), length, draws)

    def hidden(self) -> Tensor:
        return self.inner.hidden()

    def observe(self, outcome: Outcome) -> None:
        self.inner.observe(replace(outcome, view=self._short(outcome.view)))

    def end(self, slot: int) -> None:
        self._heads.pop(slot, None)
        self.inner.end(slot)

    def _short(self, view: RoundView) -> RoundView:
        """The same round, over the texts that the draft has read."""
        texts = tuple(
            ShortText(*self._heads[slot], tokens)
            for slot, tokens in zip(view.slots, view.tokens, strict=True)
        )
        cuts = [text.cut for text in texts]
        if not any(cuts):
            return view
        cut_B = view.kept_len_B.new_tensor(cuts)
        return replace(view, tokens=texts, kept_len_B=view.kept_len_B - cut_B)
