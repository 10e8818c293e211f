"""Corrections of a block: one interface, and what every head behind it owes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.errors import RecipeError
from specctl.core.tree import NodeKind
from specctl.core.vocab import VocabMap
from specctl.drafters.blocks.corrected_blocks import CorrectedBlocks
from specctl.drafters.blocks.dspark import DSparkOptions
from specctl.drafters.corrections.selector import choice_loss, forced_in
from specctl.drafters.corrections.slot_conv import SlotConv
from specctl.runtime.proof.enumerate import Case, Distributions, enumerate_case
from specctl_testing.drafters.head_cases import make_heads, nearly_markov, train

SIZE, HEADS = 24, 3
CASES: list[tuple[str, dict[str, Any]]] = [
    ("dspark", {"rank": 8}),
    ("dspark", {"rank": 8, "correction": "gated"}),
    ("dspark", {"rank": 8, "correction": "rnn"}),
    ("domino", {"rank": 8, "state": 16, "base_weight": 0.5}),
    ("domino", {"rank": 8, "state": 16, "base_weight": 0.5, "recurrent": False}),
    ("dflash2", {"rank": 8, "candidates": 3}),
    ("dflash2", {"rank": 8, "candidates": 0}),
    ("xpress", {"rank": 8}),
    ("dfly", {"inner": 16, "fusion": False}),
    ("dfly", {"inner": 16}),
    ("lilicorr", {"width": 16, "factor": 16, "candidates": 8}),
]
BEGINS_AS_DFLASH = CASES[:-2]  # but for other features, and for U as a feature only
DOMINO = next(case for case in CASES if case[0] == "domino")
IDS = [
    "-".join([name, *(f"{k}={v}" for k, v in how.items() if k != "rank")]) for name, how in CASES
]
TEXT = [5, 17, 3, 8, 21, 9, 9, 12, 2]
PATH = [3, 11]


def one_text(ids: list[int]) -> TrainBatch:
    row = torch.tensor([ids])
    return TrainBatch(row, torch.ones_like(row).bool(), row * 0, torch.arange(len(ids))[None])


@pytest.fixture(scope="module")
def target(make_model: Any) -> Any:
    return nearly_markov(make_model, SIZE)


@pytest.fixture(scope="module")
def made(target: Any, make_batch: Any) -> Any:
    """Each case trained a little, once."""
    kept: dict[str, CorrectedBlocks] = {}

    def make(name: str, how: dict[str, Any]) -> CorrectedBlocks:
        key = f"{name} {how}"
        if key not in kept:
            kept[key] = make_heads(target, name, num_heads=HEADS, layers=2, anchors=64, **how)
            with torch.enable_grad():  # whatever the test that is the first to want it
                train(target, kept[key], make_batch, steps=6)
        return kept[key]

    return make


AT_ROOT = ("xpress", {"rank": 8, "before_root": False})


@pytest.mark.parametrize(("name", "how"), [*CASES, AT_ROOT], ids=[*IDS, "xpress-at-the-root"])
@torch.no_grad()
def test_forced_scores_are_those_walked_token_by_token(
    target: Any, made: Any, capture_batch: Any, drive: Any, name: str, how: dict[str, Any]
) -> None:
    """Over a text as while training, and along the same text as while drafting."""
    drafter: CorrectedBlocks = made(name, how)
    batch = capture_batch(target, drafter, one_text(TEXT))
    for known in range(2, len(TEXT) - HEADS + 2, 2):
        block = drafter.blocks(batch, torch.tensor([[known - 2]]))
        block = replace(block, base_XPK=F.linear(block.states_XPD, drafter.base_head()))
        ids_1P = torch.tensor([TEXT[known - 1 : known - 1 + HEADS]])
        forced_PK = drafter.correction.forced(block, ids_1P)[0]
        walked_PK = drive(target, drafter).chain_logits(TEXT[: known + HEADS - 1], known)
        torch.testing.assert_close(forced_PK, walked_PK, rtol=1e-4, atol=1e-4)


CHOOSING = [case for case in CASES if case[1].get("candidates")]


@pytest.mark.parametrize(("name", "how"), CHOOSING, ids=[case[0] for case in CHOOSING])
@torch.no_grad()
def test_the_acceptance_that_a_loss_reports_is_that_of_what_is_drafted(
    target: Any, made: Any, capture_batch: Any, drive: Any, monkeypatch: pytest.MonkeyPatch,
    name: str, how: dict[str, Any],
) -> None:  # fmt: skip
    """Of the candidates' distribution, not of the block's own, over rows that a draft comes to."""
    drafter: CorrectedBlocks = made(name, how)
    batch = capture_batch(target, drafter, one_text(TEXT))
    anchors = list(range(len(TEXT) - HEADS - 1))
    monkeypatch.setattr(drafter, "anchors", lambda batch: torch.tensor([anchors]))
    metrics = drafter.loss(batch).metrics
    mask = target.lm.document_masks(batch.document_BS)
    logits_BTV = target.lm.dense(batch.ids_BS, batch.position_BS, mask).logits_BTV
    p_TV = logits_BTV[0].softmax(-1)
    values: list[list[float]] = [[] for _ in range(HEADS)]
    for anchor in anchors:
        root = anchor + 1
        walked_PK = drive(target, drafter).chain_logits(TEXT[: root + HEADS], root + 1)
        for depth in range(HEADS):
            alpha = torch.minimum(p_TV[root + depth], walked_PK[depth].softmax(-1)).sum()
            values[depth].append(float(alpha))
            if name == "lilicorr" and walked_PK[depth, TEXT[root + depth + 1]] == -torch.inf:
                break  # it has nothing to say behind a token that it would not draft
    for depth, expected in enumerate(values):
        total, number = metrics["alpha" if depth == 0 else f"alpha/{depth}"]
        assert int(number) == len(expected)
        assert float(total / number) == pytest.approx(np.mean(expected), rel=1e-4)


@pytest.mark.parametrize(("name", "how"), CASES, ids=IDS)
@torch.no_grad()
def test_what_is_of_first_order_and_no_other_forgets_the_token_before_the_last(
    target: Any, made: Any, drive: Any, name: str, how: dict[str, Any]
) -> None:
    drafter = made(name, how)
    a_K, b_K = (
        drive(target, drafter).chain_logits([*TEXT, token, 11], len(TEXT))[-1] for token in (3, 19)
    )
    assert torch.equal(a_K, b_K) == drafter.correction.first_order


@pytest.fixture(scope="module")
def uncorrected(target: Any, make_batch: Any) -> Any:
    """A DFlash, or the same block whose root speaks, trained a little, once."""

    @cache
    def make(first_slot: int) -> CorrectedBlocks:
        plain, options = ("dflash", {}) if first_slot else ("dspark", {"rank": 0})
        drafter = make_heads(target, plain, num_heads=HEADS, layers=2, anchors=64, **options)
        train(target, drafter, make_batch, steps=4)
        return drafter

    return make


@pytest.mark.parametrize(("name", "how"), BEGINS_AS_DFLASH, ids=IDS[: len(BEGINS_AS_DFLASH)])
def test_a_fresh_correction_leaves_the_block_as_it_was(
    target: Any, uncorrected: Any, drive: Any, name: str, how: dict[str, Any]
) -> None:
    """With the weights of a trained DFlash, or of the same block whose root speaks."""
    drafter = make_heads(target, name, num_heads=HEADS, layers=2, **how)
    trained = uncorrected(drafter.first_slot)
    head = ("before.", "bias.", "confidence.")
    block = {n: t for n, t in trained.tensors().items() if not n.startswith(head)}
    drafter.load_tensors({**drafter.tensors(), **block})
    with torch.no_grad():
        found_PK, expected_PK = (
            drive(target, each).chain_logits([*TEXT, *PATH], len(TEXT))
            for each in (drafter, trained)
        )
    is_kept_PK = found_PK > -torch.inf
    assert (is_kept_PK.sum(-1) == (how.get("candidates") or SIZE)).all()
    assert (expected_PK[is_kept_PK].view(HEADS, -1).amax(-1) == expected_PK.amax(-1)).all()
    torch.testing.assert_close(found_PK[is_kept_PK], expected_PK[is_kept_PK], rtol=1e-4, atol=1e-4)


SMALL, TEMPERATURE, COUNT = 5, 1.3, 2
ENUMERATED = [
    (name, {**how, "candidates": COUNT} if how.get("candidates") else how)
    for name, how in CASES
    if how.get("fusion", True)
]
ENUMERATED.append(("dspark", {"rank": 8, "cascade": COUNT}))
SHAPES = [
    ("chain", NodeKind.IID, (-1, 0)),
    ("recursive", NodeKind.WITHOUT_REPLACEMENT, (-1, -1, 0)),
]


@pytest.fixture(scope="module")
def small_target(make_model: Any) -> Any:
    return nearly_markov(make_model, SMALL)


def softened(logits_NK: Tensor) -> list[np.ndarray]:
    return list((logits_NK.double() / TEMPERATURE).softmax(-1).numpy())


PROMPT = [1, 2, 3, 1]
PATHS = [path for depth in range(3) for path in product(range(SMALL), repeat=depth)]


@pytest.fixture(scope="module")
def p_of_paths(small_target: Any) -> Distributions:
    """p behind every path of up to two drafted tokens."""
    p = dict[Any, Any]()
    with torch.no_grad():
        for path in PATHS:
            batch = one_text([*PROMPT, *path])
            mask = small_target.lm.document_masks(batch.document_BS)
            out = small_target.lm.dense(batch.ids_BS, batch.position_BS, mask)
            (p[path],) = softened(out.logits_BTV[0, -1:])
    return p


@pytest.fixture(scope="module")
def q_of_paths(small_target: Any, make_batch: Any, drive: Any) -> Any:
    """q behind the same paths, of each case trained a little, once."""
    kept: dict[str, Distributions] = {}

    def made(name: str, how: dict[str, Any]) -> Distributions:
        q = kept.setdefault(f"{name} {how}", {})
        if not q:
            drafter = make_heads(small_target, name, num_heads=HEADS, layers=1, anchors=64, **how)
            train(small_target, drafter, make_batch, steps=6)
            with torch.no_grad():
                for path in PATHS:
                    drawn = drive(small_target, drafter)
                    walked_NK = drawn.chain_logits([*PROMPT, *path], len(PROMPT))
                    (q[path],) = softened(walked_NK[-1:])
        return q

    return made


@pytest.mark.parametrize(("rule", "kind", "shape"), SHAPES, ids=["chain", "tree"])
@pytest.mark.parametrize(("name", "how"), ENUMERATED, ids=[case[0] for case in ENUMERATED])
def test_what_is_drawn_from_its_scores_leaves_the_targets_distribution(
    p_of_paths: Distributions, q_of_paths: Any,
    name: str, how: dict[str, Any], rule: str, kind: NodeKind, shape: tuple[int, ...],
) -> None:  # fmt: skip
    """Every draft and every coin, enumerated; a candidate head draws from two of five tokens."""
    q = q_of_paths(name, how)
    case = Case(name, rule, kind, shape, p_of_paths, q, SMALL)
    assert enumerate_case(case).error < 1e-12
    if how.get("candidates") or how.get("cascade"):
        assert all((row > 0).sum() == COUNT for row in q.values())
        untruncated = {path: 0.9 * row + 0.1 / SMALL for path, row in q.items()}
        assert enumerate_case(case, given_q=untruncated).error > 1e-3


def test_a_correction_with_a_gate_or_a_memory_has_a_rank() -> None:
    for correction in ("gated", "rnn"):
        with pytest.raises(RecipeError, match="has a rank"):
            DSparkOptions(rank=0, correction=correction)


# -- Domino ---------------------------------------------------------------------------------------


@torch.no_grad()
def test_dominos_first_token_is_the_blocks_own(target: Any, made: Any, drive: Any) -> None:
    drafter = made(*DOMINO)
    walked_PK = drive(target, drafter).chain_logits([*TEXT, *PATH], len(TEXT))
    drafter.module.up.weight.mul_(2.0)
    doubled_PK = drive(target, drafter).chain_logits([*TEXT, *PATH], len(TEXT))
    drafter.module.up.weight.mul_(0.5)
    assert torch.equal(walked_PK[0], doubled_PK[0])
    assert not torch.allclose(walked_PK[1], doubled_PK[1])


def test_dominos_loss_goes_from_the_blocks_own_to_the_corrected_one(
    target: Any, made: Any, make_batch: Any
) -> None:
    drafter = made(*DOMINO)
    options, weight = drafter.options, drafter.module.up.weight.detach().clone()
    batch = make_batch(target, drafter)

    def loss(progress: float) -> float:
        out = drafter.loss(replace(batch, progress=progress))
        return float((out.sum / out.count).detach())

    drafter.options = replace(options, base_weight=1.0)
    first, half, last = loss(0.0), loss(0.5), loss(1.0)
    with torch.no_grad():
        drafter.module.up.weight.zero_()
    base = loss(1.0)
    with torch.no_grad():
        drafter.module.up.weight.copy_(weight)
    drafter.options = options
    assert first == pytest.approx(base, rel=1e-5)
    assert half == pytest.approx((first + last) / 2, rel=1e-5)
    assert abs(last - base) > 1e-3


# -- DFlash2 --------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_convolution_is_its_sum_over_slots_of_one_block() -> None:
    """Written out channel by channel, two blocks of three slots side by side."""
    torch.manual_seed(0)
    conv = SlotConv(width=4, num_taps=2, group=2, num_slots=3).double()
    x, normed = torch.randn(1, 6, 4).double(), torch.randn(1, 6, 4).double()
    assert torch.equal(conv(x, conv.kernel(normed), 0), x), "a fresh one changes nothing"
    for parameter in conv.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    made = (normed[0] @ conv.kernel_projection.weight.T).view(6, 2, 2, 2)
    for side in (0, 1):
        found = conv(x, conv.kernel(normed), side)[0]
        for i, channel in product(range(6), range(4)):
            expected = sum(
                float(conv.base_kernel[side, t, channel] + made[i, side, t, channel // 2])
                * float(x[0, i - t, channel])
                for t in range(min(2, i % 3 + 1))
            )
            assert float(found[i, channel]) == pytest.approx(expected, rel=1e-9)


def test_a_true_token_outside_the_candidates_takes_the_last_ones_place() -> None:
    rows_QC, label_Q = torch.tensor([[4, 2, 7], [4, 2, 7]]), torch.tensor([2, 5])
    kept_QC = forced_in(rows_QC, label_Q)
    assert kept_QC.tolist() == [[4, 2, 7], [4, 2, 5]]
    scores_QC = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    expected = F.cross_entropy(scores_QC, torch.tensor([1, 2]), reduction="none")
    torch.testing.assert_close(choice_loss(scores_QC, kept_QC, label_Q), expected)


def test_the_selector_learns_over_a_trimmed_vocabulary(target: Any, make_batch: Any) -> None:
    """Rows whose token was cut teach it nothing, and the others what they are."""
    vocab = VocabMap(torch.arange(0, SIZE, 2), SIZE)
    drafter = make_heads(
        target, "dflash2", vocab, num_heads=2, layers=1, candidates=4, rank=8, anchors=64
    )
    batch = make_batch(target, drafter)
    before = drafter.loss(batch).metrics["choice"]
    assert 0 < float(before[1]) < batch.loss_mask_BS.sum()
    train(target, drafter, make_batch, steps=12)
    after = drafter.loss(batch).metrics["choice"]
    assert float(after[0] / after[1]) < float(before[0] / before[1]) - 0.05


def test_groups_that_do_not_fill_the_width_are_refused(target: Any) -> None:
    with pytest.raises(RecipeError, match="do not fill"):
        make_heads(target, "dflash2", conv_group=7)
    with pytest.raises(RecipeError, match="do not fill"):
        make_heads(target, "lilicorr", width=16, lattice_heads=3)


# -- XPress ---------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_greedy_chain_is_the_fixed_point_of_rounds_over_the_whole_block(
    target: Any, made: Any, capture_batch: Any, drive: Any
) -> None:
    """As many rounds as slots reach it from anywhere; the paper drafts by such rounds."""
    drafter = made("xpress", {"rank": 8})
    batch = capture_batch(target, drafter, one_text(TEXT))
    anchor_11, weight_KO = torch.tensor([[len(TEXT) - 3]]), drafter.head_weights()[0]
    block, ids_1P = drafter.blocks(batch, anchor_11), torch.full((1, HEADS), TEXT[-2])
    for _ in range(HEADS):
        factors = drafter.correction.forced_factors(block, ids_1P)
        best_1P = F.linear(torch.cat([block.states_XPD, factors], -1), weight_KO).argmax(-1)
        ids_1P = torch.cat([ids_1P[:, :1], best_1P[:, :-1]], dim=1)
    path = list[int]()
    for _ in range(HEADS):
        logits_NK = drive(target, drafter).chain_logits([*TEXT[:-1], *path], len(TEXT) - 1)
        path.append(int(logits_NK[-1].argmax()))
    assert best_1P[0].tolist() == path


def test_rounds_of_its_own_drafts_are_part_of_the_loss(
    target: Any, made: Any, make_batch: Any
) -> None:
    drafter = made("xpress", {"rank": 8})
    options, batch = drafter.options, make_batch(target, drafter)
    found = {}
    for rounds, weight in ((3, 0.3), (1, 0.3), (0, 0.3), (3, 0.0)):
        drafter.options = replace(options, free_rounds=rounds, free_weight=weight)
        out = drafter.loss(batch)
        found[rounds, weight] = float((out.sum / out.count).detach())
        names = {name.split("_")[0] for name in out.metrics if name.startswith("free")}
        assert len(names) == (rounds if weight else 0)
    drafter.options = options
    assert found[0, 0.3] == found[3, 0.0] < found[1, 0.3] != found[3, 0.3]


# -- DFly -----------------------------------------------------------------------------------------


def test_every_layer_of_dfly_reads_a_mixture_of_its_own(
    target: Any, made: Any, make_batch: Any
) -> None:
    drafter = made("dfly", {"inner": 16})
    out = drafter.loss(make_batch(target, drafter))
    (grad,) = torch.autograd.grad(out.sum, [drafter.module.fusion])
    assert grad.shape == (2, len(drafter.own_taps))
    assert (grad.abs().amax(1) > 1e-6).all()


# -- LiLiCorr -------------------------------------------------------------------------------------


@torch.no_grad()
def test_behind_no_candidate_all_candidates_are_alike(target: Any, made: Any, drive: Any) -> None:
    drafter = made("lilicorr", {"width": 16, "factor": 16, "candidates": 8})
    first_K = drive(target, drafter).chain_logits(TEXT, len(TEXT))[-1]
    inside, outside = int(first_K.argmax()), int(first_K.argmin())
    assert first_K[outside] == -torch.inf
    for token, is_alike in ((inside, False), (outside, True)):
        next_K = drive(target, drafter).chain_logits([*TEXT, token], len(TEXT))[-1]
        kept_C = next_K[next_K > -torch.inf]
        assert len(kept_C) == 8
        assert bool((kept_C == kept_C[0]).all()) == is_alike


def test_the_lattice_learns_up_to_the_first_true_token_that_is_no_candidate(
    target: Any, made: Any, make_batch: Any
) -> None:
    """And from blocks alone of which every token is to be predicted, by default."""
    drafter = made("lilicorr", {"width": 16, "factor": 16, "candidates": 8})
    options, batch = drafter.options, make_batch(target, drafter)
    every_BA = torch.arange(batch.ids_BS.shape[1]).expand_as(batch.ids_BS)
    taught = {}
    for whole in (True, False):
        drafter.options = replace(options, whole_blocks=whole)
        block = drafter.blocks(batch, every_BA)
        _, rows_XPC, taught_XP, _ = drafter._linked(batch, every_BA, block, drafter.base_head())
        taught[whole] = taught_XP
        true = [F.pad(batch.ids_BS, (0, HEADS + 1))[:, 2 + i :][:, : batch.ids_BS.shape[1]]
                for i in range(HEADS)]  # fmt: skip
        true_XP = torch.stack(true, 2).flatten(0, 1)
        for x in range(0, len(true_XP), 7):
            expected = True
            for k in range(HEADS):
                expected = expected and int(true_XP[x, k]) in rows_XPC[x, k].tolist()
                if not whole:
                    assert bool(taught_XP[x, k]) == expected
    drafter.options = options
    assert (taught[True] <= taught[False]).all()
    assert taught[True].sum() < taught[False].sum()


def test_the_lattices_terms_are_those_of_the_paper(target: Any) -> None:
    weights = {"choice_weight": 0.125, "margin_weight": 0.5, "penalty_weight": 0.25}
    drafter = make_heads(target, "lilicorr", width=16, factor=16, **weights)
    z, regret = torch.tensor([1.0, 3.0, 2.0]), torch.tensor([0.0, 0.4, 1.5])
    is_true = torch.tensor([[False, True, False]])
    q = z.softmax(-1)
    expected = -0.125 * q[1].log() + 0.5 * (2.0 - (3.0 - 2.0)) + 0.25 * (q * regret).sum()
    found = drafter._terms(z[None], is_true, regret[None])
    assert float(found) == pytest.approx(float(expected), rel=1e-6)
