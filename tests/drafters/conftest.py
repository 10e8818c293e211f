"""Shared by the drafter tests: packed batches with captured features, and hand-driven drafting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Drafter, RoundView, Space, StepState
from specctl.runtime.target.target import Target


def capture_taps(target: Target, ids: Sequence[int], taps: tuple[int, ...]) -> dict[int, Tensor]:
    """Taps [n, D] of one text, without a cache."""
    ids_1S = torch.tensor([list(ids)])
    masks = target.lm.document_masks(torch.zeros_like(ids_1S))
    with torch.no_grad():
        out = target.lm.dense(ids_1S, torch.arange(len(ids))[None], masks, taps, logits=False)
    return {tap: value[0] for tap, value in out.taps.items()}


def packed_batch(
    target: Target, drafter: Drafter, rows: int = 4, seq_len: int = 24, seed: int = 0
) -> TrainBatch:
    """Two documents and a little padding per row; the first tokens of each are no prediction."""
    generator = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(0, target.spec.vocab_size, (rows, seq_len), generator=generator)
    cut, end = seq_len // 2 - 3, seq_len - 2
    at_S = torch.arange(seq_len)
    document_S = torch.where(at_S < cut, 0, 1).masked_fill(at_S >= end, -1)
    position_S = torch.where(at_S < cut, at_S, at_S - cut)
    document_BS, position_BS = document_S.expand(rows, -1), position_S.expand(rows, -1)
    mask_BS = (document_BS >= 0) & (position_BS >= 2)
    return captured(target, drafter, TrainBatch(ids_BS, mask_BS, document_BS, position_BS))


def captured(target: Target, drafter: Drafter, batch: TrainBatch) -> TrainBatch:
    needs = drafter.needs()
    masks = target.lm.document_masks(batch.document_BS)
    with torch.no_grad():
        out = target.lm.dense(batch.ids_BS, batch.position_BS, masks, needs.taps, needs.teacher)
    return TrainBatch(
        batch.ids_BS,
        batch.loss_mask_BS,
        batch.document_BS,
        batch.position_BS,
        dict(out.taps),
        out.logits_BTV if needs.teacher else None,
    )


def view_of(texts: Mapping[int, Sequence[int]]) -> RoundView:
    """A round's view of texts by slot."""
    slots = tuple(texts)
    return RoundView(
        slots,
        torch.tensor(slots),
        torch.tensor([texts[slot][-1] for slot in slots]),
        torch.tensor([len(texts[slot]) - 1 for slot in slots]),
        tuple(tuple(text) for text in texts.values()),
    )


def fit(target: Target, drafter: Drafter, steps: int, rate: float = 3e-3) -> list[float]:
    """Mean losses of a few Adam steps on one batch."""
    batch = packed_batch(target, drafter)
    optimizer = torch.optim.Adam(drafter.trainable().values(), lr=rate)
    losses = []
    for _ in range(steps):
        out = drafter.loss(batch)
        loss = out.sum / out.count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@dataclass(frozen=True, slots=True)
class Drive:
    """Drafting by hand, without an engine."""

    target: Target
    drafter: Drafter

    def open(self, num_slots: int = 1) -> StepState:
        state = self.drafter.open(Space(num_slots, 64, 16, self.target.device, self.target.dtype))
        assert isinstance(state, StepState)
        return state

    def start(self, state: StepState, slot: int, tokens: Sequence[int]) -> None:
        taps = self.drafter.needs().taps
        features = capture_taps(self.target, tokens[:-1], taps) if len(tokens) > 1 and taps else {}
        state.start(slot, tokens, features)

    def chain_logits(self, tokens: Sequence[int], true_len: int) -> Tensor:
        """[n - true_len + 1, K]: logits after the root at `true_len` known tokens, then after each
        further token, drafted one by one."""
        state = self.open()
        self.start(state, 0, tokens[:true_len])
        rows = [state.root(view_of({0: tokens[:true_len]}))[0]]
        for step, token in enumerate(tokens[true_len:]):
            node, parent = torch.tensor([[token]]), torch.tensor([[step - 1]])
            rows.append(state.expand(node, parent)[0, 0])
        return torch.stack(rows)


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., TrainBatch]:
    return packed_batch


@pytest.fixture(scope="session")
def capture_batch() -> Callable[[Target, Drafter, TrainBatch], TrainBatch]:
    return captured


@pytest.fixture(scope="session")
def features() -> Callable[[Target, Sequence[int], tuple[int, ...]], dict[int, Tensor]]:
    return capture_taps


@pytest.fixture(scope="session")
def round_view() -> Callable[[Mapping[int, Sequence[int]]], RoundView]:
    return view_of


@pytest.fixture(scope="session")
def train_a_little() -> Callable[..., list[float]]:
    return fit


@pytest.fixture(scope="session")
def drive() -> type[Drive]:
    return Drive
