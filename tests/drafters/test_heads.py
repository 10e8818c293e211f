"""Heads on the target's last state: what every family of them owes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Budget, Space
from specctl.core.vocab import VocabMap
from specctl.drafters.frames.head_drafter import HeadDrafter
from specctl_testing.drafters.head_cases import make_heads, train
from specctl_testing.drafters.parallel_runs import PROMPTS, decode

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("medusa", {"num_blocks": 2}),
    ("medusa", {"head": "shared"}),
    ("blockwise", {}),
    ("hydra", {"num_blocks": 2}),
    ("hydra", {"prefix": 2}),
    ("clover", {}),
    ("clover", {"layers": 0}),
    ("recurrent", {}),
    ("recurrent", {"cell": "sum"}),
    ("mlp-speculator", {"scale_input": True}),
    ("mlp-speculator", {"tie": True, "inner": 48}),
    ("dflash", {"layers": 2}),
    ("p-eagle", {"layers": 2}),
    ("dspark", {"layers": 1}),
    ("dspark", {"layers": 1, "correction": "gated"}),
    ("dspark", {"layers": 1, "correction": "rnn"}),
    ("domino", {"layers": 1, "base_weight": 0.5}),
    ("xpress", {"layers": 1}),
    ("glide", {}),
    ("glide", {"width": 16}),
    ("moa", {}),
    ("moa", {"target_layers": 1}),
    ("chimera", {}),
]
FIRST = [case for i, case in enumerate(FAMILIES) if case[0] not in dict(FAMILIES[:i])]
IDS = [f"{name}-{'-'.join(map(str, options.values()))}" for name, options in FAMILIES]
FROM_SCRATCH = (
    "mlp-speculator", "dflash", "p-eagle", "dspark", "domino", "xpress", "glide", "moa", "chimera",
)  # fmt: skip
START_AS_BASE = [case for case in FAMILIES if case[0] not in FROM_SCRATCH]
KEPT = VocabMap(torch.arange(0, 24, 2), 24)
TEXT = [5, 17, 3, 8, 21, 9, 9, 12, 2]


def one_text(ids: list[int]) -> TrainBatch:
    row = torch.tensor([ids])
    return TrainBatch(row, torch.ones_like(row).bool(), row * 0, torch.arange(len(ids))[None])


@pytest.fixture(scope="module")
def target(make_target: Any) -> Any:
    return make_target(num_layers=2, vocab=24)


@pytest.fixture(scope="module")
def learned(target: Any, make_batch: Any) -> Any:
    """learned(name, trimmed, **options): heads that are neither as they begin nor perfect, each
    trained once."""
    kept: dict[str, HeadDrafter] = {}

    def make(name: str, trimmed: bool, **options: Any) -> HeadDrafter:
        key = f"{name} {trimmed} {options}"
        if key not in kept:
            vocab = KEPT if trimmed else None
            kept[key] = make_heads(target, name, vocab, num_heads=3, **options)
            steps = 4 if trimmed else 40 if name == "mlp-speculator" else 12
            with torch.enable_grad():
                train(target, kept[key], make_batch, steps, rows=2)
        return kept[key]

    return make


@pytest.mark.parametrize(
    ("name", "options", "trimmed"),
    [  # over a trimmed vocabulary each family once; its other options there are proofs
        pytest.param(
            *case,
            trimmed,
            marks=[pytest.mark.proof] if trimmed and case not in FIRST else [],
            id=f"{name}-{'trimmed' if trimmed else 'full'}",
        )
        for case, name in zip(FAMILIES, IDS, strict=True)
        for trimmed in (False, True)
    ],
)
@torch.no_grad()
def test_training_and_serving_logits_agree_for_the_same_prefix(
    target: Any,
    learned: Any,
    capture_batch: Any,
    drive: Any,
    name: str,
    options: dict[str, Any],
    trimmed: bool,
) -> None:
    drafter: HeadDrafter = learned(name, trimmed, **options)
    batch = capture_batch(target, drafter, one_text(TEXT))
    weights = drafter.head_weights()
    trained = [
        F.linear(ready_BSE[0], weights[min(i, len(weights) - 1)])
        for i, ready_BSE in enumerate(drafter.unroll(batch))
    ]
    for known in range(2, len(TEXT) - 2, 3):  # tokens before the first drafted one
        served = drive(target, drafter).chain_logits(TEXT[: known + 2], known)
        for i in range(3):  # head i has read the root and i drafted tokens
            torch.testing.assert_close(served[i], trained[i][known - 2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "options"), START_AS_BASE, ids=IDS[: len(START_AS_BASE)])
@torch.no_grad()
def test_fresh_heads_reproduce_the_targets_head_exactly(
    target: Any, make_batch: Any, name: str, options: dict[str, Any]
) -> None:
    drafter: HeadDrafter = make_heads(target, name, num_heads=3, **options)
    batch = make_batch(target, drafter)
    for i, ready_BSE in enumerate(drafter.unroll(batch)):
        weights = drafter.head_weights()
        logits_BSK = F.linear(ready_BSE, weights[min(i, len(weights) - 1)])
        torch.testing.assert_close(logits_BSK, target_logits(target, batch), rtol=1e-5, atol=1e-5)


def target_logits(target: Any, batch: TrainBatch) -> torch.Tensor:
    return F.linear(batch.taps[target.spec.num_layers], target.borrowed().head_VD)


@pytest.mark.parametrize(("name", "options"), FAMILIES, ids=IDS)
@torch.no_grad()
def test_a_later_document_or_token_is_invisible(
    target: Any, capture_batch: Any, name: str, options: dict[str, Any]
) -> None:
    """Row t of head i reads tokens up to t + 1 + i of its own document."""
    drafter: HeadDrafter = make_heads(target, name, num_heads=3, **options)
    for parameter in drafter.trainable().values():  # gates and branches that are zero hide leaks
        parameter.add_(0.05 * torch.randn(parameter.shape))
    document = torch.tensor([[0] * 5 + [1] * 4])
    position = torch.tensor([[*range(5), *range(4)]])
    for changed, first_document in ((6, True), (2, False)):
        found = []
        for token in (1, 2):
            ids = [*TEXT[:changed], token, *TEXT[changed + 1 :]]
            batch = TrainBatch(torch.tensor([ids]), document >= 0, document, position)
            found.append(list(drafter.unroll(capture_batch(target, drafter, batch))))
        for i, (a, b) in enumerate(zip(*found, strict=True)):
            # rows of the first document that look no further than its end; the whole second one
            rows = slice(0, 5 - 1 - i) if first_document else slice(5, None)
            torch.testing.assert_close(a[:, rows], b[:, rows])


@pytest.mark.parametrize(("name", "options"), FAMILIES, ids=IDS)
@torch.no_grad()
def test_siblings_and_cousins_do_not_see_each_other(
    target: Any, drive: Any, round_view: Any, name: str, options: dict[str, Any]
) -> None:
    """A tree grown in any order says along each path what a chain says."""
    drafter = make_heads(target, name, num_heads=3, **options)
    for parameter in drafter.trainable().values():
        parameter.add_(0.05 * torch.randn(parameter.shape))
    one = drive(target, drafter)
    state = one.open()
    one.start(state, 0, TEXT)
    state.root(round_view({0: TEXT}))
    state.expand(torch.tensor([[4, 7]]), torch.tensor([[-1, -1]]))
    state.expand(torch.tensor([[1, 13]]), torch.tensor([[1, -1]]))  # depths 2 and 1 in one call
    last = state.expand(torch.tensor([[6, 6]]), torch.tensor([[2, 0]]))[0]
    for row, path in zip(last, ([7, 1, 6], [4, 6]), strict=True):
        chain = one.chain_logits([*TEXT, *path], len(TEXT))[-1]
        torch.testing.assert_close(row, chain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "options"), FAMILIES, ids=IDS)
@torch.no_grad()
def test_after_rounds_of_unequal_acceptance_it_drafts_as_from_a_fresh_start(
    target: Any, learned: Any, drive: Any, name: str, options: dict[str, Any]
) -> None:
    drafter: HeadDrafter = learned(name, False, **options)
    ran = decode(target, drafter, PROMPTS, tokens=24, length=3, slots=2, policy="chain")
    assert len({n for outcome in ran.outcomes for n in outcome.num_accepted}) > 1
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, ran.answers, strict=True)]
    for outcome in ran.outcomes[-5:]:
        for row, slot in enumerate(outcome.view.slots):
            text = texts[slot][: int(outcome.view.kept_len_B[row]) + 1]
            drafted = outcome.tree.token_BN[row].tolist()
            if drafted:  # no room for a draft in front of the last token
                distributions_TK = drive(target, drafter).chain_logits(
                    [*text, *drafted[:-1]], len(text)
                )
                assert distributions_TK.argmax(-1).tolist() == drafted


def test_a_text_of_one_token_is_drafted_from_no_state(target: Any, round_view: Any) -> None:
    for name, options in FAMILIES:
        drafter = make_heads(target, name, num_heads=3, **options)
        state = drafter.open(Space(1, 32, 16, torch.device("cpu"), torch.float32))
        state.start(0, [4], {})
        assert state.root(round_view({0: [4]})).isfinite().all()
        if name in ("medusa", "blockwise", "dflash", "p-eagle"):
            assert state.propose(round_view({0: [4]}), Budget(8, 3)).num_nodes == 0
