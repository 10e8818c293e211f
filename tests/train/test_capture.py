"""Capture: the features a drafter trains on are those the target has when it decodes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Needs
from specctl.core.forward.masks import chain_mask
from specctl.core.language_model import Masks
from specctl.recipes.schema import TrainPart
from specctl.runtime.target.target import Target
from specctl.train.data.rows.pack import Document, pack
from specctl.train.features import reading
from specctl.train.features.capture import capture
from specctl.train.features.reading import reading_target


def packed(lengths: list[int], seq_len: int = 16) -> TrainBatch:
    rng = np.random.default_rng(0)
    documents = [
        Document(rng.integers(0, 96, n).astype(np.int32), np.arange(n) > 0, "d") for n in lengths
    ]
    rows = pack(documents, seq_len, 0, 0)
    arrays = (rows.ids_RS, rows.mask_RS, rows.document_RS, rows.position_RS)
    ids, mask, document, position = (torch.from_numpy(a) for a in arrays)
    return TrainBatch(ids.long(), mask, document.long(), position.long())


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gpt_neox"])
def test_packed_features_equal_those_of_decoding_alone(
    make_target: Callable[..., Target], model_type: str
) -> None:
    target = make_target(model_type, num_layers=2, dtype=torch.float64)
    batch = capture(target, packed([7, 5, 9, 3]), Needs(taps=(0, 1, 2), teacher=True))
    assert batch.teacher_BSV is not None
    for number in range(4):
        row, at = (batch.document_BS == number).nonzero(as_tuple=True)
        ids_1T = batch.ids_BS[row, at][None]
        T = ids_1T.shape[1]
        kv, zero = target.new_kv(1, T), torch.zeros(1, dtype=torch.long)
        kv.begin((0,), zero, zero, T, T, 0)
        masks = Masks(
            chain_mask(zero, T, T), {w: chain_mask(zero, T, T, w) for w in target.lm.windows}
        )
        out = target.lm.forward(ids_1T, torch.arange(T)[None], masks, kv, (0, 1, 2))
        assert out.logits_BTV is not None
        torch.testing.assert_close(batch.teacher_BSV[row, at], out.logits_BTV[0])
        for tap in (0, 1, 2):
            torch.testing.assert_close(batch.taps[tap][row, at], out.taps[tap][0])


def test_only_what_is_needed_is_kept(make_target: Callable[..., Target]) -> None:
    target = make_target(num_layers=2)
    batch = packed([7, 5])
    assert capture(target, batch, Needs()).taps == {}
    taps_only = capture(target, batch, Needs(taps=(1,)))
    assert (list(taps_only.taps), taps_only.teacher_BSV) == ([1], None)
    teacher_only = capture(target, batch, Needs(teacher=True))
    assert teacher_only.taps == {}
    assert teacher_only.teacher_BSV is not None


@pytest.mark.parametrize("model_type", ["llama", "gpt_neox"])
def test_teacher_rows_computed_when_asked_are_the_logits(
    make_target: Callable[..., Target], model_type: str
) -> None:
    """An architecture whose head is more than a matrix hands out logits instead."""
    target = make_target(model_type, num_layers=2)
    batch = packed([7, 5])
    logits_BSV = capture(target, batch, Needs(teacher=True)).teacher_BSV
    assert logits_BSV is not None
    asked = capture(target, batch, Needs(taps=(1,), teacher=True, teacher_rows=True))
    assert list(asked.taps) == [1]
    if model_type == "gpt_neox":
        assert asked.teacher_rows is None
        assert torch.equal(asked.teacher_BSV, logits_BSV)
        return
    assert (asked.teacher_BSV, asked.teacher_rows is None) == (None, False)
    rows = torch.tensor([0, 5, 11])
    torch.testing.assert_close(asked.teacher_rows[rows], logits_BSV.flatten(0, 1)[rows])


def test_captured_features_can_be_trained_on(make_target: Callable[..., Target]) -> None:
    """Tensors made under inference_mode would be refused by autograd here."""
    target = make_target(num_layers=2)
    batch = capture(target, packed([7, 5]), Needs(taps=(1,)))
    weight = torch.nn.Parameter(torch.ones(batch.taps[1].shape[-1]))
    (batch.taps[1] * weight).sum().backward()
    assert weight.grad is not None
    assert not batch.taps[1].requires_grad
    assert all(p.grad is None for p in target.lm.module.parameters())


def test_the_target_is_read_in_the_precision_that_is_fast_here(
    make_target: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = make_target(num_layers=2)
    batch, needs = packed([7, 5]), Needs(taps=(1, 2))
    plain = capture(wide, batch, needs)
    short, full = TrainPart(precision="bf16"), TrainPart()
    monkeypatch.setattr(reading, "has_fast_bf16", lambda: True)
    assert reading_target(wide, full) is wide
    read = reading_target(wide, short)
    assert (wide.dtype, read.dtype) == (torch.float32, torch.bfloat16)
    rounded = capture(read, batch, needs)
    for tap in needs.taps:
        assert rounded.taps[tap].dtype == torch.bfloat16
        error = (rounded.taps[tap].float() - plain.taps[tap]).norm() / plain.taps[tap].norm()
        assert 0.0 < error < 0.03
    assert reading_target(read, short) is read
    monkeypatch.setattr(reading, "has_fast_bf16", lambda: False)
    assert reading_target(wide, short) is wide
    assert reading_target(read, short).dtype == torch.float32
