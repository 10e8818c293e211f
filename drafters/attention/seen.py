"""What the queries of training see: one run of keys each.

Every mask of training is such a run: a row of text sees its document up to itself, a block the text
up to its anchor and then itself. So a mask is `Seen`, two numbers a query, and where queries and
keys are the rows of one text, its documents. `SeenPart` is that of a stretch of every row, whose
other positions other processes have.
Letters: B rows, E head width, J key/value heads, L positions, S sequence, T fed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.forward.only_shapes import has_only_shapes
from specctl.core.forward.row_part import RowPart


@dataclass(frozen=True, slots=True)
class Span:
    """One document: where it stands in which row, [start, stop)."""

    row: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Seen:
    """Every query sees the keys from `first_BT` to `last_BT`, both counted. `spans`: the documents,
    in order, where queries and keys are the rows of one text; `ends`: where each begins in the
    rows behind one another, and the end of all, int32."""

    first_BT: Tensor
    last_BT: Tensor
    spans: tuple[Span, ...] | None = None
    ends: Tensor | None = None

    @classmethod
    def text(cls, document_BS: Tensor) -> Seen:
        """Rows of packed text: causal inside one document; padding (-1) sees only itself."""
        B, S = document_BS.shape
        at_BS = torch.arange(S, device=document_BS.device).expand(B, S)
        begins_BS = document_BS < 0
        begins_BS[:, 0] = True
        begins_BS[:, 1:] |= document_BS[:, 1:] != document_BS[:, :-1]
        first_BS = torch.where(begins_BS, at_BS, 0).cummax(1).values
        begin = begins_BS.flatten().nonzero().flatten()
        ends = torch.cat([begin, begin.new_full((1,), B * S)]).to(torch.int32)
        places = fullest(B, S) if has_only_shapes() else ends.tolist()
        spans = [Span(a // S, a % S, (b - 1) % S + 1) for a, b in pairwise(places)]
        return cls(first_BS, at_BS, tuple(spans), ends)

    def gathered(self, key_BJLE: Tensor) -> Tensor:
        """Keys or values of whole rows, which are here."""
        return key_BJLE

    def sets(self, key_BJLE: Tensor, value_BJLE: Tensor) -> list[KeySet]:
        """Whole rows as one set."""
        return [KeySet(key_BJLE, value_BJLE, self)]

    def rows(self, row_BT: Tensor) -> Seen:
        """Queries that see what these rows of the text see."""
        return Seen(self.first_BT.gather(1, row_BT), self.last_BT.gather(1, row_BT))

    def mask(self, num_keys: int) -> Tensor:
        """[B, 1, T, L]: the same, bool."""
        at_L = torch.arange(num_keys, device=self.first_BT.device)
        low_BT1, high_BT1 = self.first_BT[:, :, None], self.last_BT[:, :, None]
        return ((at_L >= low_BT1) & (at_L <= high_BT1))[:, None]


@dataclass(frozen=True, slots=True)
class SeenPart:
    """What the queries of a stretch of every row see of the text: those keys of the stretch itself,
    and of the positions before it, which other processes have. Keys and values of whole rows are
    gathered; the stretch goes through a flash kernel, and the two sets are joined."""

    part: RowPart
    length: int
    own: Seen
    before: Seen

    @classmethod
    def text(cls, document_BS: Tensor, part: RowPart) -> SeenPart:
        """Rows of packed text, as `Seen.text` has them."""
        whole, length = Seen.text(document_BS), document_BS.shape[1]
        start = part.bounds(length)[0]
        first_BT = part.of(whole.first_BT)
        before = Seen(first_BT, torch.full_like(first_BT, start - 1))
        return cls(part, length, Seen.text(part.of(document_BS)), before)

    def gathered(self, own_BJTE: Tensor) -> Tensor:
        """Keys or values of whole rows."""
        return self.part.gathered(own_BJTE, self.length, dim=2)

    def sets(self, key_BJLE: Tensor, value_BJLE: Tensor) -> list[KeySet]:
        """The sets that make up whole rows."""
        start, stop = self.part.bounds(self.length)
        sets = [KeySet(key_BJLE[:, :, start:stop], value_BJLE[:, :, start:stop], self.own)]
        if start:
            sets.append(KeySet(key_BJLE[:, :, :start], value_BJLE[:, :, :start], self.before))
        return sets


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """A row sees the newest `size` rows of its document, itself counted (as transformers counts
    `sliding_window`), and the first `sink`."""

    size: int
    sink: int = 0

    def runs(self, begin_BT: Tensor, last_BT: Tensor, at_BT: Tensor) -> tuple[Seen, ...]:
        """What queries at `at_BT` see of the keys from `begin_BT`, where their document begins, to
        `last_BT`: the near ones, of which each sees one at least, and the first ones. No key is in
        both."""
        low_BT = torch.maximum(begin_BT, at_BT + (1 - self.size))
        near = Seen(low_BT, last_BT)
        if not self.sink:
            return (near,)
        return near, Seen(begin_BT, torch.minimum(begin_BT + self.sink, low_BT) - 1)

    def holds(self, text: Seen, ahead: int) -> bool:
        """Whether queries up to `ahead` positions behind their rows see all of every document."""
        longest = max((span.stop - span.start for span in text.spans or ()), default=0)
        return longest + ahead <= self.size


@dataclass(frozen=True, slots=True)
class SeenWindow:
    """What the queries here see of the text through a window: two sets of the same keys that have
    none in common, the rows near them and the first ones."""

    whole: Seen | SeenPart
    runs: tuple[Seen, ...]

    @classmethod
    def of(
        cls,
        batch: TrainBatch,
        text: Seen,
        whole: Seen | SeenPart,
        window: AttentionWindow,
        ahead: int,
    ) -> SeenWindow:
        """Queries that stand `ahead` positions behind their rows, ahead < size. `text` are whole
        rows, `whole` is what the queries here see of them without a window."""
        assert ahead < window.size, f"{ahead} positions ahead of a window of {window.size}"
        begin_BT, at_BT = batch.own(text.first_BT), batch.own(text.last_BT)
        return cls(whole, window.runs(begin_BT, at_BT, at_BT + ahead))

    def gathered(self, key_BJLE: Tensor) -> Tensor:
        """Keys or values of whole rows."""
        return self.whole.gathered(key_BJLE)

    def sets(self, key_BJLE: Tensor, value_BJLE: Tensor) -> list[KeySet]:
        """The rows near, and the first rows."""
        return [KeySet(key_BJLE, value_BJLE, each) for each in self.runs]


def seen_text(batch: TrainBatch) -> Seen | SeenPart:
    """What the positions that are computed here see of their rows."""
    if batch.part is None:
        return Seen.text(batch.document_BS)
    return SeenPart.text(batch.document_BS, batch.part)


def seen_ahead(
    batch: TrainBatch, window: AttentionWindow | None, steps: int
) -> list[Seen | SeenPart | SeenWindow]:
    """What the queries of each of so many steps see of the text: those of step j stand j positions
    behind their rows. A window that holds every document whole changes nothing."""
    whole = seen_text(batch)
    if window is None:
        return [whole] * steps
    text = whole if isinstance(whole, Seen) else Seen.text(batch.document_BS)
    return [
        whole if window.holds(text, j) else SeenWindow.of(batch, text, whole, window, j)
        for j in range(steps)
    ]


@dataclass(frozen=True, slots=True)
class KeySet:
    """Keys and values [B, J, L, E], and which of them a query sees; None: entry t alone by query
    t."""

    key: Tensor
    value: Tensor
    seen: Seen | None


def fullest(rows: int, length: int) -> list[int]:
    """Where documents begin, and the end of all, when nothing is known of them but shapes: those
    that take most memory of attention. Of packed rows copies are made, so each row has a second
    document, and the longer the first one, the larger its copy."""
    begin = {row * length + at for row in range(rows) for at in (0, length - 1)}
    return [*sorted(begin), rows * length]
