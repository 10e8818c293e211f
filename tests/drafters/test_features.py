"""Drafters that predict the target's features: what every family of them owes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.batch import TrainBatch
from specctl.core.vocab import VocabMap
from specctl.drafters.frames.feature_drafter import FeatureDrafter
from specctl_testing.drafters.head_cases import shaken_heads

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("eagle", {"ttt_steps": 3}),
    ("hass", {}),
    ("fspad", {"ttt_steps": 2}),
    ("coral", {}),
    ("jakiro", {"passes": 1}),
    ("jakiro", {"passes": 1, "decoupled": True}),
    ("gumiho", {"mlp_heads": 2}),
    ("falcon", {"stride": 3, "glance": 0.0}),
    ("flash", {"stride": 3}),
]
IDS = [f"{name}-{'-'.join(map(str, options.values()))}" for name, options in FAMILIES]
EVERY_FAMILY = pytest.mark.parametrize(("name", "options"), FAMILIES, ids=IDS)
KEPT = VocabMap(torch.arange(0, 24, 2), 24)
TEXT = [5, 17, 3, 8, 21, 9, 9, 12, 2]


@pytest.fixture(scope="module")
def target(make_target: Any) -> Any:
    return make_target(num_layers=2, vocab=24)


def shaken(target: Any, name: str, vocab: VocabMap | None = None, **options: Any) -> FeatureDrafter:
    drafter = shaken_heads(target, name, vocab, **{**options, "noise": 0.0})
    assert isinstance(drafter, FeatureDrafter)
    return drafter


def one_text(ids: list[int]) -> TrainBatch:
    row = torch.tensor([ids])
    return TrainBatch(row, torch.ones_like(row).bool(), row * 0, torch.arange(len(ids))[None])


@pytest.mark.parametrize("trimmed", [False, True], ids=["full", "trimmed"])
@EVERY_FAMILY
@torch.no_grad()
def test_training_and_serving_logits_agree_for_the_same_prefix(
    target: Any, capture_batch: Any, drive: Any, name: str, options: dict[str, Any], trimmed: bool
) -> None:
    drafter = shaken(target, name, KEPT if trimmed else None, **options)
    batch = capture_batch(target, drafter, one_text(TEXT))
    steps = drafter.unroll(batch)
    assert len(steps) > 1 or name == "jakiro"
    for known in (2, 3, 5):  # tokens before the first drafted one
        served = drive(target, drafter).chain_logits(TEXT[: known + len(steps) - 1], known)
        for i, step in enumerate(steps):
            trained_K = drafter.head()(step.ready_BSD[0, known - 2])
            torch.testing.assert_close(served[i], trained_K, rtol=1e-4, atol=1e-4)


@EVERY_FAMILY
@torch.no_grad()
def test_siblings_and_cousins_do_not_see_each_other(
    target: Any, drive: Any, round_view: Any, name: str, options: dict[str, Any]
) -> None:
    """A tree grown in any order says along each path what a chain says."""
    drafter = shaken(target, name, **options)
    one = drive(target, drafter)
    state = one.open()
    one.start(state, 0, TEXT)
    state.root(round_view({0: TEXT}))
    state.expand(torch.tensor([[4, 7]]), torch.tensor([[-1, -1]]))
    state.expand(torch.tensor([[1, 13]]), torch.tensor([[1, -1]]))  # depths 2 and 1 in one call
    last = state.expand(torch.tensor([[6, 6, 3]]), torch.tensor([[2, 0, 3]]))[0]
    for row, path in zip(last, ([7, 1, 6], [4, 6], [13, 3]), strict=True):
        chain = one.chain_logits([*TEXT, *path], len(TEXT))[-1]
        torch.testing.assert_close(row, chain, rtol=1e-4, atol=1e-4)


@EVERY_FAMILY
@torch.no_grad()
def test_a_later_token_or_another_document_is_invisible(
    target: Any, capture_batch: Any, name: str, options: dict[str, Any]
) -> None:
    """Row t of step j reads tokens up to t + 1 + j of its own document."""
    drafter = shaken(target, name, **options)
    document = torch.tensor([[0] * 5 + [1] * 4])
    position = torch.tensor([[*range(5), *range(4)]])
    for changed, rows in ((6, slice(0, 2)), (2, slice(5, None))):
        found = []
        for token in (1, 2):
            ids = torch.tensor([[*TEXT[:changed], token, *TEXT[changed + 1 :]]])
            batch = TrainBatch(ids, document >= 0, document, position)
            found.append(drafter.unroll(capture_batch(target, drafter, batch)))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a.ready_BSD[:, rows], b.ready_BSD[:, rows])
