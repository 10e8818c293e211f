"""Documents -> rows of equal length, wasting little: best fit decreasing.

A document never crosses a row; positions restart with it, and its number lets attention stay inside
it. Longer documents are cut: raw text into pieces that all count, conversations to their first
`seq_len` tokens. Letters: R rows, S sequence, N documents.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import numpy.typing as npt

from specctl.core.forward.prompt_images import StoredImage

HELD_SHARE = 20  # one row in so many is kept for measuring

Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids, which of them are to be predicted, and the domain it is counted under.
    `is_question`: its prompt is a question that the target wrote itself; `images`: those that
    stand among the ids."""

    ids: Ints
    mask: Bools
    domain: str
    is_question: bool = False
    images: tuple[StoredImage, ...] = ()


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Packed documents: `document_RS` is -1 on padding, `domain_N` names each document's domain;
    `images`: those of each document that has some, by its number."""

    ids_RS: Ints
    mask_RS: Bools
    document_RS: Ints
    position_RS: Ints
    domain_N: list[str]
    images: Mapping[int, tuple[StoredImage, ...]] = field(default_factory=dict)

    @property
    def fill(self) -> float:
        """Share of the places that hold a token."""
        return float((self.document_RS >= 0).mean()) if self.document_RS.size else 0.0


@dataclass(frozen=True, slots=True)
class DocumentCut:
    """What cutting to `seq_len` did to the documents."""

    documents: list[Document]
    shortened: int
    dropped: int
    longest: int


def cut_documents(documents: Sequence[Document], seq_len: int) -> DocumentCut:
    """Documents of at most `seq_len` tokens, each with at least one token to predict."""
    kept: list[Document] = []
    shortened = dropped = longest = 0
    for document in documents:
        longest = max(longest, len(document.ids))
        pieces = [p for p in _pieces(document, seq_len) if p.mask.any()]
        shortened += len(document.ids) > seq_len and not document.mask[1:].all() and bool(pieces)
        dropped += not pieces
        kept += pieces
    return DocumentCut(kept, shortened, dropped, longest)


def _pieces(document: Document, seq_len: int) -> Iterator[Document]:
    """Raw text (every token counts) in pieces, anything else its beginning; the first token of a
    document has nothing before it and is never predicted."""
    if document.images:
        yield _with_whole_images(document, seq_len)
        return
    is_text = bool(document.mask[1:].all())
    for start in range(0, len(document.ids) if is_text else 1, seq_len):
        mask = document.mask[start : start + seq_len].copy()
        mask[:1] = False
        yield replace(document, ids=document.ids[start : start + seq_len], mask=mask)


def _with_whole_images(document: Document, seq_len: int) -> Document:
    """The beginning of a document with images, cut in front of one that would not be whole."""
    cut = next((i.first for i in document.images if i.end > seq_len), seq_len)
    mask = document.mask[:cut].copy()
    mask[:1] = False
    images = tuple(image for image in document.images if image.end <= cut)
    return replace(document, ids=document.ids[:cut], mask=mask, images=images)


def without_image_loss(document: Document) -> Document:
    """The document, with nothing to predict where an image stands: no text is there."""
    if not document.images:
        return document
    mask = document.mask.copy()
    for image in document.images:
        mask[image.first : image.end] = False
    return replace(document, mask=mask)


def best_fit(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Which documents share a row: longest first, each into the fullest row that still has room.

    At most 11/9 of the best number of rows plus one (best fit decreasing); O(N log S).
    """
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # room left -> rows, the newest taken first
    rooms: list[int] = []  # the keys of open_rows, ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        assert 0 < length <= seq_len, f"document {index} has {length} tokens for rows of {seq_len}"
        at = bisect_left(rooms, length)
        if at < len(rooms):
            room = rooms[at]
            row = open_rows[room].pop()
            if not open_rows[room]:
                del open_rows[room], rooms[at]
        else:
            room, row = seq_len, len(rows)
            rows.append([])
        rows[row].append(index)
        if room > length:
            if room - length not in open_rows:
                open_rows[room - length] = []
                insort(rooms, room - length)
            open_rows[room - length].append(row)
    return rows


def pack(documents: Sequence[Document], seq_len: int, pad_id: int, seed: int) -> PackedRows:
    """The documents in shuffled rows; the same input gives the same rows."""
    plan = best_fit([len(d.ids) for d in documents], seq_len)
    Random(seed).shuffle(plan)
    return laid_out(documents, _users_last(plan, documents), seq_len, pad_id)


def share_held(num_rows: int) -> int:
    """Of so many rows, those at the end that are kept for measuring."""
    return max(1, num_rows // HELD_SHARE)


def _users_last(plan: list[list[int]], documents: Sequence[Document]) -> list[list[int]]:
    """The rows, where the target wrote questions beside the user's: of those that are kept for
    measuring the first half have a prompt of the user's, but at most a quarter of the rows that
    have any."""
    is_theirs = [any(not documents[index].is_question for index in row) for row in plan]
    if all(is_theirs) or not any(is_theirs):
        return plan
    held, theirs = share_held(len(plan)), [row for row, is_so in enumerate(is_theirs) if is_so]
    chosen = theirs[: max(1, min(-(-held // 2), len(theirs) // 4))]
    others = [row for row in range(len(plan)) if row not in set(chosen)]
    place = len(plan) - held
    return [plan[row] for row in (*others[:place], *chosen, *others[place:])]


def laid_out(
    documents: Sequence[Document], plan: Sequence[Sequence[int]], seq_len: int, pad_id: int
) -> PackedRows:
    """Rows of the documents whose numbers the plan gives, one after the other."""
    R = len(plan)
    ids_RS = np.full((R, seq_len), pad_id, dtype=np.int32)
    mask_RS = np.zeros((R, seq_len), dtype=np.bool_)
    document_RS = np.full((R, seq_len), -1, dtype=np.int32)
    position_RS = np.zeros((R, seq_len), dtype=np.int32)
    domain_N: list[str] = []
    images: dict[int, tuple[StoredImage, ...]] = {}
    for row, members in enumerate(plan):
        start = 0
        for index in members:
            document = documents[index]
            end = start + len(document.ids)
            ids_RS[row, start:end] = document.ids
            mask_RS[row, start:end] = document.mask
            document_RS[row, start:end] = len(domain_N)
            if document.images:
                images[len(domain_N)] = document.images
            position_RS[row, start:end] = np.arange(end - start)
            domain_N.append(document.domain)
            start = end
    return PackedRows(ids_RS, mask_RS, document_RS, position_RS, domain_N, images)


def better_seq_len(lengths: Sequence[int], seq_len: int) -> tuple[int, float]:
    """A row length between 3/4 and 3/2 of `seq_len` that wastes least, and how full it is."""
    longest, found = max(lengths), []
    for tried in range(max(longest, seq_len * 3 // 4), seq_len * 3 // 2 + 1, 8):
        num_rows = len(best_fit(lengths, tried))
        found.append((sum(lengths) / (num_rows * tried), -tried))
    if not found:
        return seq_len, 0.0
    fill, minus_tried = max(found)
    return -minus_tried, fill
