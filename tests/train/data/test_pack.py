"""Packing: nothing lost, little wasted, documents apart."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import torch

from specctl.core.forward.masks import document_mask
from specctl.train.data.rows.pack import Document, best_fit, cut_documents, pack, share_held


def document(length: int, first: int = 0, answer_from: int = 0) -> Document:
    mask = np.arange(length) >= answer_from
    return Document(np.arange(first, first + length, dtype=np.int32), mask, "d")


def some_documents(count: int, seq_len: int) -> list[Document]:
    rng = Random(3)
    return [document(rng.randint(2, seq_len), first=1000 * i) for i in range(count)]


def test_packing_loses_and_repeats_no_token() -> None:
    documents = some_documents(200, 32)
    rows = pack(documents, 32, pad_id=-7, seed=0)
    kept = rows.ids_RS[rows.document_RS >= 0]
    assert sorted(kept.tolist()) == sorted(i for d in documents for i in d.ids.tolist())
    assert (rows.ids_RS[rows.document_RS < 0] == -7).all()
    assert not rows.mask_RS[rows.document_RS < 0].any()


def test_every_document_stands_in_one_piece_with_positions_from_zero() -> None:
    rows = pack(some_documents(50, 32), 32, 0, 0)
    for number in range(50):
        at = np.argwhere(rows.document_RS == number)
        assert len(set(at[:, 0])) == 1
        assert (np.diff(at[:, 1]) == 1).all()
        assert rows.position_RS[tuple(at.T)].tolist() == list(range(len(at)))


def test_best_fit_wastes_less_than_a_twentieth() -> None:
    rng = Random(0)
    lengths = [min(256, max(3, int(rng.lognormvariate(4.5, 0.7)))) for _ in range(3000)]
    rows = best_fit(lengths, 256)
    assert sum(lengths) / (256 * len(rows)) > 0.95
    assert sorted(i for row in rows for i in row) == list(range(3000))
    assert max(sum(lengths[i] for i in row) for row in rows) <= 256


def test_packing_is_the_same_every_time_and_other_with_another_seed() -> None:
    documents = some_documents(100, 32)
    first, again = pack(documents, 32, 0, 5), pack(documents, 32, 0, 5)
    assert (first.ids_RS == again.ids_RS).all()
    assert not (first.ids_RS == pack(documents, 32, 0, 6).ids_RS).all()


def test_attention_never_crosses_documents_of_a_packed_row() -> None:
    rows = pack([document(5), document(6), document(4)], 16, 0, 0)
    mask_SS = document_mask(torch.from_numpy(rows.document_RS).long())[0, 0]
    numbers = rows.document_RS[0]
    for i, j in mask_SS.nonzero().tolist():
        assert i == j or (numbers[i] == numbers[j] >= 0 and j < i)


def test_long_text_is_cut_into_pieces_that_all_count() -> None:
    cut = cut_documents([document(70)], 32)
    assert [len(d.ids) for d in cut.documents] == [32, 32, 6]
    assert [int(d.mask.sum()) for d in cut.documents] == [31, 31, 5]  # each first token has no past
    assert (cut.shortened, cut.dropped, cut.longest) == (0, 0, 70)


def test_a_conversation_keeps_its_beginning_and_is_dropped_without_answer() -> None:
    cut = cut_documents([document(40, answer_from=20), document(40, answer_from=32)], 32)
    assert [len(d.ids) for d in cut.documents] == [32]
    assert cut.documents[0].mask.sum() == 12
    assert (cut.shortened, cut.dropped) == (1, 1)


def test_rows_kept_for_measuring_have_prompts_of_the_user() -> None:
    questions = [replace(one, is_question=True) for one in some_documents(400, 32)]
    theirs = [document(20, first=10**6 + 1000 * i) for i in range(12)]
    rows = pack([*questions, *theirs], 32, 0, seed=0)
    held = rows.ids_RS[-share_held(len(rows.ids_RS)) :]
    assert ((held >= 10**6).any(axis=1)).sum() >= 3
    assert (held[:3] >= 10**6).any(axis=1).all()
    alone = pack(theirs, 32, 0, seed=0)
    assert (rows.ids_RS >= 10**6).sum() == (alone.ids_RS >= 10**6).sum()
